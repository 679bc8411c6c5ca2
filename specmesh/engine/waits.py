"""What an engine waits for, apart from how.

The engine's work is written as generators that yield a `Wait` wherever they cannot go on, so that
the same code serves two drivers: a thread of its own that blocks (`block_on`), and its service's
event loop, which polls (`specmesh/engine/busy_poll.py`). Must not know engines, steps or devices.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")
NOT_YET: Final = object()  # the answer of a poll
MOST_TURNS = 8  # of a loop, for results to reach the transport: two or three where none is slow


class Wait(Protocol):
    """Something to wait for; what it brings is sent into the generator."""

    def block(self) -> Any:
        """Block the thread until it is there. Raises what the wait ends in."""
        ...

    def poll(self) -> Any:
        """What it brings, or NOT_YET. Never blocks. Raises what the wait ends in."""
        ...


Waiting = Generator[Wait, Any, T]


@dataclass(frozen=True, slots=True)
class Until:
    """An instant of `time.perf_counter`, in seconds."""

    instant: float

    def block(self) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, self.instant - time.perf_counter()))

    def poll(self) -> Any:
        """None once it has come."""
        return None if time.perf_counter() >= self.instant else NOT_YET


@dataclass(frozen=True, slots=True)
class Aside:
    """So many seconds in which other threads have the interpreter; nothing where there are none."""

    seconds: float

    def block(self) -> None:
        """Sleep for as long."""
        time.sleep(self.seconds)

    def poll(self) -> None:
        """Nothing: whoever polls has done everything else before."""


@dataclass(frozen=True, slots=True)
class Done:
    """A device's event (`torch.cuda.Event`)."""

    event: Any

    def block(self) -> None:
        """Until the device has passed it."""
        self.event.synchronize()

    def poll(self) -> Any:
        """None once the device has passed it."""
        return None if self.event.query() else NOT_YET


@dataclass(slots=True)
class Arrival:
    """The next item of a queue, or queue.Empty as a value where none comes for `timeout_s`."""

    inbox: queue.SimpleQueue[Any]
    timeout_s: float
    _began: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds that it is waited for from now on."""
        return self.timeout_s - (time.perf_counter() - self._began)

    def block(self) -> Any:
        """Until it comes."""
        try:
            return self.inbox.get(timeout=self.timeout_s)
        except queue.Empty:
            return queue.Empty

    def poll(self) -> Any:
        """The item, if it is there."""
        try:
            return self.inbox.get_nowait()
        except queue.Empty:
            return queue.Empty if self.left_s <= 0 else NOT_YET


class Sender(Protocol):
    """Where results were posted."""

    @property
    def has_sent(self) -> bool:
        """Whether the transport has taken all of them."""
        ...


@dataclass(slots=True)
class Leaving:
    """What was posted is with the transport, or its peer is slow.

    When an answer leaves must not depend on whether there is more to do after it, and on a loop it
    leaves only when the loop comes around. A few times around are enough; who takes longer is
    blocked by its peer, and is waited for no more.
    """

    senders: Sequence[Sender]
    _num_polls: int = 0

    def block(self) -> None:
        """Nothing: the loop that sends has a thread of its own."""

    def poll(self) -> Any:
        """None once all has left, or after MOST_TURNS times around."""
        self._num_polls += 1
        is_over = self._num_polls > MOST_TURNS or all(each.has_sent for each in self.senders)
        return None if is_over else NOT_YET


@dataclass(frozen=True, slots=True)
class Apart:
    """Work that blocks for long: a pass on the CPU, a step that nothing was compiled for.

    A driver that may not block runs it on a thread, while which the generator stands still.
    """

    work: Callable[[], Any]

    def block(self) -> Any:
        """Do it here."""
        return self.work()

    def poll(self) -> Any:
        """Not to be polled: whoever polls gives it to a thread."""
        raise AssertionError("work cannot be polled for")


def block_on(waiting: Waiting[T]) -> T:
    """Run to the end on this thread, blocking at each wait. Raises what the generator raises."""
    try:
        wait = next(waiting)
        while True:
            try:
                answer = wait.block()
            except BaseException as error:  # noqa: BLE001 - thrown where it was waited for
                wait = waiting.throw(error)
            else:
                wait = waiting.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value
