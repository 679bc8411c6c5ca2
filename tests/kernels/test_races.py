"""Races over tiles: masses of one warp, and tiles that are left out because they cannot win."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.philox import words_tile
from kernels.row_state import (
    exact_mass,
    exponent_of,
    exponent_of_largest,
    largest_of,
    largest_of_four,
    may_win,
    race,
    tile_ids,
    tile_mass,
    weigh,
)

SIZE, RUN, POSITION, ROUND_KEY, STREAM = 1024, 128, 321, 300, 3
TILES = 6


@triton.jit
def _sums_kernel(scores, exponents, masses, scale, SIZE: tl.constexpr):
    """Of one tile: (m, mass) by the general sums, then by those of one warp."""
    tile = tl.program_id(0)
    own = tl.load(scores + tile * SIZE + tl.arange(0, SIZE))
    m, point = exponent_of(own, scale)
    tl.store(exponents + 2 * tile, m)
    tl.store(masses + 2 * tile, exact_mass(weigh(own, scale, point), SIZE))
    m, point = exponent_of_largest(largest_of(largest_of_four(own, SIZE), SIZE // 4, 1), scale)
    tl.store(exponents + 2 * tile + 1, m)
    tl.store(masses + 2 * tile + 1, tile_mass(weigh(own, scale, point), SIZE))


@triton.jit
def _races_kernel(
    scores, shares, seeds, winners, raced, ratio, scale, origin, position, round_key, stream,
    TILES: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Of one row of TILES tiles: the winner with every tile raced, then without the hopeless."""
    row = tl.program_id(0)
    seed = tl.load(seeds + row)
    every = tl.zeros_like(seed)
    some = tl.zeros_like(seed)
    count = tl.zeros_like(row)
    for tile in range(0, TILES):
        first = tile * SIZE
        at = row * (TILES * SIZE) + first
        largest = largest_of_four(tl.load(scores + at + tl.arange(0, SIZE)), SIZE)
        chosen = may_win(
            largest, first, scale, origin, some, seed, position, round_key, stream, SIZE, 4
        )
        ids = tile_ids(first, SIZE // RUN, RUN)
        weights = weigh(tl.load(scores + row * (TILES * SIZE) + ids), scale, origin)
        share = weigh(tl.load(shares + row * (TILES * SIZE) + ids), scale, origin)
        weights = tl.fma(share, -ratio, weights)
        words = words_tile(seed, first, position, round_key, stream, SIZE // RUN, RUN)
        zero = tl.zeros_like(seed)
        every = tl.maximum(every, race(weights, words, ids, zero, SIZE // RUN, RUN))
        if chosen:
            some = race(weights, words, ids, some, SIZE // RUN, RUN)
            count += 1
    tl.store(winners + 2 * row, every)
    tl.store(winners + 2 * row + 1, some)
    tl.store(raced + row, count)


def races(scores: Tensor, shares: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """(packed winners [rows, 2], tiles raced [rows]) of rows of scores and shares."""
    rows, device = scores.shape[0], scores.device
    winners = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    raced = torch.zeros(rows, dtype=torch.int32, device=device)
    seeds = torch.arange(rows, device=device) * 7919 + 11
    _races_kernel[(rows,)](
        scores, shares, seeds, winners, raced, ratio, 1.4426950408889634, 6.0, POSITION, ROUND_KEY,
        STREAM, TILES=TILES, SIZE=SIZE, RUN=RUN, num_warps=1,
    )  # fmt: skip
    return winners.cpu(), raced.cpu()


def test_tiles_left_out_never_hold_the_winner(device: str) -> None:
    """Over target and residual rows, flat, peaked and thin, with and without ids of no weight: the
    packed winner is that of racing every tile, though many tiles are not raced."""
    left_out = rows = 0
    for index, (spread, noise) in enumerate([(0.1, 9.0), (2.5, 9.0), (2.5, 0.5), (1.0, 0.02)]):
        generator = torch.Generator().manual_seed(index)
        scores = torch.randn(6, TILES * SIZE, generator=generator) * spread
        shares = scores + torch.randn(scores.shape, generator=generator) * noise
        scores[:, :: 3 + index] = -torch.inf
        ratio = 0.0 if noise > 1.0 else 1.0
        winners, raced = races(scores.to(device), shares.to(device), ratio)
        assert torch.equal(winners[:, 0], winners[:, 1])
        assert (winners > 0).all()
        left_out += int((TILES - raced).sum())
        rows += 6
    assert left_out > rows, "a bound that lets every tile through shows nothing"


def test_sums_of_one_warp_are_the_general_ones(device: str) -> None:
    """Exponents and masses agree bit for bit; a NaN or +inf makes both masses negative."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(10, SIZE, generator=generator) * 4.0
    scores[1] -= 300.0
    scores[2] = -torch.inf
    scores[3, 1:] = -torch.inf
    scores[4] = 0.0
    scores[5, ::2] = -0.0
    scores[6] *= 30.0
    scores[7, 900] = torch.nan
    scores[8, 31] = torch.inf
    exponents = torch.zeros(10, 2, device=device)
    masses = torch.zeros(10, 2, dtype=torch.int64, device=device)
    with np.errstate(invalid="ignore"):
        _sums_kernel[(10,)](scores.to(device), exponents, masses, 1.3, SIZE=SIZE, num_warps=1)
    sound = torch.tensor([True] * 7 + [False] * 2 + [True])
    assert torch.equal((masses >= 0).cpu(), sound[:, None].expand(10, 2))
    assert torch.equal(masses[sound, 0], masses[sound, 1])
    assert torch.equal(exponents[sound, 0], exponents[sound, 1])
