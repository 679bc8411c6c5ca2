"""A run: undisturbed first, then under faults; what every stream gave is compared."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.deployment import Deployment, deployed
from tests.chaos.faults import Fault, Injector, roll
from tests.chaos.load import Job, Load, Stream, drawn_jobs, stall_s
from tests.chaos.near_tie import Judge, parted

NUM_CHUNKS = 4  # of each stream after a fault, before the next fault
STILL_S = 120.0  # no stream may stand still for so long
MAX_TOKENS = 160


@dataclass
class Outcome:
    """What a run came to. stalls: seconds by kind of fault; beyond what the fault itself lasted."""

    num_requests: int = 0
    num_tokens: int = 0
    num_resumed: int = 0
    near_ties: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stalls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    beyond: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fallback: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def lines(self) -> list[dict[str, Any]]:
        """One object a kind of fault."""
        return [
            {
                "fault": kind,
                "n": len(stalls),
                "recovery_s": spread(stalls),
                "beyond_fault_s": spread(self.beyond[kind]),
            }
            for kind, stalls in sorted(self.stalls.items())
        ]

    def summary(self) -> dict[str, Any]:
        """The sums of a run."""
        return {
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "client_deaths": self.num_resumed,
            "near_ties": len(self.near_ties),
            "fallback_rounds": dict(sorted(self.fallback.items())),
            "failures": len(self.failures),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, p90 and maximum, in milliseconds' precision."""
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"median": round(median(ordered), 3), "p90": round(p90, 3), "max": round(ordered[-1], 3)}


class Run:
    """One deployment under load."""

    def __init__(self, deployment: Deployment, num_streams: int, seed: int) -> None:
        self.deployment = deployment
        self.outcome = Outcome()
        self._jobs = drawn_jobs(seed, 2 * num_streams, MAX_TOKENS)
        self._judge = Judge(deployment.target_dir)
        self._wanted: dict[Job, Stream] = {}
        self.load = Load(deployment.clients, self._jobs, num_streams, seed)

    async def undisturbed(self) -> None:
        """What every request gives when nothing is wrong."""
        for stream in await self.load.one_of_each():
            self._wanted[stream.job] = stream
            self._check(stream, stream)

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        """Within it requests stream; afterwards all have ended and are compared."""
        running = asyncio.create_task(self.load.run())
        try:
            yield
        except AssertionError as failure:
            self.outcome.failures.append(str(failure))
        self.load.stop()
        try:
            async with asyncio.timeout(STILL_S):
                await running
        except TimeoutError:
            names = sorted(stream.name for stream in self.load.live)
            self.outcome.failures.append(f"never ended: {', '.join(names)}")
        for stream in self.load.done:
            self._check(stream, self._wanted[stream.job])
        try:
            await self.deployment.wait_quiet()
        except AssertionError as failure:
            self.outcome.failures.append(str(failure))
        for replica in self.deployment.replicas.values():
            for line in replica.complaints():
                self.outcome.failures.append(f"{replica.name} wrote {line[:600]}")

    async def disturb(self, faults: Sequence[Fault], note: Any = lambda _: None) -> None:
        """Do each fault, and wait until every stream that it met goes on."""
        injector = Injector(self.deployment)
        for index, fault in enumerate(faults):
            await injector.make_ready(fault)
            await self.load.wait_streaming()
            since, met = time.monotonic(), [*self.load.live]
            _, stalled_s = await asyncio.gather(
                injector.inject(fault), stall_s(met, since, NUM_CHUNKS, STILL_S)
            )
            self.outcome.stalls[fault.kind].append(stalled_s)
            self.outcome.beyond[fault.kind].append(max(0.0, stalled_s - fault.lasts_s))
            note(f"{index + 1}/{len(faults)} {fault} stalled {stalled_s:.3f} s")
        await injector.settle()

    async def roll(self, names: Sequence[str] = ()) -> list[tuple[str, int, float]]:
        """A rolling restart of these processes, or of everything."""
        await self.load.wait_streaming()
        rolled = await roll(self.deployment, names)
        for name, code, _ in rolled:
            if code != 0:
                self.outcome.failures.append(f"{name} ended with {code} after SIGTERM")
        return rolled

    def _check(self, stream: Stream, wanted: Stream) -> None:
        outcome, job = self.outcome, stream.job
        outcome.num_requests += 1
        outcome.num_tokens += len(stream.tokens)
        outcome.num_resumed += stream.num_client_deaths
        for reason, count in stream.fallback.items():
            outcome.fallback[reason] += count
        if stream.error is not None:
            outcome.failures.append(f"{stream.name}: {stream.error}")
            return
        if len(stream.tokens) != job.max_tokens:
            outcome.failures.append(
                f"{stream.name}: {len(stream.tokens)} tokens of {job.max_tokens}"
            )
        if not job.is_repeatable:
            return
        differs, gap = parted(self._judge, job, wanted.tokens, stream.tokens)
        if differs:
            outcome.failures.append(f"{stream.name} {job}: other tokens, gap {gap}")
        elif gap is not None:
            outcome.near_ties.append(gap)
        elif stream.text != wanted.text:
            outcome.failures.append(f"{stream.name} {job}: other text")


@asynccontextmanager
async def started(folder: Path, num_streams: int, seed: int) -> AsyncIterator[Run]:
    """A deployment that has given its undisturbed outputs."""
    async with deployed(folder) as deployment:
        run = Run(deployment, num_streams, seed)
        await run.undisturbed()
        yield run
