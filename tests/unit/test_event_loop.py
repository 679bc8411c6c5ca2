"""The loop of services and client: what runs on it, where, and how it ends."""

import asyncio
import threading

import pytest
import uvloop

from specmesh import event_loop
from specmesh.event_loop import LoopThread


async def where() -> tuple[asyncio.AbstractEventLoop, str]:
    return asyncio.get_running_loop(), threading.current_thread().name


def test_run_uses_uvloop_and_hands_back_result_and_error() -> None:
    """Proves which loop runs, and that results and errors come out."""
    loop, _ = event_loop.run(where())
    assert isinstance(loop, uvloop.Loop)
    assert loop.is_closed()

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        event_loop.run(fails())


async def test_a_loop_thread_serves_another_loop() -> None:
    """Proves that work runs on the thread's own loop and that its error reaches the caller."""
    thread = LoopThread("replica")
    loop, name = await asyncio.wrap_future(thread.submit(where()))
    assert loop is not asyncio.get_running_loop()
    assert name == "replica"

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await asyncio.wrap_future(thread.submit(fails()))
    await asyncio.to_thread(thread.close)
    assert thread.is_closed
    assert loop.is_closed()
    thread.close()
