"""The processes under test: started, killed, stopped, drained and measured, each by its own id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specmesh.ports import unused_port
from specmesh.rpc import READINESS, RpcLimits, create_channel

READY_S = 180.0  # on a busy machine a service takes seconds to import its libraries
END_S = 60.0
POLL_S = 0.05


@dataclass(eq=False)
class Replica:
    """One replica of a service: the same command line and port in every life.

    name: side and number, "target0". num_lives: times it was started.
    """

    name: str
    module: str
    flags: Sequence[str]
    log_path: Path
    port: int = field(default_factory=unused_port)
    num_lives: int = 0
    _process: asyncio.subprocess.Process | None = None

    @property
    def side(self) -> str:
        """ "target", "draft" or "coordinator"."""
        return self.name.rstrip("0123456789")

    @property
    def pid(self) -> int:
        """Id of the process that runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives (it may be stopped)."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; does not wait until it is ready."""
        self.num_lives += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.module,
                *self.flags,
                *("--server.port", str(self.port)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    async def wait_ready(self) -> None:
        """Until grpc.health.v1 says SERVING; fails when the process ends first."""
        process = self._process
        assert process is not None
        channel = create_channel(f"127.0.0.1:{self.port}", RpcLimits())
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=READINESS)
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    if process.returncode is not None:
                        raise AssertionError(f"{self.name} ended: {self.log_tail()}")
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        answer = await stub.Check(request, timeout=2.0)
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                    await asyncio.sleep(POLL_S)
        finally:
            await channel.close(None)

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        await self._wait()

    async def terminate(self) -> int:
        """SIGTERM, and wait until it has drained; return its exit code."""
        self.signal(signal.SIGTERM)
        return await self._wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, and to no other."""
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self) -> None:
        """Whatever state it is in: gone afterwards."""
        if self.is_running:
            await self.kill()

    async def _wait(self) -> int:
        assert self._process is not None
        async with asyncio.timeout(END_S):
            return await self._process.wait()

    def rss_bytes(self) -> int:
        """Resident memory of the process, in bytes; 0 where there is no /proc or no process."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0

    def log_tail(self, num_bytes: int = 2000) -> str:
        """The end of what it wrote."""
        with contextlib.suppress(OSError):
            return self.log_path.read_text(errors="replace")[-num_bytes:]
        return ""

    def complaints(self) -> list[str]:
        """Log lines of level error and above, and tracebacks: a fault must not cause any."""
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            marks = ('"level":"error"', '"level":"critical"', "Traceback")
            return [line for line in lines if any(mark in line for mark in marks)]
        return []
