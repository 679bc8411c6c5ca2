"""Philox 4x32-10 in Triton: words, uniforms and race times, bit for bit those of the reference.

    u = min(float32(r) 2^-32 + 2^-33, 1 - 2^-24)        E = -log1p(-u)

Owns the streams on the device. Must not know rows, rules or batches. Key = the request's 64-bit
seed, counter = (token id >> 2 or 0, position, round key, purpose): `kernels/streams.py` holds the
layout and the purposes, `kernels/reference.py` the vectorised twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import streams

MULTIPLIER_0 = tl.constexpr(streams.MULTIPLIER_0)
MULTIPLIER_1 = tl.constexpr(streams.MULTIPLIER_1)
WEYL_0 = tl.constexpr(streams.WEYL_0)
WEYL_1 = tl.constexpr(streams.WEYL_1)
NUM_ROUNDS = tl.constexpr(streams.NUM_ROUNDS)
UNIFORM_SCALE = tl.constexpr(streams.UNIFORM_SCALE)
UNIFORM_SHIFT = tl.constexpr(streams.UNIFORM_SHIFT)
UNIFORM_MAX = tl.constexpr(streams.UNIFORM_MAX)


@triton.jit
def philox(seed, word0, position, round_key, purpose):
    """The four words (uint32) of one call for each word0; seed int64, the rest 32 bit."""
    c0 = word0.to(tl.uint32)
    c1 = (tl.zeros_like(c0) + position).to(tl.uint32)
    c2 = (tl.zeros_like(c0) + round_key).to(tl.uint32)
    c3 = (tl.zeros_like(c0) + purpose).to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(NUM_ROUNDS):
        product_0 = c0.to(tl.uint64) * MULTIPLIER_0  # one wide multiply on the device
        product_1 = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 = (k0 + WEYL_0).to(tl.uint32)
        k1 = (k1 + WEYL_1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform(words):
    """float32 in the open interval (0, 1) of uint32 words: fine near 0, never 0, never 1."""
    return tl.minimum(tl.fma(words.to(tl.float32), UNIFORM_SCALE, UNIFORM_SHIFT), UNIFORM_MAX)


@triton.jit
def words_tile(seed, first_id, position, round_key, purpose, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Words of ROWS x RUN consecutive token ids from first_id, a multiple of 4, [ROWS, RUN].

    One call serves four ids. RUN of four ids a thread keeps each thread's words its own.
    """
    calls = tl.arange(0, ROWS)[:, None] * (RUN // 4) + tl.arange(0, RUN // 4)[None, :]
    w0, w1, w2, w3 = philox(seed, calls + (first_id >> 2), position, round_key, purpose)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # last index: low bit, then high bit
    return tl.reshape(words, [ROWS, RUN])


@triton.jit
def uniform_at(seed, ids, position, round_key, purpose):
    """Uniforms of arbitrary token ids: one call per id."""
    w0, w1, w2, w3 = philox(seed, ids >> 2, position, round_key, purpose)
    low = tl.where((ids & 1) == 0, w0, w1)
    high = tl.where((ids & 1) == 0, w2, w3)
    return uniform(tl.where((ids & 2) == 0, low, high))


@triton.jit
def exponential(u):
    """E = -log1p(-u), accurate to a few units in the last place for every u in (0, 1).

    Below 1/2: 2 artanh(z) with z = u / (2 - u) <= 1/3, whose series keeps small u exact. From 1/2
    on 1 - u is exact and its logarithm far from 0.
    """
    z = tl.div_rn(u, 2.0 - u)
    z2 = z * z
    series = tl.full(z.shape, 1.0 / 17.0, tl.float32) if z.type.is_block() else 1.0 / 17.0
    series = series * z2 + 1.0 / 15.0
    series = series * z2 + 1.0 / 13.0
    series = series * z2 + 1.0 / 11.0
    series = series * z2 + 1.0 / 9.0
    series = series * z2 + 1.0 / 7.0
    series = series * z2 + 1.0 / 5.0
    series = series * z2 + 1.0 / 3.0
    near = 2.0 * z + 2.0 * z * (z2 * series)
    return tl.where(u < 0.5, near, -tl.log(1.0 - tl.maximum(u, 0.5)))


@triton.jit
def _streams_kernel(words, uniforms, times, key, first_id, num_ids, SIZE: tl.constexpr):
    """Words by single calls, uniforms by tiles: the two must name the same stream."""
    seed, position = tl.load(key), tl.load(key + 1)
    round_key, purpose = tl.load(key + 2), tl.load(key + 3)
    start = tl.program_id(0) * SIZE
    places = start + tl.arange(0, SIZE)[None, :]
    inside = places < num_ids
    ids = first_id + places
    w0, w1, w2, w3 = philox(seed, ids >> 2, position, round_key, purpose)
    low = tl.where((ids & 1) == 0, w0, w1)
    high = tl.where((ids & 1) == 0, w2, w3)
    tl.store(words + places, tl.where((ids & 2) == 0, low, high).to(tl.int64), inside)
    u = uniform(words_tile(seed, first_id + start, position, round_key, purpose, 1, SIZE))
    tl.store(uniforms + places, u, inside)
    tl.store(times + places, exponential(u), inside)


def token_streams(
    seed: int,
    first_id: int,
    num_ids: int,
    counter: tuple[int, int, int],
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Words (int64), uniforms and race times (float32) of ids first_id .. first_id + num_ids - 1.

    What the sampling kernels consume, laid open for tests. counter = (position, round key,
    purpose); first_id a multiple of 4. Each tensor is [num_ids] on `device`.
    """
    if first_id % 4:
        raise ValueError(f"first_id {first_id} is not a multiple of 4")
    words = torch.empty(num_ids, dtype=torch.int64, device=device)
    uniforms, times = (torch.empty(num_ids, dtype=torch.float32, device=device) for _ in range(2))
    signed_seed = seed - (1 << 64) if seed >> 63 else seed
    key = torch.tensor([signed_seed, *counter], dtype=torch.int64, device=device)
    size = 1024
    grid = (triton.cdiv(num_ids, size),)
    _streams_kernel[grid](words, uniforms, times, key, first_id, num_ids, SIZE=size)
    return words, uniforms, times
