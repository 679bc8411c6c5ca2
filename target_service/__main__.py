"""`python -m target_service [--config FILE] [--section.key value] [--print-config]`.

Exit status: 0 after a drain, 1 when the engine died, 2 for a configuration that cannot work.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import torch

from protos.specmesh.v1 import target_pb2, target_pb2_grpc
from specmesh.config import TargetSettings, load_settings
from specmesh.engine import serving
from specmesh.engine.executor import MAX_SLOTS
from specmesh.engine.loading import LoadedModel
from specmesh.errors import ConfigError
from specmesh.service_metrics import ServiceMetrics
from target_service.candidates import RedrawCheck
from target_service.service import SERVICE_NAME, TargetServicer
from target_service.verifier import Verifier, VerifierOptions


def _register(state: serving.ServiceState, server: grpc.aio.Server) -> None:
    add: Any = target_pb2_grpc.add_TargetServiceServicer_to_server  # generated without types
    add(TargetServicer(state), server)


def side_of(settings: TargetSettings) -> serving.Side:
    """What makes a service process the target's."""

    def make_device_side(vocab_size: int, device: torch.device, metrics: ServiceMetrics) -> Any:
        from target_service.device_verifier import DeviceVerifier  # imports Triton

        return DeviceVerifier(
            vocab_size,
            MAX_SLOTS,
            settings.engine.max_num_draft_tokens,
            device,
            metrics.redraw_mismatches.inc,
        )

    def make_role(model: LoadedModel, metrics: ServiceMetrics, device_side: Any) -> Verifier:
        options = VerifierOptions(
            vocab_size=model.limits.vocab_size,
            max_num_draft_tokens=settings.engine.max_num_draft_tokens,
            max_plain_steps=settings.max_plain_steps,
            max_message_bytes=settings.server.max_message_bytes,
        )
        redraw = RedrawCheck(settings.redraw_check_ratio, metrics.redraw_mismatches.inc)
        if device_side is None:
            return Verifier(options, redraw)
        return Verifier(options, redraw, device_side.can_decide)

    return serving.Side(
        name="target",
        service_name=SERVICE_NAME,
        response_type=target_pb2.TargetServiceLinkResponse,
        register=_register,
        make_role=make_role,
        make_device_side=make_device_side,
    )


def main(argv: list[str]) -> int:
    """Run the target service with these arguments; return the exit status."""
    try:
        settings = load_settings(TargetSettings, argv)
        return serving.main(settings, side_of(settings))
    except ConfigError as error:
        sys.stderr.write(f"target service: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
