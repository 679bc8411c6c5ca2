"""Linear layers with fused ends: bias, activation, SwiGLU, residual: `specmesh::linear`.

    y = act(x W^T + b) + r,     or     y = silu(x Wg^T + bg) * (x Wu^T + bu) + r

Numeric contract (`invariant=True`): products are summed in tiles of `BLOCK_K` ascending inside
chunks of `CHUNK_K` (float32: `CHUNK_K_FLOAT32`), each chunk from zero in float32, and chunks are
added ascending. Tile shape, number of rows and whether chunks are split among programs appear
nowhere in it, so a row's bits do not depend on who shares the call. A split writes every chunk's
partial and adds them in a second launch; nothing is added atomically. One family of matrix
instructions serves all tiles of an architecture (`configs/layers.py`). With `invariant=False` the
product is the vendor library's, and the end is one more launch.

Specification: `reference_layers.linear` and `swiglu`. Must not know models or layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.configs.layers import LinearTiles, linear_tiles

BLOCK_K = 64
CHUNK_K = 1024
CHUNK_K_FLOAT32 = 128  # no tensor cores: shorter runs of additions keep float32's digits
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "swiglu")


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 is sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    return x


@triton.jit
def _end(
    gate, up, bias, residual, out, rows, columns, width, live, stride_residual, stride_out,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Everything after the sum, in float32 with one rounding. gate is the result but in SwiGLU."""
    inside = columns < width
    if bias is not None:
        gate += tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu":
        if bias is not None:
            up += tl.load(bias + width + columns, inside, other=0.0).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up
    else:
        y = _activate(gate, ACTIVATION)
    if residual is not None:
        y += tl.load(residual + rows * stride_residual + columns, live, other=0.0).to(tl.float32)
    tl.store(out + rows * stride_out + columns, y.to(out.dtype.element_ty), live)


@triton.jit
def _dot(a, b, acc, ORDERED: tl.constexpr):
    """acc + a b^T. ORDERED adds products one by one: the interpreter's matrix product comes from a
    CPU library, whose bits may depend on a row's place."""
    if ORDERED:
        return acc + tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], 2)
    return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def _linear_kernel(
    x, weight, x_tiles, weight_tiles, bias, residual, out, partials,
    stride_x, stride_xk, stride_weight, stride_wk, stride_residual, stride_out,
    num_rows, width, depth,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK_K: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles fastest, then column tiles; chunks if SPLIT, else 1)."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    first_row = (tl.program_id(0) % row_tiles) * BLOCK_M
    first_column = (tl.program_id(0) // row_tiles) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    columns = first_column + tl.arange(0, BLOCK_N)
    depths = tl.arange(0, BLOCK_K)[None, :]
    own_rows = rows.to(tl.int64)
    x_at = x + own_rows * stride_x + depths * stride_xk
    weight_at = weight + columns[:, None].to(tl.int64) * stride_weight + depths * stride_wk
    up_at = weight_at + tl.cast(width, tl.int64) * stride_weight
    live_rows, live_columns = rows < num_rows, (columns < width)[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_chunk, last_chunk = 0, tl.cdiv(depth, CHUNK_K)
    if SPLIT:
        first_chunk = tl.program_id(1)
        last_chunk = first_chunk + 1
    for chunk in range(first_chunk, last_chunk):
        chunk_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        chunk_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(chunk * CHUNK_K, min((chunk + 1) * CHUNK_K, depth), BLOCK_K):
            if DESCRIPTORS:
                a = x_tiles.load([first_row, k])
                b = weight_tiles.load([first_column, k])
                chunk_gate = _dot(a, b, chunk_gate, ORDERED)
                if ACTIVATION == "swiglu":
                    c = weight_tiles.load([first_column + width, k])
                    chunk_up = _dot(a, c, chunk_up, ORDERED)
            else:
                left = depths < depth - k
                if EVEN:
                    a = tl.load(x_at + k * stride_xk, live_rows, other=0.0)
                    b = tl.load(weight_at + k * stride_wk, live_columns, other=0.0)
                else:
                    a = tl.load(x_at + k * stride_xk, live_rows & left, other=0.0)
                    b = tl.load(weight_at + k * stride_wk, live_columns & left, other=0.0)
                chunk_gate = _dot(a, b, chunk_gate, ORDERED)
                if ACTIVATION == "swiglu":
                    if EVEN:
                        c = tl.load(up_at + k * stride_wk, live_columns, other=0.0)
                    else:
                        c = tl.load(up_at + k * stride_wk, live_columns & left, other=0.0)
                    chunk_up = _dot(a, c, chunk_up, ORDERED)
        gate += chunk_gate
        if ACTIVATION == "swiglu":
            up += chunk_up
    columns = columns[None, :]
    live = live_rows & (columns < width)
    if SPLIT:
        halves = 2 if ACTIVATION == "swiglu" else 1
        base = (tl.cast(first_chunk, tl.int64) * num_rows + own_rows) * (halves * width) + columns
        tl.store(partials + base, gate, live)
        if ACTIVATION == "swiglu":
            tl.store(partials + base + width, up, live)
    else:
        _end(
            gate, up, bias, residual, out, own_rows, columns, width, live, stride_residual,
            stride_out, ACTIVATION,
        )  # fmt: skip


@triton.jit
def _finish_kernel(
    partials, bias, residual, out, stride_residual, stride_out, num_rows, width, num_chunks,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks, rows): add chunks ascending, then the end."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    halves = 2 if ACTIVATION == "swiglu" else 1
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for chunk in range(0, num_chunks):
        base = (tl.cast(chunk, tl.int64) * num_rows + row) * (halves * width) + columns
        gate += tl.load(partials + base, live, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu":
            up += tl.load(partials + base + width, live, other=0.0).to(tl.float32)
    _end(
        gate, up, bias, residual, out, row, columns, width, live, stride_residual, stride_out,
        ACTIVATION,
    )  # fmt: skip


def _descriptors(x: Tensor, weight: Tensor, tiles: LinearTiles) -> tuple[object, object]:
    return (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.block_m, BLOCK_K]),
        TensorDescriptor(
            weight, list(weight.shape), list(weight.stride()), [tiles.block_n, BLOCK_K]
        ),
    )


def _can_describe(tensor: Tensor, block: int) -> bool:
    """Whether bulk copies may read tiles: rows on 16 bytes, and no tile wider than the tensor."""
    aligned = tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1
    on_boundary = tensor.device.type == "meta" or tensor.data_ptr() % 16 == 0
    return aligned and on_boundary and tensor.shape[0] >= block and tensor.shape[1] >= BLOCK_K


def _launch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    invariant: bool,
) -> Tensor:  # fmt: skip
    num_rows, depth = x.shape
    swiglu = activation == "swiglu"
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = x.new_empty(num_rows, width)
    if num_rows == 0:
        return out
    if not invariant:
        return _finish(F.linear(x, weight)[None], bias, residual, out, activation)
    tiles = linear_tiles(num_rows, swiglu, x.dtype, x.device)
    chunk = CHUNK_K_FLOAT32 if x.dtype is torch.float32 else CHUNK_K
    num_chunks = triton.cdiv(depth, chunk)
    split = tiles.split and num_chunks > 1
    partials = None
    if split:
        shape = (num_chunks, num_rows, weight.shape[0])
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    describe = (
        tiles.descriptors
        and _can_describe(x, 1)
        and _can_describe(weight, tiles.block_n)
        and (not swiglu or width % tiles.block_n == 0)
    )
    x_tiles, weight_tiles = _descriptors(x, weight, tiles) if describe else (None, None)
    grid = (
        triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(width, tiles.block_n),
        num_chunks if split else 1,
    )
    _linear_kernel[grid](
        x, weight, x_tiles, weight_tiles, bias, residual, out, partials,
        *x.stride(), *weight.stride(), 0 if residual is None else residual.stride(0), width,
        num_rows, width, depth,
        ACTIVATION=activation, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=BLOCK_K,
        CHUNK_K=chunk, SPLIT=split, EVEN=depth % BLOCK_K == 0, DESCRIPTORS=describe,
        ORDERED=tiles.ordered, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out if partials is None else _finish(partials, bias, residual, out, activation)


def _finish(
    partials: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, activation: str
) -> Tensor:
    num_chunks, num_rows, _ = partials.shape
    width, block = out.shape[1], 1024
    _finish_kernel[(triton.cdiv(width, block), num_rows)](
        partials, bias, residual, out, 0 if residual is None else residual.stride(0), width,
        num_rows, width, num_chunks, ACTIVATION=activation, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


_linear = torch.library.custom_op("specmesh::linear", _launch_linear, mutates_args=())


@_linear.register_fake
def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    invariant: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if activation == "swiglu" else 1))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    invariant: bool = True,
) -> Tensor:
    """act(x W^T + b) + residual, one rounding to x's type. Inference only.

    x [.., depth], any strides; weight [width, depth] of x's type, any strides; bias [width],
    contiguous; residual [.., width]. activation: one of `ACTIVATIONS`; "swiglu" takes weight
    [2 width, depth] and bias [2 width], gate first. invariant: see the module text; False rounds
    the product to x's type before the end. Raises ValueError on shapes or names that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if weight.shape[1] != x.shape[-1] or weight.dtype is not x.dtype:
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} {x.dtype}"
        )
    if activation == "swiglu" and weight.shape[0] % 2:
        raise ValueError("a SwiGLU weight has as many rows for gate as for up")
    width = weight.shape[0] // (2 if activation == "swiglu" else 1)
    if residual is not None:
        if residual.shape != (*x.shape[:-1], width):
            raise ValueError(f"residual {tuple(residual.shape)} is not [.., {width}]")
        residual = residual.reshape(-1, width)
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
    if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    y = torch.ops.specmesh.linear(
        x.reshape(-1, x.shape[-1]), weight, bias, residual, activation, invariant
    )
    return y.view(*x.shape[:-1], width)
