"""Runs many seeds: `python -m tests.sim --seeds N --start S`; `--seed S` replays one, and
`--explore` runs every order of events of a small session with one fault at every step."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

import torch

from tests.sim.explore import Exploration, explore, small_run
from tests.sim.options import drawn_setup
from tests.sim.world import Report, World

SHOWN_FAILURES = 20


def run_seed(seed: int) -> Report:
    """One run."""
    return World(drawn_setup(seed)).run()


def _begin() -> None:
    torch.set_num_threads(1)


def explore_one(case: tuple[str, int, str, int]) -> tuple[str, Exploration]:
    """All orders of one small session, one fault at every step."""
    rule, k, place, num_targets = case
    setup, request = small_run(rule, k, place, num_targets)
    return f"{rule}, k={k}, decided at {place}, {num_targets} targets", explore(setup, request)


def explore_all(num_jobs: int) -> int:
    """Every rule, k, placement and number of targets. Returns 0 only if nothing failed."""
    cases = [
        (rule, k, place, num_targets)
        for num_targets in (1, 2)
        for k in (2, 1)
        for place in ("target", "coordinator")
        for rule in ("coupled", "residual", "greedy")
    ]
    began = time.monotonic()
    num_runs = num_states = failed = 0
    with multiprocessing.get_context("spawn").Pool(num_jobs, _begin) as pool:
        for name, found in pool.imap_unordered(explore_one, cases):
            num_runs += found.num_runs
            num_states += found.num_states
            failed += len(found.failures)
            sys.stdout.write(
                f"{name}: {found.num_runs} runs, {found.num_met} of them to a state met before, "
                f"{found.num_states} states, runs to the end by fault {found.faults}\n"
            )
            sys.stdout.write("".join(f"  {failure}\n" for failure in found.failures[:3]))
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(cases)} sessions, {num_runs} runs, {num_states} states "
        f"({time.monotonic() - began:.0f} s), {failed} failures\n"
    )
    return 1 if failed else 0


def main() -> int:
    """Print failing seeds, then one line with the sums. Returns 0 only if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, help="replay this one and show what it did")
    parser.add_argument("--explore", action="store_true")
    arguments = parser.parse_args()
    _begin()
    if arguments.explore:
        return explore_all(arguments.jobs)
    if arguments.seed is not None:
        setup = drawn_setup(arguments.seed)
        report = World(setup).run()
        sys.stdout.write(f"{setup}\n{report}\n")
        return 1 if report.failures else 0
    began, injected, failed, num_tokens = time.monotonic(), Counter[str](), 0, 0
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, _begin) as pool:
        for report in pool.imap_unordered(run_seed, seeds, chunksize=16):
            injected += report.injected
            num_tokens += report.num_tokens
            if report.failures:
                failed += 1
                if failed <= SHOWN_FAILURES:
                    sys.stdout.write(f"seed {report.seed}: {report.failures[0]}\n")
                    sys.stdout.flush()
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(injected.items()))
    sys.stdout.write(
        f"{kinds}\n{len(seeds)} seeds run ({num_tokens} tokens, {time.monotonic() - began:.0f} s), "
        f"{injected.total()} faults injected, {failed} failures\n"
    )
    return 1 if failed else 0
