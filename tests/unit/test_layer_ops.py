"""Products over packed weights: right for every number of rows, few programs for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference_layers
from specmesh.engine import layer_ops
from specmesh.engine.layer_ops import PackedLinear, packed_rows

MOST_ROWS = 512  # what a step computes at most, by default
N_IN, N_OUT = 24, 40

pytestmark = pytest.mark.skipif(
    not layer_ops._can_pack(torch.float32), reason="this build of torch has no packed product"
)


def product(bias: bool = True) -> tuple[PackedLinear, Tensor, Tensor | None]:
    """A packed product with its weight and bias."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(N_OUT, N_IN, generator=generator)
    added = torch.randn(N_OUT, generator=generator) if bias else None
    return PackedLinear(weight, added), weight, added


def test_few_sizes_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a program for every size it meets: all steps together show it few."""
    packed, _, _ = product()
    seen = set()

    def recorded(computed: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *others: Any) -> Tensor:
            seen.add(x.shape[0])
            return computed(x, *others)

        return call

    monkeypatch.setattr(packed, "_plain", recorded(packed._plain))
    monkeypatch.setattr(packed, "_added", recorded(packed._added))
    for num_rows in range(1, MOST_ROWS + 1):
        x, residual = torch.zeros(num_rows, N_IN), torch.zeros(num_rows, N_OUT)
        assert packed(x).shape == packed(x, residual).shape == (num_rows, N_OUT)
    assert len(seen) <= 52


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 16, 17, 33, 66, 100, 257])
def test_rows_beside_the_wanted_ones_change_nothing(num_rows: int, bias: bool) -> None:
    """Whatever is computed beside them, the rows are those of the reference."""
    packed, weight, added = product(bias)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, N_IN, generator=generator)
    residual = torch.randn(num_rows, N_OUT, generator=generator)
    for more in (None, residual):
        wanted = reference_layers.linear(x, weight, added, residual=more)
        torch.testing.assert_close(packed(x, more), wanted, rtol=1e-5, atol=1e-5)


def test_sizes_waste_little() -> None:
    """No size is smaller than what is asked for, and none an eighth larger beyond the smallest."""
    for num_rows in range(1, 5000):
        size = packed_rows(num_rows)
        assert num_rows <= size
        assert size < 1.125 * num_rows or num_rows < layer_ops.MIN_PACKED_ROWS
        assert packed_rows(size) == size
