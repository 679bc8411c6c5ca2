"""A network in simulated time that looks like grpc.aio to both ends, and breaks on demand.

Owns connections, delays, partitions and every fault of a message. The ends are production code:
generated stubs call `Channel`, generated handlers are served through the production error mapping.
Must not know what messages mean. Within a stream messages keep their order, as TCP keeps it; only
the faults that are asked for lose or repeat one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc

from specmesh.wire_errors import ErrorMapping
from tests.sim.loop import SimLoop
from tests.sim.options import Setup

KEEPALIVE_S = 0.4  # a connection that nothing passes for this long is broken
PIPE_CAPACITY = 8  # messages a stream takes in before its writer waits
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from its stub


@dataclass(eq=False)
class Node:
    """One incarnation of a process. name: the host; another incarnation has the same."""

    name: str
    alive: bool = True
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


NODE: ContextVar[Node] = ContextVar("node")


def run_on(node: Node, work: Callable[[], Any]) -> Any:
    """Call work so that all it creates belongs to the node."""
    context = copy_context()
    context.run(NODE.set, node)
    return context.run(work)


@dataclass(frozen=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, bytes], ...] = ()


OK = Status(grpc.StatusCode.OK)


class _Aborted(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Pipe:
    """One direction of a stream."""

    def __init__(
        self, network: Network, source: str, target: str, *, is_link: bool, is_handshake: bool
    ) -> None:
        self._network = network
        self._ends = (source, target)
        self._is_link = is_link
        self._is_handshake = is_handshake
        self._last_at = 0.0
        self._held: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self.num_unread = 0
        self.closed = False

    async def put(self, item: Any) -> None:
        """Send, waiting for room as flow control does."""
        while self.num_unread >= PIPE_CAPACITY and not self.closed:
            self._room.clear()
            await self._room.wait()
        self.send(item)

    def send(self, item: Any) -> None:
        """Send without waiting."""
        network = self._network
        self.num_unread += 1
        if self._is_link and isinstance(item, bytes):
            if network.happens("drop"):
                self.num_unread -= 1
                return
            if network.happens("duplicate"):
                self.num_unread += 1
                at = network.loop.now + 3 * network.delay()
                network.event(at, lambda: self._arrive(item), self._ends[1], None, item)
            network.remember(self._ends, item)
        at = max(self._last_at + 1e-6, network.loop.now + network.delay())
        self._last_at = at
        host = "handshake" if self._is_handshake else self._ends[1]
        network.event(at, lambda: self._arrive(item), host, self, (self._ends, item))

    def inject(self, item: bytes) -> None:
        """An old message turns up now."""
        self.num_unread += 1
        self._arrive(item)

    def _arrive(self, item: Any) -> None:
        if self._held or self._ends in self._network.blocked:
            self._held.append(item)
        elif not self.closed:
            self._arrived.append(item)
            self._wake.set()

    def release(self) -> None:
        """The partition is over."""
        held, self._held = self._held, deque()
        for item in held:
            self._arrive(item)

    def close(self) -> None:
        """Drop everything on the way."""
        self.closed = True
        self._held.clear()
        self._arrived.clear()
        self._wake.set()
        self._room.set()

    def poke(self) -> None:
        """Have the reader look again."""
        self._wake.set()

    async def wait(self) -> None:
        """Until something arrived or somebody poked."""
        if not self._arrived:
            self._wake.clear()
            await self._wake.wait()

    def pop(self) -> Any:
        """What arrived first, or None."""
        if not self._arrived:
            return None
        self.num_unread -= 1
        self._room.set()
        return self._arrived.popleft()


class Context:
    """The servicer's context of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Nobody here reads it."""

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    async def abort_with_status(self, status: Any) -> None:
        raise _Aborted(Status(status.code, status.details, tuple(status.trailing_metadata)))


class Call:
    """One call, both ends: methods without underscore are grpc.aio's at the client."""

    def __init__(
        self, channel: Channel, path: str, codecs: tuple[Any, Any], request: Any, **options: Any
    ) -> None:
        network = channel.network
        self.network, self.node, self.address = network, channel.node, channel.address
        self.metadata = tuple(options.get("metadata") or ())
        self._path = path
        self._serialize, self._deserialize = codecs
        self._request = None if request is None else self._serialize(request)
        timeout = options.get("timeout")
        self._deadline = None if timeout is None else network.loop.now + timeout
        kinds = {"is_link": path.endswith("/Link"), "is_handshake": path.endswith("/GetInfo")}
        self.up = Pipe(network, self.node.name, self.address, **kinds)
        self.down = Pipe(network, self.address, self.node.name, **kinds)
        self._status: Status | None = None
        self._cancelled = False
        self._connected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.server: Server | None = None
        network.calls[self] = None
        if timeout is not None:
            network.later(timeout, self._expire)
        network.soon(self._reach, self.address, None, f"call {path}")

    # ------------------------------------------------------------ the client's end

    def time_remaining(self) -> float | None:
        """Seconds to the deadline."""
        return None if self._deadline is None else self._deadline - self.network.loop.now

    async def wait_for_connection(self) -> None:
        await self._connected.wait()
        if self._status is not None:
            self._raise(self._status)

    async def write(self, message: Any) -> None:
        if self._status is not None:
            self._raise(self._status)
        if self.node.alive:
            await self.up.put(self._serialize(message))

    async def read(self) -> Any:
        while True:
            if self._cancelled:
                raise asyncio.CancelledError
            item = self.down.pop()
            if isinstance(item, Status):
                self._finish(item)
            elif item is not None:
                return self._deserialize(item)
            elif self._status is not None:
                if self._status.code is not grpc.StatusCode.OK:
                    self._raise(self._status)
                return EOF
            else:
                await self.down.wait()

    async def _only(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise AssertionError("a unary call ended without a response")
        return message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def cancel(self) -> bool:
        """End the call; the server hears of it if the network lets it."""
        if self._status is not None:
            return False
        self._cancelled = True
        if self.node.alive:
            self.network.soon(self._leave, self.address, None, f"leave {self._path}")
        self._finish(Status(grpc.StatusCode.CANCELLED, "cancelled here"))
        return True

    def _leave(self) -> None:
        if (self.node.name, self.address) in self.network.blocked:
            self.network.later(KEEPALIVE_S, self.stop_server)
        else:
            self.stop_server()

    def _expire(self) -> None:
        self.stop_server()
        if self._status is None:
            self._finish(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed"))

    def fail(self, details: str) -> None:
        """The connection is broken at the client's end."""
        if self._status is None:
            self.down.close()
            self._finish(Status(grpc.StatusCode.UNAVAILABLE, details))

    def _finish(self, status: Status) -> None:
        self._status = status
        self._connected.set()
        self.up.close()
        self.down.poke()
        self.network.calls.pop(self, None)

    def _raise(self, status: Status) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        raise grpc.aio.AioRpcError(status.code, (), status.trailing, status.details)

    # ------------------------------------------------------------ the server's end

    def _reach(self) -> None:
        """The call arrives, or cannot."""
        network = self.network
        if self._status is not None:
            return
        ends = (self.node.name, self.address)
        if ends in network.blocked or ends[::-1] in network.blocked:
            network.later(KEEPALIVE_S, lambda: self.fail("no route"))
            return
        server = network.servers.get(self.address)
        if server is None or not server.node.alive:
            network.soon(lambda: self.fail("connection refused"), "handshake", None, "refused")
            return
        self.server = server
        network.soon(self._connected.set, "handshake", None, f"open {self._path}")
        self._task = run_on(server.node, lambda: network.loop.create_task(self._serve(server)))

    async def _serve(self, server: Server) -> None:
        try:
            handler = await server.handler(self._path)
            argument = (
                self._requests(handler)
                if handler.request_streaming
                else handler.request_deserializer(self._request)
            )
            context = Context(self)
            if handler.response_streaming:
                streaming = handler.stream_stream or handler.unary_stream
                responses = streaming(argument, context)
                try:
                    async for response in responses:
                        await self.down.put(handler.response_serializer(response))
                finally:
                    await responses.aclose()
            else:
                response = await handler.unary_unary(argument, context)
                self.down.send(handler.response_serializer(response))
            status = OK
        except _Aborted as aborted:
            status = aborted.status
        if server.node.alive:
            self.down.send(status)

    async def _requests(self, handler: Any) -> AsyncIterator[Any]:
        while not self.up.closed:
            item = self.up.pop()
            if item is None:
                await self.up.wait()
            else:
                yield handler.request_deserializer(item)
        await asyncio.Event().wait()  # the handler is cancelled, as grpc does it

    def stop_server(self) -> None:
        """The server learns that the call is over."""
        if self._task is not None:
            self._task.cancel()


class Channel:
    """A client's channel. Opens nothing until a call is made."""

    def __init__(self, network: Network, node: Node, address: str) -> None:
        self.network, self.node, self.address = network, node, address

    def _callable(self, path: str, serializer: Any, deserializer: Any) -> Callable[..., Call]:
        def start(request: Any = None, **options: Any) -> Call:
            return Call(self, path, (serializer, deserializer), request, **options)

        return start

    def unary_unary(self, path: str, **codecs: Any) -> Callable[..., Call]:
        return self._callable(path, codecs["request_serializer"], codecs["response_deserializer"])

    unary_stream = stream_stream = unary_unary

    async def close(self, grace: float | None) -> None:
        for call in self.network.calls_between(self.node, self.address):
            call.cancel()


class Server:
    """Methods of one host's incarnation. Registered by generated code, as with grpc."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._methods: dict[str, Any] = {}
        self._mapping = ErrorMapping()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The other registration is enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = handler

    async def handler(self, path: str) -> Any:
        async def known(_details: Any) -> Any:
            return self._methods[path]

        details: Any = SimpleNamespace(method=path, invocation_metadata=())
        return await self._mapping.intercept_service(known, details)


class Network:
    """Everything between the hosts."""

    def __init__(self, loop: SimLoop, rng: random.Random, setup: Setup) -> None:
        self.loop = loop
        self._is_steady = setup.steady
        self._rng = rng
        self._faults = setup.faults
        self.is_healed = False
        self.servers: dict[str, Server] = {}
        self.calls: dict[Call, None] = {}  # in order of their beginning
        self.blocked: set[tuple[str, str]] = set()
        self.injected: Counter[str] = Counter()
        # A frame that says "draining" is about its own stream for good; no network carries it into
        # the stream of the next process, so it is never replayed.
        self.draining: set[str] = set()
        self._old: dict[tuple[str, str], deque[bytes]] = {}

    # ------------------------------------------------------------ time

    def event(
        self, when: float, work: Callable[[], Any], host: str, channel: object, told: object
    ) -> None:
        """Something of the network's or a device's happens at a host at that simulated time.

        channel: events of one keep their order whatever the time says. told: what it is.
        """
        self.loop.event(when, work, host, channel, told)

    def soon(self, work: Callable[[], Any], host: str, channel: object, told: object) -> None:
        """An event after one way through the network."""
        self.event(self.loop.now + self.delay(), work, host, channel, told)

    def later(self, delay_s: float, work: Callable[[], Any]) -> None:
        """Call work after a delay."""
        self.loop.call_later(delay_s, work)

    def delay(self) -> float:
        """One way, in seconds."""
        faults = self._faults
        if self._is_steady:
            return faults.latency_s
        delay_s = faults.latency_s * (0.5 + self._rng.random())
        if not self.is_healed and self._rng.random() < faults.delay:
            self.injected["delay"] += 1
            delay_s += self._rng.random() * faults.delay_s
        return delay_s

    def happens(self, fault: str) -> bool:
        """Whether this message suffers it."""
        rate = getattr(self._faults, fault)
        if self.is_healed or not rate or self._rng.random() >= rate:
            return False
        self.injected[fault] += 1
        return True

    # ------------------------------------------------------------ faults

    def remember(self, ends: tuple[str, str], item: bytes) -> None:
        """Keep a message for `replay`."""
        if self._faults.replay and ends[0] not in self.draining:
            self._old.setdefault(ends, deque(maxlen=6)).append(item)

    def replay(self) -> bool:
        """Let an old message of some link turn up on whatever link stands there now."""
        pipes = [
            (pipe, old)
            for call in self.calls
            for pipe in (call.up, call.down)
            if pipe._is_link and (old := self._old.get(pipe._ends))
        ]
        if not pipes:
            return False
        pipe, old = self._rng.choice(pipes)
        pipe.inject(self._rng.choice(list(old)))
        return True

    def calls_between(self, node: Node | None, address: str) -> list[Call]:
        """Open calls to a host, of one client or of all."""
        return [c for c in self.calls if c.address == address and node in (None, c.node)]

    def cut(self, client: str, address: str) -> bool:
        """Reset the connection between two hosts. Each end notices in its own time, the server at
        the latest when its ping goes unanswered."""
        cut = [call for call in self.calls_between(None, address) if call.node.name == client]
        at_client, at_server = (
            self.delay(),
            min(
                self.delay() * (1 if self._is_steady else self._rng.choice((1, 1, 20))),
                2 * KEEPALIVE_S,
            ),
        )
        for call in cut:
            self.later(at_client, lambda call=call: call.fail("connection reset"))
            self.later(at_server, call.stop_server)
        return bool(cut)

    def block(self, source: str, target: str) -> None:
        """Let nothing pass from source to target."""
        self.blocked.add((source, target))
        self.later(KEEPALIVE_S, lambda: self._starve(source, target))

    def _starve(self, source: str, target: str) -> None:
        if (source, target) in self.blocked:
            for client, address in ((source, target), (target, source)):
                self.cut(client, address)

    def unblock(self, source: str, target: str) -> None:
        """Let messages pass again; those that wait arrive now."""
        self.blocked.discard((source, target))
        for call in list(self.calls):
            for pipe in (call.up, call.down):
                if pipe._ends == (source, target):
                    pipe.release()

    def kill(self, node: Node) -> None:
        """A process ends without a word: its peers see resets, its code never runs again."""
        node.alive = False
        for call in list(self.calls):
            if call.server is not None and call.server.node is node:
                ends = (call.node.name, call.address)
                self.soon(lambda call=call: call.fail("connection reset"), ends[0], ends, "reset")
            elif call.node is node:
                self.soon(call.stop_server, call.address, None, f"stop {call._path}")
                call.fail("killed")
        for task in list(node.tasks):
            task.cancel()


def node_task_factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
    """Remembers which incarnation a task belongs to."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    node = NODE.get(None)
    if node is not None:
        node.tasks.add(task)
        task.add_done_callback(node.tasks.discard)
    return task
