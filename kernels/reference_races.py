"""Random words, uniforms and exponential races: part of the specification, on a CPU in numpy.

`kernels/reference.py` is where other code finds these. Streams and counter layout:
`kernels/streams.py`. A CPU device draws with this code in production, so it is written for few
passes over few bytes; tests hold it to the plain definitions, bit for bit.
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
    calls = _philox_calls(seed, word0.numpy(), position, base_len, purpose)
    return torch.from_numpy(_words_in_order(calls).astype(np.int64).reshape(-1, 4))


def _philox_calls(
    seed: int, word0: np.ndarray, position: int | np.ndarray, base_len: int, purpose: int
) -> np.ndarray:
    """Calls word0, int64 [n], uint64 [2, n]: words (0, 1) in one, (2, 3) in the other, first high.

    position: one for all calls, or one each. In numpy, in place: torch has no full uint64
    arithmetic, and this is the hot loop of a draw on a CPU.
    """
    state = np.empty((2, word0.size), np.uint64)
    if word0.size <= 4:  # a few calls are cheaper one by one
        places = np.broadcast_to(position, word0.shape).tolist()
        for index, (word, place) in enumerate(zip(word0.tolist(), places, strict=True)):
            w0, w1, w2, w3 = philox(seed, (word, place, base_len, int(purpose)))
            state[:, index] = (w0 << 32 | w1, w2 << 32 | w3)
        return state
    # Packed in pairs, a round is (c0, c1) <- M1 c2 ^ (c1 ^ k0, 0) and (c2, c3) <- M0 c0 ^ (c3 ^ k1,
    # 0). All but word 0, and the position perhaps, is one number in the first of them.
    first, *others = _round_keys(seed)
    product = np.empty_like(state)
    np.left_shift(np.asarray(position, np.uint64), _WORD_BITS, out=state[0])
    np.multiply(word0.view(np.uint64), _MULTIPLIERS[0], out=state[1])
    state[0] ^= np.uint64(MULTIPLIER_1 * base_len) ^ first[0]
    state[1] ^= np.uint64(int(purpose) << 32) ^ first[1]
    for key in others:
        np.right_shift(state, _WORD_BITS, product)
        np.multiply(product, _MULTIPLIERS, product)
        np.left_shift(state, _WORD_BITS, state)
        np.bitwise_xor(state, product[::-1], state)  # each pair takes the other pair's product
        np.bitwise_xor(state, key, state)
    return state


_MULTIPLIERS = np.array([[MULTIPLIER_0], [MULTIPLIER_1]], dtype=np.uint64)
_WORD_BITS = np.uint64(32)


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> list[np.ndarray]:
    """The key of every round, uint64 [2, 1] each, where the words 0 and 2 are."""
    steps = np.arange(NUM_ROUNDS, dtype=np.uint64)
    low = np.uint64(seed & WORD_MASK) + steps * np.uint64(WEYL_0)
    high = np.uint64(seed >> 32) + steps * np.uint64(WEYL_1)
    return list(np.stack((low, high), axis=-1)[:, :, None] << _WORD_BITS)


# Calls read as 32-bit words, [2, n, 2]: word w of call c is at (w >> 1, c, w & 1 ^ _FLIPPED).
_FLIPPED = 1 if sys.byteorder == "little" else 0


def _words_in_order(calls: np.ndarray) -> np.ndarray:
    """Words uint32 [4 n] of calls [2, n], call by call."""
    pairs = calls.T.copy().view(np.uint32).reshape(-1, 2)
    return (pairs[:, ::-1] if _FLIPPED else pairs).reshape(-1)


def _pick_words(calls: np.ndarray, indices: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Words uint32 [n] of token ids, int64 [n]; indices: which of the calls serves each."""
    far = 2 * calls.shape[1]
    places = np.array((0, 1, far, far + 1)).take(ids & 3 ^ _FLIPPED)
    places += indices
    places += indices
    return calls.view(np.uint32).reshape(-1).take(places)


def uniform(words: Tensor) -> Tensor:
    """Map 32-bit words (int64) to float32 uniforms in the open interval (0, 1).

    Never 0, never 1, fine near 0 where rare events live; the same bits on every IEEE device.
    """
    return torch.from_numpy(_uniforms(words.numpy()))


def _uniforms(words: np.ndarray) -> np.ndarray:
    uniforms = words.astype(np.float32)
    uniforms *= np.float32(UNIFORM_SCALE)
    uniforms += np.float32(UNIFORM_SHIFT)
    return np.minimum(uniforms, np.float32(UNIFORM_MAX), out=uniforms)


def coin(seed: int, position: int, base_len: int) -> float:
    """The accept coin of a position: u in (0, 1), a float32 value."""
    word = philox(seed, (0, position, base_len, Purpose.ACCEPT))[0]
    scaled = np.float32(word) * np.float32(UNIFORM_SCALE) + np.float32(UNIFORM_SHIFT)
    return min(float(scaled), UNIFORM_MAX)


def race_uniforms(seed: int, ids: Tensor, position: int, base_len: int, purpose: int) -> Tensor:
    """One uniform per token id (int64 [n], ascending), float32 [n].

    Keyed by token id: the uniform of an id does not depend on which other ids run.
    """
    words = _race_words(seed, ids.numpy(), position, base_len, purpose)
    return torch.from_numpy(_uniforms(words))


def _race_words(
    seed: int, ids: np.ndarray, position: int | np.ndarray, base_len: int, purpose: int
) -> np.ndarray:
    """One word per token id (int64 [n], ascending for one position), uint32 [n]."""
    if isinstance(position, int):
        first, last = int(ids[0]) >> 2, int(ids[-1]) >> 2
        if last - first < ids.size:  # one call per four ids of the span
            span = np.arange(first, last + 1)
            calls = _philox_calls(seed, span, position, base_len, purpose)
            return _words_in_order(calls).take(ids - 4 * first)
    calls = _philox_calls(seed, ids >> 2, position, base_len, purpose)  # one call per id
    return _pick_words(calls, _all_ids(ids.size), ids)


def exponentials(
    seed: int, ids: Tensor, position: int | np.ndarray, base_len: int, purpose: int
) -> Tensor:
    """Exponential race times E = -log1p(-u) of token ids, float64 [n].

    ids: int64 [n], ascending where position is one for all; else position: int64 [n].
    """
    words = _race_words(seed, ids.numpy(), position, base_len, purpose)
    return torch.from_numpy(_exponentials(words))


def _exponentials(words: np.ndarray) -> np.ndarray:
    return -np.log1p(-_uniforms(words).astype(np.float64))


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
    if ids is not None:
        token_ids = ids.numpy()
    else:
        may_win = running > 0
        # Picking the runners out costs more than a noise call for each four ids, unless few run.
        if 4 * np.count_nonzero(may_win) >= running.size > 0:
            return _first_of_row(running, (seed, position, base_len, purpose))
        token_ids = may_win.nonzero()[0]
        running = running[token_ids]
    if not token_ids.size:
        raise ValueError(_NOBODY_RUNS)
    words = _race_words(seed, token_ids, position, base_len, purpose)
    return int(token_ids[_winner(running, words)])


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
    places = np.repeat(np.array(positions, np.uint64), sizes)
    words = _race_words(seed, token_ids, places, base_len, purpose)
    drawn, start = [], 0
    for (weights, _), size in zip(rows, sizes, strict=True):
        winner = _winner(weights.numpy(), words[start : start + size])
        drawn.append(int(token_ids[start + winner]))
        start += size
    return drawn


@functools.lru_cache(maxsize=64)
def _all_ids(vocab_size: int) -> np.ndarray:
    ids = np.arange(vocab_size)
    ids.flags.writeable = False
    return ids


_NOBODY_RUNS = "a race needs at least one positive weight"

# Bounds are screened in float32: each operand and the quotient are off by 2**-24 at most.
_SCREEN_SLACK = 1.0 + 2.0**-20
_SCREEN_LIMIT = 1e24  # of a finishing time or its inverse: float32 holds the weights that matter
_NUM_WORDS = 2.0**32  # word r gives the uniform (float32(r) + 1/2) / _NUM_WORDS, 1 - 2**-24 at most


def _winner(weights: np.ndarray, words: np.ndarray) -> int:
    """Index of the first to finish -log1p(-u) / w, the lowest on a tie; weight 0 never finishes.

    weights: [n]; words: uint32 [n]. Raises ValueError when no weight is positive.
    """
    # u < E, so u / w bounds every finish from below: only ids that could still beat the leader's
    # real finish need the logarithm. The winner and its ties are always among them.
    bounds = words.astype(np.float32)
    bounds += np.float32(0.5)
    with np.errstate(divide="ignore", over="ignore"):
        bounds /= weights.astype(np.float32, copy=False)
    leader = int(bounds.argmin())
    finish = _finish(words[leader], weights[leader])
    if 1 / _SCREEN_LIMIT < finish < _SCREEN_LIMIT:
        limit = np.float32(finish * _NUM_WORDS * _SCREEN_SLACK)
        contenders = (bounds <= limit).nonzero()[0]
        if contenders.size == 1:
            return leader
    else:
        contenders = (weights > 0).nonzero()[0]
        if not contenders.size:
            raise ValueError(_NOBODY_RUNS)
    times = _exponentials(words[contenders]) / weights[contenders].astype(np.float64)
    return int(contenders[times.argmin()])  # the first, so the lowest id, on a tie


def _finish(word: np.uint32, weight: np.floating[Any]) -> float:
    """Time -log1p(-u) / w at which one id finishes, inf without weight: within rounding."""
    if not weight > 0:
        return math.inf
    u = min((float(np.float32(word)) + 0.5) / _NUM_WORDS, UNIFORM_MAX)
    return -math.log1p(-u) / float(weight)


_HEAVY = 2.0**-10  # of the largest weight: some hundred ids of a row reach it


def _first_of_row(weights: np.ndarray, key: tuple[int, int, int, int]) -> int:
    """`race` of all ids 0..n-1 under key = (seed, position, base_len, purpose).

    The heavy ids race; any other needs a word below one limit to be faster than the first of them,
    so that most words are compared once and never turned into times.
    """
    least = weights.max() * weights.dtype.type(_HEAVY)
    seed, *rest = key
    calls = _philox_calls(seed, _all_ids(-(-weights.size // 4)), *rest)
    heavy = (weights >= least if least > 0 else weights > 0).nonzero()[0]
    heavy_words = _pick_words(calls, heavy >> 2, heavy)
    leader = _winner(weights[heavy], heavy_words)
    first = heavy[leader]
    finish = _finish(heavy_words[leader], weights[first])
    limit = min(WORD_MASK, 1.0 + finish * float(least) * _NUM_WORDS * _SCREEN_SLACK)
    # Places of the words as they lie, [2, n, 2], and the ids that they serve.
    fast = (calls.view(np.uint32).reshape(-1) <= np.uint32(limit)).nonzero()[0]
    pair, place = np.divmod(fast, 2 * calls.shape[1])
    others = 2 * (place & -2) + 2 * pair + (place & 1 ^ _FLIPPED)
    others = others[(others < weights.size) & (others != first)]
    if not others.size:
        return int(first)
    runners = np.sort(np.append(others, first))
    return int(runners[_winner(weights[runners], _pick_words(calls, runners >> 2, runners))])
