"""The tracer of a process: what is sampled, where it is exported, how its context travels.

The context is W3C's, in gRPC metadata and inside link frames. Which spans there are is in
`specmesh/spans.py`. Must not know how a round is run, where the files are read (`specmesh/traces`)
or what is counted. Nothing here is global: each process object holds its own `Telemetry`.

A request that is not sampled has no context (None), and every call below is then a no-op of well
under a microsecond. Spans are started and ended by hand: never hold one as the current span over a
`yield`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

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
from specmesh.spans import SPANS, Key

MAX_LINKS = 128  # the SDK's own limit per span; more are counted in Key.DROPPED_LINKS
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
