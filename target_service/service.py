"""The target's gRPC surface: GetInfo and Link.

Owns its name and messages; what the calls do is specmesh/engine/servicer.py, what a command does is
target_service/verifier.py.
"""

from __future__ import annotations

from protos.specmesh.v1 import target_pb2, target_pb2_grpc
from specmesh.engine.servicer import EngineServicer

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


class TargetServicer(EngineServicer, target_pb2_grpc.TargetServiceServicer):
    """Serves one engine as `specmesh.v1.TargetService`."""

    info_response = target_pb2.TargetServiceGetInfoResponse
