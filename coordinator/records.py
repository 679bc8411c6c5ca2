"""When things happened in a round, and what becomes of it: span, metrics, policy.

Owns the clock readings of one sample and the `RoundRecord` (DESIGN section 8). One record per round
goes to the tracer and to the metrics, so that their sums agree. Must not know how a round is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span

from coordinator.commands import Failed
from coordinator.costs import RoundSample
from coordinator.decide import AuditResult
from coordinator.messages import RoundDone, Side
from coordinator.policy import SessionPolicy
from coordinator.protocol import CHAIN_STEPS, Session
from coordinator.stages import Stage
from coordinator.translate import boundaries_of
from protos.specmesh.v1 import session_pb2
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.errors import BY_REASON, InternalError
from specmesh.logs import SessionLogger
from specmesh.round_record import RoundRecord, SideRecord, content_attributes
from specmesh.spans import PREFILL, ROUND
from specmesh.telemetry import Telemetry

# Spans carry Unix time, durations come from the monotonic clock.
_UNIX_OFFSET_NS = time.time_ns() - time.perf_counter_ns()
MAX_UNANSWERED = 4  # commands kept between rounds: a late draft's; a Verify may hold 100 kB of rows


@dataclass(frozen=True, slots=True)
class SideTiming:
    """One command's way there and back. Times of the monotonic clock.

    command: None for a result that nothing was sent for; parts of an answer after the first are
    such. Messages are weighed when they are asked for, which is after the next round's commands are
    out.
    """

    command: Any
    result: Any
    sent_ns: int
    received_ns: int

    @property
    def sent_bytes(self) -> int:
        """Size of the command on the wire."""
        return self.command.ByteSize() if self.command is not None else 0

    @property
    def received_bytes(self) -> int:
        """Size of the result on the wire."""
        size: int = self.result.ByteSize()
        return size

    @property
    def total_us(self) -> int:
        """From write to read, in microseconds."""
        return (self.received_ns - self.sent_ns) // 1000


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Beginning and end of a round on the monotonic clock."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """A committed round that is still to be written down. span: None where it is not sampled."""

    done: RoundDone
    timing: RoundTiming
    span: Span | None
    audit: AuditResult | None = None


class RoundClock:
    """Clock readings of the round in progress."""

    def __init__(self) -> None:
        self._step_ns = time.perf_counter_ns()
        self._start_ns: int | None = None
        self._sent: dict[tuple[Side, int, int], tuple[int, Any]] = {}

    def stepped(self) -> None:
        """A step begins: what it sends belongs to a round that began now."""
        self._step_ns = time.perf_counter_ns()

    def sent(self, side: Side, message: Any) -> None:
        """A command goes out. A repeat counts from its last sending."""
        if self._start_ns is None:
            self._start_ns = self._step_ns
        key = (side, message.epoch, message.round)
        self._sent[key] = (time.perf_counter_ns(), message)

    def received(self, side: Side, result: Any) -> SideTiming:
        """A result came in."""
        now = time.perf_counter_ns()
        key = (side, result.epoch, result.round)
        sent_ns, command = self._sent.get(key, (now, None))
        if side is Side.TARGET and result.verdict.more:  # the next part counts from this one
            self._sent.pop(key, None)
            self._sent[key] = (now, None)
        return SideTiming(command, result, sent_ns, now)

    def end_round(self, now_ns: int, *, goes_on: bool) -> RoundTiming:
        """The round is committed; the next one begins with the next command, or at once where what
        is out already goes on."""
        start_ns = self._start_ns if self._start_ns is not None else now_ns
        self._start_ns = now_ns if goes_on else None
        # What is still out belongs to a late draft; older readings are never asked for again.
        while len(self._sent) > MAX_UNANSWERED:
            del self._sent[next(iter(self._sent))]
        return RoundTiming(start_ns, now_ns)


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What every record of a sample says. index: among the samples of its request. has_own_seed:
    see `coordinator.requests.Resolved`."""

    session_id: str
    index: int
    has_own_seed: bool


class RoundRecorder:
    """Spans, metrics and policy of one sample."""

    def __init__(
        self,
        telemetry: Telemetry,
        metrics: CoordinatorMetrics,
        policy: SessionPolicy,
        log: SessionLogger,
        context: Context | None,
        facts: SampleFacts,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        """context: the request's span; None when it is not sampled. text_of: the text of a token,
        given only where content is to be recorded."""
        self.metrics = metrics
        self._telemetry = telemetry
        self._policy = policy
        self._log = log
        self._context = context
        self._facts = facts
        self._text_of = text_of
        self._span: Span | None = None
        self._trace: session_pb2.TraceContext | None = None

    def trace_context(self, session: Session) -> session_pb2.TraceContext | None:
        """What commands of the round in progress carry; starts its span when first asked."""
        if self._context is None or session.stage is Stage.DONE:
            return None
        if self._span is None:
            name = PREFILL if session.is_prefilling else ROUND
            self._span = self._telemetry.start(name, self._context)
            self._trace = self._telemetry.inject(self._span)
        return self._trace

    def detach(self) -> Span | None:
        """Take the round's span away, to be ended later by `record`."""
        span, self._span, self._trace = self._span, None, None
        return span

    def abandon(self, failure: Failed) -> None:
        """The request failed in this round."""
        span = self.detach()
        if span is not None:
            error = BY_REASON.get(failure.reason, InternalError)(failure.message)
            self._telemetry.fail(span, error)
            span.end()

    def record(self, session: Session, finished: FinishedRound) -> None:
        """Give a committed round to the span, the metrics and the policy."""
        done, timing, span, audit = finished.done, finished.timing, finished.span, finished.audit
        record = self._build(session, done, timing, audit)
        if done.num_draft_tokens:
            record.expected_tokens = self._policy.expected_tokens(done.num_draft_tokens)
        if span is not None:
            span.set_attributes(record.attributes())
            if self._text_of is not None:
                content = content_attributes(done.candidates, done.tokens, self._text_of)
                span.set_attributes(content)
            span.end(timing.end_ns + _UNIX_OFFSET_NS)
        for detector in self.metrics.observe_round(record):
            self._log.error("output law in doubt", extra={"detector": detector})
        if audit is not None and audit.is_mismatch:
            level = self._log.error if audit.is_alarm else self._log.info
            level(
                "audit differs from the target's decision",
                extra={"round": done.round_index, "margin": audit.margin},
            )
        if not done.is_prefill and not done.audited and not _rebuilt(record):
            self._policy.observe(_sample(done, record))

    def _build(
        self, session: Session, done: RoundDone, timing: RoundTiming, audit: AuditResult | None
    ) -> RoundRecord:
        target = _side(done.target_replica, done.target_epoch, done.target_report)
        draft = None
        if done.num_draft_tokens:
            draft = _side(done.draft_replica, done.draft_epoch, done.draft_report)
        duration_us = (timing.end_ns - timing.start_ns) // 1000
        waited_us = target.total_us + (draft.total_us if draft is not None else 0)
        return RoundRecord(
            session_id=self._facts.session_id,
            round_index=done.round_index,
            base_len=done.base_len,
            sample_index=self._facts.index,
            has_own_seed=self._facts.has_own_seed,
            is_prefill=done.is_prefill,
            rule=session.plan.rule.value,
            num_draft_tokens=done.num_draft_tokens,
            num_judged=done.num_judged,
            num_accepted=done.num_accepted,
            num_emitted=done.num_tokens,
            num_committed=done.num_committed,
            closing=done.closing.value if done.num_draft_tokens else "plain",
            fallback=done.fallback,
            encoding=_encoding(done),
            duration_us=duration_us,
            manage_us=max(0, duration_us - waited_us),
            target=target,
            draft=draft,
            target_probs=[judged[0] for judged in done.judged],
            draft_probs=[judged[1] for judged in done.judged],
            overlaps=[judged[2] for judged in done.judged],
            dropped_mass=done.dropped_mass,
            emitted_argmax=[emitted[0] for emitted in done.emitted],
            emitted_max_probs=[emitted[1] for emitted in done.emitted],
            redraw_mismatch=done.redraw_mismatch,
            audited=audit is not None,
            audit_mismatch=audit is not None and audit.is_mismatch,
            audit_margin=audit.margin if audit is not None else None,
            audit_near_tie=audit is not None and audit.is_near_tie,
            num_retries=done.num_retries,
            offset=done.offset,
            was_ahead=done.was_ahead,
        )


def _encoding(done: RoundDone) -> str:
    if not done.rows:
        return ""
    name: str = session_pb2.Encoding.Name(done.rows[0].encoding)
    return name.removeprefix("ENCODING_").lower()


def _side(replica: str, epoch: int, report: Any) -> SideRecord:
    record = SideRecord(replica=replica, epoch=epoch)
    if isinstance(report, SideTiming):
        result, timing = report.result, report.result.timing
        record.before = boundaries_of(result.before)
        record.after = boundaries_of(result.after)
        record.total_us = report.total_us
        record.service_us = timing.total_us
        record.queue_us = timing.queue_us
        record.forward_us = timing.forward_us
        record.cached_tokens = timing.cached_tokens
        record.sent_bytes = report.sent_bytes
        record.received_bytes = report.received_bytes
    return record


def _rebuilt(record: RoundRecord) -> bool:
    """Whether a side also computed a prefix (first fill, resync, failover): no usual round."""
    usual = record.num_draft_tokens + record.num_emitted + 2
    return any(
        side.after.kv_len - side.before.kv_len > usual
        for side in (record.target, record.draft)
        if side is not None and side.before is not None and side.after is not None
    )


def _sample(done: RoundDone, record: RoundRecord) -> RoundSample:
    report = done.target_report
    batch_size, batch_rows = 1, 0
    if isinstance(report, SideTiming):
        timing = report.result.timing
        batch_size, batch_rows = timing.batch_size, timing.batch_rows
    return RoundSample(
        num_draft_tokens=done.num_draft_tokens,
        num_tokens=done.num_tokens,
        num_judged=done.num_judged,
        num_accepted=done.num_accepted,
        draft_s=record.draft.total_us * 1e-6 if record.draft is not None else 0.0,
        target_s=record.target.total_us * 1e-6,
        manage_s=record.manage_us * 1e-6,
        batch_size=batch_size,
        batch_rows=batch_rows,
        forward_s=record.target.forward_us * 1e-6,
        queue_s=record.target.queue_us * 1e-6,
        is_later_part=done.offset > 0,
        was_ahead=done.was_ahead,
        is_cut=not (done.more or done.num_draft_tokens) and done.num_tokens < CHAIN_STEPS,
    )
