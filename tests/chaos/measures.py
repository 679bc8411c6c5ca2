"""What is measured while a deployment runs: memory of every process, gauges, and their trends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tests.chaos.deployment import Deployment

MIB = 1 << 20
PERIOD_S = 1.0
NOTED_EVERY = 30
NUM_BLOCKS = 20  # neighbouring samples resemble each other; means of blocks hardly do


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through block means. slope and half_width (95 % confidence): a minute."""

    mean: float
    slope: float
    half_width: float

    def is_flat(self, most_per_hour: float) -> bool:
        """Whether the data rule out growth by more than that share of the mean in an hour.

        A line that cannot be told from a rising one is not flat: the upper end of the interval
        counts.
        """
        return (self.slope + self.half_width) * 60 <= most_per_hour * max(self.mean, 1e-9)


def trend(times_s: Sequence[float], values: Sequence[float], skipped: float = 0.25) -> Trend:
    """Fit the samples after the first `skipped` share, in which caches fill."""
    start = times_s[0] + skipped * (times_s[-1] - times_s[0])
    kept = [(at, value) for at, value in zip(times_s, values, strict=True) if at >= start]
    blocks = np.array_split(np.array(kept), min(NUM_BLOCKS, len(kept)))
    means = np.array([block.mean(axis=0) for block in blocks])
    minutes = (means[:, 0] - means[0, 0]) / 60
    fit = stats.linregress(minutes, means[:, 1])
    t = stats.t.ppf(0.975, len(means) - 2)
    return Trend(float(means[:, 1].mean()), float(fit.slope), float(t * fit.stderr))


@dataclass
class Samples:
    """Values by what they are of, and when."""

    times_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, deployment: Deployment, gauges: Sequence[tuple[str, str, str]]) -> None:
        """One sample of every process's memory (MiB) and every gauge (name, replica, metric)."""
        self.times_s.append(time.monotonic())
        for name, pid in deployment.pids().items():
            self.values[f"rss {name}"].append(rss_bytes(pid) / MIB)
        for name, replica, metric in gauges:
            self.values[name].append(deployment.value(replica, metric))

    def trends(self, prefix: str) -> dict[str, Trend]:
        """The trend of everything whose name begins so."""
        return {
            name: trend(self.times_s, values)
            for name, values in self.values.items()
            if name.startswith(prefix)
        }


@asynccontextmanager
async def sampled(
    deployment: Deployment, gauges: Sequence[tuple[str, str, str]], period_s: float = PERIOD_S
) -> AsyncIterator[Samples]:
    """Within it a sample is taken every period."""
    samples = Samples()

    async def run() -> None:
        while True:
            await asyncio.to_thread(samples.take, deployment, gauges)
            if len(samples.times_s) % NOTED_EVERY == 0:
                sys.stderr.write(f"{ {n: round(v[-1], 1) for n, v in samples.values.items()} }\n")
            await asyncio.sleep(period_s)

    task = asyncio.create_task(run())
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(found: Trend) -> dict[str, Any]:
    """A trend for a report."""
    return {
        "mean": round(found.mean, 2),
        "per_minute": round(found.slope, 4),
        "95%": round(found.half_width, 4),
    }
