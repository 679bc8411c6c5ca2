"""Continuous batching: which tokens of which commands the next forward pass computes.

Owns the commands at work and the order among them: first in, first out under a token budget, long
prompts in chunks, pages by seniority. When pages run out the newest session is preempted: its K/V
is dropped and rebuilt later from its confirmed prefix, and its command is answered DEFERRED first.
Must not know torch, rows or transports; what a command does with its logits is its role's affair
(specmesh/engine/runner.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.trace import INVALID_SPAN, Span

from specmesh.engine.pages import PageTables
from specmesh.engine.sessions import Checkpoint, Request, Session
from specmesh.errors import SpecmeshError
from specmesh.ledger import Boundaries

NOTHING_OVERWRITTEN = 1 << 62  # past every position


class Spent(NamedTuple):
    """What a command, or a part of it, took. Times in nanoseconds; sizes of its largest pass."""

    total_ns: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    batch_size: int = 0
    batch_rows: int = 0
    cached_tokens: int = 0
    num_steps: int = 0


@dataclass(slots=True, eq=False)
class Task:
    """One Propose or Verify at work.

    base_len: confirmed length it works from. fed: tokens past the confirmed prefix that are fed as
    well (candidates to verify, or those drawn so far). num_rows: how many of the last tokens fed
    need logits. is_deferred: it was answered DEFERRED since its last answer; was_deferred: ever.
    reserve_len: it writes K/V at no position from here on. role_state: the role's.
    is_tainted: K/V that it wrote may hold NaN, though nothing it is answered with does. fault: why
    it is answered with less than it might be, None where it is not: reported, and no failure.
    answers: what it was answered so far (specmesh/engine/answers.py); checkpoint, before, since_ns,
    times and counts of passes begin anew with each of them.
    Times in nanoseconds of the engine's clock.
    """

    session: Session
    request: Request
    checkpoint: Checkpoint
    before: Boundaries
    base_len: int
    role_state: Any = None
    fed: list[int] = field(default_factory=list)
    num_rows: int = 1
    reserve_len: int = 0
    is_reserved: bool = False
    is_deferred: bool = False
    was_deferred: bool = False
    is_tainted: bool = False
    fault: SpecmeshError | None = None
    overwritten_from: int = NOTHING_OVERWRITTEN
    ready_ns: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    batch_size: int = 0
    batch_rows: int = 0
    num_steps: int = 0
    cached_tokens: int = 0
    since_ns: int = 0
    answers: list[Any] = field(default_factory=list)
    span: Span = INVALID_SPAN

    def take_spent(self, now_ns: int) -> Spent:
        """What was spent since the last answer; counting begins anew."""
        spent = Spent(
            now_ns - self.since_ns,
            self.queue_ns,
            self.forward_ns,
            self.batch_size,
            self.batch_rows,
            self.cached_tokens,
            self.num_steps,
        )
        self.since_ns = now_ns
        self.queue_ns = self.forward_ns = 0
        self.batch_size = self.batch_rows = self.cached_tokens = self.num_steps = 0
        return spent

    def confirm(self) -> None:
        """What was answered stands: a failure from here on undoes what follows it alone."""
        ledger = self.session.ledger
        self.checkpoint = Checkpoint.take(ledger, ledger.confirmed_len)
        self.before = ledger.boundaries
        self.overwritten_from = NOTHING_OVERWRITTEN
        self.is_deferred = False  # the peer waits for a new answer: it is told anew of a delay

    @property
    def feed_end(self) -> int:
        """Length to which K/V must be written before the role can go on."""
        return self.session.ledger.confirmed_len + len(self.fed)

    @property
    def num_remaining(self) -> int:
        """Tokens still to be fed before the role can go on."""
        return self.feed_end - self.session.ledger.written_len

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens at positions [start, end): confirmed ones, then those fed past them."""
        confirmed = self.session.ledger.tokens
        if end <= len(confirmed):
            return confirmed[start:end]
        past = start - len(confirmed)
        if past >= 0:
            return self.fed[past : end - len(confirmed)]
        return confirmed[start:] + self.fed[: end - len(confirmed)]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of one task in one forward pass; logits of the last num_rows of them."""

    task: Task
    start: int
    end: int
    num_rows: int

    @property
    def is_last(self) -> bool:
        """Whether the task has all its logits after this pass."""
        return self.end == self.task.feed_end


@dataclass(slots=True)
class Step:
    """One forward pass: its segments and the page copies that must come before it.

    num_holders: sessions with K/V, whether at work or between commands.
    """

    segments: list[Segment] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_holders: int = 0


class Scheduler:
    """Commands at work on one device."""

    def __init__(
        self,
        pages: PageTables,
        token_budget: int,
        prefill_chunk: int,
        on_deferred: Callable[[Task], None],
        clear: Callable[[list[int]], None],
    ) -> None:
        """token_budget: token rows of a pass over all sessions; prefill_chunk: of one session.

        on_deferred is called when a command first loses, or fails to get, its pages. clear zeroes
        pages.
        """
        self._pages = pages
        self._token_budget = token_budget
        self._prefill_chunk = prefill_chunk
        self._on_deferred = on_deferred
        self._clear = clear
        self._ready: deque[Task] = deque()
        self._deferred: list[Task] = []
        self._holders: dict[int, Session] = {}  # sessions with pages, by serial
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any command is at work, deferred ones included."""
        return bool(self._ready or self._deferred)

    @property
    def num_waiting(self) -> int:
        """Commands at work."""
        return len(self._ready) + len(self._deferred)

    def add(self, task: Task) -> None:
        """Take a new command, or one that goes on."""
        self._ready.append(task)

    def drop(self, task: Task) -> None:
        """Forget a command that was cancelled, wherever it waits."""
        if task in self._ready:
            self._ready.remove(task)
        if task in self._deferred:
            self._deferred.remove(task)

    def publish(self, session: Session) -> None:
        """Offer a session's full confirmed pages to the prefix cache."""
        self._pages.publish(session)

    def wipe(self, session: Session) -> None:
        """Drop K/V that may hold NaN, which masking does not silence; rebuilt when needed."""
        self._clear(self._pages.private_pages(session))
        self._free(session)

    def release(self, session: Session) -> None:
        """Free the pages of a session that ends. Never call it while a pass is running."""
        if session.task is not None and session.task.is_tainted:
            self.wipe(session)
        else:
            self._free(session)

    def _free(self, session: Session) -> None:
        self._pages.release(session)
        self._holders.pop(session.serial, None)

    def compose(self) -> Step:
        """Choose the next pass. Empty when nothing can run before pages become free."""
        step = Step()
        budget = self._token_budget
        waiting = [*sorted(self._deferred, key=_age), *self._ready]
        self._ready.clear()
        self._deferred.clear()
        left: deque[Task] = deque()
        for index, task in enumerate(waiting):
            if budget <= 0:
                left.extend(waiting[index:])
                break
            if task in self._deferred:  # preempted by an older one during this very loop
                continue
            if not self._reserve(task, step):
                self._defer(task)
                continue
            segment = self._cut(task, budget, is_first=not step.segments)
            if segment is None:
                left.append(task)
                continue
            budget -= segment.end - segment.start
            step.segments.append(segment)
        deferred = set(map(id, self._deferred))
        self._ready.extend(task for task in left if id(task) not in deferred)
        step.num_holders = len(self._holders)
        return step

    def _cut(self, task: Task, budget: int, *, is_first: bool) -> Segment | None:
        """The next tokens of a task within the budget; None when they must wait for a later pass.

        The rows that need logits stay together in the last segment.
        """
        start = task.session.ledger.written_len
        remaining = task.num_remaining
        chunk = min(budget, self._prefill_chunk)
        if remaining <= min(budget, self._prefill_chunk + task.num_rows):
            return Segment(task, start, task.feed_end, task.num_rows)
        if remaining > task.num_rows:
            size = min(chunk, remaining - task.num_rows)
            return Segment(task, start, start + size, 0)
        return Segment(task, start, task.feed_end, task.num_rows) if is_first else None

    def _reserve(self, task: Task, step: Step) -> bool:
        """Give a task all pages it will need. False when it must wait for other sessions."""
        if task.is_reserved:
            return True
        session = task.session
        if not session.block_table:
            reusable = min(task.base_len, task.feed_end - max(1, task.num_rows))
            task.cached_tokens = self._pages.attach_prefix(session, reusable)
            self._note_holder(session)
        missing = self._pages.num_missing(session, task.reserve_len)
        if missing and not self._make_room(session, missing, step):
            return False
        task.overwritten_from = min(task.overwritten_from, session.ledger.written_len)
        step.copies += self._pages.reserve(session, task.reserve_len)
        self._note_holder(session)
        task.is_reserved = True
        return True

    def _make_room(self, session: Session, num_pages: int, step: Step) -> bool:
        """Preempt newer sessions, the newest first, until the pool has num_pages to give."""
        if any(other.session.serial < session.serial for other in self._deferred):
            return False  # an older session waits for pages: it comes first
        if self._pages.pool.num_free >= num_pages:
            return True
        newer = [serial for serial in self._holders if serial > session.serial]
        obtainable = self._pages.num_freed([self._holders[serial] for serial in newer])
        if self._pages.pool.num_free + obtainable < num_pages:
            return False
        for serial in sorted(newer, reverse=True):
            if self._pages.pool.num_free >= num_pages:
                break
            self._preempt(self._holders[serial], step)
        return self._pages.pool.num_free >= num_pages

    def _preempt(self, victim: Session, step: Step) -> None:
        self.num_preemptions += 1
        step.segments = [segment for segment in step.segments if segment.task.session is not victim]
        freed = set(victim.block_table)
        step.copies = [pair for pair in step.copies if pair[1] not in freed]
        if victim.task is not None:
            self._defer(victim.task)
        else:
            self.release(victim)

    def _defer(self, task: Task) -> None:
        """Drop a task's K/V and let it wait until its pages can be had."""
        self.release(task.session)
        task.is_reserved = False
        if task not in self._deferred:
            self._deferred.append(task)
        if not task.is_deferred:
            task.is_deferred = task.was_deferred = True
            self._on_deferred(task)

    def _note_holder(self, session: Session) -> None:
        if session.block_table:
            self._holders[session.serial] = session


def _age(task: Task) -> int:
    return task.session.serial
