"""`python -m coordinator [--config FILE] [--section.key value] [--no-ray] [--print-config]`.

Starts a small local Ray (or joins one) and the coordinator on it; `--no-ray` runs the same replica
in this process. SIGTERM and SIGINT drain. Exit status: 0 after a drain, 2 for a configuration that
cannot work or a model that does not match.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from coordinator.replica import CoordinatorReplica, check_files
from specmesh import event_loop
from specmesh.config import CoordinatorSettings, load_settings
from specmesh.errors import ConfigError, ModelMismatch
from specmesh.logs import configure_logging

logger = logging.getLogger(__name__)


async def _run_here(settings: CoordinatorSettings, stopping: asyncio.Event) -> None:
    replica = CoordinatorReplica(settings)
    starting = asyncio.ensure_future(replica.start())
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # told to stop before any target was there
        starting.cancel()
        await asyncio.wait({starting})
        return
    await starting
    await stopped
    await replica.drain()


async def _serve(settings: CoordinatorSettings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listen_for_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)

    listen_for_signals()
    if settings.ray.enabled:
        from coordinator.app import run_on_ray

        if settings.ray.address is None:  # else replicas may read the files of other machines
            check_files(settings)
        # Again once Ray runs: its own handlers print a stack trace and end the process.
        await run_on_ray(settings, stopping, listen_for_signals)
    else:
        await _run_here(settings, stopping)


def main(argv: list[str]) -> int:
    """Run a coordinator with these arguments; return the exit status."""
    flags = ["--ray.enabled=false" if flag == "--no-ray" else flag for flag in argv]
    try:
        settings = load_settings(CoordinatorSettings, flags)
        instance_id = settings.instance_id or f"{socket.gethostname()}-{os.getpid()}"
        configure_logging("coordinator", instance_id, settings.telemetry.log_level)
        event_loop.run(_serve(settings))
    except (ConfigError, ModelMismatch) as error:
        sys.stderr.write(f"coordinator: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
