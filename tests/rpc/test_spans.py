"""Spans of both services follow the table: one per recorded command, one per pass, linked."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.specmesh.v1 import session_pb2
from specmesh.config import TelemetrySettings
from specmesh.spans import DRAFT_FORWARD, PROPOSE, SPANS, TARGET_FORWARD, VERIFY, Key
from specmesh.telemetry import Telemetry
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import Script, Setup, linked, reason, running

TRACE_ID = "0123456789abcdef0123456789abcdef"
SAMPLED = session_pb2.TraceContext(traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-01")
UNSAMPLED = session_pb2.TraceContext(traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-00")
NAMES = {"draft": (PROPOSE, DRAFT_FORWARD), "target": (VERIFY, TARGET_FORWARD)}


def recording(side: str) -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    processors = [SimpleSpanProcessor(exporter)]
    return Telemetry(side, TelemetrySettings(), "test", processors), exporter


@pytest.mark.parametrize("side", ["draft", "target"])
async def test_a_recorded_command_gives_its_span_and_linked_passes(side) -> None:
    """Parent from the command, keys of the table, times in order; passes link to it and back."""
    telemetry, exporter = recording(side)
    model = PrefixDecoder(16)
    setup = Setup(telemetry=telemetry)
    async with running(side, model, setup) as service, linked(service) as link:
        script = Script(side, "s", [1, 2, 3])
        await link.call(script.open())
        command = script.propose(3) if side == "draft" else script.verify(steps=3)
        command.trace.CopyFrom(SAMPLED)
        result = await link.call(command)
    name, forward_name = NAMES[side]
    spans = exporter.get_finished_spans()
    (span,) = [span for span in spans if span.name == name]
    passes = [span for span in spans if span.name == forward_name]
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    spec = SPANS[name]
    keys = set(span.attributes) - {Key.SERVICE}
    assert spec.required <= keys <= spec.required | spec.optional
    assert span.attributes[Key.NUM_STEPS] == result.timing.num_steps == len(passes) == 3
    assert span.attributes[Key.BEFORE] == (3, 0, 0)
    for forward in passes:
        assert [entry.context.span_id for entry in forward.links] == [span.context.span_id]
        assert span.start_time <= forward.start_time <= forward.end_time <= span.end_time
        keys = set(forward.attributes) - {Key.SERVICE}
        assert SPANS[forward_name].required <= keys
    linked_back = {entry.context.span_id for entry in span.links}
    assert linked_back == {forward.context.span_id for forward in passes}


async def test_unsampled_commands_record_nothing() -> None:
    """No span for an unsampled or absent context, and none for the passes that serve them."""
    telemetry, exporter = recording("target")
    setup = Setup(telemetry=telemetry)
    async with running("target", PrefixDecoder(16), setup) as service, linked(service) as link:
        script = Script("target", "s", [1, 2, 3])
        await link.call(script.open())
        for trace in (UNSAMPLED, session_pb2.TraceContext()):
            command = script.verify()
            command.trace.CopyFrom(trace)
            script.committed((await link.call(command)).verdict.tokens)
    assert exporter.get_finished_spans() == ()


async def test_a_refused_command_ends_its_span_with_the_reason() -> None:
    """The error type is on the span, of commands refused at once and of those that fail later."""
    telemetry, exporter = recording("target")
    setup = Setup(telemetry=telemetry)
    model = PrefixDecoder(16, nan_token=13)
    async with running("target", model, setup) as service, linked(service) as link:
        script = Script("target", "s", [1, 2, 13])
        await link.call(script.open())
        bad = script.verify(steps=0)
        faulty = script.verify(append_from=0)
        for command in (bad, faulty):
            command.trace.CopyFrom(SAMPLED)
            assert reason(await link.call(command)) != ""
    spans = [span for span in exporter.get_finished_spans() if span.name == VERIFY]
    errors = [span.attributes[Key.ERROR_TYPE] for span in spans]
    assert errors == ["INVALID_REQUEST", "NUMERIC_FAULT"]
    assert not any(span.status.is_ok for span in spans)


async def test_commands_and_passes_are_counted() -> None:
    """The metrics say what was answered, how large passes were, and which tokens were reused."""
    async with running("target", PrefixDecoder(16)) as service, linked(service) as link:
        for name in ("a", "b"):
            script = Script("target", name, list(range(10)))
            await link.call(script.open())
            script.committed((await link.call(script.verify(steps=2))).verdict.tokens)
        assert reason(await link.call(script.verify(steps=0))) == "INVALID_REQUEST"
        registry = service.metrics.registry

        def value(name: str, **labels: str) -> float:
            found = registry.get_sample_value(name, {"side": "target", **labels})
            assert found is not None, name
            return found

        assert value("specmesh_commands_total", command="verify", outcome="ok") == 2
        refused = value("specmesh_commands_total", command="verify", outcome="INVALID_REQUEST")
        assert refused == 1
        assert value("specmesh_forward_rows_total") == 10 + 1 + 2 + 1
        assert value("specmesh_prefix_cache_hit_tokens_total") == 8
        assert value("specmesh_prefix_cache_miss_tokens_total") == 10 + 2
        assert value("specmesh_kv_pages", state="used") == 3 + 3 - 2
        assert value("specmesh_sessions") == 2
