"""The life of a command: admitted, checked, at work, answered or undone.

Owns what opening, closing and working commands do to sessions, and every answer about them:
results, DEFERRED, errors, repeats. A command that fails changes nothing and fails its own session's
command only. Must not know tensors, threads or streams. Runs on the engine's worker.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span

from protos.specmesh.v1 import session_pb2
from specmesh.engine.answers import Answer, Answered
from specmesh.engine.role import Part, Role
from specmesh.engine.scheduler import Scheduler, Task
from specmesh.engine.sessions import (
    MAX_QUEUED_PER_SESSION,
    Checkpoint,
    Link,
    Request,
    Session,
    SessionTable,
)
from specmesh.errors import (
    InternalError,
    InvalidRequest,
    NotReady,
    PrefixMismatch,
    SpecmeshError,
    StaleRound,
    TooBusy,
)
from specmesh.service_metrics import ServiceMetrics
from specmesh.spans import Key
from specmesh.telemetry import Telemetry
from specmesh.wire_errors import error_to_message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observers:
    """Where commands are traced and counted, and the clocks.

    clock_ns is monotonic; unix_offset_ns added to it gives Unix time for spans.
    """

    telemetry: Telemetry
    metrics: ServiceMetrics
    clock_ns: Callable[[], int]
    unix_offset_ns: int = 0


class CommandDesk:
    """Carries commands between links, sessions, scheduler and role."""

    def __init__(
        self, table: SessionTable, scheduler: Scheduler, role: Role, observers: Observers
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._role = role
        self._observers = observers
        self._outbound: dict[Link, list[Any]] = defaultdict(list)
        self.completed: list[Task] = []  # started with nothing to feed; the engine advances them
        self.draining = False
        self.num_answered = 0

    # ------------------------------------------------------------ answers

    def take_outbound(self) -> dict[Link, list[Any]]:
        """Results made since the last call, by link."""
        outbound, self._outbound = self._outbound, defaultdict(list)
        return outbound

    def _answer(self, link: Link, command: Any, **fields: Any) -> Any:
        result = self._role.wire.result_type(
            session_id=command.session_id, epoch=command.epoch, round=command.round, **fields
        )
        self._outbound[link].append(result)
        return result

    def tell(self, link: Link, result: Any) -> None:
        """Send what no command waits for."""
        self._outbound[link].append(result)

    def refuse(self, link: Link, command: Any, error: SpecmeshError, queue_us: int = 0) -> None:
        """Answer a command with an error."""
        self._answer(link, command, error=error_to_message(error))
        kind = command.WhichOneof("command") or "none"
        self._observers.metrics.observe_command(kind, error.reason, queue_us)

    def answer_deferred(self, task: Task) -> None:
        """Tell the peer that the answer will take a while, so that no deadline calls it lost."""
        request = task.request
        self._answer(request.link, request.command, deferred=session_pb2.Deferred())
        self._observers.metrics.observe_command(self._role.wire.kind, "deferred", 0)

    # ------------------------------------------------------------ arrival

    def accept(self, request: Request) -> None:
        """Take one command of a frame. Whatever is wrong with it fails this command alone."""
        command = request.command
        kind = command.WhichOneof("command")
        self.num_answered += 1  # one way or another it leaves the inbox now
        try:
            if kind == "open":
                self._open(request)
            elif kind == "close":
                self._close(request)
            elif kind == self._role.wire.kind:
                self._enqueue(request)
            else:
                raise InvalidRequest("the command is not set", field="command")
        except SpecmeshError as error:
            self.refuse(request.link, command, error)
        except Exception as error:
            logger.exception("command failed on a bug", extra={"session_id": command.session_id})
            self.refuse(request.link, command, _as_internal(error))

    def _open(self, request: Request) -> None:
        link, command = request.link, request.command
        if not self._table.is_repeated_open(link, command):
            if self.draining:
                raise NotReady("this service is draining and takes no new sessions")
            shaper = self._table.check_open(link, command)
            replaced = self._table.get(link, command.session_id)
            if replaced is not None:
                self.end(replaced)
            self._table.add(link, command, shaper)
        opened = session_pb2.SessionOpened(page_size=self._table.limits.page_size)
        self._answer(link, command, opened=opened)
        self._observers.metrics.observe_command("open", "ok", 0)

    def _close(self, request: Request) -> None:
        """Closing what is not there succeeds: it may be a repeat."""
        link, command = request.link, request.command
        session = self._table.get(link, command.session_id)
        if session is not None:
            if command.epoch < session.epoch:
                raise StaleRound(f"epoch {command.epoch} is behind epoch {session.epoch}")
            self.end(session)
        self._answer(link, command, closed=session_pb2.SessionClosed())
        self._observers.metrics.observe_command("close", "ok", 0)

    def end(self, session: Session) -> None:
        """Close a session: commands at work are dropped unanswered, pages go back to the pool."""
        self._scheduler.release(session)
        if session.task is not None:
            self._scheduler.drop(session.task)
            if session.task in self.completed:
                self.completed.remove(session.task)
            self._end_span(session.task, self._observers.clock_ns())
            session.task = None
        session.queued.clear()
        self._table.remove(session)

    def end_link(self, link: Link) -> None:
        """Close the sessions that a link opened."""
        for session in self._table.of_link(link):
            self.end(session)
        self._outbound.pop(link, None)

    def expire(self, idle_ns: int) -> None:
        """Close sessions that were idle for longer than idle_ns."""
        for session in self._table.expired(idle_ns):
            logger.info("session expired", extra={"session_id": session.session_id})
            self.end(session)

    def _enqueue(self, request: Request) -> None:
        command = request.command
        session = self._table.find(request.link, command.session_id, command.epoch)
        known = session.find_repeat(request)
        if known is None:
            if len(session.queued) >= MAX_QUEUED_PER_SESSION:
                raise TooBusy(f"{len(session.queued)} commands of this session wait already")
            session.queued.append(request)
            self._start_next(session)
        elif isinstance(known, Answered):
            self._outbound[request.link].append(known.result())
        elif session.task is not None and session.task.request is known:
            known.link = request.link  # where the answer is waited for now
            if session.task.is_deferred:
                self._answer(request.link, command, deferred=session_pb2.Deferred())

    # ------------------------------------------------------------ work

    def _start_next(self, session: Session) -> None:
        """Start the session's oldest waiting command; commands that fail their checks give way."""
        while session.task is None and session.queued:
            request = session.queued.popleft()
            try:
                session.task = self._start(session, request)
            except SpecmeshError as error:
                self._refuse_traced(session, request, error)
            except Exception as error:
                logger.exception(
                    "command failed on a bug", extra={"session_id": session.session_id}
                )
                self._refuse_traced(session, request, _as_internal(error))

    def _start(self, session: Session, request: Request) -> Task:
        command = request.command
        working = getattr(command, self._role.wire.kind)
        prefix: session_pb2.PrefixUpdate = working.prefix
        update: dict[str, Any] = {
            "base_len": prefix.base_len,
            "append_from": prefix.append_from,
            "append": prefix.append,
            "num_accepted": prefix.num_accepted,
            "digest": prefix.prefix_digest,
            "resync": prefix.resync,
        }
        ledger = session.ledger
        self._check_prefix(session, prefix, update)
        role_state = self._role.check(session, working)
        checkpoint = Checkpoint.take(ledger, prefix.append_from)
        ledger.apply_update(**update)
        task = Task(
            session=session,
            request=request,
            checkpoint=checkpoint,
            before=ledger.boundaries,
            base_len=prefix.base_len,
            role_state=role_state,
            ready_ns=request.arrived_ns,
            since_ns=request.arrived_ns,
            span=self._start_span(request),
        )
        self._role.begin(task)
        rows_from = task.feed_end - task.num_rows
        if ledger.written_len > rows_from:
            # A row is wanted of a token that was fed before: feed it once more.
            task.overwritten_from = rows_from
            ledger.drop_kv(rows_from)
            ledger.allocated_len = len(session.block_table) * self._table.limits.page_size
        if task.num_remaining:
            self._scheduler.add(task)
        else:
            self.completed.append(task)
        return task

    def _check_prefix(
        self, session: Session, prefix: session_pb2.PrefixUpdate, update: dict[str, Any]
    ) -> None:
        if prefix.base_len == 0:
            raise InvalidRequest("the prefix is empty", field="prefix.base_len")
        vocab_size = self._table.limits.vocab_size
        if prefix.append and max(prefix.append) >= vocab_size:
            raise InvalidRequest(
                f"token id {max(prefix.append)} is outside a vocabulary of {vocab_size}",
                field="prefix.append",
            )
        try:
            session.ledger.check_update(**update)
        except PrefixMismatch as mismatch:
            raise PrefixMismatch(
                mismatch.message,
                confirmed_len=session.ledger.confirmed_len,
                page_digests=session.ledger.page_digests(self._table.limits.page_size),
            ) from mismatch

    def commit(self, task: Task, outcome: Any) -> None:
        """Take a role's answer or Part: publish full pages, answer, go on or start what waits."""
        session, request = task.session, task.request
        goes_on = isinstance(outcome, Part)
        self._scheduler.publish(session)
        session.ledger.check()
        now = self._observers.clock_ns()
        answer = Answer.to(
            request.command,
            self._role.wire,
            task.before,
            session.ledger.boundaries,
            task.take_spent(now),
            outcome.body if goes_on else outcome,
        )
        task.answers.append(answer)
        self._outbound[request.link].append(answer.result)
        if task.before.kv_len == 0:  # a prefill: what was found, what had to be computed
            metrics = self._observers.metrics
            metrics.cached_tokens.inc(answer.spent.cached_tokens)
            metrics.computed_tokens.inc(task.base_len - answer.spent.cached_tokens)
        if goes_on:
            task.confirm()
            self._scheduler.add(task)
        else:
            self._finish(task, now)

    def _finish(self, task: Task, now: int) -> None:
        """A command is answered to its end: remember the answers, start what waits."""
        session = task.session
        session.answered = Answered(task.request.command, task.answers)
        session.last_used_ns = now
        session.task = None
        queue_us = sum(answer.spent.queue_ns for answer in task.answers) // 1000
        outcome = "ok" if task.fault is None else task.fault.reason
        self._observers.metrics.observe_command(self._role.wire.kind, outcome, queue_us)
        if task.fault is not None:
            logger.warning(
                "a command was answered in part",
                extra={
                    "session_id": session.session_id,
                    "reason": outcome,
                    "detail": task.fault.message,
                },
            )
            Telemetry.fail(task.span, task.fault)
        self._end_span(task, now)
        self._start_next(session)

    def fail(self, task: Task, error: SpecmeshError) -> None:
        """Undo a command back to its last answer and say so. The session goes on from there."""
        session, request = task.session, task.request
        task.checkpoint.restore(session.ledger, task.overwritten_from)
        session.task = None
        session.last_used_ns = self._observers.clock_ns()
        queue_ns = task.queue_ns + sum(answer.spent.queue_ns for answer in task.answers)
        self.refuse(request.link, request.command, error, queue_ns // 1000)
        Telemetry.fail(task.span, error)
        task.span.end()
        self._start_next(session)

    # ------------------------------------------------------------ observation

    def _start_span(self, request: Request) -> Span:
        telemetry, command = self._observers.telemetry, request.command
        context = telemetry.extract(command.trace)
        if context is None:
            return INVALID_SPAN
        working = getattr(command, self._role.wire.kind)
        attributes = {
            Key.SESSION_ID: command.session_id,
            Key.EPOCH: command.epoch,
            Key.ROUND: command.round,
            Key.BASE_LEN: working.prefix.base_len,
        }
        start_ns = request.arrived_ns + self._observers.unix_offset_ns
        return telemetry.start(self._role.wire.span, context, attributes, start_ns)

    def _end_span(self, task: Task, now: int) -> None:
        """One span for all parts of a command; of one that is closed, for those it was answered."""
        if task.span is INVALID_SPAN:
            return
        if task.answers:
            first, last = task.answers[0], task.answers[-1]
            spent = [answer.spent for answer in task.answers]
            answered = Answered(task.request.command, task.answers).result()
            task.span.set_attributes(
                {
                    Key.QUEUE_US: sum(each.queue_ns for each in spent) // 1000,
                    Key.FORWARD_US: sum(each.forward_ns for each in spent) // 1000,
                    Key.BATCH_SIZE: max(each.batch_size for each in spent),
                    Key.NUM_STEPS: sum(each.num_steps for each in spent),
                    Key.CACHED_TOKENS: max(each.cached_tokens for each in spent),
                    Key.DEFERRED: task.was_deferred,
                    Key.BEFORE: _lengths(first.before),
                    Key.AFTER: _lengths(last.after),
                    **self._role.span_attributes(task, getattr(answered, self._role.wire.answer)),
                }
            )
        task.span.end(now + self._observers.unix_offset_ns)

    def _refuse_traced(self, session: Session, request: Request, error: SpecmeshError) -> None:
        span = self._start_span(request)
        Telemetry.fail(span, error)
        span.end()
        self.refuse(request.link, request.command, error)


def _lengths(boundaries: Any) -> tuple[int, int, int]:
    return boundaries.confirmed_len, boundaries.kv_len, boundaries.allocated_len


def _as_internal(error: Exception) -> InternalError:
    return InternalError(f"unexpected {type(error).__name__}; see the service's log")
