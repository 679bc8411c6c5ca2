"""What a round's messages cost where nothing else is done: `python -m specmesh.bench.link_floor`.

Two bare gRPC servers stand for draft and target, each a process of its own: one stream each, on
the loop and with the options of the services. A round is a small message and an answer with rows,
then a message with the same rows and a small answer; each server holds its answer for as long as a
device would take. A round less what the servers held is the least that coordinator and gRPC can
take, which `overhead` of `specmesh bench-stack` is to be compared with: once with plain bytes, once
with the product's frames, parsed and written as it does. With --busy-poll-ms the loops poll, as
those of services and coordinator do on GPU hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np

from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh.bench.measure import Series, series, versions
from specmesh.event_loop import StayAwake, run
from specmesh.rpc import RpcLimits, bind, create_channel, create_server
from specmesh.wire import sparse_frame

METHOD = "/specmesh.bench.Floor/Link"
VOCAB_SIZE = 49_152
HELD = struct.Struct("<Q")  # nanoseconds that a server held an answer, at the answer's end
START_S = 60.0


def rows(num_ids: int, num_rows: int) -> list[session_pb2.Distribution]:
    """Sparse rows of as many ids, as a draft sends them."""
    ids = np.arange(num_ids, dtype=np.int32) * 7
    weights = np.linspace(1.0, 2.0, num_ids, dtype=np.float32)
    return [sparse_frame(ids, weights, VOCAB_SIZE, is_half=True) for _ in range(num_rows)]


class Frames:
    """The four messages of a round, and how they are parsed, as the services' generated code does.

    num_ids: of each of num_rows rows.
    """

    def __init__(self, num_ids: int, num_rows: int) -> None:
        self._rows = rows(num_ids, num_rows)
        self._tokens = list(range(num_rows))
        prefix = session_pb2.PrefixUpdate(base_len=300, append=[5, 6], prefix_digest=2**63)
        self._propose = draft_pb2.Propose(prefix=prefix, num_draft_tokens=num_rows)
        self._prefix = prefix

    def propose(self) -> bytes:
        """The coordinator's frame to the draft."""
        command = draft_pb2.DraftCommand(session_id="s" * 32, round=7, propose=self._propose)
        return draft_pb2.DraftServiceLinkRequest(commands=[command]).SerializeToString()

    def proposal(self, request: bytes) -> bytes:
        """The draft's answer."""
        draft_pb2.DraftServiceLinkRequest.FromString(request)
        proposal = draft_pb2.Proposal(tokens=self._tokens, distributions=self._rows)
        result = draft_pb2.DraftResult(session_id="s" * 32, round=7, proposal=proposal)
        return draft_pb2.DraftServiceLinkResponse(results=[result]).SerializeToString()

    def verify(self, answer: bytes) -> bytes:
        """The coordinator's frame to the target: the rows as they came."""
        result = draft_pb2.DraftServiceLinkResponse.FromString(answer).results[0]
        verify = target_pb2.Verify(
            prefix=self._prefix,
            candidates=result.proposal.tokens,
            distributions=result.proposal.distributions,
        )
        command = target_pb2.TargetCommand(session_id="s" * 32, round=7, verify=verify)
        return target_pb2.TargetServiceLinkRequest(commands=[command]).SerializeToString()

    def verdict(self, request: bytes) -> bytes:
        """The target's answer."""
        target_pb2.TargetServiceLinkRequest.FromString(request)
        verdict = target_pb2.Verdict(num_accepted=2, tokens=self._tokens[:3])
        result = target_pb2.TargetResult(session_id="s" * 32, round=7, verdict=verdict)
        return target_pb2.TargetServiceLinkResponse(results=[result]).SerializeToString()


class Bytes:
    """Messages of the same sizes that nobody looks into."""

    def __init__(self, frames: Frames) -> None:
        self._propose = frames.propose()
        self._proposal = frames.proposal(self._propose)
        self._verify = frames.verify(self._proposal)
        self._verdict = frames.verdict(self._verify)

    def propose(self) -> bytes:
        """As large as the coordinator's frame to the draft."""
        return self._propose

    def proposal(self, _request: bytes) -> bytes:
        """As large as the draft's answer."""
        return self._proposal

    def verify(self, _answer: bytes) -> bytes:
        """As large as the coordinator's frame to the target."""
        return self._verify

    def verdict(self, _request: bytes) -> bytes:
        """As large as the target's answer."""
        return self._verdict


async def serve(answer: Callable[[bytes], bytes], hold_s: float, awake_s: float) -> None:
    """Answer every message of every stream, each hold_s after it came; print the port first."""
    awake = StayAwake(asyncio.get_running_loop(), awake_s)

    async def link(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            came_ns = time.perf_counter_ns()
            if awake_s:
                awake.touch()
            answered = answer(request)
            work_ns = time.perf_counter_ns() - came_ns  # ours: the product's takes as long
            await asyncio.sleep(hold_s)
            yield answered + HELD.pack(time.perf_counter_ns() - came_ns - work_ns)

    server = create_server(RpcLimits())
    handler = grpc.stream_stream_rpc_method_handler(link)
    service, _, method = METHOD[1:].partition("/")
    generic = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((generic,))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent ends
    await server.stop(None)


async def measure(
    ports: Sequence[int], messages: Frames | Bytes, num_rounds: int, awake_s: float
) -> list[float]:
    """Milliseconds of each round less what the servers held. ports: draft's, target's."""
    awake = StayAwake(asyncio.get_running_loop(), awake_s)
    channels = [create_channel(f"127.0.0.1:{port}", RpcLimits()) for port in ports]
    links: list[Any] = [channel.stream_stream for channel in channels]  # bytes as they are
    draft, target = [link(METHOD)() for link in links]

    async def ask(call: Any, message: bytes) -> tuple[bytes, int]:
        if awake_s:
            awake.touch()
        await call.write(message)
        answer: bytes = await call.read()
        return answer[: -HELD.size], HELD.unpack(answer[-HELD.size :])[0]

    found = []
    for _ in range(num_rounds + num_rounds // 10):
        began_ns = time.perf_counter_ns()
        answer, held_ns = await ask(draft, messages.propose())
        _, also_held_ns = await ask(target, messages.verify(answer))
        took_ns = time.perf_counter_ns() - began_ns
        found.append((took_ns - held_ns - also_held_ns) / 1e6)
    for channel in channels:
        await channel.close(None)
    return found[num_rounds // 10 :]  # the first ones warm up


async def _start(what: str, side: str, hold_ms: float, asked: argparse.Namespace) -> Any:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specmesh.bench.link_floor", "--serve", f"{what} {side}",
        "--hold-ms", str(hold_ms), "--busy-poll-ms", str(asked.busy_poll_ms),
        "--ids", str(asked.ids), "-k", str(asked.num_draft_tokens),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _case(what: str, asked: argparse.Namespace) -> Series:
    frames = Frames(asked.ids, asked.num_draft_tokens)
    holds_ms = {"draft": asked.draft_ms, "target": asked.target_ms}
    processes = [await _start(what, side, hold, asked) for side, hold in holds_ms.items()]
    try:
        async with asyncio.timeout(START_S):
            ports = [int(await process.stdout.readline()) for process in processes]
        messages = frames if what == "frames" else Bytes(frames)
        values = await measure(ports, messages, asked.rounds, asked.busy_poll_ms * 1e-3)
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            await process.wait()
    return series(f"link-floor-{what}", "ms", values)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m specmesh.bench.link_floor")
    parser.add_argument("--rounds", type=int, default=300, help="rounds of each case")
    parser.add_argument("--ids", type=int, default=1024, help="ids of a row")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4, help="rows a round")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="what the draft holds")
    parser.add_argument("--target-ms", type=float, default=4.5, help="what the target holds")
    parser.add_argument("--busy-poll-ms", type=float, default=0.0, help="loops poll for so long")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--hold-ms", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Print one JSON object a case. Returns the exit status."""
    asked = _parsed(argv)
    if asked.serve:
        what, side = asked.serve.split()
        frames = Frames(asked.ids, asked.num_draft_tokens)
        messages = frames if what == "frames" else Bytes(frames)
        answer = messages.proposal if side == "draft" else messages.verdict
        run(serve(answer, asked.hold_ms * 1e-3, asked.busy_poll_ms * 1e-3))
        return 0
    command = " ".join(("python -m specmesh.bench.link_floor", *argv))
    for what in ("bytes", "frames"):
        record = run(_case(what, asked)).record()
        line = record | {"command": command, "versions": versions()}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
