"""A measurement as text (Markdown tables) and as a picture (SVG). Must not know models."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specmesh.acceptance.measure import Measurement, Table

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 200, 40, 56
# Told apart in print and by the colour-blind (Okabe and Ito's palette), and by their dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


def markdown(measurement: Measurement) -> str:
    """The tables of a measurement, with a line on what each column means."""
    parts = [_summary(measurement.tables), _rounds(measurement.tables)]
    parts += [_depths(measurement.tables), _encodings(measurement.tables[0])]
    best = max(range(len(measurement.speedups)), key=measurement.speedups.__getitem__)
    gains = ", ".join(f"k = {k}: {gain:.2f}" for k, gain in enumerate(measurement.speedups) if k)
    parts.append(
        "Expected speed-up over plain decoding on a device bound by memory (a draft step reads "
        f"{measurement.cost_ratio:.3f} of the weights of a target step, verification takes as long "
        f"as a plain step, no network): {gains}. Best: k = {best}."
    )
    return "\n\n".join(parts) + "\n"


def _summary(tables: Sequence[Table]) -> str:
    rows = [
        [
            table.text,
            f"{table.temperature:g}",
            f"{table.acceptance:.3f} ± {table.standard_error:.3f}",
            f"{table.agreement:.3f}",
            str(table.num_tokens),
        ]
        for table in tables
    ]
    return (
        "Acceptance Σ min(p, q) ± standard error, and how often both have the same argmax:\n\n"
        + (_grid(["text", "temperature", "acceptance", "greedy agreement", "tokens"], rows))
    )


def _rounds(tables: Sequence[Table]) -> str:
    positions = range(1, len(tables[0].rates) + 1)
    head = ["text", "temperature", "", *(f"{i}" for i in positions)]
    rows = []
    for table in tables:
        name = [table.text, f"{table.temperature:g}"]
        rows.append([*name, "rate", *(f"{rate:.3f}" for rate in table.rates)])
        rows.append([*name, "survival", *(f"{chance:.3f}" for chance in table.survival)])
        rows.append([*name, "E[N]", *(f"{n:.2f}" for n in table.tokens_per_round[1:])])
    return (
        "By position of the candidate in its round (rate: given that those before it were "
        "accepted; survival: all up to it; E[N]: tokens of a round of that many):\n\n"
        + _grid(head, rows)
    )


def _depths(tables: Sequence[Table]) -> str:
    names = list(dict.fromkeys(name for table in tables for name in table.by_depth))
    rows = [
        [table.text, f"{table.temperature:g}",
         *(f"{table.by_depth[n]:.3f}" if n in table.by_depth else "" for n in names)]
        for table in tables
    ]  # fmt: skip
    return "Acceptance by position in the text:\n\n" + _grid(["text", "temperature", *names], rows)


def _encodings(table: Table) -> str:
    exact = table.encodings["float32"].acceptance
    rows = [
        [name, f"{each.acceptance:.4f}", f"{exact - each.acceptance:+.4f}", f"{each.num_bytes:.0f}"]
        for name, each in table.encodings.items()
    ]
    return (
        f"Encodings of the draft's rows ({table.text}, temperature {table.temperature:g}); top-n "
        "and auto rows carry ids and float16 values:\n\n"
        + _grid(["encoding", "acceptance", "cost", "bytes a row"], rows)
    )


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def svg(measurement: Measurement) -> str:
    """Survival by candidate, a line for each text and temperature."""
    tables = measurement.tables
    count = len(tables[0].survival)
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(position: int) -> float:
        return _LEFT + plot_width * position / count

    def y(chance: float) -> float:
        return _TOP + plot_height * (1 - chance)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(measurement.draft)}: '
        "chance that a round's candidates are all accepted</text>",
    ]
    for tick in range(0, 11, 2):
        height = y(tick / 10)
        parts.append(f'<line x1="{_LEFT}" x2="{x(count)}" y1="{height}" y2="{height}" '
                     'stroke="#ddd"/>')  # fmt: skip
        parts.append(
            f'<text x="{_LEFT - 8}" y="{height + 4}" text-anchor="end">{tick / 10:g}</text>'
        )
    parts += [
        f'<text x="{x(i)}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{i}</text>'
        for i in range(count + 1)
    ]
    parts.append(f'<text x="{x(count) / 2 + _LEFT / 2}" y="{_HEIGHT - 12}" text-anchor="middle">'
                 "candidates</text>")  # fmt: skip
    for index, table in enumerate(tables):
        colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
        points = " ".join(
            f"{x(i):.1f},{y(chance):.1f}" for i, chance in enumerate([1.0, *table.survival])
        )
        stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {stroke}/>')
        height = _TOP + 18 * index
        left = _WIDTH - _RIGHT + 12
        parts.append(f'<polyline points="{left},{height} {left + 28},{height}" {stroke}/>')
        parts.append(f'<text x="{left + 34}" y="{height + 4}">{escape(table.text)}, '
                     f"T = {table.temperature:g}</text>")  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"
