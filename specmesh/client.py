"""The Python client: streams generations, and resumes them when a coordinator is lost.

Owns calls, deadlines, retries and the two faces (`AsyncClient`, `Client`). What a resumed request
says is decided in `specmesh/resume.py`; errors come back as the classes of `specmesh/errors.py`.
Knows nothing of drafts, rounds or models beyond the public contract
(`protos/specmesh/v1/generation.proto`).

    with Client("127.0.0.1:50051") as client:
        for event in client.stream("Why is the sky blue?", GenerateOptions(temperature=0.7)):
            if isinstance(event, Chunk):
                print(event.text, end="")
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc, session_pb2
from specmesh.errors import Cancelled, DeadlineExceeded, InvalidRequest, NotReady, SpecmeshError
from specmesh.event_loop import LoopThread
from specmesh.request import ChatTurn, GenerateOptions, Prompt
from specmesh.resume import Resumption
from specmesh.rpc import RpcLimits, create_channel
from specmesh.wire_errors import error_from_rpc

__all__ = [
    "AsyncClient",
    "ChatTurn",
    "Chunk",
    "Client",
    "Event",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Prompt",
    "RetryPolicy",
    "Started",
]

Started: TypeAlias = pb.Started
Chunk: TypeAlias = pb.Chunk
Finished: TypeAlias = pb.Finished
Event: TypeAlias = pb.Started | pb.Chunk | pb.Finished

T = TypeVar("T")

MAX_TIMEOUT_S = 1e8  # three years: what is beyond, infinity too, is no bound
CANCEL_WAIT_S = 5.0  # a cancelled call ends in milliseconds; never hang on one that does not


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of trying again. Only errors whose class says `retryable` are.

    max_attempts counts attempts in a row that brought nothing new: progress starts the count again,
    and the request's own deadline bounds the whole. Waits double from initial_backoff_s to
    max_backoff_s, of which a random half is taken off so that clients do not return in step.
    """

    max_attempts: int = 5
    initial_backoff_s: float = 0.2
    max_backoff_s: float = 5.0

    def wait_s(self, failures: int, retry_after_s: float) -> float:
        """Wait before the next attempt after `failures` >= 1 in a row, in seconds."""
        backoff = min(self.max_backoff_s, self.initial_backoff_s * 2 ** (failures - 1))
        return float(max(retry_after_s, backoff * (0.5 + secrets.randbelow(1000) / 2000)))


@dataclass(slots=True)
class Generation:
    """A finished request: per sample, text, ids, log-probabilities and how it ended."""

    started: pb.Started
    texts: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[session_pb2.TokenLogprobs]]
    finished: list[pb.Finished]

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.texts[0]


@dataclass(slots=True)
class _Collector:
    started: pb.Started | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[session_pb2.TokenLogprobs]] = field(default_factory=dict)
    finished: dict[int, pb.Finished] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        if isinstance(event, pb.Started):
            self.started = event
        elif isinstance(event, pb.Chunk):
            self.texts.setdefault(event.index, []).append(event.text)
            self.token_ids.setdefault(event.index, []).extend(event.token_ids)
            self.logprobs.setdefault(event.index, []).extend(event.logprobs)
        else:
            self.finished[event.index] = event

    def result(self) -> Generation:
        assert self.started is not None, "a stream that ends without error has started"
        indices = range(len(self.finished))
        return Generation(
            started=self.started,
            texts=["".join(self.texts.get(i, [])) for i in indices],
            token_ids=[self.token_ids.get(i, []) for i in indices],
            logprobs=[self.logprobs.get(i, []) for i in indices],
            finished=[self.finished[i] for i in indices],
        )


class AsyncClient:
    """Calls a coordinator, or the next of several when one is lost. To be closed (`async with`)."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = None,
        limits: RpcLimits | None = None,
    ) -> None:
        """`addresses`: `host:port` of each coordinator replica (or one name that resolves to all).

        Plaintext unless `credentials` are given. Opens no connection yet. Raises InvalidRequest.
        """
        self._addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self._addresses:
            raise InvalidRequest("no coordinator address is given", field="addresses")
        # The newline at the end of a key file is no part of the key.
        key = (api_key or "").strip()
        if not all("!" <= character <= "~" for character in key):
            raise InvalidRequest("holds what no header may: only visible ASCII", field="api_key")
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._retry = retry or RetryPolicy()
        self._limits = limits or RpcLimits()
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._is_closed = False

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every channel."""
        await self.close()

    async def close(self) -> None:
        """Close every channel; streams in flight, and calls from now on, end with Cancelled."""
        self._is_closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    async def stream(
        self, prompt: Prompt, options: GenerateOptions | None = None, *, timeout_s: float = 600.0
    ) -> AsyncGenerator[Event, None]:
        """Yield Started once, Chunks as they are confirmed, and one Finished per sample.

        Tokens arrive exactly once, also across lost coordinators. `timeout_s` bounds the whole.
        Closing the iterator cancels the request at the coordinator. A resumed sample's `Finished`
        counts the rounds since its last resume only. Raises SpecmeshError.
        """
        request = (options or GenerateOptions()).request(prompt)
        async for event in self.stream_request(request, timeout_s=timeout_s):
            yield event

    async def stream_request(
        self, request: pb.GenerateRequest, *, timeout_s: float = 600.0
    ) -> AsyncGenerator[Event, None]:
        """`stream` for a message built by the caller."""
        if math.isnan(timeout_s):
            raise InvalidRequest("is not a number of seconds", field="timeout_s")
        state = Resumption(request)
        deadline = time.monotonic() + timeout_s
        failures, held = 0, state.num_held
        while not state.done:
            used = self._current
            try:
                async for event in self._attempt(state, deadline - time.monotonic()):
                    yield event
            except SpecmeshError as error:
                failures = 1 if state.num_held > held else failures + 1
                held = state.num_held
                if not error.retryable or failures >= self._retry.max_attempts:
                    raise
                wait_s = self._retry.wait_s(failures, error.retry_after_s)
                if time.monotonic() + wait_s >= deadline:
                    raise
                if self._current == used:  # else another request has turned away from it already
                    self._current = (self._current + 1) % len(self._addresses)
                await asyncio.sleep(wait_s)

    async def _attempt(self, state: Resumption, timeout_s: float) -> AsyncGenerator[Event, None]:
        """One call. Raises NotReady when the stream ends before the sample it asked for."""
        if timeout_s <= 0:
            raise DeadlineExceeded("the time for this request is over")
        request = state.next_request()
        # gRPC takes a time it cannot represent for one that has passed.
        bound_s = timeout_s if timeout_s < MAX_TIMEOUT_S else None
        call = self._stub().Generate(request, timeout=bound_s, metadata=self._metadata)
        before = state.num_held
        try:
            async for response in call:
                passed_on = state.accept(response)
                if passed_on is not None:
                    yield getattr(passed_on, str(passed_on.WhichOneof("event")))
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise _closed() from error  # the channel was cancelled, the task that reads was not
            raise
        finally:
            call.cancel()  # no effect once the call has ended
        if not state.done and state.num_held == before:
            raise NotReady("the stream ended before the request did")

    async def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, *, timeout_s: float = 600.0
    ) -> Generation:
        """The whole of `stream`, collected. Raises SpecmeshError."""
        collector = _Collector()
        async for event in self.stream(prompt, options, timeout_s=timeout_s):
            collector.add(event)
        return collector.result()

    async def info(self, *, timeout_s: float = 10.0) -> pb.GenerationServiceGetInfoResponse:
        """Models, version and load of the current coordinator. Raises SpecmeshError."""
        try:
            response: pb.GenerationServiceGetInfoResponse = await self._stub().GetInfo(
                pb.GenerationServiceGetInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        return response

    def _stub(self) -> Any:
        if self._is_closed:
            raise _closed()
        address = self._addresses[self._current]
        if address not in self._channels:
            self._channels[address] = create_channel(address, self._limits, self._credentials)
        stub = generation_pb2_grpc.GenerationServiceStub
        return stub(self._channels[address])  # type: ignore[no-untyped-call]  # generated code

    def _explain(self, error: grpc.aio.AioRpcError) -> SpecmeshError:
        explained = error_from_rpc(error)
        if isinstance(explained, NotReady):
            text = explained.message
            if "failed to connect" in text:  # gRPC names every layer; the last says what happened
                text = f"cannot be reached ({text.rpartition(': ')[2]})"
            address = self._addresses[self._current]
            return NotReady(f"coordinator {address}: {text}", retry_after_s=explained.retry_after_s)
        return explained


class Client:
    """`AsyncClient` for code without an event loop: same arguments, same calls, blocking.

    Runs its own loop on one background thread, so it also works inside a running loop (notebooks).
    Not for use from several threads at once.
    """

    def __init__(self, addresses: str | Sequence[str], **options: Any) -> None:
        """See `AsyncClient`."""
        self._thread = LoopThread("specmesh-client")
        try:
            self._client = self._run(_construct(addresses, options))
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the channels and end the thread. Idempotent."""
        if self._thread.is_closed:
            return
        self._run(self._client.close())
        self._run(_end_generators())  # streams that were left without being closed
        self._thread.close()

    def stream(
        self, prompt: Prompt, options: GenerateOptions | None = None, *, timeout_s: float = 600.0
    ) -> Iterator[Event]:
        """See `AsyncClient.stream`. Leaving the loop early cancels the request."""
        return self._iterate(self._client.stream(prompt, options, timeout_s=timeout_s))

    def stream_request(
        self, request: pb.GenerateRequest, *, timeout_s: float = 600.0
    ) -> Iterator[Event]:
        """See `AsyncClient.stream_request`."""
        return self._iterate(self._client.stream_request(request, timeout_s=timeout_s))

    def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, *, timeout_s: float = 600.0
    ) -> Generation:
        """See `AsyncClient.generate`."""
        return self._run(self._client.generate(prompt, options, timeout_s=timeout_s))

    def info(self, *, timeout_s: float = 10.0) -> pb.GenerationServiceGetInfoResponse:
        """See `AsyncClient.info`."""
        return self._run(self._client.info(timeout_s=timeout_s))

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            if not self._thread.is_closed:
                self._run(events.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread.is_closed:
            work.close()
            raise _closed()
        ended = threading.Event()
        future = self._thread.submit(_tracked(work, ended))
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: end the call, not only the wait for it.
            if future.cancel():
                ended.wait(CANCEL_WAIT_S)
            raise


def _closed() -> Cancelled:
    return Cancelled("the client is closed")


async def _end_generators() -> None:
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _tracked(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


async def _construct(addresses: str | Sequence[str], options: Mapping[str, Any]) -> AsyncClient:
    # On the loop's own thread: grpc.aio binds to the running loop.
    return AsyncClient(addresses, **options)
