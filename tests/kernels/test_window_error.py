"""The price of a window: dropped mass and bound, against the specification and the truth."""

from __future__ import annotations

import pytest
import torch

from kernels import reference_attention as reference
from kernels.attention import AttentionOptions, attention
from kernels.window_error import window_error_bound


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_dropped_mass_matches_the_specification(device: str, softcap: float) -> None:
    """delta and 2 delta M equal the float64 specification; grouped heads and a query offset."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 19, 64, generator=generator)
    k, v = (torch.randn(2, 2, 83, 64, generator=generator) for _ in range(2))
    options = AttentionOptions(causal=True, softcap=softcap)
    delta, bound = window_error_bound(q.to(device), k.to(device), v.to(device), 11, options)
    exact = reference.window_error_bound(q.double(), k.double(), v.double(), 11, options)
    torch.testing.assert_close(delta.cpu().double(), exact[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bound.cpu().double(), exact[1], rtol=1e-5, atol=1e-6)


def test_the_bound_holds_and_a_wide_window_costs_nothing(device: str) -> None:
    """||o - o'|| <= 2 delta M for every row; a window over all keys has delta 0 exactly."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 40, 64, generator=generator).to(device) for _ in range(3))
    full = AttentionOptions(causal=True)
    out, _ = attention(q, k, v, full)
    for window in (1, 5, 39):
        near, _ = attention(q, k, v, AttentionOptions(causal=True, window=window))
        delta, bound = window_error_bound(q, k, v, window, full)
        assert bool(((out - near).norm(dim=-1) <= bound + 1e-5).all())
        assert bool((delta[..., :window] == 0).all())
        assert bool((delta[..., window:] > 0).all())
    delta, bound = window_error_bound(q, k, v, 40, full)
    assert not bool(delta.any())
    assert not bool(bound.any())


def test_full_attention_may_not_hold_a_window(device: str) -> None:
    """Options that already cut keys are refused: the bound compares with full attention."""
    q = torch.zeros(1, 1, 2, 64, device=device)
    with pytest.raises(ValueError, match="window"):
        window_error_bound(q, q, q, 1, AttentionOptions(causal=True, window=1))
