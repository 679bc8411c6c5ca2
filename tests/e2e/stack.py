"""A whole stack in this process: fake-model services and a real coordinator over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.replica import CoordinatorReplica
from protos.specmesh.v1 import session_pb2
from specmesh.client import AsyncClient
from specmesh.config import CoordinatorSettings, LinkSettings, ServerSettings
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.round_record import RoundRecord
from tests.rpc import peers
from tests.rpc.fake_model import PrefixDecoder

VOCAB_SIZE = 16
END_ID = 15


class LetterTokenizer:
    """Token i prints the letter at its place of the alphabet; the last one ends an answer."""

    vocab_hash = peers.VOCAB_HASH
    eos_ids = (END_ID,)
    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        return [(ord(letter) - ord("a")) % VOCAB_SIZE for letter in text]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return b"" if skip_special and token_id == END_ID else bytes([ord("a") + token_id])


def model_info(service: peers.Service, device_id: str, **changes: Any) -> session_pb2.ModelInfo:
    """What a service with a fake model says of itself."""
    fields: dict[str, Any] = {
        "model": service.side,
        "fingerprint": service.decoder.fingerprint,  # type: ignore[attr-defined]  # a fake
        "vocab_size": VOCAB_SIZE,
        "vocab_hash": peers.VOCAB_HASH,
        "eos_token_ids": [END_ID],
        "max_context_len": 256,
        "max_sessions": 64,
        "max_num_draft_tokens": 8,
        "device_id": device_id,
    }
    return session_pb2.ModelInfo(**{**fields, **changes})


@dataclass
class Stack:
    """Everything that runs."""

    targets: list[peers.Service]
    drafts: list[peers.Service]
    replica: CoordinatorReplica
    client: AsyncClient

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.replica.port}"

    async def all_pages_free(self) -> None:
        """Wait until no service holds a session; a stack that leaks never gets there."""
        async with asyncio.timeout(10):
            for service in (*self.targets, *self.drafts):
                while service.engine.load().num_sessions:
                    await asyncio.sleep(0.01)


def settings_of(
    targets: Sequence[peers.Service], drafts: Sequence[peers.Service], **changes: Any
) -> CoordinatorSettings:
    """Settings for services of this process: quick to reconnect."""
    fields: dict[str, Any] = {
        "server": ServerSettings(drain_grace_s=5.0),
        "targets": [service.address for service in targets],
        "drafts": [service.address for service in drafts],
        "tokenizer": Path("unused"),
        "links": LinkSettings(reconnect_initial_s=0.02, reconnect_max_s=0.1, connect_timeout_s=5.0),
    }
    return CoordinatorSettings(**{**fields, **changes})


@asynccontextmanager
async def running_stack(
    *,
    num_targets: int = 1,
    num_drafts: int = 1,
    draft_seed: int = 1,
    setup: peers.Setup | None = None,
    draft_setup: peers.Setup | None = None,
    **changes: Any,
) -> AsyncIterator[Stack]:
    """Targets share one model; the drafts' model differs from it unless draft_seed is 0."""
    async with AsyncExitStack() as exits:
        services: dict[str, list[peers.Service]] = {"target": [], "draft": []}
        sides = (
            ("target", num_targets, 0, setup),
            ("draft", num_drafts, draft_seed, draft_setup or setup),
        )
        for side, count, seed, own in sides:
            for index in range(count):
                decoder = PrefixDecoder(VOCAB_SIZE, seed=seed)
                service = await exits.enter_async_context(peers.running(side, decoder, own))
                info = model_info(service, f"{side}-{index}")
                info.max_message_bytes = (own or peers.Setup()).max_message_bytes
                service.state.set_ready(info, service.links)
                services[side].append(service)
        settings = settings_of(services["target"], services["draft"], **changes)
        replica = CoordinatorReplica(settings, LetterTokenizer())  # type: ignore[arg-type]  # a fake
        await replica.start()
        exits.push_async_callback(replica.stop)
        client = await exits.enter_async_context(AsyncClient(f"127.0.0.1:{replica.port}"))
        yield Stack(services["target"], services["draft"], replica, client)


def recorded_rounds(monkeypatch: pytest.MonkeyPatch) -> list[RoundRecord]:
    """Records of all rounds from now on, as coordinators of this process count them."""
    records: list[RoundRecord] = []
    observe = CoordinatorMetrics.observe_round

    def observing(metrics: CoordinatorMetrics, record: RoundRecord) -> tuple[str, ...]:
        records.append(record)
        return observe(metrics, record)

    monkeypatch.setattr(CoordinatorMetrics, "observe_round", observing)
    return records
