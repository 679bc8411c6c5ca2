"""Attention of new tokens over paged K/V: verify (1-8 queries a sequence), decode, and prefill.

One kernel for all of them, so that they share one numeric contract: scores are tiles of TILE keys
by packed rows (query x group of heads), every 256-token leaf starts from the empty state, leaves
fold ascending into 1024-token chunks and chunks ascending into the total. A launch may give a
program a leaf, a chunk or the whole sequence; the bits are the same, and verifying k+1 tokens gives
the bits of k+1 decodes. Tiles are transposed (keys are the long side of the tensor-core shape), so
that few query rows waste nothing and K and V feed the tensor cores from shared memory. Must not
know sampling, block pools or schedules. Prefill's wrapper is `paged_prefill`.

Specification: `reference_attention.paged_attention`.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_scores import tanh
from kernels.configs.attention import PagedTiles, paged_tiles
from kernels.reference_attention import (
    CHUNK_SIZE,
    DEFAULT_OPTIONS,
    LEAF_SIZE,
    AttentionOptions,
    PagedBatch,
)
from kernels.softmax_state import dot, finalize, merge, weigh

MAX_VERIFY_LEN = 8  # queries a sequence may bring to a verify launch


class Split(IntEnum):
    """What one program of a launch reduces. Results do not depend on it."""

    SEQUENCE = 0
    CHUNK = CHUNK_SIZE
    LEAF = LEAF_SIZE


@triton.jit
def _paged_kernel(  # noqa: C901 - options are compile-time branches
    q, k_pool, v_pool, block_tables, cu_seqlens_q, context_lens,
    out, lse, part_m, part_l, part_u,
    scale, softcap, window,
    stride_qt, stride_qh, stride_ot, stride_oh,
    stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt, stride_table,
    num_splits, num_row_tiles,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ORDERED: tl.constexpr, LEAF: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv heads, sequences x row tiles). A program past the live lengths returns."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2) // num_row_tiles
    first_row = (tl.program_id(2) % num_row_tiles) * ROWS
    q_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    context_len = tl.load(context_lens + seq)
    if first_row >= q_len * GROUP:
        return
    rows = first_row + tl.arange(0, ROWS)
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    position = context_len - q_len + query
    first_position = context_len - q_len + first_row // GROUP
    last_query = tl.minimum(q_len - 1, (first_row + ROWS - 1) // GROUP)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    end = tl.minimum(context_len, context_len - q_len + last_query + 1)
    if SPLIT != 0:
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
        if begin >= end:
            return  # no row of this tile sees a key of this split: nobody reads its partial
    dims = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, TILE)
    live = query < q_len
    q_at = (q_start + query).to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    inside = live[None, :] & (dims < HEAD_DIM)[:, None]
    q_tile = tl.load(q + q_at[None, :] + dims[:, None], inside, 0.0)
    block_tables += seq.to(tl.int64) * stride_table
    k_pool += kv_head.to(tl.int64) * stride_kh
    v_pool += kv_head.to(tl.int64) * stride_vh

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    u = tl.zeros([BLOCK_D, ROWS], tl.float32)
    chunk_m, chunk_l, chunk_u = m, l, u
    total_m, total_l, total_u = m, l, u
    for first in tl.range(begin, end, TILE):
        keys = first + tokens
        if PAGE % TILE == 0:  # one page holds the tile
            page = tl.load(block_tables + first // PAGE).to(tl.int64)
            k_at = page * stride_kp + (first % PAGE + tokens) * stride_kt
            v_at = page * stride_vp + (first % PAGE + tokens) * stride_vt
        else:
            page = tl.load(block_tables + keys // PAGE, keys < context_len, 0).to(tl.int64)
            k_at = page * stride_kp + (keys % PAGE) * stride_kt
            v_at = page * stride_vp + (keys % PAGE) * stride_vt
        # Unwritten slots of the last page may hold anything: 0 x NaN is NaN, so they load as 0.
        loadable = (keys < context_len)[:, None] & (dims < HEAD_DIM)[None, :]
        k_tile = tl.load(k_pool + k_at[:, None] + dims[None, :], loadable, 0.0)
        s = dot(k_tile, q_tile, tl.zeros([TILE, ROWS], tl.float32), ORDERED) * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap)
        s = s * 1.4426950408889634  # log2 e
        visible = keys[:, None] <= position[None, :]
        if WINDOW:
            visible &= keys[:, None] > position[None, :] - window
        s = tl.where(visible, s, float("-inf"))
        m, l, decay, weights = weigh(m, l, s, 1.0, 0)  # noqa: E741
        v_tile = tl.load(v_pool + v_at[:, None] + dims[None, :], loadable, 0.0)
        u = dot(v_tile.T, weights.to(v_tile.dtype), u * decay[None, :], ORDERED)
        if SPLIT != LEAF:  # noqa: SIM102 - one is known at compile time, the other is not
            if (first + TILE) % LEAF == 0:
                chunk_m, chunk_l, chunk_u = merge(chunk_m, chunk_l, chunk_u, m, l, u, 0)
                m = tl.full([ROWS], float("-inf"), tl.float32)
                l = tl.zeros([ROWS], tl.float32)  # noqa: E741
                u = tl.zeros([BLOCK_D, ROWS], tl.float32)
                if SPLIT == 0:  # noqa: SIM102
                    if (first + TILE) % CHUNK == 0:
                        total_m, total_l, total_u = merge(
                            total_m, total_l, total_u, chunk_m, chunk_l, chunk_u, 0
                        )
                        chunk_m, chunk_l, chunk_u = m, l, u
    if SPLIT != LEAF:
        m, l, u = merge(chunk_m, chunk_l, chunk_u, m, l, u, 0)  # noqa: E741
    if SPLIT == 0:
        m, l, u = merge(total_m, total_l, total_u, m, l, u, 0)  # noqa: E741
        result, row_lse = finalize(m, l, u, 0)
        inside = live[None, :] & (dims < HEAD_DIM)[:, None]
        out_at = (q_start + query).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
        tl.store(out + out_at[None, :] + dims[:, None], result.to(out.dtype.element_ty), inside)
        lse_at = (q_start + query).to(tl.int64) * (tl.num_programs(1) * GROUP) + head
        tl.store(lse + lse_at, row_lse, live)
    else:
        part = (tl.program_id(2) // num_row_tiles).to(tl.int64) * num_splits + split
        part = (part * tl.num_programs(1) + kv_head) * (num_row_tiles * ROWS)
        tl.store(part_m + part + rows, m)
        tl.store(part_l + part + rows, l)
        tl.store(part_u + (part + rows)[None, :] * BLOCK_D + dims[:, None], u)


@triton.jit
def _fold_kernel(
    part_m, part_l, part_u, cu_seqlens_q, context_lens, out, lse, window,
    stride_ot, stride_oh, num_splits, num_rows, num_row_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fold the partial states of ROWS rows in the contract's order, then finalize them."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1) // num_row_blocks
    first_row = (tl.program_id(1) % num_row_blocks) * ROWS
    q_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    context_len = tl.load(context_lens + seq)
    if first_row >= q_len * GROUP:
        return
    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = query < q_len
    position = context_len - q_len + query
    last = tl.minimum(tl.max(tl.where(live, position, -1), 0), context_len - 1)
    first_split = 0
    row_first = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        row_first = tl.maximum(position - window + 1, 0) // SPLIT
        first_split = tl.min(row_first, 0)
    part = (seq.to(tl.int64) * num_splits * tl.num_programs(0) + kv_head) * num_rows
    split_stride = tl.num_programs(0).to(tl.int64) * num_rows

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    u = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total_m, total_l, total_u = m, l, u
    for split in tl.range(first_split, tl.cdiv(last + 1, SPLIT)):
        # A split in which a row sees no key may not have been written for it.
        seen = live & (split * SPLIT <= position) & (split >= row_first)
        at = part + tl.cast(split, tl.int64) * split_stride + rows
        part_state_m = tl.load(part_m + at, seen, float("-inf"))
        part_state_l = tl.load(part_l + at, seen, 0.0)
        part_state_u = tl.load(part_u + at[:, None] * BLOCK_D + dims[None, :], seen[:, None], 0.0)
        m, l, u = merge(m, l, u, part_state_m, part_state_l, part_state_u, 1)  # noqa: E741
        if SPLIT == CHUNK or (split + 1) % (CHUNK // SPLIT) == 0:
            total_m, total_l, total_u = merge(total_m, total_l, total_u, m, l, u, 1)
            m = tl.full([ROWS], float("-inf"), tl.float32)
            l = tl.zeros([ROWS], tl.float32)  # noqa: E741
            u = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m, l, u = merge(total_m, total_l, total_u, m, l, u, 1)  # noqa: E741
    result, row_lse = finalize(m, l, u, 1)
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = (q_start + query).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    tl.store(out + out_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), inside)
    lse_at = (q_start + query).to(tl.int64) * (tl.num_programs(0) * GROUP) + head
    tl.store(lse + lse_at, row_lse, live)


def _check(q: Tensor, k_pool: Tensor, v_pool: Tensor, options: AttentionOptions) -> None:
    if q.ndim != 3 or k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"expected q [tokens, heads, d] and equal pools [pages, kv_heads, page, d], got "
            f"{tuple(q.shape)}, {tuple(k_pool.shape)}, {tuple(v_pool.shape)}"
        )
    if not q.dtype == k_pool.dtype == v_pool.dtype:
        raise ValueError(f"dtypes differ: {q.dtype}, {k_pool.dtype}, {v_pool.dtype}")
    if q.shape[1] % k_pool.shape[1] or q.shape[2] != k_pool.shape[3]:
        raise ValueError(f"heads or head_dim do not fit: {tuple(q.shape)}, {tuple(k_pool.shape)}")
    page = k_pool.shape[2]
    if page not in (16, 32, 64, 128):
        raise ValueError(f"page size must be 16, 32, 64 or 128, got {page}")
    if any(t.stride(-1) != 1 for t in (q, k_pool, v_pool)):
        raise ValueError("q and the pools must have unit stride along head_dim")
    if options.query_offset is not None or options.dropout_p:
        raise ValueError("paged attention takes no query_offset and no dropout")


def launch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    split: Split,
    tiles: PagedTiles,
) -> tuple[Tensor, Tensor]:
    """Run the paged kernel with a given split and tiles; results depend on neither split nor rows.

    Returns (out like q, contiguous; float32 lse [num_tokens, heads]). Rows of tokens that belong to
    no sequence are left unwritten. Raises ValueError on shapes that do not fit.
    """
    _check(q, k_pool, v_pool, options)
    num_heads, head_dim = q.shape[1:]
    kv_heads, page = k_pool.shape[1:3]
    group = num_heads // kv_heads
    num_seqs = batch.context_lens.numel()
    block_d = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel():
        return out, lse
    row_tiles = triton.cdiv(batch.max_query_len * group, tiles.rows)
    num_splits = triton.cdiv(max(batch.max_context_len, 1), split) if split else 1
    part_m = part_l = part_u = None
    if split:
        num_parts = num_seqs * num_splits * kv_heads * row_tiles * tiles.rows
        part_m, part_l = q.new_empty((2, num_parts), dtype=torch.float32)
        part_u = q.new_empty((num_parts, block_d), dtype=torch.float32)
    _paged_kernel[(num_splits, kv_heads, num_seqs * row_tiles)](
        q, k_pool, v_pool, batch.block_tables, batch.cu_seqlens_q, batch.context_lens,
        out, lse, part_m, part_l, part_u,
        options.scale_for(head_dim), options.softcap, options.window or 0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *k_pool.stride()[:3], *v_pool.stride()[:3], batch.block_tables.stride(0),
        num_splits, row_tiles,
        GROUP=group, PAGE=page, HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=tiles.rows,
        TILE=tiles.tile, SPLIT=int(split), WINDOW=options.window is not None,
        SOFTCAP=options.softcap > 0.0, ORDERED=tiles.ordered, LEAF=LEAF_SIZE, CHUNK=CHUNK_SIZE,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        fold_rows = tiles.fold_rows
        row_blocks = triton.cdiv(batch.max_query_len * group, fold_rows)
        _fold_kernel[(kv_heads, num_seqs * row_blocks)](
            part_m, part_l, part_u, batch.cu_seqlens_q, batch.context_lens, out, lse,
            options.window or 0, out.stride(0), out.stride(1), num_splits, row_tiles * tiles.rows,
            row_blocks,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=fold_rows, SPLIT=int(split),
            WINDOW=options.window is not None, CHUNK=CHUNK_SIZE,
            num_warps=tiles.fold_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse


def choose_split(batch: PagedBatch, kv_heads: int, tiles: PagedTiles) -> Split:
    """The coarsest split that still fills the device; a matter of speed alone.

    Looks at host bounds only, so one graph bucket always takes one path.
    """
    pairs = batch.context_lens.numel() * kv_heads
    for split in (Split.SEQUENCE, Split.CHUNK):
        num_splits = triton.cdiv(batch.max_context_len, split) if split else 1
        if pairs * num_splits >= tiles.min_programs or batch.max_context_len <= LEAF_SIZE:
            return split
    return Split.LEAF


@torch.library.custom_op("specmesh::paged_attention", mutates_args=())
def _paged_op(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor,
    block_tables: Tensor, max_query_len: int, max_context_len: int, window: int | None,
    softcap: float, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch = PagedBatch(cu_seqlens_q, context_lens, block_tables, max_query_len, max_context_len)
    options = AttentionOptions(causal=True, window=window, softcap=softcap, scale=scale)
    prefill = max_query_len > MAX_VERIFY_LEN
    tiles = paged_tiles(q, prefill)
    split = Split.SEQUENCE if prefill else choose_split(batch, k_pool.shape[1], tiles)
    return launch(q, k_pool, v_pool, batch, options, split, tiles)


@_paged_op.register_fake
def _paged_fake(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor,
    block_tables: Tensor, max_query_len: int, max_context_len: int, window: int | None,
    softcap: float, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Causal attention of 1-8 packed queries a sequence over paged K/V (verify and decode).

    q: [num_tokens, heads, d], any token and head strides; pools: [pages, kv_heads, page, d], page
    16-128, holding the new tokens' K/V already. Of the options, window, softcap and scale apply.
    Returns (out [num_tokens, heads, d], float32 natural lse [num_tokens, heads]). Never syncs, so
    a CUDA graph can hold it: sizes that vary at run time are read on the device. Queries at
    negative positions give 0 and -inf; tokens outside every sequence are left unwritten.
    Raises ValueError when max_query_len exceeds MAX_VERIFY_LEN or shapes do not fit.
    """
    if batch.max_query_len > MAX_VERIFY_LEN:
        raise ValueError(f"more than {MAX_VERIFY_LEN} queries a sequence: call paged_prefill")
    return call_op(q, k_pool, v_pool, batch, options)


def call_op(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: PagedBatch, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The registered op behind `paged_attention` and `paged_prefill`: one node to compile."""
    result: tuple[Tensor, Tensor] = _paged_op(
        q, k_pool, v_pool, batch.cu_seqlens_q, batch.context_lens, batch.block_tables,
        batch.max_query_len, batch.max_context_len, options.window, options.softcap, options.scale,
    )  # fmt: skip
    return result
