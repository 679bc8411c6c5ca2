"""Accept, residual and bonus of a batch of rounds in two launches: `specmesh::accept`.

Launch 1, `_judge_kernel`, reads every judged row once, leaf by leaf (`row_state`), and the program
that finishes a session last judges it: candidates against coins (u q(x) P < p(x) Q), against the
target's own race winner (coupled), or against its argmax (greedy). Launch 2, `_close_kernel`, races
the residual [p/P - q/Q]+ or the bonus row of the sessions that need it. No probability tensor is
written and the host reads nothing. The specification is `reference.decide` and `decide_coupled`;
the contract that makes a token independent of launch, batch and place is in `row_state`.

Must not know requests or services. The public functions and the meaning of each argument are in
`kernels/sampling.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.philox import uniform_at, uniform_tile
from kernels.row_state import (
    LN_2,
    LOG2_E,
    MASS_UNIT,
    NO_ID,
    argmax,
    exact_mass,
    exponent_of,
    load_scores,
    merge_masses,
    pack_rate,
    power_of_two,
    race,
    race_leaf,
    tile_ids,
    unpack_id,
    unpack_rate,
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
def score_leaf(
    row, leaf, stride, vocab_size, threshold, scale, rule, seed, position, round_key, stream,
    FILTERED: tl.constexpr, RACES: tl.constexpr, LEAF: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One leaf of a row of scores: (m, mass, packed winner on the leaf's own scale or 0)."""
    ids = leaf * LEAF + tl.arange(0, LEAF)
    scores = load_scores(row, ids, stride, vocab_size, threshold, FILTERED)
    m, point = exponent_of(scores, scale)
    weights = weigh(scores, scale, point)
    mass = exact_mass(weights, LEAF)
    best = tl.zeros_like(mass)
    if RACES:
        if rule == COUPLED:
            best = race_leaf(
                row, leaf, stride, vocab_size, threshold, scale, point, seed, position, round_key,
                stream, FILTERED, LEAF, RUN,
            )  # fmt: skip
        elif rule == GREEDY:
            best = argmax(scores, ids)
    return m, mass, best


@triton.jit
def weights_leaf(row, leaf, stride, vocab_size, LEAF: tl.constexpr):
    """One leaf of a row of weights: (m, mass)."""
    ids = leaf * LEAF + tl.arange(0, LEAF)
    weights = tl.load(row + ids.to(tl.int64) * stride, ids < vocab_size, other=0.0).to(tl.float32)
    m = weights_exponent(tl.max(weights, 0))
    return m, exact_mass(weights * power_of_two(-tl.maximum(m, -127.0)), LEAF)


@triton.jit
def merge_winners(packed, exponents, top, seen, rule):
    """Winner id of each row from its leaves' winners; rates are brought to one scale first."""
    if rule == COUPLED:
        gap = exponents - tl.expand_dims(tl.where(top == float("-inf"), 0.0, top), 1)
        rate = unpack_rate(packed) * power_of_two(tl.maximum(gap, -127.0))
        packed = tl.where(rate > 0, pack_rate(rate, unpack_id(packed)), 0)
    lowest = tl.full(packed.shape, -0x8000000000000000, tl.int64)
    return unpack_id(tl.max(tl.where(seen, packed, lowest), 1))


@triton.jit
def _sparse_masses(
    ids, weights, stride_ik, stride_ii, stride_wk, stride_wi, candidates, num, rows, num_ids,
    ROWS: tl.constexpr, SPARSE_PAD: tl.constexpr,
):  # fmt: skip
    """Exponent, mass, fault and candidate's scaled weight of each sparse row, [ROWS] each."""
    exponents = tl.full([ROWS], float("-inf"), tl.float32)
    masses = tl.zeros([ROWS], tl.int64)
    own = tl.zeros([ROWS], tl.float32)
    unsound = tl.zeros([ROWS], tl.int32)
    places = tl.arange(0, SPARSE_PAD)
    for row in range(0, num):
        here = rows == row
        token = tl.load(ids + row * stride_ik + places * stride_ii, places < num_ids, other=-1)
        at = row * stride_wk + places * stride_wi
        weight = tl.load(weights + at, places < num_ids, other=0.0).to(tl.float32)
        weight = tl.where(token < 0, 0.0, weight)
        m = weights_exponent(tl.max(weight, 0))
        weight = weight * power_of_two(-tl.maximum(m, -127.0))
        sound = weight < float("inf")
        mass = tl.sum(tl.where(sound, weight * MASS_UNIT, 0.0).to(tl.int64), 0)
        candidate = tl.sum(tl.where(here, candidates, 0), 0)
        drawn = tl.max(tl.where(token == candidate, weight, 0.0), 0)
        exponents = tl.where(here, m, exponents)
        masses = tl.where(here, mass, masses)
        own = tl.where(here, drawn, own)
        unsound = tl.where(here, 1 - tl.min(sound.to(tl.int32), 0), unsound)
    return exponents, masses, (unsound == 1) | (masses == 0), own


@triton.jit
def _judge_kernel(  # noqa: C901 - one launch holds every kind of row and rule
    logits, first_rows, candidates, num_candidates, seeds, base_lens, rules, temperatures,
    thresholds, stop_ids, draft, draft_ids, draft_temperatures, draft_thresholds,
    draft_exponents, draft_masses, leaf_exponents, leaf_masses, leaf_best, arrivals,
    choice, choice_scales, tokens, counts, log_probs,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    vocab_size, num_leaves, num_stops, num_sparse, num_slots,
    BUCKET: tl.constexpr, ROWS: tl.constexpr, LEAVES_PAD: tl.constexpr, KIND: tl.constexpr,
    STOPS_PAD: tl.constexpr, SPARSE_PAD: tl.constexpr, LEAF: tl.constexpr,
    LEAVES_PER_PROGRAM: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Grid (leaf groups, sessions, target rows then draft rows). See the module text."""
    session, slot = tl.program_id(1), tl.program_id(2)
    num = tl.load(num_candidates + session)
    rule = tl.load(rules + session)
    seed, base_len = tl.load(seeds + session), tl.load(base_lens + session)
    first_row = session * (BUCKET + 1)
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    scale = scale_of(tl.load(temperatures + session), rule)
    first_leaf = tl.program_id(0) * LEAVES_PER_PROGRAM
    last_leaf = tl.minimum(first_leaf + LEAVES_PER_PROGRAM, num_leaves)
    partial = (session * num_slots + slot) * num_leaves
    if slot <= BUCKET:
        if slot <= num:
            threshold = float("-inf")
            if thresholds is not None:
                threshold = tl.load(thresholds + session * (BUCKET + 1) + slot)
            row = logits + (first_row + slot).to(tl.int64) * stride_row
            for leaf in range(first_leaf, last_leaf):
                m, mass, best = score_leaf(
                    row, leaf, stride_id, vocab_size, threshold, scale, rule, seed,
                    base_len + slot, 0, COUPLED_STREAM, thresholds is not None, True, LEAF, RUN,
                )  # fmt: skip
                tl.store(leaf_exponents + partial + leaf, m)
                tl.store(leaf_masses + partial + leaf, mass)
                tl.store(leaf_best + partial + leaf, best)
    elif (slot - BUCKET - 1 < num) & (rule == RESIDUAL):
        index = slot - BUCKET - 1
        row = draft + session.to(tl.int64) * stride_db + index.to(tl.int64) * stride_dk
        if KIND == LOGITS:
            threshold = float("-inf")
            if draft_thresholds is not None:
                threshold = tl.load(draft_thresholds + session * BUCKET + index)
            draft_scale = scale_of(tl.load(draft_temperatures + session), rule)
            for leaf in range(first_leaf, last_leaf):
                m, mass, best = score_leaf(
                    row, leaf, stride_di, vocab_size, threshold, draft_scale, rule, seed,
                    0, 0, COUPLED_STREAM, draft_thresholds is not None, False, LEAF, RUN,
                )  # fmt: skip
                tl.store(leaf_exponents + partial + leaf, m)
                tl.store(leaf_masses + partial + leaf, mass)
        elif KIND == WEIGHTS:
            for leaf in range(first_leaf, last_leaf):
                m, mass = weights_leaf(row, leaf, stride_di, vocab_size, LEAF)
                tl.store(leaf_exponents + partial + leaf, m)
                tl.store(leaf_masses + partial + leaf, mass)
    tl.debug_barrier()
    num_programs = tl.num_programs(0) * tl.num_programs(2)
    if tl.atomic_add(arrivals + session, 1, sem="acq_rel") != num_programs - 1:
        return
    tl.store(arrivals + session, 0)

    # The last program of the session: all its partials are written.
    rows = tl.arange(0, ROWS)
    leaves = tl.arange(0, LEAVES_PAD)
    places = (session * num_slots + rows)[:, None] * num_leaves + leaves[None, :]
    seen = (rows <= num)[:, None] & (leaves < num_leaves)[None, :]
    proposed = rows < num
    exponents = tl.load(leaf_exponents + places, seen, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(leaf_masses + places, seen, other=0, cache_modifier=".cg")
    top, mass, row_bad = merge_masses(exponents, masses, 1)
    point = tl.where(top == float("-inf"), 0.0, top)
    token = tl.load(candidates + session * BUCKET + rows, proposed, other=-1).to(tl.int32)
    valid = (token >= 0) & (token < vocab_size)
    draft_bad = proposed & ~valid
    at = (first_row + rows).to(tl.int64) * stride_row + token.to(tl.int64) * stride_id
    score = tl.load(logits + at, proposed & valid, other=float("-inf")).to(tl.float32)
    if thresholds is not None:
        bar = tl.load(thresholds + session * (BUCKET + 1) + rows, rows <= BUCKET, other=0.0)
        score = tl.where(score < bar, float("-inf"), score)
    weight = weigh(score, scale, point)
    target_mass = mass.to(tl.float64)
    target_log2 = tl.fma(score, scale, -point) - log2_mass(mass)
    draft_log2 = tl.zeros_like(target_log2)
    draft_top = tl.zeros_like(top)
    draft_mass = tl.zeros_like(mass)
    winner = tl.zeros_like(token) - 1
    kept = rows < 0
    if rule == RESIDUAL:
        if KIND != NO_DRAFT:
            if KIND == SPARSE:
                draft_top, draft_mass, bad, draft_weight = _sparse_masses(
                    draft_ids + session.to(tl.int64) * stride_ib,
                    draft + session.to(tl.int64) * stride_db,
                    stride_ik, stride_ii, stride_dk, stride_di,
                    token, num, rows, num_sparse, ROWS, SPARSE_PAD,
                )  # fmt: skip
            else:
                if draft_masses is not None:
                    given = session * BUCKET + rows
                    draft_top = tl.load(draft_exponents + given, proposed, other=float("-inf"))
                    draft_mass = tl.load(draft_masses + given, proposed, other=0)
                    bad = draft_mass <= 0
                else:
                    draft_places = places + (BUCKET + 1) * num_leaves
                    draft_seen = proposed[:, None] & seen
                    draft_top, draft_mass, bad = merge_masses(
                        tl.load(leaf_exponents + draft_places, draft_seen, other=float("-inf"),
                                cache_modifier=".cg"),
                        tl.load(leaf_masses + draft_places, draft_seen, other=0,
                                cache_modifier=".cg"),
                        1,
                    )  # fmt: skip
                own = session.to(tl.int64) * stride_db + rows.to(tl.int64) * stride_dk
                own = draft + own + token.to(tl.int64) * stride_di
                if KIND == LOGITS:
                    draft_score = tl.load(own, proposed & valid, other=float("-inf"))
                    draft_score = draft_score.to(tl.float32)
                    if draft_thresholds is not None:
                        bar = tl.load(
                            draft_thresholds + session * BUCKET + rows, proposed, other=0.0
                        )
                        draft_score = tl.where(draft_score < bar, float("-inf"), draft_score)
                    draft_scale = scale_of(tl.load(draft_temperatures + session), rule)
                    origin = tl.where(draft_top == float("-inf"), 0.0, draft_top)
                    draft_weight = weigh(draft_score, draft_scale, origin)
                else:
                    draft_weight = tl.load(own, proposed & valid, other=0.0).to(tl.float32)
                    draft_weight *= power_of_two(-tl.maximum(draft_top, -127.0))
            draft_bad |= proposed & (bad | ~(draft_weight > 0))
            u = uniform_at(
                seed, tl.zeros([ROWS], tl.int32), base_len + rows, base_len, ACCEPT_STREAM
            )
            held = draft_weight.to(tl.float64) * target_mass
            offered = weight.to(tl.float64) * draft_mass.to(tl.float64)
            kept = proposed & (u.to(tl.float64) * held < offered)
            drawn = tl.where(draft_weight > 0, draft_weight, 1.0)
            draft_log2 = tl.log2(drawn) - log2_mass(draft_mass)
        else:
            draft_bad |= proposed
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
    emitted = tl.where(rows < num_accepted, token, tl.where(closes & (rows == last), winner, -1))
    out = tokens + session * (BUCKET + 1) + rows
    tl.store(out, tl.where(live, emitted, -1), rows <= BUCKET)
    tl.store(counts + session * 3, tl.where(live, num_accepted, 0))
    tl.store(counts + session * 3 + 1, tl.where(live, num_accepted + closes.to(tl.int32), 0))
    tl.store(counts + session * 3 + 2, status)
    pair = log_probs + (session * BUCKET + rows) * 2
    shown = rows < BUCKET
    tl.store(pair, tl.where(judged & proposed & live, target_log2 * LN_2, 0.0), shown)
    tl.store(pair + 1, tl.where(judged & proposed & live, draft_log2 * LN_2, 0.0), shown)

    here = rows == last
    tl.store(choice + session, tl.where(closes & (rule == RESIDUAL), last, -1))
    scales = choice_scales + session * 4
    tl.store(scales, tl.sum(tl.where(here, point, 0.0), 0))
    inverse = tl.where(here, MASS_UNIT / tl.maximum(target_mass, 1.0), 0.0)
    tl.store(scales + 1, tl.sum(inverse, 0).to(tl.float32))
    origin = tl.where(here & (draft_top > float("-inf")), draft_top, 0.0)
    tl.store(scales + 2, tl.sum(origin, 0))
    inverse = tl.where(here, MASS_UNIT / tl.maximum(draft_mass, 1).to(tl.float64), 0.0)
    tl.store(scales + 3, tl.sum(inverse, 0).to(tl.float32))


@triton.jit
def _sparse_tile(ids, weights, stride_n, stride_w, num_ids, places_of, first_id,
                 ROWS: tl.constexpr, RUN: tl.constexpr, SPARSE_PAD: tl.constexpr):  # fmt: skip
    """The weights of a sparse row (ascending ids, padding -1 last) spread over one tile of ids."""
    places = tl.arange(0, SPARSE_PAD)
    token = tl.load(ids + places * stride_n, places < num_ids, other=-1)
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
def _close_kernel(  # noqa: C901 - as above
    logits, first_rows, num_candidates, seeds, base_lens, temperatures, thresholds,
    draft, draft_ids, draft_temperatures, draft_thresholds, choice, choice_scales, best_rates,
    arrivals, tokens,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    vocab_size, num_tiles, num_sparse,
    BUCKET: tl.constexpr, KIND: tl.constexpr, SPARSE_PAD: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Grid (tile groups, sessions): the closing draw of sessions whose choice names a row."""
    session = tl.program_id(1)
    index = tl.load(choice + session)
    if index < 0:
        return
    num = tl.load(num_candidates + session)
    seed, base_len = tl.load(seeds + session), tl.load(base_lens + session)
    first_row = session * (BUCKET + 1)
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    scale = scale_of(tl.load(temperatures + session), RESIDUAL)
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + session * (BUCKET + 1) + index)
    point = tl.load(choice_scales + session * 4)
    inverse_mass = tl.load(choice_scales + session * 4 + 1)
    draft_point = tl.load(choice_scales + session * 4 + 2)
    draft_inverse = tl.load(choice_scales + session * 4 + 3)
    row = logits + (first_row + index).to(tl.int64) * stride_row
    draft_row = draft
    draft_row_ids = draft_ids
    draft_bar = float("-inf")
    draft_scale = scale
    if KIND != NO_DRAFT:
        draft_row += session.to(tl.int64) * stride_db + index.to(tl.int64) * stride_dk
        if KIND == SPARSE:
            draft_row_ids += session.to(tl.int64) * stride_ib + index.to(tl.int64) * stride_ik
        if KIND == LOGITS:
            draft_scale = scale_of(tl.load(draft_temperatures + session), RESIDUAL)
            if draft_thresholds is not None:  # noqa: SIM102 - known when compiled
                if index < num:
                    draft_bar = tl.load(draft_thresholds + session * BUCKET + index)
        else:
            draft_inverse *= power_of_two(-draft_point)
    rejected = index < num
    stream = tl.where(rejected, RESIDUAL_STREAM, BONUS_STREAM)
    position = base_len + index
    best = tl.zeros_like(seed)
    first_tile = tl.program_id(0) * TILES_PER_PROGRAM
    for tile in range(first_tile, tl.minimum(first_tile + TILES_PER_PROGRAM, num_tiles)):
        ids = tile_ids(tile * (ROWS * RUN), ROWS, RUN)
        scores = load_scores(row, ids, stride_id, vocab_size, threshold, thresholds is not None)
        weights = weigh(scores, scale, point)
        if KIND != NO_DRAFT:  # noqa: SIM102 - known when compiled
            if rejected:
                if KIND == SPARSE:
                    held = _sparse_tile(
                        draft_row_ids, draft_row, stride_ii, stride_di, num_sparse,
                        ids, tile * (ROWS * RUN), ROWS, RUN, SPARSE_PAD,
                    )  # fmt: skip
                elif KIND == WEIGHTS:
                    held = tl.load(
                        draft_row + ids.to(tl.int64) * stride_di, ids < vocab_size, other=0.0
                    ).to(tl.float32)
                else:
                    held = load_scores(
                        draft_row, ids, stride_di, vocab_size, draft_bar,
                        draft_thresholds is not None,
                    )  # fmt: skip
                    held = weigh(held, draft_scale, draft_point)
                # Two rounded products: equal rows leave exactly nothing, on every device.
                surplus = weights * inverse_mass
                weights = tl.maximum(surplus - held * draft_inverse, 0.0)
        u = uniform_tile(seed, tile * (ROWS * RUN), position, base_len, stream, ROWS, RUN)
        best = race(weights, u, ids, best, seed, position, base_len, stream)
    tl.atomic_max(best_rates + session, best, sem="acq_rel")
    if tl.atomic_add(arrivals + session, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(arrivals + session, 0)
    best = tl.atomic_xchg(best_rates + session, tl.zeros_like(best), sem="acq_rel")
    if best == 0:  # rounding left no residual anywhere: draw from p, with the same noise
        for tile in range(0, num_tiles):
            ids = tile_ids(tile * (ROWS * RUN), ROWS, RUN)
            scores = load_scores(row, ids, stride_id, vocab_size, threshold, thresholds is not None)
            weights = weigh(scores, scale, point)
            u = uniform_tile(seed, tile * (ROWS * RUN), position, base_len, stream, ROWS, RUN)
            best = race(weights, u, ids, best, seed, position, base_len, stream)
    tl.store(tokens + session * (BUCKET + 1) + index, unpack_id(best))
