"""Products with specialised warps, for 16-bit weights on sm_90, plain or with SwiGLU (Gluon).

One warp copies tiles of weights and rows by bulk copies, many stages ahead; each of one or two
warpgroups multiplies 64 weights by the tile's rows and holds nothing else. The compiler's own
pipeline has every warp copy and multiply in turn, and its lookahead ends at each chunk of K: here
the next chunk's tiles are on their way while this one's sums are added. One program a tile. Rows of
a tile are two products, of ROWS and of MORE, where there are MORE, as an operand's sides are powers
of two. A warpgroup's weights of SwiGLU are 32 of gate and 32 of up, by eights in turn, so that a
thread holds both sums of a result.

The numeric contract is that of `linear`, which chooses this kernel where the table says so and
`fits` agrees, and its own everywhere else: the interpreter does not model Gluon. Weights are the
first operand of the same family of matrix instructions, so that bits are equal. Does without bias,
other activations and weights of one byte.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.configs.layers import Specialised

COLUMNS = gl.constexpr(64)  # weights of a warpgroup
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
REGISTERS = 1 << 16  # of a multiprocessor
SHARED_BYTES = 228 << 10  # of a multiprocessor, of which each program takes 1 KiB more than its own


@gluon.jit
def _tile_of(program, row_tiles, column_tiles):
    """(tile of rows, of columns, chunk) of a program: those of one weight run side by side."""
    rest = program // row_tiles
    return program % row_tiles, rest % column_tiles, rest // column_tiles


@gluon.jit
def copy_unit(weight, place, bar, unit, k, SWIGLU: gl.constexpr, pred=True):
    """Ask for 64 weights, the unit-th, to `place` [64, columns of K]."""
    if SWIGLU:
        eights = place._reinterpret(weight.dtype, weight.block_shape, weight.layout)
        tma.async_copy_global_to_shared(weight, [unit * 4, 0, 0, k], bar, eights, pred=pred)
    else:
        tma.async_copy_global_to_shared(weight, [unit * COLUMNS, k], bar, place, pred=pred)


@gluon.jit
def copy_rows(x, more_x, x_tiles, more_tiles, full, stage, first_row, k, ROWS: gl.constexpr,
              MORE: gl.constexpr):  # fmt: skip
    """Ask for a stage's rows, ROWS and MORE; `full` counts their bytes."""
    tma.async_copy_global_to_shared(x, [first_row, k], full.index(stage), x_tiles.index(stage))
    if MORE:
        tma.async_copy_global_to_shared(
            more_x, [first_row + ROWS, k], full.index(stage), more_tiles.index(stage)
        )


@gluon.jit
def _copy_weights(weight, w_tiles, full, stage, first_unit, k, GROUPS: gl.constexpr,
                  SWIGLU: gl.constexpr):  # fmt: skip
    for group in gl.static_range(GROUPS):
        copy_unit(weight, w_tiles.index(stage * GROUPS + group), full.index(stage),
                  first_unit + group, k, SWIGLU)  # fmt: skip


@gluon.jit
def _copy(weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, first_row, first_unit,
          first_k, last_k, ROWS: gl.constexpr, MORE: gl.constexpr, STEP_K: gl.constexpr,
          GROUPS: gl.constexpr, STAGES: gl.constexpr, SWIGLU: gl.constexpr,
          EARLY: gl.constexpr):  # fmt: skip
    """The copying warp. The first weights are asked for before the kernel ahead has ended."""
    NUM_BYTES: gl.constexpr = (GROUPS * COLUMNS + ROWS + MORE) * STEP_K * 2
    for ahead in gl.static_range(STAGES):
        mbarrier.expect(full.index(ahead), NUM_BYTES)
        k = first_k + ahead * STEP_K
        _copy_weights(weight, w_tiles, full, ahead, first_unit, k, GROUPS, SWIGLU)
    if EARLY:
        gdc_wait()
    for ahead in gl.static_range(STAGES):
        k = first_k + ahead * STEP_K
        copy_rows(x, more_x, x_tiles, more_tiles, full, ahead, first_row, k, ROWS, MORE)
    for step in range(STAGES, (last_k - first_k) // STEP_K):
        stage = step % STAGES
        k = first_k + step * STEP_K
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), NUM_BYTES)
        _copy_weights(weight, w_tiles, full, stage, first_unit, k, GROUPS, SWIGLU)
        copy_rows(x, more_x, x_tiles, more_tiles, full, stage, first_row, k, ROWS, MORE)


@gluon.jit
def gated(sums):
    """Sums [64, n] of a unit of SwiGLU, eight of gate and eight of up in turn: [32, n]."""
    num_rows: gl.constexpr = sums.shape[1]
    gate, up = sums.reshape([4, 2, 8, num_rows]).permute([0, 2, 3, 1]).split()
    return (gate * (1 / (1 + gl.exp(-gate))) * up).reshape([COLUMNS // 2, num_rows])


@gluon.jit
def _places(sums, first_row, first_column):
    """(rows [1, n], columns [64, 1]) of sums [64, n]."""
    layout: gl.constexpr = sums.type.layout
    columns = first_column + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    rows = first_row + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    return rows[None, :], columns[:, None]


@gluon.jit
def _put_chunk(sums, partials, chunk, first_row, first_column, num_rows, width):
    rows, columns = _places(sums, first_row, first_column)
    base = (chunk * num_rows).to(gl.int64) * width
    gl.store(partials + base + rows * width + columns, sums, rows < num_rows)


@gluon.jit
def _put(sums, residual, place, first_row, unit, num_rows, stride_residual, SWIGLU: gl.constexpr):
    """A unit's sums [64, n] through their end to `place` [n, columns], one rounding."""
    y = gated(sums) if SWIGLU else sums
    if residual is not None:
        rows, columns = _places(y, first_row, unit * y.shape[0])
        at = residual + rows * stride_residual + columns
        y += gl.load(at, rows < num_rows, other=0.0).to(gl.float32)
    place.permute((1, 0)).store(y.to(place.dtype))


@gluon.jit
def _zeros(ROWS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    return gl.full([COLUMNS, ROWS], 0.0, gl.float32, layout)


@gluon.jit
def _sum_chunk(w_tiles, x_tiles, more_tiles, full, empty, at, steps, MEMBER: gl.constexpr,
               ROWS: gl.constexpr, MORE: gl.constexpr, GROUPS: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """(sums by ROWS rows, by MORE rows, the next stage) of `steps` stages from `at` on; the second
    sums are without meaning where there are no MORE."""
    sums = _zeros(ROWS)
    more_sums = sums
    if MORE:
        more_sums = _zeros(MORE)
    for step in range(steps):
        stage = at % STAGES
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        weights = w_tiles.index(stage * GROUPS + MEMBER)
        sums = warpgroup_mma(weights, x_tiles.index(stage).permute((1, 0)), sums,
                             use_acc=step != 0, is_async=True)  # fmt: skip
        if MORE:
            more_sums = warpgroup_mma(weights, more_tiles.index(stage).permute((1, 0)), more_sums,
                                      use_acc=step != 0, is_async=True)  # fmt: skip
            sums, more_sums = warpgroup_mma_wait(2, deps=[sums, more_sums])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # The step before is done with its stage.
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=step != 0)
        at += 1
    if MORE:
        sums, more_sums = warpgroup_mma_wait(0, deps=[sums, more_sums])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
    return sums, more_sums, at


@gluon.jit
def _multiply(out, more_out, partials, residual, w_tiles, x_tiles, more_tiles, out_tiles,
              more_out_tiles, full, empty, chunk, steps, num_rows, width, stride_residual,
              first_row, first_unit, MEMBER: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr,
              GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr,
              SWIGLU: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """A warpgroup: its unit of weights against the tile's rows, CHUNKS runs of `steps` stages."""
    unit = first_unit + MEMBER
    total = _zeros(ROWS)
    more_total = total
    if MORE:
        more_total = _zeros(MORE)
    at = gl.to_tensor(0)
    for _ in range(CHUNKS):
        sums, more_sums, at = _sum_chunk(w_tiles, x_tiles, more_tiles, full, empty, at, steps,
                                         MEMBER, ROWS, MORE, GROUPS, STAGES)  # fmt: skip
        if CHUNKS > 1:
            total += sums
            if MORE:
                more_total += more_sums
        else:
            total = sums
            more_total = more_sums
    if EARLY:
        gdc_wait()  # what is written below may still be read by the kernel ahead
    if partials is not None:
        _put_chunk(total, partials, chunk, first_row, unit * COLUMNS, num_rows, width)
        if MORE:
            _put_chunk(more_total, partials, chunk, first_row + ROWS, unit * COLUMNS, num_rows,
                       width)  # fmt: skip
    else:
        place = out_tiles.index(MEMBER)
        _put(total, residual, place, first_row, unit, num_rows, stride_residual, SWIGLU)
        if MORE:
            more_place = more_out_tiles.index(MEMBER)
            _put(more_total, residual, more_place, first_row + ROWS, unit, num_rows,
                 stride_residual, SWIGLU)  # fmt: skip
        fence_async_shared()
        gl.thread_barrier()
        first_column = unit * place.shape[1]
        tma.async_copy_shared_to_global(out, [first_row, first_column], place)
        if MORE:
            tma.async_copy_shared_to_global(more_out, [first_row + ROWS, first_column], more_place)
        tma.store_wait(0)


@gluon.jit
def _specialised_linear_kernel(
    weight, x, more_x, out, more_out, partials, residual, row_tiles, column_tiles, num_rows, width,
    chunk_k, stride_residual, ROWS: gl.constexpr, MORE: gl.constexpr, STEP_K: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr, SWIGLU: gl.constexpr,
    WARP_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows and columns, times chunks where there are `partials`: `_tile_of`).

    A program runs CHUNKS chunks of chunk_k columns of K, whole multiples of STEP_K.
    """
    if EARLY:
        gdc_launch_dependents()
    row_tile, column_tile, chunk = _tile_of(gl.program_id(0), row_tiles, column_tiles)
    first_row = row_tile * (ROWS + MORE)
    first_unit = column_tile * GROUPS
    first_k = chunk * chunk_k
    steps = chunk_k // STEP_K
    dtype: gl.constexpr = x.dtype
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, COLUMNS, STEP_K], x.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP_K], x.layout)
    more_tiles = x_tiles  # no such thing without MORE
    if MORE:
        more_tiles = gl.allocate_shared_memory(dtype, [STAGES, MORE, STEP_K], more_x.layout)
    out_tiles = x_tiles  # no such thing where sums are stored by chunk
    more_out_tiles = more_tiles
    if partials is None:
        columns: gl.constexpr = COLUMNS // 2 if SWIGLU else COLUMNS
        out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, columns], out.layout)
        if MORE:
            more_out_tiles = gl.allocate_shared_memory(
                dtype, [GROUPS, MORE, columns], more_out.layout
            )
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)  # every warpgroup has read it
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (out, more_out, partials, residual, w_tiles, x_tiles, more_tiles,
                         out_tiles, more_out_tiles, full, empty, chunk, steps, num_rows, width,
                         stride_residual, first_row, first_unit, gl.constexpr(0), ROWS, MORE,
                         GROUPS, STAGES, CHUNKS, SWIGLU, EARLY)),
            (_copy, (weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, first_row,
                     first_unit, first_k, first_k + CHUNKS * chunk_k, ROWS, MORE, STEP_K, GROUPS,
                     STAGES, SWIGLU, EARLY)),
        ], [1], [WARP_REGISTERS[1]])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (out, more_out, partials, residual, w_tiles, x_tiles, more_tiles,
                         out_tiles, more_out_tiles, full, empty, chunk, steps, num_rows, width,
                         stride_residual, first_row, first_unit, gl.constexpr(0), ROWS, MORE,
                         GROUPS, STAGES, CHUNKS, SWIGLU, EARLY)),
            (_multiply, (out, more_out, partials, residual, w_tiles, x_tiles, more_tiles,
                         out_tiles, more_out_tiles, full, empty, chunk, steps, num_rows, width,
                         stride_residual, first_row, first_unit, gl.constexpr(1), ROWS, MORE,
                         GROUPS, STAGES, CHUNKS, SWIGLU, EARLY)),
            (_copy, (weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, first_row,
                     first_unit, first_k, first_k + CHUNKS * chunk_k, ROWS, MORE, STEP_K, GROUPS,
                     STAGES, SWIGLU, EARLY)),
        ], [4, 1], WARP_REGISTERS)  # fmt: skip


def grid_of(num_rows: int, num_weights: int, num_chunks: int, own: Specialised) -> tuple[int, ...]:
    """(tiles of rows, tiles of columns, programs) of a launch; num_chunks: stored apart, or 1."""
    row_tiles = triton.cdiv(num_rows, own.rows + own.more_rows)
    column_tiles = num_weights // (COLUMNS.value * own.groups)
    return row_tiles, column_tiles, row_tiles * column_tiles * num_chunks


def registers_of(own: Specialised) -> tuple[int | None, tuple[int, int]]:
    """(most a thread of a program, None for as many as there are; those of a second warpgroup and
    of the copying warp, where the first gets the rest). Sums of 128 rows leave the copying warp the
    least there is."""
    num_warpgroups, copying = own.groups + 1, 24 if own.rows == 128 else 40
    most = REGISTERS // (own.at_once * num_warpgroups * 128) // 8 * 8
    second = min(240, (most * num_warpgroups - copying) // own.groups // 8 * 8)
    return None if own.at_once == 1 else most, (second, copying)


def shared_bytes(own: Specialised, swiglu: bool) -> int:
    """Shared memory of a program, with room for barriers and what the compiler hands over."""
    rows = own.rows + own.more_rows
    stages = own.num_stages * (COLUMNS.value * own.groups + rows) * own.step_k * 2
    results = 0 if own.split else own.groups * rows * COLUMNS.value * (1 if swiglu else 2)
    return stages + results + 512


def fits_multiprocessor(own: Specialised, swiglu: bool) -> bool:
    """Whether a multiprocessor has memory and registers for the programs that are to run there at
    once. Beside its sums of ROWS a thread has 32 registers: the assembler takes no less."""
    most, _ = registers_of(own)
    has_registers = most is None or most >= own.rows // 2 + 32
    num_bytes = own.at_once * (shared_bytes(own, swiglu) + 1024)
    return has_registers and num_bytes <= SHARED_BYTES


def begins_on_16(tensor: Tensor) -> bool:
    """Whether it begins on 16 bytes; by its place in its storage where it has no memory."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return tensor.storage_offset() * tensor.element_size() % 16 == 0
    return tensor.data_ptr() % 16 == 0


def can_describe(tensor: Tensor) -> bool:
    """Whether bulk copies may read it: rows that begin on 16 bytes."""
    return begins_on_16(tensor) and tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0


def fits(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, activation: str,
    chunk: int, own: Specialised,
) -> bool:  # fmt: skip
    """Whether a product of x [num_rows, depth], rows > 0, and a weight [n, depth], gate and up or
    plain, is the kernel's.

    Nothing to do behind the sums but SwiGLU, unless chunks stored apart leave it to the launch that
    adds them; 16-bit, whole tiles of weights, whole chunks of K that each fill the pipeline, and
    programs that all run at once: a second round of such tiles would leave most of a device idle.
    """
    num_weights, depth = weight.shape
    num_chunks = triton.cdiv(depth, chunk) if own.split else 1
    ends_here = bias is None and activation in ("none", "swiglu")
    return (
        scale is None
        and (num_chunks > 1 and activation != "swiglu" if own.split else ends_here)
        and x.dtype in TYPES
        and weight.dtype is x.dtype
        and num_weights % (COLUMNS.value * own.groups) == 0
        and depth % chunk == 0
        and chunk % own.step_k == 0
        and chunk // own.step_k >= own.num_stages
        and own.least_programs
        <= grid_of(x.shape[0], num_weights, num_chunks, own)[2]
        <= own.num_multiprocessors * own.at_once
        and can_describe(x)
        and can_describe(weight)
    )


def described(tensor: Tensor, *block: int) -> Any:
    """A tensor as bulk copies see it, by blocks."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), TYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def described_weights(weight: Tensor, swiglu: bool, step_k: int) -> Any:
    """A weight by units of 64, of SwiGLU eight of gate and eight of up in turn: see `copy_unit`."""
    num_weights, depth = weight.shape
    if not swiglu:
        return described(weight, COLUMNS.value, step_k)
    eights = weight.view(2, num_weights // 16, 8, depth).permute(1, 0, 2, 3)
    return described(eights, COLUMNS.value // 16, 2, 8, step_k)


def launch_specialised(
    x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, partials: Tensor | None,
    swiglu: bool, chunk: int, own: Specialised, early: bool,
) -> None:  # fmt: skip
    """x W^T + residual into `out` [num_rows, width], or chunks' sums [chunks, num_rows, width] into
    `partials` where given, for tensors that `fits` accepts; residual [num_rows, width] has
    contiguous rows and out is contiguous. swiglu: of the product, and width half the weights."""
    num_rows, depth = x.shape
    num_weights, num_chunks = weight.shape[0], depth // chunk
    ends = partials is None
    row_tiles, column_tiles, programs = grid_of(
        num_rows, num_weights, 1 if ends else num_chunks, own
    )
    columns = COLUMNS.value // (2 if swiglu else 1)
    most_registers, warp_registers = registers_of(own)
    _specialised_linear_kernel[(programs,)](
        described_weights(weight, swiglu, own.step_k), described(x, own.rows, own.step_k),
        described(x, own.more_rows, own.step_k) if own.more_rows else None,
        described(out, own.rows, columns) if ends else None,
        described(out, own.more_rows, columns) if ends and own.more_rows else None,
        partials, residual if ends else None, row_tiles, column_tiles, num_rows, num_weights, chunk,
        0 if residual is None else residual.stride(0), ROWS=own.rows, MORE=own.more_rows,
        STEP_K=own.step_k, GROUPS=own.groups, STAGES=own.num_stages,
        CHUNKS=num_chunks if ends else 1, SWIGLU=swiglu, WARP_REGISTERS=warp_registers, EARLY=early,
        num_warps=4, maxnreg=most_registers, launch_pdl=early,
    )  # fmt: skip
