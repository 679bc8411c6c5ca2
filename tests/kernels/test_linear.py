"""Linear layers with fused ends: accuracy of every end, and bits that ignore the other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import linear as module
from kernels import reference_layers as reference
from kernels.configs.layers import LinearTiles, linear_tiles
from kernels.linear import ACTIVATIONS, linear
from tests.kernels.accuracy import assert_as_accurate


def tensors(
    device: str, rows: int, depth: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [rows, depth], weight [width, depth], bias [width], residual [rows, width]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, depth), (width, depth), (width,), (rows, width))
    x, weight, bias, residual = (torch.randn(s, generator=generator) for s in shapes)
    parts = (x, weight * depth**-0.5, bias, residual)
    return tuple(t.to(device, dtype) for t in parts)  # type: ignore[return-value]  # four in, four out


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> Tensor:
    if activation == "swiglu":
        y = reference.swiglu(reference.linear(x, weight, bias))
        return y if residual is None else y + residual
    return reference.linear(x, weight, bias, activation=activation, residual=residual)  # type: ignore[arg-type]  # a name of the reference's


def doubled(*parts: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.cpu().double() for t in parts]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("invariant", [True, False])
def test_every_end_is_as_accurate_as_plain_torch(
    device: str, activation: str, invariant: bool
) -> None:
    """Bias, activation and residual err at most twice as much as torch; odd sizes, float16."""
    x, weight, bias, residual = tensors(device, 5, 1100, 62, torch.float16)
    residual = residual[:, :31] if activation == "swiglu" else residual
    ours = linear(x, weight, bias, activation=activation, residual=residual, invariant=invariant)
    exact = plain(*doubled(x, weight, bias, residual), activation)  # type: ignore[arg-type]  # none is None
    assert_as_accurate(ours, plain(x, weight, bias, residual, activation), exact)


@pytest.mark.parametrize("depth", [64, 100, 2100])
def test_float32_products_are_not_rounded_to_tf32(device: str, depth: int) -> None:
    """float32 stays IEEE: the error is at most twice torch's own, also where tiles are cut."""
    x, weight, _, _ = tensors(device, 3, depth, 33, torch.float32, seed=1)
    exact = x.cpu().double() @ weight.cpu().double().T
    assert_as_accurate(linear(x, weight), x @ weight.T, exact)


def test_any_strides(device: str) -> None:
    """Transposed and offset views, and leading dimensions, give the bits of contiguous tensors."""
    x, weight, bias, residual = tensors(device, 6, 72, 40, torch.float32, seed=2)
    expected = linear(x, weight, bias, residual=residual, activation="silu")
    wide = torch.full((6, 80), torch.nan, device=device)
    wide[:, 1:73] = x
    turned = weight.T.contiguous().T
    strided = residual.T.contiguous().T
    got = linear(
        wide[:, 1:73].reshape(2, 3, 72), turned, bias,
        residual=strided.reshape(2, 3, 40), activation="silu",
    )  # fmt: skip
    assert got.shape == (2, 3, 40)
    assert torch.equal(got.view(6, 40), expected)


def bits(
    monkeypatch: pytest.MonkeyPatch, tiles: LinearTiles, x: Tensor, weight: Tensor, **options: str
) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(module, "linear_tiles", lambda *_: tiles)
        return linear(x, weight, **options)


@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_a_rows_bits_ignore_rows_tiles_and_split(
    device: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row alone or among others, in any place, tile shape, operand order or split over chunks:
    equal bits."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    x, weight, _, _ = tensors(device, 5, 1200, 24, dtype, seed=3)
    base = replace(
        linear_tiles(x[:1], weight, False), ordered=device == "cpu", turned=False, split=False
    )
    block_m = 64 if device == "cuda" else 4
    small = replace(base, block_m=block_m, block_n=16)
    expected = bits(monkeypatch, small, x, weight, activation=activation)
    variants = (
        replace(small, block_m=2 * block_m),
        replace(small, block_n=32),
        replace(small, split=True),
        replace(small, more_m=block_m // 2 if device == "cpu" else block_m),
        replace(small, block_m=2, more_m=2, block_n=64, turned=True)
        if device == "cpu"
        else replace(small, block_m=16, more_m=32, block_n=64, turned=True),
        replace(small, block_m=16, block_n=64, turned=True, split=True, block_k=128),
    )
    for tiles in variants:
        assert torch.equal(bits(monkeypatch, tiles, x, weight, activation=activation), expected)
    for row in (0, 4):
        alone = bits(monkeypatch, small, x[row : row + 1], weight, activation=activation)
        assert torch.equal(alone[0], expected[row])
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1)).to(device)
    shuffled = bits(monkeypatch, small, x[order], weight, activation=activation)
    assert torch.equal(shuffled, expected[order])


def test_the_order_of_sums_is_the_contract(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks start from zero and are added ascending: ones survive beside 2^24 only so.

    Chunk 0 sums to 2^24 and chunk 1 to 16: one running float32 sum would lose each single 1.
    """
    chunk = module.CHUNK_K_FLOAT32
    x = torch.ones(1, 2 * chunk, device=device)
    weight = torch.zeros(1, 2 * chunk, device=device)
    weight[0, 0] = 2.0**24
    weight[0, chunk :: chunk // 16] = 1.0
    tiles = replace(linear_tiles(x[:1], weight, False), ordered=True, block_m=16, block_n=16)
    got = bits(monkeypatch, tiles, x, weight)
    assert got.item() == 2.0**24 + 16.0
    running = torch.tensor(2.0**24)
    for _ in range(16):
        running += 1.0
    assert running.item() == 2.0**24


def test_wrong_shapes_and_names_are_refused(device: str) -> None:
    """Unknown activations, odd SwiGLU weights and misfitting tensors raise ValueError."""
    x, weight, bias, residual = tensors(device, 2, 8, 5, torch.float32)
    with pytest.raises(ValueError, match="none of"):
        linear(x, weight, activation="tanh")
    with pytest.raises(ValueError, match="gate"):
        linear(x, weight, activation="swiglu")
    with pytest.raises(ValueError, match="does not fit x"):
        linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, bias[:4])
    with pytest.raises(ValueError, match="residual"):
        linear(x, weight, residual=residual[:, :4])


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema and fake of specmesh::linear agree with what it does, SwiGLU and no rows included."""
    x, weight, bias, _ = tensors(device, 2, 8, 6, torch.float32)
    for rows, activation in ((x, "none"), (x, "swiglu"), (x[:0], "silu")):
        torch.library.opcheck(
            torch.ops.specmesh.linear.default, (rows, weight, None, bias, None, activation, True),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
