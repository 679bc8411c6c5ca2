"""Simulated time: an asyncio loop whose clock jumps to the next timer, and what stands in for it.

Owns the clock alone. Nothing sleeps and nothing reads the real time, so a run depends on its seed
and on the code only.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Stuck(AssertionError):
    """Nothing can happen any more, yet the run has not ended."""


class _Jump(selectors.BaseSelector):
    """Waits for nothing: moves the loop's clock instead."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            self._loop.on_idle(None)
        elif timeout > 0:
            self._loop.on_idle(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        raise AssertionError("the simulation opens no files")

    unregister = register  # type: ignore[assignment]  # both are never called

    def close(self) -> None:
        """Nothing to close."""

    def get_map(self) -> Any:
        return {}


class SimLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in order of simulated time; `now` begins at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now

    def event(
        self, when: float, work: Callable[[], Any], _host: str, _channel: object, _told: object
    ) -> None:
        """Something happens at a host at that time. Here time alone decides the order."""
        self.call_at(when, work)

    def begin(self, world: Any) -> None:
        """Links are up, callers are about to call."""

    def end(self) -> None:
        """The run is over; tasks are about to be cancelled."""

    def on_idle(self, timeout: float | None) -> None:
        """Nothing is ready. timeout: until the next timer, None where there is none."""
        if timeout is None:
            raise Stuck("no timer and no message is left")
        self.now += timeout

    def _make_self_pipe(self) -> None:
        """No other thread wakes this loop."""

    def _close_self_pipe(self) -> None:
        """Nothing was opened."""

    def _write_to_self(self) -> None:
        """No other thread wakes this loop."""


class InlineExecutor(Executor):
    """Runs work where it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)
        return future


class SimTime:
    """Takes the place of the module `time`."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """Seconds."""
        return self._loop.now

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return int(self._loop.now * 1e9)

    perf_counter_ns = monotonic_ns
    time_ns = monotonic_ns


class SimSecrets:
    """Takes the place of the module `secrets`: counted, so that a run can be replayed."""

    def __init__(self) -> None:
        self._count = 0

    def _next(self) -> int:
        self._count += 1
        return self._count

    def token_hex(self, num_bytes: int) -> str:
        """An id nobody else has."""
        return f"{self._next():0{2 * num_bytes}x}"

    def randbits(self, num_bits: int) -> int:
        """A number nobody else has."""
        return (self._next() * 0x9E3779B97F4A7C15) % (1 << num_bits)

    def randbelow(self, bound: int) -> int:
        """A number in [0, bound)."""
        return self._next() * 7919 % bound
