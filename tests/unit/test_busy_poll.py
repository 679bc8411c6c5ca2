"""A loop that polls: awake while there is reason to be, asleep otherwise, and an engine on it."""

from __future__ import annotations

import asyncio
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specmesh import event_loop
from specmesh.engine.busy_poll import EnginePoller
from specmesh.engine.waits import (
    MOST_TURNS,
    NOT_YET,
    Apart,
    Arrival,
    Done,
    Leaving,
    Until,
    Waiting,
    block_on,
)
from specmesh.event_loop import AWAKE_S, StayAwake, awake_s, num_processors

ENDLESS_S = 3600.0


class Turns:
    """A loop that is gone around by hand. alarms: (seconds, callback), in order."""

    def __init__(self) -> None:
        self.soon: list[Any] = []
        self.alarms: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, callback: Any) -> Any:
        self.alarms.append((delay_s, callback))
        return SimpleNamespace(cancel=lambda: None)

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)

    def around(self) -> None:
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()


class Event:
    """A device's event. passed: set by the test; broken: what asking raises."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.broken: BaseException | None = None

    def query(self) -> bool:
        if self.broken is not None:
            raise self.broken
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of `StayAwake`, set by hand."""
    clock = [100.0]
    monkeypatch.setattr(event_loop.time, "perf_counter", lambda: clock[0])
    return clock


def test_a_loop_is_awake_until_its_last_message_is_old(now: list[float]) -> None:
    """Each message prolongs the time in which the loop polls; after the last one it sleeps."""
    turns: Any = Turns()
    awake = StayAwake(turns, 0.5)
    awake.touch()
    awake.touch()
    assert len(turns.soon) == 1  # however many messages: once around
    now[0] += 0.4
    turns.around()
    awake.touch()
    now[0] += 0.4
    turns.around()
    assert turns.soon  # the second message keeps it
    now[0] += 0.2
    turns.around()
    assert not turns.soon
    awake.touch()
    assert len(turns.soon) == 1


def test_a_turn_that_has_work_keeps_the_loop_awake(now: list[float]) -> None:
    """A device at work is looked at whatever the time; when it is done, the loop may sleep."""
    turns: Any = Turns()
    works = [True, True, False]
    awake = StayAwake(turns, 0.0, lambda: works.pop(0))
    awake.look()
    now[0] += 1.0
    turns.around()
    turns.around()
    assert turns.soon
    turns.around()
    assert not turns.soon
    assert not works


def test_a_message_within_a_turn_is_looked_at_however_long_the_turn_takes(
    now: list[float],
) -> None:
    """What comes while the loop is being gone around is not mistaken for what the turn has seen."""
    turns: Any = Turns()
    looked = []

    def turn() -> bool:
        looked.append(1)
        if len(looked) == 1:
            awake.touch()
            now[0] += 1.0
        return False

    awake = StayAwake(turns, 0.5, turn)
    awake.look()
    turns.around()
    turns.around()
    assert len(looked) == 2
    assert not turns.soon


def test_a_turn_that_fails_is_not_the_last(now: list[float]) -> None:
    """The loop's handler tells of it; the next message is looked at."""
    turns: Any = Turns()

    def turn() -> bool:
        raise RuntimeError("planted")

    awake = StayAwake(turns, 0.0, turn)
    for _ in range(2):
        awake.touch()
        with pytest.raises(RuntimeError, match="planted"):
            turns.around()


@pytest.mark.parametrize(
    ("set_ms", "on_gpu", "processors", "expected"),
    [
        (None, True, 4, AWAKE_S),
        (None, True, 3, 0.0),
        (None, False, 64, 0.0),
        (0.0, True, 64, 0.0),
        (7.0, False, 1, 0.007),
    ],
)
def test_who_polls(
    set_ms: float | None,
    on_gpu: bool,
    processors: float,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless it is set, only a process beside a GPU that has processors to spare."""
    monkeypatch.setattr(event_loop, "num_processors", lambda: processors)
    assert awake_s(set_ms, on_gpu=on_gpu) == expected


def test_a_quota_counts_as_fewer_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container held to 2.5 processors of 16 counts 2.5."""
    monkeypatch.setattr(event_loop.os, "sched_getaffinity", lambda pid: range(16))
    limit = tmp_path / "cpu.max"
    assert num_processors(limit) == 16
    with monkeypatch.context() as elsewhere:  # not Linux
        elsewhere.delattr(event_loop.os, "sched_getaffinity")
        elsewhere.setattr(event_loop.os, "cpu_count", lambda: 8)
        assert num_processors(limit) == 8
    for text, count in (("max 100000", 16), ("250000 100000", 2.5), ("9900000 100000", 16)):
        limit.write_text(text)
        assert num_processors(limit) == count


async def test_an_engine_on_a_loop_gets_what_it_waits_for() -> None:
    """Arrivals, the device, instants and work on a thread, in order, while the loop runs on."""
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    event, got = Event(), []
    started, go_on = threading.Event(), threading.Event()

    def works_long() -> str:
        started.set()
        assert go_on.wait(20)
        return threading.current_thread().name

    def serve() -> Waiting[None]:
        got.append((yield Arrival(inbox, ENDLESS_S)))
        yield Done(event)
        got.append("device")
        yield Until(0.0)
        got.append((yield Apart(works_long)))

    poller = EnginePoller(asyncio.get_running_loop(), serve(), 0.0)
    inbox.put("frame")
    poller.wake()
    while not got:
        await asyncio.sleep(0)
    assert got == ["frame"]
    event.passed.set()
    while not started.is_set():
        await asyncio.sleep(0)
    assert got == ["frame", "device"]  # the loop runs on while a thread works
    go_on.set()
    await asyncio.wrap_future(poller.ended)
    assert got[-1] != threading.current_thread().name


async def test_nothing_that_comes_in_time_is_waited_for_no_longer() -> None:
    """A wait for arrivals ends after its time, so that idle sessions are looked for."""
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    got = []

    def serve() -> Waiting[None]:
        got.append((yield Arrival(inbox, 0.01)))

    await asyncio.wrap_future(EnginePoller(asyncio.get_running_loop(), serve(), 0.0).ended)
    assert got == [queue.Empty]


def test_an_alarm_that_rings_early_is_set_again(now: list[float]) -> None:
    """Loops count in milliseconds, from when they last looked: the time may not be over yet."""
    turns: Any = Turns()
    got = []

    def serve() -> Waiting[None]:
        got.append((yield Arrival(queue.SimpleQueue(), 1.0, now[0])))

    EnginePoller(turns, serve(), 0.0)
    turns.around()
    for seconds in (1.0, 0.25):
        delay_s, ring = turns.alarms.pop()
        assert delay_s == seconds
        assert not turns.soon
        now[0] += 0.75 * seconds
        ring()
        turns.around()
        assert not got
    now[0] += turns.alarms[-1][0]
    turns.alarms[-1][1]()
    turns.around()
    assert got == [queue.Empty]


async def test_what_comes_while_work_is_apart_is_seen_when_it_is_back() -> None:
    """The loop has gone to sleep by then, and only the end of the work wakes it."""
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    go_on, got = threading.Event(), []

    def serve() -> Waiting[None]:
        yield Apart(lambda: go_on.wait(20))
        got.append((yield Arrival(inbox, ENDLESS_S)))

    poller = EnginePoller(asyncio.get_running_loop(), serve(), 0.0)
    inbox.put("frame")
    poller.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(asyncio.wrap_future(poller.ended), 20)
    assert got == ["frame"]


async def test_an_idle_engine_lets_its_loop_sleep() -> None:
    """Where nothing arrives the loop does not go around for the engine."""
    loop = asyncio.get_running_loop()
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    polls = []

    class Counted(Arrival):
        def poll(self) -> Any:
            polls.append(1)
            return super().poll()

    def serve() -> Waiting[None]:
        yield Counted(inbox, ENDLESS_S)

    poller = EnginePoller(loop, serve(), 0.0)
    poller.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(polls) == 1
    inbox.put("end")
    poller.wake()
    await asyncio.wrap_future(poller.ended)


@pytest.mark.parametrize("where", ["device", "thread"])
async def test_what_a_wait_ends_in_is_raised_where_it_was_waited_for(where: str) -> None:
    """A lost device, and work that fails on a thread, are errors of the engine, not of the loop."""

    def fails() -> None:
        raise RuntimeError("lost")

    event = Event()
    event.broken = RuntimeError("lost")
    caught = []

    def serve() -> Waiting[None]:
        try:
            yield Done(event) if where == "device" else Apart(fails)
        except RuntimeError as error:
            caught.append(str(error))

    await asyncio.wrap_future(EnginePoller(asyncio.get_running_loop(), serve(), 0.0).ended)
    assert caught == ["lost"]


async def test_work_that_ends_in_what_no_future_carries_is_an_error_all_the_same() -> None:
    """A StopIteration would be lost on its way, and the engine wait for it."""
    caught = []

    def work() -> Waiting[None]:
        yield Apart(lambda: next(iter(())))

    def serve() -> Waiting[None]:
        try:
            yield from work()
        except RuntimeError as error:
            caught.append(type(error.__cause__))

    ended = EnginePoller(asyncio.get_running_loop(), serve(), 0.0).ended
    await asyncio.wait_for(asyncio.wrap_future(ended), 20)
    assert caught == [StopIteration]


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_work_that_no_thread_does_ends_the_engine(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the command alone: what was refused may still be queued, and done beside other work."""
    loop, caught, sent = asyncio.new_event_loop(), [], []

    def run_in_executor(executor: Any, work: Any, *arguments: Any) -> Any:
        if how == "refused":
            raise RuntimeError("can't start new thread")
        sent.append(loop.create_future())
        return sent[-1]

    monkeypatch.setattr(loop, "run_in_executor", run_in_executor)

    def serve() -> Waiting[None]:
        try:
            yield Apart(lambda: None)
        except BaseException as error:  # noqa: BLE001 - told of
            caught.append(type(error))

    poller = EnginePoller(loop, serve(), 0.0)
    for future in sent:
        future.cancel()
        poller._came_back(future)
    assert poller.ended.done()
    assert caught == [asyncio.CancelledError]
    loop.close()


def test_an_engine_that_fails_in_its_own_end_is_not_waited_for() -> None:
    """Whoever waits for the end is told what it was."""
    turns: Any = Turns()
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()

    def serve() -> Waiting[None]:
        yield Arrival(inbox, ENDLESS_S)
        raise RuntimeError("planted")

    poller = EnginePoller(turns, serve(), 0.0)
    inbox.put("frame")
    with pytest.raises(RuntimeError, match="planted"):
        turns.around()
    assert isinstance(poller.ended.exception(0), RuntimeError)


class Sender:
    """Where results were posted; has_sent: set by the test."""

    has_sent = False


def test_answers_are_waited_for_until_they_left_or_a_peer_is_slow() -> None:
    """All senders count; one whose peer does not read is given up after a bounded number of turns;
    an engine with a thread of its own does not wait."""
    senders = [Sender(), Sender()]
    leaving = Leaving(senders)
    assert leaving.poll() is NOT_YET
    senders[0].has_sent = True
    assert leaving.poll() is NOT_YET
    senders[1].has_sent = True
    assert leaving.poll() is None
    stuck = Leaving([Sender()])
    assert [stuck.poll() for _ in range(MOST_TURNS)] == [NOT_YET] * MOST_TURNS
    assert stuck.poll() is None
    assert Leaving([Sender()]).block() is None


def test_a_thread_blocks_where_a_loop_polls() -> None:
    """The same waits, blocking, bring the same; errors are raised where they were waited for."""
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    inbox.put("frame")
    event = Event()
    event.passed.set()

    def fails() -> None:
        raise RuntimeError("lost")

    def serve() -> Waiting[list[Any]]:
        got = [(yield Arrival(inbox, ENDLESS_S)), (yield Arrival(inbox, 0.0))]
        yield Done(event)
        yield Until(0.0)
        got.append((yield Apart(lambda: threading.current_thread())))
        try:
            yield Apart(fails)
        except RuntimeError as error:
            got.append(str(error))
        return got

    found = block_on(serve())
    assert found == ["frame", queue.Empty, threading.current_thread(), "lost"]
    assert Done(Event()).poll() is NOT_YET
