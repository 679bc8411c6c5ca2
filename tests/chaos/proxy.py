"""A TCP proxy whose network can be cut, held or slowed, each way by itself.

Stands between two processes as the wire does: it knows nothing of what passes. A cut ends every
connection at once (a reset). A hold lets connections live while nothing arrives: what was sent
waits as in retransmission buffers, new connections are accepted and stay mute, and TCP's own back
pressure reaches the sender. When a hold ends, what waited arrives (`release`), or it is lost and
the connection with it (`lose`), as when retransmission has given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class _Way:
    """One direction of every connection of a proxy."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        self.open.set()


@dataclass(eq=False)
class _Connection:
    """Both sockets of one connection. has_waited: whether bytes were held on it."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    has_waited: bool = False

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Listens on a loopback port and forwards to another. Event-loop only."""

    def __init__(self, name: str, upstream_port: int) -> None:
        """name: for reports, "client0-coordinator1". Listens on nothing before `start`."""
        self.name = name
        self.upstream_port = upstream_port
        self.port = 0
        self._there, self._back = _Way(), _Way()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Connections that live."""
        return len(self._connections)

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End every connection and the listener."""
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ faults

    def cut(self) -> int:
        """Reset every connection; return how many there were."""
        connections = list(self._connections)
        for connection in connections:
            connection.abort()
        return len(connections)

    def hold(self, *, there: bool = True, back: bool = True) -> None:
        """Nothing arrives any more. there: from those who connect. back: to them."""
        for way, held in ((self._there, there), (self._back, back)):
            if held:
                way.open.clear()

    def slow(self, delay_s: float) -> None:
        """Every chunk of bytes takes this long, both ways."""
        self._there.delay_s = self._back.delay_s = delay_s

    def release(self) -> None:
        """End holds and delays; what waited arrives."""
        self.slow(0.0)
        self._there.open.set()
        self._back.open.set()

    def lose(self) -> None:
        """End holds and delays; connections on which something waited are lost."""
        for connection in list(self._connections):
            if connection.has_waited:
                connection.abort()
        self.release()

    # ------------------------------------------------------------ connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:  # nobody listens: as if nobody listened here
            writer.transport.abort()
            return
        connection = _Connection((writer, upstream[1]))
        self._connections.add(connection)
        # A reset of either side resets the other. Cancelled: the proxy is being closed.
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(
                    self._forward(reader, upstream[1], self._there, connection),
                    self._forward(upstream[0], writer, self._back, connection),
                )
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: _Way,
        connection: _Connection,
    ) -> None:
        while content := await reader.read(CHUNK_BYTES):
            if way.delay_s:
                await asyncio.sleep(way.delay_s)
            if not way.open.is_set():
                connection.has_waited = True
                await way.open.wait()
            writer.write(content)
            await writer.drain()
        writer.write_eof()
