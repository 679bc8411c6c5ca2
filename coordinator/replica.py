"""One coordinator replica, from bind to exit, with or without Ray around it.

Owns the order of start and end: the port answers health from the first moment, readiness follows
the first target's handshake; a drain stops admission, lets requests finish within the grace, ends
the rest with NOT_READY (clients resume elsewhere), then closes links and exporters. Everything runs
on the event loop that `start` is called on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from coordinator.admission import Admission
from coordinator.fleet import Fleet
from coordinator.policy import SharedPolicy
from coordinator.service import SERVICE_NAME, GenerationServicer, Parts
from coordinator.tenants import Tenants
from protos.specmesh.v1 import generation_pb2_grpc
from specmesh.allocator import keep_freed_memory, keep_started_objects
from specmesh.config import CoordinatorSettings
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.errors import ConfigError, NotReady
from specmesh.metrics_server import MetricsServer, watch_event_loop
from specmesh.rpc import (
    Health,
    RpcLimits,
    bind,
    create_server,
    enable_reflection,
)
from specmesh.telemetry import Telemetry
from specmesh.tls import channel_credentials, server_credentials
from specmesh.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

END_OF_STREAMS_S = 2.0  # for the last messages to leave after the drain
KEYS_PERIOD_S = 10.0  # between two looks at the file of API keys; a Secret takes a minute anyway


def check_files(settings: CoordinatorSettings) -> None:
    """Read the files that a replica reads at its start, and keep nothing. Raises ConfigError."""
    load_tokenizer(settings.tokenizer)
    Tenants.load(settings.api_keys)
    server_credentials(settings.server.tls)
    channel_credentials(settings.link_tls)


class CoordinatorReplica:
    """To be started once and drained once."""

    def __init__(self, settings: CoordinatorSettings, tokenizer: Tokenizer | None = None) -> None:
        """Loads the tokenizer unless it is given, opens nothing. Raises ConfigError."""
        self._settings = settings
        self._instance_id = settings.instance_id or f"{socket.gethostname()}-{os.getpid()}"
        self._tokenizer = tokenizer or load_tokenizer(settings.tokenizer)
        self.tenants = Tenants.load(settings.api_keys)
        self.metrics = CoordinatorMetrics()
        self._health = Health([SERVICE_NAME])
        self._admission = Admission(settings.admission, self.tenants.limits_of)
        self.metrics.running.set_function(lambda: self._admission.num_running)
        self.metrics.waiting.set_function(lambda: self._admission.num_waiting)
        self._servers: list[grpc.aio.Server] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decide")
        self._closing = contextlib.AsyncExitStack()
        self._fleet: Fleet | None = None
        self._servicer: GenerationServicer | None = None
        self._is_draining = False
        self.port = 0

    @property
    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        return not self._is_draining and self._fleet is not None and self._fleet.is_ready

    async def start(self) -> None:
        """Listen, connect, announce readiness.

        Raises ConfigError (a taken port, unreadable files) or ModelMismatch (a replica with another
        model or vocabulary); everything opened so far is closed then.
        """
        keep_freed_memory()  # decisions made here, and audits, work on rows of the vocabulary
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings = self._settings
        telemetry = Telemetry.create("coordinator", settings.telemetry, self._instance_id)
        self._closing.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        self._closing.callback(self._executor.shutdown, wait=False)
        scraped = MetricsServer.start(settings.telemetry, self.metrics.registry)
        if scraped is not None:
            self._closing.callback(scraped.close)
        lag = asyncio.create_task(watch_event_loop(self.metrics.event_loop_lag))
        self._closing.callback(lag.cancel)
        keys = asyncio.create_task(self._watch_keys())
        self._closing.callback(keys.cancel)
        fleet = Fleet(
            settings.targets,
            settings.drafts,
            settings.links,
            # Sessions are scoped by this name; a restarted process must not meet its old ones.
            f"{self._instance_id}-{os.urandom(4).hex()}",
            self._tokenizer,
            self.metrics,
            limits=RpcLimits(max_message_bytes=settings.server.max_message_bytes),
            credentials=(
                partial(channel_credentials, settings.link_tls)
                if settings.link_tls.enabled
                else None
            ),
        )
        self._closing.push_async_callback(fleet.close)
        self._servicer = GenerationServicer(
            Parts(
                settings,
                self._tokenizer,
                fleet,
                self._admission,
                SharedPolicy(settings.speculation.plain_steps),
                telemetry,
                self.metrics,
                self.tenants,
                self._executor,
            )
        )
        await self._listen(self._servicer)
        await fleet.start()
        self._fleet = fleet
        keep_started_objects()
        await self._health.set_ready(ready=True)
        logger.info("ready", extra={"port": self.port, "model": settings.model_name})

    async def _watch_keys(self) -> None:
        """Take over a changed key file; one that cannot be used changes nothing."""
        while True:
            await asyncio.sleep(KEYS_PERIOD_S)
            try:
                if self.tenants.refresh():
                    logger.info("API keys read again")
            except ConfigError as error:
                logger.error("API keys stay as they were", extra={"reason": str(error)})

    async def _listen(self, servicer: GenerationServicer) -> None:
        settings = self._settings.server
        limits = RpcLimits(max_message_bytes=settings.max_message_bytes)
        server = create_server(limits, settings.tls.allowed_peers)
        add: Any = generation_pb2_grpc.add_GenerationServiceServicer_to_server  # untyped
        add(servicer, server)
        await self._health.attach(server)
        enable_reflection(server, [SERVICE_NAME])
        credentials = server_credentials(settings.tls)
        self.port = bind(server, f"{settings.host}:{settings.port}", credentials)
        self._servers.append(server)
        if settings.health_port is not None:
            probes = create_server(limits)
            await self._health.attach(probes)
            bind(probes, f"{settings.host}:{settings.health_port}")
            self._servers.append(probes)
        for each in self._servers:
            await each.start()
        logger.info("listening", extra={"port": self.port})

    async def drain(self, grace_s: float | None = None) -> None:
        """Stop admitting, let requests finish within the grace, then stop. Idempotent."""
        if self._is_draining:
            return
        self._is_draining = True
        grace = self._settings.server.drain_grace_s if grace_s is None else grace_s
        logger.info("draining", extra={"grace_s": grace})
        self._admission.close()
        await self._health.set_ready(ready=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._admission.wait_idle()
        if self._servicer is not None:
            self._servicer.cancel_all(
                NotReady("this coordinator is going away; resume elsewhere", retry_after_s=0.1)
            )
        await self.stop()

    async def stop(self) -> None:
        """Close everything now."""
        self._is_draining = True
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(END_OF_STREAMS_S) for server in servers))
        await self._closing.aclose()
