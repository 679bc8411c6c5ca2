"""Score arithmetic shared by the forward and backward attention kernels: cap, visibility, dropout.

Pure tile functions of Triton; forward and backward must agree on every one of them bit for bit, so
they are written once. Must not know pointers to q, k or v.

Specification: `reference_attention.AttentionOptions`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference_attention import DROPOUT_STREAM

_DROPOUT_STREAM = tl.constexpr(DROPOUT_STREAM)


@triton.jit
def tanh(x):
    """Hyperbolic tangent to a few ulp: a series near 0, where 1 - e^(-2|x|) would cancel.

    libdevice's tanh is not available in the interpreter. The series' first omitted term is below
    2e-9 of the result at the switch.
    """
    square = x * x
    series = 62.0 / 2835.0 + square * (-1382.0 / 155925.0 + square * (21844.0 / 6081075.0))
    series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * series)))  # fmt: skip  # noqa: E501
    decay = tl.exp2(tl.abs(x) * -2.8853900817779268)  # e^(-2|x|)
    ratio = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def visible_tile(queries, keys, num_queries, num_keys, offset, window,
                 CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Boolean tile: query index column against key index row (or the other way round)."""
    visible = (queries < num_queries) & (keys < num_keys)
    if CAUSAL:
        visible &= keys <= queries + offset
    if WINDOW:
        visible &= keys > queries + (offset - window)
    return visible


@triton.jit
def keep_tile(
    seed, batch_head, queries, keys, threshold, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """Boolean [QUERIES, KEYS]-shaped tile of kept probabilities, keyed by coordinates alone.

    queries, keys: int32 indices that broadcast to [QUERIES, KEYS] (any tiling, any order).
    """
    shape: tl.constexpr = [QUERIES, KEYS]
    call = tl.broadcast_to(keys >> 2, shape).to(tl.uint32)
    query = tl.broadcast_to(queries, shape).to(tl.uint32)
    head = tl.zeros(shape, tl.uint32) + batch_head.to(tl.uint32)
    stream = tl.full(shape, _DROPOUT_STREAM, tl.uint32)
    word0, word1, word2, word3 = tl.philox(seed, call, query, head, stream)
    lane = tl.broadcast_to(keys & 3, shape)
    low = tl.where(lane == 0, word0, word1)
    high = tl.where(lane == 2, word2, word3)
    return tl.where(lane < 2, low, high) >= threshold.to(tl.uint32)
