"""The coordinator as a Ray Serve application, used for lifecycle only (DESIGN section 6).

Owns starting or joining Ray, the deployment's options and its end. Ray places, supervises, restarts
and drains replicas; no Ray call happens inside a round and Serve's proxies are off. What a replica
is lies in `coordinator/actor.py`. `build` is the import path for a Serve config on a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specmesh.config import CoordinatorSettings, RaySettings, settings_from_environment
from specmesh.errors import ConfigError
from specmesh.rpc import GRPC_ENVIRONMENT

logger = logging.getLogger(__name__)

APP_NAME = "specmesh"
DEPLOYMENT = "coordinator"
# One coordinator per node that offers the slot; a local instance offers as many as it needs.
SLOT = "coordinator_slot"
# Read by Ray when it is first imported and by every process that it starts.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",  # the store is unused: a folder on disk will do
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    # Ray gives its workers the lowest priority but four: beside a busy engine a round would wait.
    "RAY_worker_niceness": "0",
    # One loop for Serve and the replica, and uvloop's: all loops that use grpc.aio share one
    # completion queue, so with two of them each event wakes both and may change threads.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve makes a gRPC server before a replica's own code is imported.
    **GRPC_ENVIRONMENT,
}
EXTRA_DRAIN_S = 10.0  # beyond the grace, for streams and exporters to close


def set_ray_environment() -> None:
    """Make Ray silent, local and small; what the operator has set stays."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def build(settings: dict[str, Any]) -> Any:
    """The Serve application of a Serve config: `import_path: coordinator.app:build`.

    settings: its `args`; the environment of the node that builds the application wins over them.
    Raises ConfigError.
    """
    set_ray_environment()
    from coordinator.actor import bind_deployment

    return bind_deployment(settings_from_environment(CoordinatorSettings, settings))


def start_ray(settings: RaySettings) -> None:
    """Start a small local Ray, or join the one at `address`. Raises ConfigError."""
    set_ray_environment()
    import ray

    common: dict[str, Any] = {
        "namespace": APP_NAME,
        "log_to_driver": True,
        "logging_level": logging.WARNING,
        "configure_logging": False,
    }
    try:
        if settings.address is not None:
            ray.init(address=settings.address, **common)
            return
        folder = settings.temp_dir or Path(tempfile.gettempdir()) / f"specmesh-ray-{os.getuid()}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ray.init(
            address="local",  # never another instance that happens to run here
            num_cpus=max(1, settings.num_replicas),
            num_gpus=0,
            resources={SLOT: settings.num_replicas},
            include_dashboard=False,
            object_store_memory=settings.object_store_bytes,
            _temp_dir=str(folder),
            _plasma_directory=str(folder),
            **common,
        )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot start Ray: {error}", field="ray") from error


def deploy(settings: CoordinatorSettings) -> None:
    """Run the application; returns when its replicas are ready. Raises ConfigError."""
    from ray import serve

    from coordinator.actor import bind_deployment

    serve.start(proxy_location="Disabled")
    try:
        serve.run(bind_deployment(settings), name=APP_NAME, route_prefix=None, blocking=False)
    except RuntimeError as error:
        raise ConfigError(f"no replica could start: {_cause(error)}") from error


def _cause(error: RuntimeError) -> str:
    """What the constructor raised: the last line that names one of our errors, else Serve's own."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    deployment = application.deployments.get(DEPLOYMENT) if application is not None else None
    lines = deployment.message.splitlines() if deployment is not None else []
    own = [line for line in lines if line.startswith("specmesh.errors.")]
    return own[-1].partition(": ")[2] if own else str(error)


async def run_on_ray(
    settings: CoordinatorSettings, stopping: asyncio.Event, on_started: Callable[[], None]
) -> None:
    """Start Ray and the application, wait for `stopping`, drain, end Ray.

    on_started: called when Ray runs, before the application does.
    """
    # Not on the main thread: there Ray would take the signals.
    await asyncio.to_thread(start_ray, settings.ray)
    on_started()
    try:
        await asyncio.to_thread(deploy, settings)
        logger.info("ready on ray", extra={"replicas": settings.ray.num_replicas})
        await stopping.wait()
        await asyncio.to_thread(_undeploy)
    finally:
        await asyncio.to_thread(_end_ray, settings.ray)


def _undeploy() -> None:
    """Serve ends the replicas; each drains in its own time, bounded by the deployment's limit."""
    from ray import serve

    serve.delete(APP_NAME, _blocking=True)


def _end_ray(settings: RaySettings) -> None:
    import ray
    from ray import serve

    untyped: Any = serve
    if settings.address is None:
        untyped.shutdown()
    ray.shutdown()
