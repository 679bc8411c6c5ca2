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

from kernels.attention_inputs import FreshRows, fresh_queries, write_fresh
from kernels.attention_scores import tanh
from kernels.configs.attention import PagedTiles, paged_tiles
from kernels.configs.layers import launches_early
from kernels.early_launch import begin as begin_step
from kernels.early_launch import prefetch
from kernels.paged_fold import _fold_kernel, fold_rows, load_state, store_rows
from kernels.reference_attention import (
    CHUNK_SIZE,
    DEFAULT_OPTIONS,
    LEAF_SIZE,
    AttentionOptions,
    PagedBatch,
)
from kernels.softmax_state import dot, finalize, matrix_columns, merge, weigh

MAX_VERIFY_LEN = 8  # queries a sequence may bring to a verify launch


class Split(IntEnum):
    """What one program of a launch reduces. Results do not depend on it."""

    SEQUENCE = 0
    CHUNK = CHUNK_SIZE
    LEAF = LEAF_SIZE


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
def _ask_for(
    k_pool, v_pool, block_table, first, context_len, stride_kp, stride_kt, stride_vp, stride_vt,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Prefetch AHEAD tiles of a head's keys and values from token `first` on: 16-bit values."""
    halves = tl.arange(0, 2 * TILE)
    dim = halves % 2 * (HEAD_DIM // 2)
    num_bytes = tl.full([2 * TILE], HEAD_DIM, tl.int32)  # half a row
    for tile in tl.static_range(AHEAD):
        at = first + tile * TILE
        if at < context_len:
            page = tl.load(block_table + at // PAGE).to(tl.int64)
            token = at % PAGE + halves // 2
            prefetch(k_pool + page * stride_kp + token * stride_kt + dim, num_bytes)
            prefetch(v_pool + page * stride_vp + token * stride_vt + dim, num_bytes)


@triton.jit
def _paged_kernel(  # noqa: C901 - options are compile-time branches
    q, k_pool, v_pool, k_pages, v_pages, block_tables, cu_seqlens_q, context_lens,
    heads, bias, cos_table, sin_table, slots, arrivals,
    out, lse, part_m, part_l, part_u,
    scale, softcap, window,
    stride_qt, stride_qh, stride_ot, stride_oh,
    stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt, stride_table,
    stride_row, stride_chunk, stride_angle, num_splits, num_row_tiles, num_rows,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FOLDED: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
    LEAF: tl.constexpr, CHUNK: tl.constexpr, ONE_SPAN: tl.constexpr, EARLY: tl.constexpr,
    FRESH: tl.constexpr, NUM_CHUNKS: tl.constexpr, HALF: tl.constexpr, LIVE: tl.constexpr,
    NEW: tl.constexpr, FOLDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv heads, sequences x row tiles). A program past the live lengths returns.

    FOLDED: scores need nothing but a positive scale, which then joins the exponent. ONE_SPAN: no
    context is longer than a chunk. FRESH: queries and the new keys and values come from `heads`,
    NEW tokens a sequence at most. FOLDS: the last program of a sequence and head folds the partials
    of its LIVE rows. AHEAD: tiles asked for before the kernel ahead has ended.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2) // num_row_tiles
    # An ordinary launch lies between whoever writes lengths and tables and this one.
    q_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    context_len = tl.load(context_lens + seq)
    if AHEAD:
        _ask_for(
            k_pool + kv_head.to(tl.int64) * stride_kh, v_pool + kv_head.to(tl.int64) * stride_vh,
            block_tables + seq.to(tl.int64) * stride_table, split * SPLIT, context_len,
            stride_kp, stride_kt, stride_vp, stride_vt, PAGE, HEAD_DIM, TILE, AHEAD,
        )  # fmt: skip
    begin_step(EARLY)
    first_row = (tl.program_id(2) % num_row_tiles) * ROWS
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
    num_live = 1
    if SPLIT != 0:
        num_live = tl.maximum(tl.cdiv(end, SPLIT) - begin // SPLIT, 1)
        has_keys = end > 0
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
        is_idle = begin >= end
        if FOLDS:  # where there are no keys at all, the first program folds nothing into zeros
            is_idle = is_idle & (has_keys | (split > 0))
        if is_idle:
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
    if FRESH:
        q_tile = fresh_queries(
            heads, bias, cos_table, sin_table, q_start, q_len, context_len, kv_head,
            stride_row, stride_chunk, stride_angle,
            GROUP, NUM_CHUNKS, HEAD_DIM, BLOCK_D, HALF, LIVE, ROWS, k_pool.dtype.element_ty,
        )  # fmt: skip
    else:
        q += first_token * stride_qt + (kv_head * GROUP).to(tl.int64) * stride_qh
        q_at = local_query * stride_qt + rows % GROUP * stride_qh
        q_tile = tl.load(q + (q_at[:, None] + dims[None, :]), row_inside, 0.0)
    block_tables += seq.to(tl.int64) * stride_table
    k_pool += kv_head.to(tl.int64) * stride_kh
    v_pool += kv_head.to(tl.int64) * stride_vh
    if FRESH:
        write_fresh(
            heads, bias, cos_table, sin_table, slots, k_pool, v_pool, q_start, q_len, context_len,
            begin, end, kv_head, tl.num_programs(1), stride_row, stride_chunk, stride_angle,
            stride_kp, stride_kt, stride_vp, stride_vt,
            GROUP, NUM_CHUNKS, HEAD_DIM, BLOCK_D, HALF, NEW, PAGE, DESCRIPTORS and EARLY,
            k_pool.dtype.element_ty,
        )  # fmt: skip
    if EARLY and DESCRIPTORS and (ONE_SPAN or SPLIT == LEAF):  # noqa: SIM102 - known when compiled
        if end > begin:
            # The last tile is mostly cut and loads alone, behind the others: ask for it now.
            _ask_for(
                k_pool, v_pool, block_tables, (end - 1) // TILE * TILE, end,
                stride_kp, stride_kt, stride_vp, stride_vt, PAGE, HEAD_DIM, TILE, 1,
            )  # fmt: skip
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
                total_m, total_l, total_u = load_state(
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
    if FOLDS:
        tl.debug_barrier()
        arrival = arrivals + seq * tl.num_programs(1) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_live - 1:
            tl.store(arrival, 0)
            part = (seq.to(tl.int64) * num_splits * tl.num_programs(1) + kv_head) * num_rows
            fold = tl.arange(0, LIVE)
            fold_live = fold // GROUP < q_len
            fold_m, fold_l, fold_u = fold_rows(
                part_m, part_l, part_u, part, tl.num_programs(1).to(tl.int64) * num_rows, fold,
                fold_live, context_len - q_len + fold // GROUP, window, LIVE, BLOCK_D, SPLIT,
                WINDOW, LEAF,
            )  # fmt: skip
            store_rows(
                out, lse, fold_m, fold_l, fold_u, q_start, kv_head, tl.num_programs(1) * GROUP,
                fold, fold_live, stride_ot, stride_oh, GROUP, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
    if SPLIT == 0:
        if not ONE_SPAN:
            part = seq.to(tl.int64) * tl.num_programs(1) + kv_head
            part = part * num_rows + first_row
            m, l, u = load_state(  # noqa: E741
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
    if not tiles.descriptors or page % tiles.tile or head_dim != matrix_columns(head_dim):
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
    q: Tensor | FreshRows,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    split: Split,
    tiles: PagedTiles,
) -> tuple[Tensor, Tensor]:
    """Run the paged kernel with a given split and tiles; results depend on neither split nor rows.

    Returns (out [num_tokens, heads, d], contiguous; float32 lse [num_tokens, heads]). Rows of
    tokens that belong to no sequence are left unwritten. Fresh rows also write the pools; all of a
    sequence's must fit one row tile. Raises ValueError on shapes that do not fit.
    """
    fresh = q if isinstance(q, FreshRows) else None
    queries = None if isinstance(q, FreshRows) else q
    if queries is not None:
        _check(queries, k_pool, v_pool, options)
    kv_heads, page, head_dim = k_pool.shape[1:]
    num_heads, num_tokens = (
        (q.num_heads, len(q.slots)) if isinstance(q, FreshRows) else (q.shape[1], q.shape[0])
    )
    group = num_heads // kv_heads
    num_seqs = batch.context_lens.numel()
    block_d = matrix_columns(head_dim)
    out = k_pool.new_empty((num_tokens, num_heads, head_dim))
    lse = k_pool.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if not out.numel():
        return out, lse
    pages = _page_descriptors(k_pool, v_pool, tiles)
    num_rows = batch.max_query_len * group
    row_tiles = triton.cdiv(num_rows, tiles.rows)
    scale = options.scale_for(head_dim)
    num_splits = triton.cdiv(max(batch.max_context_len, 1), split) if split else 1
    num_parts = num_seqs * num_splits * kv_heads * num_rows
    part_m, part_l = lse.new_empty((2, num_parts))
    part_u = lse.new_empty((num_parts, block_d))
    early = launches_early(k_pool.device)
    folds = fresh is not None and tiles.folds and split is Split.LEAF
    ahead = tiles.ahead if early and pages is not None and options.window is None else 0
    _paged_kernel[(num_splits, kv_heads, num_seqs * row_tiles)](
        queries, k_pool, v_pool, *(pages or (None, None)),
        batch.block_tables, batch.cu_seqlens_q, batch.context_lens,
        *_fresh_arguments(fresh), out, lse, part_m, part_l, part_u,
        scale, options.softcap, options.window or 0,
        *((0, 0) if queries is None else queries.stride()[:2]), out.stride(0), out.stride(1),
        *k_pool.stride()[:3], *v_pool.stride()[:3], batch.block_tables.stride(0),
        *_fresh_strides(fresh), num_splits, row_tiles, num_rows,
        GROUP=group, PAGE=page, HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=tiles.rows,
        TILE=tiles.tile, SPLIT=int(split), WINDOW=options.window is not None,
        SOFTCAP=options.softcap > 0.0, FOLDED=options.softcap == 0.0 and scale > 0.0,
        DESCRIPTORS=pages is not None, ORDERED=tiles.ordered,
        LEAF=LEAF_SIZE, CHUNK=CHUNK_SIZE, ONE_SPAN=batch.max_context_len <= CHUNK_SIZE,
        EARLY=early, FRESH=fresh is not None,
        NUM_CHUNKS=0 if fresh is None else fresh.num_chunks,
        HALF=0 if fresh is None else fresh.tables[0].shape[1],
        LIVE=triton.next_power_of_2(num_rows) if fresh else 1,
        NEW=triton.next_power_of_2(batch.max_query_len) if fresh else 1,
        FOLDS=folds, AHEAD=ahead, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        enable_fp_fusion=False, launch_pdl=early,
    )  # fmt: skip
    if split and not folds:
        row_blocks = triton.cdiv(num_rows, tiles.fold_rows)
        _fold_kernel[(kv_heads, num_seqs * row_blocks)](
            part_m, part_l, part_u, batch.cu_seqlens_q, batch.context_lens, out, lse,
            options.window or 0, out.stride(0), out.stride(1), num_splits, num_rows, row_blocks,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=tiles.fold_rows, SPLIT=int(split),
            WINDOW=options.window is not None, LEAF=LEAF_SIZE, EARLY=early,
            num_warps=tiles.fold_warps, enable_fp_fusion=False, launch_pdl=early,
        )  # fmt: skip
    return out, lse


def _fresh_arguments(fresh: FreshRows | None) -> tuple[Tensor | None, ...]:
    """heads, bias, cos, sin, slots, arrivals."""
    if fresh is None:
        return (None,) * 6
    return fresh.heads, fresh.bias, *fresh.tables, fresh.slots, fresh.arrivals


def _fresh_strides(fresh: FreshRows | None) -> tuple[int, int, int]:
    """Of rows and chunks of the projection, and of rows of the tables."""
    if fresh is None:
        return 0, 0, 0
    heads = fresh.heads
    return heads.stride(-2), heads.stride(0), fresh.tables[0].stride(0)


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
