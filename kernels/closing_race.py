"""The race of `accept`'s closing draw: every id bounded by p alone, few of them looked at closely.

The residual weight [p/P - q/Q]+ is at most p/P, so w(x) / u(x) over the target's weights bounds
every rate (`row_state`). A program first bounds all its ids, four at a time: the largest of four
weights over the least of their words. Of each slot (a place in the runs of a tile) it keeps the
best bound, its tile, and the second best. Nothing in this pass waits for what another tile or
program found, and the draft's row is not read. Then it looks closely, in rounds: four lanes take
the best slot of their sixteen, an id each; q is read there alone, the rates are exact, the best is
published and what others published comes back; again while a slot left over could still win. What
others found meanwhile is asked for before the first round: most programs then need none.

What no slot kept, at most the best `second`, is left to the program that finishes the session:
it looks at the tiles of programs whose second could beat the winner, and at all of p where rounding
left no residual. Rates and winner have the bits of `row_state.race`, whatever the shape or order.

Must not know rules, candidates or how a session was judged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.philox import UNIFORM_SCALE, UNIFORM_SHIFT, exponential, philox, uniform_at
from kernels.row_state import (
    NO_ID,
    filtered,
    larger_of,
    log2_near,
    read_scores,
    reciprocal,
    unpack_rate,
    weigh,
    widened,
)

NO_DRAFT, LOGITS, WEIGHTS, SPARSE = (tl.constexpr(kind) for kind in range(4))
# Bounds are logarithms of up to 160, rounded a few times: far closer to the rates than this.
LOG_SLACK = tl.constexpr(2.0**-10)


@triton.jit
def _joined(w0, w1, w2, w3, SIZE: tl.constexpr):
    """Words of consecutive ids from those of calls: `philox.words_tile`, one run."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE])


@triton.jit
def _sparse_share(
    token, ids, weights, stride_n, stride_w, num_ids, wanted, SPARSE_PAD: tl.constexpr
):
    """Weights of tokens in a sparse row (ascending ids, padding -1 last); 0 outside its ids.

    Found by bisection. Past the end stands the last id, so what is larger than all is not found.
    """
    place = tl.zeros_like(token)
    step: tl.constexpr = SPARSE_PAD // 2
    sought = token.to(tl.uint32)
    for halving in tl.static_range(0, 20):
        if (step >> halving) > 0:
            probe = tl.minimum(place + ((step >> halving) - 1), num_ids - 1)
            found = tl.load(ids + probe * stride_n).to(tl.int32).to(tl.uint32)  # -1: the largest
            place += tl.where(found < sought, step >> halving, 0)
    inside = wanted & (place < num_ids)
    found = tl.load(ids + place * stride_n, inside, other=-1).to(tl.int32)
    return tl.load(weights + place * stride_w, inside & (found == token), other=0.0).to(tl.float32)


@triton.jit
def bound_slots(
    a, b, c, d, first_id, tops, seconds, places, threshold, scale, origin, seed, position,
    round_key, stream, FILTERED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """(tops, seconds, places) of the slots with one more tile taken in.

    a, b, c, d: its runs' scores, [RUN] each. A bound is log2 of a rate over the row's own mass
    scale. The cap on uniforms is left out: it lowers u, hence the bound, by less than the slack.
    """
    CALLS: tl.constexpr = RUN // 4
    calls = (first_id >> 2) + tl.arange(0, CALLS)
    if FILTERED:
        a = filtered(a, threshold, True)
        b = filtered(b, threshold, True)
        c = filtered(c, threshold, True)
        d = filtered(d, threshold, True)
    a0, a1, a2, a3 = philox(seed, calls, position, round_key, stream)
    b0, b1, b2, b3 = philox(seed, calls + CALLS, position, round_key, stream)
    c0, c1, c2, c3 = philox(seed, calls + 2 * CALLS, position, round_key, stream)
    d0, d1, d2, d3 = philox(seed, calls + 3 * CALLS, position, round_key, stream)
    least = _joined(
        tl.minimum(tl.minimum(a0, b0), tl.minimum(c0, d0)),
        tl.minimum(tl.minimum(a1, b1), tl.minimum(c1, d1)),
        tl.minimum(tl.minimum(a2, b2), tl.minimum(c2, d2)),
        tl.minimum(tl.minimum(a3, b3), tl.minimum(c3, d3)),
        RUN,
    )
    u = tl.fma(least.to(tl.float32), UNIFORM_SCALE, UNIFORM_SHIFT)
    most = widened(larger_of(larger_of(a, b), larger_of(c, d)))
    bound = tl.fma(most, scale, -origin) - log2_near(u)
    seconds = tl.maximum(seconds, tl.minimum(tops, bound))
    places = tl.where(bound > tops, first_id, places)
    return tl.maximum(tops, bound), seconds, places


@triton.jit
def bar_of(best):
    """What a bound must exceed to stand for a rate above the packed rate `best`; -inf for none."""
    rate = unpack_rate(best)
    bar = log2_near(tl.where(rate > 0, rate, 1.0)) - LOG_SLACK
    return tl.where(rate > 0, bar, float("-inf"))


@triton.jit
def race_slots(
    tops, places, row, stride_id, threshold, draft_row, draft_row_ids, num_sparse, stride_di,
    stride_ii, vocab_size, draft_bar, scale, draft_scale, origin, draft_origin, ratio, rejected,
    best, published, seed, position, round_key, stream,
    KIND: tl.constexpr, FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
    SPARSE_PAD: tl.constexpr, RUN: tl.constexpr, PUBLISHES: tl.constexpr,
):  # fmt: skip
    """The better of `best` (a packed rate) and the winner among the slots.

    Four lanes look at the best slot of their sixteen, while one is left that could win. PUBLISHES:
    every round's best goes to *published, and what it held comes back.
    """
    FOURS: tl.constexpr = RUN // 16
    lanes = tl.arange(0, RUN // 4)
    firsts = tl.reshape(places + tl.arange(0, RUN), [FOURS, 16])  # the first id of each slot
    tops = tl.reshape(tops, [FOURS, 16])
    own = tl.max(tops, 1)
    while tl.max(own, 0) > bar_of(best):
        first = tl.min(tl.where(tops == own[:, None], firsts, NO_ID), 1)
        tops = tl.where(firsts == first[:, None], float("-inf"), tops)
        # A gather, as the compiler would give all four ids of a broadcast slot to each lane.
        looked = tl.gather(tl.where(own > bar_of(best), first, -1), lanes // 4, 0)
        own = tl.max(tops, 1)
        token = looked + (lanes % 4) * RUN
        wanted = (looked >= 0) & (token < vocab_size)
        score = tl.load(row + token.to(tl.int64) * stride_id, wanted, other=float("-inf"))
        at = draft_row + token.to(tl.int64) * stride_di
        held = tl.zeros_like(score)
        if KIND == LOGITS:
            held = tl.load(at, wanted & rejected, other=float("-inf"))
        elif KIND == WEIGHTS:
            held = tl.load(at, wanted & rejected, other=0.0)
        u = uniform_at(seed, token, position, round_key, stream)
        weight = weigh(filtered(score, threshold, FILTERED), scale, origin)
        if KIND != NO_DRAFT:  # noqa: SIM102 - known when compiled
            if rejected:
                if KIND == SPARSE:
                    share = _sparse_share(
                        token, draft_row_ids, draft_row, stride_ii, stride_di, num_sparse, wanted,
                        SPARSE_PAD,
                    )  # fmt: skip
                elif KIND == WEIGHTS:
                    share = held.to(tl.float32)
                else:
                    share = filtered(held, draft_bar, DRAFT_FILTERED)
                    share = weigh(share, draft_scale, draft_origin)
                weight = tl.fma(share, -ratio, weight)
        rate = weight * reciprocal(u) * tl.div_rn(u, exponential(u))
        rate = tl.where(wanted & (rate > 0), rate, 0.0).to(tl.int32, bitcast=True)
        won = tl.max(rate, 0)
        winner = tl.min(tl.where(rate == won, token, NO_ID), 0)
        packed = (won.to(tl.int64) << 32) | (winner ^ NO_ID).to(tl.int64)
        best = tl.maximum(best, tl.where(won > 0, packed, 0))
        if PUBLISHES:
            best = tl.maximum(best, tl.atomic_max(published, best, sem="relaxed"))
    return best


@triton.jit
def race_group(
    first_tile, row, stride_id, threshold, draft_row, draft_row_ids, num_sparse, stride_di,
    stride_ii, vocab_size, draft_bar, scale, draft_scale, origin, draft_origin, ratio, rejected,
    published, leftover, seed, position, round_key, stream,
    KIND: tl.constexpr, FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
    SPARSE_PAD: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Race TILES tiles of 4 x RUN ids: the best to *published, the best second to *leftover."""
    SIZE: tl.constexpr = 4 * RUN
    whole = vocab_size // SIZE
    lanes = tl.arange(0, RUN)
    at = row + (first_tile * SIZE + lanes).to(tl.int64) * stride_id
    step = RUN * stride_id
    tops = tl.full([RUN], float("-inf"), tl.float32)
    seconds = tops
    places = tl.zeros([RUN], tl.int32)
    for tile in tl.range(first_tile, tl.minimum(first_tile + TILES, whole), num_stages=STAGES):
        a = tl.load(at)
        b = tl.load(at + step)
        c = tl.load(at + 2 * step)
        d = tl.load(at + 3 * step)
        at += 4 * step
        tops, seconds, places = bound_slots(
            a, b, c, d, tile * SIZE, tops, seconds, places, threshold, scale, origin, seed,
            position, round_key, stream, FILTERED, RUN,
        )  # fmt: skip
    cut = whole * SIZE
    if (first_tile <= whole) & (whole < first_tile + TILES) & (cut < vocab_size):
        tops, seconds, places = bound_slots(
            read_scores(row, cut + lanes, stride_id, vocab_size),
            read_scores(row, cut + RUN + lanes, stride_id, vocab_size),
            read_scores(row, cut + 2 * RUN + lanes, stride_id, vocab_size),
            read_scores(row, cut + 3 * RUN + lanes, stride_id, vocab_size),
            cut, tops, seconds, places, threshold, scale, origin, seed, position, round_key,
            stream, FILTERED, RUN,
        )  # fmt: skip
    best = tl.zeros_like(seed)
    if RUN == 128:  # only a bar, but one that all warps must agree on: there is one
        best = tl.load(published, volatile=True)
    race_slots(
        tops, places, row, stride_id, threshold, draft_row, draft_row_ids, num_sparse, stride_di,
        stride_ii, vocab_size, draft_bar, scale, draft_scale, origin, draft_origin, ratio,
        rejected, best, published, seed, position, round_key, stream, KIND, FILTERED,
        DRAFT_FILTERED, SPARSE_PAD, RUN, True,
    )  # fmt: skip
    tl.store(leftover, tl.max(seconds, 0))


@triton.jit
def race_leftovers(
    leftovers, num_groups, row, stride_id, threshold, draft_row, draft_row_ids, num_sparse,
    stride_di, stride_ii, vocab_size, draft_bar, scale, draft_scale, origin, draft_origin, ratio,
    rejected, best, seed, position, round_key, stream,
    KIND: tl.constexpr, FILTERED: tl.constexpr, DRAFT_FILTERED: tl.constexpr,
    SPARSE_PAD: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, GROUPS_PAD: tl.constexpr,
):  # fmt: skip
    """The better of `best` and the winner of what the groups left; p's winner where none won."""
    SIZE: tl.constexpr = 4 * RUN
    groups = tl.arange(0, GROUPS_PAD)
    left = tl.load(
        leftovers + groups, groups < num_groups, other=float("-inf"), cache_modifier=".cg"
    )
    num_tiles = tl.cdiv(vocab_size, SIZE)
    lanes = tl.arange(0, RUN)
    empty = tl.full([RUN], float("-inf"), tl.float32)
    largest = tl.max(left, 0)
    plain = num_groups < 0
    while ((largest > bar_of(best)) | (best == 0)) & ~plain:
        begin, end = num_tiles * 0, num_tiles
        if largest > bar_of(best):
            begin = tl.min(tl.where(left == largest, groups, GROUPS_PAD), 0)
            left = tl.where(groups == begin, float("-inf"), left)
            begin *= TILES
            end = tl.minimum(begin + TILES, num_tiles)
        else:  # rounding left no residual anywhere: draw from p, with the same noise
            plain = num_groups >= 0
        for tile in range(begin, end):
            first = tile * SIZE
            tops, _, places = bound_slots(  # of one tile: no slot has a second
                read_scores(row, first + lanes, stride_id, vocab_size),
                read_scores(row, first + RUN + lanes, stride_id, vocab_size),
                read_scores(row, first + 2 * RUN + lanes, stride_id, vocab_size),
                read_scores(row, first + 3 * RUN + lanes, stride_id, vocab_size),
                first, empty, empty, tl.zeros([RUN], tl.int32), threshold, scale, origin, seed,
                position, round_key, stream, FILTERED, RUN,
            )  # fmt: skip
            best = race_slots(
                tops, places, row, stride_id, threshold, draft_row, draft_row_ids, num_sparse,
                stride_di, stride_ii, vocab_size, draft_bar, scale, draft_scale, origin,
                draft_origin, ratio, rejected & ~plain, best, leftovers, seed, position, round_key,
                stream, KIND, FILTERED, DRAFT_FILTERED, SPARSE_PAD, RUN, False,
            )  # fmt: skip
        largest = tl.max(left, 0)
    return best
