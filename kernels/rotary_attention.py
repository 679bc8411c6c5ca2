"""From a layer's projection to its attention in one launch: `specmesh::rotary_attention`.

    the bits of `rope_kv` and `paged_attention` in turn, and of `linear`'s end before them

For verify and decode steps, whose launches cost more than their work: a program rotates its own
queries and stores the new keys and values of the tokens it attends to. `linear_chunks` gives the
projection as it takes it. Specification: `reference_layers.rope` and
`reference_attention.paged_attention`. Must not know models or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_inputs import FreshRows
from kernels.configs.attention import paged_tiles
from kernels.paged_attention import MAX_VERIFY_LEN, choose_split, launch
from kernels.reference_attention import AttentionOptions, PagedBatch


def fits(num_heads: int, pool: Tensor, max_query_len: int) -> bool:
    """Whether sequences of max_query_len new tokens can take this launch.

    All rows of a kv head must be one program's, since it alone stores the new keys it reads.
    """
    rows = max_query_len * (num_heads // pool.shape[1])
    return max_query_len <= MAX_VERIFY_LEN and rows <= paged_tiles(pool, prefill=False).rows


@torch.library.custom_op(
    "specmesh::rotary_attention", mutates_args=("k_pool", "v_pool", "arrivals")
)
def _rotary_op(
    heads: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, slots: Tensor, arrivals: Tensor,
    num_heads: int, k_pool: Tensor, v_pool: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor,
    block_tables: Tensor, max_query_len: int, max_context_len: int, window: int | None,
    softcap: float, scale: float | None,
) -> Tensor:  # fmt: skip
    batch = PagedBatch(cu_seqlens_q, context_lens, block_tables, max_query_len, max_context_len)
    options = AttentionOptions(causal=True, window=window, softcap=softcap, scale=scale)
    fresh = FreshRows(heads, bias, (cos, sin), slots, arrivals, num_heads)
    tiles = paged_tiles(k_pool, prefill=False)
    split = choose_split(batch, k_pool.shape[1], tiles)
    return launch(fresh, k_pool, v_pool, batch, options, split, tiles)[0]


@_rotary_op.register_fake
def _rotary_fake(_heads, _bias, _cos, _sin, slots, _arrivals, num_heads, k_pool, *_others):
    return k_pool.new_empty((len(slots), num_heads, k_pool.shape[3]))


def rotary_attention(
    fresh: FreshRows,
    pools: tuple[Tensor, Tensor],
    batch: PagedBatch,
    options: AttentionOptions,
) -> Tensor:
    """Rotate, store keys and values, attend: [num_tokens, num_heads, d] of the pools' type.

    pools: (keys, values) [pages, kv_heads, page, d], written in place at fresh.slots before they
    are read. batch: as of `paged_attention`; context_lens count the new tokens, whose positions are
    the last of their contexts. Of the options, window, softcap and scale apply. Rows of tokens that
    belong to no sequence are left unwritten. Never syncs. Raises ValueError on shapes that do not
    fit, and where `fits` says no.
    """
    keys, values = pools
    kv_heads, _, head_dim = keys.shape[1:]
    width = (fresh.num_heads + 2 * kv_heads) * head_dim
    heads, (cos, sin) = fresh.heads, fresh.tables
    if heads.shape[-2:] != (len(fresh.slots), width) or heads.stride(-1) != 1:
        raise ValueError(f"projection {tuple(heads.shape)} is not rows of {width}")
    if fresh.num_chunks and not heads.is_contiguous():
        raise ValueError("sums of chunks must be contiguous")
    if not fresh.num_chunks and heads.dtype is not keys.dtype:
        raise ValueError(f"projection is {heads.dtype}, pools are {keys.dtype}")
    if fresh.bias is not None and (fresh.bias.shape != (width,) or not fresh.num_chunks):
        raise ValueError("a bias is [n], and of a projection whose chunks are not added yet")
    if keys.shape != values.shape or keys.dtype is not values.dtype:
        raise ValueError(f"pools differ: {tuple(keys.shape)} and {tuple(values.shape)}")
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError("tables must be alike, their rows contiguous")
    if fresh.num_heads % kv_heads or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"{fresh.num_heads} heads of {head_dim} do not fit")
    if fresh.arrivals.numel() < batch.context_lens.numel() * kv_heads:
        raise ValueError(f"arrivals hold {fresh.arrivals.numel()} counters")
    if not fits(fresh.num_heads, keys, batch.max_query_len):
        raise ValueError(f"{batch.max_query_len} queries a sequence do not fit one row tile")
    result: Tensor = _rotary_op(
        heads, fresh.bias, cos, sin, fresh.slots, fresh.arrivals, fresh.num_heads, keys, values,
        batch.cu_seqlens_q, batch.context_lens, batch.block_tables, batch.max_query_len,
        batch.max_context_len, options.window, options.softcap, options.scale,
    )  # fmt: skip
    return result
