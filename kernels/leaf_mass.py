"""Mass of a leaf of scores that nobody races: the bits of `row_state.score_leaf`, half the work.

Most rows that `accept` judges are wanted for their mass alone. The eight-sums of the contract
(`row_state`) are the same float32 numbers; what follows them is exact, so it may be done otherwise:

- floor(2^40 s) of a sum 0 <= s < 16 is taken as two integers by two additions that round down:
  16 + s keeps floor(2^19 s) in its low bits, and 2^-17 + the rest, below 2^-19, keeps the rest in
  units of 2^-40. Each is added up as int32 (a tile's 128 sums stay below 2^31): one instruction a
  reduction where int64 takes two shuffles a step.
- The largest of a tile is found on pairs of bfloat16, then on the bits of its float32.
- A NaN or inf is not looked for in every sum: it stays in a running float32 total that is tested
  once a leaf.

A tile's four quarters are read side by side and the next tile while this one is summed. Must not
know rules, batches or races.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_state import (
    INTERPRETING,
    LEAF_TILES,
    add_pairs,
    filtered,
    larger_of,
    read_scores,
    weigh,
    widened,
)

LIMB = tl.constexpr(21)  # bits of the low integer of a sum
HIGH_ORIGIN = tl.constexpr(16.0)  # float32 from 16 to 32 are multiples of 2^-19
LOW_ORIGIN = tl.constexpr(2.0**-17)  # float32 from 2^-17 to 2^-16 are multiples of 2^-40
HIGH_BITS = tl.constexpr(0x41800000)
LOW_BITS = tl.constexpr(0x37000000)
COUNT_ORIGIN = tl.constexpr(8388608.0)  # 2^23: the low bits of 2^23 + n are n


@triton.jit
def _add_down(x, y):
    """x + y rounded towards minus infinity."""
    if INTERPRETING:
        exact = x.to(tl.float64) + y
        near = exact.to(tl.float32)
        below = (near.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        return tl.where(near.to(tl.float64) > exact, below, near)
    return tl.inline_asm_elementwise(
        "add.rm.f32 $0, $1, $2;", "=f,f,f", [x, tl.zeros_like(x) + y], dtype=tl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _limbs(sums):
    """(floor(2^19 s), the rest in units of 2^-40) of float32 sums in [0, 16), int32 each."""
    high = _add_down(sums, HIGH_ORIGIN)
    low = _add_down(sums - (high - HIGH_ORIGIN), LOW_ORIGIN)
    return high.to(tl.int32, bitcast=True) - HIGH_BITS, low.to(tl.int32, bitcast=True) - LOW_BITS


@triton.jit
def _total(a, b, c, d):
    """Sum of four int32 vectors, int64. The interpreter's tiles are larger than int32 can add."""
    if INTERPRETING:
        return tl.sum(a.to(tl.int64) + b + c + d, 0)
    return tl.sum(a + b + c + d, 0).to(tl.int64)


@triton.jit
def _eights(weights, SIZE: tl.constexpr):
    """Sums of eight neighbours, in the order of `row_state.exact_mass`."""
    sums = add_pairs(weights, SIZE)
    sums = add_pairs(sums, SIZE // 2)
    return add_pairs(sums, SIZE // 4)


@triton.jit
def _largest(a, b, c, d, QUARTER: tl.constexpr):
    """The largest score of a tile's quarters, float32; NaN loses to a number."""
    best = widened(larger_of(larger_of(a, b), larger_of(c, d)))
    even, odd = tl.split(tl.reshape(best, [QUARTER // 2, 2]))
    best = tl.maximum(even, odd)
    even, odd = tl.split(tl.reshape(best, [QUARTER // 4, 2]))
    best = tl.maximum(even, odd)
    even, odd = tl.split(tl.reshape(best, [QUARTER // 8, 2]))
    bits = tl.maximum(even, odd).to(tl.int32, bitcast=True)
    top = tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), 0)
    return (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shift_of(gap):
    """An integer held as float32, 0 to 62 or more, as an int64 of at most 62."""
    gap = tl.minimum(gap, 62.0)
    return ((gap + COUNT_ORIGIN).to(tl.int32, bitcast=True) & 63).to(tl.int64)


@triton.jit
def _append(
    a, b, c, d, top, total, flaw, threshold, scale, FILTERED: tl.constexpr, QUARTER: tl.constexpr
):
    """(exponent, mass, total that is NaN or inf once a weight was) with one more tile taken in."""
    if FILTERED:
        a = filtered(a, threshold, True)
        b = filtered(b, threshold, True)
        c = filtered(c, threshold, True)
        d = filtered(d, threshold, True)
    m = tl.ceil(_largest(a, b, c, d, QUARTER) * scale)
    point = tl.where(m == float("-inf"), 0.0, m)
    sa = _eights(weigh(widened(a), scale, point), QUARTER)
    sb = _eights(weigh(widened(b), scale, point), QUARTER)
    sc = _eights(weigh(widened(c), scale, point), QUARTER)
    sd = _eights(weigh(widened(d), scale, point), QUARTER)
    ha, la = _limbs(sa)
    hb, lb = _limbs(sb)
    hc, lc = _limbs(sc)
    hd, ld = _limbs(sd)
    mass = (_total(ha, hb, hc, hd) << LIMB) + _total(la, lb, lc, ld)
    flaw += (sa + sb) + (sc + sd)
    larger = tl.maximum(top, m)
    origin = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, (total >> _shift_of(origin - top)) + (mass >> _shift_of(origin - m)), flaw


@triton.jit
def first_quarters(row, leaf, stride, vocab_size, wanted, TILE: tl.constexpr):
    """The four quarters of a leaf's first tile; anything where it is cut or not wanted.

    What `leaf_mass` begins with, apart so that it can be asked for before anything is known.
    """
    QUARTER: tl.constexpr = TILE // 4
    first = leaf * (LEAF_TILES * TILE)
    whole = wanted & (first + TILE <= vocab_size)
    at = row + (first + tl.arange(0, QUARTER)).to(tl.int64) * stride
    step = QUARTER * stride
    a, b = tl.load(at, whole), tl.load(at + step, whole)
    c, d = tl.load(at + 2 * step, whole), tl.load(at + 3 * step, whole)
    return a, b, c, d


@triton.jit
def leaf_mass(
    row, a, b, c, d, leaf, stride, vocab_size, threshold, scale, FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """(m, mass or -1) of one leaf; a, b, c, d: `first_quarters` of it."""
    QUARTER: tl.constexpr = TILE // 4
    first = leaf * (LEAF_TILES * TILE)
    whole = tl.minimum(LEAF_TILES, (vocab_size - first) // TILE)
    lanes = tl.arange(0, QUARTER)
    at = row + (first + lanes).to(tl.int64) * stride
    step = QUARTER * stride
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.int64)
    flaw = tl.zeros([QUARTER // 8], tl.float32)
    for index in range(1, whole + 1):
        at += 4 * step
        following_a = tl.load(at, index < whole)
        following_b = tl.load(at + step, index < whole)
        following_c = tl.load(at + 2 * step, index < whole)
        following_d = tl.load(at + 3 * step, index < whole)
        top, total, flaw = _append(
            a, b, c, d, top, total, flaw, threshold, scale, FILTERED, QUARTER
        )
        a, b, c, d = following_a, following_b, following_c, following_d
    first += whole * TILE
    if (whole < LEAF_TILES) & (first < vocab_size):
        ids = first + lanes
        a = read_scores(row, ids, stride, vocab_size)
        b = read_scores(row, ids + QUARTER, stride, vocab_size)
        c = read_scores(row, ids + 2 * QUARTER, stride, vocab_size)
        d = read_scores(row, ids + 3 * QUARTER, stride, vocab_size)
        top, total, flaw = _append(
            a, b, c, d, top, total, flaw, threshold, scale, FILTERED, QUARTER
        )
    sound = tl.min((flaw < float("inf")).to(tl.int32), 0) == 1  # false for NaN
    return top, tl.where(sound, total, -1)
