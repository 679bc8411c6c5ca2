"""`python -m draft_service [--config FILE] [--section.key value] [--print-config]`.

Exit status: 0 after a drain, 1 when the engine died, 2 for a configuration that cannot work.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import torch

from draft_service.proposer import Proposer
from draft_service.service import SERVICE_NAME, DraftServicer
from protos.specmesh.v1 import draft_pb2, draft_pb2_grpc
from specmesh.config import DraftSettings, load_settings
from specmesh.engine import serving
from specmesh.engine.executor import MAX_SLOTS
from specmesh.engine.loading import LoadedModel
from specmesh.errors import ConfigError
from specmesh.service_metrics import ServiceMetrics


def _register(state: serving.ServiceState, server: grpc.aio.Server) -> None:
    add: Any = draft_pb2_grpc.add_DraftServiceServicer_to_server  # generated without types
    add(DraftServicer(state), server)


def side_of(settings: DraftSettings) -> serving.Side:
    """What makes a service process the draft's."""

    def make_device_side(vocab_size: int, device: torch.device, _metrics: ServiceMetrics) -> Any:
        from draft_service.device_proposer import DeviceProposer  # imports Triton

        return DeviceProposer(
            vocab_size,
            MAX_SLOTS,
            settings.engine.max_num_draft_tokens,
            device,
        )

    def make_role(_model: LoadedModel, _metrics: ServiceMetrics, device_side: Any) -> Proposer:
        return Proposer(
            settings.engine.max_num_draft_tokens,
            (lambda *_: False) if device_side is None else device_side.can_draw,
            settings.server.max_message_bytes,
        )

    return serving.Side(
        name="draft",
        service_name=SERVICE_NAME,
        response_type=draft_pb2.DraftServiceLinkResponse,
        register=_register,
        make_role=make_role,
        make_device_side=make_device_side,
    )


def main(argv: list[str]) -> int:
    """Run the draft service with these arguments; return the exit status."""
    try:
        settings = load_settings(DraftSettings, argv)
        return serving.main(settings, side_of(settings))
    except ConfigError as error:
        sys.stderr.write(f"draft service: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
