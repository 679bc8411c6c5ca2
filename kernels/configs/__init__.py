"""Launch configurations: one checked-in table per architecture and kernel, made by offline sweeps.

Nothing is tuned while serving: a row is a decision, so a graph captured twice holds the same
launches. The modules here hold the tables; sizes that belong to a kernel's numeric contract are
defined by the kernel and are the same in every row.
"""

from __future__ import annotations

import os
from functools import cache

import torch

# Of an H200, which launches of programs that run at once are made for.
MULTIPROCESSORS = 132
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when decorating


@cache
def _capability(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; an H200's where tensors have no storage; 0 of a CPU."""
    if device.type == "cuda":
        return _multiprocessors(device.index or 0)
    return MULTIPROCESSORS if device.type == "meta" else 0


def architecture(device: torch.device) -> str:
    """Table key of a device: "sm_90", ..., or "cpu" (the interpreter).

    Tensors without storage get the table of sm_90, so that its launches can be compiled anywhere.
    Raises RuntimeError for CPU tensors where Triton does not interpret.
    """
    if device.type == "cuda":
        return _capability(device.index or 0)
    if device.type == "meta":
        return "sm_90"
    if not INTERPRETED:
        raise RuntimeError("Triton kernels need a GPU, or TRITON_INTERPRET=1 set before import")
    return "cpu"
