"""The layer specification against formulas written out, in float64."""

import math

import pytest
import torch

from kernels.reference_layers import (
    Rope,
    activate,
    inverse_frequencies,
    linear,
    rmsnorm,
    rmsnorm_residual,
    rope,
    rope_amplitude,
    rope_table,
    swiglu,
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64, reproducible."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rmsnorm_is_its_formula() -> None:
    """Every row is divided by the root of its mean square, then weighted; float64 stays float64."""
    x, weight = randn(3, 8), randn(8, seed=1)
    expected = [
        [
            v * w / math.sqrt(sum(u * u for u in row) / 8 + 1e-3)
            for v, w in zip(row, weight.tolist(), strict=True)
        ]
        for row in x.tolist()
    ]
    torch.testing.assert_close(rmsnorm(x, weight, 1e-3), torch.tensor(expected, dtype=x.dtype))


def test_rmsnorm_residual_returns_norm_and_stream() -> None:
    """The second result is the sum, the first its norm, from the same rounded values."""
    x, residual, weight = (randn(2, 8, seed=i).bfloat16() for i in range(3))
    normed, stream = rmsnorm_residual(x, residual, weight, 1e-5)
    assert torch.equal(stream, x + residual)
    assert torch.equal(normed, rmsnorm(x + residual, weight, 1e-5))
    assert normed.dtype == torch.bfloat16


def test_rope_turns_each_pair_by_its_angle() -> None:
    """Pair i of position t turns by t * theta^(-2i/d): lengths stay, the turn is a complex one."""
    spec = Rope(theta=100.0, rotary_dim=8)
    x, positions = randn(5, 2, 8), torch.tensor([0, 1, 7, 100, 3])
    turned = rope(x, *rope_table(positions, inverse_frequencies(spec, x.dtype), 1.0))
    angles = positions[:, None] * 100.0 ** (-torch.arange(4, dtype=x.dtype) / 4)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1))


def test_interleaved_rope_is_the_half_form_reordered() -> None:
    """The two pairings are one rotation under a permutation of dimensions."""
    tables = rope_table(
        torch.tensor([3, 9]), inverse_frequencies(Rope(10.0, 6), torch.float64), 1.0
    )
    x = randn(2, 3, 6)
    halves = x[..., [0, 2, 4, 1, 3, 5]]
    expected = rope(halves, *tables)[..., [0, 3, 1, 4, 2, 5]]
    torch.testing.assert_close(rope(x, *tables, interleaved=True), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rope_leaves_the_rest(interleaved: bool) -> None:
    """Dimensions past rotary_dim pass unchanged, and attention sees relative positions only."""
    frequencies = inverse_frequencies(Rope(50.0, 4), torch.float64)
    q, k = randn(1, 1, 6), randn(1, 1, 6, seed=1)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        tables = rope_table(torch.tensor([position]), frequencies, 1.0)
        return rope(x, *tables, interleaved=interleaved)

    assert torch.equal(at(q, 9)[..., 4:], q[..., 4:])
    near, far = (at(q, 5) * at(k, 2)).sum(), (at(q, 105) * at(k, 102)).sum()
    torch.testing.assert_close(near, far)
    assert not torch.isclose(near, (at(q, 5) * at(k, 3)).sum())


def test_llama3_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """Pairs of over 4 turns in the original context stay, those under 1 turn are divided."""
    plain = Rope(theta=500000.0, rotary_dim=128)
    scaled = Rope(500000.0, 128, kind="llama3", factor=8.0, original_context_len=8192)
    before = inverse_frequencies(plain, torch.float64)
    ratio = inverse_frequencies(scaled, torch.float64) / before
    turns = 8192 * before / (2 * math.pi)
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 2
    assert bool((between[:-1] > between[1:]).all())
    assert 1 / 8 < float(between.min()) < float(between.max()) < 1


def test_yarn_amplitude_and_ends() -> None:
    """Amplitude is 0.1 ln(factor) + 1; the fastest pair stays, the slowest is divided."""
    spec = Rope(10000.0, 64, kind="yarn", factor=4.0, original_context_len=4096)
    assert rope_amplitude(spec) == pytest.approx(1.1386294361119891)
    assert rope_amplitude(Rope(1e4, 64, kind="yarn", factor=4.0, attention_factor=1.5)) == 1.5
    assert rope_amplitude(Rope(1e4, 64)) == 1.0
    ratio = inverse_frequencies(spec, torch.float64) / inverse_frequencies(
        Rope(10000.0, 64), torch.float64
    )
    assert float(ratio[0]) == pytest.approx(1.0)
    assert float(ratio[-1]) == pytest.approx(0.25)


def test_linear_ends() -> None:
    """Bias is inside the activation, the residual outside."""
    x, weight, bias, residual = randn(3, 4), randn(5, 4, seed=1), randn(5, seed=2), randn(3, 5)
    inner = x @ weight.T + bias
    torch.testing.assert_close(
        linear(x, weight, bias, activation="silu", residual=residual),
        inner * torch.sigmoid(inner) + residual,
    )
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_activations_and_swiglu() -> None:
    """Each name is its formula; in a merged projection the gate comes first."""
    x = randn(2, 6)
    gelu = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(activate(x, "gelu"), gelu)
    torch.testing.assert_close(activate(x, "gelu_tanh"), 0.5 * x * (1 + torch.tanh(cubic)))
    torch.testing.assert_close(activate(x, "relu"), x.clamp(min=0))
    assert torch.equal(activate(x, "none"), x)
    gate, up = x[:, :3], x[:, 3:]
    torch.testing.assert_close(swiglu(x), gate * torch.sigmoid(gate) * up)
