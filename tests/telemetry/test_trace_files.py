"""Trace files: what is written reads back whole, and hostile files are skipped with a count."""

from __future__ import annotations

import base64
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from protos.specmesh.v1.session_pb2 import TraceContext
from specmesh.config import TelemetrySettings
from specmesh.errors import ConfigError, InvalidRequest, NotReady
from specmesh.spans import GENERATE, PROPOSE, ROUND, SPANS, TARGET_FORWARD, VERIFY, Key
from specmesh.telemetry import Telemetry
from specmesh.traces.reader import Trace, list_summaries, read_trace
from specmesh.traces.trace_file import SUFFIX, TraceFileExporter, encode_line
from tests.telemetry.sample import OUTCOMES, write_sample

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def line(span: dict[str, Any] | None = None, **changes: Any) -> str:
    """One good OTLP-JSON line, with fields of its span changed (None removes one)."""
    whole: dict[str, Any] = {
        "traceId": TRACE_ID,
        "spanId": "b7ad6b7169203331",
        "name": ROUND,
        "startTimeUnixNano": "1000",
        "endTimeUnixNano": "2000",
        **changes,
    }
    fields = {key: value for key, value in whole.items() if value is not None}
    spans = [fields] if span is None else [span]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}) + "\n"


def write(folder: Path, text: str | bytes) -> Path:
    """A trace file with this content."""
    path = folder / f"hostile{SUFFIX}"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(folder: Path) -> Trace:
    """The trace whose id is TRACE_ID."""
    return read_trace([folder], TRACE_ID)[0]


def test_three_processes_make_one_trace(tmp_path: Path) -> None:
    """Spans of three files assemble into the tree of the table, with batches linked in."""
    sample = write_sample(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    trace, skipped = read_trace([tmp_path], sample.trace_id[:8])
    assert not skipped
    by_id = {span.span_id: span for span in trace.spans}
    for span in trace.spans:
        spec = SPANS[span.name]
        assert span.service == spec.service
        parent = by_id[span.parent_id].name if span.parent_id else None
        assert parent in spec.parents if spec.parents else parent is None
        assert (
            spec.required <= span.attributes.keys() <= spec.required | spec.optional | {Key.SERVICE}
        )
    assert len(trace.steps()) == 1 + sample.num_rounds
    served = [span.span_id for span in trace.spans if span.name in (PROPOSE, VERIFY)]
    linked = {span_id for batch in trace.batches for _, span_id in batch.links}
    # The prefill's propose only filled K/V in this sample and took part in no pass.
    assert len(set(served) - linked) == 1
    assert linked <= set(served)
    assert [depth for depth, _ in trace.tree()].count(0) == 1


def test_sums_over_rounds_are_the_totals(tmp_path: Path) -> None:
    """`list` finds tokens, rounds and acceptance from the spans; newest first."""
    sample = write_sample(tmp_path)
    write_sample(tmp_path, OUTCOMES[:2], request_id="req-2")
    summaries, _ = list_summaries([tmp_path])
    assert len(summaries) == 2
    summary = next(one for one in summaries if one.trace_id == sample.trace_id)
    assert summary.num_output_tokens == sample.num_output_tokens
    assert summary.num_rounds == sample.num_rounds
    assert summary.acceptance == sample.num_accepted / sample.num_draft_tokens
    assert summary.finish == "stop"


def test_a_trace_is_found_by_prefix_and_by_request_id(tmp_path: Path) -> None:
    """Unknown, empty and ambiguous beginnings are refused with the reason."""
    first = write_sample(tmp_path, OUTCOMES[:1], request_id="req-a")
    second = write_sample(tmp_path, OUTCOMES[:1], request_id="req-b")
    assert read_trace([tmp_path], "REQ-B")[0].trace_id == second.trace_id
    assert read_trace([tmp_path], first.trace_id)[0].trace_id == first.trace_id
    with pytest.raises(InvalidRequest, match="2 traces begin with req-"):
        read_trace([tmp_path], "req-")
    with pytest.raises(InvalidRequest, match="no trace begins with"):
        read_trace([tmp_path], "zzz")
    with pytest.raises(InvalidRequest, match="is needed"):
        read_trace([tmp_path], " ")


def test_missing_places_are_named(tmp_path: Path) -> None:
    """A folder that is not there and one without trace files are clear errors."""
    with pytest.raises(InvalidRequest, match="does not exist"):
        list_summaries([tmp_path / "nowhere"])
    with pytest.raises(InvalidRequest, match=r"no \*\.otlp\.jsonl files"):
        list_summaries([tmp_path])


def test_a_line_is_the_official_message_in_official_json() -> None:
    """Read back as OTLP/JSON (hex ids), a line equals what OpenTelemetry's own encoder makes."""
    collected = InMemorySpanExporter()
    tel = Telemetry("target", TelemetrySettings(), "t-0", [SimpleSpanProcessor(collected)])
    remote = TraceContext(traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-01", tracestate="a=b,c=d")
    span = tel.start(
        VERIFY,
        tel.extract(remote),
        {
            Key.SESSION_ID: "ü\n", Key.ROUND: -3, Key.AUDITED: True, Key.BEFORE: (1, 2**62, 3),
            Key.OVERLAPS: (0.5, math.nan, math.inf), Key.EMITTED_TEXTS: ("a", "b"),
        },
    )  # fmt: skip
    tel.record_batch(TARGET_FORWARD, [span], 5, 6, {})
    tel.fail(span, NotReady("gone"))
    span.end()
    tel.start(GENERATE, None).end()
    spans = collected.get_finished_spans()
    line = json.loads(encode_line(spans))
    for resource in line["resourceSpans"]:
        for one in resource["scopeSpans"][0]["spans"]:
            for message in (one, *one.get("links", ())):
                for key in message.keys() & {"traceId", "spanId", "parentSpanId"}:
                    message[key] = base64.b64encode(bytes.fromhex(message[key])).decode()
    read_back = ParseDict(line, ExportTraceServiceRequest())
    assert read_back.SerializeToString(deterministic=True) == encode_spans(spans).SerializeToString(
        deterministic=True
    )
    tel.shutdown()


@pytest.mark.parametrize(
    "bad",
    [
        "not json\n",
        "[]\n",
        "{}\n",
        "null\n",
        "7\n",
        '{"resourceSpans": 7}\n',
        '{"resourceSpans": [null]}\n',
        '{"resourceSpans": [{"scopeSpans": [[]]}]}\n',
        "[" * 200_000 + "\n",
        '{"resourceSpans":' * 100_000 + "\n",
        '{"resourceSpans": [{"resource": 4, "scopeSpans": [{"spans": [{}]}]}]}\n',
        b"\xff\xfe\x00garbage\n",
    ],
    ids=range(12),
)
def test_a_bad_line_is_skipped_and_counted(tmp_path: Path, bad: str | bytes) -> None:
    """Bad JSON, huge nesting and wrong shapes cost one line, and what is around them is read."""
    raw = bad.encode() if isinstance(bad, str) else bad
    good = line().encode()
    write(tmp_path, good + raw + line(spanId="b7ad6b7169203332").encode())
    trace, skipped = read_trace([tmp_path], TRACE_ID)
    assert len(trace.spans) == 2
    assert (skipped.num_lines, skipped.num_spans) == (1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"traceId": None},
        {"traceId": "0af7"},
        {"traceId": 7},
        {"spanId": "xyz"},
        {"parentSpanId": "short"},
        {"name": None},
        {"name": ["a"]},
        {"startTimeUnixNano": "later"},
        {"startTimeUnixNano": None},
        {"startTimeUnixNano": "-5"},
        {"endTimeUnixNano": "500"},
        {"endTimeUnixNano": "9" * 30},
        {"attributes": {"a": "b"}},
        {"attributes": [{"key": "a"}]},
        {"attributes": [{"key": "a", "value": {"intValue": "x"}}]},
        {"attributes": [{"key": "a", "value": {"intValue": "9" * 40}}]},
        {"attributes": [{"key": "a", "value": {"doubleValue": "two"}}]},
        {"attributes": [{"key": "a", "value": {"kvlistValue": {}}}]},
        {"links": [{"traceId": TRACE_ID}]},
        {"links": 3},
        {"status": "bad"},
    ],
)
def test_a_bad_span_is_skipped_and_counted(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A span with a missing or absurd field is left out; its neighbours stay."""
    write(tmp_path, line(spanId="b7ad6b7169203332") + line(**changes))
    trace, skipped = read_trace([tmp_path], TRACE_ID)
    assert [span.span_id for span in trace.spans] == ["b7ad6b7169203332"]
    assert (skipped.num_lines, skipped.num_spans) == (0, 1)


def test_a_line_being_written_is_neither_read_nor_counted(tmp_path: Path) -> None:
    """Half a line at the end of a file is a writer at work."""
    write(tmp_path, line() + line()[:40])
    _, skipped = read_trace([tmp_path], TRACE_ID)
    assert not skipped


def test_a_cycle_of_parents_is_cut(tmp_path: Path) -> None:
    """Spans that claim to be each other's parent, or their own, are all shown once."""
    ids = ["b7ad6b7169203331", "b7ad6b7169203332", "b7ad6b7169203333"]
    parents = [ids[1], ids[0], ids[2]]
    text = "".join(line(spanId=own, parentSpanId=up) for own, up in zip(ids, parents, strict=True))
    write(tmp_path, text)
    assert sorted(span.span_id for _, span in read(tmp_path).tree()) == ids


def test_a_deep_chain_of_spans_is_drawn_without_recursion(tmp_path: Path) -> None:
    """5,000 spans, each the child of the one before."""
    text = "".join(
        line(spanId=f"{i + 1:016x}", parentSpanId=f"{i:016x}" if i else None) for i in range(5000)
    )
    write(tmp_path, text)
    assert [depth for depth, _ in read(tmp_path).tree()] == list(range(5000))


def test_repeated_spans_count_once(tmp_path: Path) -> None:
    """A batch exported twice (a retry) does not double anything."""
    write(tmp_path, line() * 3)
    assert len(read(tmp_path).spans) == 1


def test_control_and_direction_characters_are_escaped(tmp_path: Path) -> None:
    """Terminal escapes, line breaks, bidi overrides and lone surrogates are shown, not obeyed."""
    text = "\x1b[31mred\n\u202eabc\ud800"
    write(tmp_path, line(name=text, attributes=[{"key": "a", "value": {"stringValue": text}}]))
    (span,) = read(tmp_path).spans
    assert span.name == span.text("a") == r"\x1b[31mred\n\u202eabc\ud800"


def test_a_full_file_takes_no_more_and_stays_readable(tmp_path: Path) -> None:
    """Past its bound a file drops spans, counts them, and never cuts a line."""
    collected = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(collected))
    for _ in range(3):
        provider.get_tracer("t").start_span(GENERATE).end()
    spans = collected.get_finished_spans()
    path = tmp_path / f"own{SUFFIX}"
    probe = TraceFileExporter(path)
    assert probe.export(spans[:1]) is SpanExportResult.SUCCESS
    one = path.stat().st_size
    probe.shutdown()
    assert probe.export(spans[:1]) is SpanExportResult.FAILURE
    bounded = TraceFileExporter(path, max_bytes=2 * one + 8)
    assert bounded.export(spans[1:2]) is SpanExportResult.SUCCESS
    assert bounded.export(spans[2:]) is SpanExportResult.FAILURE
    assert bounded.num_dropped == 1
    bounded.shutdown()
    assert len(list_summaries([path])[0]) == 2
    provider.shutdown()


def test_appends_of_two_writers_never_mix(tmp_path: Path) -> None:
    """Two exporters on one file from two threads: every line is whole."""
    collected = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(collected))
    for index in range(40):
        provider.get_tracer("t").start_span(GENERATE, attributes={"pad": "x" * 3000 * index}).end()
    spans = collected.get_finished_spans()
    path = tmp_path / f"shared{SUFFIX}"
    writers = [TraceFileExporter(path), TraceFileExporter(path)]

    def append(writer: TraceFileExporter) -> None:
        for span in spans:
            writer.export([span])

    threads = [threading.Thread(target=append, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.shutdown()
    assert all(json.loads(text) for text in path.read_text().splitlines())
    assert len(path.read_text().splitlines()) == 80
    provider.shutdown()


def test_shutdown_flushes_and_the_file_is_private(tmp_path: Path) -> None:
    """Spans that ended just before `shutdown` are in the file, which others cannot read."""
    tel = Telemetry.create("draft", TelemetrySettings(trace_dir=tmp_path / "new"), "a/../b c")
    tel.start(GENERATE, None).end()
    tel.shutdown()
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == f"draft-a_.._b_c-{os.getpid()}{SUFFIX}"
    assert len(list_summaries([path])[0]) == 1
    assert path.stat().st_mode & 0o007 == 0


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    """`trace_dir` below a file is named at start."""
    (tmp_path / "file").write_text("")
    settings = TelemetrySettings(trace_dir=tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match=r"telemetry\.trace_dir"):
        Telemetry.create("draft", settings, "draft-0")
