"""The specification of everything in a decoder layer but attention: norm, rotation, linear ends.

Plain PyTorch at any float type, float64 included. A CPU device runs this code in production; the
Triton twins are tested against it. Must not know models, pages or batches: tensors in, tensors
out. Attention is in `kernels/reference_attention.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["none", "silu", "gelu", "gelu_tanh", "relu"]

# ---------------------------------------------------------------- normalisation


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    x [.., width] of any float type; weight [width]. Types narrower than float32 are normalised in
    float32 and rounded to x's type before the product with weight, as published checkpoints
    expect. Returns a new tensor of x's type.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: (rmsnorm(x + residual), x + residual).

    The sum is rounded to x's type first, so both results come from the same rounded stream.
    """
    stream = x + residual
    return rmsnorm(stream, weight, eps), stream


# ---------------------------------------------------------------- rotary positions


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one model (arXiv 2104.09864), with the scaling of its context.

    rotary_dim: the leading dimensions of each head that rotate (even, at most head_dim).
    interleaved: pairs are (2i, 2i+1) in place of (i, i + rotary_dim/2).
    linear divides every frequency by factor. llama3 divides slow ones, keeps fast ones and blends
    between (Llama 3.1). yarn blends by rotation count and scales cos and sin (arXiv 2309.00071).
    attention_factor None means the value of the yarn paper.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def inverse_frequencies(rope: Rope, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angle per position of each rotating pair, [rotary_dim / 2].

    float32 is what published checkpoints were trained with; float64 is the exact value.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(dtype) / rope.rotary_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Blend by how many wavelengths the original context holds: low kept scaled, high kept."""
    turns = rope.original_context_len * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: Rope, frequencies: Tensor) -> Tensor:
    """Blend linearly in the pair index, from the pair turning beta_fast times to beta_slow."""
    width = rope.rotary_dim

    def pair_index(rotations: float) -> float:
        wavelength_ratio = rope.original_context_len / (rotations * 2 * math.pi)
        return width * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    first, last = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = last - first if last != first else 0.001  # one pair: a step, not a division by zero
    pairs = torch.arange(width // 2, dtype=frequencies.dtype)
    scaled = ((pairs - first) / span).clamp(0, 1)
    return frequencies / rope.factor * scaled + frequencies * (1 - scaled)


def rope_amplitude(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1 except for yarn (section 3.4 of its paper)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def amplitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return amplitude(rope.mscale) / amplitude(rope.mscale_all_dim)
    return amplitude(1.0)


def rope_table(positions: Tensor, frequencies: Tensor, amplitude: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [.., rotary_dim / 2], of int64 positions [..], in the frequencies' type."""
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    return angles.cos() * amplitude, angles.sin() * amplitude


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the leading 2 * cos.shape[-1] dimensions of every head; the rest pass unchanged.

    x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, rotary_dim / 2]. Pair (a, b) becomes
    (a cos - b sin, b cos + a sin); pairs are (i, i + rotary_dim/2), or (2i, 2i+1) if interleaved.
    Returns a new tensor of x's type.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    turning, still = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, still), -1) if still.shape[-1] else joined


# ---------------------------------------------------------------- linear layers and their ends


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply a named activation elementwise."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) if activation == "relu" else x


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(x @ weight^T + bias) + residual.

    x [.., n_in], weight [n_out, n_in], bias [n_out], residual [.., n_out].
    """
    y = activate(F.linear(x, weight, bias), activation)
    return y if residual is None else y + residual


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a merged projection: gate_up [.., 2 * width], gate first. [.., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
