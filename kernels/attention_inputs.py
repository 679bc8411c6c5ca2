"""What a paged launch does before it attends, where the projection comes to it as it is.

    q := rotate(round(sum of chunks + bias));  pool[slot] := the same of k, and of v unrotated

One launch less than rotating first, two less where the projection left its chunks' sums. Every
value is computed by the arithmetic of `linear`'s end and of `rope_kv`, elementwise, so the bits are
theirs. Rotation is of the half-split kind, without norms of heads. Must not know leaves or scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FreshRows:
    """New tokens as their projection leaves them, [num_tokens, (num_heads + 2 kv_heads) * d].

    heads: finished [num_tokens, n] of the pools' type, or chunks' sums [chunks, num_tokens, n],
    contiguous, to be added ascending and then to bias [n]. tables: (cos, sin) float32 [positions,
    rotary / 2], rows contiguous. slots: int [num_tokens]; a token's place in its pools is
    page * page_size + offset, its page that of its sequence's table; -1 writes nothing. arrivals:
    int32, zeros, >= sequences x kv heads; left zero by a launch, one launch at a time.
    """

    heads: Tensor
    bias: Tensor | None
    tables: tuple[Tensor, Tensor]
    slots: Tensor
    arrivals: Tensor
    num_heads: int

    @property
    def num_chunks(self) -> int:
        """Sums to add; 0 where the projection is finished."""
        return self.heads.shape[0] if self.heads.ndim == 3 else 0


@triton.jit
def _columns(
    heads, bias, row_at, columns, live, stride_chunk, NUM_CHUNKS: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """Values of the projection, float32, rounded to `kind` as a finished one is."""
    if NUM_CHUNKS == 0:
        total = tl.load(heads + row_at + columns, live, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(live.shape, tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            at = heads + chunk * stride_chunk + row_at + columns
            total += tl.load(at, live, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + columns, live, other=0.0).to(tl.float32)
        total = total.to(kind).to(tl.float32)
    return total


@triton.jit
def _rotated(
    heads, bias, cos_table, sin_table, row_at, first_column, position, live,
    stride_chunk, stride_table,
    NUM_CHUNKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    """Heads [rows, BLOCK_D] of `kind`: row_at, first_column, position [rows, 1]; live [rows, 1]."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = live & (dims < HEAD_DIM)
    turned = inside & (dims < 2 * HALF)
    is_first = dims < HALF
    partner = tl.where(is_first, dims + HALF, dims - HALF)
    own = _columns(heads, bias, row_at, first_column + dims, inside, stride_chunk, NUM_CHUNKS, kind)
    other = _columns(
        heads, bias, row_at, first_column + partner, turned, stride_chunk, NUM_CHUNKS, kind
    )
    angle = position.to(tl.int64) * stride_table + tl.where(is_first, dims, dims - HALF)
    cos = tl.load(cos_table + angle, turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_table + angle, turned, other=0.0).to(tl.float32)
    across = other * sin
    result = tl.fma(own, cos, tl.where(is_first, -across, across))
    return tl.where(dims < 2 * HALF, result, own).to(kind)


@triton.jit
def fresh_queries(
    heads, bias, cos_table, sin_table, q_start, q_len, context_len, kv_head,
    stride_row, stride_chunk, stride_table,
    GROUP: tl.constexpr, NUM_CHUNKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Rotated query rows [ROWS, BLOCK_D] of a sequence and kv head: the first LIVE, then zeros."""
    rows = tl.arange(0, LIVE)[:, None]
    query = rows // GROUP
    row_at = (q_start + query).to(tl.int64) * stride_row
    column = (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    position = tl.maximum(context_len - q_len + query, 0)
    q = _rotated(
        heads, bias, cos_table, sin_table, row_at, column, position, query < q_len,
        stride_chunk, stride_table, NUM_CHUNKS, HEAD_DIM, BLOCK_D, HALF, kind,
    )  # fmt: skip
    if LIVE < ROWS:
        copies = tl.arange(0, ROWS // LIVE)[:, None, None]
        q = tl.broadcast_to(q[None, :, :], [ROWS // LIVE, LIVE, BLOCK_D])
        q = tl.reshape(tl.where(copies == 0, q, 0.0), [ROWS, BLOCK_D])
    return q


@triton.jit
def write_fresh(
    heads, bias, cos_table, sin_table, slots, k_pool, v_pool, q_start, q_len, context_len, begin,
    end, kv_head, num_kv_heads, stride_row, stride_chunk, stride_table,
    stride_kp, stride_kt, stride_vp, stride_vt,
    GROUP: tl.constexpr, NUM_CHUNKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, NEW: tl.constexpr, PAGE: tl.constexpr, BULK: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    """Store keys and values of the new tokens at positions [begin, end), in their slots (-1: none).

    The pools point at this head. Ends with a barrier: the program may read what it has stored, on
    sm_90 also by bulk copies (BULK), which no ordinary fence orders behind ordinary stores.
    """
    new = tl.arange(0, NEW)[:, None]
    position = context_len - q_len + new
    own = (new < q_len) & (position >= begin) & (position < end)
    slot = tl.load(slots + q_start + new, own, other=-1).to(tl.int64)
    put = own & (slot >= 0)
    page, offset = slot // PAGE, slot % PAGE
    row_at = (q_start + new).to(tl.int64) * stride_row
    key_column = (num_kv_heads * GROUP + kv_head) * HEAD_DIM
    value_column = key_column + num_kv_heads * HEAD_DIM
    keys = _rotated(
        heads, bias, cos_table, sin_table, row_at, key_column, tl.maximum(position, 0), put,
        stride_chunk, stride_table, NUM_CHUNKS, HEAD_DIM, BLOCK_D, HALF, kind,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = put & (dims < HEAD_DIM)
    values = _columns(
        heads, bias, row_at, value_column + dims, inside, stride_chunk, NUM_CHUNKS, kind
    )
    tl.store(k_pool + page * stride_kp + offset * stride_kt + dims, keys, inside)
    tl.store(v_pool + page * stride_vp + offset * stride_vt + dims, values.to(kind), inside)
    if BULK:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r,r", [tl.arange(0, 128)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()
