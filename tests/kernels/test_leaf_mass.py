"""The summing of leaves that nobody races: the bits of `score_leaf`, for every kind of row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.leaf_mass import first_quarters, leaf_mass
from kernels.row_state import LEAF, LOG2_E, TILE, score_leaf


@triton.jit
def _both_kernel(
    row, exponents, masses, num_leaves, vocab_size, threshold, temperature,
    FILTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """exponents, masses [2, leaves]: as summed alone, and as `score_leaf` has them."""
    leaf = tl.program_id(0)
    scale = tl.div_rn(LOG2_E, temperature)
    a, b, c, d = first_quarters(row, leaf, 1, vocab_size, leaf >= 0, TILE)
    m, mass = leaf_mass(row, a, b, c, d, leaf, 1, vocab_size, threshold, scale, FILTERED, TILE)
    tl.store(exponents + leaf, m)
    tl.store(masses + leaf, mass)
    seed = tl.zeros([], tl.int64)
    m, mass, _ = score_leaf(
        row, leaf, 1, vocab_size, threshold, scale, False, False, seed, 0, 0, 0, FILTERED, False,
        TILE, 128,
    )  # fmt: skip
    tl.store(exponents + num_leaves + leaf, m)
    tl.store(masses + num_leaves + leaf, mass)


def both(
    row: Tensor, vocab_size: int, threshold: float | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    num_leaves = triton.cdiv(vocab_size, LEAF)
    exponents = torch.full((2, num_leaves), torch.nan, device=row.device)
    masses = torch.full((2, num_leaves), -7, dtype=torch.int64, device=row.device)
    _both_kernel[(num_leaves,)](
        row, exponents, masses, num_leaves, vocab_size,
        float("-inf") if threshold is None else threshold, temperature,
        FILTERED=threshold is not None, TILE=TILE.value, num_warps=1,
    )  # fmt: skip
    return exponents, masses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 8192, 8200, 20001])
def test_a_leaf_has_the_bits_of_the_raced_form(
    device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    """Whole and cut tiles, one and several leaves, filtered or not, at three temperatures."""
    generator = torch.Generator().manual_seed(vocab_size)
    row = (torch.randn(vocab_size + 5, generator=generator) * 4).to(dtype).to(device)
    row[vocab_size:] = 60.0  # past the vocabulary
    for threshold, temperature in ((None, 1.0), (1.5, 0.3), (None, 3.7)):
        exponents, masses = both(row, vocab_size, threshold, temperature)
        assert torch.equal(exponents[0], exponents[1])
        assert torch.equal(masses[0], masses[1])
        assert threshold is not None or (masses > 0).all()


def test_tiles_of_very_different_scores_merge_alike(device: str) -> None:
    """Rising, falling and missing tiles: every shift of a mass, and tiles of -inf alone."""
    for ramp in (0.002, -0.002, 0.05, -0.05):
        row = torch.arange(16384, device=device) * ramp
        row[4096:8192] = -torch.inf
        exponents, masses = both(row.float(), 16384)
        assert torch.equal(exponents[0], exponents[1])
        assert torch.equal(masses[0], masses[1])
    exponents, masses = both(torch.full((300,), -torch.inf, device=device), 300)
    assert masses.tolist() == [[0], [0]]
    assert exponents.tolist() == [[-torch.inf], [-torch.inf]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5000, 8999])
def test_one_bad_score_spoils_its_leaf_alone(device: str, bad: float, place: int) -> None:
    """Wherever it stands, in a whole tile or a cut one, the leaf's mass is -1."""
    row = torch.randn(9001, generator=torch.Generator().manual_seed(1)).to(device)
    row[place] = bad
    with np.errstate(invalid="ignore"):
        _, masses = both(row, 9001)
    spoilt = place // LEAF
    assert (masses[:, spoilt] == -1).all()
    assert (masses[:, 1 - spoilt] > 0).all()
