"""A constant number of live streams against a coordinator, from processes of their own.

Owns the client's side of a measurement: slots that each hold one stream and open the next when it
ends, the clock at every message, and which requests are traced. Load processes share no interpreter
with the coordinator or with each other. Computes nothing: `specmesh/bench/windows.py` does.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import grpc

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc
from specmesh import event_loop
from specmesh.errors import NotReady
from specmesh.randomness import philox
from specmesh.request import GenerateOptions
from specmesh.rpc import RpcLimits, create_channel
from specmesh.wire_errors import error_from_rpc

MAX_STREAMS_PER_PROCESS = 16  # Python's gRPC reads about 10,000 messages a second
START_ALLOWANCE_S = 0.2  # from handing out the work to the first request
PROCESS_START_TIMEOUT_S = 60.0
END_ALLOWANCE_S = 30.0  # beyond the window, after which a load process gives up


@dataclass(frozen=True, slots=True)
class Load:
    """What the streams do. Times in seconds.

    prompts: token ids; slot i begins with prompt first_prompt + i, and requests go round. The first
    request of each slot is cut short by its share, so that later ones do not all begin and end
    together; with holds, each slot has one stream, meant to outlast the window, so that decoding
    alone is measured. trace_every: of the requests, every how many is traced; key: tells traces of
    one run apart.
    """

    address: str
    prompts: Sequence[Sequence[int]]
    options: GenerateOptions
    num_streams: int
    warm_up_s: float
    window_s: float
    first_prompt: int = 0
    trace_every: int = 4
    key: int = 0
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a load: slots first, first + step, ... and the common clock."""

    load: Load
    first: int
    step: int
    starts_at: float


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times: `time.monotonic()`, which processes share.

    messages: (time, tokens) of every message with tokens. stats: None while it had not finished.
    """

    slot: int
    trace_id: str | None
    sent_s: float
    messages: list[tuple[float, int]] = field(default_factory=list)
    finished_s: float | None = None
    stats: bytes | None = None

    def speculation(self) -> pb.SpeculationStats | None:
        """What the coordinator counted; None while the request had not finished."""
        return None if self.stats is None else pb.SpeculationStats.FromString(self.stats)


@dataclass(slots=True)
class Observed:
    """Everything the clients saw of one load. The window is [begins_s, ends_s)."""

    num_streams: int
    begins_s: float
    ends_s: float
    streams: list[Stream]


class StreamsNotLive(NotReady):
    """A stream had no token when the window began: nothing was measured."""


class LoadProcesses:
    """Processes that make load. Started once, used for every case; as a context manager."""

    def __init__(self, max_streams: int) -> None:
        """Enough processes for `max_streams`. Starts them and waits until they can work."""
        self._count = -(-max_streams // MAX_STREAMS_PER_PROCESS)
        context = multiprocessing.get_context("spawn")
        self._all_started = context.Barrier(self._count + 1)
        self._pool = ProcessPoolExecutor(
            self._count,
            mp_context=context,
            initializer=_wait_for_all,
            initargs=(self._all_started,),
        )

    def __enter__(self) -> Self:
        """Start the processes: their imports are no part of any measurement. Raises NotReady."""
        for _ in range(self._count):
            self._pool.submit(time.monotonic)
        try:
            _wait_for_all(self._all_started)
        except threading.BrokenBarrierError as missing:
            raise NotReady(f"{self._count} load processes did not start") from missing
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes; a load in progress is bounded by its own time."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, load: Load) -> Observed:
        """Run one load; blocks for its warm-up and window.

        Raises StreamsNotLive where a stream had no token before the window began, SpecmeshError
        for a request that failed.
        """
        processes = min(self._count, -(-load.num_streams // MAX_STREAMS_PER_PROCESS))
        starts_at = time.monotonic() + START_ALLOWANCE_S
        shares = [Share(load, first, processes, starts_at) for first in range(processes)]
        parts = [part.result() for part in [self._pool.submit(run_share, each) for each in shares]]
        begins_s = starts_at + load.warm_up_s
        streams = [stream for part in parts for stream in part]
        _check_live(load, begins_s, streams)
        return Observed(load.num_streams, begins_s, begins_s + load.window_s, streams)


def _wait_for_all(started: Any) -> None:
    started.wait(PROCESS_START_TIMEOUT_S)


def _check_live(load: Load, begins_s: float, streams: Sequence[Stream]) -> None:
    live = {
        stream.slot for stream in streams if stream.messages and stream.messages[0][0] < begins_s
    }
    if len(live) < load.num_streams:
        raise StreamsNotLive(
            f"{load.num_streams - len(live)} of {load.num_streams} streams had no token after "
            f"{load.warm_up_s:g} s: give a longer warm-up"
        )


def run_share(share: Share) -> list[Stream]:
    """Make one process's part of a load. Raises SpecmeshError."""
    gc.collect()
    gc.disable()  # a collection would be a latency of nobody's
    try:
        return event_loop.run(_run_share(share))
    finally:
        gc.enable()


async def _run_share(share: Share) -> list[Stream]:
    load = share.load
    ends_s = share.starts_at + load.warm_up_s + load.window_s
    streams: list[Stream] = []
    async with create_channel(load.address, RpcLimits()) as channel:
        make_stub: Any = generation_pb2_grpc.GenerationServiceStub  # generated, untyped
        stub = make_stub(channel)
        await asyncio.sleep(max(0.0, share.starts_at - time.monotonic()))
        slots = range(share.first, load.num_streams, share.step)
        tasks = [asyncio.create_task(_slot(stub, load, slot, ends_s, streams)) for slot in slots]
        try:
            async with asyncio.timeout(ends_s - time.monotonic() + END_ALLOWANCE_S):
                await asyncio.gather(*tasks)
        except TimeoutError as late:
            raise NotReady("streams did not end with the window") from late
        finally:
            for task in tasks:
                task.cancel()
    return streams


async def _slot(stub: Any, load: Load, slot: int, ends_s: float, streams: list[Stream]) -> None:
    """Hold one stream after another until the window is over."""
    for turn in itertools.count():
        if time.monotonic() >= ends_s:
            return
        number = slot + turn * load.num_streams
        options = load.options
        if turn == 0 and options.max_tokens is not None and not load.holds:
            share = (slot + 1) / load.num_streams
            options = replace(options, max_tokens=max(2, round(options.max_tokens * share)))
        request = options.request(
            list(load.prompts[(load.first_prompt + number) % len(load.prompts)])
        )
        traced = number % load.trace_every == 0
        trace_id, parent = trace_parent(load.key, number, sampled=traced)
        stream = Stream(slot, trace_id if traced else None, time.monotonic())
        streams.append(stream)
        call = stub.Generate(request, metadata=(("traceparent", parent),))
        if await _is_over(call, stream, ends_s):
            return


async def _is_over(call: Any, stream: Stream, ends_s: float) -> bool:
    """Read a stream to its end; whether the window's end came first. A timer may ring a little
    before its time: the clock alone would let the slot open one more stream."""
    try:
        async with asyncio.timeout(max(0.0, ends_s - time.monotonic())):
            async for response in call:
                now = time.monotonic()
                if response.HasField("chunk"):
                    if response.chunk.token_ids:
                        stream.messages.append((now, len(response.chunk.token_ids)))
                elif response.HasField("finished"):
                    stream.stats = response.finished.speculation.SerializeToString()
                    stream.finished_s = now
    except TimeoutError:
        call.cancel()
        return True
    except grpc.aio.AioRpcError as failed:
        raise error_from_rpc(failed) from failed
    return False


def trace_parent(key: int, number: int, *, sampled: bool) -> tuple[str, str]:
    """(trace id, W3C traceparent) of request `number`; the flag decides whether it is traced."""
    words = philox(key, (number, 0, 0, 1))
    trace_id = "".join(f"{word:08x}" for word in words[:4])
    return trace_id, f"00-{trace_id}-{trace_id[:16]}-{'01' if sampled else '00'}"


def messages_in(observed: Observed) -> Iterator[tuple[Stream, float, float, int]]:
    """(stream, time of the message before, time, tokens) of later messages, both in the window.

    The first message of a stream is none: its wait is the time to the first token.
    """
    for stream in observed.streams:
        for (before_s, _), (now_s, tokens) in itertools.pairwise(stream.messages):
            if observed.begins_s <= before_s and now_s < observed.ends_s:
                yield stream, before_s, now_s, tokens
