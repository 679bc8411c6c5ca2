"""Launches of the norm, rotary and linear kernels, per architecture.

The linear kernel's K tile and chunk are its numeric contract (`kernels/linear.py`) and appear in no
row here. Made by `python -m kernels.configs.sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels.configs import MULTIPROCESSORS, architecture, multiprocessors


@dataclass(frozen=True, slots=True)
class RopeLaunch:
    """heads: heads of one token a program turns."""

    heads: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Specialised:
    """Launch of `linear_specialised`: warpgroups a tile, each of 64 weights, and stages in flight
    of step_k columns of K.

    A tile has rows and more_rows, 0 for none. split: programs share the chunks of K. at_once:
    programs a multiprocessor holds, which share its registers and memory. All programs run at once,
    on num_multiprocessors; fewer than least_programs would leave most of them idle.
    """

    groups: int
    num_stages: int
    rows: int = 128
    more_rows: int = 32
    step_k: int = 64
    split: bool = False
    at_once: int = 1
    num_multiprocessors: int = MULTIPROCESSORS
    least_programs: int = 60

    def __post_init__(self) -> None:
        is_tile = self.rows in (32, 64, 128) and self.more_rows in (0, 8, 16, 32)
        if not is_tile or self.step_k not in (64, 128) or self.groups not in (1, 2):
            raise ValueError(f"{self} is no tile of the kernel's")


@dataclass(frozen=True, slots=True)
class Persistent:
    """Launch of `linear_persistent`: one program a multiprocessor."""

    num_programs: int = MULTIPROCESSORS


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Output tile, launch shape, and whether programs split the chunks of K among them.

    block_m, more_m: a program's rows are the sum of the two (more_m may be 0). block_n counts
    columns of the result: a SwiGLU tile reads as many columns of gate and of up. turned: weights
    are the first operand of the matrix instruction, whose second may be any multiple of 8. block_k:
    columns of K a round of the loop takes, where they divide K and its chunks; else the contract's,
    with as many more stages.
    descriptors: bulk copies where the layout allows, but of rows if `gathers`. ahead: columns of K
    asked for before the kernel ahead has ended, a power of two. specialised: products that fit take
    `linear_specialised`, split as its own launch says. persistent: those of one chunk that fit,
    plain or with SwiGLU, take `linear_persistent`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    more_m: int = 0
    block_k: int = 64
    split: bool = False
    turned: bool = False
    descriptors: bool = False
    gathers: bool = False
    ahead: int = 0
    ordered: bool = False
    specialised: Specialised | None = None
    persistent: Persistent | None = None


_ROPE = {"sm_90": RopeLaunch(16, 4), "cpu": RopeLaunch(4, 4)}
_ROPE_FALLBACK = RopeLaunch(8, 4)

_NORM_VALUES = {"sm_90": 8, "cpu": 16}  # values a thread
_NORM_FALLBACK = 16

# Weights [n, depth] by the columns n that a launch has to spread over a device.
MIDDLE, WIDE = 5120, 12288

# (architecture, kind of weight; "fp8 " before it for weights of one byte) -> tiles by the largest
# number of rows they serve, ascending. Every row of sm_90 keeps the first operand's side >= 64 and
# four warps or more: one family of matrix instructions. A split is for weights of several chunks;
# others ignore it.
_FEW = [
    (16, LinearTiles(16, 64, 4, 4, block_k=128, turned=True, descriptors=True, split=True)),
    (32, LinearTiles(32, 64, 4, 4, block_k=128, turned=True, descriptors=True, split=True)),
    (64, LinearTiles(64, 64, 4, 3, block_k=128, turned=True, descriptors=True, split=True)),
]
_LINEAR: dict[tuple[str, str], list[tuple[int, LinearTiles]]] = {
    ("sm_90", "swiglu"): [
        (16, LinearTiles(16, 64, 4, 4, block_k=128, turned=True, descriptors=True, split=True)),
        (32, LinearTiles(32, 64, 4, 2, block_k=128, turned=True, descriptors=True, split=True)),
        (64, LinearTiles(64, 64, 4, 4, block_k=128, turned=True, descriptors=True, split=True)),
        (128, LinearTiles(128, 64, 4, 3, turned=True, descriptors=True)),
        (320, LinearTiles(128, 64, 4, 3, more_m=32, turned=True, descriptors=True,
                          persistent=Persistent())),
        (1 << 62, LinearTiles(128, 64, 4, 3, more_m=32, turned=True, descriptors=True)),
    ],
    ("sm_90", "wide"): [
        *_FEW[:2],
        (48, LinearTiles(32, 64, 4, 4, more_m=16, block_k=128, turned=True, descriptors=True)),
        *_FEW[2:],
        (160, LinearTiles(128, 128, 8, 3, more_m=32, turned=True, descriptors=True,
                          persistent=Persistent())),
        (1 << 62, LinearTiles(256, 128, 8, 4, more_m=64, turned=True, descriptors=True)),
    ],
    ("sm_90", "middle"): [
        (16, LinearTiles(16, 64, 4, 3, block_k=128, turned=True, descriptors=True, split=True)),
        _FEW[1],
        (40, LinearTiles(64, 64, 4, 3, block_k=128, turned=True, descriptors=True, split=True,
                         specialised=Specialised(1, 16, 32, 8))),
        (64, LinearTiles(64, 64, 4, 3, block_k=128, turned=True, descriptors=True, split=True,
                         specialised=Specialised(1, 13, 64, 0))),
        (160, LinearTiles(128, 64, 4, 4, more_m=32, block_k=128, turned=True, descriptors=True,
                          specialised=Specialised(1, 7))),
        (320, LinearTiles(128, 64, 4, 4, more_m=32, turned=True, descriptors=True,
                          specialised=Specialised(2, 5))),
        (1 << 62, LinearTiles(128, 64, 4, 4, more_m=32, turned=True, descriptors=True)),
    ],
    ("sm_90", "narrow"): [
        *_FEW[:2],
        (48, LinearTiles(32, 64, 4, 3, more_m=16, block_k=128, turned=True, descriptors=True,
                         split=True)),
        (64, LinearTiles(64, 64, 4, 3, block_k=128, turned=True, descriptors=True, split=True,
                         specialised=Specialised(1, 6, 64, 0, step_k=128))),
        (80, LinearTiles(128, 128, 8, 3, more_m=32, block_k=128, turned=True, descriptors=True,
                         split=True, specialised=Specialised(2, 6, split=True))),
        (160, LinearTiles(128, 128, 8, 3, more_m=32, block_k=128, turned=True, descriptors=True,
                          split=True, specialised=Specialised(1, 12, 64, 16))),
        (320, LinearTiles(128, 64, 4, 4, more_m=32, block_k=128, turned=True, descriptors=True,
                          specialised=Specialised(1, 7))),
        (1 << 62, LinearTiles(128, 64, 4, 4, more_m=32, block_k=128, turned=True,
                              descriptors=True)),
    ],
}  # fmt: skip
# A stage of one-byte weights is half as large, so more columns of K are on their way. Swept: swiglu
# and narrow, at 1, 5 and 64 rows. Beyond 64 rows are those of weights of two bytes, whose products
# take longer than their weights.
_FP8_SIXTEEN = LinearTiles(16, 64, 4, 6, block_k=128, turned=True, descriptors=True, split=True)
_FP8_FIRST = {
    "swiglu": replace(_FP8_SIXTEEN, num_stages=3, block_k=256),
    "wide": _FP8_SIXTEEN,
    "middle": _FP8_SIXTEEN,
    "narrow": replace(_FP8_SIXTEEN, num_stages=4, block_k=256),
}
_FP8_FEW = [
    (32, LinearTiles(32, 64, 4, 4, block_k=128, turned=True, descriptors=True, split=True)),
    (64, LinearTiles(64, 64, 4, 4, block_k=128, turned=True, descriptors=True, split=True)),
]
for _kind, _first in _FP8_FIRST.items():
    _many = [row for row in _LINEAR["sm_90", _kind] if row[0] > _FP8_FEW[-1][0]]
    _LINEAR["sm_90", f"fp8 {_kind}"] = [(16, _first), *_FP8_FEW, *_many]
_LINEAR_CPU = LinearTiles(32, 32, 4, 1)
_LINEAR_FALLBACK = LinearTiles(64, 64, 4, 2)
# float32 has no tensor cores at IEEE precision: small tiles keep accumulators in registers.
_LINEAR_FLOAT32 = LinearTiles(32, 32, 4, 2)
_LINEAR_FLOAT32_FP8 = LinearTiles(32, 32, 8, 2)  # four warps spill


def norm_warps(width: int, device: torch.device) -> int:
    """Warps for one row of a norm, within bounds: a power of two."""
    values = _NORM_VALUES.get(architecture(device), _NORM_FALLBACK)
    most = max(1, min(16, width // (32 * values)))
    return 1 << (most.bit_length() - 1)


def rope_launch(head_dim: int, device: torch.device) -> RopeLaunch:
    """Launch of the rotary kernel for heads of head_dim."""
    return _ROPE.get(architecture(device), _ROPE_FALLBACK)


def launches_early(device: torch.device) -> bool:
    """Whether kernels may start while the one before still runs (`kernels/early_launch.py`)."""
    return architecture(device) == "sm_90"


@cache
def _at_any_time(tiles: LinearTiles) -> LinearTiles:
    """Tiles whose programs need not run at once, for devices with fewer multiprocessors."""
    return replace(tiles, specialised=None, persistent=None)


def linear_kind(weight: Tensor, swiglu: bool) -> str:
    """The table's kind of a weight [n, depth], whatever the bytes of one."""
    columns = weight.shape[0]
    if swiglu:
        return "swiglu"
    return "narrow" if columns < MIDDLE else "middle" if columns < WIDE else "wide"


def linear_tiles(x: Tensor, weight: Tensor, swiglu: bool) -> LinearTiles:
    """Tiles for x [num_rows, depth] times a weight [n, depth], of x's type or fp8."""
    name = architecture(weight.device)
    if name == "cpu":
        return _LINEAR_CPU
    is_fp8 = weight.dtype is not x.dtype
    if x.dtype is torch.float32:
        return _LINEAR_FLOAT32_FP8 if is_fp8 else _LINEAR_FLOAT32
    kind = linear_kind(weight, swiglu)
    for most, tiles in _LINEAR.get((name, f"fp8 {kind}" if is_fp8 else kind), []):
        if x.shape[0] <= most:
            return tiles if multiprocessors(x.device) >= MULTIPROCESSORS else _at_any_time(tiles)
    return _LINEAR_FALLBACK
