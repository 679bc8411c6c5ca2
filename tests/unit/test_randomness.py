"""Seeds of samples: the request's own for sample 0, derived and distinct for the others."""

from __future__ import annotations

import pytest

from kernels.streams import Purpose
from specmesh.randomness import philox, sample_seed


def test_sample_zero_uses_the_request_s_seed() -> None:
    """A single sample with a seed is reproducible from that seed alone."""
    assert sample_seed(12345, 0) == 12345
    assert sample_seed((1 << 64) - 1, 0) == (1 << 64) - 1


def test_other_samples_use_philox_of_seed_and_index() -> None:
    """Sample i has the first two words of Philox(seed, i), low word first: 64-bit, all distinct."""
    low, high, _, _ = philox(12345, (3, 0, 0, Purpose.SAMPLE_SEED))
    assert sample_seed(12345, 3) == high * 2**32 + low
    seeds = {sample_seed(12345, index) for index in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_neighbouring_requests_do_not_share_sample_seeds() -> None:
    """Seeds s and s + 1 give disjoint sample seeds."""
    first = {sample_seed(7, index) for index in range(200)}
    second = {sample_seed(8, index) for index in range(200)}
    assert not first & second


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (1 << 64, 0), (1 << 64, 2), (1, -1)])
def test_out_of_range_seeds_and_indices_are_refused(seed: int, index: int) -> None:
    """Nothing is reduced modulo 2**64 in silence."""
    with pytest.raises(ValueError):
        sample_seed(seed, index)
