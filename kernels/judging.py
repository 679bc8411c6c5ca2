"""Launch 1 of `accept`: every row that may be judged is read once, a leaf a program.

A program asks for its first ids before it knows whether it needs them, leaves what its leaf holds
(`row_state`: exponent, mass, and the winner of a race or the argmax where the rule wants one) in
memory and counts itself in its session. Rows of the residual rule are summed only (`leaf_mass`).
Must not know what is made of the leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.accept import (
    COUPLED,
    COUPLED_STREAM,
    GREEDY,
    RESIDUAL,
    scale_of,
    weights_exponent,
)
from kernels.closing_race import LOGITS, NO_DRAFT, SPARSE, WEIGHTS
from kernels.leaf_mass import first_quarters, leaf_mass
from kernels.row_state import (
    INTERPRETING,
    LEAF_TILES,
    MASS_UNIT,
    append_tile,
    exact_mass,
    power_of_two,
    score_leaf,
    tiles_of,
)


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
def _judge_target(
    row, first_tile, session, slot, leaf, partial, rule, seeds, base_lens, temperature, thresholds,
    leaf_exponents, leaf_masses, leaf_best, stride_id, vocab_size,
    BUCKET: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Store what a leaf of a target row holds; its winner too where the rule wants one."""
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + session * (BUCKET + 1) + slot)
    scale = scale_of(temperature, rule)
    if rule == RESIDUAL:
        a, b, c, d = first_tile
        m, mass = leaf_mass(
            row, a, b, c, d, leaf, stride_id, vocab_size, threshold, scale, thresholds is not None,
            TILE,
        )  # fmt: skip
    else:
        seed, base_len = tl.load(seeds + session), tl.load(base_lens + session)
        m, mass, best = score_leaf(
            row, leaf, stride_id, vocab_size, threshold, scale, rule == GREEDY, rule == COUPLED,
            seed, base_len + slot, 0, COUPLED_STREAM, thresholds is not None, True, TILE, RUN,
        )  # fmt: skip
        tl.store(leaf_best + partial, best)
    tl.store(leaf_exponents + partial, m)
    tl.store(leaf_masses + partial, mass)


@triton.jit
def _judge_draft(
    row, first_tile, session, index, leaf, partial, candidates, draft_ids, draft_temperatures,
    draft_thresholds, leaf_exponents, leaf_masses, leaf_weights,
    stride_di, stride_ib, stride_ik, stride_ii, vocab_size, num_sparse,
    BUCKET: tl.constexpr, KIND: tl.constexpr, SPARSE_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store what a leaf of a draft row holds: all of it for a sparse row."""
    if KIND == LOGITS:
        threshold = float("-inf")
        if draft_thresholds is not None:
            threshold = tl.load(draft_thresholds + session * BUCKET + index)
        a, b, c, d = first_tile
        m, mass = leaf_mass(
            row, a, b, c, d, leaf, stride_di, vocab_size, threshold,
            scale_of(tl.load(draft_temperatures + session), RESIDUAL),
            draft_thresholds is not None, TILE,
        )  # fmt: skip
    elif KIND == WEIGHTS:
        m, mass = weights_leaf(row, leaf, stride_di, vocab_size, TILE)
    else:
        candidate = tl.load(candidates + session * BUCKET + index).to(tl.int32)
        row_ids = draft_ids + session.to(tl.int64) * stride_ib
        m, mass, weight = sparse_row(
            row_ids + index.to(tl.int64) * stride_ik, row, stride_ii, stride_di,
            num_sparse, candidate, SPARSE_PAD,
        )  # fmt: skip
        tl.store(leaf_weights + partial, weight)
    tl.store(leaf_exponents + partial, m)
    tl.store(leaf_masses + partial, mass)


@triton.jit
def _judge_kernel(
    logits, first_rows, candidates, num_candidates, seeds, base_lens, rules, temperatures,
    thresholds, draft, draft_ids, draft_temperatures, draft_thresholds,
    leaf_exponents, leaf_masses, leaf_best, leaf_weights, leaves_done,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    vocab_size, num_leaves, num_sparse, num_slots,
    BUCKET: tl.constexpr, KIND: tl.constexpr, SPARSE_PAD: tl.constexpr, TILE: tl.constexpr,
    RUN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (leaves, rows, sessions): target rows, then draft rows. A sparse row is one leaf, so
    then it is (leaves of all rows, sessions)."""
    if EARLY and not INTERPRETING:
        gdc_launch_dependents()
    if KIND == SPARSE:
        part, session = tl.program_id(0), tl.program_id(1)
        slot, leaf = part // num_leaves, part % num_leaves
        if slot > BUCKET:
            slot, leaf = part - (BUCKET + 1) * (num_leaves - 1), tl.zeros_like(leaf)
    else:
        leaf, slot, session = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    partial = (session * num_slots + slot) * num_leaves + leaf
    if slot <= BUCKET:
        first_row = session * (BUCKET + 1)
        wanted = slot >= 0
        if first_rows is not None:  # rows past the last candidate may belong to no one
            first_row = tl.load(first_rows + session)
            wanted = slot <= tl.load(num_candidates + session)
        row = logits + (first_row + slot).to(tl.int64) * stride_row
        first_tile = first_quarters(row, leaf, stride_id, vocab_size, wanted, TILE)
        num = tl.load(num_candidates + session)
        rule = tl.load(rules + session)
        temperature = tl.load(temperatures + session)
        if slot <= num:
            _judge_target(
                row, first_tile, session, slot, leaf, partial, rule, seeds, base_lens,
                temperature, thresholds, leaf_exponents, leaf_masses, leaf_best, stride_id,
                vocab_size, BUCKET, TILE, RUN,
            )  # fmt: skip
    elif KIND != NO_DRAFT:
        index = slot - BUCKET - 1
        held_row = draft + session.to(tl.int64) * stride_db + index.to(tl.int64) * stride_dk
        held_tile = (held_row, held_row, held_row, held_row)
        if KIND == LOGITS:
            held_tile = first_quarters(held_row, leaf, stride_di, vocab_size, index >= 0, TILE)
        num = tl.load(num_candidates + session)
        rule = tl.load(rules + session)
        if (index < num) & (rule == RESIDUAL):
            _judge_draft(
                held_row, held_tile, session, index, leaf, partial, candidates, draft_ids,
                draft_temperatures, draft_thresholds, leaf_exponents, leaf_masses, leaf_weights,
                stride_di, stride_ib, stride_ik, stride_ii, vocab_size, num_sparse,
                BUCKET, KIND, SPARSE_PAD, TILE,
            )  # fmt: skip
    tl.debug_barrier()
    tl.atomic_add(leaves_done + session, 1, sem="release")
