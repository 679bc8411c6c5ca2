"""Products of many rows with specialised warps, for narrow 16-bit weights on sm_90 (Gluon).

One warp copies tiles of weights and rows by bulk copies, many stages ahead; each of one or two
warpgroups multiplies 64 weights by 160 rows and holds nothing else. The compiler's own pipeline
has every warp copy and multiply in turn, and its lookahead ends at each chunk of K: here the next
chunk's tiles are on their way while this one's sums are added. One program a tile.

The numeric contract is that of `linear`, which chooses this kernel where the table says so and
`fits` agrees, and its own everywhere else: the interpreter does not model Gluon. Weights are the
first operand of the same family of matrix instructions, so that bits are equal. Does without bias,
activations and weights of one byte.
"""

from __future__ import annotations

from typing import Any

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.configs.layers import Specialised

# Rows of a tile, in two products: an operand's sides are powers of two.
ROWS, MORE = gl.constexpr(128), gl.constexpr(32)
COLUMNS = gl.constexpr(64)  # weights of a warpgroup
STEP_K = gl.constexpr(64)  # columns of K a stage
# Of a second warpgroup and of the copying warp; the first gets the rest.
_REGISTERS = (240, 24)
TILE_ROWS = ROWS.value + MORE.value
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def _tile_of(program, row_tiles, column_tiles):
    """(tile of rows, of columns, chunk) of a program: those of one weight run side by side."""
    rest = program // row_tiles
    return program % row_tiles, rest % column_tiles, rest // column_tiles


@gluon.jit
def _copy_weights(weight, w_tiles, full, stage, first_column, k, GROUPS: gl.constexpr):
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            weight, [first_column + group * COLUMNS, k], full.index(stage),
            w_tiles.index(stage * GROUPS + group),
        )  # fmt: skip


@gluon.jit
def copy_rows(x, more_x, x_tiles, more_tiles, full, stage, first_row, k):
    """Ask for a stage: 128 and 32 rows of STEP_K columns; `full` counts their bytes."""
    tma.async_copy_global_to_shared(x, [first_row, k], full.index(stage), x_tiles.index(stage))
    tma.async_copy_global_to_shared(
        more_x, [first_row + ROWS, k], full.index(stage), more_tiles.index(stage)
    )


@gluon.jit
def _copy(weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, first_row, first_column,
          first_k, last_k, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          EARLY: gl.constexpr):  # fmt: skip
    """The copying warp. The first weights are asked for before the kernel ahead has ended."""
    NUM_BYTES: gl.constexpr = (GROUPS * COLUMNS + ROWS + MORE) * STEP_K * 2
    for ahead in gl.static_range(STAGES):
        mbarrier.expect(full.index(ahead), NUM_BYTES)
        k = first_k + ahead * STEP_K
        _copy_weights(weight, w_tiles, full, ahead, first_column, k, GROUPS)
    if EARLY:
        gdc_wait()
    for ahead in gl.static_range(STAGES):
        k = first_k + ahead * STEP_K
        copy_rows(x, more_x, x_tiles, more_tiles, full, ahead, first_row, k)
    for step in range(STAGES, (last_k - first_k) // STEP_K):
        stage = step % STAGES
        k = first_k + step * STEP_K
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), NUM_BYTES)
        _copy_weights(weight, w_tiles, full, stage, first_column, k, GROUPS)
        copy_rows(x, more_x, x_tiles, more_tiles, full, stage, first_row, k)


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
def _put(sums, residual, place, first_row, first_column, num_rows, stride_residual):
    """sums [64, n] with their residual to `place` [n, 64] in shared memory, one rounding."""
    if residual is not None:
        rows, columns = _places(sums, first_row, first_column)
        at = residual + rows * stride_residual + columns
        sums += gl.load(at, rows < num_rows, other=0.0).to(gl.float32)
    place.permute((1, 0)).store(sums.to(place.dtype))


@gluon.jit
def _multiply(out, more_out, partials, residual, w_tiles, x_tiles, more_tiles, out_tiles,
              more_out_tiles, full, empty, chunk, steps, num_rows, width, stride_residual,
              first_row, first_column, MEMBER: gl.constexpr, GROUPS: gl.constexpr,
              STAGES: gl.constexpr, CHUNKS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """A warpgroup: its weights against the tile's rows, CHUNKS runs of `steps` stages."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16])
    nothing = gl.full([COLUMNS, ROWS], 0.0, gl.float32, layout)
    more_nothing = gl.full([COLUMNS, MORE], 0.0, gl.float32, more_layout)
    total = nothing
    more_total = more_nothing
    at = gl.to_tensor(0)
    for _ in range(CHUNKS):
        sums = nothing
        more_sums = more_nothing
        for step in range(steps):
            stage = at % STAGES
            mbarrier.wait(full.index(stage), (at // STAGES) & 1)
            weights = w_tiles.index(stage * GROUPS + MEMBER)
            sums = warpgroup_mma(weights, x_tiles.index(stage).permute((1, 0)), sums,
                                 use_acc=step != 0, is_async=True)  # fmt: skip
            more_sums = warpgroup_mma(weights, more_tiles.index(stage).permute((1, 0)), more_sums,
                                      use_acc=step != 0, is_async=True)  # fmt: skip
            sums, more_sums = warpgroup_mma_wait(2, deps=[sums, more_sums])
            # The step before is done with its stage.
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=step != 0)
            at += 1
        sums, more_sums = warpgroup_mma_wait(0, deps=[sums, more_sums])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
        if CHUNKS > 1:
            total += sums
            more_total += more_sums
        else:
            total = sums
            more_total = more_sums
    if EARLY:
        gdc_wait()  # what is written below may still be read by the kernel ahead
    if partials is not None:
        _put_chunk(total, partials, chunk, first_row, first_column, num_rows, width)
        _put_chunk(more_total, partials, chunk, first_row + ROWS, first_column, num_rows, width)
    else:
        place = out_tiles.index(MEMBER)
        more_place = more_out_tiles.index(MEMBER)
        _put(total, residual, place, first_row, first_column, num_rows, stride_residual)
        _put(more_total, residual, more_place, first_row + ROWS, first_column, num_rows,
             stride_residual)  # fmt: skip
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [first_row, first_column], place)
        tma.async_copy_shared_to_global(more_out, [first_row + ROWS, first_column], more_place)
        tma.store_wait(0)


@gluon.jit
def _specialised_linear_kernel(
    weight, x, more_x, out, more_out, partials, residual, row_tiles, column_tiles, num_rows, width,
    chunk_k, stride_residual, GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows and columns, times chunks where there are `partials`: `_tile_of`).

    A program runs CHUNKS chunks of chunk_k columns of K, whole multiples of STEP_K.
    """
    if EARLY:
        gdc_launch_dependents()
    row_tile, column_tile, chunk = _tile_of(gl.program_id(0), row_tiles, column_tiles)
    first_row = row_tile * (ROWS + MORE)
    first_column = column_tile * (GROUPS * COLUMNS)
    first_k = chunk * chunk_k
    steps = chunk_k // STEP_K
    dtype: gl.constexpr = x.dtype
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, COLUMNS, STEP_K], weight.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP_K], x.layout)
    more_tiles = gl.allocate_shared_memory(dtype, [STAGES, MORE, STEP_K], more_x.layout)
    out_tiles = x_tiles  # no such thing where sums are stored by chunk
    more_out_tiles = more_tiles
    if partials is None:
        out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, COLUMNS], out.layout)
        more_out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, MORE, COLUMNS], more_out.layout)
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
                         stride_residual, first_row, first_column,
                         gl.constexpr(0), GROUPS, STAGES, CHUNKS, EARLY)),
            (_copy, (weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, first_row,
                     first_column, first_k, first_k + CHUNKS * chunk_k, GROUPS, STAGES, EARLY)),
        ], [1], [REGISTERS[1]])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (out, more_out, partials, residual, w_tiles, x_tiles, more_tiles,
                         out_tiles, more_out_tiles, full, empty, chunk, steps, num_rows, width,
                         stride_residual, first_row, first_column,
                         gl.constexpr(0), GROUPS, STAGES, CHUNKS, EARLY)),
            (_multiply, (out, more_out, partials, residual, w_tiles, x_tiles, more_tiles,
                         out_tiles, more_out_tiles, full, empty, chunk, steps, num_rows, width,
                         stride_residual, first_row, first_column + COLUMNS,
                         gl.constexpr(1), GROUPS, STAGES, CHUNKS, EARLY)),
            (_copy, (weight, x, more_x, w_tiles, x_tiles, more_tiles, full, empty, first_row,
                     first_column, first_k, first_k + CHUNKS * chunk_k, GROUPS, STAGES, EARLY)),
        ], [4, 1], REGISTERS)  # fmt: skip


def grid_of(num_rows: int, width: int, num_chunks: int, groups: int) -> tuple[int, int, int]:
    """(tiles of rows, tiles of columns, programs) of a launch; num_chunks: stored apart, or 1."""
    row_tiles = triton.cdiv(num_rows, TILE_ROWS)
    column_tiles = width // (COLUMNS.value * groups)
    return row_tiles, column_tiles, row_tiles * column_tiles * num_chunks


def can_describe(tensor: Tensor) -> bool:
    """Whether bulk copies may read it: rows that begin on 16 bytes."""
    begins_well = tensor.device.type == "meta" or tensor.data_ptr() % 16 == 0
    return begins_well and tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0


def fits(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, activation: str,
    chunk: int, split: bool, own: Specialised,
) -> bool:  # fmt: skip
    """Whether a product of x [num_rows, depth], rows > 0, and a weight [width, depth] is the
    kernel's; split: whether chunks of K are to be stored apart.

    Nothing to do behind the sums, unless chunks stored apart leave it to the launch that adds them;
    16-bit, whole tiles of weights, whole chunks of K that each fill the pipeline, and programs that
    all run at once: a second round of such tiles would leave most of a device idle.
    """
    width, depth = weight.shape
    num_chunks = triton.cdiv(depth, chunk) if split else 1
    return (
        scale is None
        and activation != "swiglu"
        and (num_chunks > 1 if split else bias is None and activation == "none")
        and x.dtype in TYPES
        and weight.dtype is x.dtype
        and width % (COLUMNS.value * own.groups) == 0
        and depth % chunk == 0
        and chunk % STEP_K.value == 0
        and chunk // STEP_K.value >= own.num_stages
        and grid_of(x.shape[0], width, num_chunks, own.groups)[2] <= own.most_programs
        and can_describe(x)
        and can_describe(weight)
    )


def launch_specialised(
    x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, partials: Tensor | None,
    chunk: int, own: Specialised, early: bool,
) -> None:  # fmt: skip
    """x W^T + residual into `out` [num_rows, width], or chunks' sums [chunks, num_rows, width] into
    `partials` where given, for tensors that `fits` accepts; residual [num_rows, width] has
    contiguous rows and out is contiguous."""
    num_rows, depth = x.shape
    width, element = weight.shape[0], TYPES[x.dtype]
    num_chunks = depth // chunk
    row_tiles, column_tiles, programs = grid_of(
        num_rows, width, 1 if partials is None else num_chunks, own.groups
    )

    def described(tensor: Tensor, block: list[int]) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        return TensorDescriptor.from_tensor(tensor, block, layout)

    _specialised_linear_kernel[(programs,)](
        described(weight, [COLUMNS.value, STEP_K.value]), described(x, [ROWS.value, STEP_K.value]),
        described(x, [MORE.value, STEP_K.value]),
        described(out, [ROWS.value, COLUMNS.value]) if partials is None else None,
        described(out, [MORE.value, COLUMNS.value]) if partials is None else None,
        partials, residual if partials is None else None, row_tiles, column_tiles, num_rows, width,
        chunk, 0 if residual is None else residual.stride(0),
        GROUPS=own.groups, STAGES=own.num_stages, CHUNKS=num_chunks if partials is None else 1,
        REGISTERS=_REGISTERS, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
