"""KL, overlap and the gradient of a student's logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference_divergence as reference
from kernels.divergence import divergence_


def rows(device: str, num_ids: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_ids)
    target = torch.randn(5, num_ids, generator=generator) * 3
    student = target + torch.randn(5, num_ids, generator=generator)
    weights = torch.rand(5, generator=generator)
    return student.to(device, dtype), target.to(device, dtype), weights.to(device)


@pytest.mark.parametrize("num_ids", [3, 97, 4096, 9001])
@pytest.mark.parametrize(("kl_weight", "tv_weight"), [(1.0, 0.0), (0.0, 1.0), (0.3, 3.0)])
def test_sums_and_gradient(device: str, num_ids: int, kl_weight: float, tv_weight: float) -> None:
    """float32 results agree with the float64 specification, for rows that end inside a block."""
    student, target, weights = rows(device, num_ids, torch.float32)
    exact = [x.cpu().double() for x in (student, target, weights)]
    gradient, kl, overlap = reference.divergence(*exact, kl_weight, tv_weight)
    found_kl, found_overlap = divergence_(student, target, weights, kl_weight, tv_weight)
    torch.testing.assert_close(found_kl.cpu().double(), kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_overlap.cpu().double(), overlap, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.cpu().double(), gradient, rtol=1e-4, atol=1e-7)


def test_the_specification_is_the_gradient_of_the_loss() -> None:
    """The closed form equals autograd's gradient of KL and total variation in float64."""
    student, target, weights = (x.double() for x in rows("cpu", 97, torch.float32))
    student.requires_grad_()
    p, q = target.softmax(-1), student.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    variation = (p - q).clamp(min=0).sum(-1)
    (weights * (0.3 * kl + 3 * variation)).sum().backward()
    gradient, found_kl, overlap = reference.divergence(student.detach(), target, weights, 0.3, 3.0)
    torch.testing.assert_close(gradient, student.grad)
    torch.testing.assert_close(found_kl, kl.detach())
    torch.testing.assert_close(overlap, 1 - variation.detach())


def test_rows_of_extremes(device: str) -> None:
    """Equal rows overlap by one; disjoint one-hot rows by nothing; ids at -inf have no gradient."""
    peak = torch.full((3, 5000), float("-inf"), device=device)
    peak[:, :2] = 0.0
    student, target = peak.clone(), peak.clone()
    student[1, 0], target[1, 1] = -60.0, -60.0
    kl, overlap = divergence_(student, target, torch.ones(3, device=device), 1.0, 1.0)
    assert overlap[0].item() == pytest.approx(1.0)
    assert overlap[1].item() == pytest.approx(0.0, abs=1e-6)
    assert kl[0].item() == pytest.approx(0.0, abs=1e-6)
    assert student[:, 2:].abs().max().item() == 0.0


def test_shapes_that_do_not_fit(device: str) -> None:
    """Another shape or a strided row is refused, not read."""
    student, target, weights = rows(device, 97, torch.float32)
    with pytest.raises(ValueError, match="equal shapes"):
        divergence_(student, target[:, :96], weights, 1.0, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        divergence_(student[:, ::2], target[:, ::2], weights, 1.0, 1.0)
