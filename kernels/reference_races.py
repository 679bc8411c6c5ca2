"""Random words, uniforms and exponential races: part of the specification, on a CPU in numpy.

`kernels/reference.py` is where other code finds these. Streams and counter layout:
`kernels/streams.py`. A CPU device draws with this code in production, so it is written for few
passes; tests hold it to the plain definitions, bit for bit.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.streams import (
    MULTIPLIER_0,
    MULTIPLIER_1,
    NUM_ROUNDS,
    UNIFORM_MAX,
    UNIFORM_SCALE,
    UNIFORM_SHIFT,
    WEYL_0,
    WEYL_1,
    WORD_MASK,
    Purpose,
    philox,
)


def philox_words(seed: int, word0: Tensor, position: int, base_len: int, purpose: int) -> Tensor:
    """Vectorised Philox 4x32-10 (Salmon et al., SC'11) over counter word 0.

    word0: int64 [n], each in [0, 2**32). Returns int64 [n, 4] holding unsigned 32-bit words.
    """
    return torch.from_numpy(_philox_calls(seed, word0.numpy(), position, base_len, purpose))


def _philox_calls(
    seed: int,
    word0: np.ndarray,
    position: int | np.ndarray,
    base_len: int,
    purpose: int,
    dtype: Any = np.int64,
) -> np.ndarray:
    """Words [n, 4] of the calls word0 [n], as int64 or rounded to float32.

    position: one for all calls, or one each. In numpy, in place: torch has no full uint64
    arithmetic, and this is the hot loop of a draw on a CPU.
    """
    words = np.empty((word0.size, 4), dtype)
    if word0.size <= 4:  # a few calls are cheaper one by one
        places = np.broadcast_to(position, word0.shape).tolist()
        for index, (word, place) in enumerate(zip(word0.tolist(), places, strict=True)):
            words[index] = philox(seed, (word, place, base_len, int(purpose)))
        return words
    # Products in 64 bits, read as 32-bit halves where that saves passes: a call costs about a
    # microsecond, which is what short arrays are made of.
    even = np.empty((2, word0.size), np.uint64)  # counter words (0, 2); (1, 3) are `odd`
    even[0], even[1] = word0, base_len
    if word0.size > _SHORT:
        odd = np.empty_like(even)
        odd[0], odd[1] = position, int(purpose)
        _long_rounds(seed, even, odd)
    else:
        start = np.empty((2, word0.size), np.uint32)
        start[0], start[1] = position, int(purpose)
        odd = _short_rounds(seed, even, start)
    # Signed, for the conversion to float32; the values are the same.
    words[:, 0::2] = even.view(np.int64).T
    words[:, 1::2] = (odd.view(np.int64) if odd.itemsize == 8 else odd).T
    return words


def _long_rounds(seed: int, even: np.ndarray, odd: np.ndarray) -> None:
    """All rounds over uint64 [2, n], in place: contiguous passes, for memory bandwidth."""
    product = np.empty_like(even)
    crossed = product[::-1]  # each half takes the other half's product
    for key in _round_keys(seed):
        np.multiply(even, _MULTIPLIERS, product)
        np.right_shift(crossed, _WORD_BITS, even)
        np.bitwise_xor(even, odd, even)
        np.bitwise_xor(even, key, even)
        np.bitwise_and(crossed, _WORD, odd)


def _short_rounds(seed: int, even: np.ndarray, odd: np.ndarray) -> np.ndarray:
    """All rounds over even, uint64 [2, n], in place, and odd, uint32 [2, n]; the last odd words.

    Three passes a round in place of five: halves of a product are views of it.
    """
    low_even = even.view(_HALF_TYPE)[:, _LOW::2]
    products = [np.empty_like(even), np.empty_like(even)]
    halves = [product.view(_HALF_TYPE)[::-1] for product in products]
    lows, highs = [half[:, _LOW::2] for half in halves], [half[:, 1 - _LOW :: 2] for half in halves]
    for index, key in enumerate(_short_round_keys(seed)):
        turn = index & 1
        np.multiply(even, _MULTIPLIERS, products[turn])
        np.bitwise_xor(highs[turn], odd, low_even)
        np.bitwise_xor(low_even, key, low_even)
        odd = lows[turn]
    return odd


_MULTIPLIERS = np.array([[MULTIPLIER_0], [MULTIPLIER_1]], dtype=np.uint64)
_WORD, _WORD_BITS = np.uint64(WORD_MASK), np.uint64(32)
_HALF_TYPE = np.dtype(np.uint32)
_LOW = 0 if sys.byteorder == "little" else 1  # where a 64-bit word keeps its low half
_SHORT = 3000  # calls; beyond, three strided passes take longer than five contiguous ones


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> np.ndarray:
    """The key of every round, uint64 [NUM_ROUNDS, 2, 1]."""
    steps = np.arange(NUM_ROUNDS, dtype=np.uint64)
    low = (np.uint64(seed & WORD_MASK) + steps * np.uint64(WEYL_0)) & _WORD
    high = (np.uint64(seed >> 32) + steps * np.uint64(WEYL_1)) & _WORD
    return np.stack((low, high), axis=-1)[:, :, None]


@functools.lru_cache(maxsize=256)
def _short_round_keys(seed: int) -> list[np.ndarray]:
    return list(_round_keys(seed).astype(np.uint32))


def _uniform_calls(
    seed: int, word0: np.ndarray, position: int | np.ndarray, base_len: int, purpose: int
) -> np.ndarray:
    """Uniforms float32 [n, 4] of the calls word0 [n]."""
    return _scale(_philox_calls(seed, word0, position, base_len, purpose, np.float32))


def uniform(words: Tensor) -> Tensor:
    """Map 32-bit words (int64) to float32 uniforms in the open interval (0, 1).

    Never 0, never 1, fine near 0 where rare events live; the same bits on every IEEE device.
    """
    return torch.from_numpy(_scale(words.numpy().astype(np.float32)))


def _scale(words: np.ndarray) -> np.ndarray:
    """Words, rounded to float32, to uniforms; in place."""
    words *= np.float32(UNIFORM_SCALE)
    words += np.float32(UNIFORM_SHIFT)
    if words.max() > UNIFORM_MAX:  # one array in hundreds: cheaper to look than to clamp
        np.minimum(words, np.float32(UNIFORM_MAX), out=words)
    return words


def coin(seed: int, position: int, base_len: int) -> float:
    """The accept coin of a position: u in (0, 1), a float32 value."""
    word = philox(seed, (0, position, base_len, Purpose.ACCEPT))[0]
    scaled = np.float32(word) * np.float32(UNIFORM_SCALE) + np.float32(UNIFORM_SHIFT)
    return min(float(scaled), UNIFORM_MAX)


def race_uniforms(seed: int, ids: Tensor, position: int, base_len: int, purpose: int) -> Tensor:
    """One uniform per token id (int64 [n], ascending), float32 [n].

    Keyed by token id: the uniform of an id does not depend on which other ids run.
    """
    return torch.from_numpy(_race_uniforms(seed, ids.numpy(), position, base_len, purpose))


def _race_uniforms(
    seed: int, ids: np.ndarray, position: int | np.ndarray, base_len: int, purpose: int
) -> np.ndarray:
    if isinstance(position, int):
        first, last = int(ids[0]) >> 2, int(ids[-1]) >> 2
        if last - first < ids.size:  # one call per four ids of the span
            calls = np.arange(first, last + 1)
            uniforms = _uniform_calls(seed, calls, position, base_len, purpose).reshape(-1)
            start = int(ids[0]) - 4 * first
            if int(ids[-1]) - int(ids[0]) + 1 == ids.size:  # every id of the span runs
                return uniforms[start : start + ids.size]
            return uniforms[ids - 4 * first]
    uniforms = _uniform_calls(seed, ids >> 2, position, base_len, purpose)  # one call per id
    return uniforms[_all_ids(ids.size), ids & 3]


def exponentials(seed: int, ids: Tensor, position: int, base_len: int, purpose: int) -> Tensor:
    """Exponential race times E = -log1p(-u) of token ids (int64 [n], ascending), float64 [n]."""
    uniforms = _race_uniforms(seed, ids.numpy(), position, base_len, purpose)
    return torch.from_numpy(-np.log1p(-uniforms.astype(np.float64)))


def race(
    weights: Tensor,
    seed: int,
    position: int,
    base_len: int,
    purpose: int,
    ids: Tensor | None = None,
) -> int:
    """Draw one token id with probability w / sum(w): the first to finish an exponential race.

    weights: [n], finite and >= 0, unnormalised; ids: the token id of each entry, int64 [n]
    ascending, or None for 0..n-1. Id x finishes at E_x / w_x; the lowest id wins a tie. Needs no
    normaliser and no prefix sum, so batch, tile and support encoding cannot change the draw.
    Raises ValueError when no weight is positive.
    """
    running = weights.numpy()
    token_ids = _all_ids(running.size) if ids is None else ids.numpy()
    may_win = running > 0
    num_running = np.count_nonzero(may_win)
    if num_running == 0:
        raise ValueError("a race needs at least one positive weight")
    # Picking the runners out costs more than a noise call for each id of the rest, unless few run.
    if num_running < running.size and (ids is not None or 4 * num_running < running.size):
        running, token_ids = running[may_win], token_ids[may_win]
    uniforms = _race_uniforms(seed, token_ids, position, base_len, purpose)
    return int(token_ids[_winner(running, uniforms)])


def races(
    rows: Sequence[tuple[Tensor, Tensor]],
    seed: int,
    positions: Sequence[int],
    base_len: int,
    purpose: int,
) -> list[int]:
    """`race` over several sparse rows (weights, ids) of one session, row i for positions[i].

    One batch of noise serves them all; the draws are those of `race`.
    """
    if not rows:
        return []
    sizes = [ids.numel() for _, ids in rows]
    token_ids = np.concatenate([ids.numpy() for _, ids in rows])
    places = np.repeat(np.array(positions, np.int64), sizes)
    uniforms = _race_uniforms(seed, token_ids, places, base_len, purpose)
    drawn, start = [], 0
    for (weights, ids), size in zip(rows, sizes, strict=True):
        running = weights.numpy()
        if not running.any():
            raise ValueError("a race needs at least one positive weight")
        drawn.append(int(ids[_winner(running, uniforms[start : start + size])]))
        start += size
    return drawn


@functools.lru_cache(maxsize=64)
def _all_ids(vocab_size: int) -> np.ndarray:
    ids = np.arange(vocab_size)
    ids.flags.writeable = False
    return ids


# Bounds are screened in float32: each operand and the quotient are off by 2**-24 at most.
_SCREEN_SLACK = 1.0 + 2.0**-20
_SCREEN_LIMIT = 1e24  # of a finishing time or its inverse: float32 holds the weights that matter


def _winner(weights: np.ndarray, uniforms: np.ndarray) -> int:
    """Index of the first to finish -log1p(-u) / w, the lowest on a tie; weight 0 never finishes.

    weights: [n], one at least positive; uniforms: float32 [n].
    """
    # u < E, so u / w bounds every finish from below: only ids that could still beat the leader's
    # real finish need the logarithm. The winner and its ties are always among them.
    with np.errstate(divide="ignore", over="ignore"):
        bounds = uniforms / weights.astype(np.float32, copy=False)
    leader = int(bounds.argmin())
    finish = math.inf
    if weights[leader] > 0:
        finish = -math.log1p(-float(uniforms[leader])) / float(weights[leader])
    if 1 / _SCREEN_LIMIT < finish < _SCREEN_LIMIT:
        contenders = np.flatnonzero(bounds <= np.float32(finish * _SCREEN_SLACK))
    else:
        contenders = np.flatnonzero(weights > 0)
    if contenders.size == 1:
        return int(contenders[0])
    exact = uniforms[contenders].astype(np.float64)
    times = -np.log1p(-exact) / weights[contenders].astype(np.float64)
    return int(contenders[times.argmin()])  # the first, so the lowest id, on a tie
