"""What a sliding window costs: the dropped probability mass and the bound it puts on the output.

Full attention gives a row's lse; this kernel sums the probabilities of the keys a window would
drop, delta, directly (not as 1 - kept, which would cancel). Then ||o - o'|| <= 2 delta M with M
the largest value norm. A diagnostic, measured per layer; it bounds one row's output and says
nothing about task quality. Must not know how the full pass was computed.

Specification: `reference_attention.window_error_bound` (THEORY.md section 3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import attention
from kernels.attention_scores import tanh, visible_tile
from kernels.configs.attention import forward_tiles
from kernels.reference_attention import AttentionOptions
from kernels.softmax_state import dot, matrix_columns


@triton.jit(do_not_specialize=["window", "query_offset"])
def _dropped_kernel(
    q, k, lse, delta, scale, softcap, window, query_offset,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_lb, stride_lh, num_queries, num_keys, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """delta of BLOCK_M queries: the sum of e^(s - lse) over keys <= position - window."""
    head = tl.program_id(1) % num_heads
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    start = tl.program_id(0) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q += batch * stride_qb + head.to(tl.int64) * stride_qh
    k += batch * stride_kb + (head // GROUP).to(tl.int64) * stride_kh
    rows_at = batch * stride_lb + head.to(tl.int64) * stride_lh + queries
    live = queries < num_queries
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = queries.to(tl.int64)[:, None] * stride_qt + dims[None, :] * stride_qd
    q_tile = tl.load(q + q_at, inside, 0.0)
    point = tl.load(lse + rows_at, live, float("-inf")) * 1.4426950408889634
    point = tl.where(point == float("-inf"), float("inf"), point)  # no key: probabilities are 0
    dropped = tl.zeros([BLOCK_M], tl.float32)
    last = tl.maximum(start + BLOCK_M + query_offset - window, 0)
    for first in tl.range(0, tl.minimum(last, num_keys), BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        inside_k = (keys < num_keys)[None, :] & (dims < HEAD_DIM)[:, None]
        k_at = keys.to(tl.int64)[None, :] * stride_kt + dims[:, None] * stride_kd
        k_tile = tl.load(k + k_at, inside_k, 0.0)
        s = dot(q_tile, k_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), False) * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap)
        far = visible_tile(
            queries[:, None], keys[None, :], num_queries, num_keys, query_offset, 0, CAUSAL, False
        ) & (keys[None, :] <= queries[:, None] + (query_offset - window))
        p = tl.exp2(s * 1.4426950408889634 - point[:, None])
        dropped += tl.sum(tl.where(far, p, 0.0), 1)
    tl.store(delta + rows_at, dropped, live)


def window_error_bound(
    q: Tensor, k: Tensor, v: Tensor, window: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Mass that a window of `window` keys would drop from full attention, and the bound 2 delta M.

    q: [batch, heads, queries, d]; k, v: [batch, kv_heads, keys, d]; options describe the full
    attention and hold neither a window nor dropout. Returns float32 (delta, bound), both [batch,
    heads, queries]; delta is 0 for rows that see no key. Raises ValueError on such options.
    """
    if options.window is not None or options.dropout_p:
        raise ValueError("the full attention has neither window nor dropout")
    _, lse = attention(q, k, v, options)
    delta = torch.empty_like(lse)
    tiles = forward_tiles(q)
    batch, num_heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    _dropped_kernel[(triton.cdiv(num_queries, tiles.block_m), batch * num_heads)](
        q, k, lse, delta, options.scale_for(head_dim), options.softcap, window,
        options.offset_for(num_queries, num_keys), *q.stride(), *k.stride(), *lse.stride()[:2],
        num_queries, num_keys, num_heads,
        GROUP=num_heads // kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=matrix_columns(head_dim), BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, CAUSAL=options.causal, SOFTCAP=options.softcap > 0.0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    norms = v.float().norm(dim=-1).amax(dim=-1, keepdim=True)
    return delta, 2.0 * delta * norms.repeat_interleave(num_heads // kv_heads, dim=1)
