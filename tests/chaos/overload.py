"""`python -m tests.chaos.overload`: ten times the admitted load on real processes.

First as many streams as may run at once, alone: the latency they have is the yardstick. Then ten
times as many callers of two tenants, three quarters of them of one, for --seconds: those who are
refused come back after the delay they were told, a few after a quarter of a second. At the end
readers that stop reading. Writes one JSON object and returns 0 only if

- running and waiting requests kept their bounds at every sample,
- every refusal was TOO_BUSY with a delay, and everything admitted ran to its end,
- the 99th percentile between two chunks of an admitted stream is at most 1.5 times the yardstick,
- the smaller tenant got a fair share: at least 40 % of the tokens,
- no process's memory grew by more than 64 MiB over the overload,
- a request whose reader stopped ended, and everything it held is free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.deployment import Deployment, deployed
from tests.chaos.load import ClientProcess, Job, Stream, drawn_jobs, ended
from tests.chaos.measures import Samples, sampled

MAX_RUNNING, MAX_WAITING, MAX_WAIT_S, SLOW_READER_S = 8, 16, 5.0, 3.0
FACTOR = 10
RUDE_WAIT_S = 0.25
MOST_SLOWER = 1.5
LEAST_SHARE = 0.4
MOST_GROWTH_MIB = 64.0
KEYS = {"large": "key-of-the-large-tenant", "small": "key-of-the-small-tenant"}
FLAGS = (
    *("--admission.max-running", str(MAX_RUNNING)),
    *("--admission.max-waiting", str(MAX_WAITING)),
    *("--admission.max-wait-s", str(MAX_WAIT_S)),
    *("--admission.slow-reader-s", str(SLOW_READER_S)),
)
GAUGES = (
    ("running", "coordinator0", "specmesh_requests_running"),
    ("waiting", "coordinator0", "specmesh_requests_waiting"),
)


@dataclass
class Tally:
    """What callers were given. gaps: seconds between two chunks of a stream."""

    gaps: list[float] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_refused: int = 0
    num_finished: int = 0
    wrong: list[str] = field(default_factory=list)

    def take(self, tenant: str, stream: Stream) -> None:
        """Count one stream that is over."""
        self.gaps += np.diff(stream.times).tolist()
        self.num_tokens[tenant] = self.num_tokens.get(tenant, 0) + len(stream.tokens)
        if stream.error is None:
            self.num_finished += 1
        elif stream.error.startswith("TOO_BUSY") and stream.retry_after_s > 0 and not stream.tokens:
            self.num_refused += 1
        else:
            self.wrong.append(f"{stream.error} after {len(stream.tokens)} tokens")


class Overload:
    """Callers of both tenants on one deployment."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.deployment = deployment
        self._jobs = drawn_jobs(seed, 64)
        self._rng = random.Random(f"{seed} overload")
        self._clients = dict(zip(KEYS, deployment.clients, strict=True))
        self._count = 0

    def _stream(self, job: Job) -> Stream:
        self._count += 1
        return Stream(str(self._count), job)

    async def press(self, callers: dict[str, int], seconds: float, num_rude: int) -> Tally:
        """So many callers of each tenant, each asking again as soon as it may."""
        tally, until = Tally(), time.monotonic() + seconds
        tasks = []
        for tenant, count in callers.items():
            for index in range(count):
                rude = index < num_rude
                tasks.append(self._caller(tenant, self._clients[tenant], tally, until, rude=rude))
        await asyncio.gather(*tasks)
        return tally

    async def _caller(
        self, tenant: str, client: ClientProcess, tally: Tally, until: float, *, rude: bool
    ) -> None:
        while time.monotonic() < until:
            stream = self._stream(self._rng.choice(self._jobs))
            await ended(stream, client)
            tally.take(tenant, stream)
            if stream.error is not None:
                await asyncio.sleep(RUDE_WAIT_S if rude else max(0.05, stream.retry_after_s))

    async def stop_reading(self) -> str:
        """A client stops in the middle of a large answer. Returns "" if it was dealt with."""
        client = self._clients["small"]
        # More than every buffer on the way holds: eight samples with all their alternatives.
        job = LargeJob((1, 2, 3), 450, 1, 4, at_coordinator=False)
        stream = self._stream(job)
        client.ask(stream)
        while not stream.times and not stream.is_over:
            stream.changed.clear()
            await stream.changed.wait()
        client.signal(signal.SIGSTOP)
        try:
            await self.deployment.wait_quiet()
        except AssertionError as held:
            return str(held)
        finally:
            client.signal(signal.SIGCONT)
        return ""


class LargeJob(Job):
    """A request whose answer fills buffers."""

    def request(self) -> dict[str, Any]:
        """Eight samples, twenty alternatives a token."""
        return {**super().request(), "n": MAX_RUNNING, "logprobs": 20}


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return round(1000 * float(np.quantile(values, share)), 1)


def between_chunks(gaps: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    return {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)}


def report(alone: Tally, pressed: Tally, samples: Samples, held: str) -> dict[str, Any]:
    """Figures, and what of it is not as it should be."""
    values = samples.values
    settled = len(samples.times_s) // 4  # caches are full by then
    growth = {
        name.removeprefix("rss "): round(max(rss[settled:]) - rss[settled], 1)
        for name, rss in values.items()
        if name.startswith("rss ")
    }
    total = sum(pressed.num_tokens.values())
    share = pressed.num_tokens.get("small", 0) / max(1, total)
    slower = percentile(pressed.gaps, 0.99) / percentile(alone.gaps, 0.99)
    checks = {
        "running": max(values["running"]) <= MAX_RUNNING,
        "waiting": max(values["waiting"]) <= MAX_WAITING,
        "errors": not alone.wrong and not pressed.wrong and pressed.num_refused > 0,
        "latency": slower <= MOST_SLOWER,
        "fairness": share >= LEAST_SHARE,
        "memory": max(growth.values()) <= MOST_GROWTH_MIB,
        "slow reader": not held,
    }
    return {
        "alone_ms": {"p50": percentile(alone.gaps, 0.5), "p99": percentile(alone.gaps, 0.99)},
        "overload_ms": {
            "p50": percentile(pressed.gaps, 0.5),
            "p99": percentile(pressed.gaps, 0.99),
        },
        "p99_ratio": round(slower, 2),
        "finished": pressed.num_finished,
        "refused": pressed.num_refused,
        "tokens": total,
        "small_tenant_share": round(share, 3),
        "max_running": max(values["running"]),
        "max_waiting": max(values["waiting"]),
        "grown_mib": growth,
        "wrong": pressed.wrong[:5],
        "held": held,
        "failed": [name for name, good in checks.items() if not good],
    }


async def run(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The whole measurement."""
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
    clients = [("--api-key", key, "--max-attempts", "1") for key in KEYS.values()]
    flags = (*FLAGS, "--api-keys", str(keys))
    async with deployed(
        folder, 2, num_replicas=1, coordinator_flags=flags, client_flags=clients
    ) as deployment:
        overload = Overload(deployment, seed)
        half = MAX_RUNNING // 2
        await overload.press({"large": half, "small": half}, min(5.0, seconds / 4), 0)  # warm
        alone = await overload.press({"large": half, "small": half}, seconds / 4, 0)
        many = FACTOR * MAX_RUNNING
        callers = {"large": many * 3 // 4, "small": many // 4}
        async with sampled(deployment, GAUGES) as samples:
            pressed = await overload.press(callers, seconds, num_rude=4)
        await deployment.wait_quiet()
        held = await overload.stop_reading()
    return report(alone, pressed, samples, held)


def main() -> int:
    """Run, report, and say with the exit code whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        found = asyncio.run(run(Path(folder), arguments.seconds, arguments.seed))
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
