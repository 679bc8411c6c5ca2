"""Frames of links, at both services: what a hostile coordinator could write.

The production engine runs here without its thread, so that a frame is served, and followed, before
the next. Beside the hostile link a bystander has a session: nothing of it may change, and what it
is answered afterwards must be what it would have been answered anyway.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from google.protobuf.message import DecodeError

from draft_service.proposer import Proposer
from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh import wire
from specmesh.config import TelemetrySettings
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.commands import Observers
from specmesh.engine.executor import Device
from specmesh.engine.runner import Engine, EngineOptions, system_clocks
from specmesh.engine.sessions import Limits
from specmesh.engine.waits import block_on
from specmesh.service_metrics import ServiceMetrics
from specmesh.telemetry import Telemetry
from target_service.candidates import RedrawCheck
from target_service.verifier import Verifier, VerifierOptions
from tests.fuzz.fuzzer import Refused
from tests.fuzz.mutations import mutated_message
from tests.rpc.fake_model import PrefixCache, PrefixDecoder
from tests.rpc.peers import COUPLED, VOCAB_HASH, Script

VOCAB_SIZE = 16
NUM_PAGES, PAGE_SIZE = 64, 4
MAX_TURNS = 600  # no frame gives more work than its commands' steps
FRAMES_PER_INPUT = 3


class _Link:
    """Takes what the engine posts."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.results: list[Any] = []

    def post(self, results: list[Any]) -> None:
        """Keep the results."""
        self.results += results

    def post_end(self) -> None:
        """Nothing follows."""


class LinkTarget:
    """One service's end of a link. The input is one frame."""

    def __init__(self, side: str) -> None:
        self.name = f"{side} link"
        self._side = side
        is_draft = side == "draft"
        self._kind: Any = (
            draft_pb2.DraftServiceLinkRequest if is_draft else target_pb2.TargetServiceLinkRequest
        )
        self._pool = BlockPool(NUM_PAGES, PAGE_SIZE)
        self._metrics = ServiceMetrics(side)
        clock_ns, offset_ns = system_clocks()
        decoder: Any = PrefixDecoder(VOCAB_SIZE)
        cache: Any = PrefixCache(NUM_PAGES, PAGE_SIZE)
        role: Any = Proposer(max_num_draft_tokens=8)
        if not is_draft:
            options = VerifierOptions(VOCAB_SIZE, 8, max_message_bytes=1 << 20)
            check = RedrawCheck(1.0, self._metrics.redraw_mismatches.inc)
            role = Verifier(options, check)
        self._engine = Engine(
            Device(decoder, cache, self._pool),
            role,
            Limits(VOCAB_SIZE, VOCAB_HASH, 128, 8, NUM_PAGES, PAGE_SIZE),
            EngineOptions(max_waiting_commands=64),
            Observers(
                Telemetry(side, TelemetrySettings(), "fuzz"), self._metrics, clock_ns, offset_ns
            ),
        )
        self._bystander = _Link("bystander")
        self._other = Script(side, "s", [3, 1, 4, 1, 5], rule=COUPLED, max_len=1 << 6)
        self._count = 0
        self._ask_bystander()

    def _serve(self) -> None:
        engine = self._engine
        for _ in range(MAX_TURNS):
            engine._read_inbox()
            ran = block_on(engine._turn())
            engine._flush()
            if not ran and engine._inbox.empty():
                return
        raise AssertionError(f"a frame gives work for more than {MAX_TURNS} passes")

    def _send(self, link: Any, *commands: Any) -> list[Any]:
        before = len(link.results)
        if not self._engine.submit(link, commands):
            return []
        self._serve()
        return list(link.results[before:])

    def _ask_bystander(self) -> None:
        """Open anew, and draw the tokens that follow the prompt."""
        script = Script(
            self._side, "s", [3, 1, 4, 1, 5], rule=COUPLED, max_len=64, epoch=self._count + 1
        )
        opened, *answers = (
            *self._send(self._bystander, script.open()),
            *self._send(
                self._bystander,
                script.propose(3) if self._side == "draft" else script.verify(steps=3),
            ),
        )
        assert opened.HasField("opened"), opened
        found = [
            token
            for each in answers
            for token in (each.proposal if self._side == "draft" else each.verdict).tokens
        ]
        if self._count == 0:
            self._wanted = found
        assert found == self._wanted, (found, self._wanted)
        self._count += 1

    def _state(self) -> str:
        """Everything of the bystander's session that a command moves."""
        sessions = [each for each in self._engine._table if each.link is self._bystander]
        return repr(
            [(each.session_id, each.epoch, each.ledger, each.answered) for each in sessions]
        )

    def seeds(self) -> Sequence[bytes]:
        """An opening with a first command, and one of every later command."""
        script = Script(self._side, "s", [3, 1, 4, 1, 5], max_len=64)
        commands = [script.open()]
        if self._side == "draft":
            commands += [script.propose(2), script.close()]
        else:
            commands.append(script.verify(steps=2))
            row = wire.Row(VOCAB_SIZE, torch.linspace(1.0, 2.0, VOCAB_SIZE), None, wire.DENSE_F32)
            script.tokens = [*script.tokens, 1, 2]
            commands.append(script.verify([3], [wire.encode(row)], append_from=5))
            commands.append(script.verify(decide_at=session_pb2.DECIDE_AT_COORDINATOR))
        whole = self._kind(commands=commands)
        ended = self._kind(commands=[*commands[:2], script.close()])
        return [whole.SerializeToString(), ended.SerializeToString()]

    def check(self, content: bytes) -> None:
        """Serve the frame on a link of its own; then nothing of it is left."""
        try:
            frame = self._kind.FromString(content)
        except DecodeError as refusal:
            raise Refused from refusal
        before, num_used = self._state(), self._pool.num_used
        link = _Link("hostile")
        for _ in range(FRAMES_PER_INPUT):  # repeats, too
            results = self._send(link, *frame.commands)
            assert len(self._engine._table) <= self._engine.limits.max_sessions
        num_commands = len(frame.commands)
        assert len(link.results) >= num_commands or num_commands > 256, "commands went unanswered"
        for result in results:
            assert result.WhichOneof("result"), result
            if result.HasField("error"):
                bug = result.error.reason == "INTERNAL"
                assert not bug, f"a bug answered a hostile command: {result.error}"
        assert self._state() == before, "a hostile link changed a bystander's session"
        self._engine.end_link(link)
        self._serve()
        assert self._pool.num_used == num_used, "pages stayed behind"
        self._ask_bystander()

    def mutated(self, rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        """A changed frame."""
        return mutated_message(rng, self._kind, content, others)
