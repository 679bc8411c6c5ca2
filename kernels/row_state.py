"""Rows of scores in Triton: weights, their mass in exact integers, races and argmax over leaves.

    w(x) = 2^(s(x) log2(e) / T - m),  m = ceil(max s log2(e) / T),  mass = sum of round(2^40 w)

Owns the numeric contract of every sampling kernel. A row is cut in leaves of `LEAF` ids and a leaf
in tiles of `TILE`, always the same; a program takes a whole leaf. Within a tile, eight neighbouring
weights are added in one fixed tree in float32; those sums become integers, which add exactly.
Tiles are merged ascending and leaves all at once, by exact powers of two, as m is an integer. So a
row's mass, hence every decision made from it, has the same bits whatever the launch, the batch, or
the device's way of reducing.

A race keeps the largest w / E. As -log1p(-u) >= u, no id can beat w / u: only the few ids whose
bound exceeds the best rate so far have their logarithm taken. Must not know batches, rules or
where rows lie in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.configs import INTERPRETED
from kernels.philox import (
    UNIFORM_SCALE,
    UNIFORM_SHIFT,
    exponential,
    uniform,
    uniform_at,
    words_tile,
)

# The interpreter pays by the operation, not by the lane: larger tiles there, the same leaf.
TILE = tl.constexpr(4096 if INTERPRETED else 1024)
LEAF_TILES = tl.constexpr(2 if INTERPRETED else 8)
LEAF = 8192
RACE_ROWS = tl.constexpr(2)  # runs of ids raced at a time: registers, not results, depend on it
INTERPRETING = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MASS_BITS = tl.constexpr(40)
MASS_UNIT = tl.constexpr(2.0**40)
BAD = tl.constexpr(-(2**55))  # what a NaN or inf adds: outweighs every sound weight of a leaf

NO_ID = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-0x8000000000000000)
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
def log2_near(x):
    """log2 of x in the normal range, within 2^-22 of itself or of 1."""
    if INTERPRETING:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def widened(scores):
    """Scores as float32; two bfloat16 that share a register take an instruction each."""
    if scores.dtype == tl.bfloat16 and not INTERPRETING:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [scores],
            dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = scores.to(tl.float32)
    return wide


@triton.jit
def larger_of(a, b):
    """The larger scores, in their own type; NaN loses to a number."""
    if a.dtype == tl.bfloat16 and not INTERPRETING:
        larger = tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        larger = tl.maximum(a, b)
    return larger


@triton.jit
def read_scores(row, ids, stride, vocab_size):
    """Scores of ids in their own type; -inf past the vocabulary."""
    return tl.load(row + ids.to(tl.int64) * stride, ids < vocab_size, other=float("-inf"))


@triton.jit
def filtered(scores, threshold, FILTERED: tl.constexpr):
    """float32 scores, -inf below the threshold. NaN stays NaN."""
    scores = scores.to(tl.float32)
    if FILTERED:
        scores = tl.where(scores < threshold, float("-inf"), scores)
    return scores


@triton.jit
def load_scores(row, ids, stride, vocab_size, threshold, FILTERED: tl.constexpr):
    """`filtered` of `read_scores`."""
    return filtered(read_scores(row, ids, stride, vocab_size), threshold, FILTERED)


@triton.jit
def tile_ids(first, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Consecutive ids from `first`, [ROWS, RUN], read four a thread as `philox.words_tile` makes
    words: wider reads would cost a shuffle of the words."""
    ids = first + tl.arange(0, ROWS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    return tl.max_contiguous(ids, [1, 4])


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
def add_pairs(values, SIZE: tl.constexpr):
    """Sums of neighbours: [SIZE] float32 to [SIZE // 2]."""
    even, odd = tl.split(tl.reshape(values, [SIZE // 2, 2]))
    return even + odd


@triton.jit
def exact_mass(weights, SIZE: tl.constexpr):
    """Mass of non-negative float32 weights up to about 1, int64; negative if one is NaN or inf."""
    sums = add_pairs(weights, SIZE)
    sums = add_pairs(sums, SIZE // 2)
    sums = add_pairs(sums, SIZE // 4)
    sound = sums < float("inf")  # false for NaN
    return tl.sum(tl.where(sound, (tl.where(sound, sums, 0.0) * MASS_UNIT).to(tl.int64), BAD), 0)


@triton.jit
def append_tile(top, total, bad, m, mass):
    """(exponent, mass, whether a bad tile was seen) of a leaf with its next tile merged in."""
    larger = tl.maximum(top, m)
    point = tl.where(larger == float("-inf"), 0.0, larger)
    kept = total >> tl.minimum(point - top, 62.0).to(tl.int64)
    added = mass >> tl.minimum(point - m, 62.0).to(tl.int64)
    return larger, kept + added, bad | (mass < 0)


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
def race(weights, words, ids, best, seed, position, round_key, stream):
    """The better of `best` (a packed rate) and the winner of the race among ids.

    weights: any sign, those <= 0 never win; words: the ids' random words. The lowest id wins a tie.
    """
    # w / u > best, without dividing: u is a multiply-add of the word (its cap cannot matter here).
    bar = unpack_rate(best) * (1.0 / BOUND_SLACK)
    over = weights > tl.fma(words.to(tl.float32), bar * UNIFORM_SCALE, bar * UNIFORM_SHIFT)
    if tl.max(over.to(tl.int32)) == 1:
        bounds = tl.where(over, weights * reciprocal(uniform(words)), 0.0)
        top = tl.max(bounds)
        while top * BOUND_SLACK > unpack_rate(best):
            token = tl.min(tl.where(bounds == top, ids, NO_ID))
            u = uniform_at(seed, token, position, round_key, stream)
            best = tl.maximum(best, pack_rate(top * tl.div_rn(u, exponential(u)), token))
            bounds = tl.where(ids == token, 0.0, bounds)
            top = tl.max(bounds)
    return best


@triton.jit
def race_tile(
    row, first, stride, vocab_size, threshold, scale, point, best, seed, position, round_key,
    stream, FILTERED: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Race the ids of one tile, with rates on the scale 2^point. Reads it again."""
    for part in range(0, TILE // (RACE_ROWS * RUN)):
        start = first + part * (RACE_ROWS * RUN)
        ids = tile_ids(start, RACE_ROWS, RUN)
        scores = load_scores(row, ids, stride, vocab_size, threshold, FILTERED)
        words = words_tile(seed, start, position, round_key, stream, RACE_ROWS, RUN)
        weights = weigh(scores, scale, point)
        best = race(weights, words, ids, best, seed, position, round_key, stream)
    return best


@triton.jit
def tiles_of(leaf, vocab_size, TILE: tl.constexpr):
    """Tiles of a leaf that hold ids of the vocabulary."""
    return tl.minimum(LEAF_TILES, tl.cdiv(vocab_size - leaf * (LEAF_TILES * TILE), TILE))


@triton.jit
def score_leaf(
    row, leaf, stride, vocab_size, threshold, scale, argmaxes, races, seed, position, round_key,
    stream, FILTERED: tl.constexpr, RACES: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One leaf of a row of scores: (m, mass or -1, packed winner or 0).

    The winner is of the race, with rates on the scale 2^m, or the argmax, as the flags say. The
    next tile is read before this one is used.
    """
    lanes = tl.arange(0, TILE)
    first = leaf * (LEAF_TILES * TILE)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros_like(seed)
    bad = total < 0
    best = tl.zeros_like(seed)
    if RACES:
        best = tl.where(argmaxes, LOWEST, best)
    following = read_scores(row, first + lanes, stride, vocab_size)
    for _ in range(0, tiles_of(leaf, vocab_size, TILE)):
        scores = filtered(following, threshold, FILTERED)
        following = read_scores(row, first + TILE + lanes, stride, vocab_size)
        m, point = exponent_of(scores, scale)
        mass = exact_mass(weigh(scores, scale, point), TILE)
        larger, total, bad = append_tile(top, total, bad, m, mass)
        if RACES:
            if argmaxes:
                best = tl.maximum(best, argmax(scores, first + lanes))
            elif races:
                best = rescaled(best, top - tl.where(larger == float("-inf"), 0.0, larger))
                best = race_tile(
                    row, first, stride, vocab_size, threshold, scale,
                    tl.where(larger == float("-inf"), 0.0, larger), best, seed, position,
                    round_key, stream, FILTERED, TILE, RUN,
                )  # fmt: skip
        top = larger
        first += TILE
    return top, tl.where(bad, -1, total), best


@triton.jit
def rescaled(packed, gap):
    """A packed rate brought to a scale 2^-gap times larger: exact, or 0 where it cannot win."""
    rate = unpack_rate(packed) * power_of_two(tl.maximum(gap, -127.0))
    return tl.where(rate > 0, pack_rate(rate, unpack_id(packed)), 0)


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
