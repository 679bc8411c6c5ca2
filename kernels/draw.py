"""The draft's draw in one launch: `specmesh::draw`.

Every row's leaves are weighed and raced by the same code as target rows (`row_state`); the program
that finishes a row last merges them: token, ln q(token), and the row's exponent and mass, which
`accept` can take in place of reading the row again. Specification: `reference.race`. The public
function is in `kernels/sampling.py`. Must not know candidates or decisions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.accept import (
    COUPLED,
    COUPLED_STREAM,
    GREEDY,
    OK,
    ROW_FAULT,
    log2_mass,
    merge_winners,
    scale_of,
)
from kernels.row_state import LN_2, merge_masses, score_leaf
from kernels.streams import Purpose

PROPOSE_STREAM = tl.constexpr(int(Purpose.PROPOSE))


@triton.jit
def _draw_kernel(
    logits, seeds, positions, base_lens, rules, temperatures, thresholds,
    leaf_exponents, leaf_masses, leaf_best, arrivals,
    tokens, log_probs, exponents_out, masses_out, status_out,
    stride_row, stride_id, vocab_size, num_leaves,
    LEAVES_PAD: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Grid (rows x leaves)."""
    index, leaf = tl.program_id(0) // num_leaves, tl.program_id(0) % num_leaves
    rule = tl.load(rules + index)
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    round_key = tl.where(rule == COUPLED, 0, tl.load(base_lens + index))
    stream = tl.where(rule == COUPLED, COUPLED_STREAM, PROPOSE_STREAM)
    scale = scale_of(tl.load(temperatures + index), rule)
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + index)
    row = logits + index.to(tl.int64) * stride_row
    partial = index * num_leaves
    m, mass, best = score_leaf(
        row, leaf, stride_id, vocab_size, threshold, scale, rule == GREEDY, rule != GREEDY,
        seed, position, round_key, stream, thresholds is not None, True, TILE, RUN,
    )  # fmt: skip
    tl.store(leaf_exponents + partial + leaf, m)
    tl.store(leaf_masses + partial + leaf, mass)
    tl.store(leaf_best + partial + leaf, best)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + index, 1, sem="acq_rel") != num_leaves - 1:
        return
    tl.store(arrivals + index, 0)
    leaves = tl.arange(0, LEAVES_PAD)[None, :]
    seen = leaves < num_leaves
    exponents = tl.load(
        leaf_exponents + partial + leaves, seen, other=float("-inf"), cache_modifier=".cg"
    )
    masses = tl.load(leaf_masses + partial + leaves, seen, other=0, cache_modifier=".cg")
    packed = tl.load(leaf_best + partial + leaves, seen, other=0, cache_modifier=".cg")
    top, mass, bad = merge_masses(exponents, masses, 1)
    merged_rule = tl.where(rule == GREEDY, GREEDY, COUPLED)
    token = merge_winners(packed, exponents, top, seen, merged_rule)
    sound = ~bad
    score = tl.load(row + token.to(tl.int64) * stride_id, sound, other=0.0).to(tl.float32)
    point = tl.where(top == float("-inf"), 0.0, top)
    log_prob = (tl.fma(score, scale, -point) - log2_mass(mass)) * LN_2
    log_prob = tl.where(sound & (rule != GREEDY), log_prob, 0.0)
    one = tl.arange(0, 1) + index
    tl.store(tokens + one, tl.where(sound, token, -1))
    tl.store(log_probs + one, log_prob)
    tl.store(exponents_out + one, top)
    tl.store(masses_out + one, mass)
    tl.store(status_out + one, tl.where(sound, OK, ROW_FAULT))
