"""The target's gRPC surface: GetInfo and Link.

Owns the servicer alone; what a command does is target_service/verifier.py, how a link runs is
specmesh/engine/links.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos.specmesh.v1 import target_pb2, target_pb2_grpc
from specmesh.engine.serving import ServiceState

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves one engine, once it is ready; NotReady until then."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def GetInfo(
        self,
        request: target_pb2.TargetServiceGetInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> target_pb2.TargetServiceGetInfoResponse:
        """Say what model this is and what it allows."""
        return target_pb2.TargetServiceGetInfoResponse(info=self._state.info)

    async def Link(
        self,
        request_iterator: AsyncIterator[target_pb2.TargetServiceLinkRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.TargetServiceLinkResponse]:
        """Run one link to its end."""
        async for frame in self._state.links.serve(request_iterator, context):
            yield frame
