"""Attention forward in Triton: the kernel, its inputs and its launch. The op is `attention`.

O = dropout(softmax(scale q.k, capped, biased, masked)) V by blocks of keys with online-softmax
statistics: no score matrix leaves the chip. Any strides, grouped heads, causal with an explicit
query offset, sliding window, additive bias, boolean mask, softcap, dropout, packed sequences. Must
not know pages (`paged_attention`), gradients, or how tiles were chosen (`configs/attention.py`).

Specification: `reference_attention.attention`. Method: Dao et al., arXiv 2205.14135.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_scores import keep_tile, tanh, visible_tile
from kernels.attention_specialised import fits, launch_specialised
from kernels.configs.attention import Tiles, forward_tiles
from kernels.reference_attention import AttentionOptions
from kernels.softmax_state import dot, finalize, matrix_columns, weigh


@triton.jit
def _key_tile(k, k_tiles, batch, kv_head, first, num_keys, stride_t, stride_d,
              BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              CUT: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """Keys [first, first + BLOCK_N) as a [BLOCK_D, BLOCK_N] tile, 0 past the end or head_dim."""
    if DESCRIPTORS:
        tile = k_tiles.load([batch.to(tl.int32), kv_head.to(tl.int32), first, 0])
        return tile.reshape(BLOCK_N, BLOCK_D).T
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    at = k + tl.cast(first, tl.int64) * stride_t
    at += keys[None, :] * stride_t + dims[:, None] * stride_d
    if CUT or BLOCK_D != HEAD_DIM:
        return tl.load(at, (first + keys < num_keys)[None, :] & (dims < HEAD_DIM)[:, None], 0.0)
    return tl.load(at)


@triton.jit(do_not_specialize=["window", "query_offset", "seed", "threshold"])
def _forward_kernel(  # noqa: C901 - options are compile-time branches
    q, k, v, out, lse, bias, mask, cu_seqlens_q, cu_seqlens_k, k_tiles, v_tiles,
    scale, softcap, window, query_offset, seed, threshold, keep_scale,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od, stride_lb, stride_lh,
    stride_bb, stride_bh, stride_bq, stride_bk,
    stride_mb, stride_mh, stride_mq, stride_mk,
    num_queries, num_keys, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLDED: tl.constexpr,
    DROPOUT: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M queries of one head; the tiles with most keys start first.

    FOLDED: scores need nothing but a positive scale, which then joins the exponent as one FMA.
    """
    head = tl.program_id(1) % num_heads
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    kv_head = (head // GROUP).to(tl.int64)
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + batch)
        num_queries = tl.load(cu_seqlens_q + batch + 1) - first_q
        first_k = tl.load(cu_seqlens_k + batch)
        num_keys = tl.load(cu_seqlens_k + batch + 1) - first_k
        q += first_q.to(tl.int64) * stride_qt
        out += first_q.to(tl.int64) * stride_ot
        lse += first_q
        k += first_k.to(tl.int64) * stride_kt
        v += first_k.to(tl.int64) * stride_vt
    else:
        q += batch * stride_qb
        out += batch * stride_ob
        lse += batch * stride_lb
        k += batch * stride_kb
        v += batch * stride_vb
    start = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0)
    if start < 0:
        return
    start = start * BLOCK_M
    offset = num_keys - num_queries if BOTTOM_RIGHT else query_offset
    local_q = tl.arange(0, BLOCK_M)
    local_k = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    queries = start + local_q
    q += head.to(tl.int64) * stride_qh + tl.cast(start, tl.int64) * stride_qt
    q_inside = (queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + local_q[:, None] * stride_qt + dims[None, :] * stride_qd, q_inside, 0.0)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    v_local = local_k[:, None] * stride_vt + dims[None, :] * stride_vd
    if bias is not None:
        bias += (
            batch * stride_bb + head.to(tl.int64) * stride_bh + tl.cast(start, tl.int64) * stride_bq
        )
        bias_local = local_q[:, None] * stride_bq + local_k[None, :] * stride_bk
    if mask is not None:
        mask += (
            batch * stride_mb + head.to(tl.int64) * stride_mh + tl.cast(start, tl.int64) * stride_mq
        )
        mask_local = local_q[:, None] * stride_mq + local_k[None, :] * stride_mk

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

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    u = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Three runs of tiles: cut by the window, whole, cut by causality or by the end of the keys.
    for run in tl.static_range(0 if WINDOW else 1, 3):
        if run == 0:
            run_start, run_stop = low, tl.minimum(full_low, high)
        elif run == 1:
            run_start, run_stop = full_low, full_high
        else:
            run_start, run_stop = full_high, high
        last = run_start + (tl.cdiv(run_stop - run_start, BLOCK_N) - 1) * BLOCK_N
        if AHEAD:
            s_ahead = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if run_start < run_stop:
                k_tile = _key_tile(k, k_tiles, batch, kv_head, run_start, num_keys, stride_kt,
                                   stride_kd, BLOCK_N, HEAD_DIM, BLOCK_D, run != 1, DESCRIPTORS)  # fmt: skip  # noqa: E501
                s_ahead = dot(q_tile, k_tile, s_ahead, ORDERED)
        for first in tl.range(run_start, run_stop, BLOCK_N):
            keys = first + local_k
            key_first = first
            if AHEAD:  # the tensor cores take the next tile's scores while this one is weighed
                s = s_ahead
                key_first = tl.minimum(first + BLOCK_N, last)
            k_tile = _key_tile(k, k_tiles, batch, kv_head, key_first, num_keys, stride_kt,
                               stride_kd, BLOCK_N, HEAD_DIM, BLOCK_D, run != 1, DESCRIPTORS)  # fmt: skip  # noqa: E501
            if AHEAD:
                s_ahead = dot(q_tile, k_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), ORDERED)
            else:
                s = dot(q_tile, k_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), ORDERED)
            if not FOLDED:
                s = s * scale
                if SOFTCAP:
                    s = softcap * tanh(s / softcap)
                if bias is not None:
                    inside = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
                    at = bias + tl.cast(first, tl.int64) * stride_bk + bias_local
                    s += tl.load(at, inside, 0.0).to(tl.float32)
            if run != 1:
                visible = visible_tile(queries[:, None], keys[None, :], num_queries, num_keys,
                                       offset, window, CAUSAL, WINDOW)  # fmt: skip
                s = tl.where(visible, s, float("-inf"))
            if mask is not None:
                inside = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
                at = mask + tl.cast(first, tl.int64) * stride_mk + mask_local
                s = tl.where(tl.load(at, inside, 0) != 0, s, float("-inf"))
            if FOLDED:
                m, l, decay, weights = weigh(m, l, s, scale * 1.4426950408889634, 1)  # noqa: E741
            else:
                m, l, decay, weights = weigh(m, l, s * 1.4426950408889634, 1.0, 1)  # noqa: E741
            if DROPOUT:
                keep = keep_tile(seed, tl.program_id(1), queries[:, None], keys[None, :], threshold,
                                 BLOCK_M, BLOCK_N)  # fmt: skip
                weights = tl.where(keep, weights * keep_scale, 0.0)
            if DESCRIPTORS:
                v_tile = v_tiles.load([batch.to(tl.int32), kv_head.to(tl.int32), first, 0])
                v_tile = v_tile.reshape(BLOCK_N, BLOCK_D)
            elif run != 1 or BLOCK_D != HEAD_DIM:
                v_inside = (keys < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
                v_tile = tl.load(v + tl.cast(first, tl.int64) * stride_vt + v_local, v_inside, 0.0)
            else:
                v_tile = tl.load(v + tl.cast(first, tl.int64) * stride_vt + v_local)
            u = dot(weights.to(v_tile.dtype), v_tile, u * decay[:, None], ORDERED)
    result, row_lse = finalize(m, l, u, 1)
    out += head.to(tl.int64) * stride_oh + tl.cast(start, tl.int64) * stride_ot
    at = local_q[:, None] * stride_ot + dims[None, :] * stride_od
    tl.store(out + at, result.to(out.dtype.element_ty), q_inside)
    tl.store(lse + head.to(tl.int64) * stride_lh + queries, row_lse, queries < num_queries)


@dataclass(frozen=True, slots=True)
class Packing:
    """Packed sequences: int32 [num_seqs + 1] token ranges and host bounds on their lengths."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_query_len: int
    max_key_len: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call, dense [batch, heads, tokens, d] or packed [tokens, heads, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    packing: Packing | None = None

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def num_seqs(self) -> int:
        return self.q.shape[0] if self.packing is None else self.packing.cu_seqlens_q.numel() - 1

    @property
    def num_queries(self) -> int:
        return self.q.shape[2] if self.packing is None else self.packing.max_query_len

    @property
    def num_keys(self) -> int:
        return self.k.shape[2] if self.packing is None else self.packing.max_key_len

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        """(batch, head, token, dim) strides; a packed tensor has no batch stride."""
        if self.packing is None:
            return tensor.stride()
        token, head, dim = tensor.stride()
        return 0, head, token, dim

    def lse_shape(self) -> tuple[int, ...]:
        """[batch, heads, queries], or [heads, total queries] when packed."""
        return self.q.shape[:3] if self.packing is None else (self.num_heads, self.q.shape[0])

    def lse_strides(self, lse: Tensor) -> tuple[int, int]:
        """(batch, head) strides of lse; a packed one has no batch stride."""
        return (0, lse.stride(0)) if self.packing is not None else (lse.stride(0), lse.stride(1))

    def score_strides(self, tensor: Tensor | None) -> tuple[int, ...]:
        """Strides of bias or mask over [batch, heads, queries, keys], 0 where it is broadcast."""
        if tensor is None:
            return 0, 0, 0, 0
        shape = (self.num_seqs, self.num_heads, self.num_queries, self.num_keys)
        return tensor.expand(shape).stride()


def _check(inputs: Inputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    rank = 4 if inputs.packing is None else 3
    if not q.ndim == k.ndim == v.ndim == rank:
        raise ValueError(f"q, k and v must have {rank} axes, got {q.ndim}, {k.ndim}, {v.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape: {tuple(k.shape)} and {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"attention takes float32, float16 or bfloat16, got {q.dtype}")
    if q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"heads or head_dim do not fit: {tuple(q.shape)}, {tuple(k.shape)}")
    if rank == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if inputs.packing is not None and (inputs.bias is not None or inputs.mask is not None):
        raise ValueError("packed sequences take no bias and no mask")
    if inputs.mask is not None and inputs.mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True = attend), got {inputs.mask.dtype}")


def descriptor_pair(
    tensors: tuple[Tensor, Tensor], inputs: Inputs, rows: int
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Bulk-copy descriptors of two dense tensors, `rows` tokens a tile; None where not possible.

    They need a unit last stride, 16-byte aligned base and strides, and unpadded head_dim, which
    fewer than 16 columns are not. rows 0: the configuration does not ask for them.
    """
    head_dim = inputs.head_dim
    if not rows or inputs.packing is not None or head_dim != matrix_columns(head_dim):
        return None
    for tensor in tensors:
        bytes_apart = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1 or tensor.data_ptr() % 16 or any(b % 16 for b in bytes_apart):
            return None
        if not all(bytes_apart) or not tensor.numel():
            return None
    block = [1, 1, rows, head_dim]
    first, second = (TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in tensors)
    return first, second


def _is_plain(inputs: Inputs, options: AttentionOptions) -> bool:
    """Whether a call asks for nothing but causality, with keys for every query."""
    return (
        inputs.packing is None
        and inputs.bias is None
        and inputs.mask is None
        and options.window is None
        and options.softcap == 0.0
        and options.dropout_p == 0.0
        and options.scale_for(inputs.head_dim) > 0.0
        and (not options.causal or options.offset_for(inputs.num_queries, inputs.num_keys) >= 0)
    )


def launch_forward(
    inputs: Inputs, options: AttentionOptions, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. Returns (out shaped like q and contiguous, float32 lse)."""
    _check(inputs)
    q, k, v, head_dim = inputs.q, inputs.k, inputs.v, inputs.head_dim
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(inputs.lse_shape(), dtype=torch.float32)
    if not q.numel():
        return out, lse
    tiles = tiles or forward_tiles(q)
    if tiles.specialised and _is_plain(inputs, options) and fits(q, k, v):
        offset = options.offset_for(inputs.num_queries, inputs.num_keys)
        return launch_specialised(q, k, v, options.causal, offset, options.scale_for(head_dim))
    descriptors = descriptor_pair((k, v), inputs, tiles.block_n if tiles.descriptors else 0)
    scale = options.scale_for(head_dim)
    packing = inputs.packing
    grid = (triton.cdiv(inputs.num_queries, tiles.block_m), inputs.num_seqs * inputs.num_heads)
    _forward_kernel[grid](
        q, k, v, out, lse, inputs.bias, inputs.mask,
        None if packing is None else packing.cu_seqlens_q,
        None if packing is None else packing.cu_seqlens_k,
        None if descriptors is None else descriptors[0],
        None if descriptors is None else descriptors[1],
        scale, options.softcap, options.window or 0, options.query_offset or 0,
        options.dropout_seed, math.ceil(options.dropout_p * 2.0**32),
        1.0 / (1.0 - options.dropout_p),
        *inputs.strides(q), *inputs.strides(k), *inputs.strides(v), *inputs.strides(out),
        *inputs.lse_strides(lse), *inputs.score_strides(inputs.bias),
        *inputs.score_strides(inputs.mask),
        inputs.num_queries, inputs.num_keys, inputs.num_heads,
        GROUP=inputs.num_heads // inputs.num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=matrix_columns(head_dim), BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, CAUSAL=options.causal, WINDOW=options.window is not None,
        SOFTCAP=options.softcap > 0.0, BOTTOM_RIGHT=options.query_offset is None,
        FOLDED=options.softcap == 0.0 and inputs.bias is None and scale > 0.0,
        DROPOUT=options.dropout_p > 0.0, DESCRIPTORS=descriptors is not None,
        ORDERED=tiles.ordered, AHEAD=tiles.ahead,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, lse
