"""The draft's gRPC surface: GetInfo and Link.

Owns its name and messages; what the calls do is specmesh/engine/servicer.py, what a command does is
draft_service/proposer.py.
"""

from __future__ import annotations

from protos.specmesh.v1 import draft_pb2, draft_pb2_grpc
from specmesh.engine.servicer import EngineServicer

SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftServicer(EngineServicer, draft_pb2_grpc.DraftServiceServicer):
    """Serves one engine as `specmesh.v1.DraftService`."""

    info_response = draft_pb2.DraftServiceGetInfoResponse
