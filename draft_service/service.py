"""The draft's gRPC surface: GetInfo and Link.

Owns the servicer alone; what a command does is draft_service/proposer.py, how a link runs is
specmesh/engine/links.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos.specmesh.v1 import draft_pb2, draft_pb2_grpc
from specmesh.engine.serving import ServiceState

SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one engine, once it is ready; NotReady until then."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def GetInfo(
        self,
        request: draft_pb2.DraftServiceGetInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        """Say what model this is and what it allows."""
        return draft_pb2.DraftServiceGetInfoResponse(info=self._state.info)

    async def Link(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftServiceLinkRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftServiceLinkResponse]:
        """Run one link to its end."""
        async for frame in self._state.links.serve(request_iterator, context):
            yield frame
