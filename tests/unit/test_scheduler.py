"""The scheduler alone: budgets, chunks, order, seniority; no model, no thread, no transport."""

from __future__ import annotations

from types import SimpleNamespace

from specmesh.engine.block_pool import BlockPool
from specmesh.engine.pages import PageTables
from specmesh.engine.scheduler import Scheduler, Task
from specmesh.engine.sessions import Checkpoint, Session
from specmesh.ledger import Ledger

PAGE_SIZE = 4


class Bench:
    """A scheduler over a small pool, with tasks that feed given prefixes."""

    def __init__(self, num_pages: int, token_budget: int = 32, prefill_chunk: int = 8) -> None:
        self.pool = BlockPool(num_pages, PAGE_SIZE)
        self.deferred: list[Task] = []
        self.cleared: list[int] = []
        self.scheduler = Scheduler(
            PageTables(self.pool),
            token_budget,
            prefill_chunk,
            self.deferred.append,
            self.cleared.extend,
        )
        self._num_sessions = 0

    def task(self, num_tokens: int, num_candidates: int = 0, first_token: int = 1) -> Task:
        """A verify of candidates after a prompt, added to the scheduler."""
        ledger = Ledger(prompt_len=num_tokens, max_len=1000)
        ledger.extend([first_token + self._num_sessions, *range(num_tokens - 1)])
        session = Session(
            link=None,
            session_id="",
            epoch=0,
            serial=self._num_sessions,
            opening=None,
            shaper=None,
            ledger=ledger,
            last_used_ns=0,
        )
        self._num_sessions += 1
        return self.work(session, num_candidates)

    def work(self, session: Session, num_candidates: int = 0) -> Task:
        """Another command of a session."""
        ledger = session.ledger
        base_len = ledger.confirmed_len
        if num_candidates:
            ledger.begin_round(num_candidates)
        task = Task(
            session,
            SimpleNamespace(),
            Checkpoint.take(ledger, base_len),
            ledger.boundaries,
            base_len,
            fed=[5] * num_candidates,
            num_rows=num_candidates + 1,
            reserve_len=base_len + num_candidates,
        )
        session.task = task
        self.scheduler.add(task)
        return task

    def step(self) -> list[tuple[int, int, int, int]]:
        """Compose and pretend to run: (serial, start, end, num_rows) per segment."""
        step = self.scheduler.compose()
        shape = []
        for segment in step.segments:
            session = segment.task.session
            assert segment.end <= len(session.block_table) * PAGE_SIZE
            shape.append((session.serial, segment.start, segment.end, segment.num_rows))
            session.ledger.wrote(segment.end)
            if segment.is_last:
                session.task = None
            else:
                self.scheduler.add(segment.task)
        self.pool.check_integrity()
        return shape


def test_every_ready_segment_goes_into_one_pass() -> None:
    """Short commands of several sessions share a pass, each with its rows."""
    bench = Bench(num_pages=64)
    for num_candidates in (0, 3, 1):
        bench.task(2, num_candidates)
    assert bench.step() == [(0, 0, 2, 1), (1, 0, 5, 4), (2, 0, 3, 2)]
    assert bench.step() == []
    assert not bench.scheduler.has_work


def test_prompts_are_cut_and_their_rows_stay_together() -> None:
    """A long prompt goes in chunks; the last one holds every token whose logits are wanted."""
    bench = Bench(num_pages=64)
    bench.task(20, num_candidates=3)
    assert bench.step() == [(0, 0, 8, 0)]
    assert bench.step() == [(0, 8, 16, 0)]
    assert bench.step() == [(0, 16, 23, 4)]


def test_a_remainder_smaller_than_the_rows_rides_along() -> None:
    """A chunk grows by up to the rows rather than leave a pass of a token or two."""
    bench = Bench(num_pages=64)
    bench.task(9)
    assert bench.step() == [(0, 0, 9, 1)]


def test_the_budget_bounds_a_pass_and_order_is_fair() -> None:
    """A decode waits at most one pass behind prompts, whatever the number of prompts."""
    bench = Bench(num_pages=200, token_budget=16, prefill_chunk=8)
    for _ in range(3):
        bench.task(40)
    bench.task(1)
    first, second = bench.step(), bench.step()
    assert [entry[:3] for entry in first] == [(0, 0, 8), (1, 0, 8)]
    assert [entry[0] for entry in second] == [2, 3, 0]
    assert sum(end - start for _, start, end, _ in second) <= 16


def test_rows_larger_than_the_budget_still_run_alone() -> None:
    """More candidates than the budget: the segment is not starved."""
    bench = Bench(num_pages=64, token_budget=4, prefill_chunk=4)
    bench.task(1, num_candidates=7)
    bench.task(1)
    assert bench.step() == [(0, 0, 8, 8)]
    assert bench.step() == [(1, 0, 1, 1)]


def test_the_newest_session_is_preempted_and_comes_back() -> None:
    """Idle or at work, the newest gives way; an older session is never asked to."""
    bench = Bench(num_pages=4)
    old = bench.task(6).session
    middle = bench.task(3).session
    newest = bench.task(3).session
    bench.step()
    assert bench.pool.num_free == 0
    bench.work(newest, num_candidates=1)
    old.ledger.extend([9] * 2)
    bench.work(old, num_candidates=3)
    assert bench.step() == [(0, 6, 11, 4)]
    assert newest.block_table == []
    assert middle.block_table != []
    assert [task.session for task in bench.deferred] == [newest]
    bench.scheduler.release(middle)
    assert bench.step() == [(2, 0, 4, 2)]
    assert bench.scheduler.num_preemptions == 1


def test_a_newer_session_does_not_overtake_one_that_waits_for_pages() -> None:
    """Seniority is strict: freed pages go to the oldest deferred command first."""
    bench = Bench(num_pages=4)
    holder = bench.task(8).session
    bench.step()
    waiting = bench.task(12)
    small = bench.task(2)
    assert bench.step() == []
    assert [task.session.serial for task in bench.deferred] == [1, 2]
    bench.scheduler.release(holder)
    order = [entry[0] for entry in bench.step()]
    assert order[0] == waiting.session.serial
    assert small.session.block_table == [] or 2 in order


def test_a_command_is_told_once_that_it_waits() -> None:
    """DEFERRED is answered once, however often pages are lost."""
    bench = Bench(num_pages=2)
    holder = bench.task(8).session
    bench.step()
    bench.task(4)
    for _ in range(3):
        bench.step()
    assert len(bench.deferred) == 1
    bench.scheduler.release(holder)
    assert len(bench.step()) == 1


def test_a_dropped_command_never_runs() -> None:
    """Cancelled commands leave the queues, ready or deferred, and their pages are freed."""
    bench = Bench(num_pages=2)
    running = bench.task(8)
    waiting = bench.task(4)
    bench.step()
    for task in (running, waiting):
        bench.scheduler.drop(task)
        bench.scheduler.release(task.session)
    assert bench.step() == []
    assert not bench.scheduler.has_work
    assert bench.pool.num_used == 0
    assert not bench.scheduler._holders  # nothing of an ended session is remembered


def test_shared_pages_are_copied_before_they_are_written() -> None:
    """Truncation into a published page replaces it, with a copy of what is still valid."""
    bench = Bench(num_pages=8)
    session = bench.task(8).session
    bench.step()
    bench.scheduler.publish(session)
    shared = list(session.block_table)
    session.ledger.truncate(6)
    session.ledger.extend([11, 12])
    bench.work(session, num_candidates=1)
    step = bench.scheduler.compose()
    assert step.copies == [(shared[1], session.block_table[1])]
    assert session.block_table[0] == shared[0]
    assert session.block_table[1] != shared[1]
    assert step.segments[0].start == 6
    assert session.published == [bench.pool.serial_of(shared[0])]


def test_reused_tokens_are_counted_once_however_often_pages_were_asked_for() -> None:
    """A command that waits tries again every pass; what it finds in the cache counts once."""
    bench = Bench(num_pages=6)
    first = bench.task(8).session
    bench.step()
    bench.scheduler.publish(first)
    bench.scheduler.release(first)
    holder = bench.task(9).session
    bench.step()
    waiting = bench.task(17, first_token=-1)  # its own prefix starts like the first one's
    assert waiting.session.ledger.tokens[:8] == first.ledger.tokens
    for _ in range(3):
        assert bench.step() == []
    bench.scheduler.release(holder)
    assert bench.step() == [(2, 8, 17, 1)]
    assert waiting.cached_tokens == 8


def test_nobody_is_preempted_for_pages_that_would_not_come_free() -> None:
    """A page shared with an older session stays in use when the newer one loses it: preemption
    counts what it would really free, and otherwise leaves everybody's K/V, and this pass's page
    copies, alone."""
    bench = Bench(num_pages=6)
    holder = bench.task(16).session
    while bench.step():
        pass
    bench.scheduler.publish(holder)
    waiting = bench.task(1)
    bench.step()
    sharer = bench.task(17, first_token=-1)
    assert bench.step() == [(2, 16, 17, 1)]
    assert sharer.session.block_table[:4] == holder.block_table
    waiting.session.ledger.extend([3] * 8)  # two pages more; one would come free
    bench.work(waiting.session)
    assert bench.step() == []
    assert bench.scheduler.num_preemptions == 0
    assert sharer.session.block_table != []
    assert [task.session.serial for task in bench.deferred] == [1]


def test_pages_that_may_hold_nan_are_zeroed_when_they_are_given_up() -> None:
    """By a session that is preempted or ends while its command is at work; others give theirs up as
    they are."""
    bench = Bench(num_pages=4)
    tasks = [bench.task(2 * PAGE_SIZE), bench.task(2 * PAGE_SIZE)]
    bench.scheduler.compose()
    held = [set(task.session.block_table) for task in tasks]
    tasks[1].is_tainted = True
    bench.scheduler.release(tasks[0].session)
    assert bench.cleared == []
    bench.scheduler.release(tasks[1].session)
    assert set(bench.cleared) == held[1]
    assert bench.pool.num_used == 0
