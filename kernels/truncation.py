"""Draft rows in two launches: truncate, round, write out and draw.

A row is cut in spans of `SPAN` ids, a program each.

1. `_survey_kernel` reads each row once: the mass of every span, and how many of its ids lie within
   each depth below the largest score (a histogram over quarter octaves of weight, `_depth`). The
   program that ends a row last bounds the row's mass below every depth and so finds the depth that
   certainly holds all ids to keep, and where each span's candidates go. Coupled and greedy rows
   are raced or compared here by the code of `sampling.draw`, with its bits, and are done.
2. `_keep_kernel` collects the candidates in id order; the program that ends a row last searches
   the least score kept among them, rounds, writes the row and races it.

Every decision compares integers (masses in units of 2^-40 of the largest weight's octave, counts),
so a row's bits do not depend on launch, batch or place; the depth only says where to look. Where
the candidates of a depth do not fit (scores that are nearly all equal), the search reads the whole
row at each step: right, and slow. The public function is in `kernels/draft_rows.py`. Must not know
sessions or encodings.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.accept import (
    COUPLED,
    COUPLED_STREAM,
    GREEDY,
    OK,
    RESIDUAL,
    ROW_FAULT,
    merge_winners,
    scale_of,
    weights_exponent,
)
from kernels.draw import PROPOSE_STREAM
from kernels.early_launch import begin
from kernels.philox import exponential, uniform_at
from kernels.row_state import (
    LEAF,
    LOWEST,
    MASS_UNIT,
    exact_mass,
    exponent_of,
    filtered,
    load_scores,
    merge_masses,
    ordered_bits,
    pack_rate,
    power_of_two,
    read_scores,
    score_leaf,
    unpack_id,
    weigh,
)

SPAN = 4096
LEAF_SPANS = tl.constexpr(LEAF // SPAN)
# Depths: quarter octaves down to 26 octaves, octaves down to 49. The last bin is apart and counts
# all finite scores: what lies deeper than 49 octaves weighs less than a unit of mass an id.
FINE = tl.constexpr(104)
BINS = tl.constexpr(128)
REST = tl.constexpr(127)
DEEPEST = tl.constexpr(1000.0)
ALL = tl.constexpr(1000)  # a cutoff that keeps every finite score
# Bounds on masses from depths are sums of rounded float32 numbers: far more accurate than this.
MARGIN = tl.constexpr(0.01)
KEY_SLACK = tl.constexpr(8)  # a division may round a bound this far
COUNT_BIT = tl.constexpr(51)  # a count above a mass of up to 2^11 ids in one int64
COUNT_ONE = tl.constexpr(1 << 51)
HALF_EXPONENT = tl.constexpr(15.0)  # the largest float16 weight lies in [2^14, 2^15)
HALF_UNIT = tl.constexpr(2.0**24)  # every float16 is a multiple of 2^-24
LAW_UNIT = tl.constexpr(2.0**52)


@triton.jit
def _depth(scores, scale, point):
    """Quarter octaves below 2^point, int32 from 0; 1000 for all that is deeper, -inf and NaN.

    The product is rounded before the point enters, so spans with points of their own agree.
    """
    quarters = 4.0 * point - tl.floor(scores * scale * 4.0) - 1.0
    quarters = tl.where(quarters < DEEPEST, quarters, DEEPEST)
    return tl.maximum(quarters, 0.0).to(tl.int32)


@triton.jit
def _bin_of(depth):
    return tl.where(depth < FINE, depth, tl.minimum(FINE + ((depth - FINE) >> 2), REST))


@triton.jit
def _last_depth(bins):
    """The deepest quarter octave of a bin."""
    return tl.where(bins < FINE, bins, FINE + (bins - FINE) * 4 + 3)


@triton.jit
def _counts_within(span_counts, spans, seen, gaps, depth):
    """Ids of each span no deeper than `depth` below the row's point; gaps: octaves from it to the
    spans' own points."""
    own = depth - 4 * gaps
    return tl.load(
        span_counts + spans * BINS + _bin_of(own), seen & (own >= 0), other=0, cache_modifier=".cg"
    ).to(tl.int32)


@triton.jit
def _tails(within, heaviest, exclusive):
    """Sum of `heaviest` over the ids of all deeper bins but the last: Abel's summation, as only
    `within`, the number of ids up to each bin, is known. exclusive: heaviest of the next bin."""
    products = within.to(tl.float32) * (heaviest - exclusive)
    before = tl.cumsum(products, 0) - products
    heads = before + within.to(tl.float32) * heaviest
    return tl.maximum(tl.max(heads, 0) - heads, 0.0)


@triton.jit
def _plan_row(
    span_counts, offsets, plan, row_spans, seen, exponents, top, mass, num_spans, vocab_size,
    max_ids, dropped_mass, SPANS_PAD: tl.constexpr,
):  # fmt: skip
    """Write where candidates are: plan = (cutoff, sure, number, whether whole, mass, point)."""
    point = tl.where(top == float("-inf"), 0.0, top)
    gaps = tl.minimum(point - exponents, 64.0).to(tl.int32)
    bins = tl.arange(0, BINS)
    known = bins < REST
    within = _counts_within(
        span_counts, row_spans[:, None], seen[:, None] & known[None, :], gaps[:, None],
        _last_depth(bins)[None, :],
    )  # fmt: skip
    within = tl.sum(within, 0)
    support = tl.max(within, 0)
    within = tl.where(known, within, support)
    fine = bins.to(tl.float32) * 0.25
    first_octave = tl.where(bins < FINE, fine, (bins - FINE).to(tl.float32) + 26.0)
    last_octave = tl.where(bins < FINE, fine + 0.25, (bins - FINE).to(tl.float32) + 27.0)
    heaviest, lightest = tl.exp2(-first_octave), tl.exp2(-last_octave)
    next_lightest = tl.exp2(-tl.where(bins < FINE - 1, fine + 0.5, last_octave + 1.0))
    total = mass.to(tl.float64) * (1.0 / MASS_UNIT)
    allowed = (total * dropped_mass).to(tl.float32)
    rest = (vocab_size - support).to(tl.float32) * 2.0**-49
    at_most = _tails(within, heaviest, lightest) + rest
    at_least = _tails(within, lightest, next_lightest)
    enough = known & ((within >= max_ids) | (at_most <= allowed * (1.0 - MARGIN)))
    whole = support <= max_ids
    cutoff = tl.min(tl.where(enough & ~whole, bins, REST - 1), 0)
    more = known & (within < max_ids) & (at_least > allowed * (1.0 + MARGIN))
    sure = tl.max(tl.where(more, _last_depth(bins), -1), 0)
    cutoff = _last_depth(cutoff)
    own = _counts_within(span_counts, row_spans, seen, gaps, cutoff)
    finite = tl.load(span_counts + row_spans * BINS + REST, seen, other=0, cache_modifier=".cg")
    finite = finite.to(tl.int32)
    if tl.sum(finite, 0) <= max_ids:
        cutoff = tl.full([], ALL, tl.int32)
        own = finite
    tl.store(offsets + row_spans, tl.cumsum(own, 0) - own, seen)
    tl.store(plan, cutoff.to(tl.int64))
    tl.store(plan + 1, sure.to(tl.int64))
    tl.store(plan + 2, tl.sum(own, 0).to(tl.int64))
    tl.store(plan + 3, whole.to(tl.int64))
    tl.store(plan + 4, mass)
    tl.store(plan + 5, point.to(tl.int64))


@triton.jit
def _survey_kernel(
    logits, seeds, positions, rules, temperatures, thresholds,
    span_exponents, span_masses, span_best, span_counts, offsets, plans, arrivals,
    tokens, ids_out, weights_out, reports, dropped_out,
    stride_row, stride_id, vocab_size, num_spans, max_ids, dropped_mass,
    SPAN: tl.constexpr, SPANS_PAD: tl.constexpr, IDS_PAD: tl.constexpr, TILE: tl.constexpr,
    RUN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows x spans)."""
    begin(EARLY)
    index, span = tl.program_id(0) // num_spans, tl.program_id(0) % num_spans
    rule = tl.load(rules + index)
    scale = scale_of(tl.load(temperatures + index), rule)
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + index)
    row = logits + index.to(tl.int64) * stride_row
    place = index * num_spans + span
    if rule == RESIDUAL:
        ids = span * SPAN + tl.arange(0, SPAN)
        scores = load_scores(row, ids, stride_id, vocab_size, threshold, thresholds is not None)
        m, point = exponent_of(scores, scale)
        mass = exact_mass(weigh(scores, scale, point), SPAN)
        counts = tl.histogram(_bin_of(_depth(scores, scale, point)), BINS)
        bins = tl.arange(0, BINS)
        finite = tl.sum((scores > float("-inf")).to(tl.int32), 0)
        counts = tl.where(bins == REST, finite, tl.cumsum(counts, 0)).to(tl.int16)
        tl.store(span_counts + place * BINS + bins, counts)
        tl.store(span_exponents + place, m)
        tl.store(span_masses + place, mass)
    elif span % LEAF_SPANS == 0:
        m, mass, best = score_leaf(
            row, span // LEAF_SPANS, stride_id, vocab_size, threshold, scale, rule == GREEDY,
            rule == COUPLED, tl.load(seeds + index), tl.load(positions + index), 0,
            COUPLED_STREAM, thresholds is not None, True, TILE, RUN,
        )  # fmt: skip
        tl.store(span_exponents + place, m)
        tl.store(span_masses + place, mass)
        tl.store(span_best + place, best)
    else:
        tl.store(span_exponents + place, float("-inf"))
        tl.store(span_masses + place, tl.zeros([], tl.int64))
        tl.store(span_best + place, tl.zeros([], tl.int64))
    tl.debug_barrier()
    if tl.atomic_add(arrivals + index, 1, sem="acq_rel") != num_spans - 1:
        return
    tl.store(arrivals + index, 0)
    spans = tl.arange(0, SPANS_PAD)
    seen = spans < num_spans
    row_spans = index * num_spans + spans
    exponents = tl.load(span_exponents + row_spans, seen, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(span_masses + row_spans, seen, other=0, cache_modifier=".cg")
    tops, merged, bads = merge_masses(exponents[None, :], masses[None, :], 1)
    top, mass = tl.max(tops, 0), tl.max(merged, 0)
    sound = tl.max(bads.to(tl.int32), 0) == 0
    plan = plans + index * 6
    if sound & (rule == RESIDUAL):
        _plan_row(
            span_counts, offsets, plan, row_spans, seen, exponents, top, mass, num_spans,
            vocab_size, max_ids, dropped_mass, SPANS_PAD,
        )  # fmt: skip
        return
    token = tl.full([], -1, tl.int32)
    if sound:
        packed = tl.load(span_best + row_spans, seen, other=0, cache_modifier=".cg")
        leaders = seen & (spans % LEAF_SPANS == 0)
        winners = merge_winners(packed[None, :], exponents[None, :], tops, leaders[None, :], rule)
        token = tl.max(winners, 0)
    tl.store(plan, tl.full([], -1, tl.int64))
    tl.store(tokens + index, token)
    _store_report(reports, dropped_out, index, 0, 0, tl.where(sound, OK, ROW_FAULT), 0.0)
    _store_padding(ids_out, weights_out, index, 0, max_ids, IDS_PAD)


@triton.jit
def _store_report(reports, dropped_out, index, num_ids, truncated, status, dropped):
    tl.store(reports + index * 3, num_ids)
    tl.store(reports + index * 3 + 1, truncated)
    tl.store(reports + index * 3 + 2, status)
    tl.store(dropped_out + index, dropped)


@triton.jit
def _store_padding(ids_out, weights_out, index, num_ids, max_ids, IDS_PAD: tl.constexpr):
    """Ids -1 and weights 0 behind the last id of a row."""
    lanes = tl.arange(0, IDS_PAD)
    empty = (lanes >= num_ids) & (lanes < max_ids)
    tl.store(ids_out + index * max_ids + lanes, tl.full([IDS_PAD], -1, tl.int32), empty)
    tl.store(weights_out + index * max_ids + lanes, tl.zeros([IDS_PAD], tl.float32), empty)


@triton.jit
def _key_of_depth(depth, scale, point):
    """A key (`ordered_bits`) near the largest score at `depth`, a quarter octave above it."""
    return ordered_bits(tl.div_rn(point - (depth.to(tl.float32) - 1.0) * 0.25, scale))


@triton.jit
def _keys(scores, SHIFT: tl.constexpr):
    """`ordered_bits` without the bits that the scores' type never sets by itself."""
    return ordered_bits(scores) >> SHIFT


@triton.jit
def _is_enough(number, mass, max_ids, wanted):
    """Whether the ids counted are all that is kept, or more."""
    return (number >= max_ids) | (mass >= wanted)


@triton.jit
def _search_candidates(keys, measures, first, last, max_ids, wanted):
    """The least key in [first, last] above which something must still be kept; all at hand."""
    while first < last:
        middle = (first + last) >> 1
        over = tl.sum(tl.where(keys > middle, measures, 0), 0)
        mass = over & (COUNT_ONE - 1)
        if _is_enough(over >> COUNT_BIT, mass, max_ids, wanted):
            first = middle + 1
        else:
            last = middle
    return last


@triton.jit
def _measure_row(
    row, key, threshold, scale, point, stride, vocab_size,
    FILTERED: tl.constexpr, SPAN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """(ids above key, their mass, ids at key, the mass of one of them): one pass over a row."""
    number, ties = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    mass, unit = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, vocab_size, SPAN):
        ids = start + tl.arange(0, SPAN)
        scores = load_scores(row, ids, stride, vocab_size, threshold, FILTERED)
        keys = _keys(scores, SHIFT)
        units = (weigh(scores, scale, point) * MASS_UNIT).to(tl.int64)
        number += tl.sum((keys > key).to(tl.int64), 0)
        mass += tl.sum(tl.where(keys > key, units, 0), 0)
        ties += tl.sum((keys == key).to(tl.int64), 0)
        unit = tl.maximum(unit, tl.max(tl.where(keys == key, units, 0), 0))
    return number, mass, ties, unit


@triton.jit
def _room(number, mass, unit, max_ids, wanted):
    """How many of the ids tied at the least score kept stay, the lowest first."""
    unit = tl.maximum(unit, 1)
    return tl.minimum((wanted - mass + unit - 1) // unit, max_ids - number)


@triton.jit
def _keep_by_passes(
    row, found_ids, found_scores, threshold, scale, point, first, last, max_ids, wanted, stride,
    vocab_size, FILTERED: tl.constexpr, SPAN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Search by passes over the row, and collect exactly the ids that stay; their number."""
    while first < last:
        middle = (first + last) >> 1
        number, mass, _, _ = _measure_row(
            row, middle, threshold, scale, point, stride, vocab_size, FILTERED, SPAN, SHIFT
        )
        if _is_enough(number, mass, max_ids, wanted):
            first = middle + 1
        else:
            last = middle
    number, mass, _, unit = _measure_row(
        row, last, threshold, scale, point, stride, vocab_size, FILTERED, SPAN, SHIFT
    )
    room = _room(number, mass, unit, max_ids, wanted)
    kept, tied = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    for start in range(0, vocab_size, SPAN):
        ids = start + tl.arange(0, SPAN)
        scores = load_scores(row, ids, stride, vocab_size, threshold, FILTERED)
        keys = _keys(scores, SHIFT)
        inside = ids < vocab_size
        ties = ((keys == last) & inside).to(tl.int64)
        rank = tied + tl.cumsum(ties, 0) - ties
        stays = (((keys > last) & inside) | ((ties == 1) & (rank < room))).to(tl.int32)
        target = kept + tl.cumsum(stays, 0) - stays
        tl.store(found_ids + target, ids, stays == 1)
        tl.store(found_scores + target, scores, stays == 1)
        kept += tl.sum(stays, 0)
        tied += tl.sum(ties, 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _keep_kernel(
    logits, seeds, positions, base_lens, rules, temperatures, thresholds,
    offsets, plans, found_ids, found_scores, arrivals,
    tokens, ids_out, weights_out, reports, dropped_out,
    stride_row, stride_id, vocab_size, num_spans, max_ids, dropped_mass,
    SPAN: tl.constexpr, CAPACITY: tl.constexpr, IDS_PAD: tl.constexpr, SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows x spans)."""
    begin(EARLY)
    index, span = tl.program_id(0) // num_spans, tl.program_id(0) % num_spans
    if tl.load(rules + index) != RESIDUAL:
        return
    plan = plans + index * 6
    cutoff = tl.load(plan).to(tl.int32)
    if cutoff < 0:
        return
    number = tl.load(plan + 2).to(tl.int32)
    point = tl.load(plan + 5).to(tl.float32)
    scale = scale_of(tl.load(temperatures + index), RESIDUAL)
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + index)
    row = logits + index.to(tl.int64) * stride_row
    found_ids += index * CAPACITY
    found_scores += index * CAPACITY
    fits = number <= CAPACITY
    finishes = span == 0
    if fits:
        ids = span * SPAN + tl.arange(0, SPAN)
        scores = filtered(
            read_scores(row, ids, stride_id, vocab_size), threshold, thresholds is not None
        )
        taken = (_depth(scores, scale, point) <= cutoff) & (scores > float("-inf"))
        taken = taken.to(tl.int32)
        target = tl.load(offsets + index * num_spans + span) + tl.cumsum(taken, 0) - taken
        tl.store(found_ids + target, ids, taken == 1)
        tl.store(found_scores + target, scores, taken == 1)
        tl.debug_barrier()
        finishes = tl.atomic_add(arrivals + index, 1, sem="acq_rel") == num_spans - 1
    if ~finishes:
        return
    whole = tl.load(plan + 3) == 1
    total = tl.load(plan + 4)
    wanted = total - (total.to(tl.float64) * dropped_mass).to(tl.int64)
    sure = tl.load(plan + 1).to(tl.int32)
    first = (_key_of_depth(cutoff + 3, scale, point) - KEY_SLACK).to(tl.int64) >> SHIFT
    last = ((_key_of_depth(sure, scale, point) + KEY_SLACK).to(tl.int64) >> SHIFT) + 1
    if fits:
        tl.store(arrivals + index, 0)
    else:
        number = _keep_by_passes(
            row, found_ids, found_scores, threshold, scale, point, first, last, max_ids, wanted,
            stride_id, vocab_size, thresholds is not None, SPAN, SHIFT,
        )  # fmt: skip
    places = tl.arange(0, CAPACITY)
    valid = places < number
    token = tl.load(found_ids + places, valid, other=0, cache_modifier=".cg")
    scores = tl.load(found_scores + places, valid, other=float("-inf"), cache_modifier=".cg")
    weights = weigh(scores, scale, point)
    units = (weights * MASS_UNIT).to(tl.int64)
    keep = valid & (weights > tl.where(whole, 0.0, -1.0))
    if fits & ~whole:
        keys = _keys(scores, SHIFT)
        measures = tl.where(valid, units + COUNT_ONE, 0)
        least = _search_candidates(keys, measures, first, last, max_ids, wanted)
        over = tl.sum(tl.where(keys > least, measures, 0), 0)
        ties = valid & (keys == least)
        unit = tl.max(tl.where(ties, units, 0), 0)
        mass = over & (COUNT_ONE - 1)
        room = _room(over >> COUNT_BIT, mass, unit, max_ids, wanted)
        rank = tl.cumsum(ties.to(tl.int32), 0) - 1
        keep = valid & ((keys > least) | (ties & (rank < room)))
    weights = tl.where(keep, weights, 0.0)
    lost = tl.zeros([], tl.float64)
    if ~whole:
        missing = tl.maximum(total - tl.sum(tl.where(keep, units, 0), 0), 0)
        lost = missing.to(tl.float64) / total.to(tl.float64)
        exponent = weights_exponent(tl.max(weights, 0))
        halves = (weights * power_of_two(HALF_EXPONENT - exponent)).to(tl.float16).to(tl.float32)
        half_units = (halves * HALF_UNIT).to(tl.int64)
        before = weights.to(tl.float64) * (MASS_UNIT / total.to(tl.float64))
        after = half_units.to(tl.float64) / tl.sum(half_units, 0).to(tl.float64)
        less = (tl.maximum(before - after, 0.0) * LAW_UNIT).to(tl.int64)
        lost += tl.sum(less, 0).to(tl.float64) * (1.0 / LAW_UNIT)
        weights = halves
    kept = keep.to(tl.int32)
    place = tl.cumsum(kept, 0) - kept
    num_kept = tl.sum(kept, 0)
    tl.store(ids_out + index * max_ids + place, token, keep)
    tl.store(weights_out + index * max_ids + place, weights, keep)
    _store_padding(ids_out, weights_out, index, num_kept, max_ids, IDS_PAD)
    u = uniform_at(
        tl.load(seeds + index), token, tl.load(positions + index), tl.load(base_lens + index),
        PROPOSE_STREAM,
    )  # fmt: skip
    rates = pack_rate(tl.div_rn(weights, exponential(u)), token)
    winner = unpack_id(tl.max(tl.where(weights > 0, rates, LOWEST), 0))
    tl.store(tokens + index, winner)
    _store_report(
        reports, dropped_out, index, num_kept, tl.where(whole, 0, 1), OK, lost.to(tl.float32)
    )
