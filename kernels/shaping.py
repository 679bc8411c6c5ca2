"""Token shaping on the device: the threshold of each row.

Top-k, top-p and min-p with all ties kept each keep the ids at or above some score, so a shaped row
is its scores and one number: the threshold below which `sampling.accept` and `sampling.draw` give
weight 0. One rule for p and q, no sort, no probability tensor (specification: `reference.shape`;
bias and penalties come first, `kernels/penalties.py`). `specmesh::thresholds` takes two launches:

1. `_groups_kernel` reads each row once: the maximum of every group of `GROUP` ids, and the mass of
   every leaf (`row_state`).
2. `_threshold_kernel`, one program a row, searches. The k-th largest group maximum bounds the k-th
   largest score from below, and ids under (1 - top_p) Z / vocab_size cannot reach the nucleus: few
   groups are left to read. Candidates that do not fit are bracketed by whole passes first. Masses
   are integers, so the threshold does not depend on the order of any sum.

Must not know sessions' requests: parameters are tensors, one entry a session.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs.sampling import judge_launch, threshold_launch
from kernels.row_state import (
    LEAF,
    LEAF_TILES,
    LN_2,
    LOG2_E,
    MASS_UNIT,
    TILE,
    append_tile,
    exact_mass,
    exponent_of,
    merge_masses,
    ordered_bits,
    read_scores,
    weigh,
)

GROUP = 64  # ids whose maximum is kept
REACH = tl.constexpr(64.0)  # how far below the largest score a bracket without a floor begins
VALUE_STEPS = tl.constexpr(10)


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling parameters of `batch` sessions on the device, one entry each.

    temperatures: float32, 0 for greedy sessions, which keep everything. top_ks: int32, 0 is off.
    top_ps: float32, 1 is off. min_ps: float32, 0 is off.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor


@triton.jit
def _filters(temperatures, top_ks, top_ps, min_ps, session, vocab_size):
    """(T, k or 0, top_p, min_p, whether anything is filtered) of a session."""
    temperature = tl.load(temperatures + session)
    top_k, top_p = tl.load(top_ks + session), tl.load(top_ps + session)
    min_p = tl.load(min_ps + session)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, filtered


@triton.jit
def _groups_kernel(
    logits, first_rows, num_rows, temperatures, top_ks, top_ps, min_ps,
    group_maxima, leaf_exponents, leaf_masses, stride_row, stride_id,
    vocab_size, num_leaves, rows_per_session,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (sessions x leaves, rows of a session)."""
    session, leaf = tl.program_id(0) // num_leaves, tl.program_id(0) % num_leaves
    index = tl.program_id(1)
    if num_rows is not None:  # noqa: SIM102 - known when compiled
        if index >= tl.load(num_rows + session):
            return
    temperature, _, _, _, filtered = _filters(
        temperatures, top_ks, top_ps, min_ps, session, vocab_size
    )
    if not filtered:
        return
    first_row = session * rows_per_session
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    row = logits + (first_row + index).to(tl.int64) * stride_row
    scale = tl.div_rn(LOG2_E, temperature)
    slot = session * rows_per_session + index
    maxima = group_maxima + slot.to(tl.int64) * (num_leaves * LEAF_TILES * (TILE // GROUP))
    groups = leaf * (LEAF_TILES * (TILE // GROUP)) + tl.arange(0, TILE // GROUP)
    ids = leaf * (LEAF_TILES * TILE) + tl.arange(0, TILE)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.int64)
    bad = total < 0
    following = read_scores(row, ids, stride_id, vocab_size)
    for _ in range(0, LEAF_TILES):
        scores = following.to(tl.float32)
        ids += TILE
        following = read_scores(row, ids, stride_id, vocab_size)
        m, point = exponent_of(scores, scale)
        mass = exact_mass(weigh(scores, scale, point), TILE)
        top, total, bad = append_tile(top, total, bad, m, mass)
        tl.store(maxima + groups, tl.max(tl.reshape(scores, [TILE // GROUP, GROUP]), 1))
        groups += TILE // GROUP
    tl.store(leaf_exponents + slot * num_leaves + leaf, top)
    tl.store(leaf_masses + slot * num_leaves + leaf, tl.where(bad, -1, total))


@triton.jit
def _score_of(bits):
    """The score with these `ordered_bits`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _units(scores, scale, point):
    """Each score's weight in units of mass."""
    return (weigh(scores, scale, point) * MASS_UNIT).to(tl.int64)


@triton.jit
def _group_scores(row, groups, chosen, stride, vocab_size, GROUP: tl.constexpr):
    """Scores of the chosen groups, [groups, GROUP]; -inf elsewhere."""
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = chosen[:, None] & (ids < vocab_size)
    return tl.load(row + ids.to(tl.int64) * stride, inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _above(
    row, maxima, value, scale, point, stride, vocab_size, num_groups,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(number, mass) of ids whose score exceeds `value`: one pass over the groups that hold any."""
    number = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.int64)
    for start in range(0, num_groups, TILE):
        groups = start + tl.arange(0, TILE)
        maximum = tl.load(maxima + groups, groups < num_groups, other=float("-inf"))
        chosen = maximum > value
        if tl.max(chosen.to(tl.int32), 0) == 1:
            scores = _group_scores(row, groups, chosen, stride, vocab_size, GROUP)
            over = scores > value
            number += tl.sum(over.to(tl.int32))
            weights = tl.where(over, weigh(scores, scale, point), 0.0)
            mass += exact_mass(tl.reshape(weights, [TILE * GROUP]), TILE * GROUP)
    return number, mass


@triton.jit
def _gather(
    row, maxima, listed, found, low, high, stride, vocab_size, num_groups,
    GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write the scores in (low, high] to `found`; returns their number, even past CAPACITY."""
    groups = tl.arange(0, GROUPS_PAD)
    maximum = tl.load(maxima + groups, groups < num_groups, other=float("-inf"))
    chosen = (maximum > low).to(tl.int32)
    place = tl.cumsum(chosen, 0) - chosen
    tl.debug_barrier()
    tl.store(listed + place, groups, chosen == 1)
    num_listed = tl.sum(chosen, 0)
    tl.debug_barrier()
    number = tl.zeros([], tl.int32)
    for start in range(0, num_listed, TILE):
        if number <= CAPACITY:
            entries = start + tl.arange(0, TILE)
            live = entries < num_listed
            own = tl.load(listed + entries, live, other=0)
            scores = tl.reshape(
                _group_scores(row, own, live, stride, vocab_size, GROUP), [TILE * GROUP]
            )
            taken = ((scores > low) & (scores <= high)).to(tl.int32)
            target = number + tl.cumsum(taken, 0) - taken
            tl.store(found + target, scores, (taken == 1) & (target < CAPACITY))
            number += tl.sum(taken, 0)
    tl.debug_barrier()
    return number


@triton.jit
def _search(scores, measures, low, high, above, bound):
    """`_select` among scores held in registers: all of the row's in (low, high], `above` higher."""
    keys = ordered_bits(scores).to(tl.int64)
    first = ordered_bits(low).to(tl.int64) + 1
    last = ordered_bits(high).to(tl.int64)
    while first < last:
        middle = (first + last) >> 1
        over = above + tl.sum(tl.where(keys > middle, measures, 0), 0)
        if over.to(tl.float64) < bound:
            last = middle
        else:
            first = middle + 1
    return _score_of(last.to(tl.int32))


@triton.jit
def _bracket(
    row, maxima, low, high, bound, scale, point, stride, vocab_size, num_groups,
    BY_MASS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Narrow (low, high] around the answer of `_select` until CAPACITY scores are left in it.

    Returns (low, high, measure above high, whether they fit); they may not only for ties at high,
    which is then the answer.
    """
    above = tl.zeros([], tl.int64)
    over_low, _ = _above(
        row, maxima, low, scale, point, stride, vocab_size, num_groups, GROUP, TILE
    )
    over_high = tl.zeros_like(over_low)
    steps = tl.zeros([], tl.int32)
    open_ = over_low > CAPACITY
    while open_:
        # By value first, as scores are spread; then by bits, so that ties end it soon.
        floor = tl.where(low == float("-inf"), high - REACH, low)
        middle = floor + (high - floor) * 0.5
        if steps >= VALUE_STEPS:
            bits = ordered_bits(low).to(tl.int64) + ordered_bits(high).to(tl.int64)
            middle = _score_of((bits >> 1).to(tl.int32))
        steps += 1
        open_ = (middle > low) & (middle < high)
        if open_:
            number, mass = _above(
                row, maxima, middle, scale, point, stride, vocab_size, num_groups, GROUP, TILE
            )
            measure = number.to(tl.int64)
            if BY_MASS:
                measure = mass
            if measure.to(tl.float64) < bound:
                high = middle
                above = measure
                over_high = number
            else:
                low = middle
                over_low = number
            open_ = over_low - over_high > CAPACITY
    return low, high, above, over_low - over_high <= CAPACITY


@triton.jit
def _select(
    row, maxima, listed, found, low, high, bound, scale, point, stride, vocab_size, num_groups,
    BY_MASS: tl.constexpr, GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """The least score t in (low, high] such that fewer than `bound` (ids, or mass) lie above t.

    high must satisfy it. The kept ids are exactly those with a score of at least t.
    """
    low, high, above, fits = _bracket(
        row, maxima, low, high, bound, scale, point, stride, vocab_size, num_groups,
        BY_MASS, GROUP, TILE, CAPACITY,
    )  # fmt: skip
    threshold = high
    if fits:
        number = _gather(
            row, maxima, listed, found, low, high, stride, vocab_size, num_groups,
            GROUP, GROUPS_PAD, TILE, CAPACITY,
        )  # fmt: skip
        places = tl.arange(0, CAPACITY)
        scores = tl.load(found + places, places < number, other=float("-inf"))
        measures = (places < number).to(tl.int64)
        if BY_MASS:
            measures = _units(scores, scale, point)
        threshold = _search(scores, measures, low, high, above, bound)
    return threshold


@triton.jit
def _kth_maximum(maxima, rank, num_groups, GROUPS_PAD: tl.constexpr):
    """A score that at least `rank` groups reach, as large as possible; -inf if too few groups."""
    groups = tl.arange(0, GROUPS_PAD)
    maximum = tl.load(maxima + groups, groups < num_groups, other=float("-inf"))
    keys = ordered_bits(maximum)
    first = tl.min(keys, 0).to(tl.int64)
    last = tl.max(keys, 0).to(tl.int64)
    while first < last:
        middle = (first + last + 1) >> 1
        if tl.sum((keys >= middle).to(tl.int32), 0) >= rank:
            first = middle
        else:
            last = middle - 1
    return tl.where(rank <= num_groups, _score_of(first.to(tl.int32)), float("-inf"))


@triton.jit
def _just_below(score):
    """The next float32 below a score; -inf stays."""
    bits = ordered_bits(score)
    return tl.where(score == float("-inf"), score, _score_of(bits - 1))


@triton.jit
def _threshold_kernel(
    logits, first_rows, num_rows, temperatures, top_ks, top_ps, min_ps,
    group_maxima, leaf_exponents, leaf_masses, lists, candidates, thresholds,
    stride_row, stride_id, vocab_size, num_leaves, num_groups, rows_per_session,
    GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, LEAVES_PAD: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Grid (sessions x rows of a session)."""
    session, index = tl.program_id(0) // rows_per_session, tl.program_id(0) % rows_per_session
    slot = session * rows_per_session + index
    out = thresholds + slot
    tl.store(out, float("-inf"))
    if num_rows is not None:  # noqa: SIM102 - known when compiled
        if index >= tl.load(num_rows + session):
            return
    temperature, top_k, top_p, min_p, filtered = _filters(
        temperatures, top_ks, top_ps, min_ps, session, vocab_size
    )
    if not filtered:
        return
    first_row = session * rows_per_session
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    row = logits + (first_row + index).to(tl.int64) * stride_row
    scale = tl.div_rn(LOG2_E, temperature)
    leaves = tl.arange(0, LEAVES_PAD)
    seen = leaves < num_leaves
    m, total, bad = merge_masses(
        tl.load(leaf_exponents + slot * num_leaves + leaves, seen, other=float("-inf"))[None, :],
        tl.load(leaf_masses + slot * num_leaves + leaves, seen, other=0)[None, :],
        1,
    )  # fmt: skip
    if tl.max(bad.to(tl.int32), 0) == 1:  # no shape: whoever judges the row reports it
        return
    point, total = tl.max(m, 0), tl.max(total, 0)
    maxima = group_maxima + slot.to(tl.int64) * num_groups
    groups = tl.arange(0, GROUPS_PAD)
    top = tl.max(tl.load(maxima + groups, groups < num_groups, other=float("-inf")), 0)
    least = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        least = top + temperature * (tl.log2(min_p) * LN_2)
    listed = lists + slot * GROUPS_PAD
    found = candidates + slot * CAPACITY
    kept = tl.full([], float("-inf"), tl.float32)
    searched = top_p >= 1.0
    if top_k > 0:
        low = _just_below(_kth_maximum(maxima, top_k, num_groups, GROUPS_PAD))
        number = _gather(
            row, maxima, listed, found, low, top, stride_id, vocab_size, num_groups,
            GROUP, GROUPS_PAD, TILE, CAPACITY,
        )  # fmt: skip
        if number <= CAPACITY:  # the usual case: both filters among a few scores at hand
            places = tl.arange(0, CAPACITY)
            scores = tl.load(found + places, places < number, other=float("-inf"))
            one = (places < number).to(tl.int64)
            none = tl.zeros([], tl.int64)
            kept = _search(scores, one, low, top, none, top_k.to(tl.float64))
            if top_p < 1.0:
                units = tl.where(scores >= kept, _units(scores, scale, point), 0)
                bound = tl.sum(units, 0).to(tl.float64) * top_p
                low = _just_below(kept)
                kept = _search(scores, units, low, top, none, bound)
            searched = top_p <= 1.0
        else:
            kept = _select(
                row, maxima, listed, found, low, top, top_k.to(tl.float64), scale, point,
                stride_id, vocab_size, num_groups, False, GROUP, GROUPS_PAD, TILE, CAPACITY,
            )  # fmt: skip
    if ~searched:
        low = _just_below(kept)
        if top_k > 0:
            _, total = _above(
                row, maxima, low, scale, point, stride_id, vocab_size, num_groups, GROUP, TILE
            )
        bound = total.to(tl.float64) * top_p
        # Ids below this weight hold less than 1 - top_p together; a margin covers its rounding.
        share = (total.to(tl.float64) * (1.0 / MASS_UNIT)).to(tl.float32) * (1.0 - top_p)
        reach = tl.log2(tl.maximum(share, 2.0**-100)) - tl.log2(vocab_size.to(tl.float32)) - 0.01
        low = tl.maximum(low, tl.maximum(_just_below(least), (reach + point) / scale))
        kept = _select(
            row, maxima, listed, found, tl.minimum(low, _just_below(top)), top, bound, scale,
            point, stride_id, vocab_size, num_groups, True, GROUP, GROUPS_PAD, TILE, CAPACITY,
        )  # fmt: skip
    tl.store(out, tl.maximum(kept, least))


def _launch_thresholds(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor,
    rows_per_session: int, vocab_size: int, num_rows: Tensor | None, first_rows: Tensor | None,
) -> Tensor:  # fmt: skip
    batch = temperatures.shape[0]
    slots = batch * rows_per_session
    out = _thresholds_output(logits, batch, rows_per_session)
    num_leaves = triton.cdiv(vocab_size, LEAF)
    num_groups = num_leaves * (LEAF // GROUP)
    groups_pad = triton.next_power_of_2(num_groups)
    launch = threshold_launch(logits.device)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    maxima = scratch(slots, num_groups)
    leaf_exponents = scratch(slots, num_leaves)
    leaf_masses = scratch(slots, num_leaves, dtype=torch.int64)
    shared = (logits, first_rows, num_rows, temperatures, top_ks, top_ps, min_ps)
    judge = judge_launch(logits.device)
    _groups_kernel[(batch * num_leaves, rows_per_session)](
        *shared, maxima, leaf_exponents, leaf_masses, *logits.stride(), vocab_size, num_leaves,
        rows_per_session, GROUP=GROUP, TILE=TILE.value, num_warps=judge.num_warps,
    )  # fmt: skip
    _threshold_kernel[(batch * rows_per_session,)](
        *shared, maxima, leaf_exponents, leaf_masses,
        scratch(slots, groups_pad, dtype=torch.int32), scratch(slots, launch.capacity), out,
        *logits.stride(), vocab_size, num_leaves, num_groups, rows_per_session,
        GROUP=GROUP, GROUPS_PAD=groups_pad, LEAVES_PAD=max(2, triton.next_power_of_2(num_leaves)),
        TILE=launch.tile, CAPACITY=launch.capacity, num_warps=launch.num_warps,
    )  # fmt: skip
    return out


def _thresholds_output(logits: Tensor, batch: int, rows_per_session: int) -> Tensor:
    return logits.new_empty(batch, rows_per_session, dtype=torch.float32)


_thresholds = torch.library.custom_op("specmesh::thresholds", _launch_thresholds, mutates_args=())


@_thresholds.register_fake
def _thresholds_fake(
    logits, temperatures, _k, _p, _m, rows_per_session, *_others
) -> Tensor:  # mirrors _launch_thresholds
    return _thresholds_output(logits, temperatures.shape[0], rows_per_session)


def thresholds(
    logits: Tensor,
    filters: Filters,
    rows_per_session: int,
    vocab_size: int,
    *,
    num_rows: Tensor | None = None,
    first_rows: Tensor | None = None,
) -> Tensor:
    """The score below which each row keeps nothing, float32 [batch, rows_per_session].

    logits: any float dtype [rows, width], any strides; row i of session s is first_rows[s] + i, or
    s * rows_per_session + i. num_rows: int32 [batch], rows of a session to look at. -inf where
    nothing is filtered, where a row is not looked at, and for rows with NaN, +inf or no finite
    score, which `sampling.accept` and `sampling.draw` report themselves.
    """
    return torch.ops.specmesh.thresholds(
        logits, filters.temperatures, filters.top_ks, filters.top_ps, filters.min_ps,
        rows_per_session, vocab_size, num_rows, first_rows,
    )  # fmt: skip
