"""Products of many rows with wide 16-bit weights on sm_90, plain or with SwiGLU (Gluon).

A unit is 64 weights: of SwiGLU's 32 are gate and 32 up, by eights in turn, so that a thread holds
both sums of a result. A tile is 160 rows by four units, or three where that spreads a last round
over more of the device. Each of two warpgroups multiplies two units, so that a byte copied serves
1.4 times the products of a tile of half the weights. One program a multiprocessor takes tile after
tile: one warp copies, and the next tile's stages are on their way while this one's sums end.

The numeric contract is that of `linear`, for weights of one chunk. `linear` chooses this kernel
where the table says so and `fits_persistent` agrees, and its own everywhere else: the interpreter
does not model Gluon. Does without bias, residuals, chunks and weights of one byte.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.configs.layers import Persistent
from kernels.linear_specialised import (
    COLUMNS,
    TYPES,
    can_describe,
    copy_rows,
    copy_unit,
    described,
    described_weights,
    gated,
)

# Rows of a tile, in two products: an operand's sides are powers of two.
ROWS, MORE = gl.constexpr(128), gl.constexpr(32)
TILE_ROWS = ROWS.value + MORE.value
STEP_K = gl.constexpr(64)  # columns of K a stage
UNITS, FEWER = gl.constexpr(4), gl.constexpr(3)  # of COLUMNS weights, a tile
STAGES = gl.constexpr(4)  # 208 KiB of shared memory: no fifth
PIECE = gl.constexpr(32)  # rows that leave at a time: what room the stages leave
UNIT_BYTES = gl.constexpr(COLUMNS.value * STEP_K.value * 2)
ROW_BYTES = gl.constexpr(TILE_ROWS * STEP_K.value * 2)
# Of the second warpgroup and of the copying warp; the first gets the rest.
REGISTERS = gl.constexpr((240, 24))


@gluon.jit
def _place_of(tile, row_tiles, full_columns):
    """(first row, first unit, units) of a tile: those of the same weights run side by side, and
    full_columns of UNITS come before those of FEWER."""
    column = tile // row_tiles
    first_unit = column * UNITS - gl.maximum(column - full_columns, 0) * (UNITS - FEWER)
    units = gl.where(column < full_columns, UNITS, FEWER)
    return (tile % row_tiles) * (ROWS + MORE), first_unit, units


@gluon.jit
def _copy_weights(weight, w_tiles, full, stage, first_unit, units, k, SWIGLU: gl.constexpr):
    """Tell a stage what it awaits, rows included, and ask for its weights."""
    mbarrier.expect(full.index(stage), UNITS * UNIT_BYTES + ROW_BYTES, pred=units == UNITS)
    mbarrier.expect(full.index(stage), FEWER * UNIT_BYTES + ROW_BYTES, pred=units != UNITS)
    for unit in gl.static_range(UNITS):
        place = w_tiles.index(stage * UNITS + unit)
        copy_unit(weight, place, full.index(stage), first_unit + unit, k, SWIGLU, unit < units)


@gluon.jit
def _copy(weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, num_tiles, row_tiles,
          full_columns, steps, SWIGLU: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """The copying warp. The first weights are asked for before the kernel ahead has ended."""
    first_row, first_unit, units = _place_of(gl.program_id(0), row_tiles, full_columns)
    for ahead in gl.static_range(STAGES):
        _copy_weights(weight, w_tiles, full, ahead, first_unit, units, ahead * STEP_K, SWIGLU)
    if EARLY:
        gdc_wait()
    for ahead in gl.static_range(STAGES):
        copy_rows(x, more_x, x_tiles, more_tiles, full, ahead, first_row, ahead * STEP_K, ROWS,
                  MORE)  # fmt: skip
    at = gl.to_tensor(STAGES)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_row, first_unit, units = _place_of(tile, row_tiles, full_columns)
        # Of this tile alone: a plain number assigned in a loop is not carried to its next round.
        first_step = gl.where(tile == gl.program_id(0), STAGES, 0)
        for step in range(first_step, steps):
            stage = at % STAGES
            mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
            k = step * STEP_K
            _copy_weights(weight, w_tiles, full, stage, first_unit, units, k, SWIGLU)
            copy_rows(x, more_x, x_tiles, more_tiles, full, stage, first_row, k, ROWS, MORE)
            at += 1


@gluon.jit
def _sum_units(w_tiles, x_tiles, more_tiles, full, empty, at, steps, FIRST: gl.constexpr,
               LIVE: gl.constexpr):  # fmt: skip
    """(sums of unit FIRST by ROWS rows, by MORE rows, both of the next unit, the next stage).

    LIVE: units there are, 1 or 2; sums of one that is not are without meaning.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16])
    a = gl.full([COLUMNS, ROWS], 0.0, gl.float32, layout)
    more_a = gl.full([COLUMNS, MORE], 0.0, gl.float32, more_layout)
    b = a
    more_b = more_a
    for step in range(steps):
        stage = at % STAGES
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        rows = x_tiles.index(stage).permute((1, 0))
        more_rows = more_tiles.index(stage).permute((1, 0))
        own = w_tiles.index(stage * UNITS + FIRST)
        adds = step != 0
        a = warpgroup_mma(own, rows, a, use_acc=adds, is_async=True)
        more_a = warpgroup_mma(own, more_rows, more_a, use_acc=adds, is_async=True)
        if LIVE == 2:
            own = w_tiles.index(stage * UNITS + FIRST + 1)
            b = warpgroup_mma(own, rows, b, use_acc=adds, is_async=True)
            more_b = warpgroup_mma(own, more_rows, more_b, use_acc=adds, is_async=True)
            a, more_a, b, more_b = warpgroup_mma_wait(4, deps=[a, more_a, b, more_b])
        else:
            a, more_a = warpgroup_mma_wait(2, deps=[a, more_a])
        # The step before is done with its stage.
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=adds)
        at += 1
    if LIVE == 2:
        a, more_a, b, more_b = warpgroup_mma_wait(0, deps=[a, more_a, b, more_b])
    else:
        a, more_a = warpgroup_mma_wait(0, deps=[a, more_a])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
    return a, more_a, b, more_b, at


@gluon.jit
def _halves(y):
    """[columns, 2 n] -> [columns, n] of the lower rows, of the upper ones; no data moves."""
    n: gl.constexpr = y.shape[1] // 2
    return y.reshape([y.shape[0], 2, n]).permute([0, 2, 1]).split()


@gluon.jit
def _put_piece(y, out, out_tiles, first_row, first_column, BUFFER: gl.constexpr):
    """y [columns, PIECE rows] to `out` by way of one of two buffers."""
    place = out_tiles.index(BUFFER)
    tma.store_wait(BUFFER)  # before buffer 1 comes buffer 0, the one store that may be pending then
    gl.thread_barrier()
    place.permute((1, 0)).store(y.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [first_row, first_column], place)


@gluon.jit
def _put(sums, out, out_tiles, first_row, unit, SWIGLU: gl.constexpr):
    """A unit's sums [COLUMNS, ROWS or MORE] through their end to `out`, one rounding."""
    num_rows: gl.constexpr = sums.shape[1]
    y = gated(sums) if SWIGLU else sums
    first_column = unit * y.shape[0]
    if num_rows == PIECE:
        _put_piece(y, out, out_tiles, first_row, first_column, 0)
    else:
        gl.static_assert(num_rows == 4 * PIECE)
        low, high = _halves(y)
        first, second = _halves(low)
        third, fourth = _halves(high)
        _put_piece(first, out, out_tiles, first_row, first_column, 0)
        _put_piece(second, out, out_tiles, first_row + PIECE, first_column, 1)
        _put_piece(third, out, out_tiles, first_row + 2 * PIECE, first_column, 0)
        _put_piece(fourth, out, out_tiles, first_row + 3 * PIECE, first_column, 1)


@gluon.jit
def _run_units(out, w_tiles, x_tiles, more_tiles, out_tiles, full, empty, at, steps, first_row,
               first_unit, FIRST: gl.constexpr, LIVE: gl.constexpr, SWIGLU: gl.constexpr,
               EARLY: gl.constexpr):  # fmt: skip
    """LIVE units of a tile from FIRST on, to their end; the next stage."""
    a, more_a, b, more_b, at = _sum_units(
        w_tiles, x_tiles, more_tiles, full, empty, at, steps, FIRST, LIVE
    )
    if EARLY:
        gdc_wait()  # what is written below may still be read by the kernel ahead
    unit = first_unit + FIRST
    _put(a, out, out_tiles, first_row, unit, SWIGLU)
    _put(more_a, out, out_tiles, first_row + ROWS, unit, SWIGLU)
    if LIVE == 2:
        _put(b, out, out_tiles, first_row, unit + 1, SWIGLU)
        _put(more_b, out, out_tiles, first_row + ROWS, unit + 1, SWIGLU)
    return at


@gluon.jit
def _multiply(out, w_tiles, x_tiles, more_tiles, out_tiles, full, empty, num_tiles, row_tiles,
              full_columns, steps, MEMBER: gl.constexpr, SWIGLU: gl.constexpr,
              EARLY: gl.constexpr):  # fmt: skip
    """A warpgroup: two units of every tile, the second one of tiles of FEWER."""
    FIRST: gl.constexpr = 2 * MEMBER
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_row, first_unit, units = _place_of(tile, row_tiles, full_columns)
        if MEMBER == 0 or units == UNITS:
            at = _run_units(out, w_tiles, x_tiles, more_tiles, out_tiles, full, empty, at, steps,
                            first_row, first_unit, FIRST, 2, SWIGLU, EARLY)  # fmt: skip
        else:
            at = _run_units(out, w_tiles, x_tiles, more_tiles, out_tiles, full, empty, at, steps,
                            first_row, first_unit, FIRST, 1, SWIGLU, EARLY)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _persistent_linear_kernel(
    weight, x, more_x, out, num_tiles, row_tiles, full_columns, steps,
    SWIGLU: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (programs, no more than tiles): each takes every programs-th tile, `steps` stages each,
    no fewer than STAGES."""
    if EARLY:
        gdc_launch_dependents()
    dtype: gl.constexpr = x.dtype
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * UNITS, COLUMNS, STEP_K], x.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP_K], x.layout)
    more_tiles = gl.allocate_shared_memory(dtype, [STAGES, MORE, STEP_K], more_x.layout)
    width: gl.constexpr = COLUMNS // 2 if SWIGLU else COLUMNS
    out_tiles = gl.allocate_shared_memory(dtype, [2, PIECE, width], out.layout)
    more_out_tiles = gl.allocate_shared_memory(dtype, [2, PIECE, width], out.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both warpgroups have read it
    gl.warp_specialize([
        (_multiply, (out, w_tiles, x_tiles, more_tiles, out_tiles, full, empty, num_tiles,
                     row_tiles, full_columns, steps, gl.constexpr(0), SWIGLU, EARLY)),
        (_multiply, (out, w_tiles, x_tiles, more_tiles, more_out_tiles, full, empty, num_tiles,
                     row_tiles, full_columns, steps, gl.constexpr(1), SWIGLU, EARLY)),
        (_copy, (weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, num_tiles,
                 row_tiles, full_columns, steps, SWIGLU, EARLY)),
    ], [4, 1], REGISTERS)  # fmt: skip


def tiles_of(num_rows: int, num_units: int, num_programs: int) -> tuple[int, int, int]:
    """(tiles of rows, columns of full tiles, tiles in all) that cover num_units of weights.

    What whole rounds of full tiles leave is a round of smaller ones, where one holds it.
    """
    row_tiles = triton.cdiv(num_rows, TILE_ROWS)
    a_round = max(1, num_programs // row_tiles)  # columns of tiles
    columns = triton.cdiv(num_units, UNITS.value)
    whole = columns // a_round * a_round
    fewer = triton.cdiv(max(0, num_units - whole * UNITS.value), FEWER.value)
    if fewer > a_round:
        return row_tiles, columns, columns * row_tiles
    return row_tiles, whole, (whole + fewer) * row_tiles


def _is_filled(num_rows: int, num_units: int, num_programs: int) -> bool:
    """Whether programs multiply four fifths of the time at least: gate and up of an 8B model at
    160 rows (0.85) gained 4 % on the general kernel."""
    row_tiles, full_columns, num_tiles = tiles_of(num_rows, num_units, num_programs)
    full_tiles = full_columns * row_tiles
    most_units = UNITS.value * triton.cdiv(full_tiles, num_programs)
    most_units += FEWER.value if num_tiles > full_tiles else 0
    return 5 * num_units * row_tiles >= 4 * most_units * num_programs


def fits_persistent(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    activation: str, chunk: int, own: Persistent,
) -> bool:  # fmt: skip
    """Whether a product of x [num_rows, depth], rows > 0, and a weight [n, depth], gate and up or
    plain, is the kernel's: nothing behind the sums but SwiGLU, one chunk of K, 16-bit, whole units
    and stages, and tiles that fill a device."""
    num_weights, depth = weight.shape
    return (
        scale is None
        and bias is None
        and residual is None
        and activation in ("none", "swiglu")
        and depth <= chunk
        and x.dtype in TYPES
        and weight.dtype is x.dtype
        and num_weights % COLUMNS.value == 0
        and depth % STEP_K.value == 0
        and depth // STEP_K.value >= STAGES.value
        and _is_filled(x.shape[0], num_weights // COLUMNS.value, own.num_programs)
        and can_describe(x)
        and can_describe(weight)
    )


def launch_persistent(
    x: Tensor, weight: Tensor, out: Tensor, swiglu: bool, own: Persistent, early: bool
) -> None:
    """x W^T into `out` [num_rows, n], contiguous, or its SwiGLU into `out` [num_rows, n / 2], for
    tensors that `fits_persistent` accepts."""
    num_weights, depth = weight.shape
    row_tiles, full_columns, num_tiles = tiles_of(
        x.shape[0], num_weights // COLUMNS.value, own.num_programs
    )
    _persistent_linear_kernel[(min(num_tiles, own.num_programs),)](
        described_weights(weight, swiglu, STEP_K.value), described(x, ROWS.value, STEP_K.value),
        described(x, MORE.value, STEP_K.value),
        described(out, PIECE.value, COLUMNS.value // (2 if swiglu else 1)), num_tiles, row_tiles,
        full_columns, depth // STEP_K.value, SWIGLU=swiglu, EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
