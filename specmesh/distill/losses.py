"""From hidden states of student and target to loss and gradient, without a table of all logits.

Head and divergence run chunk by chunk: a chunk's logits are made, judged, turned into the gradient
in place and multiplied back through the head, so that [tokens, vocabulary] never exists. The
embedding and head are the target's and get no gradient. Must not know rows or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import reference_divergence

_CHUNK_ROWS = {"cuda": 8192, "cpu": 256}


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Loss of a token: kl x forward KL + tv x total variation (1 - acceptance)."""

    kl: float
    tv: float


class _HeadDivergence(torch.autograd.Function):
    """Loss of hidden states under one head, with its gradient computed on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        target: Tensor,
        head: Tensor,
        row_weights: Tensor,
        weights: LossWeights,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(student)
        kl, overlap = (row_weights.new_empty(len(student)) for _ in range(2))
        for begin in range(0, len(student), _CHUNK_ROWS[student.device.type]):
            rows = slice(begin, begin + _CHUNK_ROWS[student.device.type])
            logits = student[rows].to(head.dtype) @ head.T
            slope, kl[rows], overlap[rows] = _divergence(
                logits, target[rows].to(head.dtype) @ head.T, row_weights[rows], weights
            )
            gradient[rows] = slope @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(kl, overlap)
        loss = (row_weights * (weights.kl * kl + weights.tv * (1 - overlap))).sum()
        return loss, kl, overlap

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor, _kl: Tensor, _overlap: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None


def _divergence(
    student: Tensor, target: Tensor, row_weights: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient, KL, overlap); the gradient may stand in the student's memory."""
    if student.device.type == "cuda":
        from kernels.divergence import divergence_

        kl, overlap = divergence_(student, target, row_weights, weights.kl, weights.tv)
        return student, kl, overlap
    return reference_divergence.divergence(student, target, row_weights, weights.kl, weights.tv)


def distillation_loss(
    student: Tensor, target: Tensor, head: Tensor, row_weights: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, KL, acceptance): the row-weighted sum, differentiable in student, and its parts.

    student, target: final hidden states [num_tokens, hidden]; head [num_ids, hidden], whose type is
    that of the logits; row_weights float32 [num_tokens]. KL and acceptance are float32
    [num_tokens]. Over a restricted head both laws are those of its ids alone.
    """
    result: tuple[Tensor, Tensor, Tensor] = _HeadDivergence.apply(  # type: ignore[no-untyped-call]
        student, target, head, row_weights, weights
    )
    return result
