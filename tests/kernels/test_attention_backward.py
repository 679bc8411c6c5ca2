"""Attention backward: gradients against float64 formulas and autograd, replayed dropout, the op."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import reference_attention as reference
from kernels.attention import AttentionOptions, Packing, attention, attention_packed
from kernels.attention_backward import Saved, launch_backward
from kernels.attention_forward import Inputs, launch_forward
from kernels.configs.attention import Tiles
from tests.kernels.accuracy import assert_as_accurate

OPTIONS = {
    "full": AttentionOptions(),
    "causal": AttentionOptions(causal=True),
    "offset": AttentionOptions(causal=True, query_offset=5),
    "window": AttentionOptions(causal=True, window=9),
    "wide window": AttentionOptions(causal=True, window=50),
    "window without causality": AttentionOptions(window=20),
    "softcap": AttentionOptions(causal=True, softcap=1.5),
    "negative scale": AttentionOptions(causal=True, scale=-0.1),
    "dropout": AttentionOptions(causal=True, dropout_p=0.3, dropout_seed=7),
}


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int = 64, batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q = randn(1, batch, heads, queries, dim, dtype=dtype)
    k = randn(2, batch, kv_heads, keys, dim, dtype=dtype)
    return q, k, randn(3, batch, kv_heads, keys, dim, dtype=dtype)


def gradients(
    device: str, tensors: list[Tensor], grad_out: Tensor, options: AttentionOptions,
    mask: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v (and bias, if there is a fourth tensor) through the op."""
    leaves = [t.detach().clone().to(device).requires_grad_() for t in tensors]
    bias = leaves[3] if len(leaves) > 3 else None
    out, _ = attention(leaves[0], leaves[1], leaves[2], options, bias,
                       None if mask is None else mask.to(device))  # fmt: skip
    return list(torch.autograd.grad(out, leaves, grad_out.to(device)))


def check(device: str, tensors: list[Tensor], options: AttentionOptions,
          mask: Tensor | None = None) -> list[Tensor]:  # fmt: skip
    grad_out = randn(9, *tensors[0].shape, dtype=tensors[0].dtype)
    ours = gradients(device, tensors, grad_out, options, mask)

    def specified(dtype: torch.dtype) -> list[Tensor]:
        q, k, v, *bias = (t.to(dtype) for t in tensors)
        result = reference.attention_backward(
            grad_out.to(dtype), q, k, v, options, bias[0] if bias else None, mask
        )
        return [t for t in (result.q, result.k, result.v, result.bias) if t is not None]

    plain, exact = specified(tensors[0].dtype), specified(torch.float64)
    for got, rounded, truth in zip(ours, plain, exact, strict=True):
        assert_as_accurate(got, rounded, truth)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_as_accurate_as_plain_torch(
    device: str, name: str, dtype: torch.dtype
) -> None:
    """dQ, dK and dV match float64 within twice plain PyTorch's error; odd sizes, grouped heads."""
    check(device, list(qkv(2, 1, 45, 71, dtype=dtype)), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_the_formulas_are_the_derivative(name: str) -> None:
    """The specification's backward equals autograd through its own forward in float64."""
    leaves = [t.double().requires_grad_() for t in qkv(4, 2, 7, 11, dim=8)]
    bias = randn(4, 4, 7, 11).double().requires_grad_()
    mask = randn(5, 1, 1, 7, 11) > -1
    out, _ = reference.attention(*leaves, OPTIONS[name], bias, mask)
    grad_out = randn(6, *out.shape).double()
    automatic = torch.autograd.grad(out, (*leaves, bias), grad_out)
    q, k, v = (leaf.detach() for leaf in leaves)
    formulas = reference.attention_backward(grad_out, q, k, v, OPTIONS[name], bias.detach(), mask)
    for got, expected in zip(
        (formulas.q, formulas.k, formulas.v, formulas.bias), automatic, strict=True
    ):
        assert got is not None
        torch.testing.assert_close(got, expected)


def test_gradcheck(device: str) -> None:
    """torch.autograd.gradcheck agrees with finite differences, a fully masked row included."""
    leaves = [
        t.double().to(device).requires_grad_()
        for t in (*qkv(2, 1, 3, 4, dim=16), randn(4, 2, 3, 4))
    ]
    mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    mask[1] = False

    def call(*tensors: Tensor) -> Tensor:
        q, k, v, bias = (t.float() for t in tensors)
        return attention(q, k, v, AttentionOptions(softcap=2.0), bias, mask)[0].double()

    # float32 differences are coarse: a large step, fast mode (a random direction), wide tolerance.
    assert torch.autograd.gradcheck(call, leaves, eps=1e-2, atol=2e-3, rtol=2e-2, fast_mode=True)


def test_bias_gradient_sums_over_broadcast_axes(device: str) -> None:
    """The gradient of a bias broadcast over batch and heads is the sum, with mask and softcap."""
    mask = randn(5, 2, 1, 37, 50) > -0.5
    tensors = [*qkv(2, 1, 37, 50, batch=2), randn(4, 1, 1, 37, 50)]
    *_, grad_bias = check(device, tensors, AttentionOptions(causal=True, softcap=2.0), mask)
    assert grad_bias.shape == (1, 1, 37, 50)
    hidden = ~reference.visible_keys(37, 50, AttentionOptions(causal=True))
    assert not bool(grad_bias.cpu()[0, 0][hidden].any())


def test_fully_masked_rows_have_zero_gradients(device: str) -> None:
    """A row without keys gives dQ = 0 and adds nothing to dK and dV: P is 0, not exp of NaN."""
    tensors = list(qkv(2, 2, 20, 40))
    mask = torch.ones(20, 40, dtype=torch.bool)
    mask[4] = False
    grad_q, grad_k, grad_v = check(device, tensors, AttentionOptions(), mask)
    assert not bool(grad_q[..., 4, :].any())
    tensors[0][..., 4, :] = 1e4  # the masked query may be anything
    other = gradients(device, tensors, randn(9, 1, 2, 20, 64), AttentionOptions(), mask)
    assert torch.equal(other[1], grad_k)
    assert torch.equal(other[2], grad_v)


def test_more_queries_than_keys(device: str) -> None:
    """Leading rows that see nothing (Tq > Tk) are handled by every run of tiles."""
    check(device, list(qkv(2, 1, 70, 37)), AttentionOptions(causal=True))


@pytest.mark.parametrize("dim", [96, 128])
def test_head_dims(device: str, dim: int) -> None:
    """A padded head dim and a wide one are as accurate as plain PyTorch."""
    check(device, list(qkv(2, 1, 33, 40, dim=dim)), AttentionOptions(causal=True))


def test_strided_inputs_and_gradients(device: str) -> None:
    """Views of a fused QKV buffer and a transposed output gradient give the contiguous bits."""
    heads, tokens, dim = 2, 37, 64
    fused = randn(10, tokens, 3 * heads * dim).to(device)
    views = [
        part.unflatten(-1, (heads, dim)).transpose(0, 1)[None]
        for part in fused.split(heads * dim, dim=-1)
    ]
    grad_out = randn(11, 1, tokens, heads, dim).to(device).transpose(1, 2)
    options = AttentionOptions(causal=True)

    def run(tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
        inputs = Inputs(*tensors)
        saved = Saved(*launch_forward(inputs, options))
        return [t for t in launch_backward(grad, inputs, saved, options) if t is not None]

    expected = run([t.contiguous() for t in views], grad_out.contiguous())
    for got, same in zip(run(views, grad_out), expected, strict=True):
        assert torch.equal(got, same)


def test_dropout_is_replayed_by_coordinates_under_any_tiles(device: str) -> None:
    """The forward's mask, read off with one-hot values, is the specified one under two tilings, and
    the backward's tilings reproduce it: gradients under other tiles agree within rounding.
    """
    queries, keys = 20, 64
    options = AttentionOptions(dropout_p=0.4, dropout_seed=123456789012)
    q = torch.zeros(1, 2, queries, 64, device=device)
    one_hot = torch.eye(keys, device=device).expand(1, 2, keys, keys)
    for tiles in (Tiles(16, 16), Tiles(32, 64)):
        out, _ = launch_forward(Inputs(q, one_hot * 0, one_hot), options, tiles)
        for head in range(2):
            expected = reference.dropout_keep(options.dropout_seed, 0.4, head, queries, keys)
            assert torch.equal(out[0, head].cpu() > 0, expected)
    kept = float((out > 0).float().mean())
    assert abs(kept - 0.6) < 5 * math.sqrt(0.24 / out.numel())
    tensors = [t.to(device) for t in qkv(2, 2, queries, keys)]
    inputs, grad_out = Inputs(*tensors), randn(12, 1, 2, queries, 64).to(device)
    saved = Saved(*launch_forward(inputs, options))
    first, second = (
        launch_backward(grad_out, inputs, saved, options, False, (tiles, tiles))
        for tiles in (Tiles(16, 32), Tiles(32, 16))
    )
    for a, b in zip(first[:3], second[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_streams_differ_by_head_seed_and_high_seed_bits(device: str) -> None:
    """Another head, seed or upper half of the seed gives another mask; no mask is reused."""
    masks = [
        reference.dropout_keep(seed, 0.5, head, 16, 64)
        for seed, head in ((1, 0), (1, 1), (2, 0), (1 + 2**33, 0))
    ]
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            assert 0.4 < float((mask == other).float().mean()) < 0.6


def test_repeated_backwards_are_bitwise_equal(device: str) -> None:
    """No atomics: two backward passes give equal bits, and a batch member does not see the rest."""
    tensors = list(qkv(2, 1, 35, 40, batch=2))
    grad_out = randn(9, *tensors[0].shape)
    options = AttentionOptions(causal=True)
    first = gradients(device, tensors, grad_out, options)
    second = gradients(device, tensors, grad_out, options)
    alone = gradients(device, [t[1:] for t in tensors], grad_out[1:], options)
    for a, b, c in zip(first, second, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:], c)


def test_packed_gradients_equal_dense_ones(device: str) -> None:
    """Each packed sequence gets its own dense gradients bit for bit; NaN next door stays there."""
    query_lens, key_lens = [5, 33, 3], [9, 40, 3]
    q = randn(13, sum(query_lens), 4, 64)
    k, v = (randn(seed, sum(key_lens), 2, 64) for seed in (14, 15))
    grad_out = randn(16, *q.shape)
    for tensor, lens in ((q, query_lens), (k, key_lens), (v, key_lens), (grad_out, query_lens)):
        tensor[sum(lens[:2]) :] = math.nan
    ranges = [
        torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device)
        for lens in (query_lens, key_lens)
    ]
    options = AttentionOptions(causal=True)
    leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
    out, _ = attention_packed(*leaves, Packing(*ranges, 33, 40), options)
    packed = torch.autograd.grad(out, leaves, grad_out.to(device))
    start_q = start_k = 0
    for num_queries, num_keys in zip(query_lens[:2], key_lens[:2], strict=True):
        own_q = slice(start_q, start_q + num_queries)
        own_k = slice(start_k, start_k + num_keys)
        ranges_of = (own_q, own_k, own_k)
        dense = [t[own].transpose(0, 1)[None] for t, own in zip((q, k, v), ranges_of, strict=True)]
        expected = gradients(device, dense, grad_out[own_q].transpose(0, 1)[None], options)
        for got, own, same in zip(packed, ranges_of, expected, strict=True):
            assert torch.equal(got[own].transpose(0, 1)[None], same)
        start_q, start_k = start_q + num_queries, start_k + num_keys


def test_the_op_is_registered_for_compile_and_autograd(device: str) -> None:
    """torch.library.opcheck passes (schema, fake tensors, autograd), so compile sees one node."""
    q, k, v = (t.to(device).requires_grad_() for t in qkv(2, 1, 8, 12))
    bias = randn(4, 2, 8, 12).to(device).requires_grad_()
    arguments = (q, k, v, bias, None, None, None, [], True, None, None, [0.0, 0.125, 0.0], 0)
    torch.library.opcheck(
        torch.ops.specmesh.attention.default, arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip
    exported = torch.export.export(_Module(), (q.detach(), k.detach(), v.detach()))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets.count("specmesh.attention.default") == 1


class _Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, AttentionOptions(causal=True))[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 is wrong in the interpreter")
@pytest.mark.parametrize("name", OPTIONS)
def test_bfloat16_is_as_accurate_as_plain_torch(device: str, name: str) -> None:
    """bfloat16 storage: twice plain PyTorch's error at most, over every option and head dim 128."""
    check(device, list(qkv(4, 2, 300, 421, dim=128, dtype=torch.bfloat16)), OPTIONS[name])
