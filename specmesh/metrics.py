"""Prometheus metrics of the coordinator and of the two services, each with its own registry.

Owns names, labels and buckets. Must not know links, engines or requests: callers hand in finished
records and numbers. `gen_ai_server_*` follow the OpenTelemetry GenAI conventions in Prometheus
spelling; everything else is `specmesh_*`. No ids of sessions or requests are labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specmesh.detectors import LawWatch
from specmesh.metrics_server import loop_lag
from specmesh.round_record import RoundRecord

# Buckets the GenAI conventions recommend; time per output token gets 1-7.5 ms below their 10 ms.
REQUEST_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
OUTPUT_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
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
        registry = self.registry
        labels = ("gen_ai_operation_name", "gen_ai_request_model")
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Whole request",
            (*labels, "error_type"),
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token",
            labels,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "(duration - time to first token) / (tokens - 1)",
            labels,
            buckets=OUTPUT_TOKEN_BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "specmesh_request_queue_seconds",
            "Arrival to admission",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._finished = Counter(
            "specmesh_requests", "Samples finished", ("finish_reason",), registry=registry
        )
        self.refused = Counter(
            "specmesh_requests_refused",
            "Requests refused before any work",
            ("reason",),
            registry=registry,
        )
        self.running = Gauge("specmesh_requests_running", "Requests running", registry=registry)
        self.waiting = Gauge(
            "specmesh_requests_waiting", "Requests waiting for admission", registry=registry
        )

    def _tokens(self) -> None:
        registry = self.registry
        self._prompt_tokens = Counter("specmesh_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached_tokens = Counter(
            "specmesh_cached_tokens",
            "Prompt tokens found in the target's prefix cache",
            registry=registry,
        )
        self._output_tokens = Counter(
            "specmesh_output_tokens", "Tokens confirmed and delivered", registry=registry
        )
        self._good_tokens = Counter(
            "specmesh_goodput_tokens",
            "Output tokens of samples that ended in stop or length",
            registry=registry,
        )
        self._draft_tokens = Counter(
            "specmesh_draft_tokens", "Candidates drafted for rounds", registry=registry
        )
        self._accepted_tokens = Counter(
            "specmesh_accepted_tokens", "Candidates accepted", registry=registry
        )
        judged_at = Counter(
            "specmesh_judged_position_tokens",
            "Candidates judged, by position in the block",
            ("position",),
            registry=registry,
        )
        accepted_at = Counter(
            "specmesh_accepted_position_tokens",
            "Candidates accepted, by position in the block",
            ("position",),
            registry=registry,
        )
        # Looking a label up costs more than counting, so the children of hot series are kept.
        self._judged_at = [judged_at.labels(index) for index in range(MAX_POSITIONS)]
        self._accepted_at = [accepted_at.labels(index) for index in range(MAX_POSITIONS)]
        self._expected = Counter(
            "specmesh_round_expected_tokens",
            "Sum of E[N] that the policy predicted",
            registry=registry,
        )
        self._measured = Counter(
            "specmesh_round_measured_tokens",
            "Tokens emitted by the rounds that E[N] was for",
            registry=registry,
        )

    def _rounds(self) -> None:
        registry = self.registry
        rounds = Counter("specmesh_rounds", "Rounds", ("closing",), registry=registry)
        self._round_count = {closing: rounds.labels(closing) for closing in CLOSINGS}
        self._fallback = Counter(
            "specmesh_fallback_rounds", "Rounds without candidates", ("reason",), registry=registry
        )
        self._round_duration = Histogram(
            "specmesh_round_duration_seconds",
            "Whole round",
            buckets=ROUND_BUCKETS,
            registry=registry,
        )
        self._prefill_duration = Histogram(
            "specmesh_prefill_duration_seconds",
            "Prompt to first token",
            buckets=ROUND_BUCKETS,
            registry=registry,
        )
        round_time = Counter(
            "specmesh_round_seconds", "Where round time went", ("part",), registry=registry
        )
        self._round_time = {part: round_time.labels(part) for part in ROUND_PARTS}
        wire_bytes = Counter(
            "specmesh_wire_bytes",
            "Command and result bytes",
            ("side", "direction"),
            registry=registry,
        )
        self._sent = {side: wire_bytes.labels(side, "sent") for side in SIDES}
        self._received = {side: wire_bytes.labels(side, "received") for side in SIDES}
        self._ahead = Counter(
            "specmesh_ahead_rounds",
            "Rounds that began with candidates drafted ahead",
            registry=registry,
        )
        self._retries = Counter(
            "specmesh_round_retries",
            "Tries beyond the first, repeats and moves, of rounds",
            registry=registry,
        )
        self.stale_replies = Counter(
            "specmesh_stale_replies",
            "Replies of an older epoch, dropped",
            ("side",),
            registry=registry,
        )
        self.resyncs = Counter(
            "specmesh_resyncs", "Prefixes repaired after a mismatch", ("side",), registry=registry
        )
        self.failovers = Counter(
            "specmesh_failovers", "Sessions moved to another replica", ("side",), registry=registry
        )
        self.link_up = Gauge(
            "specmesh_link_up",
            "1 while the link is connected",
            ("side", "replica"),
            registry=registry,
        )

    def _checks(self) -> None:
        registry = self.registry
        self._dropped_mass = Counter(
            "specmesh_dropped_mass",
            "Draft mass dropped by truncation, summed over rows",
            registry=registry,
        )
        self._redraw = Counter(
            "specmesh_redraw_mismatches",
            "Candidates that the re-draw check refuted",
            registry=registry,
        )
        self._audited = Counter(
            "specmesh_audited_rounds", "Rounds decided again by the coordinator", registry=registry
        )
        self._audit_mismatch = Counter(
            "specmesh_audit_mismatches",
            "Audited rounds with another outcome",
            ("kind",),
            registry=registry,
        )
        self._audit_margin = Histogram(
            "specmesh_audit_mismatch_margin",
            "Relative margin of audit mismatches",
            buckets=MARGIN_BUCKETS,
            registry=registry,
        )
        self.draft_disabled = Counter(
            "specmesh_draft_disabled",
            "Requests whose draft was switched off",
            ("reason",),
            registry=registry,
        )
        zscore = Gauge(
            "specmesh_law_zscore",
            "Running z-score of the output law",
            ("detector",),
            registry=registry,
        )
        zscore.labels("acceptance").set_function(lambda: self.law.acceptance.z)
        zscore.labels("argmax").set_function(lambda: self.law.argmax.z)
        self._alarms = Counter(
            "specmesh_law_alarms", "Times a z-score passed 5", ("detector",), registry=registry
        )
        for kind in ("near_tie", "mismatch"):
            self._audit_mismatch.labels(kind)
        for detector in ("acceptance", "argmax"):
            self._alarms.labels(detector)

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


class ServiceMetrics:
    """What a draft or target service counts. Thread-safe: the engine's worker calls it too."""

    def __init__(self, side: str) -> None:
        """side: "draft" or "target", a label on every series that both export."""
        registry = self.registry = CollectorRegistry()
        self._side = side
        self._answered: dict[tuple[str, str], Counter] = {}  # by command and outcome
        self.commands = Counter(
            "specmesh_commands",
            "Commands answered",
            ("side", "command", "outcome"),
            registry=registry,
        )
        self.queue_time = self._histogram("specmesh_command_queue_seconds", "Wait for the device")
        self.forward_time = self._histogram("specmesh_forward_seconds", "One forward pass")
        self.batch_size = Histogram(
            "specmesh_forward_batch_size",
            "Sequences in a forward pass",
            ("side",),
            buckets=tuple(2**power for power in range(10)),
            registry=registry,
        ).labels(side)
        self.batch_rows = self._counter("specmesh_forward_rows", "Token rows computed")
        self.preemptions = self._counter("specmesh_preemptions", "Sessions preempted")
        self.cached_tokens = self._counter(
            "specmesh_prefix_cache_hit_tokens", "Tokens found in the prefix cache"
        )
        self.computed_tokens = self._counter(
            "specmesh_prefix_cache_miss_tokens", "Prompt tokens that were computed"
        )
        self.redraw_mismatches = self._counter(
            "specmesh_service_redraw_mismatches", "Candidates that the re-draw check refuted"
        )
        self.warm_up = self._gauge("specmesh_warm_up_seconds", "Load, compile and first pass")
        self._pages = Gauge("specmesh_kv_pages", "K/V pages", ("side", "state"), registry=registry)
        self._sessions = self._gauge("specmesh_sessions", "Open sessions")
        self._depth = self._gauge("specmesh_queue_depth", "Commands waiting for the device")
        self.event_loop_lag = loop_lag(registry)

    def _counter(self, name: str, brief: str) -> Counter:
        return Counter(name, brief, ("side",), registry=self.registry).labels(self._side)

    def _gauge(self, name: str, brief: str) -> Gauge:
        return Gauge(name, brief, ("side",), registry=self.registry).labels(self._side)

    def _histogram(self, name: str, brief: str) -> Histogram:
        metric = Histogram(name, brief, ("side",), buckets=ROUND_BUCKETS, registry=self.registry)
        return metric.labels(self._side)

    def observe_command(self, command: str, outcome: str, queue_us: int) -> None:
        """Count one answer. outcome: "ok", "deferred" or the reason of the error."""
        answered = self._answered.get((command, outcome))
        if answered is None:  # looking a series up takes longer than counting
            answered = self.commands.labels(self._side, command, outcome)
            self._answered[command, outcome] = answered
        answered.inc()
        self.queue_time.observe(queue_us * 1e-6)

    def observe_forward(self, forward_us: int, batch_size: int, num_rows: int) -> None:
        """Count one forward pass."""
        self.forward_time.observe(forward_us * 1e-6)
        self.batch_size.observe(batch_size)
        self.batch_rows.inc(num_rows)

    def watch(
        self,
        *,
        free_pages: Callable[[], int],
        total_pages: Callable[[], int],
        num_sessions: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        """Read these at every scrape, from the scraping thread."""
        self._pages.labels(self._side, "free").set_function(free_pages)
        self._pages.labels(self._side, "used").set_function(lambda: total_pages() - free_pages())
        self._sessions.set_function(num_sessions)
        self._depth.set_function(num_waiting)
