"""Data parallelism: which process this is, and sums over all of them.

Started by torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK and the meeting point; alone without
it. NCCL between GPUs, gloo between CPUs. Must not know models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from specmesh.errors import ConfigError

_TIMEOUT = timedelta(minutes=10)


def num_processes() -> int:
    """Processes of the run that this one belongs to. Raises ConfigError."""
    return _place()[1]


def _place() -> tuple[int, int, int]:
    """Rank, number of processes, and rank on this machine, as torchrun gives them."""
    try:
        rank, count, local_rank = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
        )
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK: {error}") from error
    return rank, count, local_rank


class Processes:
    """The processes of one run, as a context manager. Every one must make the same calls."""

    def __init__(self, device: torch.device) -> None:
        """Join the others where torchrun started this process. Raises ConfigError."""
        self.rank, self.count, local_rank = _place()
        self.device = device
        if device.type == "cuda" and device.index is None:
            self.device = torch.device("cuda", local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.count > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=_TIMEOUT)

    def __enter__(self) -> Processes:
        """Return the group itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place; returns the tensor."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum gradients over processes, in one message."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(
            gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def of_first(self, value: float) -> float:
        """The first process's value, on every process."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)
