"""Exports one trace as a self-contained HTML page: no network, no other file, opens from disk.

Owns what the page's script is given; the page itself is `specmesh/data/trace_page.html`. Trace
content reaches the page only as JSON text inside an inert element, and the script only ever sets
text nodes, so nothing in a trace file can become markup or code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from specmesh.errors import InvalidRequest
from specmesh.spans import PREFILL, PROPOSE, SPANS, VERIFY, Key
from specmesh.traces.reader import Scalar, Skipped, StoredSpan, Trace, read_trace, summarize

PLACEHOLDER = "__TRACE_DATA__"
_LANES = ("coordinator", "draft", "target")


def export_trace(paths: Sequence[Path], trace_id: str, html: Path) -> Trace:
    """Write the page of the trace that begins with `trace_id` to `html` and return the trace.

    Raises InvalidRequest when there is no such trace or the file cannot be written.
    """
    trace, skipped = read_trace(paths, trace_id)
    try:
        html.write_text(render_page(trace, skipped), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {html}: {error.strerror}", field="html") from error
    return trace


def render_page(trace: Trace, skipped: Skipped | None = None) -> str:
    """The whole page as text."""
    template = (files("specmesh") / "data" / "trace_page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(trace, skipped or Skipped()), allow_nan=False)
    # "<" would let a text end the script element; JSON reads the escape as the same character.
    return template.replace(PLACEHOLDER, data.replace("<", "\\u003c"))


def page_data(trace: Trace, skipped: Skipped) -> dict[str, Any]:
    """What the page shows. Times are milliseconds since the trace's first span."""
    summary, root, steps = summarize(trace), trace.root, trace.steps()
    position = {step.span_id: index for index, step in enumerate(steps)}
    below: dict[str, list[StoredSpan]] = {}
    for span in sorted(trace.spans, key=lambda span: span.start_ns):
        below.setdefault(span.parent_id, []).append(span)
    first_ns = trace.start_ns
    return {
        "trace_id": trace.trace_id,
        "request_id": summary.request_id,
        "model": root.text(Key.REQUEST_MODEL) if root is not None else "",
        "start": datetime.fromtimestamp(first_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "duration_ms": (trace.end_ns - first_ns) / 1e6,
        "skipped": str(skipped) if skipped else "",
        "num_samples": len({step.count(Key.SAMPLE_INDEX) for step in steps}),
        "summary": {
            "duration_ms": summary.duration_ms,
            "output_tokens": summary.num_output_tokens,
            "rounds": summary.num_rounds,
            "draft_tokens": summary.num_draft_tokens,
            "accepted_tokens": summary.num_accepted,
            "acceptance": summary.acceptance,
            "finish": summary.finish,
        },
        "rounds": [_round(step, below.get(step.span_id, ()), first_ns) for step in steps],
        "lanes": _lanes(trace, position, first_ns),
    }


def _round(step: StoredSpan, commands: Sequence[StoredSpan], first_ns: int) -> dict[str, Any]:
    parts = {
        name: (step.number(key) or 0.0) / 1e3
        for name, key in (
            ("draft", Key.DRAFT_US),
            ("verify", Key.VERIFY_US),
            ("wire", Key.WIRE_US),
            ("manage", Key.MANAGE_US),
            ("queue", Key.QUEUE_US),
        )
    }
    return {
        **_times(step, first_ns),
        "kind": "prefill" if step.name == PREFILL else "round",
        "index": step.count(Key.ROUND),
        "sample": step.count(Key.SAMPLE_INDEX),
        "emitted": step.count(Key.NUM_EMITTED),
        "fallback": step.text(Key.FALLBACK),
        "notes": _notes(step),
        "parts": parts,
        "tokens": _tokens(step),
        "candidates": _candidates(step),
        "boundaries": _boundaries(step),
        "commands": [
            {
                **_times(command, first_ns),
                "name": command.name,
                "batch": command.count(Key.BATCH_SIZE),
                "passes": command.count(Key.NUM_STEPS),
            }
            for command in commands
        ],
        "attributes": [[key, _shown(value)] for key, value in sorted(step.attributes.items())],
    }


def _times(span: StoredSpan, first_ns: int) -> dict[str, float]:
    return {"start": (span.start_ns - first_ns) / 1e6, "end": (span.end_ns - first_ns) / 1e6}


def _notes(step: StoredSpan) -> list[str]:
    notes = [step.text(Key.ERROR_TYPE) or "failed"] if step.failed else []
    if step.attributes.get(Key.AHEAD) is True:
        notes.append("drafted ahead")
    if Key.REDRAW_MISMATCH in step.attributes:
        notes.append(f"re-draw mismatch at candidate {step.count(Key.REDRAW_MISMATCH)}")
    if step.attributes.get(Key.AUDIT_MISMATCH) is True:
        notes.append("audit mismatch")
    return notes


def _tokens(step: StoredSpan) -> list[dict[str, Any]]:
    """Candidates in order with what became of each, then what closed the round.

    Ids and texts are there only when they were recorded.
    """
    num_drafted = min(step.count(Key.NUM_DRAFT_TOKENS), 64)
    num_accepted = min(step.count(Key.NUM_ACCEPTED), num_drafted)
    closing = step.text(Key.CLOSING)
    tokens = []
    for index in range(num_drafted):
        state = "accepted"
        if index >= num_accepted:
            state = "rejected" if index == num_accepted and closing == "recovered" else "unjudged"
        content = _content(step, Key.CANDIDATE_IDS, Key.CANDIDATE_TEXTS, index)
        tokens.append({"state": state, **content})
    drawn = closing if closing in ("recovered", "bonus") else "plain"
    num_emitted = min(step.count(Key.NUM_EMITTED), num_accepted + 64)
    tokens += [
        {"state": drawn, **_content(step, Key.EMITTED_IDS, Key.EMITTED_TEXTS, index)}
        for index in range(num_accepted, num_emitted)
    ]
    return tokens


def _content(step: StoredSpan, ids: str, texts: str, index: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if index < len(step.items(ids)):
        content["id"] = step.items(ids)[index]
    if index < len(step.items(texts)):
        content["text"] = str(step.items(texts)[index])
    return content


def _candidates(step: StoredSpan) -> list[dict[str, float | None]]:
    columns = {
        "target_prob": step.items(Key.TARGET_PROBS),
        "draft_prob": step.items(Key.DRAFT_PROBS),
        "overlap": step.items(Key.OVERLAPS),
        "dropped_mass": step.items(Key.DROPPED_MASS),
    }
    return [
        {name: _finite(column, index) for name, column in columns.items()}
        for index in range(max(len(column) for column in columns.values()))
    ]


def _finite(values: Sequence[Scalar], index: int) -> float | None:
    value = values[index] if index < len(values) else None
    if isinstance(value, bool | str) or value is None or not math.isfinite(value):
        return None
    return float(value)


def _boundaries(step: StoredSpan) -> dict[str, list[list[int]]]:
    found = {}
    for side, before, after in (
        ("draft", Key.DRAFT_BEFORE, Key.DRAFT_AFTER),
        ("target", Key.TARGET_BEFORE, Key.TARGET_AFTER),
    ):
        pair = [
            [int(length) for length in step.items(key) if isinstance(length, int)]
            for key in (before, after)
        ]
        if all(len(lengths) == 3 for lengths in pair):
            found[side] = pair
    return found


def _lanes(trace: Trace, position: Mapping[str, int], first_ns: int) -> dict[str, Any]:
    lanes: dict[str, list[dict[str, Any]]] = {lane: [] for lane in _LANES}
    of_command = {
        span.span_id: position.get(span.parent_id, -1)
        for span in trace.spans
        if span.name in (PROPOSE, VERIFY)
    }
    for span in sorted((*trace.spans, *trace.batches), key=lambda span: span.start_ns):
        spec = SPANS.get(span.name)
        if spec is None or span.name not in _BAR_KINDS:
            continue
        kind = _BAR_KINDS[span.name]
        index = position.get(span.span_id, of_command.get(span.span_id, -1))
        for linked_trace, linked_span in span.links if spec.links else ():
            if linked_trace == trace.trace_id:
                index = of_command.get(linked_span, -1)
        lanes[spec.service].append(
            {
                **_times(span, first_ns),
                "name": span.name,
                "kind": kind,
                "label": _label(span, kind),
                "round": index,
                "batch": span.count(Key.BATCH_SIZE),
                "failed": span.failed,
            }
        )
    return lanes


# The request itself is the page; what is drawn are its steps, commands and passes.
_BAR_KINDS = {
    "specmesh.prefill": "prefill",
    "specmesh.round": "round",
    PROPOSE: "command",
    VERIFY: "command",
    "draft.forward": "forward",
    "target.forward": "forward",
}


def _label(span: StoredSpan, kind: str) -> str:
    if kind == "round":
        return str(span.count(Key.ROUND))
    return kind if kind == "prefill" else span.name.rpartition(".")[2]


def _shown(value: Scalar | tuple[Scalar, ...]) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
