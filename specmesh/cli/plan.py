"""`specmesh plan`: predicts tokens per round and speed-up from acceptance rates and times.

The formulas are `specmesh/planning.py`'s; this file only reads flags and prints a table.
"""

from __future__ import annotations

import math

import typer

from specmesh.cli.output import stdout, table, write_json
from specmesh.errors import InvalidRequest
from specmesh.planning import RoundTimes, expected_tokens, speculative_speedup


def plan(
    rates: str = typer.Option(
        ...,
        "--rates",
        help="Acceptance rate of each candidate given the ones before it, for instance "
        ".46,.50,.58,.59; a single rate serves every candidate.",
    ),
    max_k: int = typer.Option(8, "--max-k", min=1, max=64, help="Candidates a round at most."),
    decode: float = typer.Option(..., "--decode", help="One plain step of the target, any unit."),
    draft: float = typer.Option(..., "--draft", help="One step of the draft, same unit."),
    verify: float = typer.Option(
        ..., "--verify", help="The target's pass over k+1 tokens, same unit."
    ),
    verify_per_token: float = typer.Option(
        0.0, "--verify-per-token", help="What each candidate adds to --verify."
    ),
    overhead: float = typer.Option(0.0, "--overhead", help="Network, decision, management."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Predict E[N] and the speed-up over plain decoding for k = 0, 1, 2, ..."""
    _check_time("decode", decode, above_0=True)
    _check_time("draft", draft)
    _check_time("verify", verify, above_0=True)
    _check_time("verify_per_token", verify_per_token)
    _check_time("overhead", overhead)
    per_candidate = _rates(rates)
    limit = max_k if len(per_candidate) == 1 else min(max_k, len(per_candidate))
    if len(per_candidate) == 1:
        per_candidate = per_candidate * max_k
    rows = []
    for k in range(limit + 1):
        tokens = expected_tokens(per_candidate[:k])
        times = RoundTimes(decode, draft, verify + k * verify_per_token, overhead)
        if k == 0:  # plain decoding runs no verification pass
            times = RoundTimes(decode, draft, decode, 0)
        speedup = speculative_speedup(tokens, k, times)
        rows.append({"k": k, "tokens_per_round": tokens, "speedup": speedup})
    best = max(rows, key=lambda row: row["speedup"])
    if as_json:
        write_json({"rows": rows, "best_k": best["k"]})
        return
    shown = table("", "k", "E[N]", "speed-up", right=frozenset({"k", "E[N]", "speed-up"}))
    for row in rows:
        mark = " *" if row is best else "  "
        shown.add_row(
            str(row["k"]), f"{row['tokens_per_round']:.3f}", f"{row['speedup']:.3f}{mark}"
        )
    stdout().print(shown)
    advice = "plain decoding is fastest" if best["k"] == 0 else f"k = {best['k']} is fastest"
    stdout().print(f"{advice} at these rates and times")


def _check_time(field: str, time: float, *, above_0: bool = False) -> None:
    if not math.isfinite(time) or time < 0 or (above_0 and time == 0):
        wanted = "above 0" if above_0 else "of 0 or more"
        raise InvalidRequest(f"{time:g} is no finite number {wanted}", field=field)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
        expected_tokens(rates)
    except ValueError as error:
        raise InvalidRequest(f"{text!r}: {error}", field="rates") from error
    return rates
