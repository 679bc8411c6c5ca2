"""Benchmarks of the kernels on one GPU: `python -m kernels.bench [--only NAME,...] [--json FILE]`.

Owns the harness: what a case is, how it is checked and timed, the table and the JSON lines. Must
not know any kernel: cases live in the `CASES` list of the modules named `kernels.bench_*`.

How a number comes about. Every workload is checked first, on poisoned outputs and fresh random
inputs; a case that fails its check is not timed. Calls rotate over `num_sets` sets of inputs, so
that none finds its own in the L2 cache. Cases of microseconds are timed as replays of a CUDA graph
that holds many calls, the others with events around each call. Anchors (what a user would run
without these kernels) are timed the same way in the same run. Reported are the median, the 20th and
the 80th percentile, and the floor: the larger of bytes over copy bandwidth and operations over
matrix rate, for the ceilings below.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton
from torch import Tensor

import kernels

# Measured on an H200: a large device copy (bytes read + written), a bf16 product of 8192**3.
COPY_BYTES_PER_S = 4.3e12
BF16_FLOP_PER_S = 790e12

GRAPH_CALLS = 24  # calls in one captured graph
WARM_UP_CALLS = 3
# A spin in front of each timed call lets the host queue it whole: about 0.6 ms at 1.8 GHz, more
# than Python takes to launch any of the cases. Without it host time counts as device time.
HOST_LEAD_CYCLES = 1_000_000
TOP_PERCENT, BOTTOM_PERCENT = 0.8, 0.2


@dataclass(frozen=True, slots=True)
class Workload:
    """One set of inputs, ready to run on the current CUDA device.

    run: the operation; anchors: alternatives on the same inputs, by name. outputs: tensors that
    `run` must fill whole (poisoned before the check). check: called after `run`, raises
    AssertionError when the outputs are wrong.
    """

    run: Callable[[], object]
    anchors: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    outputs: Sequence[Tensor] = ()
    check: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A named shape. make(seed) builds one set of inputs; different seeds, different inputs.

    floor_ms: see `floor_ms`. target_ms: the bar, None where there is none. graph: time replays of a
    CUDA graph (for operations of microseconds, where launches would be measured instead).
    """

    name: str
    make: Callable[[int], Workload]
    floor_ms: float
    target_ms: float | None = None
    num_sets: int = 2
    graph: bool = False
    num_samples: int = 25


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds a call: median, 20th and 80th percentile over the samples."""

    median_ms: float
    p20_ms: float
    p80_ms: float


def floor_ms(num_bytes: float = 0.0, flop: float = 0.0) -> float:
    """The least time the work can take on the ceilings above, in milliseconds."""
    return 1e3 * max(num_bytes / COPY_BYTES_PER_S, flop / BF16_FLOP_PER_S)


def poison(outputs: Sequence[Tensor]) -> None:
    """Fill outputs with values no right answer holds: NaN, or the dtype's smallest integer."""
    for output in outputs:
        if output.dtype.is_floating_point:
            output.fill_(float("nan"))
        elif output.dtype is not torch.bool:
            output.fill_(torch.iinfo(output.dtype).min)


def check(workload: Workload) -> None:
    """Run on poisoned outputs and verify the result. Raises AssertionError when it is wrong."""
    poison(workload.outputs)
    workload.run()
    torch.cuda.synchronize()
    if workload.check is not None:
        workload.check()


def time_calls(
    calls: Sequence[Callable[[], object]], *, graph: bool, num_samples: int = 25
) -> Timing:
    """Time `calls`, taken in turn. Each must work on inputs of its own (see the module text)."""
    for index in range(max(WARM_UP_CALLS, len(calls))):
        calls[index % len(calls)]()
    torch.cuda.synchronize()
    samples = list(
        _graph_samples(calls, num_samples) if graph else _event_samples(calls, num_samples)
    )
    samples.sort()
    last = len(samples) - 1

    def at(share: float) -> float:
        return samples[round(share * last)]

    return Timing(at(0.5), at(BOTTOM_PERCENT), at(TOP_PERCENT))


def _graph_samples(calls: Sequence[Callable[[], object]], num_samples: int) -> Iterator[float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    num_calls = GRAPH_CALLS - GRAPH_CALLS % len(calls) or len(calls)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for index in range(num_calls):
            calls[index % len(calls)]()
    captured.replay()
    for _ in range(num_samples):
        yield _elapsed_ms(captured.replay) / num_calls


def _event_samples(calls: Sequence[Callable[[], object]], num_samples: int) -> Iterator[float]:
    for index in range(num_samples):
        torch.cuda._sleep(HOST_LEAD_CYCLES)
        yield _elapsed_ms(calls[index % len(calls)])


def _elapsed_ms(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(case: Case, without: Sequence[str] = ()) -> dict[str, object]:
    """Check one case, then time it and its anchors but those named in `without`: a JSON object."""
    workloads = [case.make(seed) for seed in range(case.num_sets)]
    for workload in workloads:
        check(workload)
    timing = time_calls([w.run for w in workloads], graph=case.graph, num_samples=case.num_samples)
    anchors: dict[str, float | None] = {}
    failures: dict[str, str] = {}
    for name in workloads[0].anchors:
        if name in without:
            continue
        try:
            calls = [w.anchors[name] for w in workloads]
            anchor = time_calls(calls, graph=case.graph, num_samples=case.num_samples)
            anchors[name] = round(anchor.median_ms, 5)
        except (RuntimeError, NotImplementedError) as error:  # an anchor may refuse a shape
            anchors[name], failures[name] = None, str(error).splitlines()[0][:200]
    report: dict[str, object] = {"name": case.name}
    report |= {key: round(value, 5) for key, value in asdict(timing).items()}
    report |= {"floor_ms": round(case.floor_ms, 5), "target_ms": case.target_ms}
    report |= {"anchors": anchors, "graph": case.graph, "num_sets": case.num_sets}
    if failures:
        report["anchor_failures"] = failures
    return report


def all_cases() -> list[Case]:
    """Every case of every `kernels.bench_*` module, in module order. Raises on a repeated name."""
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules(kernels.__path__, "kernels."):
        if module.name.startswith("kernels.bench_"):
            for case in importlib.import_module(module.name).CASES:
                if case.name in found:
                    raise ValueError(f"two cases are called {case.name}")
                found[case.name] = case
    return list(found.values())


def versions() -> dict[str, str]:
    """What a number depends on: card, driver, libraries, commit."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0].strip() if driver else "unknown",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
    }


def table_line(report: Mapping[str, object]) -> str:
    """One line of the table: times in milliseconds, fraction of floor, verdict, anchors."""
    if "error" in report:
        return f"{report['name']:<12} FAILED: {report['error']}"
    median, floor, target = report["median_ms"], report["floor_ms"], report["target_ms"]
    assert isinstance(median, float)
    assert isinstance(floor, float)
    verdict = "" if target is None else ("ok" if median <= float(str(target)) else "MISS")
    anchors = report["anchors"]
    assert isinstance(anchors, Mapping)
    shown = "  ".join(
        f"{name} {'refused' if value is None else format(value, '.4f')}"
        for name, value in anchors.items()
    )
    return (
        f"{report['name']:<12} {median:>9.4f} {report['p20_ms']:>9.4f} {report['p80_ms']:>9.4f}"
        f" {floor:>8.4f} {floor / median:>6.0%} {target or '-':>7} {verdict:<4} {shown}"
    )


HEADER = (
    f"{'case':<12} {'median':>9} {'p20':>9} {'p80':>9} {'floor':>8} {'share':>6} {'target':>7}"
    "      anchors (ms)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases. Exit status: 0, or 1 when a case failed its check or raised."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas; all by default")
    parser.add_argument("--json", type=Path, help="append one JSON object a case to this file")
    parser.add_argument("--without", default="", help="anchors to leave out, by name")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    chosen = parser.parse_args(arguments)
    cases = all_cases()
    if chosen.list:
        sys.stdout.write("\n".join(case.name for case in cases) + "\n")
        return 0
    names = [name for name in chosen.only.split(",") if name]
    unknown = sorted(set(names) - {case.name for case in cases})
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}")
    if not torch.cuda.is_available():
        parser.error("these benchmarks need a CUDA device")
    cases = [case for case in cases if not names or case.name in names]
    return run_cases(cases, chosen.json, chosen.without.split(","))


def run_cases(cases: Sequence[Case], json_path: Path | None, without: Sequence[str] = ()) -> int:
    """Measure each case, printing the table as it grows and appending JSON lines to json_path."""
    context = {"versions": versions(), "command": shlex.join(["python", "-m", *_own_command()])}
    sys.stdout.write(HEADER + "\n")
    failed = 0
    for case in cases:
        report: dict[str, object]
        try:
            report = measure(case, without)
        except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
            report = {"name": case.name, "error": f"{type(error).__name__}: {error}"[:400]}
            failed += 1
        sys.stdout.write(table_line(report) + "\n")
        sys.stdout.flush()
        if json_path is not None:
            with json_path.open("a") as lines:
                lines.write(json.dumps(report | context) + "\n")
        torch.cuda.empty_cache()
    return 1 if failed else 0


def _own_command() -> list[str]:
    return ["kernels.bench", *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
