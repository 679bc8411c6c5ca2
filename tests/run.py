"""Every check and every test, in two lanes, with one summary: what `make test` runs.

Kernels run in Triton's interpreter, which has to be chosen before Triton is imported and slows
every launch, so they get a process and a lane of their own; checks and all other tests share the
second lane. Output of a step is shown when it fails. Exit code 0 only if every step passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTEST = (sys.executable, "-m", "pytest", "-q", "--durations=8")


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a lane."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How a step ended."""

    name: str
    code: int
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        """What pytest and the linters sum up in."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip("= ") if lines else ""


CHECKS = (
    Step("ruff check", (str(BIN / "ruff"), "check", ".")),
    Step("ruff format", (str(BIN / "ruff"), "format", "--check", ".")),
    Step("mypy --strict", (str(BIN / "mypy"),)),
    Step("import-linter", (str(BIN / "lint-imports"),)),
    Step("buf lint", (str(BIN / "buf"), "lint")),
    Step("generated code", (sys.executable, "-m", "protos.generate", "--check")),
)
KERNELS = Step("tests/kernels", (*PYTEST, "tests/kernels"), {"TRITON_INTERPRET": "1"})
OTHERS = Step("other tests", (*PYTEST, "tests", "--ignore=tests/kernels"))


def run(step: Step, live: set[subprocess.Popen[str]]) -> Outcome:
    """Run one step to its end, its output kept. `live` holds the process while it runs."""
    began = time.monotonic()
    # Two lanes share the cores: one thread each unless the caller says otherwise.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **step.env}
    process = subprocess.Popen(
        step.argv,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    live.add(process)
    output, _ = process.communicate()
    live.discard(process)
    return Outcome(step.name, process.returncode, time.monotonic() - began, output)


def run_lane(
    steps: Sequence[Step], outcomes: list[Outcome], live: set[subprocess.Popen[str]]
) -> None:
    """Run steps one after the other, also past a failing one, and report each."""
    for step in steps:
        outcome = run(step, live)
        outcomes.append(outcome)
        mark = "ok  " if outcome.code == 0 else "FAIL"
        report = f"{mark} {outcome.name:<16} {outcome.seconds:7.1f} s  {outcome.last_line}\n"
        if outcome.code != 0:
            report += f"{outcome.output.rstrip()}\n{'-' * 80}\n"
        sys.stdout.write(report)
        sys.stdout.flush()


def main() -> int:
    """Run both lanes; return 0 only if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only-checks", action="store_true", help="no tests")
    arguments = parser.parse_args()
    lanes = [list(CHECKS)] if arguments.only_checks else [[KERNELS], [*CHECKS, OTHERS]]
    began = time.monotonic()
    outcomes: list[Outcome] = []
    live: set[subprocess.Popen[str]] = set()
    threads = [threading.Thread(target=run_lane, args=(lane, outcomes, live)) for lane in lanes]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for process in list(live):
            process.terminate()
        return 130
    failed = [outcome.name for outcome in outcomes if outcome.code != 0]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "everything passed"
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    sys.stdout.write(f"{verdict} ({len(outcomes)} steps, {minutes} min {seconds:02d} s)\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
