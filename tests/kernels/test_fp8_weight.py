"""Weights of one byte: what rounding costs, and every linear layer over them.

Products are compared with float64 over the same values and scales: what they may add to the
rounding of the weights is what plain PyTorch adds. Types are float16 and float32 in the
interpreter, whose bfloat16 is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import linear as module
from kernels import reference_layers as reference
from kernels.configs.layers import LinearTiles, linear_tiles
from kernels.fp8_weight import (
    FP8,
    LARGEST,
    SMALLEST_NORMAL,
    Fp8Weight,
    fp8_bytes,
    join,
    quantise,
)
from kernels.linear import ACTIVATIONS, linear, linear_chunks
from kernels.linear_norm import linear_norm
from kernels.norm import rmsnorm
from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_linear import bits, plain, tensors

EPS = 1e-5


def operands(
    device: str, rows: int, depth: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Fp8Weight, Tensor, Tensor]:
    """As of `test_linear.tensors`, the weight as fp8; every channel's scale is another."""
    x, weight, bias, residual = tensors(device, rows, depth, width, torch.float32, seed)
    spread = torch.logspace(-2, 0, width, device=device)[:, None]
    return x.to(dtype), quantise(weight * spread), bias.to(dtype), residual.to(dtype)


def fp8_bits(
    monkeypatch: pytest.MonkeyPatch, tiles: LinearTiles, x: Tensor, weight: Fp8Weight, **ends: str
) -> Tensor:
    return bits(monkeypatch, tiles, x, weight, **ends)  # type: ignore[arg-type]  # `linear` takes both


# ---------------------------------------------------------------- rounding


def test_error_of_a_weight_is_bounded(device: str) -> None:
    """2^-4 of itself where it is a normal number of its row, 2^-10 scales below: and no less, by
    weights half way between two values."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(64, 500, generator=generator) * torch.logspace(-3, 3, 64)[:, None]
    ties = torch.tensor([[LARGEST, 17.0, 2.0**-10, 1.5 * 2.0**-9, -9.5]])
    for weight in (drawn, ties):
        weight = weight.to(device)
        made = quantise(weight)
        assert torch.equal(made.scale, weight.abs().amax(1).double().div(LARGEST).float())
        error = (made.dequantised(torch.float64) - weight).abs()
        scale = made.scale.double()[:, None]
        is_normal = weight.abs() >= SMALLEST_NORMAL * scale
        # The scale itself is rounded: a hundred-thousandth is room enough for it.
        allowed = torch.where(is_normal, weight.abs().double() * 2**-4, scale * 2**-10)
        assert bool((error <= allowed * (1 + 1e-5)).all())
        assert bool(is_normal.any() and (~is_normal).any())
    assert float(error[0, 1]) == 1.0  # 17 of 16 and 18
    assert float(error[0, 2]) == 2.0**-10


def test_the_largest_of_a_row_survives_and_zeros_stay(device: str) -> None:
    """Rows of zeros are zeros, rows of the smallest floats are no infinities, the largest weight of
    an ordinary row is itself to within its scale's rounding."""
    weight = torch.zeros(4, 8, device=device)
    weight[1, 3] = -5.0
    weight[2] = 1e-40
    weight[3, 0], weight[3, 1] = 3e38, 1e-3
    made = quantise(weight)
    whole = made.dequantised()
    assert bool(whole.isfinite().all())
    assert not bool(whole[0].any())
    assert float(made.values[1, 3].float()) == -LARGEST
    torch.testing.assert_close(whole[1], weight[1], rtol=1e-6, atol=0)
    assert float(whole[2].abs().max()) <= 1e-37
    assert float(whole[3, 0]) == pytest.approx(3e38, rel=1e-6)


def test_parts_join_to_what_the_whole_gives(device: str) -> None:
    """Channels are rounded by themselves: merged before or after, in any type of checkpoint."""
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).to(device)
    weight = weight.bfloat16()
    whole, parts = quantise(weight), join([quantise(part) for part in weight.split((16, 8))])
    assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))
    assert torch.equal(whole.scale, parts.scale)
    assert whole.num_bytes == 24 * 40 + 24 * 4 == fp8_bytes(24, 40)
    again = quantise(weight.float())
    assert torch.equal(whole.values.view(torch.uint8), again.values.view(torch.uint8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    """One such weight would make its whole channel nothing, or nothing but it."""
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantise(weight)


def test_only_pairs_that_fit_are_a_weight() -> None:
    """Other types, lengths and layouts of the two tensors are refused."""
    values, scale = torch.zeros(3, 4).to(FP8), torch.ones(3)
    Fp8Weight(values, scale)
    for wrong in (
        (values.float(), scale),
        (values, scale[:2]),
        (values, scale.double()),
        (values, torch.ones(6)[::2]),
        (values[0], scale),
    ):
        with pytest.raises(ValueError, match="no fp8 weight"):
            Fp8Weight(*wrong)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_end_is_as_accurate_as_plain_torch(
    device: str, activation: str, dtype: torch.dtype
) -> None:
    """Bias, activation and residual over fp8 weights err at most twice as much as torch in this
    type over the same values; odd sizes, several chunks of K."""
    x, weight, bias, residual = operands(device, 5, 1100, 62, dtype)
    residual = residual[:, :31] if activation == "swiglu" else residual
    ours = linear(x, weight, bias, activation=activation, residual=residual)
    exact = plain(
        x.cpu().double(), weight.dequantised(torch.float64).cpu(), bias.cpu().double(),
        residual.cpu().double(), activation,
    )  # fmt: skip
    # Plain torch: the product in float32 over the same values, ends there, one rounding.
    wide = plain(x.float(), weight.dequantised(), bias.float(), residual.float(), activation)
    assert_as_accurate(ours, wide.to(dtype), exact)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norm_behind_the_layer_and_chunks_left_to_a_reader(
    device: str, split: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`linear_norm` gives the bits of layer and norm in turn, `linear_chunks` sums that add up to
    those of `linear`, and both are as accurate as plain torch; split over programs or not."""
    x, weight, bias, residual = operands(device, 3, 600, 24, dtype, seed=5)
    scale = torch.rand(24, generator=torch.Generator().manual_seed(6)).to(device, dtype)
    tiles = replace(linear_tiles(x, weight.values, False), split=split)
    monkeypatch.setattr(module, "linear_tiles", lambda *_: tiles)
    layer = linear(x, weight, bias, residual=residual)
    stream, normed = linear_norm(x, weight, bias, residual, scale, EPS)
    assert torch.equal(stream, layer)
    assert torch.equal(normed, rmsnorm(layer, scale, EPS))
    sums, left = linear_chunks(x, weight, bias)
    assert (sums.ndim == 3) == (left is not None) == split
    if split:
        total = sums[0]
        for chunk in sums[1:]:
            total = total + chunk
        sums = (total + bias.float()).to(dtype)
    assert torch.equal(sums, linear(x, weight, bias))
    exact = x.cpu().double() @ weight.dequantised(torch.float64).cpu().T + bias.cpu().double()
    wide = x.float() @ weight.dequantised().T + bias.float()
    assert_as_accurate(sums, wide.to(dtype), exact)


@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_a_rows_bits_ignore_rows_tiles_and_split(
    device: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row alone or among others, in any place, tile shape, operand order or split over chunks:
    equal bits, as of weights of two bytes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight, _, _ = operands(device, 5, 1200, 24, dtype, seed=3)
    own = linear_tiles(x[:1], weight.values, False)
    base = replace(own, ordered=device == "cpu", turned=False, split=False, more_m=0)
    block_m = 64 if device == "cuda" else 4
    small = replace(base, block_m=block_m, block_n=16)
    expected = fp8_bits(monkeypatch, small, x, weight, activation=activation)
    rows = {"block_m": 16, "more_m": 32} if device == "cuda" else {"block_m": 2, "more_m": 2}
    for tiles in (
        replace(small, block_m=2 * block_m),
        replace(small, block_n=32),
        replace(small, split=True),
        replace(small, block_n=64, turned=True, **rows),
        replace(small, block_m=16, block_n=64, turned=True, split=True, block_k=128),
    ):
        found = fp8_bits(monkeypatch, tiles, x, weight, activation=activation)
        assert torch.equal(found, expected), tiles
    for row in (0, 4):
        alone = fp8_bits(monkeypatch, small, x[row : row + 1], weight, activation=activation)
        assert torch.equal(alone[0], expected[row])
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1)).to(device)
    shuffled = fp8_bits(monkeypatch, small, x[order], weight, activation=activation)
    assert torch.equal(shuffled, expected[order])


def test_a_rows_bits_ignore_how_many_share_the_call(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 5, 33, 64, 65 and 200 rows, by the launches that the table gives them."""
    counts = (1, 5, 33, 64, 65, 200)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight, bias, _ = operands(device, max(counts), 320, 32, dtype, seed=4)
    if device == "cpu":  # a CPU library's product may depend on a row's place
        tiles = replace(linear_tiles(x, weight.values, False), ordered=True)
        monkeypatch.setattr(module, "linear_tiles", lambda *_: tiles)
    expected = linear(x, weight, bias)
    for count in counts:
        assert torch.equal(linear(x[:count], weight, bias), expected[:count]), count


def test_a_sum_is_scaled_before_it_is_added(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract of scales: a chunk's sum times the scale is rounded, then chunks are added.

    Sums of 5 and 14 and a scale of a third: scaled after the addition, or added to a product that
    is not rounded, they make the float below.
    """
    chunk, third = module.CHUNK_K_FLOAT32, torch.tensor(1 / 3)
    x = torch.zeros(1, 2 * chunk, device=device)
    x[0, 0], x[0, chunk] = 5.0, 14.0
    weight = Fp8Weight(torch.ones_like(x).to(FP8), third.reshape(1).to(device))
    expected = float(third * 5 + third * 14)
    assert expected != float(third * 19)
    assert expected != float((float(third * 5) + third.double() * 14).float())
    for split in (False, True):
        tiles = replace(linear_tiles(x, weight.values, False), split=split, block_m=16, block_n=16)
        assert fp8_bits(monkeypatch, tiles, x, weight).item() == expected


def test_any_strides(device: str) -> None:
    """A weight whose rows lie apart gives the bits of one whose rows do not."""
    x, weight, _, _ = operands(device, 4, 72, 40, torch.float32, seed=2)
    wide = torch.zeros(40, 96, device=device).to(FP8)
    wide[:, 16:88] = weight.values
    apart = Fp8Weight(wide[:, 16:88], weight.scale)
    assert torch.equal(linear(x, apart), linear(x, weight))


def test_what_fp8_weights_cannot_do_is_refused(device: str) -> None:
    """The library's product, and tensors that do not fit, raise ValueError by every door."""
    x, weight, bias, residual = operands(device, 2, 8, 6, torch.float32)
    doors: list[Callable[..., object]] = [
        lambda x, w, **o: linear(x, w, **o),
        lambda x, w, **o: linear_chunks(x, w, None, **o),
        lambda x, w, **o: linear_norm(x, w, None, residual, bias, EPS, **o),
    ]
    for door in doors:
        door(x, weight)
        with pytest.raises(ValueError, match="invariant=True"):
            door(x, weight, invariant=False)
        with pytest.raises(ValueError, match="does not fit x"):
            door(x[:, :7], weight)
        with pytest.raises(ValueError, match="does not fit x"):
            door(x, weight.values)  # without its scales it is no weight of x's type


def test_ops_describe_themselves_to_the_compiler(device: str) -> None:
    """Fakes agree with what the ops do over fp8 weights."""
    x, weight, bias, residual = operands(device, 2, 8, 6, torch.float32)
    pair = weight.values, weight.scale
    ops = torch.ops.specmesh
    for op, arguments in (
        (ops.linear, (x, *pair, bias, None, "swiglu", True)),
        (ops.linear_chunks, (x, *pair, bias, True)),
        (ops.linear_norm, (x, *pair, bias, residual, bias, EPS, True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils="test_faketensor")


def test_reference_of_the_same_weight(device: str) -> None:
    """The reference layer over dequantised values is the same function."""
    x, weight, bias, _ = operands(device, 3, 96, 20, torch.float32, seed=8)
    found = linear(x, weight, bias)
    torch.testing.assert_close(
        found, reference.linear(x, weight.dequantised(), bias), rtol=1e-5, atol=1e-5
    )
