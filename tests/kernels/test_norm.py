"""RMSNorm with and without the residual stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference_layers as reference
from kernels.norm import rmsnorm, rmsnorm_residual
from tests.kernels.accuracy import assert_as_accurate

EPS = 1e-5


def inputs(device: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(rows, width, generator=generator) * 3 for _ in range(2))
    weight = torch.rand(width, generator=generator) + 0.5
    return tuple(t.to(device, dtype) for t in (x, residual, weight))


@pytest.mark.parametrize("width", [7, 576, 1023, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_accurate_as_plain_torch(device: str, width: int, dtype: torch.dtype) -> None:
    """Norm and residual sum err at most twice as much as torch, for odd widths too."""
    x, residual, weight = inputs(device, 3, width, dtype)
    exact = [t.cpu().double() for t in (x, residual, weight)]
    assert_as_accurate(
        rmsnorm(x, weight, EPS),
        reference.rmsnorm(x, weight, EPS),
        reference.rmsnorm(exact[0], exact[2], EPS),
    )
    out, stream = rmsnorm_residual(x, residual, weight, EPS)
    plain_out, plain_stream = reference.rmsnorm_residual(x, residual, weight, EPS)
    assert torch.equal(stream, plain_stream)
    exact_out, _ = reference.rmsnorm_residual(*exact, EPS)
    assert_as_accurate(out, plain_out, exact_out)


def test_the_norm_sees_the_rounded_stream(device: str) -> None:
    """The sum is rounded before the norm: float16 2048 + 0.5 is 2048 in both results."""
    x = torch.full((1, 64), 2048.0, device=device, dtype=torch.float16)
    residual = torch.full_like(x, 0.5)
    residual[0, 0] = -2048.0
    weight = torch.ones(64, device=device, dtype=torch.float16)
    out, stream = rmsnorm_residual(x, residual, weight, EPS)
    assert stream[0, 1] == 2048.0
    assert torch.equal(out, rmsnorm(stream, weight, EPS))


def test_a_rows_bits_ignore_batch_and_strides(device: str) -> None:
    """A row alone, in a batch, in leading dimensions or in a wider buffer: equal bits."""
    x, residual, weight = inputs(device, 6, 576, torch.float16)
    expected, stream = rmsnorm_residual(x, residual, weight, EPS)
    wide = torch.full((6, 640), torch.nan, device=device, dtype=torch.float16)
    wide[:, 8:584] = x
    view = wide[:, 8:584]
    out, same = rmsnorm_residual(view, residual, weight, EPS)
    assert torch.equal(out, expected)
    assert torch.equal(same, stream)
    stacked = rmsnorm_residual(x.view(2, 3, 576), residual.view(2, 3, 576), weight, EPS)[0]
    assert torch.equal(stacked.view(6, 576), expected)
    assert torch.equal(rmsnorm_residual(x[4:5], residual[4:5], weight, EPS)[0][0], expected[4])
    turned = x.T.contiguous().T
    assert torch.equal(rmsnorm(turned, weight, EPS), rmsnorm(x, weight, EPS))


def test_wrong_shapes_are_refused_and_no_rows_are_fine(device: str) -> None:
    """A weight or residual that does not fit raises ValueError; zero rows give zero rows."""
    x, residual, weight = inputs(device, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="weight"):
        rmsnorm(x, weight[:8], EPS)
    with pytest.raises(ValueError, match="residual"):
        rmsnorm_residual(x, residual[:1], weight, EPS)
    assert rmsnorm(x[:0], weight, EPS).shape == (0, 16)


def test_ops_describe_themselves_to_the_compiler(device: str) -> None:
    """Schema and fake of both ops agree with what they do."""
    x, residual, weight = inputs(device, 2, 16, torch.float32)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.specmesh.rmsnorm.default, (x, weight, EPS), test_utils=utils)
    torch.library.opcheck(
        torch.ops.specmesh.rmsnorm_residual.default, (x, residual, weight, EPS), test_utils=utils
    )
