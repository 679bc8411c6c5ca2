"""Draws traces in a terminal: the list, and one trace as a tree beside its waterfall.

Owns layout and colour only; what a trace is and what its fields mean is in `reader.py`. Works on a
console of any width, without colour and without Unicode. Text from files is printed as it is, never
as markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specmesh.spans import GENERATE, PREFILL, PROPOSE, ROUND, VERIFY, Key
from specmesh.traces.reader import (
    StoredSpan,
    Trace,
    TraceSummary,
    list_summaries,
    read_trace,
    summarize,
)

COLOURS = {"coordinator": "cyan", "draft": "magenta", "target": "green"}
MIN_BAR_WIDTH, COMFORTABLE_BAR_WIDTH, MAX_BAR_WIDTH = 10, 24, 60
MAX_FACTS_WIDTH = 60


def list_traces(paths: Sequence[Path], console: Console, *, as_json: bool = False) -> None:
    """Print every request found under `paths`, newest first. Raises InvalidRequest."""
    summaries, skipped = list_summaries(paths)
    if as_json:
        console.print_json(json.dumps([_summary_fields(summary) for summary in summaries]))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trace", no_wrap=True, style="bold")
    table.add_column("start (UTC)", no_wrap=True)
    for heading in ("duration", "tokens", "rounds", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("finish", overflow="ellipsis")
    for summary in summaries:
        table.add_row(
            summary.trace_id[:12],
            _clock(summary.start_ns),
            _milliseconds(summary.duration_ms),
            str(summary.num_output_tokens),
            str(summary.num_rounds),
            _percent(summary.acceptance),
            Text(summary.finish, style="" if summary.complete else "dim"),
        )
    console.print(table)
    if skipped:
        console.print(Text(str(skipped), style="yellow"))


def show_trace(
    paths: Sequence[Path], trace_id: str, console: Console, *, as_json: bool = False
) -> None:
    """Print the trace whose id (or request id) begins with `trace_id`. Raises InvalidRequest."""
    trace, skipped = read_trace(paths, trace_id)
    if as_json:
        fields = _summary_fields(summarize(trace))
        fields["spans"] = [span_fields(span) for span in (*trace.spans, *trace.batches)]
        console.print_json(json.dumps(fields))
        return
    print_trace(trace, console)
    if skipped:
        console.print(Text(str(skipped), style="yellow"))


def print_trace(trace: Trace, console: Console) -> None:
    """Print headline, tree with waterfall, and where the time of the rounds went."""
    _print_headline(trace, console)
    plain = console.options.ascii_only
    rows = trace.tree()
    first_ns = trace.start_ns
    facts_heading = "k, accepted, confirmed/kv"
    names = [_guide(rows, index, plain) + _name(span) for index, (_, span) in enumerate(rows)]
    starts = [_milliseconds((span.start_ns - first_ns) / 1e6) for _, span in rows]
    durations = [_milliseconds(span.duration_ms) for _, span in rows]
    facts = [_facts(span) for _, span in rows]
    left = console.width - _width("span", names) - _width("duration", durations) - 4
    left -= min(MAX_FACTS_WIDTH, _width(facts_heading, [fact.plain for fact in facts]))
    start_width = _width("start", starts) + 1
    show_start = left - start_width >= COMFORTABLE_BAR_WIDTH
    if show_start:
        left -= start_width
    bar_width = max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, left))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("span", no_wrap=True)
    if show_start:
        table.add_column("start", justify="right", no_wrap=True)
    table.add_column("duration", justify="right", no_wrap=True)
    table.add_column("timeline", no_wrap=True, width=bar_width)
    table.add_column(facts_heading, no_wrap=True, overflow="ellipsis")
    whole_ns = max(1, trace.end_ns - first_ns)
    for index, (depth, span) in enumerate(rows):
        cells = [Text(names[index], style="bold" if depth == 0 else "")]
        if show_start:
            cells.append(Text(starts[index]))
        cells.append(Text(durations[index]))
        colour = COLOURS.get(span.service, "white")
        cells.append(_bar(span, first_ns, whole_ns, bar_width, plain, colour))
        table.add_row(*cells, facts[index])
    console.print(table)
    _print_batches(trace, console)
    _print_time_split(trace, console)


def span_fields(span: StoredSpan) -> dict[str, Any]:
    """One span as plain data for JSON. Non-finite numbers become strings."""
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "service": span.service,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "failed": span.failed,
        "attributes": {key: _plain(value) for key, value in span.attributes.items()},
        "links": [list(link) for link in span.links],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    return value


def _summary_fields(summary: TraceSummary) -> dict[str, Any]:
    return {
        "trace_id": summary.trace_id,
        "request_id": summary.request_id,
        "start": datetime.fromtimestamp(summary.start_ns / 1e9, UTC).isoformat(),
        "duration_ms": summary.duration_ms,
        "output_tokens": summary.num_output_tokens,
        "rounds": summary.num_rounds,
        "draft_tokens": summary.num_draft_tokens,
        "accepted_tokens": summary.num_accepted,
        "acceptance": summary.acceptance,
        "finish": summary.finish,
        "complete": summary.complete,
    }


def _print_headline(trace: Trace, console: Console) -> None:
    summary = summarize(trace)
    seconds = summary.duration_ms / 1e3
    speed = f"{summary.num_output_tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    model = trace.root.text(Key.REQUEST_MODEL) if trace.root is not None else ""
    parts = [
        model,
        _milliseconds(summary.duration_ms),
        f"{summary.num_output_tokens} tokens in {summary.num_rounds} rounds",
        speed,
        f"acceptance {_percent(summary.acceptance)}",
        summary.finish,
    ]
    console.print(Text(f"trace {trace.trace_id}", style="bold"))
    console.print(Text("  ".join(part for part in parts if part), style="dim"))
    if not summary.complete:
        note = "no specmesh.generate span: the request still runs, or its file is missing"
        console.print(Text(note, style="yellow"))


def _guide(rows: list[tuple[int, StoredSpan]], index: int, plain: bool) -> str:
    """Tree lines before a name: whether each level has another sibling below decides its glyph."""
    depth = rows[index][0]
    glyphs = ("|  ", "   ", "|- ", "`- ") if plain else ("│  ", "   ", "├─ ", "└─ ")
    more = [False] * (depth + 1)
    for later, _ in rows[index + 1 : index + 1 + 4096]:
        if later <= depth:
            more[later] = True
            depth = later - 1
        if depth < 1:
            break
    depth = rows[index][0]
    lines = [glyphs[0] if more[level] else glyphs[1] for level in range(1, depth)]
    if depth:
        lines.append(glyphs[2] if more[depth] else glyphs[3])
    return "".join(lines)


def _name(span: StoredSpan) -> str:
    short = span.name.removeprefix("specmesh.")
    if span.name == ROUND:
        short = f"round {span.count(Key.ROUND)}"
    return f"{short} !" if span.failed else short


def _bar(
    span: StoredSpan, first_ns: int, whole_ns: int, width: int, plain: bool, colour: str
) -> Text:
    begin = (span.start_ns - first_ns) * width // whole_ns
    end = -(-(span.end_ns - first_ns) * width // whole_ns)
    begin = min(begin, width - 1)
    length = max(1, end - begin)
    glyph = "#" if plain else ("━" if span.name in (PROPOSE, VERIFY) else "█")
    return Text(" " * begin + glyph * length, style="red" if span.failed else colour)


def _facts(span: StoredSpan) -> Text:
    if span.failed:
        return Text(span.text(Key.ERROR_TYPE) or "failed", style="red")
    if span.name in (ROUND, PREFILL):
        return _round_facts(span)
    if span.name in (PROPOSE, VERIFY):
        return _command_facts(span)
    if span.name == GENERATE:
        tokens = f"{span.count(Key.INPUT_TOKENS)}+{span.count(Key.OUTPUT_TOKENS)} tokens"
        return Text("  ".join(part for part in (tokens, span.text(Key.RULE)) if part))
    return Text("")


def _round_facts(span: StoredSpan) -> Text:
    facts = Text()
    num_drafted, num_accepted = span.count(Key.NUM_DRAFT_TOKENS), span.count(Key.NUM_ACCEPTED)
    facts.append(f"k={num_drafted} ")
    if num_drafted:
        colour = "green" if num_accepted == num_drafted else "yellow" if num_accepted else "red"
        facts.append(f"accepted {num_accepted} ", style=colour)
    if span.attributes.get(Key.AHEAD) is True:
        facts.append("ahead ", style="cyan")
    facts.append(f"+{span.text(Key.CLOSING) or '?'}")
    num_emitted = span.count(Key.NUM_EMITTED)
    facts.append(f" = {num_emitted}" if num_emitted else "", style="bold")
    if fallback := span.text(Key.FALLBACK):
        facts.append(f" ({fallback})", style="yellow")
    if Key.REDRAW_MISMATCH in span.attributes:
        facts.append(" re-draw mismatch", style="bold red")
    if span.attributes.get(Key.AUDIT_MISMATCH) is True:
        facts.append(" audit mismatch", style="bold red")
    return facts


def _command_facts(span: StoredSpan) -> Text:
    facts = Text(style="dim")
    before, after = span.items(Key.BEFORE), span.items(Key.AFTER)
    if len(before) >= 2 and len(after) >= 2:
        facts.append(f"{before[0]}/{before[1]} -> {after[0]}/{after[1]}")
    if batch := span.count(Key.BATCH_SIZE):
        facts.append(f"  batch {batch}")
    if cached := span.count(Key.CACHED_TOKENS):
        facts.append(f"  cached {cached}")
    return facts


def _print_batches(trace: Trace, console: Console) -> None:
    by_name: dict[str, list[StoredSpan]] = {}
    for batch in trace.batches:
        by_name.setdefault(batch.name, []).append(batch)
    for name, batches in sorted(by_name.items()):
        sizes = [batch.count(Key.BATCH_SIZE) for batch in batches]
        line = (
            f"{len(batches)} {name} passes linked, "
            f"{_milliseconds(sum(batch.duration_ms for batch in batches))} in all, "
            f"mean batch {sum(sizes) / len(sizes):.1f}"
        )
        console.print(Text(line, style="dim"))


def _print_time_split(trace: Trace, console: Console) -> None:
    rounds = [span for span in trace.steps() if span.name == ROUND]
    whole_us = sum((span.end_ns - span.start_ns) / 1e3 for span in rounds)
    if not whole_us:
        return
    parts = (
        ("draft", Key.DRAFT_US),
        ("verify", Key.VERIFY_US),
        ("wire", Key.WIRE_US),
        ("manage", Key.MANAGE_US),
    )
    shares = [
        f"{name} {100 * sum(span.number(key) or 0 for span in rounds) / whole_us:.0f} %"
        for name, key in parts
    ]
    queued_us = sum(span.number(Key.QUEUE_US) or 0 for span in rounds)
    line = f"{len(rounds)} rounds: {', '.join(shares)}; of that queued {queued_us / 1e3:.1f} ms"
    console.print(Text(line, style="dim"))


def _width(heading: str, texts: Sequence[str]) -> int:
    return max(len(heading), *(len(text) for text in texts))


def _clock(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%m-%d %H:%M:%S")


def _milliseconds(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 10_000 else f"{value:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
