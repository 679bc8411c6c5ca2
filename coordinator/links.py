"""The coordinator's end of the links: one long-lived stream to each service replica.

Owns connecting, the handshake, reconnecting with backoff, batching of commands into frames, and
the bounds of what may wait. A target has a second stream for commands whose results carry rows, so
that they block no one. Must not know sessions beyond their ids, nor what commands mean: results go
to `LinkOwner`. The wire contract is `protos/specmesh/v1/{draft,target}.proto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from coordinator.messages import Side
from protos.specmesh.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    session_pb2,
    target_pb2,
    target_pb2_grpc,
)
from specmesh.config import LinkSettings
from specmesh.errors import ModelMismatch, NotReady, SpecmeshError
from specmesh.event_loop import StayAwake, awake_s
from specmesh.rpc import LINK_GROUP_KEY, RpcLimits, create_channel
from specmesh.wire_errors import error_from_rpc

logger = logging.getLogger(__name__)

Credentials = Callable[[], grpc.ChannelCredentials | None]

# Commands beyond this many bytes go out as several frames: large messages block small ones.
FRAME_BYTES = 1 << 20
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from its stub


@dataclass(frozen=True, slots=True)
class _Service:
    stub: Callable[[grpc.aio.Channel], Any]
    info_request: Callable[[], Any]
    frame: Callable[..., Any]
    num_streams: int


_SERVICES = {
    Side.TARGET: _Service(
        target_pb2_grpc.TargetServiceStub,
        target_pb2.TargetServiceGetInfoRequest,
        target_pb2.TargetServiceLinkRequest,
        num_streams=2,
    ),
    Side.DRAFT: _Service(
        draft_pb2_grpc.DraftServiceStub,
        draft_pb2.DraftServiceGetInfoRequest,
        draft_pb2.DraftServiceLinkRequest,
        num_streams=1,
    ),
}


class LinkOwner(Protocol):
    """Who is told what happens on a link. Called on the event loop, never re-entered by `send`."""

    def check(self, link: ReplicaLink, info: session_pb2.ModelInfo) -> None:
        """Raise ModelMismatch to refuse the replica."""

    def link_up(self, link: ReplicaLink) -> None:
        """The link may be used."""

    def link_down(self, link: ReplicaLink) -> None:
        """The link ended, and every session on it."""

    def result(self, link: ReplicaLink, result: Any) -> None:
        """One result arrived."""


class _Stream:
    """One bidirectional call: a bounded queue of commands, written in frames as they gather."""

    def __init__(self, call: Any, frame: Callable[..., Any], max_queued: int) -> None:
        self._call = call
        self._frame = frame
        self._max_queued = max_queued
        self._queue: deque[Any] = deque()
        self._wake = asyncio.Event()

    def put(self, command: Any) -> bool:
        """Queue a command; False when the queue is full."""
        if len(self._queue) >= self._max_queued:
            return False
        self._queue.append(command)
        self._wake.set()
        return True

    async def write_all(self) -> None:
        """Write what is queued, until cancelled or the call ends."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                frame = self._frame(commands=self._next_batch())
                try:
                    await self._call.write(frame)
                except asyncio.InvalidStateError:  # the call ended in good order while we wrote
                    return

    def _next_batch(self) -> list[Any]:
        batch = [self._queue.popleft()]
        if not self._queue:  # weighing a message costs as much as writing it
            return batch
        num_bytes = batch[0].ByteSize()
        while self._queue:
            num_bytes += self._queue[0].ByteSize()
            if num_bytes > FRAME_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    async def read_all(self, receive: Callable[[Any], None]) -> None:
        """Pass every frame on. Returns at the peer's end; raises AioRpcError on failure."""
        while True:
            frame = await self._call.read()
            if frame is _EOF:
                return
            receive(frame)

    def cancel(self) -> None:
        """End the call at once."""
        self._call.cancel()


class ReplicaLink:
    """The link to one replica: connects, serves, reconnects, until closed.

    info: the replica's model after a handshake. load: its last word on its load. num_sessions:
    sessions that this coordinator has placed on it. cool_until: no draft sessions before this loop
    time (the owner's).
    """

    def __init__(
        self,
        side: Side,
        address: str,
        settings: LinkSettings,
        owner: LinkOwner,
        group: str,
        *,
        limits: RpcLimits | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """group: this coordinator's name for itself; its links to one replica share sessions.

        credentials: asked again when connecting fails, for certificates may have been renewed.
        """
        self.side = side
        self.address = address
        self.info: session_pb2.ModelInfo | None = None
        self.load = session_pb2.ServiceLoad()
        self.num_sessions = 0
        self.is_up = False
        self.mismatch: ModelMismatch | None = None
        self._service = _SERVICES[side]
        self._settings = settings
        self._owner = owner
        self._group = group
        self._limits = limits or RpcLimits()
        self._credentials = credentials
        self._channel = self._open_channel()
        self._stub = self._service.stub(self._channel)
        self._streams: list[_Stream] = []
        self._task: asyncio.Task[None] | None = None
        self._awake: StayAwake | None = None  # while the replica's answers deserve it

    @property
    def takes_sessions(self) -> bool:
        """Whether a new session may be placed here."""
        return self.is_up and not self.load.draining

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"link {self.side.value} {self.address}"
        )

    async def close(self) -> None:
        """End the link and its channel."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._channel.close(None)

    def send(self, command: Any, *, rows: bool = False) -> bool:
        """Queue a command; rows: its result carries rows. False when down or full.

        A full target queue ends the link: its sessions move, which bounds what waits here.
        """
        if not self.is_up:
            return False
        stream = self._streams[-1] if rows else self._streams[0]
        if stream.put(command):
            if self._awake is not None:
                self._awake.touch()
            return True
        if self.side is Side.TARGET:
            logger.warning("link closed: its queue is full", extra={"replica": self.address})
            self.reset()
        return False

    def reset(self) -> None:
        """Cut the streams; the link reconnects."""
        for stream in self._streams:
            stream.cancel()

    async def probe(self) -> bool:
        """Whether the replica answers and is who it was."""
        try:
            info = await self._get_info()
        except SpecmeshError:
            return False
        return self.info is not None and info.fingerprint == self.info.fingerprint

    # ------------------------------------------------------------ connecting

    def _open_channel(self) -> grpc.aio.Channel:
        credentials = self._credentials() if self._credentials is not None else None
        return create_channel(self.address, self._limits, credentials)

    async def _renew_channel(self) -> None:
        """Connect with the certificates as they are now; a channel keeps those it began with."""
        renewed = self._open_channel()
        old, self._channel = self._channel, renewed
        self._stub = self._service.stub(renewed)
        await old.close(None)

    async def _run(self) -> None:
        failures, loop = 0, asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                if failures > 1 and self._credentials is not None:
                    await self._renew_channel()
                await self._serve_once()
                # It was up: try again at once, its caches are warm. One that ends its streams as
                # soon as they open waits like one that cannot be reached.
                lasted = loop.time() - began > self._settings.reconnect_max_s
                failures = 0 if lasted else failures + 1
            except ModelMismatch as mismatch:
                failures += 1
                if self.mismatch is None:
                    logger.error(
                        "replica refused",
                        extra={"replica": self.address, "reason": str(mismatch)},
                    )
                self.mismatch = mismatch
            except SpecmeshError as error:
                if not failures:
                    logger.warning(
                        "cannot connect", extra={"replica": self.address, "reason": str(error)}
                    )
                failures += 1
            if failures > 1 or not self.info:
                settings = self._settings
                backoff_s = settings.reconnect_initial_s * 2 ** min(failures - 1, 16)
                await asyncio.sleep(min(settings.reconnect_max_s, backoff_s))

    async def _get_info(self) -> session_pb2.ModelInfo:
        request = self._service.info_request()
        try:
            response = await self._stub.GetInfo(
                request, timeout=self._settings.connect_timeout_s, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        info: session_pb2.ModelInfo = response.info
        return info

    async def _serve_once(self) -> None:
        """Handshake, then serve until the streams end. Raises SpecmeshError if never up."""
        info = await self._get_info()
        self._owner.check(self, info)
        self.info, self.mismatch = info, None
        on_gpu = info.device.startswith("cuda")
        seconds = awake_s(self._settings.busy_poll_ms, on_gpu=on_gpu)
        self._awake = StayAwake(asyncio.get_running_loop(), seconds) if seconds else None
        metadata = ((LINK_GROUP_KEY, self._group),)
        calls = [self._stub.Link(metadata=metadata) for _ in range(self._service.num_streams)]
        max_queued = self._settings.max_queued_commands
        self._streams = [_Stream(call, self._service.frame, max_queued) for call in calls]
        try:
            await self._await_open(calls)
            self.is_up = True
            self.load = session_pb2.ServiceLoad()
            self._owner.link_up(self)
            await self._exchange()
        finally:
            was_up, self.is_up = self.is_up, False
            self.reset()
            self._streams = []
            if was_up:
                self._owner.link_down(self)

    async def _await_open(self, calls: list[Any]) -> None:
        """A stream is open once its headers were sent; a refused one fails here."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                for call in calls:
                    await call.wait_for_connection()
        except TimeoutError as error:
            raise NotReady(f"{self.address} does not open a stream") from error
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def _exchange(self) -> None:
        """Read and write until one of the streams ends."""
        tasks = [asyncio.ensure_future(stream.write_all()) for stream in self._streams]
        tasks += [asyncio.ensure_future(stream.read_all(self._receive)) for stream in self._streams]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            # A call that `reset` cancels ends its reader as cancelled, which is not this task.
            ended = None if first.cancelled() else first.exception()
            fields = {"replica": self.address, "side": self.side.value}
            if ended is None or isinstance(ended, grpc.aio.AioRpcError):
                logger.info("link ended", extra=fields)
            else:
                logger.error("link ended on a bug", extra=fields, exc_info=ended)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _receive(self, frame: Any) -> None:
        if self._awake is not None and frame.results:
            self._awake.touch()
        if frame.HasField("load"):
            self.load = frame.load
        for result in frame.results:
            self._owner.result(self, result)
