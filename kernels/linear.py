"""Linear layers with fused ends: bias, activation, SwiGLU, residual: `specmesh::linear`.

    y = act(x W^T + b) + r,     or     y = silu(x Wg^T + bg) * (x Wu^T + bu) + r

Numeric contract (`invariant=True`): products are summed in tiles of `BLOCK_K` ascending inside
chunks of K (`chunk_depth`: of the weight's shape and type alone), each chunk from zero in float32,
and chunks are added ascending. Tile shape, which operand is which, number of rows and whether
chunks are split among programs appear nowhere in it, so a row's bits do not depend on who shares
the call. A split writes every chunk's partial and adds them in a second launch; nothing is added
atomically. One family of matrix instructions serves all tiles of an architecture
(`configs/layers.py`). With `invariant=False` the product is the vendor library's, and the end is
one more launch.

On sm_90 a launch starts before the one ahead of it ends and asks for its first weights meanwhile
(`early_launch`): weights must not be written by the kernel before.

Specification: `reference_layers.linear` and `swiglu`. Must not know models or layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.configs.layers import launches_early, linear_tiles
from kernels.early_launch import begin, prefetch

BLOCK_K = 64
UNCUT_WIDTH = 12288  # weights of so many columns fill a device without splitting K: one chunk
NUM_CHUNKS = 4  # of a narrower weight
# A run this short takes a program no longer than the launch that would add its parts; where columns
# outnumber it so far, there are programs enough without splitting.
SHALLOW_DEPTH, SHALLOW_RATIO = 1024, 4
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
def _tile(tiles, at, first, k, stride_k, live, left, EVEN: tl.constexpr):
    """[rows of `at`, BLOCK_K] of an operand, by bulk copy where `tiles` describes it."""
    if tiles is not None:
        tile = tiles.load([first, k])
    elif EVEN:
        tile = tl.load(at + k * stride_k, live, other=0.0)
    else:
        tile = tl.load(at + k * stride_k, live & left, other=0.0)
    return tile


@triton.jit
def _product(a, b, acc, TURNED: tl.constexpr, ORDERED: tl.constexpr):
    """acc [rows, columns] + a b^T; TURNED: acc is [columns, rows]."""
    return _dot(b, a, acc, ORDERED) if TURNED else _dot(a, b, acc, ORDERED)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    if TURNED:
        zeros = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    return zeros


@triton.jit
def _sum_chunk(
    x_at, more_at, weight_at, up_at, x_tiles, more_tiles, weight_tiles, first_row, first_column,
    num_rows, width, depth, first_k, last_k, stride_xk, stride_wk,
    SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """One chunk's sums from zero: (gate, up) of BLOCK_M rows, then of MORE_M; unused ones are 0."""
    depths = tl.arange(0, BLOCK_K)[None, :]
    live_rows = first_row + tl.arange(0, BLOCK_M)[:, None] < num_rows
    live_columns = first_column + tl.arange(0, BLOCK_N)[:, None] < width
    gate = _zeros(BLOCK_M, BLOCK_N, TURNED)
    up, more_gate, more_up = gate, gate, gate
    if MORE_M:
        first_more = first_row + BLOCK_M
        live_more = first_more + tl.arange(0, MORE_M)[:, None] < num_rows
        more_gate = _zeros(MORE_M, BLOCK_N, TURNED)
        more_up = more_gate
    for k in range(first_k, last_k, BLOCK_K):
        left = depths < depth - k
        b = _tile(weight_tiles, weight_at, first_column, k, stride_wk, live_columns, left, EVEN)
        a = _tile(x_tiles, x_at, first_row, k, stride_xk, live_rows, left, EVEN)
        gate = _product(a, b, gate, TURNED, ORDERED)
        if SWIGLU:
            c = _tile(
                weight_tiles, up_at, first_column + width, k, stride_wk, live_columns, left, EVEN
            )
            up = _product(a, c, up, TURNED, ORDERED)
        if MORE_M:
            d = _tile(more_tiles, more_at, first_more, k, stride_xk, live_more, left, EVEN)
            more_gate = _product(d, b, more_gate, TURNED, ORDERED)
            if SWIGLU:
                more_up = _product(d, c, more_up, TURNED, ORDERED)
    return gate, up, more_gate, more_up


@triton.jit
def _put(
    gate, up, bias, residual, out, partials, first_row, first_column, chunk, num_rows, width,
    stride_residual, stride_out,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A tile's sums to `partials` where there is such, else through the end to `out`."""
    if TURNED:
        gate, up = tl.trans(gate), tl.trans(up)
    rows = (first_row + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    columns = first_column + tl.arange(0, BLOCK_N)[None, :]
    live = (rows < num_rows) & (columns < width)
    if partials is not None:
        halves = 2 if ACTIVATION == "swiglu" else 1
        base = (tl.cast(chunk, tl.int64) * num_rows + rows) * (halves * width) + columns
        tl.store(partials + base, gate, live)
        if ACTIVATION == "swiglu":
            tl.store(partials + base + width, up, live)
    else:
        _end(
            gate, up, bias, residual, out, rows, columns, width, live, stride_residual,
            stride_out, ACTIVATION,
        )  # fmt: skip


@triton.jit
def _ask_for(
    weight, first_column, width, stride_weight, begin_k, end_k,
    BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch columns [begin_k, end_k) of K, at most AHEAD, of a tile's weights."""
    LANES: tl.constexpr = max(THREADS, BLOCK_N)
    SPAN: tl.constexpr = AHEAD * BLOCK_N // LANES
    lanes = tl.arange(0, LANES)
    k = begin_k + lanes // BLOCK_N * SPAN
    count = tl.minimum(SPAN, end_k - k) * (weight.dtype.element_ty.primitive_bitwidth // 8)
    row = first_column + lanes % BLOCK_N
    prefetch(weight + row.to(tl.int64) * stride_weight + k, tl.where(row < width, count, 0))


@triton.jit
def _linear_kernel(
    x, weight, x_tiles, more_tiles, weight_tiles, bias, residual, out, partials,
    stride_x, stride_xk, stride_weight, stride_wk, stride_residual, stride_out,
    num_rows, width, depth,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK_K: tl.constexpr, ONE_CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, TURNED: tl.constexpr, ORDERED: tl.constexpr, AHEAD: tl.constexpr,
    THREADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles fastest, then column tiles; chunks if SPLIT, else 1)."""
    SWIGLU: tl.constexpr = ACTIVATION == "swiglu"
    row_tiles = tl.cdiv(num_rows, BLOCK_M + MORE_M)
    first_row = (tl.program_id(0) % row_tiles) * (BLOCK_M + MORE_M)
    first_column = (tl.program_id(0) // row_tiles) * BLOCK_N
    first_k, last_k = 0, depth
    if SPLIT:
        first_k = tl.program_id(1) * CHUNK_K
        last_k = tl.minimum(first_k + CHUNK_K, depth)
    to_up = tl.cast(width, tl.int64) * stride_weight
    if AHEAD:
        asked_k = tl.minimum(first_k + AHEAD, last_k)
        _ask_for(weight, first_column, width, stride_weight, first_k, asked_k, BLOCK_N, AHEAD,
                 THREADS)  # fmt: skip
        if SWIGLU:
            _ask_for(weight + to_up, first_column, width, stride_weight, first_k, asked_k, BLOCK_N,
                     AHEAD, THREADS)  # fmt: skip
    begin(EARLY)
    depths = tl.arange(0, BLOCK_K)[None, :]
    rows = (first_row + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    columns = (first_column + tl.arange(0, BLOCK_N)[:, None]).to(tl.int64)
    x_at = x + rows * stride_x + depths * stride_xk
    more_at = x_at
    if MORE_M:
        more = (first_row + BLOCK_M + tl.arange(0, MORE_M)[:, None]).to(tl.int64)
        more_at = x + more * stride_x + depths * stride_xk
    weight_at = weight + columns * stride_weight + depths * stride_wk
    up_at = weight_at + to_up
    if SPLIT or ONE_CHUNK:
        gate, up, more_gate, more_up = _sum_chunk(
            x_at, more_at, weight_at, up_at, x_tiles, more_tiles, weight_tiles, first_row,
            first_column, num_rows, width, depth, first_k, last_k, stride_xk, stride_wk,
            SWIGLU, BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, EVEN, TURNED, ORDERED,
        )  # fmt: skip
    else:
        gate = _zeros(BLOCK_M, BLOCK_N, TURNED)
        up, more_gate, more_up = gate, gate, gate
        if MORE_M:
            more_gate = _zeros(MORE_M, BLOCK_N, TURNED)
            more_up = more_gate
        for chunk_k in range(0, depth, CHUNK_K):
            if AHEAD:
                next_k = chunk_k + AHEAD
                next_end = tl.minimum(next_k + CHUNK_K, depth)
                _ask_for(weight, first_column, width, stride_weight, next_k, next_end, BLOCK_N,
                         CHUNK_K, THREADS)  # fmt: skip
                if SWIGLU:
                    _ask_for(weight + to_up, first_column, width, stride_weight, next_k, next_end,
                             BLOCK_N, CHUNK_K, THREADS)  # fmt: skip
            own_gate, own_up, own_more_gate, own_more_up = _sum_chunk(
                x_at, more_at, weight_at, up_at, x_tiles, more_tiles, weight_tiles, first_row,
                first_column, num_rows, width, depth, chunk_k, min(chunk_k + CHUNK_K, depth),
                stride_xk, stride_wk,
                SWIGLU, BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, EVEN, TURNED, ORDERED,
            )  # fmt: skip
            gate += own_gate
            if SWIGLU:
                up += own_up
            if MORE_M:
                more_gate += own_more_gate
                if SWIGLU:
                    more_up += own_more_up
    chunk = tl.program_id(1)
    _put(
        gate, up, bias, residual, out, partials, first_row, first_column, chunk, num_rows, width,
        stride_residual, stride_out, ACTIVATION, BLOCK_M, BLOCK_N, TURNED,
    )  # fmt: skip
    if MORE_M:
        _put(
            more_gate, more_up, bias, residual, out, partials, first_row + BLOCK_M, first_column,
            chunk, num_rows, width, stride_residual, stride_out, ACTIVATION, MORE_M, BLOCK_N,
            TURNED,
        )  # fmt: skip


@triton.jit
def _finish_kernel(
    partials, bias, residual, out, stride_residual, stride_out, num_rows, width,
    NUM_CHUNKS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks, rows): add chunks ascending, then the end."""
    begin(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    halves = 2 if ACTIVATION == "swiglu" else 1
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):  # unrolled: all loads are in flight at once
        base = (tl.cast(chunk, tl.int64) * num_rows + row) * (halves * width) + columns
        gate += tl.load(partials + base, live, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu":
            up += tl.load(partials + base + width, live, other=0.0).to(tl.float32)
    _end(
        gate, up, bias, residual, out, row, columns, width, live, stride_residual, stride_out,
        ACTIVATION,
    )  # fmt: skip


def chunk_depth(weight: Tensor) -> int:
    """Columns of K summed in one run, for a weight [n, depth]; part of the numeric contract.

    A function of shape and type alone: one run for a weight wide enough to fill a device by its
    columns, or shallow, a quarter of the depth for another, so that few or many rows may split it.
    float32 has no tensor cores: shorter runs of additions keep its digits.
    """
    num_columns, depth = weight.shape
    if weight.dtype is torch.float32:
        return CHUNK_K_FLOAT32
    num_tiles = max(1, triton.cdiv(depth, BLOCK_K))
    is_shallow = depth <= SHALLOW_DEPTH and num_columns >= SHALLOW_RATIO * depth
    is_uncut = num_columns >= UNCUT_WIDTH or is_shallow
    return BLOCK_K * (num_tiles if is_uncut else triton.cdiv(num_tiles, NUM_CHUNKS))


def _num_chunks(weight: Tensor) -> int:
    return triton.cdiv(weight.shape[1], chunk_depth(weight))


def _splits(num_rows: int, weight: Tensor, swiglu: bool) -> bool:
    """Whether programs share the chunks of this product, and leave their sums to be added."""
    return linear_tiles(num_rows, weight, swiglu).split and _num_chunks(weight) > 1


def _descriptor(tensor: Tensor, block: int, step_k: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [block, step_k])


def _can_describe(tensor: Tensor, block: int) -> bool:
    """Whether bulk copies may read tiles: rows on 16 bytes, and no tile wider than the tensor."""
    aligned = tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1
    on_boundary = tensor.device.type == "meta" or tensor.data_ptr() % 16 == 0
    return aligned and on_boundary and tensor.shape[0] >= block and tensor.shape[1] >= BLOCK_K


def _launch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    invariant: bool,
) -> Tensor:  # fmt: skip
    width = weight.shape[0] // (2 if activation == "swiglu" else 1)
    out = x.new_empty(x.shape[0], width)
    if x.shape[0] == 0:
        return out
    partials = launch_product(x, weight, bias, residual, out, activation, invariant)
    return out if partials is None else _finish(partials, bias, residual, out, activation)


def launch_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: str, invariant: bool,
) -> Tensor | None:  # fmt: skip
    """Write `out` and return None, or return the chunks' sums [chunks, rows, n], to be added."""
    if not invariant:
        return F.linear(x, weight)[None]
    num_rows, depth = x.shape
    swiglu = activation == "swiglu"
    width = out.shape[1]
    tiles = linear_tiles(num_rows, weight, swiglu)
    chunk = chunk_depth(weight)
    num_chunks = _num_chunks(weight)
    split = _splits(num_rows, weight, swiglu)
    partials = None
    if split:
        shape = (num_chunks, num_rows, weight.shape[0])
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    describe = (
        tiles.descriptors
        and _can_describe(weight, tiles.block_n)
        and (not swiglu or width % tiles.block_n == 0)
    )
    describe_x = describe and not tiles.gathers and _can_describe(x, 1)
    step_k = tiles.block_k if depth % tiles.block_k == chunk % tiles.block_k == 0 else BLOCK_K
    early = launches_early(x.device)
    ahead = tiles.ahead if early and describe and depth % 8 == 0 else 0
    grid = (
        triton.cdiv(num_rows, tiles.block_m + tiles.more_m) * triton.cdiv(width, tiles.block_n),
        num_chunks if split else 1,
    )
    _linear_kernel[grid](
        x, weight,
        _descriptor(x, tiles.block_m, step_k) if describe_x else None,
        _descriptor(x, tiles.more_m, step_k) if describe_x and tiles.more_m else None,
        _descriptor(weight, tiles.block_n, step_k) if describe else None,
        bias, residual, out, partials,
        *x.stride(), *weight.stride(), 0 if residual is None else residual.stride(0), width,
        num_rows, width, depth,
        ACTIVATION=activation, BLOCK_M=tiles.block_m, MORE_M=tiles.more_m, BLOCK_N=tiles.block_n,
        BLOCK_K=step_k, CHUNK_K=chunk, ONE_CHUNK=num_chunks == 1, SPLIT=split,
        EVEN=depth % step_k == 0, TURNED=tiles.turned, ORDERED=tiles.ordered, AHEAD=ahead,
        THREADS=32 * tiles.num_warps, EARLY=early, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages * tiles.block_k // step_k, launch_pdl=early,
    )  # fmt: skip
    return partials


def linear_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool = True
) -> tuple[Tensor, Tensor | None]:
    """x W^T + b for a reader that may end it itself: (finished [num_rows, n], None), or the chunks'
    sums [chunks, num_rows, n], to be added ascending in float32, and the bias to add then.

    x [num_rows, depth], weight and bias as of `linear`. Raises ValueError where they do not fit.
    """
    if weight.shape[1] != x.shape[1] or weight.dtype is not x.dtype:
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} {x.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    heads = torch.ops.specmesh.linear_chunks(x, weight, bias, invariant)
    return heads, bias if heads.ndim == 3 else None


def _finish(
    partials: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, activation: str
) -> Tensor:
    num_chunks, num_rows, _ = partials.shape
    width, block = out.shape[1], 1024
    early = launches_early(out.device)
    _finish_kernel[(triton.cdiv(width, block), num_rows)](
        partials, bias, residual, out, 0 if residual is None else residual.stride(0), width,
        num_rows, width, NUM_CHUNKS=num_chunks, ACTIVATION=activation, BLOCK=block, EARLY=early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


_linear = torch.library.custom_op("specmesh::linear", _launch_linear, mutates_args=())


@_linear.register_fake
def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    invariant: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if activation == "swiglu" else 1))


def _launch_chunks(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    if x.shape[0] == 0:
        return out
    partials = launch_product(x, weight, bias, None, out, "none", invariant)
    return out if partials is None else partials


_chunks = torch.library.custom_op("specmesh::linear_chunks", _launch_chunks, mutates_args=())


@_chunks.register_fake
def _chunks_fake(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> Tensor:
    rows, width = x.shape[0], weight.shape[0]
    if rows == 0 or (invariant and not _splits(rows, weight, False)):
        return x.new_empty(rows, width)
    if not invariant:
        return x.new_empty(1, rows, width)
    return x.new_empty(_num_chunks(weight), rows, width, dtype=torch.float32)


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
