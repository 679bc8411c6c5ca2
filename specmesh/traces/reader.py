"""Reads OTLP-JSON lines of several processes and assembles traces. Trusts nothing in the files.

Owns parsing and its bounds: a line or a span that is not what OTLP says is skipped and counted,
never fatal. Must not know what is drawn (`terminal.py`, `page.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmesh.errors import InvalidRequest
from specmesh.spans import GENERATE, PREFILL, ROUND, SPANS, Key
from specmesh.traces.trace_file import SUFFIX

MAX_LINE_BYTES = 64 << 20  # one batch of 512 spans is below 2 MB
MAX_SPANS_PER_TRACE = 200_000
MAX_ITEMS = 4096  # attributes of a span, items of an array, links: more are ignored
MAX_TEXT = 4096
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
# Control characters, marks that change the direction of text, lone surrogates.
_NOT_PRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SYMBOLIC_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span as read. Times are Unix nanoseconds, end >= start. links: (trace_id, span_id)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Value]
    links: tuple[tuple[str, str], ...]

    @property
    def duration_ms(self) -> float:
        """Milliseconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e6

    def number(self, key: str) -> float | None:
        """A finite numeric attribute, or None."""
        value = self.attributes.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if math.isfinite(value) else None

    def count(self, key: str) -> int:
        """An attribute that counts something; 0 when absent or no number."""
        return int(self.number(key) or 0)

    def text(self, key: str) -> str:
        """A string attribute, "" when absent."""
        value = self.attributes.get(key)
        return value if isinstance(value, str) else ""

    def items(self, key: str) -> tuple[Scalar, ...]:
        """An array attribute, empty when absent."""
        value = self.attributes.get(key)
        return value if isinstance(value, tuple) else ()


@dataclass(slots=True)
class Skipped:
    """What was left out while reading."""

    num_lines: int = 0
    num_spans: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_lines or self.num_spans)

    def __str__(self) -> str:
        return f"skipped {self.num_lines} unreadable lines and {self.num_spans} unreadable spans"


@dataclass(slots=True)
class Trace:
    """All spans of one request, and the batch spans of other traces that link into it."""

    trace_id: str
    spans: list[StoredSpan] = field(default_factory=list)
    batches: list[StoredSpan] = field(default_factory=list)

    @property
    def root(self) -> StoredSpan | None:
        """The `specmesh.generate` span; None while the request runs or its file is missing."""
        return next((span for span in self.spans if span.name == GENERATE), None)

    @property
    def start_ns(self) -> int:
        """Start of the earliest span."""
        return min(span.start_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        """End of the latest span."""
        return max(span.end_ns for span in self.spans)

    def steps(self) -> list[StoredSpan]:
        """Prefills and rounds in order of start."""
        found = (span for span in self.spans if span.name in (PREFILL, ROUND))
        return sorted(found, key=lambda span: (span.start_ns, span.count(Key.ROUND)))

    def tree(self) -> list[tuple[int, StoredSpan]]:
        """(depth, span) in depth-first order, children by start. Spans whose parent is not here
        are roots; a cycle of parents is cut at its earliest span."""
        ordered = sorted(self.spans, key=lambda span: (span.start_ns, -span.end_ns))
        known = {span.span_id for span in ordered}
        children: dict[str, list[StoredSpan]] = {}
        for span in ordered:
            parent = span.parent_id if span.parent_id in known else ""
            children.setdefault(parent, []).append(span)
        rows: list[tuple[int, StoredSpan]] = []
        seen: set[str] = set()
        for start in (*children.get("", ()), *ordered):
            pending = [(0, start)]
            while pending:
                depth, span = pending.pop()
                if span.span_id in seen:
                    continue
                seen.add(span.span_id)
                rows.append((depth, span))
                below = children.get(span.span_id, ())
                pending += [(depth + 1, child) for child in reversed(below)]
        return rows


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """One line of `specmesh trace list`. The prefill is no round."""

    trace_id: str
    request_id: str
    start_ns: int
    duration_ms: float
    num_output_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted: int
    finish: str
    complete: bool

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted candidates; None when nothing was drafted."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else None


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Trace files among `paths`: files as given, folders searched one level deep.

    Raises InvalidRequest when a path does not exist or nothing is found.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.glob(f"*{SUFFIX}"))
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidRequest(f"{path} does not exist", field="trace_dir")
    if not files:
        places = ", ".join(str(path) for path in paths)
        raise InvalidRequest(f"no *{SUFFIX} files in {places}", field="trace_dir")
    return files


def list_summaries(paths: Sequence[Path]) -> tuple[list[TraceSummary], Skipped]:
    """Every request's trace, newest first, and what was skipped."""
    skipped = Skipped()
    traces: dict[str, Trace] = {}
    for span in _spans(find_files(paths), skipped):
        if span.name in (GENERATE, PREFILL, ROUND):
            traces.setdefault(span.trace_id, Trace(span.trace_id)).spans.append(span)
    summaries = [summarize(trace) for trace in traces.values()]
    summaries.sort(key=lambda summary: summary.start_ns, reverse=True)
    return summaries, skipped


def summarize(trace: Trace) -> TraceSummary:
    """Totals of a trace, from its root where there is one, else from its rounds."""
    root, steps = trace.root, trace.steps()
    finish = "running"
    if root is not None:
        reasons = [str(reason) for reason in root.items(Key.FINISH_REASONS)]
        finish = ", ".join(dict.fromkeys(reasons)) or root.text(Key.ERROR_TYPE) or "unknown"
    tokens = root.number(Key.OUTPUT_TOKENS) if root is not None else None
    if tokens is None:
        tokens = sum(step.count(Key.NUM_EMITTED) for step in steps)
    whole = root or trace
    return TraceSummary(
        trace_id=trace.trace_id,
        request_id=root.text(Key.RESPONSE_ID) if root is not None else "",
        start_ns=whole.start_ns,
        duration_ms=(whole.end_ns - whole.start_ns) / 1e6,
        num_output_tokens=int(tokens),
        num_rounds=sum(step.name == ROUND for step in steps),
        num_draft_tokens=sum(step.count(Key.NUM_DRAFT_TOKENS) for step in steps),
        num_accepted=sum(step.count(Key.NUM_ACCEPTED) for step in steps),
        finish=finish,
        complete=root is not None,
    )


def read_trace(paths: Sequence[Path], trace_id: str) -> tuple[Trace, Skipped]:
    """The one trace whose id, or whose request id, begins with `trace_id`.

    Raises InvalidRequest when there is none or more than one.
    """
    wanted = trace_id.strip().lower()
    if not wanted:
        raise InvalidRequest("a trace id or the beginning of one is needed", field="trace_id")
    files, skipped = find_files(paths), Skipped()
    matches: set[str] = set()
    for span in _spans(files, Skipped()):
        own = span.name == GENERATE and span.text(Key.RESPONSE_ID).lower().startswith(wanted)
        batch = span.name in SPANS and SPANS[span.name].links
        if own or (span.trace_id.startswith(wanted) and not batch):
            matches.add(span.trace_id)
    if not matches:
        raise InvalidRequest(f"no trace begins with {_printable(wanted)[:64]}", field="trace_id")
    if len(matches) > 1:
        some = ", ".join(sorted(matches)[:5])
        raise InvalidRequest(
            f"{len(matches)} traces begin with {wanted}: {some}; give more digits", field="trace_id"
        )
    trace = Trace(matches.pop())
    seen: set[tuple[str, str]] = set()
    for span in _spans(files, skipped):
        key = (span.trace_id, span.span_id)
        if key in seen or len(seen) >= MAX_SPANS_PER_TRACE:
            continue
        if span.trace_id == trace.trace_id:
            seen.add(key)
            trace.spans.append(span)
        elif any(linked == trace.trace_id for linked, _ in span.links):
            seen.add(key)
            trace.batches.append(span)
    return trace, skipped


def _spans(files: Sequence[Path], skipped: Skipped) -> Iterator[StoredSpan]:
    for path in files:
        try:
            with path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    yield from line_spans(line, skipped)
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def line_spans(line: bytes, skipped: Skipped) -> Iterator[StoredSpan]:
    """Spans of one line of a trace file; what is unreadable is counted and left out."""
    if not line.strip():
        return
    try:
        request = json.loads(line)
        resources = request["resourceSpans"]
        pairs = [
            (_service(resource), span)
            for resource in resources
            for scope in resource.get("scopeSpans", ())
            for span in scope.get("spans", ())
        ]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        if line.endswith(b"\n"):  # else a line that is being written just now
            skipped.num_lines += 1
        return
    for service, raw in pairs:
        try:
            yield _span(service, raw)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            skipped.num_spans += 1


def _service(resource: dict[str, Any]) -> str:
    attributes = _attributes(resource.get("resource", {}).get("attributes", ()))
    name = attributes.get("service.name")
    return name.removeprefix("specmesh-") if isinstance(name, str) else "unknown"


def _span(service: str, raw: dict[str, Any]) -> StoredSpan:
    start_ns, end_ns = _time(raw["startTimeUnixNano"]), _time(raw["endTimeUnixNano"])
    if end_ns < start_ns:
        raise ValueError("a span ends before it starts")
    parent = raw.get("parentSpanId", "")
    status = raw.get("status", {})
    links = raw.get("links", ())[:MAX_ITEMS]
    return StoredSpan(
        trace_id=_matching(_TRACE_ID, raw["traceId"]),
        span_id=_matching(_SPAN_ID, raw["spanId"]),
        parent_id=_matching(_SPAN_ID, parent) if parent else "",
        name=_printable(raw["name"]),
        service=service,
        start_ns=start_ns,
        end_ns=end_ns,
        failed=status.get("code") == 2,
        attributes=_attributes(raw.get("attributes", ())),
        links=tuple(
            (_matching(_TRACE_ID, link["traceId"]), _matching(_SPAN_ID, link["spanId"]))
            for link in links
        ),
    )


def _attributes(raw: Sequence[dict[str, Any]]) -> dict[str, Value]:
    return {_printable(item["key"]): _value(item["value"]) for item in raw[:MAX_ITEMS]}


def _value(raw: dict[str, Any]) -> Value:
    items = raw.get("arrayValue")
    if items is not None:
        return tuple(_scalar(item) for item in items.get("values", ())[:MAX_ITEMS])
    return _scalar(raw)


def _scalar(raw: dict[str, Any]) -> Scalar:
    if "stringValue" in raw:
        return _printable(raw["stringValue"])
    if "intValue" in raw:
        value = int(raw["intValue"])
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError("an integer outside 64 bits")
        return value
    if "doubleValue" in raw:
        real = raw["doubleValue"]
        return _SYMBOLIC_FLOATS[real] if isinstance(real, str) else float(real)
    if "boolValue" in raw:
        return bool(raw["boolValue"])
    raise ValueError("an attribute value of no known type")


def _time(raw: str | int) -> int:
    value = int(raw)
    if not 0 <= value < 1 << 63:
        raise ValueError("a time outside 64 bits")
    return value


def _matching(pattern: re.Pattern[str], raw: str) -> str:
    if not pattern.fullmatch(raw.lower()):
        raise ValueError("not an id")
    return raw.lower()


def _printable(raw: str) -> str:
    """Show control and direction-changing characters instead of obeying them; bound the length."""
    return _NOT_PRINTABLE.sub(lambda found: ascii(found[0])[1:-1], raw[:MAX_TEXT])
