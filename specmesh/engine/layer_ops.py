"""The arithmetic of a layer on a device: one table of operations, chosen once per decoder.

The decoder calls these and nothing else, so a faster device plugs in here. Operations on a CPU are
the reference layers, with weights laid out once for oneDNN's matrix product: measured on two
cores with SmolLM2's shapes, 2 to 3 times faster than `F.linear` from 1 to 16 rows, because
`F.linear` never sees the weights twice. The project's kernels plug in through `fused.py`. Must not
know pages or sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_layers
from kernels.fp8_weight import Fp8Weight

# Fewer rows are padded to this many. oneDNN's products of 1 to 4 rows are slower than that of 5 (by
# 8 % on one core, 25 % on two, SmolLM2's shapes), and so a decode step and the verify step of 4
# candidates use the same one.
MIN_PACKED_ROWS = 5
# oneDNN compiles a program for every number of rows and keeps it, 0.3 to 0.7 MiB a weight's shape:
# steps of 355 sizes took 690 MiB of a model of 5 shapes, the last of them after hours. So there are
# this many sizes between a power of two and the next, none of them an eighth too large.
SIZES_PER_OCTAVE = 8


Weight = Tensor | Fp8Weight  # [n_out, n_in]


class Linear(Protocol):
    """y = x @ weight^T + bias (+ residual). x [num_rows, n_in], y [num_rows, n_out]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return a new tensor of x's type."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The reference product over a weight [n_out, n_in] kept as it is."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        return reference_layers.linear(x, self.weight, self.bias, residual=residual)


def packed_rows(num_rows: int) -> int:
    """Rows that a product of `num_rows` is computed with: one of a few sizes, none smaller."""
    grain = 1 << max(0, (num_rows - 1).bit_length() - SIZES_PER_OCTAVE.bit_length())
    return max(MIN_PACKED_ROWS, -(-num_rows // grain) * grain)


class PackedLinear:
    """A weight reordered once into oneDNN's own layout. The original can be dropped."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._added = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        num_rows = x.shape[0]
        padding = (0, 0, 0, packed_rows(num_rows) - num_rows)
        if padding[3]:
            x = F.pad(x, padding)
            residual = None if residual is None else F.pad(residual, padding)
        if residual is None:
            y: Tensor = self._plain(x, self._packed, self._bias, "none", [], "")
        else:
            y = self._added(x, residual, self._packed, self._bias, "add")
        return y[:num_rows] if padding[3] else y


@dataclass(frozen=True, slots=True)
class Gate:
    """silu(gate) * up from one product with both halves of the weight."""

    both: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return a new tensor [num_rows, width] of x's type."""
        return reference_layers.swiglu(self.both(x))


@dataclass(frozen=True, slots=True)
class LayerOps:
    """Operations of one device. `linear` makes a layer of a weight and a bias; `gate`
    silu(gate) * up of merged ones, gate first; `rmsnorm` has the signature of
    `kernels.reference_layers`; `linear_norm(linear, x, residual, weight, eps)` is
    y = linear(x, residual) and its norm, (y, rmsnorm(y, weight, eps))."""

    linear: Callable[[Weight, Tensor | None], Linear]
    gate: Callable[[Weight, Tensor | None], Callable[[Tensor], Tensor]]
    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    linear_norm: Callable[[Linear, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _linear_norm(
    linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y = linear(x, residual)
    return y, reference_layers.rmsnorm(y, weight, eps)


def layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """The reference operations of a device and type. An fp8 weight is multiplied as what it stands
    for, rounded to the type, and takes as much memory as another."""
    packs = device.type == "cpu" and _can_pack(dtype)
    make: Callable[[Tensor, Tensor | None], Linear] = PackedLinear if packs else PlainLinear

    def linear(weight: Weight, bias: Tensor | None) -> Linear:
        whole = weight.dequantised(dtype) if isinstance(weight, Fp8Weight) else weight
        return make(whole, bias)

    return LayerOps(
        linear=linear,
        gate=lambda weight, bias: Gate(linear(weight, bias)),
        rmsnorm=reference_layers.rmsnorm,
        linear_norm=_linear_norm,
    )


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's packed product for the type (x86 wheels do)."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
