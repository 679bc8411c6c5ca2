"""Span names, attributes and edges in one table, and the tracer of a process.

Owns what is recorded and how it travels: W3C context in gRPC metadata and inside link frames. Must
not know how a round is run, where the files are read (`specmesh/traces`) or what is counted
(`specmesh/metrics.py`). Nothing here is global: each process object holds its own `Telemetry`.

A request that is not sampled has no context (None), and every call below is then a no-op of well
under a microsecond. Spans are started and ended by hand: never hold one as the current span over a
`yield`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from protos.specmesh.v1.session_pb2 import TraceContext
from specmesh.config import TelemetrySettings
from specmesh.errors import SpecmeshError

GENERATE: Final = "specmesh.generate"
PREFILL: Final = "specmesh.prefill"
ROUND: Final = "specmesh.round"
PROPOSE: Final = "draft.propose"
VERIFY: Final = "target.verify"
DRAFT_FORWARD: Final = "draft.forward"
TARGET_FORWARD: Final = "target.forward"

MAX_LINKS = 128  # the SDK's own limit per span; more are counted in Key.DROPPED_LINKS


class Key:
    """Attribute keys. Units are UCUM and last in the name where there is one."""

    SERVICE = "specmesh.service"  # repeated on spans: some viewers drop resource attributes
    SESSION_ID = "specmesh.session.id"
    SAMPLE_INDEX = "specmesh.sample.index"
    EPOCH = "specmesh.epoch"
    DRAFT_EPOCH = "specmesh.draft.epoch"
    ROUND = "specmesh.round.index"
    BASE_LEN = "specmesh.base_len"
    # Of a round that is a later part of an answer: tokens of the parts before it. The command has
    # one span, under the round of its first part; it ends with the last.
    OFFSET = "specmesh.part.offset"
    AHEAD = "specmesh.draft.ahead"  # the candidates were drafted before the round began
    NUM_DRAFT_TOKENS = "specmesh.draft.tokens"
    NUM_ACCEPTED = "specmesh.accepted.tokens"
    NUM_EMITTED = "specmesh.emitted.tokens"
    CLOSING = "specmesh.closing"
    RULE = "specmesh.rule"
    DECIDE_AT = "specmesh.decide_at"
    TARGET_PROBS = "specmesh.target.probs"
    DRAFT_PROBS = "specmesh.draft.probs"
    OVERLAPS = "specmesh.overlaps"
    DROPPED_MASS = "specmesh.dropped_mass"
    ENCODING = "specmesh.encoding"
    DRAFT_US = "specmesh.draft.us"
    VERIFY_US = "specmesh.verify.us"
    WIRE_US = "specmesh.wire.us"
    QUEUE_US = "specmesh.queue.us"
    FORWARD_US = "specmesh.forward.us"
    MANAGE_US = "specmesh.manage.us"
    DRAFT_SENT_BYTES = "specmesh.draft.sent.bytes"
    DRAFT_RECEIVED_BYTES = "specmesh.draft.received.bytes"
    TARGET_SENT_BYTES = "specmesh.target.sent.bytes"
    TARGET_RECEIVED_BYTES = "specmesh.target.received.bytes"
    # [confirmed_len, kv_len, allocated_len] of a side.
    DRAFT_BEFORE = "specmesh.draft.boundaries.before"
    DRAFT_AFTER = "specmesh.draft.boundaries.after"
    TARGET_BEFORE = "specmesh.target.boundaries.before"
    TARGET_AFTER = "specmesh.target.boundaries.after"
    BEFORE = "specmesh.boundaries.before"
    AFTER = "specmesh.boundaries.after"
    FALLBACK = "specmesh.fallback.reason"
    EXPECTED_TOKENS = "specmesh.expected.tokens"
    REDRAW_MISMATCH = "specmesh.redraw.mismatch"
    AUDITED = "specmesh.audited"
    AUDIT_MISMATCH = "specmesh.audit.mismatch"
    AUDIT_MARGIN = "specmesh.audit.margin"
    RETRIES = "specmesh.retries"
    DRAFT_REPLICA = "specmesh.replica.draft"
    TARGET_REPLICA = "specmesh.replica.target"
    BATCH_SIZE = "specmesh.batch.size"
    BATCH_ROWS = "specmesh.batch.rows"
    NUM_STEPS = "specmesh.steps"
    CACHED_TOKENS = "specmesh.cached.tokens"
    DEFERRED = "specmesh.deferred"
    DROPPED_LINKS = "specmesh.links.dropped"
    ERROR_TYPE = "error.type"
    NUM_ROUNDS = "specmesh.rounds"
    # Content: only with `record_content`.
    CANDIDATE_IDS = "specmesh.candidate.ids"
    EMITTED_IDS = "specmesh.emitted.ids"
    CANDIDATE_TEXTS = "specmesh.candidate.texts"
    EMITTED_TEXTS = "specmesh.emitted.texts"
    # OpenTelemetry GenAI conventions (open-telemetry/semantic-conventions-genai v0.1.0).
    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_SEED = "gen_ai.request.seed"
    REQUEST_STREAM = "gen_ai.request.stream"
    REQUEST_CHOICES = "gen_ai.request.choice.count"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One row of the table.

    parents: the spans it may hang under; empty: it may be the root of a trace. links: the spans a
    batch span points to. required: keys present on every ended span without an error; optional:
    keys that may be there. No other key may be.
    """

    service: str
    kind: SpanKind
    parents: tuple[str, ...]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    links: tuple[str, ...] = ()


_COMMAND = frozenset(
    {
        Key.SESSION_ID,
        Key.EPOCH,
        Key.ROUND,
        Key.BASE_LEN,
        Key.NUM_DRAFT_TOKENS,
        Key.QUEUE_US,
        Key.FORWARD_US,
        Key.BATCH_SIZE,
        Key.NUM_STEPS,
        Key.BEFORE,
        Key.AFTER,
    }
)
_STEP = frozenset({Key.BATCH_SIZE, Key.BATCH_ROWS})
_ROUND = frozenset(
    {
        Key.SESSION_ID,
        Key.SAMPLE_INDEX,
        Key.EPOCH,
        Key.ROUND,
        Key.BASE_LEN,
        Key.NUM_DRAFT_TOKENS,
        Key.NUM_ACCEPTED,
        Key.NUM_EMITTED,
        Key.CLOSING,
        Key.DRAFT_US,
        Key.VERIFY_US,
        Key.WIRE_US,
        Key.QUEUE_US,
        Key.MANAGE_US,
        Key.TARGET_SENT_BYTES,
        Key.TARGET_RECEIVED_BYTES,
        Key.TARGET_BEFORE,
        Key.TARGET_AFTER,
    }
)
_ROUND_OPTIONAL = frozenset(
    {
        Key.TARGET_PROBS,
        Key.DRAFT_PROBS,
        Key.OVERLAPS,
        Key.DROPPED_MASS,
        Key.ENCODING,
        Key.FALLBACK,
        Key.EXPECTED_TOKENS,
        Key.REDRAW_MISMATCH,
        Key.AUDITED,
        Key.AUDIT_MISMATCH,
        Key.AUDIT_MARGIN,
        Key.RETRIES,
        Key.OFFSET,
        Key.AHEAD,
        Key.DRAFT_REPLICA,
        Key.TARGET_REPLICA,
        Key.DRAFT_EPOCH,
        Key.DRAFT_SENT_BYTES,
        Key.DRAFT_RECEIVED_BYTES,
        Key.DRAFT_BEFORE,
        Key.DRAFT_AFTER,
        Key.CACHED_TOKENS,
        Key.CANDIDATE_IDS,
        Key.EMITTED_IDS,
        Key.CANDIDATE_TEXTS,
        Key.EMITTED_TEXTS,
        Key.ERROR_TYPE,
    }
)

SPANS: Final[Mapping[str, SpanSpec]] = {
    GENERATE: SpanSpec(
        "coordinator",
        SpanKind.SERVER,
        (),
        frozenset(
            {
                Key.OPERATION,
                Key.PROVIDER,
                Key.REQUEST_MODEL,
                Key.REQUEST_MAX_TOKENS,
                Key.REQUEST_TEMPERATURE,
                Key.REQUEST_SEED,
                Key.REQUEST_STREAM,
                Key.RESPONSE_ID,
                Key.RESPONSE_MODEL,
                Key.FINISH_REASONS,
                Key.INPUT_TOKENS,
                Key.OUTPUT_TOKENS,
                Key.RULE,
                Key.DECIDE_AT,
                Key.NUM_ROUNDS,
                Key.NUM_DRAFT_TOKENS,
                Key.NUM_ACCEPTED,
            }
        ),
        frozenset(
            {
                Key.REQUEST_TOP_P,
                Key.REQUEST_TOP_K,
                Key.REQUEST_CHOICES,
                Key.FIRST_CHUNK_S,
                Key.CACHE_READ_TOKENS,
                Key.QUEUE_US,
                Key.ERROR_TYPE,
            }
        ),
    ),
    PREFILL: SpanSpec("coordinator", SpanKind.INTERNAL, (GENERATE,), _ROUND, _ROUND_OPTIONAL),
    ROUND: SpanSpec("coordinator", SpanKind.INTERNAL, (GENERATE,), _ROUND, _ROUND_OPTIONAL),
    PROPOSE: SpanSpec(
        "draft",
        SpanKind.SERVER,
        (ROUND, PREFILL),
        _COMMAND,
        frozenset(
            {Key.CACHED_TOKENS, Key.DEFERRED, Key.DROPPED_MASS, Key.ENCODING, Key.ERROR_TYPE}
        ),
    ),
    VERIFY: SpanSpec(
        "target",
        SpanKind.SERVER,
        (ROUND, PREFILL),
        _COMMAND,
        frozenset(
            {
                Key.CACHED_TOKENS,
                Key.DEFERRED,
                Key.NUM_ACCEPTED,
                Key.NUM_EMITTED,
                Key.CLOSING,
                Key.DECIDE_AT,
                Key.REDRAW_MISMATCH,
                Key.AUDITED,
                Key.ERROR_TYPE,
            }
        ),
    ),
    DRAFT_FORWARD: SpanSpec(
        "draft", SpanKind.INTERNAL, (), _STEP, frozenset({Key.DROPPED_LINKS}), (PROPOSE,)
    ),
    TARGET_FORWARD: SpanSpec(
        "target", SpanKind.INTERNAL, (), _STEP, frozenset({Key.DROPPED_LINKS}), (VERIFY,)
    ),
}

_PROPAGATOR = TraceContextTextMapPropagator()


class _TableSampler(Sampler):
    """Parent-based ratio; a batch span is recorded iff a context that it links is sampled."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._by_parent = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if not SPANS[name].links:
            return self._by_parent.should_sample(
                parent_context, trace_id, name, kind, attributes, links, trace_state
            )
        sampled = any(link.context.trace_flags.sampled for link in links or ())
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.DROP
        return SamplingResult(decision, attributes)

    def get_description(self) -> str:
        """Name and ratio."""
        return f"SpecmeshTable{{{self._ratio}}}"


class Telemetry:
    """The tracer of one process object. Thread-safe.

    A context is None exactly when the request is not recorded here; spans then are non-recording.
    """

    def __init__(
        self,
        service: str,
        settings: TelemetrySettings,
        instance_id: str,
        processors: Sequence[SpanProcessor] = (),
    ) -> None:
        """`service`: "coordinator", "draft" or "target". Without processors nothing is recorded."""
        self.service = service
        self.record_content = settings.record_content
        self._enabled = bool(processors)
        resource = Resource.create(
            {
                "service.name": f"specmesh-{service}",
                "service.namespace": "specmesh",
                "service.instance.id": instance_id,
                "service.version": installed_version(),
            }
        )
        self._provider = TracerProvider(
            sampler=_TableSampler(settings.sampling_ratio) if processors else ALWAYS_OFF,
            resource=resource,
            shutdown_on_exit=False,
        )
        for processor in processors:
            self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("specmesh", installed_version())

    @classmethod
    def create(cls, service: str, settings: TelemetrySettings, instance_id: str) -> Telemetry:
        """Build the exporters that the settings ask for: OTLP/gRPC, OTLP-JSON lines, both, none.

        Raises ConfigError when `trace_dir` cannot be written.
        """
        processors: list[SpanProcessor] = []
        if settings.otlp_endpoint is not None:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(
                endpoint=settings.otlp_endpoint,
                insecure=not settings.otlp_endpoint.startswith("https://"),
                timeout=5.0,
                channel_options=(("grpc.enable_http_proxy", 0),),  # type: ignore[arg-type]  # an integer to gRPC
            )
            # A sampled request of 75 rounds is 300 spans: room for some dozens of them.
            processors.append(BatchSpanProcessor(exporter, max_queue_size=16384))
        if settings.trace_dir is not None:
            from specmesh.traces.trace_file import TraceFileExporter

            file_exporter = TraceFileExporter.open(settings.trace_dir, service, instance_id)
            processors.append(
                BatchSpanProcessor(file_exporter, max_queue_size=16384, schedule_delay_millis=500)
            )
        return cls(service, settings, instance_id, processors)

    def start(
        self,
        name: str,
        context: Context | None,
        attributes: Attributes = None,
        start_ns: int | None = None,
    ) -> Span:
        """Start a span under `context`; the caller ends it. Names that have a parent in the table
        give a non-recording span when context is None; others start a trace of their own."""
        spec = SPANS[name]
        if context is None:
            if spec.parents:
                return INVALID_SPAN
            context = Context()  # empty: never the ambient span of the calling task
        own = {Key.SERVICE: self.service, **(attributes or {})}
        return self.tracer.start_span(name, context, spec.kind, own, start_time=start_ns)

    def record(
        self,
        name: str,
        context: Context | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes = None,
        links: Sequence[SpanContext] = (),
    ) -> None:
        """Record a span after the fact, times in Unix nanoseconds. No-op when context is None.

        A span that a batch span must link is started with `start` on arrival instead, so that its
        id exists when the batch runs.
        """
        if context is None:
            return
        span = self.start(name, context, attributes, start_ns)
        for link in links[:MAX_LINKS]:
            span.add_link(link)
        span.end(end_ns)

    def record_batch(
        self,
        name: str,
        spans: Iterable[Span],
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, int],
    ) -> None:
        """Record one forward pass as the root of its own trace, linked both ways with `spans`.

        spans: one per command the pass served; those not recording are skipped, and without any
        left nothing is recorded. At most MAX_LINKS are linked, the rest are counted.
        """
        recording = [span for span in spans if span.is_recording()]
        if not recording:
            return
        linked = recording[:MAX_LINKS]
        batch = self.tracer.start_span(
            name,
            Context(),
            SPANS[name].kind,
            {Key.SERVICE: self.service, **attributes},
            links=[Link(span.get_span_context()) for span in linked],
            start_time=start_ns,
        )
        if len(recording) > len(linked):
            batch.set_attribute(Key.DROPPED_LINKS, len(recording) - len(linked))
        batch_context = batch.get_span_context()
        for span in linked:
            span.add_link(batch_context)
        batch.end(end_ns)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Export what is buffered. False when the timeout passed first."""
        return self._provider.force_flush(int(timeout_s * 1000))

    def shutdown(self) -> None:
        """Flush and close the exporters. Spans that end later are lost."""
        self._provider.shutdown()

    @staticmethod
    def context(span: Span) -> Context | None:
        """The context under which children of `span` go; None when it is not recording."""
        return set_span_in_context(span, Context()) if span.is_recording() else None

    @staticmethod
    def trace_id(span: Span) -> str:
        """32 hex digits, or "" when the span belongs to no trace."""
        context = span.get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else ""

    @staticmethod
    def inject(span: Span) -> TraceContext:
        """The context to send inside a command: empty when the span is not recording."""
        if not span.is_recording():
            return TraceContext()
        own = span.get_span_context()
        state = own.trace_state.to_header() if own.trace_state else ""
        parent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        return TraceContext(traceparent=parent, tracestate=state)

    def extract(self, trace: TraceContext) -> Context | None:
        """The context of a received command; None when empty, malformed or not sampled."""
        if not self._enabled or not trace.traceparent:
            return None
        carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        context = _PROPAGATOR.extract(carrier, Context())
        parent = get_current_span(context).get_span_context()
        return context if parent.is_valid and parent.trace_flags.sampled else None

    @staticmethod
    def extract_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
        """The caller's context from gRPC metadata, for `start(GENERATE, ...)`; else empty."""
        carrier = {
            key: value
            for key, value in metadata
            if key in ("traceparent", "tracestate") and isinstance(value, str)
        }
        return _PROPAGATOR.extract(carrier, Context())

    @staticmethod
    def fail(span: Span, error: BaseException) -> None:
        """Mark a span as failed. The reason is recorded, the message never (it may quote input)."""
        if span.is_recording():
            reason = error.reason if isinstance(error, SpecmeshError) else type(error).__name__
            span.set_attribute(Key.ERROR_TYPE, reason)
            span.set_status(Status(StatusCode.ERROR, reason))


def installed_version() -> str:
    """Version of the installed package; "0" when run from a tree that was never installed."""
    try:
        return version("specmesh")
    except PackageNotFoundError:
        return "0"
