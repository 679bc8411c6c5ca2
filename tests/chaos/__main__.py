"""`python -m tests.chaos`: faults to real processes while requests stream (`make chaos`).

Writes one JSON line a kind of fault, with the time until every stream went on, then one with the
sums. Returns 0 only if every request completed with the tokens and the text of the undisturbed run
and nothing is held afterwards. --rolling restarts every process in turn instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import drawn_faults
from tests.chaos.run import Outcome, started

SHOWN_FAILURES = 20


async def _run(arguments: argparse.Namespace, folder: Path) -> Outcome:
    began = time.monotonic()

    def note(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {text}\n")

    async with started(folder, arguments.streams, arguments.seed) as run:
        note(f"undisturbed: {run.outcome.summary()}")
        async with run.under_load():
            if arguments.rolling:
                for name, code, seconds in await run.roll():
                    line = {"restart": name, "exit_code": code, "seconds": round(seconds, 1)}
                    sys.stdout.write(json.dumps(line) + "\n")
            else:
                await run.disturb(drawn_faults(arguments.seed, arguments.faults), note)
        return run.outcome


def main() -> int:
    """Run, report, and say with the exit code whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rolling", action="store_true")
    parser.add_argument("--folder", type=Path, help="where logs are kept; a temporary one if unset")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        outcome = asyncio.run(_run(arguments, arguments.folder or Path(temporary)))
    for line in outcome.lines():
        sys.stdout.write(json.dumps(line) + "\n")
    for failure in outcome.failures[:SHOWN_FAILURES]:
        sys.stdout.write(json.dumps({"failure": failure}) + "\n")
    summary = {
        "streams": arguments.streams,
        "faults": sum(len(each) for kind, each in outcome.stalls.items() if kind != "none"),
        **outcome.summary(),
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
