"""Launches of the norm, rotary and linear kernels, per architecture.

The linear kernel's K tile and chunk are its numeric contract (`kernels/linear.py`) and appear in no
row here. Made by `python -m kernels.configs.sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.configs import architecture


@dataclass(frozen=True, slots=True)
class RopeLaunch:
    """heads: heads of one token a program turns."""

    heads: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Output tile, launch shape, and whether programs split the chunks of K among them.

    block_n counts columns of the result: a SwiGLU tile reads as many columns of gate and of up.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: bool = False
    descriptors: bool = False
    ordered: bool = False


_ROPE = {"sm_90": RopeLaunch(16, 4), "cpu": RopeLaunch(4, 4)}
_ROPE_FALLBACK = RopeLaunch(8, 4)

_NORM_VALUES = {"sm_90": 8, "cpu": 16}  # values a thread
_NORM_FALLBACK = 16

# (architecture, fused SwiGLU) -> tiles by the largest number of rows they serve, ascending. Every
# row of sm_90 has block_m >= 64 and four warps or more: one family of matrix instructions.
_LINEAR: dict[tuple[str, bool], list[tuple[int, LinearTiles]]] = {
    ("sm_90", True): [
        (32, LinearTiles(64, 64, 4, 4)),
        (64, LinearTiles(64, 64, 4, 4, descriptors=True)),
        (1 << 62, LinearTiles(128, 128, 8, 4, descriptors=True)),
    ],
    ("sm_90", False): [
        (64, LinearTiles(64, 128, 8, 4, split=True)),
        (1 << 62, LinearTiles(128, 128, 8, 4, descriptors=True)),
    ],
    ("cpu", True): [(1 << 62, LinearTiles(32, 32, 4, 1))],
    ("cpu", False): [(1 << 62, LinearTiles(32, 32, 4, 1))],
}
_LINEAR_FALLBACK = LinearTiles(64, 64, 4, 2)
# float32 has no tensor cores at IEEE precision: small tiles keep accumulators in registers.
_LINEAR_FLOAT32 = LinearTiles(32, 32, 4, 2)


def norm_warps(width: int, device: torch.device) -> int:
    """Warps for one row of a norm, within bounds."""
    values = _NORM_VALUES.get(architecture(device), _NORM_FALLBACK)
    return max(1, min(16, width // (32 * values)))


def rope_launch(head_dim: int, device: torch.device) -> RopeLaunch:
    """Launch of the rotary kernel for heads of head_dim."""
    return _ROPE.get(architecture(device), _ROPE_FALLBACK)


def linear_tiles(
    num_rows: int, swiglu: bool, dtype: torch.dtype, device: torch.device
) -> LinearTiles:
    """Tiles for num_rows rows."""
    name = architecture(device)
    if dtype is torch.float32 and name != "cpu":
        return _LINEAR_FLOAT32
    for most, tiles in _LINEAR.get((name, swiglu), [(1 << 62, _LINEAR_FALLBACK)]):
        if num_rows <= most:
            return tiles
    raise AssertionError("the last row of a table serves any number of rows")
