"""The attention op: one node for autograd, torch.compile and CUDA graphs.

`attention` (dense) and `attention_packed` (packed sequences) register the forward and backward
kernels with torch.library, so that training, fake tensors and compilation see `specmesh::attention`
and its gradient and nothing inside them. Must not know kernels' pointers (`attention_forward`,
`attention_backward`).

Specification: `reference_attention.attention` and `attention_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention_backward import Saved, launch_backward
from kernels.attention_forward import Inputs, Packing, launch_forward
from kernels.reference_attention import DEFAULT_OPTIONS, AttentionOptions

__all__ = ["AttentionOptions", "Packing", "attention", "attention_packed"]


def _options(
    causal: bool,
    query_offset: int | None,
    window: int | None,
    numbers: list[float],
    dropout_seed: int,
) -> AttentionOptions:
    softcap, scale, dropout_p = numbers
    return AttentionOptions(causal, query_offset, window, softcap, scale, dropout_p, dropout_seed)


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_lens: list[int],
) -> Inputs:  # fmt: skip
    packing = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packing = Packing(cu_seqlens_q, cu_seqlens_k, *max_lens)
    return Inputs(q, k, v, bias, mask, packing)


@torch.library.custom_op("specmesh::attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_lens: list[int], causal: bool,
    query_offset: int | None, window: int | None, numbers: list[float], dropout_seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = _inputs(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, max_lens)
    return launch_forward(inputs, _options(causal, query_offset, window, numbers, dropout_seed))


@_attention_op.register_fake
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_lens: list[int], causal: bool,
    query_offset: int | None, window: int | None, numbers: list[float], dropout_seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = _inputs(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, max_lens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(inputs.lse_shape(), dtype=torch.float32)


@torch.library.custom_op("specmesh::attention_backward", mutates_args=())
def _backward_op(
    grad_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_lens: list[int], causal: bool,
    query_offset: int | None, window: int | None, numbers: list[float], dropout_seed: int,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = _inputs(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, max_lens)
    options = _options(causal, query_offset, window, numbers, dropout_seed)
    saved = Saved(out, lse)
    grad_q, grad_k, grad_v, grad_bias = launch_backward(
        grad_out, inputs, saved, options, bias_gradient
    )
    return grad_q, grad_k, grad_v, q.new_empty(0) if grad_bias is None else grad_bias


@_backward_op.register_fake
def _backward_fake(
    grad_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_lens: list[int], causal: bool,
    query_offset: int | None, window: int | None, numbers: list[float], dropout_seed: int,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(t, memory_format=contiguous) for t in (q, k, v)]
    grad_bias = q.new_empty(0)
    if bias is not None and bias_gradient:
        grad_bias = torch.empty_like(bias, memory_format=contiguous)
    return grads[0], grads[1], grads[2], grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rest = inputs[:7], inputs[7:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    bias_gradient = ctx.needs_input_grad[3]
    *grads, grad_bias = _backward_op(grad_out, out, lse, *tensors, *ctx.rest, bias_gradient)
    rest = [None] * (len(tensors) - 4 + len(ctx.rest))
    return (*grads, grad_bias if bias_gradient else None, *rest)


_attention_op.register_autograd(_differentiate, setup_context=_save)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O = dropout(softmax(S)) V without forming S; differentiable in q, k, v and bias.

    q: [batch, heads, queries, d]; k, v: [batch, kv_heads, keys, d]; float32, float16 or bfloat16,
    d up to 256, any strides. bias (added) and mask (bool, True = attend) broadcast to [batch,
    heads, queries, keys]; no gradient flows through lse. Returns (out, contiguous; float32 natural
    lse [batch, heads, queries]). Rows without visible keys give 0 and -inf. Raises ValueError on
    shapes or dtypes that do not fit.
    """
    return _call(Inputs(q, k, v, bias, mask), options)


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences: q [queries, heads, d], k and v [keys, kv_heads, d].

    Sequence i owns the token ranges `packing` gives it; lengths stay on the device. Options as in
    `attention`, aligned per sequence. Returns (out like q, float32 lse [heads, total queries]).
    """
    return _call(Inputs(q, k, v, packing=packing), options)


def _call(inputs: Inputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    packing = inputs.packing
    ranges = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    max_lens = [] if packing is None else [packing.max_query_len, packing.max_key_len]
    numbers = [options.softcap, options.scale_for(inputs.head_dim), options.dropout_p]
    result: tuple[Tensor, Tensor] = _attention_op(
        inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, *ranges, max_lens, options.causal,
        options.query_offset, options.window, numbers, options.dropout_seed,
    )  # fmt: skip
    return result
