"""gRPC plumbing of every process: servers, channels and health.

Owns the channel and server options: explicit limits, keepalive, no proxies. Knows no message of the
product; what its errors become on the wire is in `specmesh/wire_errors.py`. Options and their
reasons: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specmesh.errors import ConfigError
from specmesh.wire_errors import ErrorMapping

# gRPC reads this when the first channel or server is made. Without its event engine, the thread
# that waits for completions polls the sockets itself: one change of threads less a message (an echo
# after 5 idle ms: 0.41 in place of 0.54 ms). What the operator has set stays.
GRPC_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}
for _name, _value in GRPC_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

aio_health: Any = health.aio  # type: ignore[attr-defined]  # missing from its stub

MAX_METADATA_BYTES = 32 * 1024

# Health names beside the services' own: probes ask for these two.
READINESS = "readiness"
LIVENESS = "liveness"

# Metadata of a link call: the coordinator's name for itself. Links of equal value share sessions,
# so that a second stream can carry large rows; without it a link's sessions are its own.
LINK_GROUP_KEY = "specmesh-link-group"

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Explicit limits of a server or channel. gRPC's own defaults (4 MiB) are not relied upon.

    max_message_bytes caps both directions: a memory guard, so never -1. keepalive_*: a peer that
    answers no ping within keepalive_timeout_s is gone. connect_timeout_s: of one attempt at least,
    so that far peers and TLS have time. max_concurrent_rpcs is a backstop only; admission is the
    services' own.
    """

    max_message_bytes: int = 64 * 1024 * 1024
    keepalive_time_s: float = 20.0
    keepalive_timeout_s: float = 5.0
    max_concurrent_rpcs: int = 4096
    connect_timeout_s: float = 2.0
    max_reconnect_backoff_s: float = 2.0


def _shared_options(limits: RpcLimits) -> Options:
    return [
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", int(limits.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_timeout_s * 1000)),
        # Pings that gRPC sends for reasons of its own have their own limit, of a minute, and put
        # the keepalive off while they are out.
        ("grpc.http2.ping_timeout_ms", int(limits.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limits: RpcLimits) -> Options:
    """Options of a server: it tolerates the channels' pings and never shares its port."""
    return [
        *_shared_options(limits),
        # Strikes end in GOAWAY too_many_pings, which kills every call in flight.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a silent second listener
    ]


def channel_options(limits: RpcLimits) -> Options:
    """Options of a channel: no proxy from the environment, quick reconnects, unary retries."""
    retry = {
        "maxAttempts": 3,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    # Only idempotent unary calls: a stream is committed at its first message.
    names = [
        {"service": f"specmesh.v1.{service}", "method": "GetInfo"}
        for service in ("DraftService", "TargetService", "GenerationService")
    ]
    service_config = {"methodConfig": [{"name": names, "retryPolicy": retry}]}
    return [
        *_shared_options(limits),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # What an attempt has at least, TLS and round trips included; one that is refused ends at
        # once all the same.
        ("grpc.min_reconnect_backoff_ms", int(limits.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(limits.max_reconnect_backoff_s * 1000)),
        ("grpc.service_config", json.dumps(service_config)),
    ]


def create_channel(
    address: str, limits: RpcLimits, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """A channel to `host:port`; plaintext unless credentials are given. The caller closes it.

    Channels made with equal options share a connection pool of subchannels within a process.
    """
    options = channel_options(limits)
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


def create_server(limits: RpcLimits, allowed_peers: Sequence[str] = ()) -> grpc.aio.Server:
    """A server whose specmesh methods may raise `SpecmeshError`: it reaches the caller as such.

    allowed_peers: identities (SPIFFE ids) that may call specmesh methods; empty: everyone.
    """
    return grpc.aio.server(
        interceptors=(ErrorMapping(allowed_peers),),
        options=server_options(limits),
        maximum_concurrent_rpcs=limits.max_concurrent_rpcs,
    )


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Listen on `host:port` (port 0: any free one) and return the port.

    Raises ConfigError when the address cannot be bound.
    """
    try:
        if credentials is not None:
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except (RuntimeError, ValueError) as error:
        why = _refusal(address) or str(error)
        raise ConfigError(f"cannot listen on {address}: {why}") from error
    if port == 0:
        raise ConfigError(f"cannot listen on {address}: {_refusal(address) or 'gRPC refuses it'}")
    return int(port)


def _refusal(address: str) -> str | None:
    """What the system says against listening on `host:port`; gRPC keeps that to itself."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in found:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
    except OSError as error:
        return error.strerror
    return None


class Health:
    """grpc.health.v1 of one process: `liveness` at once, everything else when it is ready."""

    def __init__(self, services: Sequence[str]) -> None:
        """`services`: full names, for instance "specmesh.v1.DraftService"."""
        self._servicer = aio_health.HealthServicer()
        self._names = ("", READINESS, *services)

    async def attach(self, server: grpc.aio.Server) -> None:
        """Serve on `server` (several servers may share one Health). Ready is false at first."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(ready=False)

    async def set_ready(self, *, ready: bool) -> None:
        """Announce readiness, or its end (draining, a lost device). Liveness stays."""
        serving = health_pb2.HealthCheckResponse
        status = serving.SERVING if ready else serving.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)


def enable_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Let grpcurl and the like list `services`, health and reflection itself."""
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
