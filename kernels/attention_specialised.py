"""Attention forward with specialised warps, for large aligned inputs on sm_90 (Gluon).

One warp copies tiles of K and V by bulk copies, two warpgroups of 64 queries each multiply and
weigh them: the scores of the next tile are computed while this tile's are weighed, and one
warpgroup's exponentials run beside the other's products, which the compiler's own pipelining
cannot arrange. Dense 16-bit inputs without bias, mask, window, softcap or dropout; everything
else takes `attention_forward`, and so does the interpreter, which does not model Gluon.

Specification: `reference_attention.attention`. Method: Shah et al., arXiv 2407.08608.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M = 128  # queries of a program, half for each warpgroup
BLOCK_N = 128  # keys of a tile
STAGES = 2  # tiles of K and of V in flight
_REGISTERS = (240, 24)  # of the second warpgroup and of the copying warp; the first gets the rest
_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def _copy(q, k, v, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
          q_row, kv_row, num_tiles, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: queries once, then tiles of K and V from the last to the first."""
    mbarrier.expect(q_full, 2 * 64 * HEAD_DIM * 2)
    tma.async_copy_global_to_shared(q, [q_row, 0], q_full, q_tiles.index(0))
    tma.async_copy_global_to_shared(q, [q_row + 64, 0], q_full, q_tiles.index(1))
    for tile in range(num_tiles):
        stage = tile % STAGES
        phase = (tile // STAGES) & 1
        row = kv_row + (num_tiles - 1 - tile) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(k, [row, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(v, [row, 0], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _weigh(s, m, l, factor):  # noqa: E741
    """One tile into (m, l): as `softmax_state.weigh`."""
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    point = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(s * factor - point[:, None])
    decay = gl.exp2(m - point)
    return m_new, l * decay + gl.sum(weights, 1), decay, weights


@gluon.jit
def _attend(out, lse, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
            first_query, out_row, num_tiles, num_cut, offset, factor, MEMBER: gl.constexpr,
            BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A warpgroup: 64 queries against all tiles. The first num_cut tiles are cut by causality."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    u_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, u_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    u_rows: gl.constexpr = gl.SliceLayout(1, u_layout)
    dtype: gl.constexpr = q_tiles.dtype
    queries = first_query + MEMBER * 64 + gl.arange(0, 64, rows)
    local_keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    q = q_tiles.index(MEMBER)
    m = gl.full([64], float("-inf"), gl.float32, rows)
    l = gl.full([64], 0.0, gl.float32, rows)  # noqa: E741
    u = gl.full([64, HEAD_DIM], 0.0, gl.float32, u_layout)
    nothing = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0))
    if num_cut > 0:
        keys = (num_tiles - 1) * BLOCK_N + local_keys
        s = gl.where(keys[None, :] <= queries[:, None] + offset, s, float("-inf"))
    m, l, decay, weights = _weigh(s, m, l, factor)  # noqa: E741
    p = gl.convert_layout(weights.to(dtype), p_layout)
    for run in gl.static_range(2):  # tiles cut by causality, then whole ones
        first_tile = 1 if run == 0 else gl.maximum(num_cut, 1)
        last_tile = num_cut if run == 0 else num_tiles
        for tile in range(first_tile, last_tile):
            stage = tile % STAGES
            before = (tile - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (tile // STAGES) & 1)
            s = warpgroup_mma(
                q, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(before), ((tile - 1) // STAGES) & 1)
            u = warpgroup_mma(p, v_tiles.index(before), u, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            if run == 0:
                keys = (num_tiles - 1 - tile) * BLOCK_N + local_keys
                s = gl.where(keys[None, :] <= queries[:, None] + offset, s, float("-inf"))
            m, l, decay, weights = _weigh(s, m, l, factor)  # noqa: E741
            # The weights are listed so that they are done first: the product runs beside them.
            u, p, weights = warpgroup_mma_wait(0, deps=[u, p, weights])
            mbarrier.arrive(v_empty.index(before))
            u = u * gl.convert_layout(decay, u_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
    last = (num_tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((num_tiles - 1) // STAGES) & 1)
    u = warpgroup_mma(p, v_tiles.index(last), u, is_async=True)
    u = warpgroup_mma_wait(0, deps=[u])
    is_empty = l == 0.0
    mass = gl.where(is_empty, 1.0, l)
    row_lse = gl.where(is_empty, float("-inf"), (m + gl.log2(mass)) * 0.6931471805599453)
    own = gl.arange(0, 64, rows)
    gl.store(lse + out_row + MEMBER * 64 + own, row_lse)
    u = u / gl.convert_layout(mass, u_rows)[:, None]
    out += (out_row + MEMBER * 64).to(gl.int64) * HEAD_DIM
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, u_layout))
    at = gl.arange(0, 64, u_rows)[:, None] * HEAD_DIM + dims[None, :]
    gl.store(out + at, u.to(dtype))


@gluon.jit
def _specialised_kernel(q, k, v, out, lse, factor, offset, num_queries, num_keys, num_heads,
                        GROUP: gl.constexpr, CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
                        BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                        REGISTERS: gl.constexpr):  # fmt: skip
    """One program owns BLOCK_M queries of one head; the tiles with most keys start first."""
    head = gl.program_id(1) % num_heads
    batch = gl.program_id(1) // num_heads
    first_query = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M
    out_row = gl.program_id(1) * num_queries + first_query
    kv_row = (batch * (num_heads // GROUP) + head // GROUP) * num_keys
    num_tiles = num_keys // BLOCK_N
    num_cut = 0
    if CAUSAL:
        num_tiles = gl.minimum(num_tiles, gl.cdiv(first_query + BLOCK_M + offset, BLOCK_N))
        num_cut = num_tiles - gl.minimum(num_tiles, (first_query + offset + 1) // BLOCK_N)
    dtype: gl.constexpr = q.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], v.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # both warpgroups have read it
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_attend, (out, lse, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full,
                       v_empty, first_query, out_row, num_tiles, num_cut, offset, factor,
                       gl.constexpr(0), BLOCK_N, HEAD_DIM, STAGES)),
            (_attend, (out, lse, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full,
                       v_empty, first_query, out_row, num_tiles, num_cut, offset, factor,
                       gl.constexpr(1), BLOCK_N, HEAD_DIM, STAGES)),
            (_copy, (q, k, v, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
                     out_row, kv_row, num_tiles, BLOCK_N, HEAD_DIM, STAGES)),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether layout, dtype and sizes are the kernel's: contiguous, whole tiles, d 64 or 128."""
    return (
        q.dtype in _TYPES
        and q.shape[-1] in (64, 128)
        and q.shape[2] > 0
        and q.shape[2] % BLOCK_M == 0
        and k.shape[2] > 0
        and k.shape[2] % BLOCK_N == 0
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (q, k, v))
    )


def launch_specialised(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the kernel on tensors that `fits` accepts: q [batch, heads, queries, d], k and v alike.

    offset >= 0 is the position of the first query, scale is positive. Returns (out like q, float32
    natural lse [batch, heads, queries]).
    """
    batch, num_heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    element = _TYPES[q.dtype]

    def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], element)
        flat = tensor.view(-1, head_dim)
        return TensorDescriptor.from_tensor(flat, [rows, head_dim], layout)

    _specialised_kernel[(num_queries // BLOCK_M, batch * num_heads)](
        descriptor(q, BLOCK_M // 2), descriptor(k, BLOCK_N), descriptor(v, BLOCK_N), out, lse,
        scale * 1.4426950408889634, offset, num_queries, num_keys, num_heads,
        GROUP=num_heads // kv_heads, CAUSAL=causal, HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=STAGES, REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out, lse
