"""`python -m tests.chaos.soak`: real processes under load for a long time, half of it cancelled.

Every second caller loses interest after a random number of chunks. Memory of every process, pages
in use, sessions and queues are sampled; a line is fitted through each after a warm-up (a quarter of
the run), and what counts is the upper end of its 95 % confidence interval. Writes one JSON object
and returns 0 only if every request that was not cancelled ended well, nothing is held at the end,
and the data rule out growth of a process's memory by more than --growth of itself in an hour and of
sessions and pages by more than five times that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.deployment import Deployment, deployed
from tests.chaos.load import ClientProcess, Job, Stream, drawn_jobs
from tests.chaos.measures import Samples, sampled, told

CONTEXT_CHUNKS = 60
MOST_MORE = 10.0  # sessions, pages or commands that wait, in an hour
GAUGES = tuple(
    (f"{name} {side}", f"{side}0", f"specmesh_{metric}")
    for side in ("target", "draft")
    for name, metric in (
        ("sessions", "sessions"),
        ("waiting", "queue_depth"),
        ("pages", f'kv_pages{{side="{side}",state="used"}}'),
    )
)


class Soak:
    """Callers that come and go."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self._clients = deployment.clients
        self._jobs = drawn_jobs(seed, 256)
        self._rng = random.Random(f"{seed} soak")
        self._count = 0
        self.ends: Counter[str] = Counter()
        self.num_tokens = 0
        self.failures: list[str] = []

    async def run(self, num_streams: int, seconds: float) -> None:
        """So many callers at once, for so long."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._caller(index, until) for index in range(num_streams)))

    async def _caller(self, index: int, until: float) -> None:
        while time.monotonic() < until:
            self._count += 1
            job = self._rng.choice(self._jobs)
            client = self._rng.choice(self._clients)
            num_chunks = self._rng.randrange(CONTEXT_CHUNKS) if index % 2 else None
            await self._one(Stream(str(self._count), job), job, client, num_chunks)

    async def _one(
        self, stream: Stream, job: Job, client: ClientProcess, num_chunks: int | None
    ) -> None:
        """num_chunks: after how many the caller loses interest; 0: at once, None: never."""
        client.ask(stream)
        while not stream.is_over:
            if num_chunks is not None and len(stream.times) >= num_chunks:
                client.cancel(stream)
                num_chunks = None
            stream.changed.clear()
            await stream.changed.wait()
        self.num_tokens += len(stream.tokens)
        self.ends["cancelled" if stream.was_cancelled else "finished"] += 1
        if stream.error is not None:
            self.failures.append(f"{stream.error} after {len(stream.tokens)} tokens")
        elif not stream.was_cancelled and len(stream.tokens) != job.max_tokens:
            self.failures.append(f"{len(stream.tokens)} tokens of {job.max_tokens}")


def report(soak: Soak, samples: Samples, failures: list[str], growth: float) -> dict[str, Any]:
    """Figures, and what of it is not as it should be."""
    memory, held = samples.trends("rss "), samples.trends("sessions ")
    held |= samples.trends("pages ") | samples.trends("waiting ")
    rising = [name for name, found in memory.items() if not found.is_flat(growth)]
    # Of a handful, a share says little: a few more in an hour are flat, too.
    rising += [
        name
        for name, found in held.items()
        if not found.is_flat(5 * growth) and (found.slope + found.half_width) * 60 > MOST_MORE
    ]
    return {
        "minutes": round((samples.times_s[-1] - samples.times_s[0]) / 60, 1),
        "samples": len(samples.times_s),
        **soak.ends,
        "tokens": soak.num_tokens,
        "memory_mib": {name.removeprefix("rss "): told(found) for name, found in memory.items()},
        "held": {name: told(found) for name, found in held.items()},
        "failures": [*failures, *soak.failures][:5],
        "rising": rising,
    }


async def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole measurement."""
    failures: list[str] = []
    async with deployed(folder, 2, num_replicas=1) as deployment:
        soak = Soak(deployment, arguments.seed)
        running = asyncio.create_task(soak.run(arguments.streams, 60 * arguments.minutes))
        async with sampled(deployment, GAUGES, arguments.period) as samples:
            # Without the end, when callers stop one by one.
            await asyncio.wait([running], timeout=60 * arguments.minutes)
        await running
        try:
            await deployment.wait_quiet()
        except AssertionError as held:
            failures.append(str(held))
        failures += [
            f"{replica.name} wrote {line[:300]}"
            for replica in deployment.replicas.values()
            for line in replica.complaints()
        ]
    return report(soak, samples, failures, arguments.growth)


def main() -> int:
    """Run, report, and say with the exit code whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--period", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--growth", type=float, default=0.1, help="share of itself in an hour")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = asyncio.run(run(Path(folder), arguments))
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["failures"] or found["rising"] else 0


if __name__ == "__main__":
    sys.exit(main())
