"""How accurate a kernel must be: at most twice plain PyTorch's own error at the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_accurate(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Compare errors against a float64 result: ||ours - exact|| <= 2 ||plain - exact||.

    ours and plain have one dtype; infinities must stand at the same places in all three.
    """
    assert ours.dtype == plain.dtype
    ours, plain, exact = (t.detach().to("cpu", torch.float64) for t in (ours, plain, exact))
    infinite = torch.isinf(exact)
    assert torch.equal(torch.isinf(ours), infinite)
    assert not bool(torch.isnan(ours).any())
    ours, plain, exact = (torch.where(infinite, 0.0, t) for t in (ours, plain, exact))
    error, allowed = float((ours - exact).norm()), 2.0 * float((plain - exact).norm())
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"
