"""Weights of one byte: e4m3 values and one float32 scale an output channel.

    w[n, k] ~ scale[n] * values[n, k],     scale[n] = max |w[n, :]| / 448

What is multiplied is always values and scale, so the model that they make is the same on every
device and at every type of activations: each e4m3 value is exact in bfloat16, float16 and float32.
Error of a weight, with scale s: at most 2^-4 of itself where |w| >= 2^-6 s (four digits, rounded to
the nearest), at most 2^-10 s below that. Plain PyTorch. Must not know models or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_NORMAL = 2.0**-6
ROWS_AT_ONCE = 4096  # quantised together: what float32 copies take meanwhile is bounded


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """values: float8_e4m3fn [n_out, n_in]; scale: float32 [n_out], contiguous."""

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError for tensors that are no such pair."""
        fits = self.values.ndim == 2 and self.scale.shape == self.values.shape[:1]
        typed = self.values.dtype is FP8 and self.scale.dtype is torch.float32
        if not (fits and typed and self.scale.is_contiguous()):
            raise ValueError(
                f"values {tuple(self.values.shape)} {self.values.dtype} and scale "
                f"{tuple(self.scale.shape)} {self.scale.dtype} are no fp8 weight"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return fp8_bytes(*self.values.shape)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor [n_out, n_in]: scale * values, rounded once to `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.values.to(wide) * self.scale.to(wide)[:, None]).to(dtype)


def fp8_bytes(num_rows: int, depth: int) -> int:
    """Bytes of an fp8 weight [num_rows, depth]."""
    return num_rows * (depth * FP8.itemsize + torch.float32.itemsize)


def quantise(weight: Tensor) -> Fp8Weight:
    """The nearest fp8 weight of `weight` [n_out, n_in], of any float type, on its device.

    A row of zeros stays zeros. The same bits on every device: divisions are IEEE float32. Waits for
    the device. Raises ValueError where a weight is not finite.
    """
    parts = [_quantise(rows.float()) for rows in weight.split(ROWS_AT_ONCE)]
    return join(parts)


def join(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """Weights over the same input as one, the first one's channels first."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values.view(torch.uint8) for part in parts])  # bytes: on any device
    return Fp8Weight(values.view(FP8), torch.cat([part.scale for part in parts]))


def _quantise(rows: Tensor) -> Fp8Weight:
    largest = rows.abs().amax(1)
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight that is not finite cannot be quantised")
    # A tensor: division by a number may become a product with its rounded inverse. Scales are
    # normal numbers, so that a row of the smallest weights, or of zeros, divides as others do.
    whole = torch.full_like(largest, LARGEST)
    scale = (largest / whole).clamp_min(torch.finfo(torch.float32).tiny)
    return Fp8Weight((rows / scale[:, None]).to(FP8), scale)
