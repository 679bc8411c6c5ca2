"""KL, overlap and the gradient of a student's logits in one launch, without probability tensors.

One program a row walks it three times: normalisers, sums, gradient. The row stays in the cache
between the walks, and the gradient overwrites the student's logits, so device memory is read once
and written once. Sums in float32. Specification: `reference_divergence.divergence`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8
_LEAST_LOG = tl.constexpr(-1e4)  # its exponential is 0 in float32


@triton.jit
def _row_max_and_sum(logits, num_ids, BLOCK: tl.constexpr):
    """Maximum and sum of exp(x - maximum) of one row, both by lane first and folded once."""
    columns = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_ids, BLOCK):
        inside = begin + columns < num_ids
        x = tl.load(logits + begin + columns, inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen nothing yet has top = -inf: exp(-inf - -inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    row_top = tl.max(top, 0)
    return row_top, tl.sum(total * tl.exp(top - row_top), 0)


@triton.jit
def _divergence_kernel(
    student, target, row_weights, kl_out, overlap_out, stride_student, stride_target, num_ids,
    kl_weight, tv_weight, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    student += row * stride_student
    target += row * stride_target
    q_top, q_sum = _row_max_and_sum(student, num_ids, BLOCK)
    p_top, p_sum = _row_max_and_sum(target, num_ids, BLOCK)
    q_shift, p_shift = q_top + tl.log(q_sum), p_top + tl.log(p_sum)
    columns = tl.arange(0, BLOCK)
    kl = tl.zeros([BLOCK], tl.float32)
    overlap = tl.zeros([BLOCK], tl.float32)
    mass_below = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_ids, BLOCK):
        inside = begin + columns < num_ids
        log_q = tl.load(student + begin + columns, inside, other=0.0).to(tl.float32) - q_shift
        log_p = tl.load(target + begin + columns, inside, other=0.0).to(tl.float32) - p_shift
        # Logits of -inf: probability zero still, and no difference of infinities.
        log_q, log_p = tl.maximum(log_q, _LEAST_LOG), tl.maximum(log_p, _LEAST_LOG)
        q = tl.where(inside, tl.exp(log_q), 0.0)
        p = tl.where(inside, tl.exp(log_p), 0.0)
        kl += p * (log_p - log_q)
        overlap += tl.minimum(p, q)
        mass_below += tl.where(q < p, q, 0.0)
    tl.store(kl_out + row, tl.sum(kl, 0))
    tl.store(overlap_out + row, tl.sum(overlap, 0))
    below = tl.sum(mass_below, 0)
    weight = tl.load(row_weights + row).to(tl.float32)
    for begin in range(0, num_ids, BLOCK):
        inside = begin + columns < num_ids
        x = tl.load(student + begin + columns, inside, other=0.0)
        q = tl.exp(x.to(tl.float32) - q_shift)
        p = tl.exp(tl.load(target + begin + columns, inside, other=0.0).to(tl.float32) - p_shift)
        slope = kl_weight * (q - p) + tv_weight * q * (below - tl.where(q < p, 1.0, 0.0))
        tl.store(student + begin + columns, (weight * slope).to(x.dtype), inside)


def divergence_(
    student: Tensor, target: Tensor, row_weights: Tensor, kl_weight: float, tv_weight: float
) -> tuple[Tensor, Tensor]:
    """(KL, overlap) of rows, float32 [num_rows]; the gradient replaces the student's logits.

    student, target: [num_rows, num_ids], contiguous in the last dimension; row_weights [num_rows].
    See `reference_divergence.divergence`. Raises ValueError on shapes that do not fit.
    """
    if student.shape != target.shape or row_weights.shape != student.shape[:1]:
        raise ValueError(
            f"student {list(student.shape)}, target {list(target.shape)}, row_weights "
            f"{list(row_weights.shape)}: expected two equal shapes and one weight a row"
        )
    if student.stride(1) != 1 or target.stride(1) != 1:
        raise ValueError("logits must be contiguous in the last dimension")
    kl, overlap = (
        torch.empty(student.shape[0], dtype=torch.float32, device=student.device) for _ in range(2)
    )
    if student.shape[0]:
        _divergence_kernel[(student.shape[0],)](
            student, target, row_weights.contiguous(), kl, overlap, student.stride(0),
            target.stride(0), student.shape[1], kl_weight, tv_weight, BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )  # fmt: skip
    return kl, overlap
