"""Attention of new tokens over paged K/V: verify (1-8 queries a sequence), decode, and prefill.

One kernel for all of them, so that they share one numeric contract: scores are tiles of TILE keys
by packed rows (query x group of heads), every 256-token leaf starts from the empty state, leaves
fold ascending into 1024-token chunks and chunks ascending into the total. A launch may give a
program a leaf, a chunk or the whole sequence; the bits are the same, and verifying k+1 tokens gives
the bits of k+1 decodes. Few query rows leave most of a 64-row tensor-core tile idle: that costs
nothing while memory is the bound, and rows stay in their own warps. Must not know sampling, block
pools or schedules. Prefill's wrapper is `paged_prefill`.

Specification: `reference_attention.paged_attention`.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_scores import tanh
from kernels.configs.attention import PagedTiles, paged_tiles
from kernels.configs.layers import launches_early
from kernels.early_launch import begin as begin_step
from kernels.early_launch import prefetch
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
def _load_state(m_at, l_at, u_at, rows, seen, BLOCK_D: tl.constexpr):
    """The states of a vector of rows in scratch memory; empty where `seen` is False."""
    dims = tl.arange(0, BLOCK_D)
    m = tl.load(m_at + rows, seen, float("-inf"))
    l = tl.load(l_at + rows, seen, 0.0)  # noqa: E741
    u = tl.load(u_at + (rows[:, None] * BLOCK_D + dims[None, :]), seen[:, None], 0.0)
    return m, l, u


@triton.jit
def _span_state(  # noqa: C901 - options are compile-time branches
    q_tile, k_pool, v_pool, k_pages, v_pages, block_tables, kv_head,
    span, begin, end, whole_begin, whole_end, position, context_len,
    scale, softcap, window, stride_kp, stride_kt, stride_vp, stride_vt,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FOLDED: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
    LEAF: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """State of the keys of [span, span + CHUNK) inside [begin, end): leaves folded ascending."""
    dims = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, TILE)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    u = tl.zeros([ROWS, BLOCK_D], tl.float32)
    factor = scale * 1.4426950408889634 if FOLDED else 1.4426950408889634  # log2 e
    chunk_m = tl.full([ROWS], float("-inf"), tl.float32)
    chunk_l = tl.zeros([ROWS], tl.float32)
    chunk_u = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # Three runs of tiles: cut by the window, whole, cut by causality or the context's end.
    for run in tl.static_range(0 if WINDOW else 1, 3):
        if run == 0:
            run_begin, run_end = begin, tl.minimum(whole_begin, end)
        elif run == 1:
            run_begin, run_end = whole_begin, whole_end
        else:
            run_begin, run_end = whole_end, end
        run_begin = tl.maximum(run_begin, span)
        run_end = tl.minimum(run_end, span + CHUNK)
        page = 0
        if PAGE % TILE == 0 and run_begin < run_end:
            page = tl.load(block_tables + run_begin // PAGE)
        for first in tl.range(run_begin, run_end, TILE, num_stages=None if run == 1 else 1):
            if SPLIT != LEAF:  # noqa: SIM102 - one is known at compile time, the other not
                if first % LEAF == 0:
                    chunk_m, chunk_l, chunk_u = merge(chunk_m, chunk_l, chunk_u, m, l, u, 1)
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
            keys = first + tokens
            if PAGE % TILE == 0:  # one page holds the tile; its number loads a tile ahead
                this_page = page
                page = tl.load(block_tables + tl.minimum(first + TILE, end - 1) // PAGE)
            if DESCRIPTORS:
                at = [this_page, kv_head, first % PAGE, 0]
                k_tile = k_pages.load(at).reshape(TILE, BLOCK_D)
                v_tile = v_pages.load(at).reshape(TILE, BLOCK_D)
            else:
                if PAGE % TILE == 0:
                    token = tl.full([TILE], 0, tl.int64) + this_page
                else:
                    token = tl.load(block_tables + keys // PAGE, keys < context_len, 0)
                    token = token.to(tl.int64)
                inside = (keys < context_len)[:, None] & (dims < HEAD_DIM)[None, :]
                k_at = token * stride_kp + (keys % PAGE) * stride_kt
                k_tile = tl.load(k_pool + k_at[:, None] + dims[None, :], inside, 0.0)
                v_at = token * stride_vp + (keys % PAGE) * stride_vt
                v_tile = tl.load(v_pool + v_at[:, None] + dims[None, :], inside, 0.0)
            s = dot(q_tile, k_tile.T, tl.zeros([ROWS, TILE], tl.float32), ORDERED)
            if not FOLDED:
                s = s * scale
                if SOFTCAP:
                    s = softcap * tanh(s / softcap)
            if run != 1:
                visible = keys[None, :] <= position[:, None]
                if WINDOW:
                    visible &= keys[None, :] > position[:, None] - window
                s = tl.where(visible, s, float("-inf"))
                # Unwritten slots of the last page may hold anything, and 0 x NaN is NaN.
                v_tile = tl.where((keys < context_len)[:, None], v_tile, 0.0)
            m, l, decay, weights = weigh(m, l, s, factor, 1)  # noqa: E741
            # On a new leaf decay is 0, which clears u (to +0); a reset would stall the product.
            u = dot(weights.to(v_tile.dtype), v_tile, tl.fma(u, decay[:, None], 0.0), ORDERED)
    if SPLIT != LEAF:
        m, l, u = merge(chunk_m, chunk_l, chunk_u, m, l, u, 1)  # noqa: E741
    return m, l, u


@triton.jit
def _paged_kernel(
    q, k_pool, v_pool, k_pages, v_pages, block_tables, cu_seqlens_q, context_lens,
    out, lse, part_m, part_l, part_u,
    scale, softcap, window,
    stride_qt, stride_qh, stride_ot, stride_oh,
    stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt, stride_table,
    num_splits, num_row_tiles, num_rows,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FOLDED: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
    LEAF: tl.constexpr, CHUNK: tl.constexpr, ONE_SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv heads, sequences x row tiles). A program past the live lengths returns.

    FOLDED: scores need nothing but a positive scale, which then joins the exponent. ONE_SPAN: no
    context is longer than a chunk.
    """
    begin_step(EARLY)
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
    position = context_len - q_len + query
    first_position = context_len - q_len + first_row // GROUP
    last_query = tl.minimum(q_len - 1, (first_row + ROWS - 1) // GROUP)
    last_position = context_len - q_len + last_query
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    end = tl.maximum(tl.minimum(context_len, last_position + 1), 0)
    if SPLIT != 0:
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
        if begin >= end:
            return  # no row of this tile sees a key of this split: nobody reads its partial
    # Tiles that every row sees whole need no mask: between the window's edge and causality's.
    whole_begin = begin
    whole_end = tl.minimum(end, tl.maximum(first_position + 1, 0) // TILE * TILE)
    if WINDOW:
        edge = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE) * TILE
        whole_begin = tl.minimum(tl.maximum(edge, begin), tl.cdiv(end, TILE) * TILE)
    whole_end = tl.maximum(whole_end, whole_begin)
    dims = tl.arange(0, BLOCK_D)
    live = query < q_len
    row_inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    # Scalar 64-bit bases and 32-bit offsets inside the tile: vectors of pointers cost registers.
    first_token = (q_start + first_row // GROUP).to(tl.int64)
    own_rows = tl.arange(0, ROWS)
    local_query = query - first_row // GROUP
    q += first_token * stride_qt + (kv_head * GROUP).to(tl.int64) * stride_qh
    q_at = local_query * stride_qt + rows % GROUP * stride_qh
    q_tile = tl.load(q + (q_at[:, None] + dims[None, :]), row_inside, 0.0)
    block_tables += seq.to(tl.int64) * stride_table
    k_pool += kv_head.to(tl.int64) * stride_kh
    v_pool += kv_head.to(tl.int64) * stride_vh

    if EARLY and DESCRIPTORS and (ONE_SPAN or SPLIT == LEAF):  # noqa: SIM102 - known when compiled
        if end > begin:
            # The last tile is mostly cut and loads alone, behind the others: ask for it now.
            last_tile = (end - 1) // TILE * TILE
            page = tl.load(block_tables + last_tile // PAGE).to(tl.int64)
            halves = tl.arange(0, 2 * TILE)
            token, dim = last_tile % PAGE + halves // 2, halves % 2 * (HEAD_DIM // 2)
            num_bytes = tl.full([2 * TILE], HEAD_DIM, tl.int32)  # half a row of 16-bit values
            prefetch(k_pool + page * stride_kp + token * stride_kt + dim, num_bytes)
            prefetch(v_pool + page * stride_vp + token * stride_vt + dim, num_bytes)
    # A span is a chunk, or the leaf of a launch that splits by leaf.
    first_span = begin // CHUNK * CHUNK
    if SPLIT == 0 and ONE_SPAN:  # the total is the chunk: merging it with nothing is the identity
        m, l, u = _span_state(  # noqa: E741
            q_tile, k_pool, v_pool, k_pages, v_pages, block_tables, kv_head,
            first_span, begin, end, whole_begin, whole_end, position, context_len,
            scale, softcap, window, stride_kp, stride_kt, stride_vp, stride_vt,
            PAGE, HEAD_DIM, BLOCK_D, ROWS, TILE, SPLIT, WINDOW, SOFTCAP, FOLDED, DESCRIPTORS,
            ORDERED, LEAF, CHUNK,
        )  # fmt: skip
    else:
        for span in tl.range(first_span, end, CHUNK):
            chunk_m, chunk_l, chunk_u = _span_state(
                q_tile, k_pool, v_pool, k_pages, v_pages, block_tables, kv_head,
                span, begin, end, whole_begin, whole_end, position, context_len,
                scale, softcap, window, stride_kp, stride_kt, stride_vp, stride_vt,
                PAGE, HEAD_DIM, BLOCK_D, ROWS, TILE, SPLIT, WINDOW, SOFTCAP, FOLDED,
                DESCRIPTORS, ORDERED, LEAF, CHUNK,
            )  # fmt: skip
            # Scratch of this program: its partial, or the running total of the sequence's chunks.
            part = (seq.to(tl.int64) * num_splits + split) * tl.num_programs(1) + kv_head
            part = part * num_rows + first_row
            if SPLIT == 0:
                # The total would cost a third accumulator: it waits in scratch memory.
                total_m, total_l, total_u = _load_state(
                    part_m + part,
                    part_l + part,
                    part_u + part * BLOCK_D,
                    own_rows,
                    live & (span > first_span),
                    BLOCK_D,
                )
                chunk_m, chunk_l, chunk_u = merge(
                    total_m, total_l, total_u, chunk_m, chunk_l, chunk_u, 1
                )
                tl.debug_barrier()  # every thread has read before any overwrites
            tl.store(part_m + part + own_rows, chunk_m, live)
            tl.store(part_l + part + own_rows, chunk_l, live)
            part_at = own_rows[:, None] * BLOCK_D + dims[None, :]
            tl.store(part_u + part * BLOCK_D + part_at, chunk_u, live[:, None])
            if SPLIT == 0:
                tl.debug_barrier()
    if SPLIT == 0:
        if not ONE_SPAN:
            part = seq.to(tl.int64) * tl.num_programs(1) + kv_head
            part = part * num_rows + first_row
            m, l, u = _load_state(  # noqa: E741
                part_m + part,
                part_l + part,
                part_u + part * BLOCK_D,
                own_rows,
                live & (end > 0),
                BLOCK_D,
            )
        result, row_lse = finalize(m, l, u, 1)
        out += first_token * stride_ot + (kv_head * GROUP).to(tl.int64) * stride_oh
        out_at = local_query * stride_ot + rows % GROUP * stride_oh
        result = result.to(out.dtype.element_ty)
        tl.store(out + (out_at[:, None] + dims[None, :]), result, row_inside)
        num_heads = tl.num_programs(1) * GROUP
        lse += first_token * num_heads + kv_head * GROUP
        tl.store(lse + local_query * num_heads + rows % GROUP, row_lse, live)


@triton.jit
def _fold_kernel(
    part_m, part_l, part_u, cu_seqlens_q, context_lens, out, lse, window,
    stride_ot, stride_oh, num_splits, num_rows, num_row_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, LEAF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Fold the partial states of ROWS rows in the contract's order, then finalize them.

    Four states load at a time, so that their latencies overlap; four leaves are one chunk.
    """
    begin_step(EARLY)
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
    last = tl.max(tl.where(live, position, -1), 0)
    row_first = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        row_first = tl.maximum(position - window + 1, 0) // SPLIT
    part = (seq.to(tl.int64) * num_splits * tl.num_programs(0) + kv_head) * num_rows
    split_stride = tl.num_programs(0).to(tl.int64) * num_rows

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    u = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for group in tl.range(tl.min(row_first, 0) // 4, tl.cdiv(last + 1, 4 * SPLIT)):
        chunk_m = tl.full([ROWS], float("-inf"), tl.float32)
        chunk_l = tl.zeros([ROWS], tl.float32)
        chunk_u = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for member in tl.static_range(4):
            split = group * 4 + member
            # A split in which a row sees no key may not have been written for it.
            seen = live & (split * SPLIT <= position) & (split >= row_first)
            at = part + tl.cast(split, tl.int64) * split_stride
            m_b, l_b, u_b = _load_state(
                part_m + at, part_l + at, part_u + at * BLOCK_D, rows, seen, BLOCK_D
            )
            if SPLIT == LEAF:
                chunk_m, chunk_l, chunk_u = merge(chunk_m, chunk_l, chunk_u, m_b, l_b, u_b, 1)
            else:
                m, l, u = merge(m, l, u, m_b, l_b, u_b, 1)  # noqa: E741
        if SPLIT == LEAF:
            m, l, u = merge(m, l, u, chunk_m, chunk_l, chunk_u, 1)  # noqa: E741
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


def _page_descriptors(
    k_pool: Tensor, v_pool: Tensor, tiles: PagedTiles
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Bulk-copy descriptors of both pools, one tile of one head's page at a time, if possible.

    They need tiles inside pages, an unpadded head_dim and 16-byte aligned strides.
    """
    page, head_dim = k_pool.shape[2:]
    if not tiles.descriptors or page % tiles.tile or head_dim & (head_dim - 1):
        return None
    for pool in (k_pool, v_pool):
        if pool.data_ptr() % 16 or any(s * pool.element_size() % 16 for s in pool.stride()[:3]):
            return None
    block = [1, 1, tiles.tile, head_dim]
    k_pages, v_pages = (
        TensorDescriptor(pool, list(pool.shape), list(pool.stride()), block)
        for pool in (k_pool, v_pool)
    )
    return k_pages, v_pages


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
    pages = _page_descriptors(k_pool, v_pool, tiles)
    num_rows = batch.max_query_len * group
    row_tiles = triton.cdiv(num_rows, tiles.rows)
    scale = options.scale_for(head_dim)
    num_splits = triton.cdiv(max(batch.max_context_len, 1), split) if split else 1
    num_parts = num_seqs * num_splits * kv_heads * num_rows
    part_m, part_l = q.new_empty((2, num_parts), dtype=torch.float32)
    part_u = q.new_empty((num_parts, block_d), dtype=torch.float32)
    early = launches_early(q.device)
    _paged_kernel[(num_splits, kv_heads, num_seqs * row_tiles)](
        q, k_pool, v_pool, *(pages or (None, None)),
        batch.block_tables, batch.cu_seqlens_q, batch.context_lens,
        out, lse, part_m, part_l, part_u,
        scale, options.softcap, options.window or 0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *k_pool.stride()[:3], *v_pool.stride()[:3], batch.block_tables.stride(0),
        num_splits, row_tiles, num_rows,
        GROUP=group, PAGE=page, HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=tiles.rows,
        TILE=tiles.tile, SPLIT=int(split), WINDOW=options.window is not None,
        SOFTCAP=options.softcap > 0.0, FOLDED=options.softcap == 0.0 and scale > 0.0,
        DESCRIPTORS=pages is not None, ORDERED=tiles.ordered,
        LEAF=LEAF_SIZE, CHUNK=CHUNK_SIZE, ONE_SPAN=batch.max_context_len <= CHUNK_SIZE,
        EARLY=early, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        enable_fp_fusion=False, launch_pdl=early,
    )  # fmt: skip
    if split:
        fold_rows = tiles.fold_rows
        row_blocks = triton.cdiv(num_rows, fold_rows)
        _fold_kernel[(kv_heads, num_seqs * row_blocks)](
            part_m, part_l, part_u, batch.cu_seqlens_q, batch.context_lens, out, lse,
            options.window or 0, out.stride(0), out.stride(1), num_splits, num_rows, row_blocks,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=fold_rows, SPLIT=int(split),
            WINDOW=options.window is not None, LEAF=LEAF_SIZE, EARLY=early,
            num_warps=tiles.fold_warps, enable_fp_fusion=False, launch_pdl=early,
        )  # fmt: skip
    return out, lse


def choose_split(batch: PagedBatch, kv_heads: int, tiles: PagedTiles) -> Split:
    """The coarsest split that still fills the device; a matter of speed alone.

    Looks at host bounds only, so one graph bucket always takes one path. A whole sequence is for
    contexts of one chunk: longer ones gain more from balance than the fold costs.
    """
    num_chunks = triton.cdiv(batch.max_context_len, CHUNK_SIZE)
    programs = batch.context_lens.numel() * kv_heads * num_chunks
    if batch.max_context_len > LEAF_SIZE and programs < tiles.min_programs:
        return Split.LEAF
    return Split.CHUNK if num_chunks > 1 else Split.SEQUENCE


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
