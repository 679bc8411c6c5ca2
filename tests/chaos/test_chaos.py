"""A short run of `python -m tests.chaos`: real processes, one fault of each sort, 8 streams."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from specmesh.errors import NotReady
from specmesh.rpc import RpcLimits, bind, create_channel, create_server
from specmesh.wire_errors import error_from_rpc
from tests.chaos.faults import KINDS, NONE, Fault, drawn_faults
from tests.chaos.load import Job
from tests.chaos.near_tie import Judge, parted
from tests.chaos.proxy import Proxy
from tests.chaos.run import started
from tests.e2e.tiny_pair import write_pair

FAULTS = (
    Fault("kill target", (0,)),
    Fault("stop draft", (0,), 0.5),
    Fault("cut client-coordinator", (0, 0)),
    Fault("kill client", (1,)),
    Fault("hold back coordinator-target", (1, 1), 0.5, loses=True),
    Fault("kill coordinator", (0,)),
    Fault("hold coordinator-draft", (1, 1), 0.2),
    Fault("kill draft", (1,)),
)


async def test_faults_of_every_sort_and_a_rolling_restart_lose_nothing(tmp_path: Path) -> None:
    """Every request completes, with the tokens and the text of the undisturbed run; afterwards no
    process holds a session or has logged an error. A drained process ends with 0."""
    async with started(tmp_path, num_streams=8, seed=7) as run:
        assert run.outcome.failures == []
        async with run.under_load():
            await run.disturb(FAULTS)
            await run.roll(["coordinator1"])
        assert run.outcome.failures == []
        assert run.outcome.num_resumed >= 1
        assert {fault.kind for fault in FAULTS} == set(run.outcome.stalls)


def test_a_seed_names_its_faults() -> None:
    """The same seed gives the same faults; every kind comes as often as the others."""
    faults = drawn_faults(3, 2 * len(KINDS))
    assert faults == drawn_faults(3, 2 * len(KINDS))
    assert faults != drawn_faults(4, 2 * len(KINDS))
    kinds = [fault.kind for fault in faults if fault.kind != NONE]
    assert sorted(kinds) == sorted([*KINDS, *KINDS])


def test_only_what_rounding_explains_is_a_near_tie(tmp_path: Path) -> None:
    """Two tokens that differ are a failure unless an independent model finds them as good as equal;
    a token too few always is."""
    target, _ = write_pair(tmp_path / "models")
    judge, job = Judge(target), Job((1, 2, 3), 8, None, None, at_coordinator=False)
    logits = judge._logits(job.prompt)
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert parted(judge, job, [best, 1], [best, 1]) == (False, None)
    assert parted(judge, job, [best], [worst])[0]
    assert parted(judge, job, [best, 1], [best])[0]
    gap = judge.gap(job, [best], [worst])
    assert gap is not None
    assert gap > 0.1


async def test_the_proxy_holds_loses_and_resets() -> None:
    """Held bytes arrive on release, are lost with their connection on lose, and a cut ends it."""
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(64):
            received.put_nowait(content)
        received.put_nowait(b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy("a-b", server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"one")
            assert await received.get() == b"one"
            proxy.hold(back=False)
            writer.write(b"two")
            await _until(lambda: any(each.has_waited for each in proxy._connections))
            assert received.empty()
            proxy.release()
            assert await received.get() == b"two"
            proxy.hold()
            writer.write(b"three")  # waited before, and is lost now
            proxy.lose()
            assert await received.get() == b""
            await _until(lambda: proxy.num_connections == 0)
            await _ended(reader)
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            await _until(lambda: proxy.num_connections == 1)
            assert proxy.cut() == 1
            await _ended(reader)
            writer.close()
    finally:
        await proxy.close()
        server.close()


async def _tick(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
    while True:
        yield b"tick"
        await asyncio.sleep(0.01)


async def _read_on(call: Any) -> None:
    while await call.read():
        pass


@pytest.mark.parametrize("ways", [{}, {"there": False}], ids=["both ways", "one way"])
async def test_a_stream_whose_network_is_silent_ends_at_its_keepalive(
    ways: dict[str, bool],
) -> None:
    """Nothing arrives any more and nobody says so: the reader is told once a ping has gone
    unanswered, and not after the minute that gRPC allows its own pings."""
    limits = RpcLimits(keepalive_time_s=1.0, keepalive_timeout_s=1.0)
    server = create_server(RpcLimits())
    handler = grpc.unary_stream_rpc_method_handler(_tick)
    service = grpc.method_handlers_generic_handler("test.Ticks", {"Tick": handler})
    server.add_generic_rpc_handlers((service,))
    proxy = Proxy("a-b", bind(server, "127.0.0.1:0"))
    await server.start()
    await proxy.start()
    channel = create_channel(proxy.address, limits)
    try:
        call = channel.unary_stream("/test.Ticks/Tick")(b"")
        async with asyncio.timeout(30):
            assert await call.read() == b"tick"
            proxy.hold(**ways)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await _read_on(call)
        assert isinstance(error_from_rpc(raised.value), NotReady)
    finally:
        await channel.close(None)
        await proxy.close()
        await server.stop(None)


async def _ended(reader: asyncio.StreamReader) -> None:
    """A reset or an end, whichever of the two this side was told first."""
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""


async def _until(condition) -> None:  # type: ignore[no-untyped-def]
    while not condition():
        await asyncio.sleep(0)
