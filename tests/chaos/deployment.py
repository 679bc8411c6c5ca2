"""Two replicas of each service as real processes, with a proxy on every wire between them."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specmesh.ports import unused_port
from tests.chaos.load import ClientProcess
from tests.chaos.processes import Replica
from tests.chaos.proxy import Proxy
from tests.e2e.tiny_pair import write_pair

QUIET_S = 30.0
DRAFT_DEADLINE_S = 0.5
TARGET_DEADLINE_S = 2.0
# Waits of the coordinator: those that ship are for models that take a hundred times longer.
COORDINATOR_FLAGS = (
    "--no-ray",
    *("--links.draft-deadline-s", str(DRAFT_DEADLINE_S)),
    *("--links.target-deadline-s", str(TARGET_DEADLINE_S)),
    *("--links.connect-timeout-s", "10"),
    *("--links.reconnect-max-s", "0.5"),
    *("--server.drain-grace-s", "30"),
)
ENGINE_FLAGS = ("--engine.num-threads", "1", "--engine.max-sessions", "128")
NUM_REPLICAS = 2
ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Deployment:
    """Everything that runs. proxies: by the two ends' names, "coordinator0-target1"."""

    folder: Path
    replicas: dict[str, Replica] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    clients: list[ClientProcess] = field(default_factory=list)
    metrics_ports: dict[str, int] = field(default_factory=dict)

    @property
    def target_dir(self) -> Path:
        """The target's model."""
        return self.folder / "models" / "target"

    def of_side(self, side: str) -> list[Replica]:
        """The replicas of one service."""
        return [each for each in self.replicas.values() if each.side == side]

    def pids(self) -> dict[str, int]:
        """Process ids of services and clients, by name."""
        everyone = [*self.replicas.values(), *self.clients]
        return {each.name: each.pid for each in everyone}

    def scrape(self, name: str) -> str:
        """The metrics page of a replica."""
        url = f"http://127.0.0.1:{self.metrics_ports[name]}/metrics"
        with urllib.request.urlopen(url, timeout=5.0) as response:
            content: bytes = response.read()
        return content.decode()

    def value(self, name: str, metric: str) -> float:
        """The sum of a metric's samples at a replica. metric: name, with labels where wanted."""
        labels = "" if metric.endswith("}") else "(?:{[^}]*})?"
        pattern = re.compile(rf"^{re.escape(metric)}{labels} (\S+)$", re.MULTILINE)
        return sum(float(found) for found in pattern.findall(self.scrape(name)))

    async def wait_quiet(self) -> None:
        """Until no replica holds a session, a page or a request. Raises AssertionError."""
        wanted = [
            *((each.name, "specmesh_sessions") for each in self.of_side("target")),
            *((each.name, "specmesh_sessions") for each in self.of_side("draft")),
            *((each.name, "specmesh_requests_running") for each in self.of_side("coordinator")),
            *((each.name, "specmesh_requests_waiting") for each in self.of_side("coordinator")),
        ]
        left: dict[tuple[str, str], float] = {}
        for _ in range(int(QUIET_S / 0.2)):
            found = {each: await asyncio.to_thread(self.value, *each) for each in wanted}
            left = {each: number for each, number in found.items() if number}
            if not left:
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"still held {QUIET_S:g} s after the last request: {left}")


@asynccontextmanager
async def deployed(
    folder: Path,
    num_clients: int = 2,
    *,
    num_replicas: int = NUM_REPLICAS,
    coordinator_flags: Sequence[str] = (),
    client_flags: Sequence[Sequence[str]] = ((), ()),
) -> AsyncIterator[Deployment]:
    """Start everything and wait until it is ready; afterwards nothing of it is left.

    client_flags: of each client in turn.
    """
    deployment = Deployment(folder)
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    # Whatever ends this process, none that it started may outlive it.
    for number in ENDING:
        loop.add_signal_handler(number, task.cancel)
    models = folder / "models"
    if not models.exists():
        write_pair(models)
    try:
        for side in ("target", "draft"):
            for index in range(num_replicas):
                _add(deployment, f"{side}{index}", ["--engine.model", str(models / side)])
        for index in range(num_replicas):
            name = f"coordinator{index}"
            flags = ["--tokenizer", str(models / "target")]
            for side in ("target", "draft"):
                proxies = [await _join(deployment, name, each) for each in deployment.of_side(side)]
                flags += [f"--{side}s", ",".join(proxy.address for proxy in proxies)]
            _add(deployment, name, [*flags, *coordinator_flags])
        for index in range(num_clients):
            name = f"client{index}"
            proxies = [
                await _join(deployment, name, each) for each in deployment.of_side("coordinator")
            ]
            addresses = [proxy.address for proxy in proxies]
            first = index % num_replicas
            turned = addresses[first:] + addresses[:first]
            flags = client_flags[index % len(client_flags)]
            deployment.clients.append(ClientProcess(name, turned, folder / f"{name}.log", flags))
        for replica in deployment.replicas.values():
            await replica.start()
        for replica in deployment.replicas.values():
            await replica.wait_ready()
        for client in deployment.clients:
            await client.start()
        yield deployment
    finally:
        for client in deployment.clients:
            await client.end()
        for replica in deployment.replicas.values():
            await replica.end()
        for proxy in deployment.proxies.values():
            await proxy.close()
        for number in ENDING:
            loop.remove_signal_handler(number)


def _add(deployment: Deployment, name: str, flags: Sequence[str]) -> None:
    side = name.rstrip("0123456789")
    module = side if side == "coordinator" else f"{side}_service"
    deployment.metrics_ports[name] = unused_port()
    shared = ("--telemetry.metrics-port", str(deployment.metrics_ports[name]))
    own = COORDINATOR_FLAGS if side == "coordinator" else ENGINE_FLAGS
    log_path = deployment.folder / f"{name}.log"
    deployment.replicas[name] = Replica(name, module, [*own, *flags, *shared], log_path)


async def _join(deployment: Deployment, name: str, upstream: Replica) -> Proxy:
    proxy = Proxy(f"{name}-{upstream.name}", upstream.port)
    await proxy.start()
    deployment.proxies[proxy.name] = proxy
    return proxy
