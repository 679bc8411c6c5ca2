"""The device code of `linear`: a tile's products chunk by chunk, then what a layer ends with.

The numeric contract is that of `linear`, which launches it. Weights of one byte (`fp8_weight`) are
converted as their tiles are read, and a chunk's sum is scaled where it ends: past it nothing knows
what weights were kept as. Must not know shapes of launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.early_launch import begin, prefetch


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
def _widened(tile, KIND: tl.constexpr):
    """A weight's tile in the type of activations: exact."""
    if tile.dtype != KIND and KIND.is_bf16():
        tile = tile.to(tl.float32)  # the straight way there takes a slow instruction a weight
    return tile.to(KIND)


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
def _scaled(total, scale, TURNED: tl.constexpr):
    """A sum times the scales [columns] of its channels, None for none.

    Rounded here whatever comes next: the compiler fuses a product, but no fma, with an addition.
    """
    if scale is not None:
        own = scale[:, None] if TURNED else scale[None, :]
        total = tl.fma(total, tl.broadcast_to(own, total.shape), tl.zeros_like(total))
    return total


@triton.jit
def _scales(scale, first_column, width, WANTED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The scales of a tile's channels below `width`; None where there are none, or not WANTED."""
    own = None
    if WANTED and scale is not None:
        columns = first_column + tl.arange(0, BLOCK_N)
        own = tl.load(scale + columns, columns < width, other=0.0)
    return own


@triton.jit
def _sum_chunk(
    x_at, more_at, weight_at, up_at, x_tiles, more_tiles, weight_tiles, gate_scale, up_scale,
    first_row, first_column, num_rows, width, depth, first_k, last_k, stride_xk, stride_wk,
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
        b = _widened(b, a.dtype)
        gate = _product(a, b, gate, TURNED, ORDERED)
        if SWIGLU:
            c = _tile(
                weight_tiles, up_at, first_column + width, k, stride_wk, live_columns, left, EVEN
            )
            c = _widened(c, a.dtype)
            up = _product(a, c, up, TURNED, ORDERED)
        if MORE_M:
            d = _tile(more_tiles, more_at, first_more, k, stride_xk, live_more, left, EVEN)
            more_gate = _product(d, b, more_gate, TURNED, ORDERED)
            if SWIGLU:
                more_up = _product(d, c, more_up, TURNED, ORDERED)
    gate, up = _scaled(gate, gate_scale, TURNED), _scaled(up, up_scale, TURNED)
    if MORE_M:
        more_gate = _scaled(more_gate, gate_scale, TURNED)
        more_up = _scaled(more_up, up_scale, TURNED)
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
    x, weight, scale, x_tiles, more_tiles, weight_tiles, bias, residual, out, partials,
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
    gate_scale = _scales(scale, first_column, width, True, BLOCK_N)
    up_scale = _scales(scale, width + first_column, 2 * width, SWIGLU, BLOCK_N)
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
            x_at, more_at, weight_at, up_at, x_tiles, more_tiles, weight_tiles, gate_scale,
            up_scale, first_row, first_column, num_rows, width, depth, first_k, last_k, stride_xk,
            stride_wk,
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
                x_at, more_at, weight_at, up_at, x_tiles, more_tiles, weight_tiles, gate_scale,
                up_scale, first_row, first_column, num_rows, width, depth, chunk_k,
                min(chunk_k + CHUNK_K, depth), stride_xk, stride_wk,
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
