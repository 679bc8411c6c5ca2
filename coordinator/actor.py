"""The Ray actor that is a coordinator replica: a thin shell around `CoordinatorReplica`.

Owns nothing but the translation of Ray Serve's life cycle into start, health and drain. Serve calls
the constructor on the actor's event loop (its own too, see `RAY_ENVIRONMENT`, and not on the main
thread: no signals there), the health check every few seconds, and the destructor when the replica
is to go.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

from ray import serve

from coordinator.app import DEPLOYMENT, EXTRA_DRAIN_S, SLOT
from coordinator.replica import CoordinatorReplica
from specmesh.config import CoordinatorSettings
from specmesh.errors import NotReady
from specmesh.logs import configure_logging

DRAIN_FILE_PERIOD_S = 0.25  # how soon a replica notices that it is to drain


class CoordinatorActor:
    """One replica. Its gRPC port serves clients directly; no call of theirs passes through Ray."""

    async def __init__(self, settings_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        settings = CoordinatorSettings.model_validate_json(settings_json)
        instance_id = settings.instance_id or f"{socket.gethostname()}-{os.getpid()}"
        configure_logging("coordinator", instance_id, settings.telemetry.log_level)
        self._replica = CoordinatorReplica(settings)
        self._watch: asyncio.Task[None] | None = None
        if settings.ray.drain_file is not None:  # watched from here: a start waits for a target
            self._watch = asyncio.create_task(self._drain_on(settings.ray.drain_file))
        await self._replica.start()

    async def _drain_on(self, file: Path) -> None:
        """Drain once the file is there, then remove it. The pod is going: the actor just stays."""
        while not file.exists():
            await asyncio.sleep(DRAIN_FILE_PERIOD_S)
        await self._replica.drain()
        file.unlink(missing_ok=True)

    async def check_health(self) -> None:
        """Serve replaces a replica whose check raises. Missing targets are no reason to."""
        if not self._replica.port:
            raise NotReady("the coordinator does not listen")

    async def port(self) -> int:
        """Where clients connect."""
        return self._replica.port

    async def __del__(self) -> None:
        """Drain: running streams go on to their end, or to the end of the grace."""
        await self._replica.drain()


def bind_deployment(settings: CoordinatorSettings) -> Any:
    """The Serve application of these settings."""
    ray_settings = settings.ray
    deployment: Any = serve.deployment(
        CoordinatorActor,
        name=DEPLOYMENT,
        num_replicas=ray_settings.num_replicas,
        max_ongoing_requests=16,
        # A constructor fails on what time does not heal: a taken port, another model.
        max_constructor_retry_count=1,
        ray_actor_options={
            "num_cpus": ray_settings.num_cpus,
            "num_gpus": 0,
            "resources": {SLOT: 1},
        },
        health_check_period_s=ray_settings.health_check_period_s,
        health_check_timeout_s=max(10.0, ray_settings.health_check_period_s),
        graceful_shutdown_timeout_s=settings.server.drain_grace_s + EXTRA_DRAIN_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return deployment.bind(settings.model_dump_json())
