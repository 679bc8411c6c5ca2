"""Tile shapes of the attention kernels, one table per architecture, found by an offline sweep.

Serving never autotunes: a row here is a decision, made on the device by
`python -m kernels.configs.sweep_attention` and checked in. Must not know pointers; sizes that
change results (leaf, chunk, paged tile) belong to the numeric contract and are the same in every
row of an architecture.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block shape and launch shape of one kernel.

    block_m rows (queries), block_n keys. descriptors: load K and V tiles by bulk-copy descriptors
    where the layout allows. ahead: compute scores one tile ahead of their use. specialised: inputs
    of whole tiles take `attention_specialised`, which has its own. ordered: sum products one by one
    (tests of bit-equality in the interpreter, whose matrix product may depend on a row's place).
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    descriptors: bool = False
    ahead: bool = False
    specialised: bool = False
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class PagedTiles:
    """Launch shape of the paged kernel and of the fold of its partials.

    tile: keys per score tile, part of the numeric contract. rows: packed query rows of a program;
    fold_rows: rows of a folding program. min_programs: (sequence, kv head, split) programs below
    which a finer split is taken. descriptors: load pages by bulk copies where the layout allows.
    folds: where new tokens come as their projection leaves them, the program that ends a sequence
    and head last folds its leaves; else a launch of its own does. ahead: tiles of a program's
    keys asked for before the kernel ahead has ended.
    """

    tile: int
    rows: int
    num_warps: int = 4
    num_stages: int = 3
    fold_rows: int = 4
    fold_warps: int = 4
    min_programs: int = 128
    descriptors: bool = False
    ordered: bool = False
    folds: bool = False
    ahead: int = 0


@lru_cache
def _architecture(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def architecture(tensor: Tensor) -> str:
    """Table key of the device that holds a tensor: "sm_90", "cpu", ..."""
    if tensor.device.type != "cuda":
        return "cpu"
    return _architecture(tensor.device.index or 0)


# Interpreter: small tiles, so that small inputs cross tile borders. float32 has no tensor cores at
# IEEE precision: small tiles keep its accumulators in registers.
_CPU = Tiles(32, 32)
_FLOAT32 = Tiles(32, 32, num_warps=4, num_stages=1)

# (architecture, padded head_dim) -> tiles for 16-bit inputs.
FORWARD: dict[tuple[str, int], Tiles] = {
    ("sm_90", 64): Tiles(64, 64, num_warps=4, num_stages=3, ahead=True, specialised=True),
    ("sm_90", 128): Tiles(64, 64, num_warps=4, num_stages=3, specialised=True),
    ("sm_90", 256): Tiles(64, 64, num_warps=8, num_stages=2),
}
_FORWARD_FALLBACK = Tiles(64, 32, num_warps=4, num_stages=2)

BACKWARD_KV: dict[tuple[str, int], Tiles] = {
    ("sm_90", 64): Tiles(64, 64, num_warps=4, num_stages=2, descriptors=True),
    ("sm_90", 128): Tiles(64, 64, num_warps=4, num_stages=2, descriptors=True),
    ("sm_90", 256): Tiles(32, 64, num_warps=8, num_stages=2, descriptors=True),
}
BACKWARD_Q: dict[tuple[str, int], Tiles] = {
    ("sm_90", 64): Tiles(128, 64, num_warps=8, num_stages=3, descriptors=True),
    ("sm_90", 128): Tiles(128, 64, num_warps=8, num_stages=3, descriptors=True),
    ("sm_90", 256): Tiles(64, 64, num_warps=8, num_stages=2, descriptors=True),
}
_BACKWARD_FALLBACK = Tiles(32, 32, num_warps=4, num_stages=1)

# (architecture, padded head_dim) -> (verify and decode, prefill). One tile size per architecture
# and head_dim: the two share their bits. 64 rows are one tensor-core product, and hold 8 queries of
# a group of 8 heads.
_VERIFY = PagedTiles(64, 64, fold_rows=1, fold_warps=1, descriptors=True, folds=True)
_PREFILL = PagedTiles(64, 64, descriptors=True)
PAGED: dict[tuple[str, int], tuple[PagedTiles, PagedTiles]] = {
    ("sm_90", 64): (_VERIFY, _PREFILL),
    ("sm_90", 128): (_VERIFY, _PREFILL),
}
_PAGED_CPU = (PagedTiles(32, 16, min_programs=4), PagedTiles(32, 64, min_programs=4))
_PAGED_FALLBACK = (PagedTiles(64, 32, num_stages=1), PagedTiles(64, 32, num_stages=1))


def _padded(head_dim: int) -> int:
    return max(64, 1 << (head_dim - 1).bit_length())


def _look_up(table: dict[tuple[str, int], Tiles], fallback: Tiles, q: Tensor) -> Tiles:
    if q.device.type != "cuda":
        return _CPU
    if q.dtype == torch.float32:
        return _FLOAT32
    return table.get((architecture(q), _padded(q.shape[-1])), fallback)


def forward_tiles(q: Tensor) -> Tiles:
    """Tiles of the forward kernel for q [.., head_dim]."""
    return _look_up(FORWARD, _FORWARD_FALLBACK, q)


def backward_tiles(q: Tensor) -> tuple[Tiles, Tiles]:
    """Tiles of the two backward kernels: (dK and dV, dQ)."""
    return (
        _look_up(BACKWARD_KV, _BACKWARD_FALLBACK, q),
        _look_up(BACKWARD_Q, _BACKWARD_FALLBACK, q),
    )


def paged_tiles(q: Tensor, prefill: bool) -> PagedTiles:
    """Tiles of the paged kernel for q [tokens, heads, head_dim]."""
    if q.device.type != "cuda":
        return _PAGED_CPU[prefill]
    pair = PAGED.get((architecture(q), _padded(q.shape[-1])), _PAGED_FALLBACK)
    return (_PAGED_FALLBACK if q.dtype == torch.float32 else pair)[prefill]
