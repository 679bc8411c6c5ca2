"""The gRPC surface that draft and target service share: GetInfo and Link over one engine.

Owns what both calls do with a service's state; each service names its own messages
(draft_service/service.py, target_service/service.py). How a link runs is specmesh/engine/links.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc

from specmesh.engine.serving import ServiceState


class EngineServicer:
    """Serves one engine, once it is ready; NotReady until then.

    info_response: the service's own GetInfoResponse, which holds `info`. Messages of links are
    parsed and written by the generated code of the service that this is mixed into.
    """

    info_response: ClassVar[type[Any]]

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def GetInfo(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Say what model this is and what it allows."""
        return self.info_response(info=self._state.info)

    async def Link(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """Run one link to its end."""
        async for frame in self._state.links.serve(request_iterator, context):
            yield frame
