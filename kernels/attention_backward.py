"""Attention backward in Triton: dK and dV in one kernel, dQ (and the bias gradient) in another.

P is recomputed from the saved lse with the forward's own score functions and the dropout mask is
replayed by element coordinates, so nothing of size queries x keys is stored (but for a bias
gradient). Every output element has one owner that adds in a fixed order: no atomics, the same bits
each time. A key/value head's program loops over its group of query heads. Must not know autograd
(`attention`).

Specification: `reference_attention.attention_backward`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_forward import Inputs, descriptor_pair
from kernels.attention_scores import keep_tile, tanh, visible_tile
from kernels.configs.attention import Tiles, backward_tiles
from kernels.reference_attention import AttentionOptions
from kernels.softmax_state import dot, matrix_columns

_ROW_PADDING = 128  # the largest BLOCK_M of a table: row values load without a mask


@triton.jit
def _rows_kernel(
    out, grad_out, lse, point, delta,
    stride_ob, stride_oh, stride_ot, stride_od, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_lb, stride_lh, stride_rb, stride_rh, num_queries, num_padded, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the other kernels need per row: delta = rowsum(dO * O), which is sum_k P_ik dP_ik
    without forming either, and the lse in base 2, +inf (P = 0) for rows that saw no key or pad.
    """
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    queries = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    live = queries < num_queries
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    at = batch * stride_ob + head * stride_oh + queries[:, None] * stride_ot
    o = tl.load(out + at + dims[None, :] * stride_od, inside, 0.0).to(tl.float32)
    at = batch * stride_gb + head * stride_gh + queries[:, None] * stride_gt
    g = tl.load(grad_out + at + dims[None, :] * stride_gd, inside, 0.0).to(tl.float32)
    row_lse = tl.load(lse + batch * stride_lb + head * stride_lh + queries, live, float("-inf"))
    row_point = tl.where(row_lse == float("-inf"), float("inf"), row_lse * 1.4426950408889634)
    at = batch * stride_rb + head * stride_rh + queries
    tl.store(point + at, row_point, queries < num_padded)
    tl.store(delta + at, tl.sum(o * g, 1), queries < num_padded)


@triton.jit
def _probabilities(
    products, point, queries, keys, bias_at, mask_at, num_queries, num_keys, offset, window,
    scale, softcap, stride_bq, stride_bk, stride_mq, stride_mk,
    CUT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """(P, derivative of the softcap) of a tile in either orientation; point: lse in base 2.

    queries and keys: index row and column (or column and row) that broadcast to the tile.
    """
    slope = 1.0
    inside = (queries < num_queries) & (keys < num_keys)
    if SOFTCAP or BIAS:
        s = products * scale
        if SOFTCAP:
            capped = tanh(s / softcap)
            s = softcap * capped
            slope = 1.0 - capped * capped
        if BIAS:
            at = queries.to(tl.int64) * stride_bq + keys.to(tl.int64) * stride_bk
            s += tl.load(bias_at + at, inside, 0.0).to(tl.float32)
        p = tl.exp2(s * 1.4426950408889634 - point)
    else:  # one multiply-add
        p = tl.exp2(products * (scale * 1.4426950408889634) - point)
    if CUT:
        visible = visible_tile(queries, keys, num_queries, num_keys, offset, window, CAUSAL, WINDOW)
        p = tl.where(visible, p, 0.0)
    if MASK:
        at = queries.to(tl.int64) * stride_mq + keys.to(tl.int64) * stride_mk
        p = tl.where(tl.load(mask_at + at, inside, 0) != 0, p, 0.0)
    return p, slope


@triton.jit
def _load_rows(pointer, first, count, stride_t, stride_d, LENGTH: tl.constexpr,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Tile [LENGTH, BLOCK_D] of token rows [first, first + LENGTH), 0 past count or head_dim."""
    rows = tl.arange(0, LENGTH)
    dims = tl.arange(0, BLOCK_D)
    inside = (first + rows < count)[:, None] & (dims < HEAD_DIM)[None, :]
    at = tl.cast(first, tl.int64) * stride_t + rows[:, None] * stride_t + dims[None, :] * stride_d
    return tl.load(pointer + at, inside, 0.0)


@triton.jit
def _store_rows(pointer, tile, first, count, stride_t, stride_d, LENGTH: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, LENGTH)
    dims = tl.arange(0, BLOCK_D)
    inside = (first + rows < count)[:, None] & (dims < HEAD_DIM)[None, :]
    at = tl.cast(first, tl.int64) * stride_t + rows[:, None] * stride_t + dims[None, :] * stride_d
    tl.store(pointer + at, tile.to(pointer.dtype.element_ty), inside)


@triton.jit
def _load_row_values(pointer, rows, count, padding, PACKED: tl.constexpr):
    """Per-row values: dense rows are padded to whole tiles, packed ones end inside a tile."""
    if PACKED:
        return tl.load(pointer + rows, rows < count, padding)
    return tl.load(pointer + rows)


@triton.jit(do_not_specialize=["window", "query_offset", "seed", "threshold"])
def _key_value_kernel(
    q, k, v, grad_out, point, delta, grad_k, grad_v, bias, mask, cu_seqlens_q, cu_seqlens_k,
    q_tiles, grad_tiles, point_tiles, delta_tiles,
    scale, softcap, window, query_offset, seed, threshold, keep_scale,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_rb, stride_rh,
    stride_bb, stride_bh, stride_bq, stride_bk, stride_mb, stride_mh, stride_mq, stride_mk,
    num_queries, num_keys, num_kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N keys of one kv head and walks its query heads and their tiles.

    dV = P'^T dO; dS = P (dP - delta) with dP = dO V^T; dK = scale dS^T Q.
    """
    kv_head = tl.program_id(1) % num_kv_heads
    seq = tl.program_id(1) // num_kv_heads
    batch = seq.to(tl.int64)
    if PACKED:
        first_q = tl.load(cu_seqlens_q + batch)
        num_queries = tl.load(cu_seqlens_q + batch + 1) - first_q
        first_k = tl.load(cu_seqlens_k + batch)
        num_keys = tl.load(cu_seqlens_k + batch + 1) - first_k
        q += first_q.to(tl.int64) * stride_qt
        grad_out += first_q.to(tl.int64) * stride_gt
        point += first_q
        delta += first_q
        k += first_k.to(tl.int64) * stride_kt
        v += first_k.to(tl.int64) * stride_vt
        grad_k += first_k.to(tl.int64) * stride_dkt
        grad_v += first_k.to(tl.int64) * stride_dkt
    start = tl.program_id(0) * BLOCK_N
    if start >= num_keys:
        return
    offset = num_keys - num_queries if BOTTOM_RIGHT else query_offset
    k += batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v += batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_tile = _load_rows(k, start, num_keys, stride_kt, stride_kd, BLOCK_N, HEAD_DIM, BLOCK_D)
    v_tile = _load_rows(v, start, num_keys, stride_vt, stride_vd, BLOCK_N, HEAD_DIM, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_N)
    low, high = 0, num_queries
    full_low, full_high = 0, tl.cdiv(num_queries, BLOCK_M) * BLOCK_M
    if CAUSAL:
        low = tl.maximum(start - offset, 0) // BLOCK_M * BLOCK_M
        full_low = tl.cdiv(tl.maximum(start + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
    if WINDOW:
        reach = window - offset
        high = tl.minimum(num_queries, tl.maximum(start + BLOCK_N - 1 + reach, 0))
        full_high = tl.maximum(start + reach, 0) // BLOCK_M * BLOCK_M
    full_low = tl.minimum(full_low, tl.cdiv(high, BLOCK_M) * BLOCK_M)
    full_high = tl.maximum(tl.minimum(full_high, tl.cdiv(high, BLOCK_M) * BLOCK_M), full_low)

    grad_k_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, GROUP):
        head = kv_head * GROUP + member
        head_at = tl.cast(head, tl.int64)
        q_head = q + batch * stride_qb + head_at * stride_qh
        grad_head = grad_out + batch * stride_gb + head_at * stride_gh
        point_head = point + batch * stride_rb + head_at * stride_rh
        delta_head = delta + batch * stride_rb + head_at * stride_rh
        bias_head = bias + batch * stride_bb + head_at * stride_bh if BIAS else bias
        mask_head = mask + batch * stride_mb + head_at * stride_mh if MASK else mask
        # Tiles of queries: cut by causality, whole, cut by the window.
        for run in tl.static_range(0 if CAUSAL else 1, 3 if WINDOW else 2):
            if run == 0:
                run_start, run_stop = low, tl.minimum(full_low, high)
            elif run == 1:
                run_start, run_stop = full_low, full_high
            else:
                run_start, run_stop = full_high, high
            for first in tl.range(run_start, run_stop, BLOCK_M):
                queries = first + tl.arange(0, BLOCK_M)
                if DESCRIPTORS:
                    q_tile = q_tiles.load([seq, head, first, 0]).reshape(BLOCK_M, BLOCK_D)
                    grad_tile = grad_tiles.load([seq, head, first, 0]).reshape(BLOCK_M, BLOCK_D)
                else:
                    q_tile = _load_rows(q_head, first, num_queries, stride_qt, stride_qd,
                                        BLOCK_M, HEAD_DIM, BLOCK_D)  # fmt: skip
                    grad_tile = _load_rows(grad_head, first, num_queries, stride_gt, stride_gd,
                                           BLOCK_M, HEAD_DIM, BLOCK_D)  # fmt: skip
                if DESCRIPTORS:
                    row_point = point_tiles.load([seq, head, first]).reshape(BLOCK_M)
                    row_delta = delta_tiles.load([seq, head, first]).reshape(BLOCK_M)
                else:
                    row_point = _load_row_values(
                        point_head, queries, num_queries, float("inf"), PACKED
                    )
                    row_delta = _load_row_values(delta_head, queries, num_queries, 0.0, PACKED)
                products = dot(k_tile, q_tile.T, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), ORDERED)
                p, slope = _probabilities(
                    products, row_point[None, :], queries[None, :], keys[:, None],
                    bias_head, mask_head, num_queries, num_keys, offset, window, scale, softcap,
                    stride_bq, stride_bk, stride_mq, stride_mk,
                    run != 1, CAUSAL, WINDOW, SOFTCAP, BIAS, MASK,
                )  # fmt: skip
                dropped = p
                if DROPOUT:
                    batch_head = seq * (num_kv_heads * GROUP) + head
                    keep = keep_tile(seed, batch_head, queries[None, :], keys[:, None], threshold,
                                     BLOCK_N, BLOCK_M)  # fmt: skip
                    dropped = tl.where(keep, p * keep_scale, 0.0)
                grad_v_tile = dot(dropped.to(grad_tile.dtype), grad_tile, grad_v_tile, ORDERED)
                grad_p = dot(v_tile, grad_tile.T, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), ORDERED)
                if DROPOUT:
                    grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
                grad_s = p * (grad_p - row_delta[None, :]) * slope
                grad_k_tile = dot(grad_s.to(q_tile.dtype), q_tile, grad_k_tile, ORDERED)
    at = batch * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    _store_rows(grad_k + at, grad_k_tile * scale, start, num_keys, stride_dkt, stride_dkd,
                BLOCK_N, HEAD_DIM, BLOCK_D)  # fmt: skip
    _store_rows(grad_v + at, grad_v_tile, start, num_keys, stride_dkt, stride_dkd,
                BLOCK_N, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit(do_not_specialize=["window", "query_offset", "seed", "threshold"])
def _query_kernel(
    q, k, v, grad_out, point, delta, grad_q, grad_scores, bias, mask, cu_seqlens_q, cu_seqlens_k,
    k_tiles, v_tiles,
    scale, softcap, window, query_offset, seed, threshold, keep_scale,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_rb, stride_rh,
    stride_bb, stride_bh, stride_bq, stride_bk, stride_mb, stride_mh, stride_mq, stride_mk,
    num_queries, num_keys, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M queries of one head: dQ = scale dS K over its visible keys.

    With grad_scores (contiguous [batch, heads, queries, keys], zeroed) it also stores dS, whose sum
    over broadcast axes is the bias gradient.
    """
    head = tl.program_id(1) % num_heads
    seq = tl.program_id(1) // num_heads
    batch = seq.to(tl.int64)
    kv_head = head // GROUP
    head_at = head.to(tl.int64)
    if PACKED:
        first_q = tl.load(cu_seqlens_q + batch)
        num_queries = tl.load(cu_seqlens_q + batch + 1) - first_q
        first_k = tl.load(cu_seqlens_k + batch)
        num_keys = tl.load(cu_seqlens_k + batch + 1) - first_k
        q += first_q.to(tl.int64) * stride_qt
        grad_out += first_q.to(tl.int64) * stride_gt
        grad_q += first_q.to(tl.int64) * stride_dqt
        point += first_q
        delta += first_q
        k += first_k.to(tl.int64) * stride_kt
        v += first_k.to(tl.int64) * stride_vt
    start = (tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0)) * BLOCK_M
    if start < 0:
        return
    offset = num_keys - num_queries if BOTTOM_RIGHT else query_offset
    q += batch * stride_qb + head_at * stride_qh
    grad_out += batch * stride_gb + head_at * stride_gh
    k += batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v += batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    bias_head = bias + batch * stride_bb + head_at * stride_bh if BIAS else bias
    mask_head = mask + batch * stride_mb + head_at * stride_mh if MASK else mask
    queries = start + tl.arange(0, BLOCK_M)
    q_tile = _load_rows(q, start, num_queries, stride_qt, stride_qd, BLOCK_M, HEAD_DIM, BLOCK_D)
    grad_tile = _load_rows(grad_out, start, num_queries, stride_gt, stride_gd,
                           BLOCK_M, HEAD_DIM, BLOCK_D)  # fmt: skip
    at = batch * stride_rb + head_at * stride_rh
    row_point = _load_row_values(point + at, queries, num_queries, float("inf"), PACKED)
    row_delta = _load_row_values(delta + at, queries, num_queries, 0.0, PACKED)
    low, high = 0, num_keys
    full_low, full_high = 0, num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.minimum(num_keys, tl.maximum(start + BLOCK_M + offset, 0))
        full_high = tl.minimum(full_high, tl.maximum(start + offset + 1, 0) // BLOCK_N * BLOCK_N)
    if WINDOW:
        low = tl.maximum(start + offset - window + 1, 0) // BLOCK_N * BLOCK_N
        full_low = tl.cdiv(tl.maximum(start + BLOCK_M + offset - window, 0), BLOCK_N) * BLOCK_N
        full_low = tl.minimum(full_low, tl.cdiv(high, BLOCK_N) * BLOCK_N)
    full_high = tl.maximum(full_high, full_low)

    grad_q_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for run in tl.static_range(0 if WINDOW else 1, 3):
        if run == 0:
            run_start, run_stop = low, tl.minimum(full_low, high)
        elif run == 1:
            run_start, run_stop = full_low, full_high
        else:
            run_start, run_stop = full_high, high
        for first in tl.range(run_start, run_stop, BLOCK_N):
            keys = first + tl.arange(0, BLOCK_N)
            if DESCRIPTORS:
                k_tile = k_tiles.load([seq, kv_head, first, 0]).reshape(BLOCK_N, BLOCK_D)
                v_tile = v_tiles.load([seq, kv_head, first, 0]).reshape(BLOCK_N, BLOCK_D)
            else:
                k_tile = _load_rows(k, first, num_keys, stride_kt, stride_kd,
                                    BLOCK_N, HEAD_DIM, BLOCK_D)  # fmt: skip
                v_tile = _load_rows(v, first, num_keys, stride_vt, stride_vd,
                                    BLOCK_N, HEAD_DIM, BLOCK_D)  # fmt: skip
            products = dot(q_tile, k_tile.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), ORDERED)
            p, slope = _probabilities(
                products, row_point[:, None], queries[:, None], keys[None, :],
                bias_head, mask_head, num_queries, num_keys, offset, window, scale, softcap,
                stride_bq, stride_bk, stride_mq, stride_mk,
                run != 1, CAUSAL, WINDOW, SOFTCAP, BIAS, MASK,
            )  # fmt: skip
            grad_p = dot(grad_tile, v_tile.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), ORDERED)
            if DROPOUT:
                keep = keep_tile(seed, tl.program_id(1), queries[:, None], keys[None, :], threshold,
                                 BLOCK_M, BLOCK_N)  # fmt: skip
                grad_p = tl.where(keep, grad_p * keep_scale, 0.0)
            grad_s = p * (grad_p - row_delta[:, None])
            if grad_scores is not None:
                row = (batch * num_heads + head) * num_queries + queries
                inside = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
                tl.store(grad_scores + row[:, None] * num_keys + keys[None, :], grad_s, inside)
            grad_s = grad_s * slope
            grad_q_tile = dot(grad_s.to(k_tile.dtype), k_tile, grad_q_tile, ORDERED)
    at = batch * stride_dqb + head_at * stride_dqh
    _store_rows(grad_q + at, grad_q_tile * scale, start, num_queries, stride_dqt, stride_dqd,
                BLOCK_M, HEAD_DIM, BLOCK_D)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saved:
    """What the forward leaves for the backward: its output and natural lse."""

    out: Tensor
    lse: Tensor


def launch_backward(
    grad_out: Tensor,
    inputs: Inputs,
    saved: Saved,
    options: AttentionOptions,
    bias_gradient: bool = False,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the backward kernels. Returns contiguous (dQ, dK, dV, dBias or None).

    A bias gradient costs a float32 buffer [batch, heads, queries, keys]: it is the one result of
    that size.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    contiguous = torch.contiguous_format
    grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=contiguous) for t in (q, k, v))
    grad_scores = None
    if bias_gradient:
        shape = (inputs.num_seqs, inputs.num_heads, inputs.num_queries, inputs.num_keys)
        grad_scores = q.new_zeros(shape, dtype=torch.float32)
    if q.numel() and k.numel():
        kv_tiles, q_tiles = tiles or backward_tiles(q)
        rows = _row_values(grad_out, inputs, saved)
        _launch_key_value(inputs, rows, (grad_k, grad_v), options, kv_tiles)
        _launch_query(inputs, rows, (grad_q, grad_scores), options, q_tiles)
    else:
        for grad in (grad_q, grad_k, grad_v):
            grad.zero_()
    grad_bias = None
    if grad_scores is not None and inputs.bias is not None:
        grad_bias = grad_scores.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    return grad_q, grad_k, grad_v, grad_bias


@dataclass(frozen=True, slots=True)
class _Rows:
    """Per query row: the incoming gradient, lse in base 2 (+inf: no key) and delta = dO . O.

    point and delta have the axes of lse, the last one padded to whole tiles.
    """

    grad_out: Tensor
    point: Tensor
    delta: Tensor


def _row_values(grad_out: Tensor, inputs: Inputs, saved: Saved) -> _Rows:
    num_rows = saved.lse.shape[-1]
    padded = triton.cdiv(num_rows, _ROW_PADDING) * _ROW_PADDING
    point, delta = saved.lse.new_empty((2, *saved.lse.shape[:-1], padded))
    block, num_seqs = 32, 1 if inputs.packing is not None else inputs.num_seqs
    _rows_kernel[(padded // block, num_seqs * inputs.num_heads)](
        saved.out, grad_out, saved.lse, point, delta,
        *inputs.strides(saved.out), *inputs.strides(grad_out),
        *inputs.lse_strides(saved.lse), *inputs.lse_strides(point),
        num_rows, padded, inputs.num_heads,
        HEAD_DIM=inputs.head_dim, BLOCK_D=matrix_columns(inputs.head_dim), BLOCK_M=block,
    )  # fmt: skip
    return _Rows(grad_out, point, delta)


def _scalars(inputs: Inputs, options: AttentionOptions) -> tuple[float | int, ...]:
    return (
        options.scale_for(inputs.head_dim),
        options.softcap,
        options.window or 0,
        options.query_offset or 0,
        options.dropout_seed,
        math.ceil(options.dropout_p * 2.0**32),
        1.0 / (1.0 - options.dropout_p),
    )


def _constants(inputs: Inputs, options: AttentionOptions, tiles: Tiles) -> dict[str, object]:
    return {
        "GROUP": inputs.num_heads // inputs.num_kv_heads,
        "HEAD_DIM": inputs.head_dim,
        "BLOCK_D": matrix_columns(inputs.head_dim),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "CAUSAL": options.causal,
        "WINDOW": options.window is not None,
        "SOFTCAP": options.softcap > 0.0,
        "BOTTOM_RIGHT": options.query_offset is None,
        "DROPOUT": options.dropout_p > 0.0,
        "BIAS": inputs.bias is not None,
        "MASK": inputs.mask is not None,
        "PACKED": inputs.packing is not None,
        "ORDERED": tiles.ordered,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _strides(inputs: Inputs, rows: _Rows, result: Tensor) -> tuple[int, ...]:
    tensors = (inputs.q, inputs.k, inputs.v, rows.grad_out, result)
    return (
        *(stride for tensor in tensors for stride in inputs.strides(tensor)),
        *inputs.lse_strides(rows.point),
        *inputs.score_strides(inputs.bias),
        *inputs.score_strides(inputs.mask),
    )


def _launch_key_value(
    inputs: Inputs,
    rows: _Rows,
    results: tuple[Tensor, Tensor],
    options: AttentionOptions,
    tiles: Tiles,
) -> None:
    packing = inputs.packing
    pair = descriptor_pair(
        (inputs.q, rows.grad_out), inputs, tiles.block_m if tiles.descriptors else 0
    )
    row_pair: tuple[TensorDescriptor | None, ...] = (None, None)
    if pair is not None:
        row_pair = tuple(
            TensorDescriptor(row, list(row.shape), list(row.stride()), [1, 1, tiles.block_m])
            for row in (rows.point, rows.delta)
        )
    grid = (triton.cdiv(inputs.num_keys, tiles.block_n), inputs.num_seqs * inputs.num_kv_heads)
    _key_value_kernel[grid](
        inputs.q, inputs.k, inputs.v, rows.grad_out, rows.point, rows.delta, *results,
        inputs.bias, inputs.mask,
        None if packing is None else packing.cu_seqlens_q,
        None if packing is None else packing.cu_seqlens_k,
        *(pair or (None, None)), *row_pair, *_scalars(inputs, options),
        *_strides(inputs, rows, results[0]),
        inputs.num_queries, inputs.num_keys, inputs.num_kv_heads,
        DESCRIPTORS=pair is not None, **_constants(inputs, options, tiles),
    )  # fmt: skip


def _launch_query(
    inputs: Inputs,
    rows: _Rows,
    results: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    tiles: Tiles,
) -> None:
    packing = inputs.packing
    pair = descriptor_pair((inputs.k, inputs.v), inputs, tiles.block_n if tiles.descriptors else 0)
    grid = (triton.cdiv(inputs.num_queries, tiles.block_m), inputs.num_seqs * inputs.num_heads)
    _query_kernel[grid](
        inputs.q, inputs.k, inputs.v, rows.grad_out, rows.point, rows.delta, *results,
        inputs.bias, inputs.mask,
        None if packing is None else packing.cu_seqlens_q,
        None if packing is None else packing.cu_seqlens_k,
        *(pair or (None, None)), *_scalars(inputs, options), *_strides(inputs, rows, results[0]),
        inputs.num_queries, inputs.num_keys, inputs.num_heads,
        DESCRIPTORS=pair is not None, **_constants(inputs, options, tiles),
    )  # fmt: skip
