"""The coordinator as a Ray Serve application, used for lifecycle only (DESIGN section 6).

Owns starting or joining Ray, the deployment's options and its end. Ray places, supervises, restarts
and drains replicas; no Ray call happens inside a round and Serve's proxies are off. What a replica
is lies in `coordinator/actor.py`. `build` is the import path for a Serve config on a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
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
STATUS_PERIOD_S = 0.2  # between two looks at what the replicas have come to


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
    """Hand the application to Serve; returns before its replicas are ready."""
    from ray import serve

    from coordinator.actor import bind_deployment

    serve.start(proxy_location="Disabled")
    # Not `serve.run`: it waits for the replicas, without end while no target is there.
    application = serve.RunTarget(bind_deployment(settings), name=APP_NAME, route_prefix=None)
    serve.run_many([application], wait_for_applications_running=False)


def is_running() -> bool:
    """Whether every replica is ready. Raises ConfigError when one cannot start."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    if application is None:
        raise ConfigError("no replica could start: Serve does not know the application")
    if application.status == "DEPLOY_FAILED":
        raise ConfigError(f"no replica could start: {_cause(application)}")
    return bool(application.status == "RUNNING")


def _cause(application: Any) -> str:
    """What the constructor raised: the last line that names one of our errors, else Serve's own."""
    deployment = application.deployments.get(DEPLOYMENT)
    lines = deployment.message.splitlines() if deployment is not None else []
    own = [line for line in lines if line.startswith("specmesh.errors.")]
    return own[-1].partition(": ")[2] if own else str(application.message)


async def run_on_ray(
    settings: CoordinatorSettings, stopping: asyncio.Event, on_started: Callable[[], None]
) -> None:
    """Start Ray and the application, wait for `stopping`, drain, end Ray.

    `stopping` counts from the first moment: what is being started then is ended as it is.
    on_started: called when Ray runs, before the application does. Raises ConfigError.
    """
    # Not on the main thread: there Ray would take the signals.
    await asyncio.to_thread(start_ray, settings.ray)
    on_started()
    try:
        if not stopping.is_set():
            await asyncio.to_thread(deploy, settings)
            await _wait_running(stopping)
            if not stopping.is_set():
                logger.info("ready on ray", extra={"replicas": settings.ray.num_replicas})
            await stopping.wait()
            await _undeploy(settings.server.drain_grace_s + 2 * EXTRA_DRAIN_S)
    finally:
        await asyncio.to_thread(_end_ray, settings.ray)


async def _wait_running(stopping: asyncio.Event) -> None:
    """Until every replica is ready, or `stopping`. Raises ConfigError."""
    while not stopping.is_set() and not await asyncio.to_thread(is_running):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), STATUS_PERIOD_S)


async def _undeploy(limit_s: float) -> None:
    """Serve ends the replicas; each drains in its own time, bounded by the deployment's limit.

    limit_s: more than that limit. Serve's own wait ends after a minute, whatever still runs.
    """
    from ray import serve

    await asyncio.to_thread(serve.delete, APP_NAME, _blocking=False)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while await asyncio.to_thread(_is_deployed):
                await asyncio.sleep(STATUS_PERIOD_S)


def _is_deployed() -> bool:
    from ray import serve

    return APP_NAME in serve.status().applications


def _end_ray(settings: RaySettings) -> None:
    import ray
    from ray import serve

    untyped: Any = serve
    if settings.address is None:
        untyped.shutdown()
    ray.shutdown()
