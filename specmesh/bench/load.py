"""Requests through the running stack, and the times a client sees.

Owns the clock of the client's side. First token and later tokens are kept apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh import event_loop
from specmesh.client import AsyncClient, GenerateOptions, RetryPolicy


@dataclass(frozen=True, slots=True)
class Timed:
    """One finished request as its client saw it, in seconds."""

    trace_id: str
    first_token_s: float
    total_s: float
    num_tokens: int
    num_first_tokens: int
    finished: pb.Finished

    @property
    def later_tokens_per_s(self) -> float:
        """Tokens after the first message over their time."""
        return (self.num_tokens - self.num_first_tokens) / (self.total_s - self.first_token_s)


async def timed_request(
    client: AsyncClient, prompt: Sequence[int], options: GenerateOptions
) -> Timed:
    """Send one request and time it. Raises SpecmeshError."""
    began = time.perf_counter()
    first_token_s = 0.0
    num_tokens = num_first = 0
    trace_id = ""
    finished: pb.Finished | None = None
    async for event in client.stream(prompt, options):
        if isinstance(event, pb.Started):
            trace_id = event.trace_id
        elif isinstance(event, pb.Finished):
            finished = event
        elif event.token_ids:
            if num_tokens == 0:
                first_token_s = time.perf_counter() - began
                num_first = len(event.token_ids)
            num_tokens += len(event.token_ids)
    assert finished is not None, "a stream that ends without error has finished"
    total_s = time.perf_counter() - began
    return Timed(trace_id, first_token_s, total_s, num_tokens, num_first, finished)


def one_after_another(
    address: str, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> list[Timed]:
    """Send the prompts one by one."""

    async def work() -> list[Timed]:
        async with AsyncClient(address, retry=RetryPolicy(max_attempts=1)) as client:
            return [await timed_request(client, prompt, options) for prompt in prompts]

    return event_loop.run(work())


def all_at_once(
    address: str, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> tuple[float, list[Timed]]:
    """Send the prompts together; (seconds until the last has finished, requests)."""

    async def work() -> tuple[float, list[Timed]]:
        async with AsyncClient(address, retry=RetryPolicy(max_attempts=1)) as client:
            began = time.perf_counter()
            timed = await asyncio.gather(
                *(timed_request(client, prompt, options) for prompt in prompts)
            )
            return time.perf_counter() - began, list(timed)

    return event_loop.run(work())
