"""Work ahead of commands: what a service may be asked next, computed while its device is idle.

A draft waits while the target verifies. Meanwhile its sessions are forked at the likeliest outcomes
of the round: a fork is a session of nobody's that shares its origin's pages and copies the one it
writes into. What forks answer is what the origin would answer at that prefix, since nothing but the
prefix and the session's parameters goes into it. Forks never take pages from sessions, are dropped
as soon as their origin has a new command, and fail for themselves. Must not know what a role's
outcomes are (`Role.outlooks`). Runs on the engine's worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specmesh.engine.executor import Executor
from specmesh.engine.pages import PageTables
from specmesh.engine.role import Finished, Outlook, Role
from specmesh.engine.scheduler import Segment, Step, Task
from specmesh.engine.sessions import Checkpoint, Link, Session, SessionTable
from specmesh.engine.waits import Waiting
from specmesh.errors import NumericFault, OutOfPages, SpecmeshError
from specmesh.ledger import Ledger

logger = logging.getLogger(__name__)

NOTHING = Checkpoint(0, 0, 0, 0, ())  # to go back to: a fork that fails is dropped

Decide = Callable[[list[Finished], torch.Tensor], Waiting[list[Any]]]


@dataclass(frozen=True, slots=True)
class _Wish:
    """A task that was answered to its end, and wants to know what may follow."""

    task: Task
    answer: Any


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork at work on its outlook. copies: pages to copy before its first pass."""

    task: Task
    outlook: Outlook
    copies: list[tuple[int, int]]


class WorkAhead:
    """What is wished for, in order, and the forks that do it. One wish a session at most."""

    def __init__(
        self,
        table: SessionTable,
        pages: PageTables,
        executor: Executor,
        role: Role,
        decide: Decide,
    ) -> None:
        """decide: the outcomes of passes that the device has not decided."""
        self._table = table
        self._pages = pages
        self._executor = executor
        self._role = role
        self._decide = decide
        self._wishes: dict[int, _Wish] = {}  # by the session's serial

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._wishes)

    def drop_stale(self) -> bool:
        """Forget wishes of sessions that have moved on, up to the first that has not. Whether there
        is one."""
        while self._wishes:
            serial, wish = next(iter(self._wishes.items()))
            if self._is_current(wish.task):
                return True
            del self._wishes[serial]
        return False

    def consider(self, task: Task, answer: Any) -> None:
        """A command was answered to its end: note it where more is wished for. What that is can
        wait, the answer cannot."""
        if not self._role.looks_ahead(task):
            return
        self._wishes[task.session.serial] = _Wish(task, answer)
        if len(self._wishes) > len(self._table):  # the device is never idle, and sessions end
            current = {
                key: wish for key, wish in self._wishes.items() if self._is_current(wish.task)
            }
            self._wishes = current

    def run(
        self, meanwhile: Callable[[], object], is_overtaken: Callable[[], bool]
    ) -> Waiting[tuple[Link, Any] | None]:
        """Do what was wished for first; returns the link to tell, and its result.

        is_overtaken: asked between passes, whether commands wait. None where the work gave nothing,
        was given up for them, or is of no use any more. Raises what the device raises.
        """
        wish = self._wishes.pop(next(iter(self._wishes)))
        if not self._is_current(wish.task):
            return None
        forks: list[_Fork] = []
        is_over = False
        try:
            self._fork_all(wish, forks, is_overtaken)
            answered = yield from self._run(forks, meanwhile, is_overtaken)
            is_over = True
        finally:
            for fork in forks:
                if fork.task.is_tainted or not is_over:  # NaN, or whatever a failed pass has left
                    self._executor.clear(self._pages.private_pages(fork.task.session))
                self._pages.release(fork.task.session)
        found = [
            (fork.outlook, answered[id(fork.task)]) for fork in forks if id(fork.task) in answered
        ]
        if not found or not self._is_current(wish.task):
            return None
        command = wish.task.request.command
        result = self._role.wire.result_type(
            session_id=command.session_id, epoch=command.epoch, round=command.round
        )
        self._role.foreseen(found, result)
        return wish.task.request.link, result

    def _is_current(self, task: Task) -> bool:
        """Whether its session stands where the task has left it."""
        session, request = task.session, task.request
        if self._table.get(request.link, session.session_id) is not session or session.queued:
            return False
        last = session.answered
        return session.task is None and last is not None and last.command is request.command

    # ------------------------------------------------------------ forks

    def _fork_all(self, wish: _Wish, forks: list[_Fork], is_overtaken: Callable[[], bool]) -> None:
        """Forks for the outlooks, the first ones first, that there is room and pages for.

        Pages may come from the prefix cache: once, as they are free when the forks are done.
        """
        for outlook in self._role.outlooks(wish.task, wish.answer):
            if is_overtaken():
                return
            fork = self._fork(wish.task, outlook)
            if fork is not None:
                forks.append(fork)

    def _fork(self, answered: Task, outlook: Outlook) -> _Fork | None:
        """None where K/V of the origin is gone, or too few pages are free."""
        origin = answered.session
        shared_len = origin.ledger.confirmed_len + len(outlook.tokens) - 1
        if origin.ledger.written_len < shared_len:
            return None
        session = _forked(origin, outlook.tokens)
        try:
            role_state = self._role.check(session, outlook.command)
        except SpecmeshError:  # there is no room left for such a round
            return None
        ledger, pool = session.ledger, self._pages.pool
        task = Task(
            session=session,
            request=answered.request,
            checkpoint=NOTHING,
            before=ledger.boundaries,
            base_len=ledger.confirmed_len,
            role_state=role_state,
        )
        self._role.begin(task)
        session.block_table = origin.block_table[: pool.pages_for(shared_len)]
        for page in session.block_table:
            pool.retain(page)
        ledger.allocated_len = len(session.block_table) * self._pages.page_size
        ledger.wrote(shared_len)
        try:
            return _Fork(task, outlook, self._pages.reserve(session, task.reserve_len))
        except OutOfPages:
            self._pages.release(session)
            return None

    def _run(
        self,
        forks: Sequence[_Fork],
        meanwhile: Callable[[], object],
        is_overtaken: Callable[[], bool],
    ) -> Waiting[dict[int, Any]]:
        """Passes until every fork has its answer; answers by the task's id, none if overtaken."""
        answered: dict[int, Any] = {}
        copies = [pair for fork in forks for pair in fork.copies]
        tasks = [fork.task for fork in forks]
        while tasks:
            if is_overtaken():
                return {}
            segments = [
                Segment(task, task.session.ledger.written_len, task.feed_end, task.num_rows)
                for task in tasks
            ]
            step, copies = Step(segments, copies, num_holders=len(tasks)), []
            outcome = yield from self._executor.perform(step, meanwhile, lambda: False)
            decided = [entry for entry in outcome.finished if entry.decided is not None]
            outcomes = [entry.decided[0] for entry in decided if entry.decided]
            open_ = [entry for entry in outcome.finished if entry.decided is None]
            if open_:
                outcomes += yield from self._decide(open_, outcome.logits)
            tasks = [*outcome.unfinished]
            for entry, body in zip([*decided, *open_], outcomes, strict=True):
                if body is None:
                    tasks.append(entry.task)
                    continue
                if isinstance(body, SpecmeshError):
                    self._note(entry.task, body)
                    continue
                if entry.task.fault is not None:
                    self._note(entry.task, entry.task.fault)
                answered[id(entry.task)] = body
        return answered

    def _note(self, task: Task, error: SpecmeshError) -> None:
        """A fork without a whole answer: whoever asks for it later is told why."""
        logger.debug("work ahead failed", extra={"reason": error.reason, "detail": error.message})
        if isinstance(error, NumericFault):  # NaN stays in what it has written
            self._executor.clear(self._pages.private_pages(task.session))


def _forked(origin: Session, tokens: Sequence[int]) -> Session:
    """The session as it would stand had these tokens been confirmed; without pages."""
    ledger = origin.ledger
    return Session(
        link=origin.link,
        session_id=origin.session_id,
        epoch=origin.epoch,
        serial=origin.serial,
        opening=origin.opening,
        shaper=origin.shaper,
        ledger=Ledger(
            prompt_len=ledger.prompt_len,
            max_len=ledger.max_len,
            epoch=ledger.epoch,
            tokens=[*ledger.tokens, *tokens],
        ),
        last_used_ns=origin.last_used_ns,
    )
