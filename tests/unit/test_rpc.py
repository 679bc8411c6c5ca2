"""Errors cross gRPC and link frames as the class that was raised; limits and ports are explicit."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.specmesh.v1 import target_pb2, target_pb2_grpc
from specmesh import rpc, tls, wire_errors
from specmesh.errors import (
    BY_REASON,
    ConfigError,
    InternalError,
    InvalidRequest,
    NotReady,
    PrefixMismatch,
    SpecmeshError,
    TooBusy,
)
from tests.rpc.test_credentials import Authority

SERVICE = "specmesh.v1.TargetService"
LIMITS = rpc.RpcLimits(max_message_bytes=256 * 1024)


class Raising(target_pb2_grpc.TargetServiceServicer):
    """Raises what it is told to, from a unary method and from a stream."""

    error: Exception = InternalError("nothing set")

    async def GetInfo(self, request, context):
        raise self.error

    async def Link(
        self, request_iterator, context
    ) -> AsyncIterator[target_pb2.TargetServiceLinkResponse]:
        yield target_pb2.TargetServiceLinkResponse()
        raise self.error


@pytest.fixture
async def service():
    servicer = Raising()
    server = rpc.create_server(LIMITS)
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    health = rpc.Health([SERVICE])
    await health.attach(server)
    rpc.enable_reflection(server, [SERVICE])
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    channel = rpc.create_channel(f"127.0.0.1:{port}", LIMITS)
    yield servicer, channel, health, port
    await channel.close()
    await server.stop(None)


def make(cls: type[SpecmeshError]) -> SpecmeshError:
    if cls is PrefixMismatch:
        return PrefixMismatch(
            "expected 3, got 4",
            field="prefix",
            retry_after_s=0.25,
            confirmed_len=7,
            page_digests=((4, 1 << 63), (7, 5)),
        )
    return cls("expected 3, got 4 é", field="sampling.top_p", retry_after_s=0.25)


@pytest.mark.parametrize("reason", sorted(BY_REASON))
async def test_every_error_class_crosses_a_unary_call_and_a_stream(reason, service) -> None:
    """Each class of the table arrives as itself, with status, field and retry delay."""
    servicer, channel, _, _ = service
    sent = servicer.error = make(BY_REASON[reason])
    stub = target_pb2_grpc.TargetServiceStub(channel)
    stream = stub.Link(iter(()))
    assert await stream.read() == target_pb2.TargetServiceLinkResponse()
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        await stream.read()
    call = channel.unary_unary("/specmesh.v1.TargetService/GetInfo", _registered_method=False)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await call(b"")
    for caught in (unary, streamed):
        assert caught.value.code() is grpc.StatusCode[sent.status]
        received = wire_errors.error_from_rpc(caught.value)
        assert type(received) is type(sent)
        assert (received.message, received.field) == (sent.message, sent.field)
        assert received.retry_after_s == sent.retry_after_s
        if isinstance(sent, PrefixMismatch):
            assert received.confirmed_len == 7


@pytest.mark.parametrize("reason", sorted(BY_REASON))
def test_every_error_class_crosses_a_link_frame(reason) -> None:
    """CommandError is a lossless carrier of every class, page digests included."""
    sent = make(BY_REASON[reason])
    received = wire_errors.error_from_message(wire_errors.error_to_message(sent))
    assert type(received) is type(sent)
    assert vars(received) == vars(sent)


def test_an_unknown_reason_is_an_internal_error_that_names_it() -> None:
    """A newer peer's reason is not guessed at."""
    message = wire_errors.error_to_message(TooBusy("full"))
    message.reason = "FROM_THE_FUTURE"
    received = wire_errors.error_from_message(message)
    assert type(received) is InternalError
    assert "FROM_THE_FUTURE" in received.message


async def test_a_bug_becomes_internal_without_its_text(service) -> None:
    """An exception that is no SpecmeshError reaches the caller as INTERNAL, text withheld."""
    servicer, channel, _, _ = service
    servicer.error = ZeroDivisionError("secret path")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target_pb2_grpc.TargetServiceStub(channel).GetInfo(
            target_pb2.TargetServiceGetInfoRequest()
        )
    received = wire_errors.error_from_rpc(caught.value)
    assert type(received) is InternalError
    assert "secret" not in str(received)
    assert "ZeroDivisionError" in str(received)


async def test_an_absent_peer_is_not_ready() -> None:
    """A bare UNAVAILABLE from gRPC itself maps to NotReady (retry elsewhere)."""
    channel = rpc.create_channel("127.0.0.1:1", LIMITS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target_pb2_grpc.TargetServiceStub(channel).GetInfo(
            target_pb2.TargetServiceGetInfoRequest()
        )
    assert type(wire_errors.error_from_rpc(caught.value)) is NotReady
    await channel.close()


async def test_a_message_over_the_limit_is_refused(service) -> None:
    """The explicit cap acts: a frame above max_message_bytes fails its call."""
    _, channel, _, _ = service
    frame = target_pb2.TargetServiceLinkRequest()
    frame.commands.add(session_id="x" * (LIMITS.max_message_bytes + 1))
    stream = target_pb2_grpc.TargetServiceStub(channel).Link(iter((frame,)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert type(wire_errors.error_from_rpc(caught.value)) is InvalidRequest  # never retry


@pytest.mark.parametrize("content", [b"\xff" * 10, b"\x0b" * 5000])
async def test_a_request_that_cannot_be_parsed_is_invalid(content, service, caplog) -> None:
    """Garbage gets INVALID_ARGUMENT, from the caller's fault, and no traceback fills the log."""
    _, channel, _, _ = service
    call = channel.unary_unary("/specmesh.v1.TargetService/GetInfo", _registered_method=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(content)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    received = wire_errors.error_from_rpc(caught.value)
    assert type(received) is InvalidRequest
    assert "cannot be parsed" in received.message
    assert caplog.records == []


def test_long_messages_are_cut_at_a_character() -> None:
    """Details stay within 4 KB of UTF-8 and remain decodable."""
    status = wire_errors.status_of(TooBusy("é" * 10_000, field="f" * 10_000))
    assert status.ByteSize() <= 4096
    assert status.message.endswith("...")
    assert set(status.message.removesuffix("...")) == {"é"}


async def test_a_taken_port_is_named(service) -> None:
    """A second server on the port is a ConfigError with the address, not a silent listener."""
    *_, port = service
    second = rpc.create_server(LIMITS)
    taken = os.strerror(errno.EADDRINUSE)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: {taken}"):
        rpc.bind(second, f"127.0.0.1:{port}")


async def test_an_address_of_another_machine_is_no_taken_port() -> None:
    """What the system says against an address is passed on; no cause is made up."""
    server = rpc.create_server(LIMITS)
    with pytest.raises(ConfigError) as refused:
        rpc.bind(server, "192.0.2.1:0")
    expected = f"cannot listen on 192.0.2.1:0: {os.strerror(errno.EADDRNOTAVAIL)}"
    assert str(refused.value) == expected


@pytest.mark.parametrize("wrong", ["certificate", "private_key", "authority"])
@pytest.mark.parametrize("make", [tls.server_credentials, tls.channel_credentials])
def test_tls_files_that_hold_something_else_are_named(make, wrong, tmp_path) -> None:
    """A file that gRPC could only fail handshakes with is refused at start, by its path."""
    settings = Authority(tmp_path, "ours").issue("peer")
    make(settings)
    path = getattr(settings, wrong)
    path.write_text("-----BEGIN nothing-----")
    with pytest.raises(ConfigError, match=rf"^tls: {path} holds no"):
        make(settings)


def test_a_key_of_another_certificate_is_named(tmp_path) -> None:
    """Certificate and key of two peers are no identity."""
    authority = Authority(tmp_path, "ours")
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(
        ConfigError, match=rf"{other.private_key} holds no private key .* that fits"
    ):
        tls.read_identity(one.certificate, other.private_key)


async def test_health_names_become_ready_and_liveness_is_at_once(service) -> None:
    """Readiness, the service and "" follow set_ready; liveness is SERVING throughout."""
    _, channel, health, _ = service
    stub = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse

    async def statuses() -> list[int]:
        names = ("", SERVICE, rpc.READINESS, rpc.LIVENESS)
        requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
        return [(await stub.Check(request)).status for request in requests]

    assert await statuses() == [serving.NOT_SERVING] * 3 + [serving.SERVING]
    await health.set_ready(ready=True)
    assert await statuses() == [serving.SERVING] * 4
    await health.set_ready(ready=False)
    assert await statuses() == [serving.NOT_SERVING] * 3 + [serving.SERVING]


async def test_channels_ignore_proxy_settings(service, monkeypatch) -> None:
    """A proxy in the environment does not capture loopback calls."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    *_, port = service
    async with rpc.create_channel(f"localhost:{port}", rpc.RpcLimits()) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=rpc.LIVENESS)
        )
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_an_attempt_to_connect_has_time_for_its_handshakes() -> None:
    """gRPC gives an attempt no longer than the shortest wait between two: 100 ms, which the wait
    after a refusal may be, is too short for TLS on a busy host or a far one."""
    options = dict(rpc.channel_options(rpc.RpcLimits()))
    assert options["grpc.min_reconnect_backoff_ms"] >= 1000
    assert options["grpc.initial_reconnect_backoff_ms"] <= 100
