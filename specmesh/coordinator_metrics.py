"""Prometheus metrics of the coordinator.

Owns names, labels and buckets. Must not know links or requests: callers hand in finished records
and numbers. `gen_ai_server_*` follow the OpenTelemetry GenAI conventions in Prometheus spelling;
everything else is `specmesh_*`. No ids of sessions or requests are labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specmesh.detectors import LawWatch
from specmesh.metrics_server import loop_lag
from specmesh.round_record import RoundRecord

# Buckets the GenAI conventions recommend; time per output token gets 1-7.5 ms below their 10 ms.
REQUEST_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
OUTPUT_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5,
)  # fmt: skip
ROUND_BUCKETS = tuple(0.0005 * 2**power for power in range(15))
MARGIN_BUCKETS = tuple(2.0**-power for power in range(24, -1, -3))
MAX_POSITIONS = 16  # settings allow no longer block
CLOSINGS = ("recovered", "bonus", "stopped", "plain")
ROUND_PARTS = ("target", "draft", "queue", "wire", "manage")
SIDES = ("draft", "target")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished sample of a request. Times in seconds.

    finish: "stop", "length", "error" or "cancelled". error: the reason of specmesh/errors.py.
    first_token_s is None when no token came.
    """

    operation: str
    model: str
    finish: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    duration_s: float
    queue_s: float
    first_token_s: float | None
    error: str = ""


class CoordinatorMetrics:
    """What a coordinator replica counts. Call from its event loop only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.law = LawWatch()
        self._requests()
        self._tokens()
        self._rounds()
        self._checks()
        self.event_loop_lag = loop_lag(self.registry)

    def _requests(self) -> None:
        labels = ("gen_ai_operation_name", "gen_ai_request_model")
        self._duration = self._histogram(
            "gen_ai_server_request_duration_seconds",
            "Whole request",
            REQUEST_BUCKETS,
            *labels,
            "error_type",
        )
        self._first_token = self._histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token",
            FIRST_TOKEN_BUCKETS,
            *labels,
        )
        self._per_token = self._histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "(duration - time to first token) / (tokens - 1)",
            OUTPUT_TOKEN_BUCKETS,
            *labels,
        )
        self._queue = self._histogram(
            "specmesh_request_queue_seconds", "Arrival to admission", FIRST_TOKEN_BUCKETS
        )
        self._finished = self._counter("specmesh_requests", "Samples finished", "finish_reason")
        self.refused = self._counter(
            "specmesh_requests_refused", "Requests refused before any work", "reason"
        )
        self.running = self._gauge("specmesh_requests_running", "Requests running")
        self.waiting = self._gauge("specmesh_requests_waiting", "Requests waiting for admission")

    def _tokens(self) -> None:
        self._prompt_tokens = self._counter("specmesh_prompt_tokens", "Prompt tokens")
        self._cached_tokens = self._counter(
            "specmesh_cached_tokens", "Prompt tokens found in the target's prefix cache"
        )
        self._output_tokens = self._counter(
            "specmesh_output_tokens", "Tokens confirmed and delivered"
        )
        self._good_tokens = self._counter(
            "specmesh_goodput_tokens", "Output tokens of samples that ended in stop or length"
        )
        self._draft_tokens = self._counter("specmesh_draft_tokens", "Candidates drafted for rounds")
        self._accepted_tokens = self._counter("specmesh_accepted_tokens", "Candidates accepted")
        judged_at = self._counter(
            "specmesh_judged_position_tokens",
            "Candidates judged, by position in the block",
            "position",
        )
        accepted_at = self._counter(
            "specmesh_accepted_position_tokens",
            "Candidates accepted, by position in the block",
            "position",
        )
        # Looking a label up costs more than counting, so the children of hot series are kept.
        self._judged_at = [judged_at.labels(index) for index in range(MAX_POSITIONS)]
        self._accepted_at = [accepted_at.labels(index) for index in range(MAX_POSITIONS)]
        self._expected = self._counter(
            "specmesh_round_expected_tokens", "Sum of E[N] that the policy predicted"
        )
        self._measured = self._counter(
            "specmesh_round_measured_tokens", "Tokens emitted by the rounds that E[N] was for"
        )

    def _rounds(self) -> None:
        rounds = self._counter("specmesh_rounds", "Rounds", "closing")
        self._round_count = {closing: rounds.labels(closing) for closing in CLOSINGS}
        self._fallback = self._counter(
            "specmesh_fallback_rounds", "Rounds without candidates", "reason"
        )
        self._round_duration = self._histogram(
            "specmesh_round_duration_seconds", "Whole round", ROUND_BUCKETS
        )
        self._prefill_duration = self._histogram(
            "specmesh_prefill_duration_seconds", "Prompt to first token", ROUND_BUCKETS
        )
        round_time = self._counter("specmesh_round_seconds", "Where round time went", "part")
        self._round_time = {part: round_time.labels(part) for part in ROUND_PARTS}
        wire_bytes = self._counter(
            "specmesh_wire_bytes", "Command and result bytes", "side", "direction"
        )
        self._sent = {side: wire_bytes.labels(side, "sent") for side in SIDES}
        self._received = {side: wire_bytes.labels(side, "received") for side in SIDES}
        self._ahead = self._counter(
            "specmesh_ahead_rounds", "Rounds that began with candidates drafted ahead"
        )
        self._retries = self._counter(
            "specmesh_round_retries", "Tries beyond the first, repeats and moves, of rounds"
        )
        self.stale_replies = self._counter(
            "specmesh_stale_replies", "Replies of an older epoch, dropped", "side"
        )
        self.resyncs = self._counter(
            "specmesh_resyncs", "Prefixes repaired after a mismatch", "side"
        )
        self.failovers = self._counter(
            "specmesh_failovers", "Sessions moved to another replica", "side"
        )
        self.link_up = self._gauge(
            "specmesh_link_up", "1 while the link is connected", "side", "replica"
        )

    def _checks(self) -> None:
        self._dropped_mass = self._counter(
            "specmesh_dropped_mass", "Draft mass dropped by truncation, summed over rows"
        )
        self._redraw = self._counter(
            "specmesh_redraw_mismatches", "Candidates that the re-draw check refuted"
        )
        self._audited = self._counter(
            "specmesh_audited_rounds", "Rounds decided again by the coordinator"
        )
        self._audit_mismatch = self._counter(
            "specmesh_audit_mismatches", "Audited rounds with another outcome", "kind"
        )
        self._audit_margin = self._histogram(
            "specmesh_audit_mismatch_margin", "Relative margin of audit mismatches", MARGIN_BUCKETS
        )
        self.draft_disabled = self._counter(
            "specmesh_draft_disabled", "Requests whose draft was switched off", "reason"
        )
        zscore = self._gauge("specmesh_law_zscore", "Running z-score of the output law", "detector")
        zscore.labels("acceptance").set_function(lambda: self.law.acceptance.z)
        zscore.labels("argmax").set_function(lambda: self.law.argmax.z)
        self._alarms = self._counter("specmesh_law_alarms", "Times a z-score passed 5", "detector")
        for kind in ("near_tie", "mismatch"):
            self._audit_mismatch.labels(kind)
        for detector in ("acceptance", "argmax"):
            self._alarms.labels(detector)

    def _counter(self, name: str, brief: str, *labels: str) -> Counter:
        return Counter(name, brief, labels, registry=self.registry)

    def _gauge(self, name: str, brief: str, *labels: str) -> Gauge:
        return Gauge(name, brief, labels, registry=self.registry)

    def _histogram(
        self, name: str, brief: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, brief, labels, buckets=buckets, registry=self.registry)

    def count_ahead(self, num_bytes: int) -> None:
        """Count what a draft sent ahead of any round: no record of a round holds it."""
        self._received["draft"].inc(num_bytes)

    def observe_round(self, record: RoundRecord) -> tuple[str, ...]:
        """Count one finished round. Returns the detectors whose alarm it raised (usually none)."""
        self._output_tokens.inc(record.num_committed)
        self._retries.inc(record.num_retries)
        self._ahead.inc(record.was_ahead)
        if record.is_prefill:
            self._prefill_duration.observe(record.duration_us * 1e-6)
            return self._observe_checks(record)
        self._round_count[record.closing].inc()
        self._round_duration.observe(record.duration_us * 1e-6)
        if record.num_draft_tokens:
            self._draft_tokens.inc(record.num_draft_tokens)
            self._accepted_tokens.inc(record.num_accepted)
            for counter in self._judged_at[: record.num_judged]:
                counter.inc()
            for counter in self._accepted_at[: record.num_accepted]:
                counter.inc()
            self._dropped_mass.inc(sum(record.dropped_mass))
        elif record.fallback:
            self._fallback.labels(record.fallback).inc()
        if record.expected_tokens is not None:
            self._expected.inc(record.expected_tokens)
            self._measured.inc(record.num_emitted)
        self._observe_times(record)
        return self._observe_checks(record)

    def _observe_times(self, record: RoundRecord) -> None:
        queue_us = wire_us = 0
        for name, side in (("target", record.target), ("draft", record.draft)):
            if side is None:
                continue
            self._sent[name].inc(side.sent_bytes)
            self._received[name].inc(side.received_bytes)
            self._round_time[name].inc(max(0, side.service_us - side.queue_us) * 1e-6)
            queue_us += side.queue_us
            wire_us += side.wire_us
        self._round_time["queue"].inc(queue_us * 1e-6)
        self._round_time["wire"].inc(wire_us * 1e-6)
        self._round_time["manage"].inc(record.manage_us * 1e-6)

    def _observe_checks(self, record: RoundRecord) -> tuple[str, ...]:
        if record.redraw_mismatch is not None:
            self._redraw.inc()
        if record.audited:
            self._audited.inc()
        if record.audit_mismatch:
            self._audit_mismatch.labels("near_tie" if record.audit_near_tie else "mismatch").inc()
            if record.audit_margin is not None:
                self._audit_margin.observe(record.audit_margin)
        alarms = self._observe_law(record) if record.has_own_seed else []
        for detector in alarms:
            self._alarms.labels(detector).inc()
        return tuple(alarms)

    def _observe_law(self, record: RoundRecord) -> list[str]:
        alarms = []
        if record.rule == "residual" and self.law.observe_candidates(
            record.num_accepted, record.overlaps
        ):
            alarms.append("acceptance")
        if self.law.observe_emitted(record.emitted_argmax, record.emitted_max_probs):
            alarms.append("argmax")
        return alarms

    def observe_request(self, record: RequestRecord) -> None:
        """Count one finished sample."""
        labels = (record.operation, record.model)
        self._finished.labels(record.finish).inc()
        self._duration.labels(*labels, record.error).observe(record.duration_s)
        self._queue.observe(record.queue_s)
        self._prompt_tokens.inc(record.num_prompt_tokens)
        self._cached_tokens.inc(record.num_cached_tokens)
        if record.finish in ("stop", "length"):
            self._good_tokens.inc(record.num_output_tokens)
        if record.first_token_s is not None:
            self._first_token.labels(*labels).observe(record.first_token_s)
            if record.num_output_tokens > 1:
                later = record.duration_s - record.first_token_s
                self._per_token.labels(*labels).observe(later / (record.num_output_tokens - 1))
