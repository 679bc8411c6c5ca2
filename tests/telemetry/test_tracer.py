"""The tracer of a process: the table, sampling, context on the wire, batch links, no globals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, SpanKind, StatusCode

from protos.specmesh.v1.session_pb2 import TraceContext
from specmesh.config import TelemetrySettings
from specmesh.errors import InvalidRequest
from specmesh.spans import (
    DRAFT_FORWARD,
    GENERATE,
    PROPOSE,
    ROUND,
    SPANS,
    TARGET_FORWARD,
    VERIFY,
    Key,
)
from specmesh.telemetry import MAX_LINKS, Telemetry

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Recorded:
    """A Telemetry whose finished spans are kept in memory."""

    def __init__(self, service: str, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        settings = TelemetrySettings(sampling_ratio=ratio)
        processor = SimpleSpanProcessor(self._exporter)
        self.tel = Telemetry(service, settings, f"{service}-0", [processor])

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def coordinator() -> Iterator[Recorded]:
    recorded = Recorded("coordinator")
    yield recorded
    recorded.tel.shutdown()


@pytest.fixture
def target() -> Iterator[Recorded]:
    recorded = Recorded("target")
    yield recorded
    recorded.tel.shutdown()


def test_the_table_is_closed() -> None:
    """Every parent and link in the table is a row of it, and every attribute key is used."""
    keys = {value for name, value in vars(Key).items() if name.isupper()}
    used = {Key.SERVICE}
    for name, spec in SPANS.items():
        assert set(spec.parents) <= set(SPANS), name
        assert set(spec.links) <= set(SPANS), name
        assert not spec.required & spec.optional, name
        used |= spec.required | spec.optional
    assert used == keys


def test_a_span_under_nothing_is_not_recorded(coordinator: Recorded) -> None:
    """Only names without a parent in the table may start a trace; others are no-ops."""
    assert coordinator.tel.start(ROUND, None) is INVALID_SPAN
    coordinator.tel.start(GENERATE, None).end()
    assert [span.name for span in coordinator.spans] == [GENERATE]


def test_the_ambient_span_is_no_parent(coordinator: Recorded) -> None:
    """A request that arrives without a context starts its own trace, whatever span is current."""
    other = coordinator.tel.start(GENERATE, None)
    with trace.use_span(other, end_on_exit=True):
        coordinator.tel.start(GENERATE, None).end()
    first, second = coordinator.spans
    assert first.parent is None
    assert second.parent is None
    assert first.context.trace_id != second.context.trace_id


def test_children_share_the_trace_and_name_their_service(
    coordinator: Recorded, target: Recorded
) -> None:
    """generate -> round -> verify across two processes is one trace with the edges of the table."""
    root = coordinator.tel.start(GENERATE, coordinator.tel.extract_metadata(()))
    step = coordinator.tel.start(ROUND, coordinator.tel.context(root))
    verify = target.tel.start(VERIFY, target.tel.extract(coordinator.tel.inject(step)))
    for span in (verify, step, root):
        span.end()
    (verified,), (stepped, rooted) = target.spans, coordinator.spans
    assert verified.parent is not None
    assert verified.parent.span_id == stepped.context.span_id
    assert stepped.parent is not None
    assert stepped.parent.span_id == rooted.context.span_id
    assert {span.context.trace_id for span in (verified, stepped, rooted)} == {
        rooted.context.trace_id
    }
    assert coordinator.tel.trace_id(root) == f"{rooted.context.trace_id:032x}"
    assert verified.kind is SpanKind.SERVER
    assert verified.attributes is not None
    assert verified.attributes[Key.SERVICE] == "target"
    assert verified.resource.attributes["service.name"] == "specmesh-target"


@pytest.mark.parametrize(
    ("ratio", "traceparent", "recorded"),
    [(0.0, SAMPLED, True), (1.0, UNSAMPLED, False), (0.0, None, False), (1.0, None, True)],
)
def test_the_caller_decides_on_sampling_before_the_ratio(
    ratio: float, traceparent: str | None, recorded: bool
) -> None:
    """A caller's traceparent wins over the ratio both ways; without one the ratio counts."""
    own = Recorded("coordinator", ratio)
    metadata = [("traceparent", traceparent)] if traceparent else []
    root = own.tel.start(GENERATE, own.tel.extract_metadata(metadata))
    step = own.tel.start(ROUND, own.tel.context(root))
    sent = own.tel.inject(step)
    step.end()
    root.end()
    assert bool(own.spans) is recorded
    assert bool(sent.traceparent) is recorded
    if traceparent:
        assert own.tel.trace_id(root) == traceparent.split("-")[1]
    own.tel.shutdown()


def test_the_ratio_is_the_share_of_traces_recorded() -> None:
    """At ratio 0.25, of 2,000 requests 500 +- 110 are recorded (5.7 sigma: 1e-8 by chance)."""
    own = Recorded("coordinator", 0.25)
    for _ in range(2000):
        own.tel.start(GENERATE, None).end()
    assert abs(len(own.spans) - 500) < 110
    own.tel.shutdown()


@pytest.mark.parametrize(
    "bad",
    ["", "nonsense", UNSAMPLED, f"00-{'0' * 32}-b7ad6b7169203331-01", SAMPLED + "x" * 600, "ff-"],
)
def test_a_context_that_is_no_sampled_one_extracts_to_none(target: Recorded, bad: str) -> None:
    """Empty, malformed, oversized and unsampled contexts all mean: not recorded here."""
    assert target.tel.extract(TraceContext(traceparent=bad)) is None
    assert target.tel.extract(TraceContext(traceparent=SAMPLED)) is not None


def test_tracestate_travels(target: Recorded) -> None:
    """The vendor part of the W3C context is handed on unchanged."""
    context = target.tel.extract(TraceContext(traceparent=SAMPLED, tracestate="vendor=abc"))
    span = target.tel.start(VERIFY, context)
    assert target.tel.inject(span).tracestate == "vendor=abc"
    span.end()


def test_a_span_of_the_past_has_the_times_given(target: Recorded) -> None:
    """A span keeps the nanoseconds it is given, and its attributes."""
    context = target.tel.extract(TraceContext(traceparent=SAMPLED))
    target.tel.start(VERIFY, context, {Key.ROUND: 3}, 1_000_000_007).end(1_000_000_011)
    (span,) = target.spans
    assert (span.start_time, span.end_time) == (1_000_000_007, 1_000_000_011)
    assert span.attributes is not None
    assert span.attributes[Key.ROUND] == 3


def test_a_batch_is_linked_both_ways_with_every_command_it_served(target: Recorded) -> None:
    """The forward pass is the root of its own trace; links name each verify span, and back."""
    context = target.tel.extract(TraceContext(traceparent=SAMPLED))
    commands = [target.tel.start(VERIFY, context) for _ in range(3)]
    target.tel.record_batch(TARGET_FORWARD, [*commands, INVALID_SPAN], 10, 20, {Key.BATCH_SIZE: 4})
    for command in commands:
        command.end()
    batch, *served = target.spans
    assert batch.parent is None
    assert batch.context.trace_id != served[0].context.trace_id
    assert [link.context for link in batch.links] == [span.context for span in served]
    assert all([link.context for link in span.links] == [batch.context] for span in served)
    assert batch.attributes is not None
    assert batch.attributes[Key.BATCH_SIZE] == 4
    assert Key.DROPPED_LINKS not in batch.attributes


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_batch_is_recorded_iff_a_context_it_links_is_sampled(ratio: float) -> None:
    """The ratio does not touch batch spans: no linked context, no span; one, and there is one."""
    own = Recorded("draft", ratio)
    own.tel.record_batch(DRAFT_FORWARD, [INVALID_SPAN], 1, 2, {})
    assert not own.spans
    command = own.tel.start(PROPOSE, own.tel.extract(TraceContext(traceparent=SAMPLED)))
    own.tel.record_batch(DRAFT_FORWARD, [INVALID_SPAN, command], 1, 2, {})
    assert [span.name for span in own.spans] == [DRAFT_FORWARD]
    unsampled = own.tel.extract_metadata([("traceparent", UNSAMPLED)])
    link = trace.Link(trace.get_current_span(unsampled).get_span_context())
    assert not own.tel.tracer.start_span(DRAFT_FORWARD, Context(), links=[link]).is_recording()
    own.tel.shutdown()


def test_links_of_a_batch_are_capped_and_the_rest_counted(target: Recorded) -> None:
    """130 commands give 128 links and say that 2 were dropped."""
    context = target.tel.extract(TraceContext(traceparent=SAMPLED))
    commands = [target.tel.start(VERIFY, context) for _ in range(MAX_LINKS + 2)]
    target.tel.record_batch(TARGET_FORWARD, commands, 1, 2, {})
    (batch,) = target.spans
    assert len(batch.links) == MAX_LINKS
    assert batch.attributes is not None
    assert batch.attributes[Key.DROPPED_LINKS] == 2
    assert batch.dropped_links == 0


def test_a_failure_is_marked_without_its_message(coordinator: Recorded) -> None:
    """Messages may quote a prompt, so only the reason or the type is recorded."""
    for error in (InvalidRequest("the prompt is: secret"), ValueError("secret")):
        span = coordinator.tel.start(GENERATE, None)
        coordinator.tel.fail(span, error)
        span.end()
    known, unknown = coordinator.spans
    assert known.status.status_code is StatusCode.ERROR
    assert known.attributes is not None
    assert known.attributes[Key.ERROR_TYPE] == "INVALID_REQUEST"
    assert unknown.attributes is not None
    assert unknown.attributes[Key.ERROR_TYPE] == "ValueError"
    assert "secret" not in known.to_json() + unknown.to_json()


def test_nothing_global_is_touched_and_nothing_recorded_without_exporters() -> None:
    """Two processes' tracers live side by side; the API's global provider stays as it was."""
    before = trace.get_tracer_provider()
    silent = Telemetry.create("draft", TelemetrySettings(), "draft-0")
    assert trace.get_tracer_provider() is before
    assert silent.extract(TraceContext(traceparent=SAMPLED)) is None
    sampled = silent.extract_metadata([("traceparent", SAMPLED)])
    assert not silent.start(GENERATE, sampled).is_recording()
    assert not silent.start(GENERATE, Context()).is_recording()
    silent.shutdown()
