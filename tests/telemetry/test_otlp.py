"""OTLP/gRPC export: a real receiver gets every span of three tracers in one trace."""

from __future__ import annotations

from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from specmesh.spans import GENERATE, PREFILL, PROPOSE, ROUND, TARGET_FORWARD, VERIFY, Key
from specmesh.telemetry import Telemetry
from tests.telemetry.otlp_receiver import OtlpReceiver


def test_a_receiver_gets_every_span_of_all_three_services_with_batch_links() -> None:
    """Shutdown flushes: nothing of a request with 30 rounds is lost, links point both ways."""
    with OtlpReceiver() as receiver:
        tels = {
            name: Telemetry.create(name, receiver.settings, f"{name}-0")
            for name in ("coordinator", "draft", "target")
        }
        coordinator, draft, target = tels["coordinator"], tels["draft"], tels["target"]
        root = coordinator.start(GENERATE, None, {Key.FINISH_REASONS: ("stop",)})
        for index in range(31):
            name = ROUND if index else PREFILL
            step = coordinator.start(name, coordinator.context(root), {Key.ROUND: index})
            propose = draft.start(PROPOSE, draft.extract(coordinator.inject(step)))
            propose.end()
            verify = target.start(VERIFY, target.extract(coordinator.inject(step)))
            target.record_batch(TARGET_FORWARD, [verify], 1, 2, {Key.BATCH_SIZE: 1})
            verify.end()
            step.end()
        root.end()
        for tel in tels.values():
            tel.shutdown()
        trace_id = coordinator.trace_id(root)
        assert receiver.names(trace_id) == {
            GENERATE: 1, PREFILL: 1, ROUND: 30, PROPOSE: 31, VERIFY: 31,
        }  # fmt: skip
        assert {one.service for one in receiver.by_trace(trace_id)} == {
            "specmesh-coordinator", "specmesh-draft", "specmesh-target",
        }  # fmt: skip
        batches = [one for one in receiver.spans if one.span.name == TARGET_FORWARD]
        verifies = [one for one in receiver.spans if one.span.name == VERIFY]
        assert {one.span.links[0].span_id for one in batches} == {
            one.span.span_id for one in verifies
        }
        assert {one.span.links[0].span_id for one in verifies} == {
            one.span.span_id for one in batches
        }
        assert {one.span.kind for one in verifies} == {SpanMessage.SPAN_KIND_SERVER}


def test_a_dead_collector_costs_nothing_but_its_spans() -> None:
    """Starting, ending and shutting down with nobody listening neither raises nor hangs."""
    with OtlpReceiver() as receiver:
        settings = receiver.settings
    tel = Telemetry.create("draft", settings, "draft-0")
    tel.start(GENERATE, None).end()
    tel.shutdown()
    assert receiver.spans == []
