"""Rows of scores in Triton: weights, their mass in exact integers, races and argmax over leaves.

    w(x) = 2^(s(x) log2(e) / T - m),  m = ceil(max s log2(e) / T),  mass = sum of round(2^40 w)

Owns the numeric contract of every sampling kernel. A row is cut in leaves of `LEAF` ids, always the
same, and a program may take any number of them. Within a leaf, eight neighbouring weights are added
in one fixed tree in float32; those sums become integers, and integers add exactly. So a row's mass,
hence every decision made from it, has the same bits whatever the launch, the batch, or the device's
way of reducing. m is an integer, so leaves are brought to one scale by exact powers of two.

A race keeps the largest w / E. As -log1p(-u) >= u, no id can beat w / u: only the few ids whose
bound exceeds the best rate so far have their logarithm taken. Must not know batches, rules or
where rows lie in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.configs import INTERPRETED
from kernels.philox import exponential, uniform_at, uniform_tile

LEAF = 8192
RACE_ROWS = tl.constexpr(2)  # runs of ids raced at a time: registers, not results, depend on it
INTERPRETING = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MASS_BITS = tl.constexpr(40)
MASS_UNIT = tl.constexpr(2.0**40)
BAD = tl.constexpr(-(2**55))  # what a NaN or inf adds: outweighs every sound weight of a leaf

NO_ID = tl.constexpr(0x7FFFFFFF)
# Rates are float32 quotients: a bound may round below the rate it bounds by a few units.
BOUND_SLACK = tl.constexpr(1.0 + 2.0**-20)


@triton.jit
def exp2(x):
    """2^x, results below the normal range flushed to 0."""
    if INTERPRETING:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """1 / x within one unit in the last place, for x in the normal range."""
    if INTERPRETING:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def load_scores(row, ids, stride, vocab_size, threshold, FILTERED: tl.constexpr):
    """float32 scores of ids; -inf past the vocabulary and below the threshold. NaN stays NaN."""
    scores = tl.load(row + ids.to(tl.int64) * stride, ids < vocab_size, other=float("-inf"))
    scores = scores.to(tl.float32)
    if FILTERED:
        scores = tl.where(scores < threshold, float("-inf"), scores)
    return scores


@triton.jit
def tile_ids(first, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Consecutive ids from `first`, [ROWS, RUN]."""
    return first + tl.arange(0, ROWS)[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def exponent_of(scores, scale):
    """(m, m or 0 for a set without a finite score): -inf - (-inf) is never formed."""
    m = tl.ceil(tl.max(scores, 0) * scale)
    return m, tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def weigh(scores, scale, exponent):
    """2^(s * scale - exponent), the exponent's argument rounded once."""
    return exp2(tl.fma(scores, scale, -exponent))


@triton.jit
def power_of_two(exponent):
    """2^exponent of an integer held as float32, exact; 0 below the normal range."""
    clamped = tl.minimum(exponent, 127.0).to(tl.int32)
    bits = (tl.maximum(clamped, -127) + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _add_pairs(values, SIZE: tl.constexpr):
    even, odd = tl.split(tl.reshape(values, [SIZE // 2, 2]))
    return even + odd


@triton.jit
def exact_mass(weights, SIZE: tl.constexpr):
    """Mass of non-negative float32 weights up to about 1, int64; negative if one is NaN or inf."""
    sums = _add_pairs(weights, SIZE)
    sums = _add_pairs(sums, SIZE // 2)
    sums = _add_pairs(sums, SIZE // 4)
    sound = sums < float("inf")  # false for NaN
    return tl.sum(tl.where(sound, (tl.where(sound, sums, 0.0) * MASS_UNIT).to(tl.int64), BAD), 0)


@triton.jit
def merge_masses(exponents, masses, AXIS: tl.constexpr):
    """Merge leaves along AXIS: (largest exponent, mass on its scale, whether a leaf was bad).

    Leaves with smaller exponents are shifted down: integers, so in any order.
    """
    top = tl.max(exponents, AXIS)
    gap = tl.expand_dims(tl.where(top == float("-inf"), 0.0, top), AXIS) - exponents
    seen = (masses > 0) & (gap < 62.0)
    shift = tl.where(seen, gap, 0.0).to(tl.int64)
    mass = tl.sum(tl.where(seen, masses, 0) >> shift, AXIS)
    bad = tl.max((masses < 0).to(tl.int32), AXIS) == 1
    return top, mass, bad | (top == float("-inf")) | (mass == 0)


@triton.jit
def pack_rate(rate, ids):
    """A positive rate and its id as one int64 whose order is: higher rate, then lower id."""
    return (rate.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (ids ^ NO_ID).to(tl.int64)


@triton.jit
def unpack_rate(packed):
    return (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def unpack_id(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ NO_ID


@triton.jit
def race(weights, uniforms, ids, best, seed, position, round_key, stream):
    """The better of `best` (a packed rate) and the winner of the race among ids.

    weights may hold zeros, which never win; the lowest id wins a tie.
    """
    bounds = weights * reciprocal(uniforms)
    top = tl.max(bounds)
    while top * BOUND_SLACK > unpack_rate(best):
        token = tl.min(tl.where(bounds == top, ids, NO_ID))
        u = uniform_at(seed, token, position, round_key, stream)
        best = tl.maximum(best, pack_rate(top * tl.div_rn(u, exponential(u)), token))
        bounds = tl.where(ids == token, 0.0, bounds)
        top = tl.max(bounds)
    return best


@triton.jit
def race_leaf(
    row, leaf, stride, vocab_size, threshold, scale, point, seed, position, round_key, stream,
    FILTERED: tl.constexpr, LEAF: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Winner of one leaf, packed, with rates on the leaf's own scale 2^point. Reads it again."""
    best = tl.zeros_like(seed)
    for tile in range(0, LEAF // (RACE_ROWS * RUN)):
        first = leaf * LEAF + tile * (RACE_ROWS * RUN)
        ids = tile_ids(first, RACE_ROWS, RUN)
        scores = load_scores(row, ids, stride, vocab_size, threshold, FILTERED)
        u = uniform_tile(seed, first, position, round_key, stream, RACE_ROWS, RUN)
        best = race(weigh(scores, scale, point), u, ids, best, seed, position, round_key, stream)
    return best


@triton.jit
def ordered_bits(score):
    """int32 whose order is that of float32 scores; -0 and 0 are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def argmax(scores, ids):
    """The largest score and the lowest id that holds it, packed: comparable across leaves."""
    top = tl.max(scores, 0)
    token = tl.min(tl.where(scores == top, ids, NO_ID), 0)
    return (ordered_bits(top).to(tl.int64) << 32) | (token ^ NO_ID).to(tl.int64)
