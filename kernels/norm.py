"""RMSNorm, with or without the residual stream: `specmesh::rmsnorm`, `specmesh::rmsnorm_residual`.

    y = x / sqrt(mean(x^2) + eps) * weight,   and with a residual: x := round(x + residual) first

One program a row; the row is read once and every result written once. Sums in float32, the
normalised value rounded to x's type before the product with weight, as published checkpoints
expect. A row's bits do not depend on how many rows share the call. Specification:
`reference_layers.rmsnorm` and `rmsnorm_residual`. Must not know models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs.layers import launches_early, norm_warps
from kernels.early_launch import begin

MAX_WIDTH = 32768


@triton.jit
def normalize(x, width, eps, AXIS: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) along AXIS in float32; lanes past the width must hold 0."""
    mean = tl.sum(x * x, AXIS) / width
    return x * tl.expand_dims(tl.div_rn(1.0, tl.sqrt_rn(mean + eps)), AXIS)


@triton.jit
def _rmsnorm_kernel(
    x, residual, weight, out, stream,
    stride_x, stride_residual, stride_out, stride_stream, width, eps, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    kind = x.dtype.element_ty
    begin(EARLY)
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride_x + columns, inside, other=0.0).to(tl.float32)
    if residual is not None:
        other = tl.load(residual + row * stride_residual + columns, inside, other=0.0)
        rounded = (value + other.to(tl.float32)).to(kind)
        tl.store(stream + row * stride_stream + columns, rounded, inside)
        value = rounded.to(tl.float32)
    normal = normalize(value, width, eps, 1).to(kind).to(tl.float32)
    tl.store(out + row * stride_out + columns, (normal * scale).to(kind), inside)


def _rows_of(x: Tensor) -> Tensor:
    """x as [rows, width] with a contiguous last dimension, without a copy where that is so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch_rmsnorm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    rows = _rows_of(x)
    added = None if residual is None else _rows_of(residual)
    out = x.new_empty(x.shape)
    stream = None if residual is None else x.new_empty(x.shape)
    width = x.shape[-1]
    if rows.shape[0] == 0:
        return out, stream
    early = launches_early(x.device)
    _rmsnorm_kernel[(rows.shape[0],)](
        rows, added, weight, out, stream,
        rows.stride(0), 0 if added is None else added.stride(0), width, width, width, eps,
        BLOCK=triton.next_power_of_2(width), EARLY=early, num_warps=norm_warps(width, x.device),
        launch_pdl=early,
    )  # fmt: skip
    return out, stream


def _launch_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch_rmsnorm(x, None, weight, eps)[0]


def _launch_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out, stream = _launch_rmsnorm(x, residual, weight, eps)
    assert stream is not None
    return out, stream


_plain = torch.library.custom_op("specmesh::rmsnorm", _launch_plain, mutates_args=())
_residual = torch.library.custom_op("specmesh::rmsnorm_residual", _launch_residual, mutates_args=())


@_plain.register_fake
def _plain_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@_residual.register_fake
def _residual_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit rows of {x.shape[-1]}")
    if weight.stride(0) != 1:
        raise ValueError("the weight of a norm must be contiguous")


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension. x [.., width], any strides; weight [width]. Contiguous result.

    Raises ValueError when the weight does not fit or width exceeds `MAX_WIDTH`.
    """
    _check(x, weight)
    return torch.ops.specmesh.rmsnorm(x, weight, eps)


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rmsnorm(x + residual), x + residual), the sum rounded to x's type first. One launch.

    Raises ValueError when shapes do not fit or width exceeds `MAX_WIDTH`.
    """
    _check(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} is not {tuple(x.shape)}")
    return torch.ops.specmesh.rmsnorm_residual(x, residual, weight, eps)
