"""A coordinator with a scripted answer and scripted losses, on a real port in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc, session_pb2
from specmesh.errors import NotReady, SpecmeshError
from specmesh.rpc import READINESS, Health, RpcLimits, bind, create_server

ROUNDS = ((11,), (12, 13), (14, 15, 16), (17,), (18, 19))
DRAWN_SEED = 0xFEDC_BA98_7654_3210


@dataclass
class Script:
    """What the coordinator does. `losses[i]`: messages that attempt i sends before it is lost.

    An attempt without an entry runs to its end. `refusals[i]` is raised at once in attempt i. A
    loss ends with NotReady, or with `bare_status` alone as where gRPC itself ends the call.
    """

    rounds: Sequence[Sequence[int]] = ROUNDS
    losses: dict[int, int] = field(default_factory=dict)
    refusals: dict[int, SpecmeshError] = field(default_factory=dict)
    prompt_tokens: Sequence[int] = (5,)  # by attempt; the last one repeats
    hang: bool = False
    bare_status: grpc.StatusCode | None = None
    text: str = ""  # of every round; empty: its ids in brackets
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


class _Servicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        script = self._script
        attempt = len(script.requests)
        script.requests.append(request)
        script.metadata.append(dict(context.invocation_metadata()))
        if attempt in script.refusals:
            raise script.refusals[attempt]
        budget = script.losses.get(attempt)
        try:
            for sent, response in enumerate(self._answer(request, attempt)):
                if sent == budget:
                    if script.bare_status is not None:
                        await context.abort(script.bare_status)
                    raise NotReady("scripted loss")
                yield response
            if script.hang:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):  # the latter: while a message was sent
            script.cancelled.set()
            raise

    def _answer(self, request: pb.GenerateRequest, attempt: int) -> Iterator[pb.GenerateResponse]:
        script = self._script
        prompt_tokens = script.prompt_tokens[min(attempt, len(script.prompt_tokens) - 1)]
        yield pb.GenerateResponse(
            started=pb.Started(
                request_id=f"req-{attempt}",
                seed=request.seed if request.HasField("seed") else DRAWN_SEED,
                model="scripted",
                rule=request.rule or session_pb2.DECISION_RULE_RESIDUAL,
                decide_at=request.decide_at or session_pb2.DECIDE_AT_TARGET,
                prompt_tokens=prompt_tokens,
                max_tokens=request.max_tokens or 64,
                trace_id="ab" * 16,
            )
        )
        num_samples = request.n or 1
        for index, ids in enumerate(script.rounds):
            for sample in range(num_samples):
                if index < request.resume_round:
                    continue
                text = script.text or "".join(f"<{token_id}>" for token_id in ids)
                chunk = pb.Chunk(index=sample, token_ids=ids, text=text, round=index)
                yield pb.GenerateResponse(chunk=chunk)
        if script.hang:
            return
        for sample in range(num_samples):
            finished = pb.Finished(
                index=sample,
                reason=pb.FINISH_REASON_STOP,
                usage=pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=9),
                speculation=pb.SpeculationStats(
                    num_rounds=5,
                    num_draft_tokens=8,
                    num_accepted=4,
                    judged_per_position=[4, 2],
                    accepted_per_position=[3, 1],
                ),
            )
            yield pb.GenerateResponse(finished=finished)

    async def GetInfo(
        self, request: pb.GenerationServiceGetInfoRequest, context: Any
    ) -> pb.GenerationServiceGetInfoResponse:
        return pb.GenerationServiceGetInfoResponse(
            target=session_pb2.ModelInfo(model="scripted", vocab_size=32, device="cpu"),
            version="1.2.3",
            max_running=4,
        )


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Serve the script; yields host:port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Any, int]:
        server = create_server(RpcLimits())
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(_Servicer(script), server)
        health = Health(("specmesh.v1.GenerationService", READINESS))
        await health.attach(server)
        await health.set_ready(ready=True)
        port = bind(server, "127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
