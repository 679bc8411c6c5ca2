"""What is asked for, what arrives, and whether it is what an undisturbed run gave.

Owns the catalogue of requests, the client processes and every stream's record. A client that dies
is started again; each of its open requests is asked for by the new one from the tokens that had
arrived, as an application does that keeps what it received.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT_LEN = 512
MAX_LINE_BYTES = 1 << 20
STREAMING_S = 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """One distinct request. seed None: greedy. is_coupled: else the residual rule, whose tokens
    depend on how rounds fall, so that only their number is compared."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    num_draft_tokens: int | None
    at_coordinator: bool
    is_coupled: bool = True

    @property
    def is_repeatable(self) -> bool:
        """Whether every run gives the same tokens."""
        return self.seed is None or self.is_coupled

    def request(self) -> dict[str, Any]:
        """The public message, as JSON."""
        found: dict[str, Any] = {
            "tokens": {"tokenIds": list(self.prompt)},
            "maxTokens": self.max_tokens,
            "ignoreEos": True,
            # Greedy requests name a seed too: resuming needs one.
            "seed": str(self.seed or 0),
        }
        if self.seed is None:
            found["temperature"] = 0.0
        elif not self.is_coupled:
            found["rule"] = "DECISION_RULE_RESIDUAL"
        if self.num_draft_tokens is not None:
            found["numDraftTokens"] = self.num_draft_tokens
        if self.at_coordinator:
            found["decideAt"] = "DECIDE_AT_COORDINATOR"
        return found


def drawn_jobs(seed: int, count: int, max_tokens: int = 160) -> list[Job]:
    """Distinct requests: a third greedy, half coupled, a sixth residual; one in eight is decided at
    the coordinator."""
    rng = random.Random(f"{seed} jobs")
    jobs = []
    for index in range(count):
        prompt = tuple(rng.randrange(256) for _ in range(rng.randint(8, 120)))
        num_tokens = rng.randint(max_tokens // 2, max_tokens)
        seed_of_it = None if index % 3 == 0 else index + 1
        k = rng.choice((None, 1, 2, 4, 4))
        jobs.append(
            Job(prompt, num_tokens, seed_of_it, k, index % 8 == 7, is_coupled=index % 6 != 5)
        )
    return jobs


@dataclass(eq=False)
class Stream:
    """One request as its caller sees it. times: arrival of each chunk, on the monotonic clock."""

    name: str
    job: Job
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    next_round: int = 0
    times: list[float] = field(default_factory=list)
    finished: int | None = None
    error: str | None = None
    retry_after_s: float = 0.0
    was_cancelled: bool = False
    num_client_deaths: int = 0
    fallback: dict[str, int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Whether it ended, well or not."""
        return self.finished is not None or self.error is not None or self.was_cancelled

    def request(self) -> dict[str, Any]:
        """The message that asks for what is still missing."""
        found = self.job.request()
        if self.tokens:
            found["resumeTokenIds"] = self.tokens
            found["resumeRound"] = self.next_round
        return found

    def take(self, event: dict[str, Any]) -> None:
        """Take one event of the client."""
        if "tokens" in event:
            self.times.append(event["at"])
            self.tokens += event["tokens"]
            self.text += event["text"]
            self.next_round = event["round"] + 1
        elif "finished" in event:
            self.finished = event["finished"]
            self.fallback = event["fallback"]
        elif "error" in event:
            self.error, self.retry_after_s = event["error"], event["retry_after_s"]
        elif "cancelled" in event:
            self.was_cancelled = True
        else:
            return
        self.changed.set()


class ClientProcess:
    """A client as a process of its own, started again when it dies."""

    def __init__(
        self, name: str, addresses: Sequence[str], log_path: Path, flags: Sequence[str] = ()
    ) -> None:
        """flags: of `tests.chaos.caller`."""
        self.name = name
        self._arguments = [*addresses, *flags]
        self._log_path = log_path
        self._open: dict[str, Stream] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_ending = False

    @property
    def pid(self) -> int:
        """Id of the process that runs."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process and follow what it says."""
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.chaos.caller", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                limit=MAX_LINE_BYTES,
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._follow(self._process))

    def ask(self, stream: Stream) -> None:
        """Begin, or go on with, a request."""
        self._open[stream.name] = stream
        process = self._process
        assert process is not None
        assert process.stdin is not None
        line = json.dumps({"id": stream.name, "request": stream.request()}) + "\n"
        # A client that has just died is started again, and asked again.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line.encode())

    def cancel(self, stream: Stream) -> None:
        """The caller loses interest."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write((json.dumps({"cancel": stream.name}) + "\n").encode())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, and to no other."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self) -> None:
        """End the process for good."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._reader is not None:
            await self._reader

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if not line.endswith(b"\n"):
                break  # died in the middle of a write
            event = json.loads(line)
            stream = self._open.get(event["id"])
            if stream is not None:
                stream.take(event)
                if stream.is_over:
                    del self._open[event["id"]]
        await process.wait()
        if self._is_ending:
            return
        await self.start()
        for stream in list(self._open.values()):
            stream.num_client_deaths += 1
            self.ask(stream)


class Load:
    """Keeps `num_streams` requests of the catalogue in flight, over all clients."""

    def __init__(
        self, clients: Sequence[ClientProcess], jobs: Sequence[Job], num_streams: int, seed: int
    ) -> None:
        self._clients = clients
        self._jobs = jobs
        self._num_streams = num_streams
        self._rng = random.Random(f"{seed} load")
        self._is_on = False
        self.live: set[Stream] = set()
        self.done: list[Stream] = []

    async def one_of_each(self) -> list[Stream]:
        """Every request of the catalogue once, `num_streams` at a time."""
        free = asyncio.Semaphore(self._num_streams)

        async def one(index: int, job: Job) -> Stream:
            async with free:
                return await self._run(job, f"first{index}", index)

        return await asyncio.gather(*(one(*each) for each in enumerate(self._jobs)))

    async def run(self) -> None:
        """Requests in flight without end, until `stop`; returns when the last has ended."""
        self._is_on = True
        await asyncio.gather(*(self._slot(slot) for slot in range(self._num_streams)))

    async def wait_streaming(self) -> None:
        """Until every place holds a stream that has begun to arrive. Raises TimeoutError."""
        async with asyncio.timeout(STREAMING_S):
            await self._wait_streaming()

    async def _wait_streaming(self) -> None:
        while sum(bool(stream.times) for stream in self.live) < self._num_streams:
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """Begin no more requests."""
        self._is_on = False

    async def _slot(self, slot: int) -> None:
        count = 0
        while self._is_on:
            job = self._rng.choice(self._jobs)
            stream = await self._run(job, f"{slot}.{count}", slot)
            self.done.append(stream)
            count += 1

    async def _run(self, job: Job, name: str, slot: int) -> Stream:
        stream = Stream(name, job)
        self.live.add(stream)
        await ended(stream, self._clients[slot % len(self._clients)])
        self.live.discard(stream)
        return stream


async def ended(stream: Stream, client: ClientProcess) -> None:
    """Ask for a stream and wait until it is over."""
    client.ask(stream)
    while not stream.is_over:
        stream.changed.clear()
        await stream.changed.wait()


async def stall_s(streams: Sequence[Stream], since: float, num_chunks: int, most_s: float) -> float:
    """The longest wait of any of these streams for one of its next chunks.

    Returns when each has received `num_chunks` since then, or is over. Raises AssertionError,
    naming the streams, where one has not after most_s.
    """
    longest = 0.0
    for stream in streams:
        while not stream.is_over and sum(at > since for at in stream.times) < num_chunks:
            left = since + most_s - time.monotonic()
            stream.changed.clear()
            try:
                await asyncio.wait_for(stream.changed.wait(), max(0.0, left))
            except TimeoutError:
                waiting = [each.name for each in streams if not each.is_over]
                raise AssertionError(
                    f"{stream.name} of {len(waiting)} streams stood still for {most_s:g} s"
                ) from None
        arrived = [since, *(at for at in stream.times if at > since)][: num_chunks + 1]
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrived)]
        longest = max(longest, *gaps, 0.0)
    return longest
