"""The event loop of services, coordinator and client: uvloop, kept awake where that pays.

A round crosses a dozen readable sockets and futures; uvloop's way from the one to the code that
waits for the other is about a tenth shorter than asyncio's own (an echo over a gRPC stream: 0.14
against 0.165 ms). Nothing else may depend on which loop runs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

AWAKE_S = 0.02  # longer than a round takes, so that a loop stays awake from one to the next
MIN_PROCESSORS = 4  # of the process, below which a loop that never sleeps takes from others


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop that nobody runs yet."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on such a loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class LoopThread:
    """A loop on a thread of its own, for code that has another loop, or none."""

    def __init__(self, name: str) -> None:
        """name: the thread's. It is a daemon: a process that ends does not wait for it."""
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there. `asyncio.wrap_future` awaits the result on another loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End loop and thread. Idempotent; not to be called on that thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def awake_s(busy_poll_ms: float | None, *, on_gpu: bool) -> float:
    """Seconds that a loop polls on after its last message, as set.

    None decides: where a GPU computes (on_gpu) and processors abound, since a CPU that computes has
    none to spare.
    """
    if busy_poll_ms is not None:
        return busy_poll_ms * 1e-3
    return AWAKE_S if on_gpu and num_processors() >= MIN_PROCESSORS else 0.0


def num_processors(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Processors that this process may use: its affinity, or less by quota (cgroup v2)."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    count = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    try:
        quota, period = cpu_max.read_text().split()
        return count if quota == "max" else min(count, int(quota) / int(period))
    except (OSError, ValueError):  # no such limit here
        return count


class StayAwake:
    """Keeps a loop polling, instead of asleep, for a while after its last message.

    A thread that sleeps is woken by an interrupt, which on a virtual machine takes longer than
    reading the message does, and finds its caches cold: a loop that never slept between handles a
    result in half the time. Costs a core for as long as messages come. On the loop's thread only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        awake_s: float,
        turn: Callable[[], bool] = lambda: False,
    ) -> None:
        """awake_s: seconds to poll on for after the last `touch`. turn: called each time around;
        while it says so, the loop stays awake whatever the time."""
        self._loop = loop
        self._awake_s = awake_s
        self._turn = turn
        self._until = 0.0
        self._is_awake = False

    def touch(self) -> None:
        """A message came or went."""
        self._until = time.perf_counter() + self._awake_s
        self.look()

    def look(self) -> None:
        """Go around once, and on for as long as there is reason to."""
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._around)

    def _around(self) -> None:
        self._is_awake = False  # a `look` from within the turn is one more, also where it fails
        if self._turn() or time.perf_counter() < self._until:
            self.look()
