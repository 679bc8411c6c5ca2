"""Accept, residual and bonus of a batch of rounds in two launches: `specmesh::accept`.

Launch 1, `_judge_kernel`, reads every row that may be judged once, a leaf (`row_state`) a program,
session after session, and counts each leaf in its session. Launch 2, `_close_kernel`, may start
while launch 1 still runs (programmatic dependent launch): a program waits until all leaves of its
session are counted, so one session's race runs under another's reads. It first judges its session
from the leaves' few numbers (every program alike): candidates against coins (u q(x) P < p(x) Q),
against the target's own race winner (coupled), or against its argmax (greedy). Then it races the
residual [p/P - q/Q]+ or the bonus row, and the program that finishes a session last writes the
token. Launch 2 starts only when every program of launch 1 runs, so no wait can last for ever.
No probability tensor is written and the host reads nothing. The specification is `reference.decide`
and `decide_coupled`; the contract that makes a token independent of launch, batch and place is in
`row_state`.

Must not know requests or services. The public functions and the meaning of each argument are in
`kernels/sampling.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.philox import uniform_at, words_tile
from kernels.row_state import (
    INTERPRETING,
    LEAF_TILES,
    LN_2,
    LOG2_E,
    LOWEST,
    MASS_UNIT,
    NO_ID,
    append_tile,
    exact_mass,
    filtered,
    load_scores,
    merge_masses,
    power_of_two,
    race,
    read_scores,
    rescaled,
    score_leaf,
    tile_ids,
    tiles_of,
    unpack_id,
    weigh,
)
from kernels.streams import Purpose

RESIDUAL, COUPLED, GREEDY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OK, ROW_FAULT, DRAFT_FAULT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_DRAFT, LOGITS, WEIGHTS, SPARSE = (tl.constexpr(kind) for kind in range(4))
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
def weights_leaf(row, leaf, stride, vocab_size, TILE: tl.constexpr):
    """One leaf of a row of weights: (m, mass or -1)."""
    first = leaf * (LEAF_TILES * TILE)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.int64)
    bad = total < 0
    for _ in range(0, tiles_of(leaf, vocab_size, TILE)):
        ids = first + tl.arange(0, TILE)
        weights = tl.load(row + ids.to(tl.int64) * stride, ids < vocab_size, other=0.0)
        weights = weights.to(tl.float32)
        m = weights_exponent(tl.max(weights, 0))
        mass = exact_mass(weights * power_of_two(-tl.maximum(m, -127.0)), TILE)
        top, total, bad = append_tile(top, total, bad, m, mass)
        first += TILE
    return top, tl.where(bad, -1, total)


@triton.jit
def sparse_row(ids, weights, stride_i, stride_w, num_ids, candidate, SPARSE_PAD: tl.constexpr):
    """A sparse row: (m, mass or -1, the candidate's weight on the scale 2^m)."""
    places = tl.arange(0, SPARSE_PAD)
    token = tl.load(ids + places * stride_i, places < num_ids, other=-1)
    weight = tl.load(weights + places * stride_w, places < num_ids, other=0.0).to(tl.float32)
    weight = tl.where(token < 0, 0.0, weight)
    m = weights_exponent(tl.max(weight, 0))
    weight = weight * power_of_two(-tl.maximum(m, -127.0))
    sound = weight < float("inf")
    mass = tl.sum((tl.where(sound, weight, 0.0) * MASS_UNIT).to(tl.int64), 0)
    mass = tl.where(tl.min(sound.to(tl.int32), 0) == 1, mass, -1)
    return m, mass, tl.max(tl.where(token == candidate, weight, 0.0), 0)


@triton.jit
def merge_winners(packed, exponents, top, seen, rule):
    """Winner id of each row from its leaves' winners; rates are brought to one scale first."""
    if rule == COUPLED:
        packed = rescaled(
            packed, exponents - tl.expand_dims(tl.where(top == float("-inf"), 0.0, top), 1)
        )
    return unpack_id(tl.max(tl.where(seen, packed, LOWEST), 1))


@triton.jit
def _judge_kernel(
    logits, first_rows, candidates, num_candidates, seeds, base_lens, rules, temperatures,
    thresholds, draft, draft_ids, draft_temperatures, draft_thresholds,
    leaf_exponents, leaf_masses, leaf_best, leaf_weights, leaves_done,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    vocab_size, num_leaves, num_sparse, num_slots, num_parts,
    BUCKET: tl.constexpr, KIND: tl.constexpr, SPARSE_PAD: tl.constexpr, TILE: tl.constexpr,
    RUN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: sessions x their leaves: of target rows, then of draft rows (one for a sparse row)."""
    if EARLY and not INTERPRETING:
        gdc_launch_dependents()
    session, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    slot, leaf = part // num_leaves, part % num_leaves
    if KIND == SPARSE:  # noqa: SIM102 - known when compiled
        if slot > BUCKET:
            slot, leaf = part - (BUCKET + 1) * (num_leaves - 1), tl.zeros_like(leaf)
    num = tl.load(num_candidates + session)
    rule = tl.load(rules + session)
    seed, base_len = tl.load(seeds + session), tl.load(base_lens + session)
    partial = (session * num_slots + slot) * num_leaves + leaf
    if slot <= BUCKET:
        if slot <= num:
            first_row = session * (BUCKET + 1)
            if first_rows is not None:
                first_row = tl.load(first_rows + session)
            threshold = float("-inf")
            if thresholds is not None:
                threshold = tl.load(thresholds + session * (BUCKET + 1) + slot)
            m, mass, best = score_leaf(
                logits + (first_row + slot).to(tl.int64) * stride_row, leaf, stride_id,
                vocab_size, threshold, scale_of(tl.load(temperatures + session), rule),
                rule == GREEDY, rule == COUPLED, seed, base_len + slot, 0, COUPLED_STREAM,
                thresholds is not None, True, TILE, RUN,
            )  # fmt: skip
            tl.store(leaf_exponents + partial, m)
            tl.store(leaf_masses + partial, mass)
            tl.store(leaf_best + partial, best)
    elif (slot - BUCKET - 1 < num) & (rule == RESIDUAL):
        index = slot - BUCKET - 1
        row = draft + session.to(tl.int64) * stride_db + index.to(tl.int64) * stride_dk
        if KIND == LOGITS:
            threshold = float("-inf")
            if draft_thresholds is not None:
                threshold = tl.load(draft_thresholds + session * BUCKET + index)
            m, mass, _ = score_leaf(
                row, leaf, stride_di, vocab_size, threshold,
                scale_of(tl.load(draft_temperatures + session), rule), False, False, seed,
                0, 0, 0, draft_thresholds is not None, False, TILE, RUN,
            )  # fmt: skip
            tl.store(leaf_exponents + partial, m)
            tl.store(leaf_masses + partial, mass)
        elif KIND == WEIGHTS:
            m, mass = weights_leaf(row, leaf, stride_di, vocab_size, TILE)
            tl.store(leaf_exponents + partial, m)
            tl.store(leaf_masses + partial, mass)
        elif KIND == SPARSE:
            candidate = tl.load(candidates + session * BUCKET + index).to(tl.int32)
            row_ids = draft_ids + session.to(tl.int64) * stride_ib
            m, mass, weight = sparse_row(
                row_ids + index.to(tl.int64) * stride_ik, row, stride_ii, stride_di,
                num_sparse, candidate, SPARSE_PAD,
            )  # fmt: skip
            tl.store(leaf_exponents + partial, m)
            tl.store(leaf_masses + partial, mass)
            tl.store(leaf_weights + partial, weight)
    tl.debug_barrier()
    tl.atomic_add(leaves_done + session, 1, sem="release")


@triton.jit
def _wait_until(counter, expected):
    """Return when *counter >= expected; the caller's next atomic acquires what was counted."""
    seen = tl.load(counter, volatile=True)
    while seen < expected:
        if not INTERPRETING:
            tl.inline_asm_elementwise(
                "nanosleep.u32 100; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        seen = tl.load(counter, volatile=True)


@triton.jit
def _merged_leaves(leaf_exponents, leaf_masses, places, seen):
    """(leaves' exponents, rows' exponents, masses, whether bad) that other programs wrote."""
    exponents = tl.load(leaf_exponents + places, seen, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(leaf_masses + places, seen, other=0, cache_modifier=".cg")
    top, mass, bad = merge_masses(exponents, masses, 1)
    return exponents, top, mass, bad


@triton.jit
def _draft_weights(
    draft, draft_temperatures, draft_thresholds, leaf_weights, session, rows, token, wanted,
    readable, draft_top, scale, own_leaf, stride_db, stride_dk, stride_di,
    BUCKET: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """(the candidates' weights in the draft's rows on the scale 2^draft_top, the rows' scale)."""
    draft_scale = scale
    if KIND == SPARSE:
        draft_weight = tl.load(leaf_weights + own_leaf, wanted, other=0.0, cache_modifier=".cg")
    else:
        own = session.to(tl.int64) * stride_db + rows.to(tl.int64) * stride_dk
        own = draft + own + token.to(tl.int64) * stride_di
        if KIND == LOGITS:
            draft_score = tl.load(own, readable, other=float("-inf"))
            draft_score = draft_score.to(tl.float32)
            if draft_thresholds is not None:
                bar = tl.load(draft_thresholds + session * BUCKET + rows, wanted, other=0.0)
                draft_score = tl.where(draft_score < bar, float("-inf"), draft_score)
            draft_scale = scale_of(tl.load(draft_temperatures + session), RESIDUAL)
            origin = tl.where(draft_top == float("-inf"), 0.0, draft_top)
            draft_weight = weigh(draft_score, draft_scale, origin)
        else:
            draft_weight = tl.load(own, readable, other=0.0).to(tl.float32)
            draft_weight *= power_of_two(-tl.maximum(draft_top, -127.0))
    return draft_weight, draft_scale


@triton.jit
def _sparse_tile(token, ids, weights, stride_n, stride_w, places_of, first_id,
                 ROWS: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    """The weights of a sparse row (ascending ids, padding -1 last) spread over one tile of ids.

    token: all ids of the row, read once; ids, weights: where they lie.
    """
    known = token >= 0
    begin = tl.sum((known & (token < first_id)).to(tl.int32), 0)
    end = tl.sum((known & (token < first_id + ROWS * RUN)).to(tl.int32), 0)
    spread = tl.zeros([ROWS, RUN], tl.float32)
    for place in range(begin, end):
        owner = tl.load(ids + place * stride_n).to(tl.int32)
        weight = tl.load(weights + place * stride_w).to(tl.float32)
        spread = tl.where(places_of == owner, weight, spread)
    return spread


@triton.jit
def _read_held(row, ids, stride, vocab_size, wanted, KIND: tl.constexpr):
    """The draft's scores or weights at ids, in their own type; nothing is read if not wanted."""
    empty = 0.0
    if KIND == LOGITS:
        empty = float("-inf")
    return tl.load(row + ids.to(tl.int64) * stride, (ids < vocab_size) & wanted, other=empty)


@triton.jit
def _close_kernel(  # noqa: C901 - every program judges before it draws
    logits, first_rows, candidates, num_candidates, seeds, base_lens, rules, temperatures,
    thresholds, stop_ids, draft, draft_ids, draft_temperatures, draft_thresholds,
    draft_exponents, draft_masses, leaf_exponents, leaf_masses, leaf_best, leaf_weights,
    leaves_done, arrivals, best_rates, tokens, counts, log_probs,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    vocab_size, num_leaves, num_stops, num_sparse, num_slots, num_tiles, num_groups,
    num_parts,
    BUCKET: tl.constexpr, BUCKET_PAD: tl.constexpr, LEAVES_PAD: tl.constexpr, KIND: tl.constexpr,
    STOPS_PAD: tl.constexpr, SPARSE_PAD: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Grid (sessions x groups of tiles). See the module text."""
    session, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    num = tl.load(num_candidates + session)
    rule = tl.load(rules + session)
    if (group > 0) & (rule != RESIDUAL):
        return
    seed, base_len = tl.load(seeds + session), tl.load(base_lens + session)
    first_row = session * (BUCKET + 1)
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    scale = scale_of(tl.load(temperatures + session), rule)
    draft_scale = scale

    # What was kept: one lane a row.
    rows = tl.arange(0, BUCKET_PAD)
    leaves = tl.arange(0, LEAVES_PAD)
    proposed = rows < num
    token = tl.load(candidates + session * BUCKET + rows, proposed, other=-1).to(tl.int32)
    valid = (token >= 0) & (token < vocab_size)
    at = (first_row + rows).to(tl.int64) * stride_row + token.to(tl.int64) * stride_id
    score = tl.load(logits + at, proposed & valid, other=float("-inf")).to(tl.float32)
    if thresholds is not None:
        bar = tl.load(thresholds + session * (BUCKET + 1) + rows, rows <= BUCKET, other=0.0)
        score = tl.where(score < bar, float("-inf"), score)
    _wait_until(leaves_done + session, num_parts)
    departed = tl.atomic_add(leaves_done + session, 1, sem="acquire")
    places = (session * num_slots + rows)[:, None] * num_leaves + leaves[None, :]
    seen = (rows <= num)[:, None] & (leaves < num_leaves)[None, :]
    exponents, top, mass, row_bad = _merged_leaves(leaf_exponents, leaf_masses, places, seen)
    point = tl.where(top == float("-inf"), 0.0, top)
    draft_bad = proposed & ~valid
    target_mass = mass.to(tl.float64)
    weight = weigh(score, scale, point)
    target_log2 = tl.fma(score, scale, -point) - log2_mass(mass)
    draft_log2 = tl.zeros_like(target_log2)
    draft_top = tl.zeros_like(top)
    draft_mass = tl.zeros_like(mass)
    winner = tl.zeros_like(token) - 1
    kept = rows < 0
    if rule == RESIDUAL:
        if KIND == NO_DRAFT:
            draft_bad |= proposed
        else:
            draft_places = places + (BUCKET + 1) * num_leaves
            if draft_masses is not None:
                given = session * BUCKET + rows
                draft_top = tl.load(draft_exponents + given, proposed, other=float("-inf"))
                draft_mass = tl.load(draft_masses + given, proposed, other=0)
                bad = draft_mass <= 0
            else:
                draft_seen = proposed[:, None] & (leaves < num_leaves)[None, :]
                if KIND == SPARSE:
                    draft_seen = draft_seen & (leaves < 1)[None, :]
                _, draft_top, draft_mass, bad = _merged_leaves(
                    leaf_exponents, leaf_masses, draft_places, draft_seen
                )
            own_leaf = (session * num_slots + BUCKET + 1 + rows) * num_leaves
            draft_weight, draft_scale = _draft_weights(
                draft, draft_temperatures, draft_thresholds, leaf_weights, session, rows, token,
                proposed, proposed & valid, draft_top, scale, own_leaf, stride_db, stride_dk,
                stride_di, BUCKET, KIND,
            )  # fmt: skip
            draft_bad |= proposed & (bad | ~(draft_weight > 0))
            u = uniform_at(
                seed, tl.zeros([BUCKET_PAD], tl.int32), base_len + rows, base_len, ACCEPT_STREAM
            )
            held = draft_weight.to(tl.float64) * target_mass
            offered = weight.to(tl.float64) * draft_mass.to(tl.float64)
            kept = proposed & (u.to(tl.float64) * held < offered)
            drawn = tl.where(draft_weight > 0, draft_weight, 1.0)
            draft_log2 = tl.log2(drawn) - log2_mass(draft_mass)
    else:
        packed = tl.load(leaf_best + places, seen, other=0, cache_modifier=".cg")
        winner = merge_winners(packed, exponents, top, seen, rule)
        kept = proposed & (winner == token)

    # First row that was not kept; an accepted stop token before it ends the round without a draw.
    first_open = tl.min(tl.where(kept, NO_ID, rows), 0)
    stops = tl.arange(0, STOPS_PAD)
    stop = tl.load(stop_ids + session * num_stops + stops, stops < num_stops, other=-1)
    ends = tl.max((token[:, None] == stop[None, :]).to(tl.int32), 1)
    first_stop = tl.min(tl.where(proposed & (ends == 1), rows, NO_ID), 0)
    stopped = first_stop < first_open
    last = tl.minimum(first_stop, first_open)
    num_accepted = tl.where(stopped, last + 1, last)
    judged = rows <= last
    faulty_row = tl.max((judged & row_bad).to(tl.int32), 0) == 1
    faulty_draft = tl.max((judged & draft_bad).to(tl.int32), 0) == 1
    status = tl.where(faulty_draft, DRAFT_FAULT, OK)
    status = tl.where(faulty_row, ROW_FAULT, status)
    status = tl.where(num < 0, OK, status)
    live = (num >= 0) & (status == OK)
    closes = live & ~stopped
    out = tokens + session * (BUCKET + 1)
    if group == 0:
        written = tl.where(rows < num_accepted, token, tl.where(rows == last, winner, -1))
        written = tl.where(stopped & (rows >= num_accepted), -1, written)
        mine = (rows <= BUCKET) & ~((rows == last) & closes & (rule == RESIDUAL))
        tl.store(out + rows, tl.where(live, written, -1), mine)
        tl.store(counts + session * 3, tl.where(live, num_accepted, 0))
        tl.store(counts + session * 3 + 1, tl.where(live, num_accepted + closes.to(tl.int32), 0))
        tl.store(counts + session * 3 + 2, status)
        pair = log_probs + (session * BUCKET + rows) * 2
        shown = judged & proposed & live
        tl.store(pair, tl.where(shown, target_log2 * LN_2, 0.0), rows < BUCKET)
        tl.store(pair + 1, tl.where(shown, draft_log2 * LN_2, 0.0), rows < BUCKET)
    if departed == num_parts + tl.where(rule == RESIDUAL, num_groups, 1) - 1:
        tl.store(leaves_done + session, 0)  # every program of the session has passed the wait
    if ~closes | (rule != RESIDUAL):
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
            at_sparse = tl.arange(0, SPARSE_PAD)
            sparse_ids = tl.load(
                draft_row_ids + at_sparse * stride_ii, (at_sparse < num_sparse) & rejected, other=-1
            )
        if KIND == LOGITS:
            if draft_thresholds is not None:  # noqa: SIM102 - known when compiled
                if rejected:
                    draft_bar = tl.load(draft_thresholds + session * BUCKET + last)
        else:
            ratio *= power_of_two(-draft_origin)
    best = tl.load(best_rates + session)  # what others found so far: only a bar, the maximum stays
    first_tile = group * TILES_PER_PROGRAM
    ids = tile_ids(first_tile * (ROWS * RUN), ROWS, RUN)
    reads_draft: tl.constexpr = KIND != NO_DRAFT and KIND != SPARSE
    following = read_scores(row, ids, stride_id, vocab_size)
    following_held = following
    if reads_draft:
        following_held = _read_held(draft_row, ids, stride_di, vocab_size, rejected, KIND)
    for tile in range(first_tile, tl.minimum(first_tile + TILES_PER_PROGRAM, num_tiles)):
        scores = filtered(following, threshold, thresholds is not None)
        held = following_held
        ids = tile_ids(tile * (ROWS * RUN), ROWS, RUN)
        following = read_scores(row, ids + ROWS * RUN, stride_id, vocab_size)
        if reads_draft:
            following_held = _read_held(
                draft_row, ids + ROWS * RUN, stride_di, vocab_size, rejected, KIND
            )
        weights = weigh(scores, scale, origin)
        if KIND != NO_DRAFT:  # noqa: SIM102 - known when compiled
            if rejected:
                if KIND == SPARSE:
                    share = _sparse_tile(
                        sparse_ids, draft_row_ids, draft_row, stride_ii, stride_di, ids,
                        tile * (ROWS * RUN), ROWS, RUN,
                    )  # fmt: skip
                elif KIND == WEIGHTS:
                    share = held.to(tl.float32)
                else:
                    share = filtered(held, draft_bar, draft_thresholds is not None)
                    share = weigh(share, draft_scale, draft_origin)
                weights = tl.fma(share, -ratio, weights)
        words = words_tile(seed, tile * (ROWS * RUN), position, base_len, stream, ROWS, RUN)
        best = race(weights, words, ids, best, seed, position, base_len, stream)
    tl.atomic_max(best_rates + session, best, sem="relaxed")
    if tl.atomic_add(arrivals + session, 1, sem="acq_rel") != num_groups - 1:
        return
    tl.store(arrivals + session, 0)
    best = tl.atomic_xchg(best_rates + session, tl.zeros_like(best), sem="relaxed")
    if best == 0:  # rounding left no residual anywhere: draw from p, with the same noise
        for tile in range(0, num_tiles):
            ids = tile_ids(tile * (ROWS * RUN), ROWS, RUN)
            scores = load_scores(row, ids, stride_id, vocab_size, threshold, thresholds is not None)
            weights = weigh(scores, scale, origin)
            words = words_tile(seed, tile * (ROWS * RUN), position, base_len, stream, ROWS, RUN)
            best = race(weights, words, ids, best, seed, position, base_len, stream)
    tl.store(out + last, unpack_id(best))
