"""The client process: `python -m tests.chaos.caller ADDRESS...`, JSON lines in and out.

A line of standard input is a job: {"id", "request"}, the request as JSON of the public message.
Jobs run at once, each through `AsyncClient` with its shipped retry policy. A line of standard
output is an event of a job: tokens, the end, or the error that the client raised. A line is one
write of less than a pipe's atomic size, so that a killed client leaves no half line that counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from google.protobuf import json_format

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.client import AsyncClient, Chunk, Finished
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


async def main(addresses: list[str]) -> None:
    """Run jobs until standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 22)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    limits = RpcLimits(keepalive_time_s=KEEPALIVE_S, keepalive_timeout_s=KEEPALIVE_S)
    tasks = set()
    async with AsyncClient(addresses, limits=limits) as client:
        while line := await reader.readline():
            task = loop.create_task(run_job(client, json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
