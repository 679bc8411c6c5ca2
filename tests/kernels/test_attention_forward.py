"""Attention forward: accuracy over every option, and the traps that stay finite when wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import reference_attention as reference
from kernels.attention import AttentionOptions, Packing, attention, attention_packed
from kernels.attention_forward import Inputs, launch_forward
from kernels.attention_specialised import fits
from kernels.configs.attention import Tiles, forward_tiles
from tests.kernels.accuracy import assert_as_accurate

CAUSAL = AttentionOptions(causal=True)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int = 64, batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q = randn(1, batch, heads, queries, dim, dtype=dtype)
    k = randn(2, batch, kv_heads, keys, dim, dtype=dtype)
    return q, k, randn(3, batch, kv_heads, keys, dim, dtype=dtype)


def exact(
    tensors: tuple[Tensor, ...], options: AttentionOptions, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v, *bias = (t.double() for t in tensors)
    return reference.attention(q, k, v, options, bias[0] if bias else None, mask)


def check(device: str, tensors: tuple[Tensor, ...], options: AttentionOptions,
          mask: Tensor | None = None) -> Tensor:  # fmt: skip
    """Compare with float64, allowing twice plain PyTorch's error. Returns the output on the CPU."""
    moved = [t.to(device) for t in tensors]
    bias = moved[3] if len(moved) > 3 else None
    out, lse = attention(
        moved[0], moved[1], moved[2], options, bias, None if mask is None else mask.to(device)
    )
    plain_bias = tensors[3] if len(tensors) > 3 else None
    plain = reference.attention(tensors[0], tensors[1], tensors[2], options, plain_bias, mask)
    truth = exact(tensors, options, mask)
    assert_as_accurate(out, plain[0], truth[0])
    torch.testing.assert_close(lse.cpu().double(), truth[1], rtol=1e-5, atol=2e-5)
    return out.cpu()


OPTIONS = {
    "full": AttentionOptions(),
    "causal": CAUSAL,
    "offset": AttentionOptions(causal=True, query_offset=5),
    "window": AttentionOptions(causal=True, window=9),
    "wide window": AttentionOptions(causal=True, window=50),
    "window without causality": AttentionOptions(window=20),
    "softcap": AttentionOptions(causal=True, softcap=1.5),
    "negative scale": AttentionOptions(causal=True, scale=-0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_as_accurate_as_plain_torch(
    device: str, name: str, dtype: torch.dtype
) -> None:
    """Output and lse match float64 within twice plain PyTorch's error; odd sizes, grouped heads."""
    check(device, qkv(4, 2, 45, 71, dtype=dtype), OPTIONS[name])


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_head_dims(device: str, dim: int) -> None:
    """Head dims 64 to 256, the padded 96 included, are as accurate as plain PyTorch."""
    check(device, qkv(2, 1, 33, 40, dim=dim), CAUSAL)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (31, 33), (64, 32), (70, 3)])
def test_sizes_around_a_tile(device: str, queries: int, keys: int) -> None:
    """Sizes below, at and above tile edges, and more queries than keys, are right."""
    check(device, qkv(2, 2, queries, keys, batch=2), CAUSAL)


def test_bias_and_mask_together(device: str) -> None:
    """A broadcast bias, a boolean mask, causality and a softcap act in the stated order."""
    tensors = (*qkv(4, 2, 37, 50, batch=2), randn(4, 1, 4, 37, 50))
    mask = randn(5, 2, 1, 37, 50) > -0.5
    check(device, tensors, AttentionOptions(causal=True, softcap=2.0), mask)


def test_mask_true_means_attend(device: str) -> None:
    """A boolean mask equals the bias where(mask, 0, -inf); one flipped bit moves one row only."""
    q, k, v = (t.to(device) for t in qkv(2, 2, 20, 40))
    mask = (randn(6, 20, 40) > 0).to(device)
    out, _ = attention(q, k, v, mask=mask)
    bias = torch.where(mask, 0.0, -math.inf)
    torch.testing.assert_close(attention(q, k, v, bias=bias)[0], out)
    flipped = mask.clone()
    flipped[7, 3] = ~flipped[7, 3]
    changed = (attention(q, k, v, mask=flipped)[0] != out).any(dim=-1)
    assert changed[..., 7].all()
    assert changed.sum() == 2  # one row in each of two heads


def test_rows_that_see_no_key_are_zero(device: str) -> None:
    """A row of False gives output 0 and lse -inf, not the mean of V and not NaN; others stand."""
    q, k, v = (t.to(device) for t in qkv(2, 2, 20, 40))
    mask = torch.ones(20, 40, dtype=torch.bool, device=device)
    mask[4], mask[5, :32] = False, False  # row 5 sees nothing in its first tile
    out, lse = attention(q, k, v, mask=mask)
    assert torch.equal(out[..., 4, :], torch.zeros_like(out[..., 4, :]))
    assert bool((lse[..., 4] == -math.inf).all())
    truth, _ = reference.attention(q.cpu().double(), k.cpu().double(), v.cpu().double(),
                                   mask=mask.cpu())  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), truth, rtol=1e-5, atol=1e-5)


def test_more_queries_than_keys_leave_leading_rows_empty(device: str) -> None:
    """Bottom-right alignment with 5 queries and 2 keys: rows 0 to 2 see nothing and are 0."""
    q, k, v = (t.to(device) for t in qkv(1, 1, 5, 2))
    out, lse = attention(q, k, v, CAUSAL)
    assert not bool(out[0, 0, :3].any())
    assert bool((lse[0, 0, :3] == -math.inf).all())
    assert torch.allclose(out[0, 0, 3], v[0, 0, 0])


def test_alignment_is_bottom_right(device: str) -> None:
    """3 queries over 5 keys equal the last 3 rows of 5 over 5; a top-left mask would not."""
    q, k, v = (t.to(device) for t in qkv(2, 2, 5, 5))
    whole, _ = attention(q, k, v, CAUSAL)
    last, _ = attention(q[:, :, 2:], k, v, CAUSAL)
    torch.testing.assert_close(last, whole[:, :, 2:])
    top_left, _ = attention(q[:, :, 2:], k, v, AttentionOptions(causal=True, query_offset=0))
    assert not torch.allclose(top_left, last)


def test_query_heads_map_to_kv_heads_by_division(device: str) -> None:
    """With constant values per kv head, query head h returns the value of kv head h // group."""
    q, k, v = qkv(6, 3, 4, 9)
    v[:] = torch.arange(3.0)[None, :, None, None]
    out, _ = attention(q.to(device), k.to(device), v.to(device))
    expected = torch.arange(6) // 2
    torch.testing.assert_close(out[0, :, 0, 0].cpu(), expected.float())


def test_garbage_under_the_mask_cannot_leak(device: str) -> None:
    """NaN and +inf in the bias at masked positions change no output bit: the mask is last."""
    q, k, v = (t.to(device) for t in qkv(1, 1, 20, 40))
    mask = (randn(7, 20, 40) > 0).to(device)
    bias = randn(8, 20, 40).to(device)
    clean, _ = attention(q, k, v, CAUSAL, bias, mask)
    hidden = ~mask | ~reference.visible_keys(20, 40, CAUSAL).to(device)
    bias[hidden] = math.nan
    bias[hidden & (randn(9, 20, 40).to(device) > 0)] = math.inf
    assert torch.equal(attention(q, k, v, CAUSAL, bias, mask)[0], clean)


def test_strided_views_equal_contiguous_tensors(device: str) -> None:
    """Slices of a fused QKV buffer, transposed views and an odd storage offset change no bit."""
    heads, kv_heads, tokens, dim = 4, 2, 37, 64
    fused = randn(10, tokens, (heads + 2 * kv_heads) * dim).to(device)
    q, k, v = (
        part.unflatten(-1, (-1, dim)).transpose(0, 1)[None]
        for part in fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    )
    expected, _ = attention(q.contiguous(), k.contiguous(), v.contiguous(), CAUSAL)
    assert torch.equal(attention(q, k, v, CAUSAL)[0], expected)
    odd = torch.empty(k.numel() + 1, device=device)[1:].view(k.shape).copy_(k)
    assert torch.equal(attention(q, odd, v, CAUSAL)[0], expected)
    swapped = v.transpose(-1, -2).contiguous().transpose(-1, -2)  # last stride is not 1
    assert torch.equal(attention(q, k, swapped, CAUSAL)[0], expected)


def test_offsets_beyond_32_bits(device: str) -> None:
    """A batch stride of 2**33 elements addresses the right memory: offsets are 64-bit."""
    q, k, v = (t.to(device) for t in qkv(1, 1, 5, 9))
    far = k.as_strided((1, 1, 9, 64), (2**33, 2**32, 64, 1))
    assert torch.equal(attention(q, far, v)[0], attention(q, k, v)[0])
    if device == "cuda":  # a token stride whose products pass 2**31, in real memory
        long = torch.zeros(40, 2**27, dtype=torch.float16, device=device)
        rows = long[:, :64]
        rows.copy_(randn(11, 40, 64))
        half = q.half()
        wide = rows[None, None]
        near = wide.contiguous()
        assert torch.equal(attention(half, wide, wide)[0], attention(half, near, near)[0])


def test_lse_is_the_natural_logarithm_under_cap_and_bias(device: str) -> None:
    """lse equals torch.logsumexp of the capped, biased natural scores: no base-2 leftovers."""
    q, k, v = (t.to(device) for t in qkv(1, 1, 6, 40))
    bias = randn(12, 6, 40).to(device)
    scores = 3.0 * torch.tanh(q @ k.transpose(-1, -2) * 64**-0.5 / 3.0) + bias
    _, lse = attention(q, k, v, AttentionOptions(softcap=3.0), bias)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)


def test_float32_is_ieee(device: str) -> None:
    """float32 inputs keep float32 products (error below 1e-5, TF32's would be near 1e-3)."""
    tensors = qkv(1, 1, 64, 64)
    out, _ = attention(*(t.to(device) for t in tensors))
    truth, _ = exact(tensors, AttentionOptions())
    assert float((out.cpu() - truth).norm() / truth.norm()) < 1e-5


def test_packed_sequences_equal_dense_ones(device: str) -> None:
    """Each packed sequence, empty ones included, equals its own dense call bit for bit."""
    query_lens, key_lens = [5, 0, 33, 1], [9, 3, 33, 40]
    q = randn(13, sum(query_lens), 4, 64).to(device)
    k, v = (randn(seed, sum(key_lens), 2, 64).to(device) for seed in (14, 15))
    ranges = [
        torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device)
        for lens in (query_lens, key_lens)
    ]
    options = AttentionOptions(causal=True, window=17)
    out, lse = attention_packed(q, k, v, Packing(*ranges, 33, 40), options)
    start_q = start_k = 0
    for num_queries, num_keys in zip(query_lens, key_lens, strict=True):
        own_q = q[start_q : start_q + num_queries].transpose(0, 1)[None]
        own = [t[start_k : start_k + num_keys].transpose(0, 1)[None] for t in (k, v)]
        expected, expected_lse = attention(own_q, *own, options)
        assert torch.equal(out[start_q : start_q + num_queries].transpose(0, 1)[None], expected)
        assert torch.equal(lse[:, start_q : start_q + num_queries][None], expected_lse)
        start_q, start_k = start_q + num_queries, start_k + num_keys


def test_nan_beyond_a_packed_sequence_stays_outside(device: str) -> None:
    """Tokens of the next sequence, NaN here, never touch a sequence that ends inside a tile."""
    q, k, v = (randn(seed, 12, 2, 64).to(device) for seed in (16, 17, 18))
    ranges = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    clean, _ = attention_packed(q, k, v, Packing(ranges, ranges, 7, 7))
    for tensor in (q, k, v):
        tensor[5:] = math.nan
    assert torch.equal(attention_packed(q, k, v, Packing(ranges, ranges, 7, 7))[0][:5], clean[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_tiles_and_descriptors_only_change_rounding(device: str, dtype: torch.dtype) -> None:
    """Other tile shapes, and bulk-copy descriptors, give the same attention within rounding."""
    tensors = qkv(2, 1, 50, 90, dtype=dtype)
    inputs = Inputs(*(t.to(device) for t in tensors))
    options = AttentionOptions(causal=True, window=40)
    plain, _ = reference.attention(*tensors, options)
    truth, _ = exact(tensors, options)
    for tiles in (Tiles(16, 64), Tiles(64, 16), Tiles(64, 64, descriptors=True, ahead=True)):
        assert_as_accurate(launch_forward(inputs, options, tiles)[0], plain, truth)


def test_a_batch_member_does_not_depend_on_its_neighbours(device: str) -> None:
    """Batch and head order permute the result and change no bit."""
    q, k, v = (t.to(device) for t in qkv(2, 2, 35, 35, batch=3))
    out, _ = attention(q, k, v, CAUSAL)
    order = [2, 0, 1]
    assert torch.equal(attention(q[order], k[order], v[order], CAUSAL)[0], out[order])
    assert torch.equal(attention(q[1:2], k[1:2], v[1:2], CAUSAL)[0], out[1:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k, v[:, :, 1:]), "shape"),
        (lambda q, k, v: (q[:, :3], k, v), "fit"),
        (lambda q, k, v: (q.half(), k, v), "dtype"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "float64"),
        (lambda q, k, v: (q[0], k, v), "axes"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(device: str, change, message: str) -> None:
    """Wrong shapes, head counts and dtypes raise ValueError before any kernel runs."""
    with pytest.raises(ValueError, match=message):
        attention(*change(*(t.to(device) for t in qkv(4, 2, 8, 8))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 is wrong in the interpreter")
@pytest.mark.parametrize("name", OPTIONS)
def test_bfloat16_is_as_accurate_as_plain_torch(device: str, name: str) -> None:
    """bfloat16 storage: twice plain PyTorch's error at most, over every option and head dim 128."""
    check(device, qkv(4, 2, 300, 421, dim=128, dtype=torch.bfloat16), OPTIONS[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("options", "queries", "keys"),
    [
        (AttentionOptions(), 128, 384),
        (CAUSAL, 512, 512),
        (CAUSAL, 256, 1408),
        (AttentionOptions(causal=True, query_offset=0), 256, 128),
        (AttentionOptions(causal=True, query_offset=5), 384, 640),
        (AttentionOptions(causal=True, query_offset=200, scale=0.3), 256, 384),
    ],
)
def test_specialised_warps_are_as_accurate_as_plain_torch(
    device: str, options: AttentionOptions, queries: int, keys: int, dim: int, dtype: torch.dtype
) -> None:
    """The warp-specialised kernel takes these shapes, is accurate, and repeats its bits."""
    tensors = qkv(4, 2, queries, keys, dim=dim, batch=2, dtype=dtype)
    q, k, v = (t.to(device) for t in tensors)
    assert fits(q, k, v)
    assert forward_tiles(q).specialised
    out = check(device, tensors, options)
    for _ in range(3):  # a race would show as bits that move
        assert torch.equal(attention(q, k, v, options)[0].cpu(), out)
    stock, _ = launch_forward(Inputs(q, k, v), options, Tiles(64, 64, num_stages=2))
    torch.testing.assert_close(stock.cpu().float(), out.float(), rtol=2e-2, atol=2e-2)
