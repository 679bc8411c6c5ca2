"""Shortcuts of the row arithmetic against the plain definitions: the same ids, the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.streams import Purpose

SIZES = [1, 2, 5, 63, 1025, 5000, 12289, 49152]


def weights_of(seed: int, vocab_size: int, scale: float, kept: float = 1.0) -> Tensor:
    """exp of normal logits, the largest 1; all but about `kept` of the ids are zero."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(vocab_size, generator=generator)
    weights = torch.exp(logits - logits.max())
    gone = torch.rand(vocab_size, generator=generator) >= kept
    gone[int(weights.argmax())] = False
    return weights.masked_fill(gone, 0.0)


def plain_race(weights: Tensor, key: tuple[int, int, int, int]) -> int:
    """argmin of E / w in float64 over every id with weight, no screening."""
    ids = weights.nonzero()[:, 0]
    times = reference.exponentials(key[0], ids, *key[1:]).numpy() / weights[ids].double().numpy()
    return int(ids[int(np.argmin(times))])


@pytest.mark.parametrize("kept", [1.0, 0.9, 0.1, 0.001])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_race_is_the_first_to_finish(vocab_size: int, kept: float) -> None:
    """Whatever is screened in float32, whether runners are picked out or all ids get noise."""
    for seed in range(8):
        weights = weights_of(seed, vocab_size, 3.0, kept)
        key = (seed << 40 | 5, 100 + seed, 90, int(Purpose.RESIDUAL))
        assert reference.race(weights, *key) == plain_race(weights, key)
        assert reference.race(weights.double() / 3, *key) == plain_race(weights.double() / 3, key)


@pytest.mark.parametrize("light", [0.9, 0.1, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("vocab_size", [9, 1026, 49151])
def test_a_race_of_one_heavy_id_and_many_light_ones(vocab_size: int, light: float) -> None:
    """Ids far below the largest weight win as often as they do, and no id past the last."""
    threshold = 2.0**-10  # what the light ids stay below
    winners = set()
    for seed in range(40):
        weights = torch.full((vocab_size,), light * threshold)
        weights[vocab_size // 2] = 1.0
        key = (seed, 100 + seed, 90, int(Purpose.BONUS))
        winners.add(reference.race(weights, *key))
        assert reference.race(weights, *key) == plain_race(weights, key)
        assert reference.race(weights.double(), *key) == plain_race(weights.double(), key)
    if vocab_size * light * threshold > 1.0:
        assert len(winners) > 10
    if not light:
        assert winners == {vocab_size // 2}


def test_a_race_needs_a_runner() -> None:
    """No weight, or no id at all: ValueError, dense and sparse."""
    key = (1, 2, 3, int(Purpose.BONUS))
    for size in (0, 5, 5000):
        with pytest.raises(ValueError, match="positive"):
            reference.race(torch.zeros(size), *key)
        with pytest.raises(ValueError, match="positive"):
            reference.race(torch.zeros(size), *key, torch.arange(size))


@pytest.mark.parametrize("scale", [1e-300, 1e-60, 1e-39, 1e30, 1e300])
def test_a_race_of_weights_that_float32_cannot_hold(scale: float) -> None:
    """Weights that vanish or overflow when screened in float32 still race in float64."""
    for seed in range(8):
        weights = weights_of(seed, 500, 2.0, 0.5).double() * scale
        key = (seed, 7, 3, int(Purpose.BONUS))
        assert reference.race(weights, *key) == plain_race(weights, key)


def test_races_of_several_rows_are_single_races() -> None:
    """One batch of noise for rows of different supports and positions."""
    rows, positions = [], []
    for seed in range(6):
        ids, kept, _ = reference.truncate(weights_of(seed, 3000, 1.0 + seed), 0.01, 1024)
        rows.append((kept, ids))
        positions.append(40 + seed)
    drawn = reference.races(rows, 9, positions, 40, Purpose.PROPOSE)
    expected = [
        reference.race(kept, 9, position, 40, Purpose.PROPOSE, ids)
        for (kept, ids), position in zip(rows, positions, strict=True)
    ]
    assert drawn == expected
    assert len(set(drawn)) > 1
    assert reference.races([], 9, [], 40, Purpose.PROPOSE) == []
    with pytest.raises(ValueError, match="positive"):
        reference.races([(torch.zeros(3), torch.arange(3))], 9, [1], 1, Purpose.PROPOSE)


def plain_truncation(weights: Tensor, dropped: float, max_ids: int) -> list[int]:
    """The heaviest first, ids ascending among equals, until the mass is there or the cap."""
    order = sorted(range(weights.numel()), key=lambda x: (-float(weights[x]), x))
    needed = (1.0 - dropped) * float(weights.double().sum())
    mass, kept = 0.0, []
    for token_id in order[:max_ids]:
        kept.append(token_id)
        mass += float(weights[token_id])
        if mass >= needed:
            break
    return sorted(kept)


@pytest.mark.parametrize("scale", [0.01, 1.0, 2.5, 8.0])
@pytest.mark.parametrize("max_ids", [3, 64, 1024])
@pytest.mark.parametrize("levels", [0, 20])
def test_truncation_keeps_what_a_full_sort_would(scale: float, max_ids: int, levels: int) -> None:
    """A guessed threshold never loses an id, with many ties as with none."""
    for seed in range(3):
        weights = weights_of(seed, 6000, scale)
        if levels:
            weights = (weights * levels).ceil() / levels
        ids, kept, dropped = reference.truncate(weights, 0.01, max_ids)
        assert ids.tolist() == plain_truncation(weights, 0.01, max_ids)
        assert torch.equal(kept, weights[ids])
        mass = float(kept.double().sum() / weights.double().sum())
        assert dropped == pytest.approx(1.0 - mass, abs=1e-9)


def test_truncation_where_heavy_ids_are_evenly_spread() -> None:
    """Every sixteenth id is heavy, so that they fall in a part of the groups only."""
    for offset in (0, 1):
        weights = torch.full((16 * 1024,), 1e-3)
        weights[offset::16] = torch.linspace(0.5, 1.0, 1024)
        for max_ids in (64, 1000, 1024):
            ids, _, _ = reference.truncate(weights, 0.01, max_ids)
            assert ids.tolist() == plain_truncation(weights, 0.01, max_ids)


def test_truncation_where_heavy_ids_share_groups() -> None:
    """Whether the heavy ids crowd in few of the groups that the threshold is found by, or in none:
    after the last whole group."""
    max_ids = 64
    groups = 2 * max_ids
    for first, step in ((0, groups), (5, groups // 2), (0, 1), (40 * groups, 1)):
        weights = torch.full((40 * groups + 100,), 1e-3)
        heavy = first + step * torch.arange(max_ids + 5)
        heavy = heavy[heavy < weights.numel()]
        weights[heavy] = torch.linspace(0.5, 1.0, heavy.numel())
        ids, kept, _ = reference.truncate(weights, 0.01, max_ids)
        assert ids.tolist() == plain_truncation(weights, 0.01, max_ids)
        assert torch.equal(kept, weights[ids])


def test_a_sparse_row_has_the_bits_of_the_dense_one() -> None:
    """Weights, totals and residuals, on and off the support."""
    p = weights_of(1, 4000, 2.0)
    ids, kept, _ = reference.truncate(weights_of(2, 4000, 2.0), 0.01, 300)
    sparse, dense = reference.SparseRow(ids, kept), torch.zeros(4000).index_copy_(0, ids, kept)
    assert all(float(sparse[x]) == float(dense[x]) for x in range(4000))
    totals = reference.total(p), reference.total(dense)
    assert reference.total(sparse) == totals[1]
    before = p.clone()
    found = reference.residual(p, sparse, *totals)
    assert torch.equal(p, before)
    assert torch.equal(found, reference.residual(p, dense, *totals))
    assert float(found[ids].min()) == 0.0
    assert float(found.max()) > 0.0


def test_coins_carry_the_totals() -> None:
    """What a report divides by is what the decision summed."""
    p, q = weights_of(3, 50, 1.0), weights_of(4, 50, 1.0)
    coin = next(reference.decide([p, p], [q], [7]))
    assert isinstance(coin, reference.Coin)
    assert (coin.target_total, coin.draft_total) == (reference.total(p), reference.total(q))
    assert coin.draft_mass == float(q[7]) * coin.target_total
    assert isinstance(coin.draft_mass, float)  # a float32 tensor times a float stays float32


def test_uniforms_stay_below_one() -> None:
    """The highest words, which round to 1, are clamped whatever else is in the array."""
    words = torch.tensor([0, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    found = reference.uniform(words)
    assert float(found.max()) == 1.0 - 2.0**-24
    assert float(found[0]) == 2.0**-33
    assert math.isclose(float(found[1]), 0.5, rel_tol=1e-7)
