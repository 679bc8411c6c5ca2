"""The specification of `kernels.divergence`: how far a student's rows are from its target's.

    p = softmax(target), q = softmax(student)
    KL = sum p (log p - log q),  overlap = sum min(p, q) = 1 - TV,  TV = sum [p - q]+
    dKL/ds = q - p,  dTV/ds = -q (m - sum(q m)),  m = 1 where q < p, else 0

The overlap is the acceptance rate of speculative decoding (arXiv 2211.17192, section 3.1), TV its
loss. Plain PyTorch at any float type. Must not know models.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divergence(
    student: Tensor, target: Tensor, row_weights: Tensor, kl_weight: float, tv_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient, KL, overlap) of rows of logits.

    student, target [num_rows, num_ids]; row_weights [num_rows]. The gradient, of student's type, is
    that of sum_i row_weights_i (kl_weight KL_i + tv_weight TV_i) in the student's logits; KL and
    overlap are [num_rows], at least float32. Returns new tensors.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q = student.to(wide).log_softmax(-1)
    log_p = target.to(wide).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    below = (q < p).to(wide)
    kl = (p * (log_p - log_q)).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    tv_gradient = q * ((q * below).sum(-1, keepdim=True) - below)
    gradient = row_weights.to(wide)[:, None] * (kl_weight * (q - p) + tv_weight * tv_gradient)
    return gradient.to(student.dtype), kl, overlap
