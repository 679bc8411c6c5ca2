"""Folding the partial states that programs of one paged launch leave: `kernels/paged_attention.py`.

Partials of leaves fold ascending into chunks of four, chunks ascending into the total: the order of
the contract, whoever folds. Either a launch of its own does, spread over rows, or the program of
the paged launch that ends a sequence and head last. Every step is elementwise, so the two agree
bit for bit. Must not know pages or queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.early_launch import begin as begin_step
from kernels.softmax_state import finalize, merge


@triton.jit
def load_state(m_at, l_at, u_at, rows, seen, BLOCK_D: tl.constexpr):
    """The states of a vector of rows in scratch memory; empty where `seen` is False.

    Past the first cache, which may hold what another program has overwritten since.
    """
    dims = tl.arange(0, BLOCK_D)
    m = tl.load(m_at + rows, seen, float("-inf"), cache_modifier=".cg")
    l = tl.load(l_at + rows, seen, 0.0, cache_modifier=".cg")  # noqa: E741
    u_at = u_at + (rows[:, None] * BLOCK_D + dims[None, :])
    u = tl.load(u_at, seen[:, None], 0.0, cache_modifier=".cg")
    return m, l, u


@triton.jit
def fold_rows(
    part_m, part_l, part_u, part, split_stride, rows, live, position, window,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    LEAF: tl.constexpr,
):  # fmt: skip
    """The total state of ROWS rows; part: the first split's states, the others split_stride apart.

    Four states load at a time, so that their latencies overlap; four leaves are one chunk.
    """
    last = tl.max(tl.where(live, position, -1), 0)
    row_first = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        row_first = tl.maximum(position - window + 1, 0) // SPLIT
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
            m_b, l_b, u_b = load_state(
                part_m + at, part_l + at, part_u + at * BLOCK_D, rows, seen, BLOCK_D
            )
            if SPLIT == LEAF:
                chunk_m, chunk_l, chunk_u = merge(chunk_m, chunk_l, chunk_u, m_b, l_b, u_b, 1)
            else:
                m, l, u = merge(m, l, u, m_b, l_b, u_b, 1)  # noqa: E741
        if SPLIT == LEAF:
            m, l, u = merge(m, l, u, chunk_m, chunk_l, chunk_u, 1)  # noqa: E741
    return m, l, u


@triton.jit
def store_rows(
    out, lse, m, mass, u, first_token, kv_head, num_heads, rows, live, stride_ot, stride_oh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Finalize packed rows (query x group) of a sequence whose first query is first_token."""
    result, row_lse = finalize(m, mass, u, 1)
    dims = tl.arange(0, BLOCK_D)
    token = (first_token + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = token * stride_ot + head.to(tl.int64) * stride_oh
    tl.store(out + out_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), inside)
    tl.store(lse + token * num_heads + head, row_lse, live)


@triton.jit
def _fold_kernel(
    part_m, part_l, part_u, cu_seqlens_q, context_lens, out, lse, window,
    stride_ot, stride_oh, num_splits, num_rows, num_row_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, LEAF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, sequences x row blocks): fold the partial states of ROWS rows."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1) // num_row_blocks
    first_row = (tl.program_id(1) % num_row_blocks) * ROWS
    q_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    context_len = tl.load(context_lens + seq)
    begin_step(EARLY)
    if first_row >= q_len * GROUP:
        return
    rows = first_row + tl.arange(0, ROWS)
    query = rows // GROUP
    live = query < q_len
    num_kv_heads = tl.num_programs(0)
    part = (seq.to(tl.int64) * num_splits * num_kv_heads + kv_head) * num_rows
    m, l, u = fold_rows(  # noqa: E741
        part_m, part_l, part_u, part, num_kv_heads.to(tl.int64) * num_rows, rows, live,
        context_len - q_len + query, window, ROWS, BLOCK_D, SPLIT, WINDOW, LEAF,
    )  # fmt: skip
    store_rows(
        out, lse, m, l, u, q_start, kv_head, num_kv_heads * GROUP, rows, live, stride_ot,
        stride_oh, GROUP, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
