"""What answers at an address that turned out to be no coordinator's, for an error that says so.

Knows the services by the names that their health checks answer to. Asks only after a call failed.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specmesh.rpc import RpcLimits, channel_options

ASK_S = 2.0
KINDS = {
    "specmesh.v1.TargetService": "a target service",
    "specmesh.v1.DraftService": "a draft service",
}


def is_unimplemented(error: BaseException) -> bool:
    """Whether a call failed because its peer does not know the method."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED


def kind_at(address: str, credentials: grpc.ChannelCredentials | None = None) -> str | None:
    """What the health checks at an address say it is; None when they do not tell. Never raises."""
    options = channel_options(RpcLimits())
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service, kind in KINDS.items():
            try:
                check(health_pb2.HealthCheckRequest(service=service), timeout=ASK_S)
            except grpc.RpcError:
                continue
            return kind
    return None
