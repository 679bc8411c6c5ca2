"""The client process: `python -m tests.chaos.caller ADDRESS...`, JSON lines in and out.

A line of standard input is a job: {"id", "request"}, the request as JSON of the public message, or
the end of one: {"cancel": id}. Jobs run at once, each through `AsyncClient` with its shipped retry
policy unless flags say otherwise. A line of standard
output is an event of a job: tokens, the end, or the error that the client raised. A line is one
write of less than a pipe's atomic size, so that a killed client leaves no half line that counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from google.protobuf import json_format

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.client import AsyncClient, Chunk, Finished, RetryPolicy
from specmesh.errors import SpecmeshError
from specmesh.rpc import RpcLimits

# A stopped coordinator is noticed by its unanswered pings; the shipped 25 s would only make a run
# longer.
KEEPALIVE_S = 2.0
REQUEST_S = 300.0


def tell(**event: Any) -> None:
    """Write one event."""
    os.write(1, (json.dumps({"at": time.monotonic(), **event}) + "\n").encode())


async def run_job(client: AsyncClient, job: dict[str, Any]) -> None:
    """Stream one request and report it."""
    request = json_format.ParseDict(job["request"], pb.GenerateRequest())
    name = job["id"]
    try:
        async for event in client.stream_request(request, timeout_s=REQUEST_S):
            if isinstance(event, Chunk):
                tell(id=name, tokens=list(event.token_ids), text=event.text, round=event.round)
            elif isinstance(event, Finished):
                fallback = dict(event.speculation.fallback_rounds)
                tell(id=name, finished=int(event.reason), fallback=fallback)
            else:
                tell(id=name, request_id=event.request_id)
    except SpecmeshError as error:
        tell(id=name, error=f"{error.reason}: {error.message}", retry_after_s=error.retry_after_s)


def end(task: asyncio.Task[None], name: str, tasks: dict[str, asyncio.Task[None]]) -> None:
    """Forget a job; told here, for a task that is cancelled at once never runs."""
    del tasks[name]
    if task.cancelled():
        tell(id=name, cancelled=True)


async def main(arguments: argparse.Namespace) -> None:
    """Run jobs until standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 22)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    limits = RpcLimits(keepalive_time_s=KEEPALIVE_S, keepalive_timeout_s=KEEPALIVE_S)
    retry = RetryPolicy(max_attempts=arguments.max_attempts)
    tasks: dict[str, asyncio.Task[None]] = {}
    async with AsyncClient(
        arguments.addresses, limits=limits, retry=retry, api_key=arguments.api_key
    ) as client:
        while line := await reader.readline():
            job = json.loads(line)
            if "cancel" in job:
                if job["cancel"] in tasks:
                    tasks[job["cancel"]].cancel()
                continue
            task = loop.create_task(run_job(client, job))
            tasks[job["id"]] = task
            task.add_done_callback(lambda task, name=job["id"]: end(task, name, tasks))
        await asyncio.gather(*tasks.values(), return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--api-key")
    parser.add_argument("--max-attempts", type=int, default=RetryPolicy().max_attempts)
    asyncio.run(main(parser.parse_args()))
