"""Time candidate launches of the sampling and layer kernels: `python -m kernels.configs.sweep`.

Offline, on one GPU. Prints every candidate's median on the named shape that decides it; a person
puts the winners into the tables of this package. Candidates are compiled by worker processes first,
through Triton's cache on disk, so that the timing process finds them ready. Workloads and timing
are those of `kernels/bench.py`; a candidate whose outcome is wrong is reported, not timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels import bench, bench_draft_rows, bench_layers, bench_sampling
from kernels.configs import layers, sampling
from kernels.configs.layers import LinearTiles, RopeLaunch
from kernels.configs.sampling import Launch, Search

ARCHITECTURE = "sm_90"
WORKERS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: the case that times it, a label, and how to make it the launch in use."""

    case: str
    label: str
    choose: Callable[[], None]


def _judge(launch: Launch) -> Callable[[], None]:
    return lambda: sampling._JUDGE.__setitem__(ARCHITECTURE, launch)


def _close(launch: Launch) -> Callable[[], None]:
    return lambda: sampling._CLOSE.__setitem__(ARCHITECTURE, launch)


def _search(search: Search) -> Callable[[], None]:
    return lambda: sampling._SEARCH.__setitem__(ARCHITECTURE, search)


def _linear(kind: str, tiles: LinearTiles) -> Callable[[], None]:
    return lambda: layers._LINEAR.__setitem__((ARCHITECTURE, kind), [(1 << 62, tiles)])


def _rope(launch: RopeLaunch) -> Callable[[], None]:
    return lambda: layers._ROPE.__setitem__(ARCHITECTURE, launch)


def _draft(launch: Launch) -> Callable[[], None]:
    return lambda: sampling._DRAFT.__setitem__(ARCHITECTURE, launch)


def _norm(values_per_thread: int) -> Callable[[], None]:
    return lambda: layers._NORM_VALUES.__setitem__(ARCHITECTURE, values_per_thread)


def trials() -> list[Trial]:
    """Every candidate, in the order they are timed; each starts from the checked-in tables."""
    found: list[Trial] = []
    found += [Trial("S64", f"judge {warps} warps", _judge(Launch(warps))) for warps in (1, 2, 4)]
    for warps, per_program, registers in (
        (1, 4, 64), (1, 4, 80), (1, 8, 80), (1, 8, 96), (1, 16, 96), (2, 4, 96), (4, 2, 96),
    ):  # fmt: skip
        launch = Launch(
            warps, per_program=per_program, max_registers=registers, stages=4, early=True
        )
        found.append(Trial("S64", f"close {launch}", _close(launch)))
        found.append(Trial("S64-sparse", f"close {launch}", _close(launch)))
    for warps in (1, 2, 4):
        found.append(Trial("accept1-sparse", f"judge {warps} warps", _judge(Launch(warps))))
    for programs in (0, 128, 256, 512):
        launch = Launch(
            1, per_program=4, min_programs=programs, max_registers=64, stages=4, early=True
        )
        found.append(Trial("accept1-sparse", f"close {launch}", _close(launch)))
    for warps in (4, 8, 16):
        for case in ("draft1", "draft1-128k", "draft64-128k", "redraw1", "round1"):
            found.append(Trial(case, f"draft {warps} warps", _draft(Launch(warps))))
    for search in (
        Search(16, 1024, 4),
        Search(32, 1024, 4),
        Search(16, 512, 4),
        Search(16, 512, 2),
    ):
        found.append(Trial("S64-f", f"{search}", _search(search)))
        found.append(Trial("nucleus320", f"{search}", _search(search)))
    few = (
        LinearTiles(16, 64, 4, 4, block_k=128, turned=True, descriptors=True),
        LinearTiles(64, 64, 4, 4, block_k=128, turned=True, descriptors=True),
        LinearTiles(16, 128, 4, 6, turned=True, descriptors=True), LinearTiles(64, 64, 4, 4),
    )  # fmt: skip
    for case in ("G1", "G64"):
        found += [Trial(case, f"{tiles}", _linear("swiglu", tiles)) for tiles in few]
    many = (
        LinearTiles(128, 64, 4, 3, more_m=32, turned=True, descriptors=True),
        LinearTiles(128, 64, 4, 6, more_m=32, turned=True, descriptors=True),
        LinearTiles(128, 128, 8, 4, more_m=32, turned=True, descriptors=True),
        LinearTiles(256, 64, 8, 4, more_m=64, turned=True, descriptors=True),
    )  # fmt: skip
    found += [Trial("G320-inv", f"{tiles}", _linear("swiglu", tiles)) for tiles in many]
    down = [
        LinearTiles(16, 64, 4, stages, block_k=step, turned=True, descriptors=True, split=split)
        for stages, step, split in ((4, 128, True), (8, 64, True), (3, 256, True), (4, 256, False))
    ]
    found += [Trial("down5-inv", f"{tiles}", _linear("narrow", tiles)) for tiles in down]
    found += _fp8_trials()
    found += [Trial("N32k", f"{n} values a thread", _norm(n)) for n in (8, 16, 32)]
    for turn in (RopeLaunch(16, 4), RopeLaunch(8, 2), RopeLaunch(16, 2)):
        found.append(Trial("R32k", f"{turn}", _rope(turn)))
    return found


def _fp8_trials() -> list[Trial]:
    """Launches over weights of one byte."""
    found: list[Trial] = []
    for case, kind, rows in (
        ("G1-fp8", "fp8 swiglu", 16), ("down5-fp8", "fp8 narrow", 16),
        ("G64-fp8", "fp8 swiglu", 64), ("down64-fp8", "fp8 narrow", 64),
    ):  # fmt: skip
        for step, stages in ((128, 3), (128, 4), (128, 6), (256, 3), (256, 4), (64, 12)):
            tiles = LinearTiles(
                rows, 64, 4, stages, block_k=step, turned=True, descriptors=True, split=True
            )
            found.append(Trial(case, f"{tiles}", _linear(kind, tiles)))
    many = (
        LinearTiles(128, 64, 4, 3, more_m=32, turned=True, descriptors=True),
        LinearTiles(128, 64, 4, 4, more_m=32, turned=True, descriptors=True),
        LinearTiles(128, 128, 8, 4, more_m=32, turned=True, descriptors=True),
        LinearTiles(256, 64, 8, 4, more_m=64, turned=True, descriptors=True),
    )
    return found + [Trial("G320-fp8", f"{tiles}", _linear("fp8 swiglu", tiles)) for tiles in many]


def _cases() -> dict[str, bench.Case]:
    cases = [*bench_sampling.CASES, *bench_draft_rows.CASES, *bench_layers.CASES]
    return {case.name: case for case in cases}


def _tables() -> list[dict[Any, Any]]:
    return [
        sampling._JUDGE, sampling._CLOSE, sampling._SEARCH, layers._LINEAR,
        layers._ROPE, layers._NORM_VALUES,
    ]  # fmt: skip


def _compile(index: int) -> None:
    """In a worker: run one candidate once, so that its kernels are in Triton's cache."""
    trial = trials()[index]
    trial.choose()
    _cases()[trial.case].make(0).run()
    torch.cuda.synchronize()


def _timed(trial: Trial, workloads: Sequence[bench.Workload]) -> dict[str, object]:
    saved = [dict(table) for table in _tables()]
    trial.choose()
    result: dict[str, object] = {"case": trial.case, "candidate": trial.label}
    try:
        for workload in workloads:
            bench.check(workload)
        timing = bench.time_calls([w.run for w in workloads], graph=True, num_samples=9)
        result["median_ms"] = round(timing.median_ms, 5)
    except Exception as error:  # noqa: BLE001 - the other candidates are still worth timing
        result["error"] = f"{type(error).__name__}: {error}"[:160]
    for table, before in zip(_tables(), saved, strict=True):
        table.clear()
        table.update(before)
    return result


def main() -> int:
    """Compile, check and time every candidate. Exit status 1 when one was wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels.configs.sweep", description=__doc__)
    parser.add_argument("--json", type=Path, help="append one JSON object a candidate")
    parser.add_argument("--only", default="", help="cases, separated by commas")
    chosen = parser.parse_args()
    only = [name for name in chosen.only.split(",") if name]
    numbered = [(i, t) for i, t in enumerate(trials()) if not only or t.case in only]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        for pending in [pool.apply_async(_compile, (index,)) for index, _ in numbered]:
            pending.wait()  # what failed to compile fails again, and is reported, below
    failed, case_name, workloads = 0, "", list[bench.Workload]()
    for _, trial in numbered:
        if trial.case != case_name:
            case_name, workloads = trial.case, []
            torch.cuda.empty_cache()
            case = _cases()[case_name]
            workloads = [case.make(seed) for seed in range(case.num_sets)]
        result = _timed(trial, workloads)
        failed += "error" in result
        shown = result.get("median_ms", result.get("error"))
        sys.stdout.write(f"{trial.case:<11} {shown!s:>9}  {trial.label}\n")
        sys.stdout.flush()
        if chosen.json is not None:
            with chosen.json.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
