"""A linear layer with the norm behind it: the bits of the two one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import linear as linear_module
from kernels.configs.layers import linear_tiles
from kernels.linear import linear
from kernels.linear_norm import linear_norm
from kernels.norm import rmsnorm

EPS = 1e-5


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("depth", "width"), [(576, 576), (300, 72), (1536, 2048)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bits_are_those_of_the_two_in_turn(
    device: str, split: bool, depth: int, width: int, with_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Both results, with the chunks' sums added by the norm's launch or by the product's own."""
    if device == "cpu" and width > 100:
        depth, width = depth // 4, width // 8  # the interpreter is slow; chunks are shorter there
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    x, weight, residual, scale, bias = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((3, depth), (width, depth), (3, width), (width,), (width,))
    )
    tiles = replace(linear_tiles(x, weight, False), split=split)
    monkeypatch.setattr(linear_module, "linear_tiles", lambda *_: tiles)
    own_bias = bias if with_bias else None
    stream, normed = linear_norm(x, weight, own_bias, residual, scale, EPS)
    expected = linear(x, weight, own_bias, residual=residual)
    assert torch.equal(stream, expected)
    assert torch.equal(normed, rmsnorm(expected, scale, EPS))


def test_library_product_ends_in_the_same_launch(device: str) -> None:
    """invariant=False: the vendor's product, then one launch; bits of the two in turn."""
    generator = torch.Generator().manual_seed(1)
    x, weight, residual, scale = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((2, 40), (24, 40), (2, 24), (24,))
    )
    stream, normed = linear_norm(x, weight, None, residual, scale, EPS, invariant=False)
    assert torch.equal(stream, linear(x, weight, residual=residual, invariant=False))
    assert torch.equal(normed, rmsnorm(stream, scale, EPS))


def test_no_rows_and_wrong_shapes(device: str) -> None:
    """No rows give no rows; misfits raise ValueError; schema and fake agree with what it does."""
    x, weight, residual = (torch.zeros(s, device=device) for s in ((0, 8), (5, 8), (0, 5)))
    scale = torch.ones(5, device=device)
    assert linear_norm(x, weight, None, residual, scale, EPS)[1].shape == (0, 5)
    with pytest.raises(ValueError, match="does not fit x"):
        linear_norm(x[:, :7], weight, None, residual, scale, EPS)
    with pytest.raises(ValueError, match="residual"):
        linear_norm(x, weight, None, residual[:, :4], scale, EPS)
    with pytest.raises(ValueError, match="norm weight"):
        linear_norm(x, weight, None, residual, scale[:4], EPS)
    with pytest.raises(ValueError, match="bias"):
        linear_norm(x, weight, scale[:4], residual, scale, EPS)
    torch.library.opcheck(
        torch.ops.specmesh.linear_norm.default,
        (torch.ones(2, 8, device=device), weight, None, None, weight[:2, :5], scale, EPS, True),
        test_utils=("test_schema", "test_faketensor"),
    )
