"""Accept, residual and bonus of a batch of rounds in two launches: `specmesh::accept`.

Launch 1 (`judging`) reads every row that may be judged once, a leaf (`row_state`) a program,
session after session, and counts each leaf in its session. Launch 2, `_close_kernel`, may start
while launch 1 still runs (programmatic dependent launch): a program waits until all leaves of its
session are counted, so one session's race runs under another's reads. It first judges its session
from the leaves' few numbers (every program alike): candidates against coins (u q(x) P < p(x) Q),
against the target's own race winner (coupled), or against its argmax (greedy). Then it races the
residual [p/P - q/Q]+ or the bonus row (`closing_race`), and the program that finishes a session
last writes the token and returns the counters to zero. What the wait does not hold back is asked
for before it, the leaves' numbers at once after it: a program's time is a chain of reads. Launch 2
starts only when every program of launch 1 runs, so no wait can last for ever. No probability tensor
is written and the host reads nothing. The specification is `reference.decide` and `decide_coupled`;
the contract that makes a token independent of launch, batch and place is in `row_state`.

Must not know requests or services. The public functions and the meaning of each argument are in
`kernels/sampling.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.closing_race import (
    LOGITS,
    NO_DRAFT,
    SPARSE,
    WEIGHTS,
    race_group,
    race_leftovers,
)
from kernels.philox import uniform_at
from kernels.row_state import (
    INTERPRETING,
    LN_2,
    LOG2_E,
    LOWEST,
    MASS_UNIT,
    NO_ID,
    merge_masses,
    power_of_two,
    rescaled,
    unpack_id,
    weigh,
)
from kernels.streams import Purpose

RESIDUAL, COUPLED, GREEDY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OK, ROW_FAULT, DRAFT_FAULT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ACCEPT_STREAM = tl.constexpr(int(Purpose.ACCEPT))
RESIDUAL_STREAM = tl.constexpr(int(Purpose.RESIDUAL))
BONUS_STREAM = tl.constexpr(int(Purpose.BONUS))
COUPLED_STREAM = tl.constexpr(int(Purpose.COUPLED))


@triton.jit
def scale_of(temperature, rule):
    """log2(e) / T; greedy rows are not scaled."""
    return tl.div_rn(LOG2_E, tl.where(rule == GREEDY, 1.0, temperature))


@triton.jit
def log2_mass(mass):
    """log2 of a mass on its row's own scale."""
    return tl.log2((tl.maximum(mass, 1).to(tl.float64) * (1.0 / MASS_UNIT)).to(tl.float32))


@triton.jit
def weights_exponent(top):
    """m with 2^(m-1) <= top < 2^m for a weight; -inf for 0."""
    biased = (top.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(top > 0, (biased - 126).to(tl.float32), float("-inf"))


@triton.jit
def merge_winners(packed, exponents, top, seen, rule):
    """Winner id of each row from its leaves' winners; rates are brought to one scale first."""
    if rule == COUPLED:
        packed = rescaled(
            packed, exponents - tl.expand_dims(tl.where(top == float("-inf"), 0.0, top), 1)
        )
    return unpack_id(tl.max(tl.where(seen, packed, LOWEST), 1))


@triton.jit
def _acquired(counter):
    """*counter; what was written before it was counted can be read from then on."""
    if INTERPRETING:
        return tl.load(counter)
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [counter], dtype=tl.int64, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def _wait_until(counter, expected):
    """Return when *counter >= expected, as `_acquired`, in every thread by itself.

    To acquire empties the multiprocessor's first cache, which others use: not at every look.
    """
    seen = _acquired(counter)
    if seen < expected:
        while seen < expected:
            if not INTERPRETING:
                tl.inline_asm_elementwise(
                    "nanosleep.u32 40; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
                    pack=1,
                )  # fmt: skip
            seen = tl.load(counter, volatile=True)
        _acquired(counter)


@triton.jit
def _report(
    out, counts, log_probs, session, rows, token, winner, last, stopped, judged, proposed, live,
    closes, residual, status, target_log2, draft_log2, BUCKET: tl.constexpr,
):  # fmt: skip
    """Write all that a session emits but the token of a closing race."""
    num_accepted = tl.where(stopped, last + 1, last)
    written = tl.where(rows < num_accepted, token, tl.where(rows == last, winner, -1))
    written = tl.where(stopped & (rows >= num_accepted), -1, written)
    mine = (rows <= BUCKET) & ~((rows == last) & closes & residual)
    tl.store(out + rows, tl.where(live, written, -1), mine)
    tl.store(counts + session * 3, tl.where(live, num_accepted, 0))
    tl.store(counts + session * 3 + 1, tl.where(live, num_accepted + closes.to(tl.int32), 0))
    tl.store(counts + session * 3 + 2, status)
    pair = log_probs + (session * BUCKET + rows) * 2
    shown = judged & proposed & live
    tl.store(pair, tl.where(shown, target_log2 * LN_2, 0.0), rows < BUCKET)
    tl.store(pair + 1, tl.where(shown, draft_log2 * LN_2, 0.0), rows < BUCKET)


@triton.jit
def _close_kernel(  # noqa: C901 - every program judges before it draws
    logits, first_rows, candidates, num_candidates, seeds, base_lens, rules, temperatures,
    thresholds, stop_ids, draft, draft_ids, draft_temperatures, draft_thresholds,
    draft_exponents, draft_masses, leaf_exponents, leaf_masses, leaf_best, leaf_weights,
    leaves_done, arrivals, best_rates, leftovers, tokens, counts, log_probs,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    vocab_size, num_leaves, num_stops, num_sparse, num_slots, num_parts, num_groups,
    BUCKET: tl.constexpr, BUCKET_PAD: tl.constexpr, LEAVES_PAD: tl.constexpr, KIND: tl.constexpr,
    STOPS_PAD: tl.constexpr, SPARSE_PAD: tl.constexpr, GROUPS_PAD: tl.constexpr,
    RUN: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (groups of tiles, sessions). See the module text."""
    group, session = tl.program_id(0), tl.program_id(1)
    reports = group == num_groups - 1  # the last has the fewest tiles
    # What the launch was given, asked for at once; then what that leads to. One lane a row.
    rows = tl.arange(0, BUCKET_PAD)
    leaves = tl.arange(0, LEAVES_PAD)
    stops = tl.arange(0, STOPS_PAD)
    num = tl.load(num_candidates + session)
    rule = tl.load(rules + session)
    seed, base_len = tl.load(seeds + session), tl.load(base_lens + session)
    temperature = tl.load(temperatures + session)
    token = tl.load(candidates + session * BUCKET + rows, rows < BUCKET, other=-1)
    stop = tl.load(stop_ids + session * num_stops + stops, stops < num_stops, other=-1)
    first_row = session * (BUCKET + 1)
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    if KIND == LOGITS:
        draft_temperature = tl.load(draft_temperatures + session)
    residual = rule == RESIDUAL
    if (not reports) & (rule != RESIDUAL):
        return
    proposed = rows < num
    token = tl.where(proposed, token, -1).to(tl.int32)
    valid = (token >= 0) & (token < vocab_size)
    readable = proposed & valid
    at = (first_row + rows).to(tl.int64) * stride_row + token.to(tl.int64) * stride_id
    score = tl.load(logits + at, readable, other=float("-inf")).to(tl.float32)
    draft_score = tl.zeros_like(score)
    scale = scale_of(temperature, rule)
    draft_scale = scale
    if KIND != NO_DRAFT and KIND != SPARSE:
        own = session.to(tl.int64) * stride_db + rows.to(tl.int64) * stride_dk
        own = draft + own + token.to(tl.int64) * stride_di
        if KIND == LOGITS:
            draft_score = tl.load(own, readable & residual, other=float("-inf")).to(tl.float32)
            draft_scale = scale_of(draft_temperature, RESIDUAL)
            if draft_thresholds is not None:
                bars = tl.load(draft_thresholds + session * BUCKET + rows, proposed, other=0.0)
                draft_score = tl.where(draft_score < bars, float("-inf"), draft_score)
        else:
            draft_score = tl.load(own, readable & residual, other=0.0).to(tl.float32)
    draft_top = tl.full([BUCKET_PAD], float("-inf"), tl.float32)
    draft_mass = tl.zeros([BUCKET_PAD], tl.int64)
    if draft_masses is not None:
        given = session * BUCKET + rows
        draft_top = tl.load(draft_exponents + given, proposed, other=float("-inf"))
        draft_mass = tl.load(draft_masses + given, proposed, other=0)
    if thresholds is not None:
        bars = tl.load(thresholds + session * (BUCKET + 1) + rows, rows <= BUCKET, other=0.0)
        score = tl.where(score < bars, float("-inf"), score)
    u = uniform_at(seed, tl.zeros([BUCKET_PAD], tl.int32), base_len + rows, base_len, ACCEPT_STREAM)
    ends = tl.max((token[:, None] == stop[None, :]).to(tl.int32), 1)
    first_stop = tl.min(tl.where(proposed & (ends == 1), rows, NO_ID), 0)
    places = (session * num_slots + rows)[:, None] * num_leaves + leaves[None, :]
    seen = (rows <= num)[:, None] & (leaves < num_leaves)[None, :]
    _wait_until(leaves_done + session, num_parts)

    # What the leaves hold, asked for at once.
    exponents = tl.load(leaf_exponents + places, seen, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(leaf_masses + places, seen, other=0, cache_modifier=".cg")
    draft_weight = tl.zeros_like(score)
    if KIND != NO_DRAFT and draft_masses is None:
        draft_places = places + (BUCKET + 1) * num_leaves
        draft_seen = (proposed & residual)[:, None] & (leaves < num_leaves)[None, :]
        if KIND == SPARSE:
            draft_seen = draft_seen & (leaves < 1)[None, :]
            own_leaf = (session * num_slots + BUCKET + 1 + rows) * num_leaves
            draft_weight = tl.load(
                leaf_weights + own_leaf, proposed & residual, other=0.0, cache_modifier=".cg"
            )
        draft_leaf_exponents = tl.load(
            leaf_exponents + draft_places, draft_seen, other=float("-inf"), cache_modifier=".cg"
        )
        draft_leaf_masses = tl.load(
            leaf_masses + draft_places, draft_seen, other=0, cache_modifier=".cg"
        )
    top, mass, row_bad = merge_masses(exponents, masses, 1)
    point = tl.where(top == float("-inf"), 0.0, top)
    weight = weigh(score, scale, point)
    target_mass = mass.to(tl.float64)
    draft_bad = proposed & ~valid
    winner = tl.zeros_like(token) - 1
    kept = rows < 0
    if residual:
        if KIND == NO_DRAFT:
            draft_bad |= proposed
        else:
            bad = draft_mass <= 0
            if draft_masses is None:
                draft_top, draft_mass, bad = merge_masses(
                    draft_leaf_exponents, draft_leaf_masses, 1
                )
            if KIND == LOGITS:
                draft_weight = weigh(
                    draft_score, draft_scale, tl.where(draft_top == float("-inf"), 0.0, draft_top)
                )
            elif KIND == WEIGHTS:
                draft_weight = draft_score * power_of_two(-tl.maximum(draft_top, -127.0))
            draft_bad |= proposed & (bad | ~(draft_weight > 0))
            held = draft_weight.to(tl.float64) * target_mass
            offered = weight.to(tl.float64) * draft_mass.to(tl.float64)
            kept = proposed & (u.to(tl.float64) * held < offered)
    else:
        packed = tl.load(leaf_best + places, seen, other=0, cache_modifier=".cg")
        winner = merge_winners(packed, exponents, top, seen, rule)
        kept = proposed & (winner == token)

    # First row that was not kept; an accepted stop token before it ends the round without a draw.
    first_open = tl.min(tl.where(kept, NO_ID, rows), 0)
    stopped = first_stop < first_open
    last = tl.minimum(first_stop, first_open)
    judged = rows <= last
    faulty_row = tl.max((judged & row_bad).to(tl.int32), 0) == 1
    faulty_draft = tl.max((judged & draft_bad).to(tl.int32), 0) == 1
    status = tl.where(faulty_draft, DRAFT_FAULT, OK)
    status = tl.where(faulty_row, ROW_FAULT, status)
    status = tl.where(num < 0, OK, status)
    live = (num >= 0) & (status == OK)
    closes = live & ~stopped
    out = tokens + session * (BUCKET + 1)
    if reports:
        target_log2 = tl.fma(score, scale, -point) - log2_mass(mass)
        draft_log2 = tl.zeros_like(target_log2)
        if KIND != NO_DRAFT:  # noqa: SIM102 - known when compiled
            if residual:
                drawn = tl.where(draft_weight > 0, draft_weight, 1.0)
                draft_log2 = tl.log2(drawn) - log2_mass(draft_mass)
        _report(
            out, counts, log_probs, session, rows, token, winner, last, stopped, judged, proposed,
            live, closes, residual, status, target_log2, draft_log2, BUCKET,
        )  # fmt: skip
        if not residual:
            tl.store(leaves_done + session, 0)  # no other program of the session waits
    if not residual:
        return

    # The closing draw, from the residual or the bonus row.
    here = rows == last
    origin = tl.sum(tl.where(here, point, 0.0), 0)
    draft_origin = tl.sum(tl.where(here & (draft_top > float("-inf")), draft_top, 0.0), 0)
    ratio = tl.where(here & proposed, target_mass / tl.maximum(draft_mass, 1).to(tl.float64), 0.0)
    ratio = tl.sum(ratio, 0).to(tl.float32)  # P/Q: exactly 1 for equal rows, which leave nothing
    rejected = last < num
    stream = tl.where(rejected, RESIDUAL_STREAM, BONUS_STREAM)
    position = base_len + last
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + session * (BUCKET + 1) + last)
    row = logits + (first_row + last).to(tl.int64) * stride_row
    draft_row = draft
    draft_row_ids = draft_ids
    draft_bar = float("-inf")
    if KIND != NO_DRAFT:
        draft_row += session.to(tl.int64) * stride_db + last.to(tl.int64) * stride_dk
        if KIND == SPARSE:
            draft_row_ids += session.to(tl.int64) * stride_ib + last.to(tl.int64) * stride_ik
        if KIND == LOGITS:
            if draft_thresholds is not None:
                draft_bar = tl.load(draft_thresholds + session * BUCKET + last, rejected, other=0.0)
        else:
            ratio *= power_of_two(-draft_origin)
    if closes:
        race_group(
            group * TILES, row, stride_id, threshold, draft_row, draft_row_ids, num_sparse,
            stride_di, stride_ii, vocab_size, draft_bar, scale, draft_scale, origin, draft_origin,
            ratio, rejected, best_rates + session, leftovers + session * num_groups + group,
            seed, position, base_len, stream, KIND, thresholds is not None,
            draft_thresholds is not None, SPARSE_PAD, RUN, TILES, STAGES,
        )  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(arrivals + session, 1, sem="acq_rel") != num_groups - 1:
        return
    tl.store(arrivals + session, 0)
    tl.store(leaves_done + session, 0)  # every program of the session has passed the wait
    if closes:
        best = tl.atomic_xchg(best_rates + session, tl.zeros_like(seed), sem="relaxed")
        best = race_leftovers(
            leftovers + session * num_groups, num_groups, row, stride_id, threshold, draft_row,
            draft_row_ids, num_sparse, stride_di, stride_ii, vocab_size, draft_bar, scale,
            draft_scale, origin, draft_origin, ratio, rejected, best, seed, position, base_len,
            stream, KIND, thresholds is not None, draft_thresholds is not None, SPARSE_PAD, RUN,
            TILES, GROUPS_PAD,
        )  # fmt: skip
        tl.store(out + last, unpack_id(best))
