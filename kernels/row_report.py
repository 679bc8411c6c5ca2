"""What the target reports of a decided round: `specmesh::row_report`, one launch after `accept`.

For every row that was emitted from: max p, and whether the emitted token is the argmax; for judged
candidates p(x), q(x) and the overlap, sum of min(p, q) over the draft's ids; and for every row of
the round whether it is faulty, judged or not. p is the row as it was sampled from (temperature,
thresholds). The masses are those that `accept` summed, so a row is read again only in leaves that
can hold its largest score and at the draft's ids. Sums are integers, so a figure does not depend on
launch, batch or place. Specification:
`reference_rows.overlap`, `reference.lowest_argmax`. Must not know traces, detectors or services.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.accept import GREEDY, RESIDUAL, scale_of, weights_exponent
from kernels.configs.sampling import draft_launch
from kernels.row_state import (
    LEAF,
    LOWEST,
    MASS_UNIT,
    argmax,
    filtered,
    merge_masses,
    power_of_two,
    read_scores,
    unpack_id,
    weigh,
)
from kernels.sampling import DraftKind, DraftRows, Outcome, Round

SPAN = tl.constexpr(4096)  # ids read at a time, divides a leaf
LAW_UNIT = tl.constexpr(2.0**52)


@triton.jit
def _largest(row, exponents, num_leaves, top, stride, vocab_size, LEAF: tl.constexpr):
    """Id of the largest score, the lowest on ties: only leaves that reach the row's exponent."""
    best = tl.full([], LOWEST, tl.int64)
    for leaf in range(0, num_leaves):
        if tl.load(exponents + leaf) == top:
            for part in range(0, LEAF // SPAN):
                ids = leaf * LEAF + part * SPAN + tl.arange(0, SPAN)
                scores = read_scores(row, ids, stride, vocab_size).to(tl.float32)
                best = tl.maximum(best, argmax(scores, ids))
    return unpack_id(best)


@triton.jit
def _row_report_kernel(
    logits, first_rows, candidates, num_candidates, rules, temperatures, thresholds,
    draft, draft_ids, tokens, counts, leaf_exponents, leaf_masses,
    max_probs, is_argmax, faults, judged, stride_max, stride_argmax, stride_faults, stride_judged,
    stride_row, stride_id, stride_db, stride_dk, stride_di, stride_ib, stride_ik, stride_ii,
    stride_leaves, vocab_size, num_leaves, num_sparse,
    BUCKET: tl.constexpr, LEAVES_PAD: tl.constexpr, SPARSE_PAD: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """Grid (sessions x rows of a session)."""
    session, index = tl.program_id(0) // (BUCKET + 1), tl.program_id(0) % (BUCKET + 1)
    num_emitted = tl.load(counts + session * 3 + 1)
    num = tl.load(num_candidates + session)
    target_prob, draft_prob, overlap = 0.0, 0.0, 0.0
    max_prob, hit, faulty = 0.0, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    leaves = tl.arange(0, LEAVES_PAD)
    seen = (leaves < num_leaves) & (index <= num)
    own_leaves = session * stride_leaves + index * num_leaves
    tops, masses, bads = merge_masses(
        tl.load(leaf_exponents + own_leaves + leaves, seen, other=float("-inf"))[None, :],
        tl.load(leaf_masses + own_leaves + leaves, seen, other=0)[None, :],
        1,
    )  # fmt: skip
    if index <= num:
        faulty = tl.max(bads.to(tl.int32), 0)
    if index < num_emitted:
        rule = tl.load(rules + session)
        first_row = session * (BUCKET + 1)
        if first_rows is not None:
            first_row = tl.load(first_rows + session)
        row = logits + (first_row + index).to(tl.int64) * stride_row
        scale = scale_of(tl.load(temperatures + session), rule)
        threshold = float("-inf")
        if thresholds is not None:
            threshold = tl.load(thresholds + session * (BUCKET + 1) + index)
        top = tl.max(tops, 0)
        unit = MASS_UNIT / tl.maximum(tl.max(masses, 0), 1).to(tl.float64)  # weight -> probability
        largest = _largest(
            row, leaf_exponents + own_leaves, num_leaves, top, stride_id, vocab_size, LEAF
        )
        hit = (tl.load(tokens + session * (BUCKET + 1) + index) == largest).to(tl.int32)
        score = tl.load(row + largest.to(tl.int64) * stride_id).to(tl.float32)
        max_prob = (weigh(score, scale, top).to(tl.float64) * unit).to(tl.float32)
        if rule == GREEDY:
            max_prob = 1.0
        if index < num:
            candidate = tl.load(candidates + session * BUCKET + index).to(tl.int32)
            score = tl.load(row + candidate.to(tl.int64) * stride_id).to(tl.float32)
            score = tl.where(score < threshold, float("-inf"), score)
            target_prob = (weigh(score, scale, top).to(tl.float64) * unit).to(tl.float32)
            if rule == GREEDY:
                target_prob = tl.where(candidate == largest, 1.0, 0.0)
            if draft is not None:  # noqa: SIM102 - known when compiled
                if rule == RESIDUAL:
                    places = tl.arange(0, SPARSE_PAD)
                    inside = places < num_sparse
                    own_ids = (
                        draft_ids + session.to(tl.int64) * stride_ib
                        + index.to(tl.int64) * stride_ik
                    )  # fmt: skip
                    own = draft + session.to(tl.int64) * stride_db + index.to(tl.int64) * stride_dk
                    token = tl.load(own_ids + places * stride_ii, inside, other=-1).to(tl.int32)
                    inside = inside & (token >= 0)
                    weight = tl.load(own + places * stride_di, inside, other=0.0).to(tl.float32)
                    m = weights_exponent(tl.max(weight, 0))
                    weight = weight * power_of_two(-tl.maximum(m, -127.0))
                    mass = tl.sum((weight * MASS_UNIT).to(tl.int64), 0)
                    law = weight.to(tl.float64) * (MASS_UNIT / tl.maximum(mass, 1).to(tl.float64))
                    readable = inside & (token < vocab_size)
                    scores = tl.load(
                        row + token.to(tl.int64) * stride_id, readable, other=float("-inf")
                    )
                    scores = filtered(scores, threshold, thresholds is not None)
                    target_law = weigh(scores, scale, top).to(tl.float64) * unit
                    shared = (tl.minimum(law, target_law) * LAW_UNIT).to(tl.int64)
                    overlap = (tl.sum(shared, 0).to(tl.float64) * (1.0 / LAW_UNIT)).to(tl.float32)
                    held = tl.where(token == candidate, law, 0.0)
                    draft_prob = tl.max(held, 0).to(tl.float32)
    tl.store(max_probs + session * stride_max + index, max_prob)
    tl.store(is_argmax + session * stride_argmax + index, hit)
    tl.store(faults + session * stride_faults + index, faulty)
    if index < BUCKET:
        own_figures = judged + session * stride_judged + index * 3
        tl.store(own_figures, target_prob)
        tl.store(own_figures + 1, draft_prob)
        tl.store(own_figures + 2, overlap)


@dataclass(frozen=True, slots=True)
class RowReport:
    """Figures of a round's rows, on the device; 0 for rows that were not judged or emitted from.

    max_probs float32, is_argmax int32 [batch, bucket + 1]: of the row each token was emitted from,
    the largest p and whether the token is its argmax (lowest id on ties). faults: int32 [batch,
    bucket + 1], 1 for a row of the round, judged or not, that holds NaN or +inf or no finite score.
    judged: float32 [batch, bucket, 3], p(x_i), q(x_i) and sum of min(p, q) of judged candidates;
    the last two are 0 without a draft row. A greedy row is one-hot at its argmax.
    """

    max_probs: Tensor
    is_argmax: Tensor
    faults: Tensor
    judged: Tensor

    @classmethod
    def empty(cls, batch: int, bucket: int, device: torch.device | str) -> RowReport:
        """Memory for the figures of a round."""
        rows = (batch, bucket + 1)
        return cls(
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(batch, bucket, 3, dtype=torch.float32, device=device),
        )

    @property
    def target_probs(self) -> Tensor:
        return self.judged[..., 0]

    @property
    def draft_probs(self) -> Tensor:
        return self.judged[..., 1]

    @property
    def overlaps(self) -> Tensor:
        return self.judged[..., 2]


def _launch_row_report(
    logits: Tensor, candidates: Tensor, num_candidates: Tensor, rules: Tensor,
    temperatures: Tensor, thresholds: Tensor | None, first_rows: Tensor | None,
    draft: Tensor | None, draft_ids: Tensor | None, tokens: Tensor, counts: Tensor,
    leaf_exponents: Tensor, leaf_masses: Tensor, vocab_size: int,
    max_probs: Tensor, is_argmax: Tensor, faults: Tensor, judged: Tensor,
) -> None:  # fmt: skip
    batch, bucket = candidates.shape
    outputs = (max_probs, is_argmax, faults, judged)
    num_leaves = triton.cdiv(vocab_size, LEAF)
    strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    num_sparse = 0
    if draft is not None and draft_ids is not None:
        strides, num_sparse = (*draft.stride(), *draft_ids.stride()), draft.shape[-1]
    _row_report_kernel[(batch * (bucket + 1),)](
        logits, first_rows, candidates, num_candidates, rules, temperatures, thresholds,
        draft, draft_ids, tokens, counts, leaf_exponents, leaf_masses, *outputs,
        *(output.stride(0) for output in outputs), *logits.stride(), *strides,
        leaf_masses.stride(0), vocab_size, num_leaves, num_sparse,
        BUCKET=bucket, LEAVES_PAD=max(2, triton.next_power_of_2(num_leaves)),
        SPARSE_PAD=max(32, triton.next_power_of_2(num_sparse)), LEAF=LEAF,
        num_warps=draft_launch(logits.device).num_warps,
    )  # fmt: skip


_row_report = torch.library.custom_op(
    "specmesh::row_report",
    _launch_row_report,
    mutates_args=("max_probs", "is_argmax", "faults", "judged"),
)


@_row_report.register_fake
def _row_report_fake(*_arguments) -> None:  # writes its outputs in place
    return None


def row_report(
    logits: Tensor,
    round_: Round,
    draft: DraftRows | None,
    outcome: Outcome,
    vocab_size: int,
    out: RowReport | None = None,
) -> RowReport:
    """Report the rows of a round that `sampling.accept` has decided, in one launch.

    The first three and vocab_size as given to `accept`, which also gave `outcome`; draft rows must
    be sparse, or None. out: memory to write to (any stride between sessions), returned. Raises
    ValueError for other draft rows and for memory that does not fit.
    """
    if draft is not None and draft.kind is not DraftKind.SPARSE:
        raise ValueError(f"only sparse draft rows can be reported, not {draft.kind.name}")
    batch, bucket = round_.candidates.shape
    if out is None:
        out = RowReport.empty(batch, bucket, logits.device)
    by_row = (out.max_probs, out.is_argmax, out.faults)
    if any(part.shape != (batch, bucket + 1) or part.stride(1) != 1 for part in by_row):
        raise ValueError(f"out needs figures [{batch}, {bucket + 1}], contiguous in each session")
    if out.judged.shape != (batch, bucket, 3) or (bucket and not out.judged[0].is_contiguous()):
        raise ValueError(f"out.judged {tuple(out.judged.shape)} is not {(batch, bucket, 3)}")
    torch.ops.specmesh.row_report(
        logits, round_.candidates, round_.num_candidates, round_.rules, round_.temperatures,
        round_.thresholds, round_.first_rows, None if draft is None else draft.rows,
        None if draft is None else draft.ids, outcome.tokens, outcome.counts,
        outcome.leaf_exponents, outcome.leaf_masses, vocab_size, *by_row, out.judged,
    )  # fmt: skip
    return out
