"""Time candidate launches of the sampling and layer kernels: `python -m kernels.configs.sweep`.

Offline, on one GPU; `--only 'qkv*,out*,up*,down*'` chooses cases by glob. Prints every candidate's
median on the named shape that decides it, then what decides products of layers (`sweep_layers`); a
person puts the winners into the tables of this package. Every candidate runs once in a worker
process first, which leaves its kernel in Triton's cache on disk: one that fails there, has not
ended, or has other bits than its product's general kernel is reported, and neither run nor timed by
the timing process. Workloads and timing are those of `kernels/bench.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import bench
from kernels.bench_layers import PRODUCTS, Product, finished
from kernels.configs import sampling, sweep_layers
from kernels.configs.sampling import Launch, Search
from kernels.configs.sweep_layers import LIBRARY, PRESENT
from kernels.configs.trial import ARCHITECTURE, Trial, in_use

WORKERS = max(1, min(14, (os.cpu_count() or 2) - 2))
# Without a candidate that ends, those left are taken to hang; the first waits for imports.
STALL_S = 120.0
_PRODUCTS = {product.name: product for product in PRODUCTS}


def _judge(launch: Launch) -> Callable[[], None]:
    return lambda: sampling._JUDGE.__setitem__(ARCHITECTURE, launch)


def _close(launch: Launch) -> Callable[[], None]:
    return lambda: sampling._CLOSE.__setitem__(ARCHITECTURE, launch)


def _search(search: Search) -> Callable[[], None]:
    return lambda: sampling._SEARCH.__setitem__(ARCHITECTURE, search)


def _draft(launch: Launch) -> Callable[[], None]:
    return lambda: sampling._DRAFT.__setitem__(ARCHITECTURE, launch)


@cache
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
    return found + sweep_layers.trials()


@cache
def _other_cases() -> dict[str, bench.Case]:
    return {case.name: case for case in bench.all_cases()}


def _case(name: str) -> bench.Case:
    product = _PRODUCTS.get(name)
    return _other_cases()[name] if product is None else product.case()


def chosen_trials(only: Sequence[str]) -> list[int]:
    """Numbers of the trials whose case matches one of the globs; all where there is none. Raises
    ValueError for a glob that matches no case."""
    names = {trial.case for trial in trials()}
    for glob in only:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{glob!r} is no case of {', '.join(sorted(names))}")
    return [
        number
        for number, trial in enumerate(trials())
        if not only or any(fnmatchcase(trial.case, glob) for glob in only)
    ]


def outcome(workload: bench.Workload, product: Product) -> list[Tensor]:
    """What the launch in use makes of a product, over memory that was full of NaN."""
    x, weight, _ = product.meta()
    sums = (4, len(x), len(weight))
    soiled = [
        torch.full(sums, torch.nan, device="cuda", dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ] + [torch.full(sums[1:], torch.nan, device="cuda", dtype=x.dtype) for _ in range(2)]
    torch.cuda.synchronize()
    del soiled
    made = workload.run()
    assert isinstance(made, tuple)
    torch.cuda.synchronize()
    return finished(made)


def require_same(own: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise AssertionError where bits differ, NaN from NaN included."""
    for one, other in zip(own, expected, strict=True):
        differing = int((one.view(torch.int16) != other.view(torch.int16)).sum())
        assert differing == 0, f"{differing} of {one.numel()} have other bits"


def _try(number: int) -> tuple[int, str]:
    """In a worker: run a candidate once. (number, what is wrong or nothing)."""
    trial = trials()[number]
    product = _PRODUCTS.get(trial.case)
    try:
        workload = _case(trial.case).make(0)
        if product is None:
            with in_use(trial):
                workload.run()
                torch.cuda.synchronize()
        else:
            with in_use(sweep_layers.general(product)):
                expected = outcome(workload, product)
            with in_use(trial):
                require_same(outcome(workload, product), expected)
    except Exception as error:  # noqa: BLE001 - the timing process reports it
        return number, f"{type(error).__name__}: {error}"[:160]
    return number, ""


def _tried(numbers: Sequence[int], a_process: int | None) -> dict[int, str]:
    """What is wrong with those candidates that ended, nothing for most; a_process: how many a
    worker runs, None for all that come to it."""
    found: dict[int, str] = {}
    with multiprocessing.get_context("spawn").Pool(WORKERS, maxtasksperchild=a_process) as pool:
        ended = pool.imap_unordered(_try, numbers)
        try:
            for _ in numbers:
                number, wrong = ended.next(timeout=STALL_S)
                found[number] = wrong
        except multiprocessing.TimeoutError:
            return found  # leaving the pool ends the workers of the others
    return found


def wrongs(numbers: Sequence[int]) -> dict[int, str]:
    """What is wrong with each candidate, nothing for most. A fault of the device stays with its
    process, so that those that failed among others run again, each in a process of its own."""
    ended = _tried(numbers, None)
    failed = [number for number, wrong in ended.items() if wrong]
    well = {number: "" for number, wrong in ended.items() if not wrong}
    hanging = dict.fromkeys(numbers, f"had not ended when none did for {STALL_S:.0f} s")
    return hanging | well | (_tried(failed, 1) if failed else {})


def _timed(trial: Trial, calls: Sequence[Callable[[], object]]) -> dict[str, object]:
    timing = bench.time_calls(calls, graph=True, num_samples=9)
    median = round(timing.median_ms, 5)
    return {"case": trial.case, "candidate": trial.label, "median_ms": median}


def _time_case(name: str, own: Sequence[Trial]) -> Iterator[dict[str, object]]:
    """Times of a case's candidates, after checks on the inputs that are timed. A product's launch
    of the table is timed first and last, and the library's product beside it."""
    case, product = _case(name), _PRODUCTS.get(name)
    workloads = [case.make(seed) for seed in range(case.num_sets)]
    calls = [workload.run for workload in workloads]
    expected: list[list[Tensor]] = []
    if product is not None:
        with in_use(sweep_layers.general(product)):
            for workload in workloads:
                bench.check(workload)
                expected.append(outcome(workload, product))
        library = [workload.anchors["product alone"] for workload in workloads]
        yield _timed(Trial(name, LIBRARY, lambda: None), library)
        own = [*own, *(trial for trial in own if trial.label == PRESENT)]
    for trial in own:
        try:
            with in_use(trial):
                for index, workload in enumerate(workloads):
                    if product is None:
                        bench.check(workload)
                    else:
                        require_same(outcome(workload, product), expected[index])
                yield _timed(trial, calls)
        except Exception as error:  # noqa: BLE001 - the other candidates are still worth timing
            yield _failed(trial, f"{type(error).__name__}: {error}"[:160])


def _failed(trial: Trial, wrong: str) -> dict[str, object]:
    return {"case": trial.case, "candidate": trial.label, "error": wrong}


def _results(numbers: Sequence[int]) -> Iterator[dict[str, object]]:
    wrong = wrongs(numbers)
    by_case: dict[str, list[Trial]] = {}
    for number in numbers:
        trial = trials()[number]
        if wrong[number]:
            yield _failed(trial, wrong[number])
        else:
            by_case.setdefault(trial.case, []).append(trial)
    for name, own in by_case.items():
        try:
            yield from _time_case(name, own)
        except Exception as error:  # noqa: BLE001 - the other cases are still worth timing
            yield _failed(
                Trial(name, "all", lambda: None), f"{type(error).__name__}: {error}"[:160]
            )
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, check and time every candidate. Exit status 1 when one was wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels.configs.sweep", description=__doc__)
    parser.add_argument("--json", type=Path, help="append one JSON object a candidate")
    parser.add_argument("--only", default="", help="globs of cases, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the candidates and stop")
    chosen = parser.parse_args(arguments)
    try:
        numbers = chosen_trials([glob for glob in chosen.only.split(",") if glob])
    except ValueError as error:
        parser.error(str(error))
    if chosen.list:
        lines = [f"{trials()[number].case:<11} {trials()[number].label}" for number in numbers]
        sys.stdout.write("\n".join([*lines, f"{len(numbers)} candidates"]) + "\n")
        return 0
    if not torch.cuda.is_available():
        parser.error("candidates are timed on a CUDA device")
    results = []
    for result in _results(numbers):
        results.append(result)
        time = result.get("median_ms", result.get("error"))
        sys.stdout.write(f"{result['case']:<11} {time!s:>9}  {result['candidate']}\n")
        sys.stdout.flush()
        if chosen.json is not None:
            with chosen.json.open("a") as lines_of:
                lines_of.write(json.dumps(result) + "\n")
    sys.stdout.write("\n".join(["", *sweep_layers.decided(results)]) + "\n")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
