"""A linear layer onto the residual stream and the norm behind it: `specmesh::linear_norm`.

    y = x W^T + b + residual,     z = rmsnorm(y) * weight

Bits are those of `linear` and `rmsnorm` one after the other. Where the product leaves its chunks'
sums to be added, one launch adds them, ends the layer and normalises; else the two run in turn.
Specification: `reference_layers.linear` and `rmsnorm`. Must not know models or layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs.layers import launches_early, norm_warps
from kernels.early_launch import begin
from kernels.fp8_weight import Fp8Weight
from kernels.linear import launch_product, operands
from kernels.norm import MAX_WIDTH, normalize, rmsnorm


@triton.jit
def _finish_norm_kernel(
    partials, bias, residual, weight, stream, out, stride_residual, num_rows, width, eps,
    NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    kind = stream.dtype.element_ty
    total = tl.zeros([1, BLOCK], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        base = (tl.cast(chunk, tl.int64) * num_rows + row) * width + columns
        total += tl.load(partials + base, inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    added = tl.load(residual + row * stride_residual + columns, inside, other=0.0)
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    at = stream + row * width + columns
    tl.store(at, (total + added.to(tl.float32)).to(kind), inside)
    # Read back, so that a thread holds the columns it holds in `rmsnorm`: the sum's order is its.
    tl.debug_barrier()
    value = tl.load(at, inside, other=0.0).to(tl.float32)
    normal = normalize(value, width, eps, 1).to(kind).to(tl.float32)
    tl.store(out + row * width + columns, (normal * scale).to(kind), inside)


def _launch_linear_norm(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor,
    norm_weight: Tensor, eps: float, invariant: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, width = x.shape[0], weight.shape[0]
    stream = x.new_empty(num_rows, width)
    if num_rows == 0:
        return stream, torch.empty_like(stream)
    partials = launch_product(x, weight, scale, bias, residual, stream, "none", invariant)
    if partials is None:
        return stream, rmsnorm(stream, norm_weight, eps)
    out = torch.empty_like(stream)
    early = launches_early(x.device)
    _finish_norm_kernel[(num_rows,)](
        partials, bias, residual, norm_weight, stream, out, residual.stride(0), num_rows, width,
        eps, NUM_CHUNKS=len(partials), BLOCK=triton.next_power_of_2(width), EARLY=early,
        num_warps=norm_warps(width, x.device), launch_pdl=early,
    )  # fmt: skip
    return stream, out


_linear_norm = torch.library.custom_op(
    "specmesh::linear_norm", _launch_linear_norm, mutates_args=()
)


@_linear_norm.register_fake
def _linear_norm_fake(
    x: Tensor, weight: Tensor, _scale: Tensor | None, _bias: Tensor | None, _residual: Tensor,
    _norm_weight: Tensor, _eps: float, _invariant: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = x.shape[0], weight.shape[0]
    return x.new_empty(shape), x.new_empty(shape)


def linear_norm(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    invariant: bool = True,
) -> tuple[Tensor, Tensor]:
    """(y, rmsnorm(y)) with y = x W^T + b + residual. Inference only.

    x [num_rows, depth]; weight [width, depth] as of `linear`; bias [width] or None; residual
    [num_rows, width], rows contiguous; norm_weight [width], contiguous. Raises ValueError on shapes
    that do not fit.
    """
    values, scale = operands(x, weight, bias, invariant)
    width = len(values)
    if residual.shape != (x.shape[0], width) or residual.stride(1) != 1:
        raise ValueError(f"residual {tuple(residual.shape)} is not rows of {width}")
    if norm_weight.shape != (width,) or norm_weight.stride(0) != 1 or width > MAX_WIDTH:
        raise ValueError(f"norm weight {tuple(norm_weight.shape)} does not fit rows of {width}")
    return torch.ops.specmesh.linear_norm(
        x, values, scale, bias, residual, norm_weight, eps, invariant
    )
