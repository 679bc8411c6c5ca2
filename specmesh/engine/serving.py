"""One service process: loads the model, opens the port, announces readiness, drains, exits.

Owns the order of start and end that draft and target service share. The port answers health checks
from the first moment; readiness follows the warm-up. On SIGTERM or SIGINT: not ready, no new
sessions, what runs may finish within the grace, exit status 0. Must not know what a role does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from protos.specmesh.v1 import session_pb2
from specmesh import event_loop
from specmesh.allocator import keep_freed_memory, keep_started_objects
from specmesh.config import DraftSettings, EngineSettings, ServerSettings, TargetSettings
from specmesh.engine.commands import Observers
from specmesh.engine.executor import Device, Executor, StepExecutor
from specmesh.engine.families import read_spec
from specmesh.engine.links import LinkOptions, LinkServer
from specmesh.engine.loading import (
    DTYPES,
    LoadedModel,
    device_of,
    dtype_of,
    is_fused,
    load_model,
)
from specmesh.engine.role import Role
from specmesh.engine.runner import Engine, EngineOptions, system_clocks
from specmesh.errors import InternalError, NotReady
from specmesh.logs import configure_logging
from specmesh.metrics_server import MetricsServer, watch_event_loop
from specmesh.rpc import (
    Health,
    RpcLimits,
    bind,
    create_server,
    enable_reflection,
)
from specmesh.service_metrics import ServiceMetrics
from specmesh.telemetry import Telemetry
from specmesh.tls import server_credentials
from specmesh.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# The worker thread computes in Python between passes; at the default of 5 ms a health check or an
# arriving frame would wait that long for the interpreter.
SWITCH_INTERVAL_S = 0.0005
END_OF_STREAMS_S = 2.0  # for the last frames to leave after the drain


class ServiceState:
    """What the servicer answers from. Empty until the model is loaded and warm."""

    def __init__(self) -> None:
        self._info: session_pb2.ModelInfo | None = None
        self._links: LinkServer | None = None

    def set_ready(self, info: session_pb2.ModelInfo, links: LinkServer) -> None:
        """From now on calls are served."""
        self._info, self._links = info, links

    @property
    def info(self) -> session_pb2.ModelInfo:
        """What GetInfo says. Raises NotReady."""
        if self._info is None:
            raise NotReady("the model is being loaded", retry_after_s=1.0)
        return self._info

    @property
    def links(self) -> LinkServer:
        """Where links are served. Raises NotReady."""
        if self._links is None:
            raise NotReady("the model is being loaded", retry_after_s=1.0)
        return self._links


def buckets_for(settings: EngineSettings, side: Any, max_context_len: int) -> Any:
    """Sizes of captured steps that cover what the settings allow. side: the role's device side."""
    from specmesh.engine.buckets import Buckets  # imports Triton

    return Buckets.covering(
        max_seqs=settings.max_sessions,
        max_query_len=side.max_query_len,
        max_long_rows=min(
            settings.token_budget, settings.prefill_chunk + settings.max_num_draft_tokens + 1
        ),
        max_context_len=max_context_len,
    )


def program_executor(
    side: Any, max_context_len: int, settings: EngineSettings
) -> Callable[[Device, Callable[[], int]], Executor]:
    """Makes the executor of captured steps."""
    from specmesh.engine.device_executor import ProgramExecutor  # imports Triton

    buckets = buckets_for(settings, side, max_context_len)
    return lambda device, clock_ns: ProgramExecutor(device, side, buckets, clock_ns)


@dataclass(frozen=True, slots=True)
class Side:
    """What tells the two services apart.

    service_name: full gRPC name. response_type: message of the link. register: adds the servicer to
    a server. make_role: builds the role for a loaded model, its metrics and, where the device
    decides, its device side, which make_device_side builds for a vocabulary and device. load_model
    and make_executor: what serves; a bench puts a device that computes nothing in their place.
    """

    name: str
    service_name: str
    response_type: type[Any]
    register: Callable[[ServiceState, grpc.aio.Server], None]
    make_role: Callable[[LoadedModel, ServiceMetrics, Any], Role]
    make_device_side: Callable[[int, torch.device, ServiceMetrics], Any]
    load_model: Callable[[EngineSettings], LoadedModel] = load_model
    make_executor: Callable[
        [Any, int, EngineSettings], Callable[[Device, Callable[[], int]], Executor]
    ] = program_executor


class ServiceProcess:
    """A draft or target service, from bind to exit."""

    def __init__(self, settings: DraftSettings | TargetSettings, side: Side) -> None:
        self._settings = settings
        self._side = side
        self._instance_id = settings.instance_id or f"{socket.gethostname()}-{os.getpid()}"
        self._state = ServiceState()
        self._health = Health([side.service_name])
        self._metrics = ServiceMetrics(side.name)
        self._servers: list[grpc.aio.Server] = []
        self._stopping = asyncio.Event()
        self._died = False
        self.ready = asyncio.Event()
        self.port = 0
        self.health_port = 0

    def stop(self) -> None:
        """Do what a signal does: drain and end."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until a signal. Raises ConfigError when it cannot start, InternalError when the
        engine died."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        settings = self._settings
        telemetry = Telemetry.create(self._side.name, settings.telemetry, self._instance_id)
        scraped = MetricsServer.start(settings.telemetry, self._metrics.registry)
        lag = asyncio.create_task(watch_event_loop(self._metrics.event_loop_lag))
        try:
            await self._listen()
            engine, links = await self._load(telemetry)
            keep_started_objects()
            await self._health.set_ready(ready=True)
            self.ready.set()
            logger.info("ready", extra={"port": self.port, "model": self._state.info.model})
            await self._stopping.wait()
            if self._died:
                await self._health.set_ready(ready=False)
                links.fail_all(NotReady("the engine of this replica died"))
                raise InternalError("the engine's worker died; see the log")
            await self._drain(engine, links)
        finally:
            lag.cancel()
            grace_s = END_OF_STREAMS_S if self._died else None
            await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
            if scraped is not None:
                scraped.close()
            await asyncio.to_thread(telemetry.shutdown)

    async def _listen(self) -> None:
        settings: ServerSettings = self._settings.server
        tls = settings.tls
        limits = rpc_limits(settings)
        server = create_server(limits, tls.allowed_peers)
        self._side.register(self._state, server)
        await self._health.attach(server)
        enable_reflection(server, [self._side.service_name])
        address = f"{settings.host}:{settings.port}"
        self.port = bind(server, address, server_credentials(tls))
        self._servers.append(server)
        if settings.health_port is not None:
            probes = create_server(limits)
            await self._health.attach(probes)
            self.health_port = bind(probes, f"{settings.host}:{settings.health_port}")
            self._servers.append(probes)
        for each in self._servers:
            await each.start()
        logger.info("listening", extra={"port": self.port})

    async def _load(self, telemetry: Telemetry) -> tuple[Engine, LinkServer]:
        loop = asyncio.get_running_loop()
        server = self._settings.server
        engine_settings: EngineSettings = self._settings.engine
        if runs_captured(engine_settings):
            await asyncio.to_thread(compile_for, engine_settings, self._side, self._metrics)
        model = await asyncio.to_thread(self._side.load_model, engine_settings)
        info = model.info
        info.instance_id = self._instance_id
        info.max_message_bytes = server.max_message_bytes
        clock_ns, unix_offset_ns = system_clocks()
        device_side, make_executor = None, None
        if model.device.decoder.is_fused:
            device_side = self._side.make_device_side(
                model.limits.vocab_size, model.device.decoder.device, self._metrics
            )
            make_executor = self._side.make_executor(
                device_side, model.limits.max_context_len, engine_settings
            )
        engine = Engine(
            model.device,
            self._side.make_role(model, self._metrics, device_side),
            model.limits,
            EngineOptions(
                token_budget=engine_settings.token_budget,
                prefill_chunk=engine_settings.prefill_chunk,
                max_waiting_commands=engine_settings.max_waiting_commands,
                session_idle_s=engine_settings.session_idle_s,
                warm_up_lens=(
                    engine_settings.prefill_chunk,
                    *range(1, engine_settings.max_num_draft_tokens + 2),
                ),
            ),
            Observers(telemetry, self._metrics, clock_ns, unix_offset_ns),
            make_executor or StepExecutor,
        )
        engine.on_death = lambda: _ignore_closed(loop, self._die)
        awake_s = event_loop.awake_s(
            engine_settings.busy_poll_ms, on_gpu=runs_captured(engine_settings)
        )
        if awake_s:
            await asyncio.to_thread(engine.start_on_loop, loop, awake_s)
        else:
            await asyncio.to_thread(engine.start)
        links = LinkServer(
            engine,
            LinkOptions(
                self._side.response_type, server.max_outbound_frames, server.max_message_bytes
            ),
        )
        self._state.set_ready(info, links)
        return engine, links

    def _die(self) -> None:
        """The engine cannot go on: end, so that whoever supervises this process starts it anew."""
        self._died = True
        self._stopping.set()

    async def _drain(self, engine: Engine, links: LinkServer) -> None:
        grace_s = self._settings.server.drain_grace_s
        logger.info("draining", extra={"grace_s": grace_s})
        await self._health.set_ready(ready=False)
        empty = asyncio.wrap_future(engine.drain())
        links.announce_drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(empty, grace_s)
        links.end_all()
        streams_s = min(END_OF_STREAMS_S, grace_s)
        await asyncio.gather(*(server.stop(streams_s) for server in self._servers))
        await asyncio.to_thread(engine.stop)


def compile_for(settings: EngineSettings, side: Side, metrics: ServiceMetrics) -> None:
    """Compile what the steps of this service need, before its weights take the memory."""
    from specmesh.engine.buckets import filtered_shapes, start_shapes  # imports Triton
    from specmesh.engine.compile_ahead import Job, compile_ahead

    spec = read_spec(settings.model, load_tokenizer(settings.model).vocab_size)
    device = device_of(settings)
    device_side = side.make_device_side(spec.vocab_size, device, metrics)
    context_len = settings.max_context_len or spec.max_context_len
    buckets = buckets_for(settings, device_side, context_len)
    compile_ahead(
        Job(
            spec=spec,
            dtype=DTYPES[dtype_of(settings)],
            weight_dtype=settings.weight_dtype,
            device=settings.device,
            page_size=settings.page_size,
            invariant=settings.invariant,
            make_sampler=device_side.make_sampler(),
            shapes=start_shapes(device_side, buckets) + filtered_shapes(device_side, buckets),
        )
    )


def runs_captured(settings: EngineSettings) -> bool:
    """Whether steps are captured on a GPU."""
    on_gpu = device_of(settings).type == "cuda" and torch.cuda.is_available()
    return on_gpu and is_fused(settings)


def _ignore_closed(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is going away
        loop.call_soon_threadsafe(action)


def rpc_limits(settings: ServerSettings) -> RpcLimits:
    """The server's limits as its settings say."""
    return RpcLimits(max_message_bytes=settings.max_message_bytes)


def host_threads(settings: EngineSettings) -> int | None:
    """Threads of torch on the CPU; None leaves torch's choice.

    Where a GPU computes, one: what the host is left with are a few rows of an audited round, and
    waking a pool as large as the machine for them stops every session of the engine.
    """
    if settings.num_threads is None and runs_captured(settings):
        return 1
    return settings.num_threads


def main(settings: DraftSettings | TargetSettings, side: Side) -> int:
    """Run a service process; return its exit status: 0 after a drain, 1 when the engine died.

    Raises ConfigError when it cannot start.
    """
    instance_id = settings.instance_id or f"{socket.gethostname()}-{os.getpid()}"
    configure_logging(side.name, instance_id, settings.telemetry.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    num_threads = host_threads(settings.engine)
    if num_threads is not None:
        torch.set_num_threads(num_threads)

    async def run() -> None:
        await ServiceProcess(settings, side).run()

    try:
        event_loop.run(run())
    except InternalError as error:
        logger.critical("ended on a fault", extra={"error": str(error)})
        return 1
    return 0
