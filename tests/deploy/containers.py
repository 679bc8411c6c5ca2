"""Containers as local processes: the manifests' exact commands under the manifests' environment.

Only what a machine without a cluster cannot have is replaced, and each replacement is listed in
`Node`: addresses and ports by free ones on loopback, volumes by folders. Probes are carried out as
kubelet would, by the container's own probe definitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specmesh.ports import unused_port
from specmesh.rpc import RpcLimits, create_channel
from tests.deploy.manifests import NAMESPACE, Object, Template, environment, template
from tests.deploy.pods import startup_s

POLL_S = 0.05


@dataclass
class Node:
    """What a cluster would give: an address for each port, a folder for each volume.

    folders: path in a container -> path here. otlp_port: where the collector's name leads.
    """

    objects: Sequence[Object]
    folders: Mapping[str, Path]
    otlp_port: int
    ports: dict[int, int] = field(default_factory=dict)

    def port(self, manifest_port: int) -> int:
        """The loopback port that stands for a container's."""
        return self.ports.setdefault(manifest_port, unused_port())

    def local(self, name: str, value: str) -> str:
        """A variable's value on this machine."""
        if name.endswith(("SERVER__PORT", "HEALTH_PORT", "METRICS_PORT")):
            return str(self.port(int(value)))
        if name.endswith("__OTLP_ENDPOINT"):
            return f"http://127.0.0.1:{self.otlp_port}"
        if name.endswith("_HOST") and value == "0.0.0.0":
            return "127.0.0.1"
        if name.endswith(("_TARGETS", "_DRAFTS")):
            found = []
            for address in value.split(","):
                host, port = address.rsplit(":", 1)
                assert host.endswith(f".{NAMESPACE}.svc")
                found.append(f"localhost:{self.port(int(port))}")
            return ",".join(found)
        return self.path(value)

    def path(self, value: str) -> str:
        """A path on one of the volumes, or the value itself."""
        for inside, here in self.folders.items():
            if value == inside or value.startswith(f"{inside}/"):
                return str(here) + value.removeprefix(inside)
        return value

    def environment(self, container: Object) -> dict[str, str]:
        """Everything the process gets, and nothing of this machine but its Python."""
        values = environment(self.objects, container, "pod-0")
        bin_folder = str(Path(sys.executable).parent)
        return {
            "PATH": os.pathsep.join((bin_folder, "/usr/bin", "/bin")),
            **{name: self.local(name, value) for name, value in values.items()},
        }


@dataclass
class Running:
    """A container's process and its probes."""

    container: Object
    node: Node
    process: asyncio.subprocess.Process
    log: Path

    async def probe(self, kind: str) -> bool:
        """One gRPC probe as the container defines it."""
        grpc_probe = self.container[kind]["grpc"]
        address = f"127.0.0.1:{self.node.port(grpc_probe['port'])}"
        request = health_pb2.HealthCheckRequest(service=grpc_probe["service"])
        async with create_channel(address, RpcLimits()) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(request, timeout=self.container[kind]["timeoutSeconds"])
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    async def passes(self, kind: str, *, wanted: bool = True, within_s: float = 60.0) -> None:
        """Wait until a probe succeeds (or fails), as often as need be, while the process lives."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while await self.probe(kind) is not wanted:
            assert self.process.returncode is None, f"{kind}: ended\n{self.tail()}"
            assert loop.time() < deadline, f"{kind}: not {wanted} in time\n{self.tail()}"
            await asyncio.sleep(POLL_S)

    async def starts(self) -> None:
        """The startup probe within its budget."""
        await self.passes("startupProbe", within_s=startup_s(self.container))

    def terminate(self) -> None:
        """What kubelet sends after the preStop hook."""
        self.process.send_signal(signal.SIGTERM)

    async def ends(self, within_s: float) -> int:
        """The exit code."""
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-3000:]


@asynccontextmanager
async def running(
    node: Node, each: Template, folder: Path, command: Sequence[str] | None = None
) -> AsyncIterator[Running]:
    """A pod's main container; whatever happens, nothing of it is left. command: instead of its own,
    for containers whose command an operator makes."""
    container = each.containers[0]
    argv = list(command) if command else [node.path(word) for word in container["command"]]
    log = folder / f"{each.component}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=node.environment(container),
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Running(container, node, process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def run_once(node: Node, container: Object, folder: Path) -> tuple[int, str]:
    """Run a container to its end, an init step for instance. Returns exit code and output."""
    return await run_command(container["command"], node, container, folder)


async def run_command(
    command: Sequence[str], node: Node, container: Object, folder: Path
) -> tuple[int, str]:
    """Run a command inside a container: a hook, for instance. Returns exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *(node.path(word) for word in command),
        env=node.environment(container),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace")


def init_container(objects: Sequence[Object], component: str) -> Object:
    """The one init container of a pod."""
    (found,) = template(objects, component).pod["initContainers"]
    assert isinstance(found, dict)
    return found
