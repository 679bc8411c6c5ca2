"""Runs an engine on its service's event loop, which polls the device and the inbox.

With a thread of its own, every frame changes threads twice on its way in and out, each time waking
one that sleeps, and the engine's code is cold when its turn comes. On a loop that stays awake a
command is in the engine as soon as it is read, and its answer on the stream as soon as the device
is done. What blocks (`waits.Apart`) still gets a thread, and the loop sleeps when nothing comes.
Must not know what the engine does between waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from specmesh.engine.waits import NOT_YET, Apart, Arrival, Wait, Waiting
from specmesh.event_loop import StayAwake


class EnginePoller:
    """Drives a generator of waits on an event loop. On the loop's thread only, but for `ended`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, waiting: Waiting[None], awake_s: float
    ) -> None:
        """To be made on the loop's thread. awake_s: seconds after the last arrival or answer for
        which the loop polls on.

        Takes the generator's first step. `ended` is done when the generator is, with what it
        raised if it did.
        """
        self.ended: Future[None] = Future()
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._waiting = waiting
        self._wait: Wait
        self._apart: asyncio.Future[Any] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._awake = StayAwake(loop, awake_s, self._poll)
        self._go_on(None)

    def is_on_loop(self) -> bool:
        """Whether the calling thread runs the loop."""
        return threading.get_ident() == self._thread_id

    def wake(self) -> None:
        """Something arrived. From another thread this is as good as `call_soon_threadsafe`."""
        if self.is_on_loop():
            self._awake.touch()
        else:
            self._loop.call_soon_threadsafe(self._awake.touch)

    def _poll(self) -> bool:
        """Go on if what is waited for is there. Whether a device is at work, so that the loop must
        look again at once."""
        if self._apart is not None or self.ended.done():
            return False
        try:
            answer = self._wait.poll()
        except BaseException as error:  # noqa: BLE001 - thrown where it was waited for
            self._fail(error)
        else:
            if answer is not NOT_YET:
                self._go_on(answer)
            elif isinstance(self._wait, Arrival) and self._alarm is None:
                self._set_alarm(self._wait)  # it rang early: a loop's timers are that coarse
        return not (self.ended.done() or isinstance(self._wait, Apart | Arrival))

    def _go_on(self, answer: Any) -> None:
        self._resume(self._waiting.send, answer)

    def _fail(self, error: BaseException) -> None:
        self._resume(self._waiting.throw, error)

    def _resume(self, resume: Callable[[Any], Wait], value: Any) -> None:
        try:
            self._wait = resume(value)
        except StopIteration:
            self._end(None)
        except BaseException as error:
            self._end(error)
            raise  # the loop's handler tells of it
        else:
            self._arrange()

    def _arrange(self) -> None:
        """See to it that the new wait will be polled."""
        wait = self._wait
        if isinstance(wait, Apart):
            self._send_apart(wait)
            return
        if not isinstance(wait, Arrival):
            self._awake.touch()  # the device is at work, and its end is not the session's
            return
        self._set_alarm(wait)
        self._awake.look()  # it may have come while nobody waited

    def _set_alarm(self, wait: Arrival) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_later(max(0.0, wait.left_s), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._awake.look()

    def _send_apart(self, wait: Apart) -> None:
        try:
            self._apart = self._loop.run_in_executor(None, _attempt, wait.work)
        except RuntimeError as error:
            # No thread can be had. One that becomes free may yet do this work, so nothing else may.
            lost = asyncio.CancelledError("no thread for work apart")
            lost.__cause__ = error
            self._fail(lost)
        else:
            self._apart.add_done_callback(self._came_back)

    def _came_back(self, apart: asyncio.Future[Any]) -> None:
        self._apart = None
        try:
            answer, error = apart.result()
        except asyncio.CancelledError as cancelled:
            answer, error = None, cancelled
        if error is not None:
            self._fail(error)
        else:
            self._go_on(answer)

    def _end(self, error: BaseException | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _attempt(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What it returns, and what it raises: a future would not carry every error."""
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - thrown where it was waited for
        return None, error
