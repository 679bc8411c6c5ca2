"""Links take up renewed certificates: a coordinator that is refused asks for its files again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from coordinator.links import ReplicaLink
from coordinator.messages import Side
from protos.specmesh.v1 import session_pb2, target_pb2, target_pb2_grpc
from specmesh.config import LinkSettings, TlsSettings
from specmesh.rpc import RpcLimits, bind, create_server
from specmesh.tls import channel_credentials, server_credentials
from tests.deploy.certificates import issue, make_authority
from tests.deploy.manifests import overlay

IDENTITY = "spiffe://specmesh.local/ns/specmesh/sa/coordinator"


class Target(target_pb2_grpc.TargetServiceServicer):
    """Says who it is and keeps links open."""

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetInfoResponse:
        return target_pb2.TargetServiceGetInfoResponse(info=session_pb2.ModelInfo(model="m"))

    async def Link(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        await asyncio.Event().wait()
        yield target_pb2.TargetServiceLinkResponse()


class Owner:
    """Notes when the link is up."""

    def __init__(self) -> None:
        self.up = asyncio.Event()

    def check(self, link: ReplicaLink, info: session_pb2.ModelInfo) -> None:
        assert info.model == "m"

    def link_up(self, link: ReplicaLink) -> None:
        self.up.set()

    def link_down(self, link: ReplicaLink) -> None:
        self.up.clear()

    def result(self, link: ReplicaLink, result: Any) -> None:
        raise AssertionError("no command was sent")


def tls(secret: Path) -> TlsSettings:
    return TlsSettings(
        certificate=secret / "tls.crt",
        private_key=secret / "tls.key",
        authority=secret / "ca.crt",
        allowed_peers=(IDENTITY,),
    )


async def test_a_link_comes_up_once_its_certificate_is_renewed(tmp_path: Path) -> None:
    """The coordinator starts with a certificate of another authority and is refused; when the files
    are replaced in place, the same link connects, with nothing restarted."""
    objects = overlay("plain", ("mtls",))
    folders = {name: tmp_path / name for name in ("ours", "other")}
    for folder in folders.values():
        folder.mkdir()
        make_authority(folder)
    server = create_server(RpcLimits(), (IDENTITY,))
    add: Any = target_pb2_grpc.add_TargetServiceServicer_to_server
    add(Target(), server)
    serving = tls(issue(folders["ours"], objects, "target"))
    port = bind(server, "localhost:0", server_credentials(serving))
    await server.start()
    secret = issue(folders["other"], objects, "coordinator")
    settings = LinkSettings(reconnect_initial_s=0.01, reconnect_max_s=0.02)
    asked = []

    def credentials() -> Any:
        asked.append(1)
        return channel_credentials(tls(secret))

    owner = Owner()
    link = ReplicaLink(
        Side.TARGET, f"localhost:{port}", settings, owner, "group", credentials=credentials
    )
    link.start()
    try:
        async with asyncio.timeout(30):
            while len(asked) < 4:
                await asyncio.sleep(0.01)
            assert not owner.up.is_set()
            renewed = issue(folders["ours"], objects, "coordinator")
            for name in ("tls.crt", "tls.key", "ca.crt"):
                (renewed / name).replace(secret / name)
            await owner.up.wait()
    finally:
        await link.close()
        await server.stop(None)
