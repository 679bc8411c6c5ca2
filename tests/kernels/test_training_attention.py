"""The project's attention under training rows: several conversations a row, grouped heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmesh.distill.attention import Backend, packed_attention


def run(backend: Backend, inputs: list[Tensor], starts: Tensor) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = packed_attention(starts, backend)(0, *leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("boundaries", [[], [5], [1, 17, 30]])
def test_kernels_agree_with_torch(device: str, boundaries: list[int]) -> None:
    """Forward and backward of packed conversations equal masked attention, 6 heads over 2."""
    starts = torch.zeros(2, 32, dtype=torch.bool, device=device)
    starts[:, 0] = True
    starts[1, boundaries] = True
    generator = torch.Generator().manual_seed(len(boundaries))
    inputs = [torch.randn(64, heads, 16, generator=generator).to(device) for heads in (6, 2, 2)]
    ours, theirs = run("kernels", inputs, starts), run("torch", inputs, starts)
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
