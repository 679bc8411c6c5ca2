"""The service end of a link: frames in, frames out, bounded, for both services.

Owns one bidirectional stream: it reads frames and hands their commands to the engine, and sends
each engine step's results as one frame (several where they would pass the size limit). A peer that
reads too slowly, or writes without end, loses its link. Must not know what commands mean.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from specmesh.engine.runner import Engine
from specmesh.errors import InvalidRequest, SpecmeshError, TooBusy
from specmesh.rpc import LINK_GROUP_KEY

logger = logging.getLogger(__name__)

# Results of one step beyond this many bytes go out as several frames: large messages block small
# ones behind them on the stream.
FRAME_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """response_type: the stream's response message. Bounds: see ServerSettings."""

    response_type: type[Any]
    max_outbound_frames: int = 256
    max_message_bytes: int = 64 << 20


class ServiceLink:
    """One stream's outbound queue. Lives on an event loop; `post` may be called from any thread."""

    def __init__(self, engine: Engine, group: str, options: LinkOptions) -> None:
        """group: the coordinator's name for itself, shared by its links to this service."""
        self.group = group
        self._engine = engine
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._failure: SpecmeshError | None = None
        # One place more than there may be frames: the end must always fit.
        self._frames: asyncio.Queue[Any] = asyncio.Queue(options.max_outbound_frames + 1)
        self._is_open = True

    @property
    def has_sent(self) -> bool:
        """Whether the transport has taken all that was posted. On the loop's thread only."""
        return self._frames.empty()

    def post(self, results: list[Any]) -> None:
        """Queue results of one step. Overflow ends the link, as nobody reads it."""
        self._call(self._deliver, results)

    def post_end(self) -> None:
        """End the stream after what is queued."""
        self._call(self._end)

    def _call(self, action: Any, *arguments: Any) -> None:
        if threading.get_ident() == self._thread_id:  # an engine on this very loop
            action(*arguments)
            return
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:  # the loop is closed: the process is going away
            self._is_open = False

    def _deliver(self, results: list[Any]) -> None:
        if not self._is_open:
            return
        for batch in split_by_bytes(results, FRAME_BYTES):
            if self._frames.qsize() >= self._options.max_outbound_frames:
                logger.warning("link ended: its peer reads too slowly", extra={"group": self.group})
                self.fail(TooBusy("results were not read in time", retry_after_s=1.0))
                return
            frame = self._options.response_type(results=batch, load=self._engine.load())
            self._frames.put_nowait(frame)

    def send_load(self) -> None:
        """Send a frame without results, so that the peer learns of a drain at once."""
        if self._is_open and self._frames.qsize() < self._options.max_outbound_frames:
            self._frames.put_nowait(self._options.response_type(load=self._engine.load()))

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._frames.put_nowait(None)

    def fail(self, error: SpecmeshError) -> None:
        """End the sessions now, and the stream with this error as soon as the peer reads on.

        Cancelling the handler instead would send the peer no status at all.
        """
        if self._is_open:
            self._is_open = False
            self._failure = error
            while not self._frames.empty():
                self._frames.get_nowait()
            self._frames.put_nowait(None)
            self._engine.end_link(self)

    def detach(self) -> None:
        """The stream is over: drop what is queued and whatever is posted from now on."""
        self._is_open = False
        while not self._frames.empty():
            self._frames.get_nowait()

    async def next_frame(self) -> Any:
        """The next frame to send; None at the end. Raises what the link failed with."""
        frame = await self._frames.get()
        if frame is None and self._failure is not None:
            raise self._failure
        return frame

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Hand every frame to the engine; at the peer's end, let the answers go out first."""
        async for frame in requests:
            if not self._is_open:
                return
            if frame.commands and not self._engine.submit(self, frame.commands):
                logger.warning("link ended: its peer floods it", extra={"group": self.group})
                self.fail(TooBusy("commands came without end", retry_after_s=1.0))
                return
        self._engine.finish_link(self)


class LinkServer:
    """All links of one service."""

    def __init__(self, engine: Engine, options: LinkOptions) -> None:
        self._engine = engine
        self._options = options
        self._links: set[ServiceLink] = set()

    async def serve(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """The body of a `Link` method. Sessions opened on the link end when it does."""
        metadata: Any = context.invocation_metadata() or ()
        group = dict(metadata).get(LINK_GROUP_KEY) or uuid.uuid4().hex
        link = ServiceLink(self._engine, str(group), self._options)
        self._links.add(link)
        reader = asyncio.create_task(link.read(requests))
        reader.add_done_callback(lambda task: _log_reader(task, link))
        try:
            while (frame := await link.next_frame()) is not None:
                yield frame
        finally:
            reader.cancel()
            link.detach()
            self._links.discard(link)
            self._engine.end_link(link)

    def announce_drain(self) -> None:
        """Tell every peer at once that no new sessions are taken."""
        for link in self._links:
            link.send_load()

    def end_all(self) -> None:
        """End every link after what is queued on it."""
        for link in list(self._links):
            link.post_end()

    def fail_all(self, error: SpecmeshError) -> None:
        """End every link with this error."""
        for link in list(self._links):
            link.fail(error)


def _log_reader(task: asyncio.Task[None], link: ServiceLink) -> None:
    """A frame that cannot be parsed has no session to blame: the link ends."""
    if task.cancelled() or task.exception() is None:
        return
    logger.warning("link ended: unreadable frame", exc_info=task.exception())
    link.fail(InvalidRequest("a frame could not be parsed", field="commands"))


def split_by_bytes(results: Sequence[Any], max_bytes: int) -> Iterator[list[Any]]:
    """Cut results into runs of at most max_bytes serialised bytes, or of one result."""
    if len(results) == 1:  # weighing a message costs as much as writing it
        yield list(results)
        return
    batch: list[Any] = []
    batch_bytes = 0
    for result in results:
        size = result.ByteSize()
        if batch and batch_bytes + size > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(result)
        batch_bytes += size
    if batch:
        yield batch
