"""`specmesh bench`: starts the stack, measures it beside transformers, prints one report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from specmesh.cli.output import progress, stdout, table
from specmesh.cli.up import default_cache_dir, resolve_models, running_stack

if TYPE_CHECKING:
    from specmesh.bench.measure import Series
    from specmesh.bench.suite import Results

_NUMBERS = frozenset({"median", "p20", "p80", "n", "value", "judged", "accepted", "rate"})


def bench(
    target: Path | None = typer.Option(None, "--target", help="Folder of the target model."),
    draft: Path | None = typer.Option(None, "--draft", help="Folder of the draft model."),
    cache_dir: Path | None = typer.Option(
        None, "--cache-dir", envvar="SPECMESH_CACHE_DIR", help="As of `specmesh up`."
    ),
    repeats: int = typer.Option(5, "--repeats", min=1, help="Measurements of each case."),
    max_tokens: int = typer.Option(96, "--max-tokens", min=8, help="Tokens of each answer."),
    num_draft_tokens: int = typer.Option(
        4, "-k", "--num-draft-tokens", min=1, help="Candidates a round where speculation is timed."
    ),
    concurrency: int = typer.Option(16, "--concurrency", min=2, help="Requests at a time."),
    num_threads: int | None = typer.Option(
        None, "--num-threads", min=1, help="Device threads of each model; default: torch's choice."
    ),
    as_json: bool = typer.Option(False, "--json", help="JSON lines on standard output, no tables."),
    output: Path | None = typer.Option(None, "--output", help="Also append JSON lines to a file."),
) -> None:
    """Measure the whole stack beside transformers `generate`, in one run on this machine."""
    from specmesh.bench.reference_model import ReferenceModel
    from specmesh.bench.report import json_lines
    from specmesh.bench.scrape import warm_up_seconds
    from specmesh.bench.suite import Plan, Suite
    from specmesh.launcher import Interrupted, Ports, free_port, interruptible

    cache_dir = cache_dir or default_cache_dir()
    plan = Plan(repeats, max_tokens, num_draft_tokens, concurrency)
    try:
        with interruptible(), TemporaryDirectory(prefix="specmesh-bench-") as folder:
            trace_dir = Path(folder)
            models = resolve_models(target, draft, cache_dir)
            metrics = {service: free_port(0, service) for service in ("draft", "target")}
            with (
                running_stack(
                    models,
                    cache_dir=cache_dir,
                    ports=Ports(coordinator=0, draft=0, target=0),
                    trace_dir=trace_dir,
                    extra={
                        service: service_flags(port, num_threads)
                        for service, port in metrics.items()
                    },
                ) as (stack, start_s),
                progress("measuring") as status,
            ):
                address = stack.address("coordinator")
                report = status.update if status is not None else _ignore
                reference = ReferenceModel(models[0], num_threads)
                suite = Suite(address, trace_dir, reference, plan, report)
                warm_up_s = {name: warm_up_seconds(port) for name, port in metrics.items()}
                results = suite.run(start_s, warm_up_s)
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.signum) from None
    lines = json_lines(results, shlex.join(["specmesh", *sys.argv[1:]]))
    if as_json:
        typer.echo("\n".join(lines))
    else:
        print_tables(results, stdout())
    if output is not None:
        with output.open("a") as file:
            file.write("\n".join(lines) + "\n")


def service_flags(metrics_port: int, num_threads: int | None) -> list[str]:
    """Flags of a service under measurement."""
    flags = ["--telemetry.metrics-port", str(metrics_port)]
    if num_threads is not None:
        flags += ["--engine.num-threads", str(num_threads)]
    return flags


def _ignore(_text: str) -> None:
    """Progress of single measurements is for terminals only."""


def print_tables(results: Results, console: Console) -> None:
    """Measurements, acceptance per position and comparisons."""
    rows = table("Measurements", "what", "median", "p20", "p80", "n", "unit", right=_NUMBERS)
    for measured in results.series:
        rows.add_row(measured.name, *_quantiles(measured), str(len(measured.values)), measured.unit)
    console.print(rows)
    console.print()
    if results.positions:
        title = "Acceptance given that all before were accepted"
        rows = table(title, "position", "judged", "accepted", "rate", right=_NUMBERS)
        for entry in results.positions:
            counts = (str(entry.judged), str(entry.accepted))
            rows.add_row(str(entry.position), *counts, f"{entry.rate:.3f}")
        console.print(rows)
        console.print(
            f"tokens per round: predicted E[N] {results.predicted_tokens:.3f}, "
            f"measured {results.measured_tokens:.3f}"
        )
        for reason, count in sorted(results.dropped_rounds.items()):
            console.print(f"rounds without candidates: {count} ({reason})", markup=False)
        console.print()
    rows = table("Comparisons", "what", "value", "bound", "", right=_NUMBERS)
    for ratio in results.ratios:
        record = ratio.record()
        value = f"{ratio.value:.2f} {'' if record['unit'] == '1' else record['unit']}".strip()
        rows.add_row(ratio.name, value, record["bound"], "met" if ratio.met else "MISSED")
    console.print(rows)


def _quantiles(measured: Series) -> tuple[str, str, str]:
    values = (measured.median, measured.quantile(0.2), measured.quantile(0.8))
    low, middle, high = values[1], values[0], values[2]
    return f"{middle:.2f}", f"{low:.2f}", f"{high:.2f}"
