"""Performs the actions of one session: sends, timers, placement, decisions, delivery, records.

Owns the clock and everything asynchronous around one `Session`. Decides nothing about rounds: each
event goes through `Session.step`, each action is carried out, in order. Events that arrive while a
step runs, or while the reader of the stream is behind, wait in a short queue: one command is out
per side, so a service that fills it says more than it was asked. Must not know the public API;
`Sink` takes what is delivered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.commands import Ahead, Close, Failed, Open, Propose, Verify
from coordinator.decide import AuditResult, DraftFault, Law, audit_round, decide_round
from coordinator.fleet import Fleet
from coordinator.links import ReplicaLink
from coordinator.messages import (
    Audit,
    Begin,
    Cancel,
    Decide,
    Decided,
    DecisionFailed,
    Deliver,
    DraftReply,
    DraftSwitchedOff,
    Event,
    Fail,
    Finish,
    Lost,
    PeerViolation,
    PlaceDraft,
    PlaceTarget,
    RoundDone,
    Send,
    Side,
    StartTimer,
    StopTimer,
    TargetReply,
    Timer,
    TimerFired,
)
from coordinator.placement import prefix_key
from coordinator.protocol import Session
from coordinator.records import FinishedRound, RoundClock, RoundRecorder
from coordinator.stages import Stage
from coordinator.translate import draft_reply, target_reply, to_wire
from protos.specmesh.v1 import session_pb2
from specmesh.config import LinkSettings
from specmesh.errors import InternalError, SpecmeshError

logger = logging.getLogger(__name__)

# What a deadline grows by for each token a command must compute first: rebuilding a long prefix is
# work, not silence. Generous for a small CPU, small beside the deadlines themselves.
TOKEN_ALLOWANCE_S = 0.02
LATE_FACTOR = 5.0  # how many proposal deadlines a late draft keeps its session for
# Far more than answers, DEFERRED, repeats, timers, placements and losses of both sides together.
MAX_WAITING_EVENTS = 512


class Sink(Protocol):
    """Where a sample's output goes."""

    @property
    def is_full(self) -> bool:
        """Whether the reader is so far behind that the sample must pause."""

    def deliver(self, chunk: Deliver) -> None:
        """Take confirmed tokens."""

    def finish(self, end: Finish) -> None:
        """Take the end."""

    def fail(self, end: Fail) -> None:
        """Take the failure."""


@dataclass(frozen=True, slots=True)
class SessionWire:
    """How the session looks on the wire: its opening (max_len apart), placement, decision law."""

    opening: session_pb2.OpenSession
    decide_at: session_pb2.DecideAt
    law: Law


class Driver:
    """Runs one sample. Event-loop only; `start`, then `handle` and `receive` until it is done."""

    def __init__(
        self,
        session_id: str,
        session: Session,
        wire: SessionWire,
        fleet: Fleet,
        settings: LinkSettings,
        recorder: RoundRecorder,
        sink: Sink,
        executor: Executor,
    ) -> None:
        """executor: where decisions are computed (blocking arithmetic over rows)."""
        self.session_id = session_id
        self._session = session
        self._wire = wire
        self._fleet = fleet
        self._deadlines_s = {
            Timer.VERIFY: settings.target_deadline_s,
            Timer.PROPOSE: settings.draft_deadline_s,
            Timer.FILL: settings.draft_deadline_s,
            Timer.LATE: LATE_FACTOR * settings.draft_deadline_s,
            Timer.DEFERRED: max(settings.target_deadline_s, settings.draft_deadline_s),
        }
        self._recorder = recorder
        self._sink = sink
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._key = prefix_key(session.plan.prompt)
        self._inbox: deque[Event] = deque()
        self._is_stepping = False
        self._timers: dict[Side, asyncio.TimerHandle] = {}
        self._clock = RoundClock()
        self._opened_on_rows = False
        self._output: deque[Deliver | Finish] = deque()  # still to be shown
        self._finished_rounds: deque[FinishedRound] = deque()
        self._audit: asyncio.Future[AuditResult] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the session has ended."""
        return self._session.stage is Stage.DONE

    def start(self) -> None:
        """Begin the session."""
        self._fleet.subscribe(self)
        self.handle(Begin())

    def cancel(self, error: SpecmeshError) -> None:
        """End the session at once, also one that is paused. Idempotent."""
        if not self.is_done:
            self._inbox.appendleft(Cancel(error.reason, error.message))
            self._step_all(even_if_full=True)

    def resume(self) -> None:
        """The reader has caught up."""
        if self._inbox and not self._sink.is_full:
            self._step_all()

    # ------------------------------------------------------------ events in

    def receive(self, link: ReplicaLink, result: Any) -> None:
        """Take a result from a link."""
        timing = self._clock.received(link.side, result)
        event: TargetReply | DraftReply | None
        if link.side is Side.TARGET:
            event = target_reply(result, timing)
        else:
            event = draft_reply(result, timing)
        if event is None:
            return
        side = self._session.target if link.side is Side.TARGET else self._session.draft
        if event.epoch < side.epoch:  # the session has moved on; it drops this one
            self._recorder.metrics.stale_replies.labels(link.side.value).inc()
        self.handle(event)
        if isinstance(event.body, Ahead):
            self._recorder.metrics.count_ahead(timing.received_bytes)

    def handle(self, event: Event) -> None:
        """Take an event; it is stepped now unless a step runs or the reader is behind."""
        if len(self._inbox) >= MAX_WAITING_EVENTS:
            logger.error("a service floods a session", extra={"session_id": self.session_id})
            self._inbox.clear()
            self.cancel(InternalError("a service answers what it was not asked"))
            return
        self._inbox.append(event)
        if not self._is_stepping:
            self._step_all()

    def _step_all(self, *, even_if_full: bool = False) -> None:
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._inbox and (even_if_full or not self._sink.is_full):
                self._step(self._inbox.popleft())
        finally:
            self._is_stepping = False
        if self.is_done:
            self._end()
        if self._output or self._finished_rounds:
            self._loop.call_soon(self._look_back)

    def _step(self, event: Event) -> None:
        self._clock.stepped()
        try:
            self._perform(event)
        except PeerViolation as violation:
            self._peer_violated(violation)
        except Exception:  # ours, IllegalEvent included: it must not end the link that called
            logger.exception("session failed on a bug", extra={"session_id": self.session_id})
            self._abandon()

    def _perform(self, event: Event) -> None:
        for action in self._session.step(event):
            self._PERFORM[type(action)](self, action)

    def _peer_violated(self, violation: PeerViolation) -> None:
        """A reply that no correct service gives: this session leaves the replica."""
        logger.error(
            "a service contradicts its command",
            extra={
                "session_id": self.session_id,
                "side": violation.side.value,
                "reason": violation.message,
            },
        )
        session = self._session
        side = session.target if violation.side is Side.TARGET else session.draft
        replica = side.replica or ""
        if replica and side.round >= 0:  # its link lives on, and with it the session's pages there
            self._send(Send(violation.side, replica, (Close(side.epoch, side.round),)))
        self._inbox.appendleft(Lost(violation.side, replica))

    def _abandon(self) -> None:
        """A bug of ours: the request fails, the rest of the process goes on."""
        failure = Failed("INTERNAL", "the session failed on a bug; see the coordinator's log")
        self._inbox.clear()
        if self.is_done:  # its end was still to be shown
            self._sink.fail(Fail(failure, self._session.stats()))
            return
        try:
            self._perform(Cancel(failure.reason, failure.message))
        except Exception:
            logger.exception("session cannot be closed", extra={"session_id": self.session_id})
            self._session.stage = Stage.DONE
            self._sink.fail(Fail(failure, self._session.stats()))
        if not self._is_stepping:
            self._end()

    # ------------------------------------------------------------ actions out

    def _send(self, action: Send) -> None:
        link = self._fleet.link(action.side, action.replica)
        trace = self._recorder.trace_context(self._session)
        rows = self._carries_rows(action)
        for command in action.commands:
            message = to_wire(
                action.side,
                self.session_id,
                command,
                self._wire.opening,
                self._wire.decide_at,
                trace,
            )
            self._clock.sent(action.side, message)
            if isinstance(command, Propose | Verify) and command.prefix.resync:
                self._recorder.metrics.resyncs.labels(action.side.value).inc()
            if link.send(message, rows=rows):
                continue
            if action.side is Side.DRAFT and not self.is_done and link.is_up:
                busy = Failed("TOO_BUSY", "the queue to the draft is full")
                self._inbox.append(DraftReply(command.epoch, command.round, busy))
            return

    def _carries_rows(self, action: Send) -> bool:
        """Whether the commands go on the target's second stream: those answered with rows, and a
        Close where the Open went, so that it cannot overtake it."""
        if action.side is Side.DRAFT:
            return False
        if any(isinstance(command, Close) for command in action.commands):
            return self._opened_on_rows
        rows = self._session.plan.decide_here or any(
            isinstance(command, Verify) and command.audit for command in action.commands
        )
        if any(isinstance(command, Open) for command in action.commands):
            self._opened_on_rows = rows
        return rows

    def _place_target(self, action: PlaceTarget) -> None:
        if action.num_moves:
            self._recorder.metrics.failovers.labels("target").inc()
        self._fleet.place_target(self.session_id, self._key, action)

    def _place_draft(self, action: PlaceDraft) -> None:
        if action.epoch:
            self._recorder.metrics.failovers.labels("draft").inc()
        self._fleet.place_draft(self.session_id, action)

    def _start_timer(self, action: StartTimer) -> None:
        self._stop_timer(action)
        delay_s = self._deadlines_s[action.timer] + TOKEN_ALLOWANCE_S * action.num_tokens
        fired = TimerFired(action.side, action.epoch, action.round)
        self._timers[action.side] = self._loop.call_later(delay_s, self.handle, fired)

    def _stop_timer(self, action: StartTimer | StopTimer) -> None:
        timer = self._timers.pop(action.side, None)
        if timer is not None:
            timer.cancel()

    def _decide(self, action: Decide) -> None:
        def decide() -> Event:
            try:
                outcome = decide_round(self._wire.law, action)
            except DraftFault as fault:
                failed = Failed(fault.error.reason, fault.error.message)
                return DecisionFailed(action.epoch, action.round, failed, blames_draft=True)
            except SpecmeshError as error:
                failed = Failed(error.reason, error.message)
                return DecisionFailed(action.epoch, action.round, failed, blames_draft=False)
            return Decided(action.epoch, action.round, outcome)

        self._in_executor(decide, self.handle)

    def _start_audit(self, action: Audit) -> None:
        future: asyncio.Future[AuditResult] = self._loop.create_future()
        self._audit = future

        def settle(result: AuditResult) -> None:
            if not future.done():
                future.set_result(result)

        def audit() -> AuditResult:
            try:
                return audit_round(self._wire.law, action)
            except Exception:  # what watches a request must not end it
                logger.exception("audit failed on a bug", extra={"session_id": self.session_id})
                return AuditResult(is_mismatch=True)

        self._in_executor(audit, settle)

    def _in_executor(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run blocking work and take its result on the loop; a bug in it fails the request."""

        def done(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                return
            if future.exception() is not None:
                logger.error(
                    "decision failed on a bug",
                    extra={"session_id": self.session_id},
                    exc_info=future.exception(),
                )
                self._inbox.appendleft(Cancel("INTERNAL", "the decision failed on a bug"))
                self._step_all(even_if_full=True)
                return
            then(future.result())

        self._loop.run_in_executor(self._executor, work).add_done_callback(done)

    def _deliver(self, action: Deliver) -> None:
        self._output.append(action)

    def _show(self) -> None:
        """Give the sink what was confirmed, and the end, in order. All of it waits alike for the
        commands that follow: when a chunk is shown must not tell whether it is the last."""
        try:
            while self._output:
                action = self._output.popleft()
                if isinstance(action, Finish):
                    self._sink.finish(action)
                else:
                    self._sink.deliver(action)
        except Exception:  # ours: what was popped is lost, so the request fails
            logger.exception("output failed on a bug", extra={"session_id": self.session_id})
            self._output.clear()
            self._abandon()

    def _round_done(self, action: RoundDone) -> None:
        goes_on = action.more or self._session.draft.is_waited_for_again
        timing = self._clock.end_round(time.perf_counter_ns(), goes_on=goes_on)
        span = self._recorder.detach()
        if goes_on:  # what the next round waits for is out already
            self._recorder.trace_context(self._session)
        audit, self._audit = self._audit, None
        if audit is None:
            self._finished_rounds.append(FinishedRound(action, timing, span))
            return
        audit.add_done_callback(
            lambda done: self._recorder.record(
                self._session, FinishedRound(action, timing, span, done.result())
            )
        )

    def _look_back(self) -> None:
        """Show and write down finished rounds: the next round's commands are on their way."""
        self._show()
        self._record_rounds()

    def _record_rounds(self) -> None:
        while self._finished_rounds:
            try:
                self._recorder.record(self._session, self._finished_rounds.popleft())
            except Exception:  # what watches a request must end neither it nor its link
                fields = {"session_id": self.session_id}
                logger.exception("a round could not be written down", extra=fields)

    def _draft_off(self, action: DraftSwitchedOff) -> None:
        self._recorder.metrics.draft_disabled.labels(action.reason).inc()
        logger.warning(
            "draft switched off for a request",
            extra={
                "session_id": self.session_id,
                "replica": action.replica,
                "reason": action.reason,
                "detail": action.message,
            },
        )

    def _finish(self, action: Finish) -> None:
        self._output.append(action)

    def _fail(self, action: Fail) -> None:
        self._show()
        self._recorder.abandon(action.failure)
        self._sink.fail(action)

    def _end(self) -> None:
        self._inbox.clear()
        self._record_rounds()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._fleet.unsubscribe(self.session_id)

    _PERFORM: dict[type, Callable[[Driver, Any], None]] = {  # noqa: RUF012 - a constant table
        Send: _send,
        PlaceTarget: _place_target,
        PlaceDraft: _place_draft,
        StartTimer: _start_timer,
        StopTimer: _stop_timer,
        Decide: _decide,
        Audit: _start_audit,
        Deliver: _deliver,
        RoundDone: _round_done,
        DraftSwitchedOff: _draft_off,
        Finish: _finish,
        Fail: _fail,
    }
