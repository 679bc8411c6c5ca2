"""Query-key norm, rotary positions and the write to the K/V pools, in one launch.

    head := rmsnorm(head) (optional);  (a, b) := (a cos - b sin, b cos + a sin);  pool[slot] := head

`specmesh::rope_kv` reads each of q, k and v once, returns the rotated queries and scatters rotated
keys and plain values into paged pools [pages, kv_heads, page_size, head_dim]. Slot
page * page_size + offset names a token's place; -1 is skipped, so that the padding of a graph
bucket touches no page. Arithmetic in float32, one rounding. Specification:
`reference_layers.rmsnorm` and `rope`. Must not know block tables or attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs.layers import RopeLaunch, launches_early, rope_launch
from kernels.early_launch import begin


@triton.jit
def _pair(base, lanes, live, stride_dim, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
          INTERLEAVED: tl.constexpr):  # fmt: skip
    """Both members of each rotating pair of BLOCK_H heads, [BLOCK_H, HALF_PAD] float32 each."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF_PAD)[None, :]
        values = tl.load(base + both * stride_dim, live & (both < 2 * HALF), other=0.0)
        values = tl.reshape(values, [values.shape[0], HALF_PAD, 2])
        first, second = tl.split(values)
    else:
        inside = live & (lanes < HALF)
        first = tl.load(base + lanes * stride_dim, inside, other=0.0)
        second = tl.load(base + (lanes + HALF) * stride_dim, inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _put_pair(base, lanes, live, first, second, stride_dim, HALF: tl.constexpr,
              HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    kind = base.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF_PAD)[None, :]
        values = tl.reshape(tl.join(first, second), [first.shape[0], 2 * HALF_PAD])
        tl.store(base + both * stride_dim, values.to(kind), live & (both < 2 * HALF))
    else:
        inside = live & (lanes < HALF)
        tl.store(base + lanes * stride_dim, first.to(kind), inside)
        tl.store(base + (lanes + HALF) * stride_dim, second.to(kind), inside)


@triton.jit
def _turn_heads(
    source, target, heads, live, cos, sin, weight, eps,
    stride_head, stride_dim, stride_target, stride_target_dim,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm (where weight is given) and rotate heads of one token: source to target."""
    kind = source.dtype.element_ty
    lanes = tl.arange(0, HALF_PAD)[None, :]
    base = source + heads * stride_head
    first, second = _pair(base, lanes, live, stride_dim, HALF, HALF_PAD, INTERLEAVED)
    rest_lanes = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    rest_live = live & (rest_lanes < HEAD_DIM)
    if HEAD_DIM > 2 * HALF:
        rest = tl.load(base + rest_lanes * stride_dim, rest_live, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
        scale = tl.div_rn(1.0, tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        inside = lanes < HALF
        at_first, at_second = lanes, lanes + HALF
        if INTERLEAVED:
            at_first, at_second = 2 * lanes, 2 * lanes + 1
        own = tl.load(weight + at_first, inside, other=0.0).to(tl.float32)
        first = (first * scale).to(kind).to(tl.float32) * own
        own = tl.load(weight + at_second, inside, other=0.0).to(tl.float32)
        second = (second * scale).to(kind).to(tl.float32) * own
        if HEAD_DIM > 2 * HALF:
            own = tl.load(weight + rest_lanes, rest_lanes < HEAD_DIM, other=0.0).to(tl.float32)
            rest = (rest * scale).to(kind).to(tl.float32) * own
    out = target + heads * stride_target
    # Which product is rounded is written out: `attention_inputs` does the same in another launch.
    turned = tl.fma(first, cos, -(second * sin))
    second = tl.fma(second, cos, first * sin)
    _put_pair(out, lanes, live, turned, second, stride_target_dim, HALF, HALF_PAD, INTERLEAVED)
    if HEAD_DIM > 2 * HALF:
        place = out + rest_lanes * stride_target_dim
        tl.store(place, rest.to(target.dtype.element_ty), rest_live)


@triton.jit
def _rope_kv_kernel(
    q, k, v, cos_table, sin_table, positions, slots, q_weight, k_weight, q_out, key_pool,
    value_pool, eps,
    stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd,
    stride_vt, stride_vh, stride_vd, stride_ot, stride_oh, stride_table,
    stride_kpage, stride_khead, stride_kslot, stride_kdim,
    stride_vpage, stride_vhead, stride_vslot, stride_vdim,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_H: tl.constexpr, Q_BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (query head blocks, then key and value head blocks; tokens)."""
    begin(EARLY)
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, HALF_PAD)[None, :]
    inside = lanes < HALF
    row = tl.load(positions + token).to(tl.int64) * stride_table
    cos = tl.load(cos_table + row + lanes, inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + row + lanes, inside, other=0.0).to(tl.float32)
    if block < Q_BLOCKS:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        _turn_heads(
            q + token * stride_qt, q_out + token * stride_ot, heads, heads < NUM_HEADS, cos, sin,
            q_weight, eps, stride_qh, stride_qd, stride_oh, 1,
            HEAD_DIM, HALF, HALF_PAD, REST_PAD, INTERLEAVED,
        )  # fmt: skip
        return
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    heads = (block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    live = heads < NUM_KV_HEADS
    _turn_heads(
        k + token * stride_kt, key_pool + page * stride_kpage + offset * stride_kslot, heads, live,
        cos, sin, k_weight, eps, stride_kh, stride_kd, stride_khead, stride_kdim,
        HEAD_DIM, HALF, HALF_PAD, REST_PAD, INTERLEAVED,
    )  # fmt: skip
    dims = tl.arange(0, DIM_PAD)[None, :]
    whole = live & (dims < HEAD_DIM)
    value = tl.load(v + token * stride_vt + heads * stride_vh + dims * stride_vd, whole)
    place = value_pool + page * stride_vpage + offset * stride_vslot
    place = place + heads * stride_vhead + dims * stride_vdim
    tl.store(place, value.to(value_pool.dtype.element_ty), whole)


def _launch_rope_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor,
    key_pool: Tensor, value_pool: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    eps: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = q.new_empty(q.shape)
    half = cos.shape[-1]
    launch: RopeLaunch = rope_launch(head_dim, q.device)
    q_blocks = triton.cdiv(num_heads, launch.heads)
    grid = (q_blocks + triton.cdiv(num_kv_heads, launch.heads), num_tokens)
    if num_tokens == 0:
        return out
    early = launches_early(q.device)
    _rope_kv_kernel[grid](
        q, k, v, cos, sin, positions, slots, q_weight, k_weight, out, key_pool, value_pool, eps,
        *q.stride(), *k.stride(), *v.stride(), *out.stride()[:2], cos.stride(0),
        *key_pool.stride(), *value_pool.stride(),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, PAGE_SIZE=key_pool.shape[2],
        HEAD_DIM=head_dim, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        DIM_PAD=triton.next_power_of_2(head_dim), BLOCK_H=launch.heads, Q_BLOCKS=q_blocks,
        INTERLEAVED=interleaved, EARLY=early, num_warps=launch.num_warps, launch_pdl=early,
    )  # fmt: skip
    return out


_rope_kv = torch.library.custom_op(
    "specmesh::rope_kv", _launch_rope_kv, mutates_args=("key_pool", "value_pool")
)


@_rope_kv.register_fake
def _rope_kv_fake(q, *_others) -> Tensor:  # mirrors _launch_rope_kv
    return q.new_empty(q.shape)


def rope_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots; returns the queries.

    q [num_tokens, num_heads, head_dim], k and v [num_tokens, kv_heads, head_dim]: any strides, so
    slices of one merged projection serve. tables: (cos, sin) float32 [max_positions, rotary / 2]
    with any scaling of the context built in, indexed by positions (int64 [num_tokens]). slots:
    int64 [num_tokens], -1 to write nothing. pools: (keys, values) [pages, kv_heads, page_size,
    head_dim], written in place. norm: (query weight, key weight, eps), both [head_dim], applied
    before the rotation. Raises ValueError when shapes do not fit.
    """
    cos, sin = tables
    keys, values = pools
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[2] or cos.stride() != sin.stride():
        raise ValueError(f"tables {tuple(cos.shape)} do not fit heads of {q.shape[2]}")
    if cos.stride(1) != 1:
        raise ValueError("rows of the tables must be contiguous")
    if keys.shape != values.shape or keys.shape[1] != k.shape[1] or k.shape != v.shape:
        raise ValueError(f"pools {tuple(keys.shape)} do not fit keys {tuple(k.shape)}")
    q_weight, k_weight, eps = (None, None, 0.0) if norm is None else norm
    return torch.ops.specmesh.rope_kv(
        q, k, v, cos, sin, positions, slots, keys, values, q_weight, k_weight, eps, interleaved
    )
