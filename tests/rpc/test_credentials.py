"""Who is let in over mutual TLS: wrong, expired, missing and good certificates, at both ends."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protos.specmesh.v1 import session_pb2, target_pb2, target_pb2_grpc
from specmesh.config import TlsSettings
from specmesh.errors import ConfigError, NotReady, PermissionDenied
from specmesh.rpc import RpcLimits, bind, create_channel, create_server
from specmesh.tls import channel_credentials, server_credentials
from specmesh.wire_errors import error_from_rpc

IDENTITY = "spiffe://specmesh/coordinator"
DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(
        self,
        name: str,
        *,
        identity: str = IDENTITY,
        host: str = "localhost",
        valid_days: tuple[int, int] = (-1, 1),
        trusts: Authority | None = None,
    ) -> TlsSettings:
        """Files of one peer. valid_days: from and until, from now. trusts: whom it believes."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names = [
            x509.UniformResourceIdentifier(identity),
            x509.DNSName(host),
            *([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if host == "localhost" else []),
        ]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + valid_days[0] * DAY)
            .not_valid_after(now + valid_days[1] * DAY)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        files = {
            "certificate": certificate.public_bytes(pem),
            "private_key": key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            "authority": (trusts or self).certificate.public_bytes(pem),
        }
        paths = {kind: self._folder / f"{name}-{kind}.pem" for kind in files}
        for kind, content in files.items():
            paths[kind].write_bytes(content)
        return TlsSettings(**paths, allowed_peers=(IDENTITY,))


class Target(target_pb2_grpc.TargetServiceServicer):
    """Counts who came through."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def GetInfo(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        return target_pb2.TargetServiceGetInfoResponse(info=session_pb2.ModelInfo(model="m"))

    async def Link(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_calls += 1
        async for _ in request:
            yield target_pb2.TargetServiceLinkResponse()


@asynccontextmanager
async def serving(tls: TlsSettings) -> AsyncIterator[tuple[Target, int]]:
    """A target on a port of its own."""
    servicer, server = Target(), create_server(RpcLimits(), tls.allowed_peers)
    add: Any = target_pb2_grpc.add_TargetServiceServicer_to_server
    add(servicer, server)
    port = bind(server, "127.0.0.1:0", server_credentials(tls))
    await server.start()
    try:
        yield servicer, port
    finally:
        await server.stop(None)


async def call(port: int, credentials: grpc.ChannelCredentials | None) -> None:
    """Both kinds of method, unary and link. Raises what the caller is told."""
    async with create_channel(f"localhost:{port}", RpcLimits(), credentials) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        try:
            link = stub.Link()
            await link.write(target_pb2.TargetServiceLinkRequest())
            await link.read()
            link.cancel()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        try:
            await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


@pytest.mark.parametrize(
    "peer", ["good", "stranger", "other", "expired", "future", "none", "plain"]
)
async def test_only_a_valid_certificate_of_a_named_peer_is_let_in(
    peer: str, tmp_path: Path
) -> None:
    """A peer with another identity is denied; one whose certificate another authority signed, that
    has expired, that is not valid yet or that shows none does not get as far as a method."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    shown: grpc.ChannelCredentials | None = None
    if peer == "none":
        shown = grpc.ssl_channel_credentials(
            ours.certificate.public_bytes(serialization.Encoding.PEM)
        )
    elif peer != "plain":
        tls = {
            "good": lambda: ours.issue("good"),
            "stranger": lambda: ours.issue("stranger", identity="spiffe://specmesh/other"),
            "other": lambda: theirs.issue("other", trusts=ours),
            "expired": lambda: ours.issue("expired", valid_days=(-9, -1)),
            "future": lambda: ours.issue("future", valid_days=(1, 9)),
        }[peer]()
        shown = channel_credentials(tls)
    async with serving(ours.issue("server")) as (servicer, port):
        if peer == "good":
            await call(port, shown)
            assert servicer.num_calls == 2
            return
        with pytest.raises(PermissionDenied if peer == "stranger" else NotReady):
            await call(port, shown)
        assert servicer.num_calls == 0


@pytest.mark.parametrize("server", ["other", "expired", "host"])
async def test_a_server_that_cannot_prove_who_it_is_is_not_called(
    server: str, tmp_path: Path
) -> None:
    """Another authority's certificate, an expired one and one for another name: the caller ends the
    handshake, and nothing of the request is sent."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    tls = {
        "other": lambda: theirs.issue("other", trusts=ours),
        "expired": lambda: ours.issue("expired", valid_days=(-9, -1)),
        "host": lambda: ours.issue("host", host="elsewhere.example"),
    }[server]()
    async with serving(tls) as (servicer, port):
        with pytest.raises(NotReady):
            await call(port, channel_credentials(ours.issue("good")))
        assert servicer.num_calls == 0


@pytest.mark.parametrize("missing", ["certificate", "private_key", "authority"])
def test_files_that_are_not_there_are_named_at_start(missing: str, tmp_path: Path) -> None:
    """A server and a channel say which file they cannot read, and do not fall back to plaintext."""
    tls = Authority(tmp_path, "ours").issue("server")
    path = getattr(tls, missing)
    path.unlink()
    for make in (server_credentials, channel_credentials):
        with pytest.raises(ConfigError, match=path.name):
            make(tls)
