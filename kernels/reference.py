"""The specification: what every kernel computes, in plain PyTorch, in the order of the theory.

A CPU device runs this code in production; a GPU runs the Triton twin of each function and is
tested against it. p is the target distribution, q the draft distribution (Leviathan et al.,
arXiv 2211.17192, section 2). A *row* holds unnormalised weights over the vocabulary: its law is
w / sum(w), with the sum taken in float64 over ascending token ids. `decide` and `decide_coupled`
work on any number type (tensors, or numpy object arrays of Fractions), so that the law of the
production code itself can be enumerated exactly.

Attention and layer references are in `kernels/reference_attention.py` and
`kernels/reference_layers.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
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

Row = Any  # Tensor [vocab_size], or a numpy object array of Fractions
Number = Any

# ---------------------------------------------------------------- random words and races


def philox_words(seed: int, word0: Tensor, position: int, base_len: int, purpose: int) -> Tensor:
    """Vectorised Philox 4x32-10 (Salmon et al., SC'11) over counter word 0.

    word0: int64 [n], each in [0, 2**32). Returns int64 [n, 4] holding unsigned 32-bit words.
    """
    words = _philox_calls(seed, word0.numpy(), position, base_len, purpose)
    return torch.from_numpy(words.astype(np.int64))


def _philox_calls(
    seed: int, word0: np.ndarray, position: int, base_len: int, purpose: int
) -> np.ndarray:
    """Words uint32 [n, 4]. In numpy, in place: torch has no full uint64 arithmetic, and this is the
    hot loop of a draw on a CPU."""
    if word0.size <= 8:  # a few calls are cheaper one by one
        counters = ((word, position, base_len, int(purpose)) for word in word0.tolist())
        return np.array([philox(seed, counter) for counter in counters], dtype=np.uint32)
    even, odd = np.empty((2, 2, word0.size), np.uint64)  # counter words (0, 2) and (1, 3)
    even[0], even[1], odd[0], odd[1] = word0, base_len, position, int(purpose)
    product = np.empty_like(even)
    crossed = product[::-1]  # each half takes the other half's product
    for key in _round_keys(seed):
        np.multiply(even, _MULTIPLIERS, out=product)
        np.right_shift(crossed, _WORD_BITS, out=even)
        even ^= odd
        even ^= key
        np.bitwise_and(crossed, _WORD, out=odd)
    words = np.empty((word0.size, 4), np.uint32)
    words[:, 0], words[:, 1], words[:, 2], words[:, 3] = even[0], odd[0], even[1], odd[1]
    return words


_MULTIPLIERS = np.array([[MULTIPLIER_0], [MULTIPLIER_1]], dtype=np.uint64)
_WORD, _WORD_BITS = np.uint64(WORD_MASK), np.uint64(32)


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> np.ndarray:
    """The key of every round, uint64 [NUM_ROUNDS, 2, 1]."""
    steps = np.arange(NUM_ROUNDS, dtype=np.uint64)
    low = (np.uint64(seed & WORD_MASK) + steps * np.uint64(WEYL_0)) & _WORD
    high = (np.uint64(seed >> 32) + steps * np.uint64(WEYL_1)) & _WORD
    return np.stack((low, high), axis=-1)[:, :, None]


def uniform(words: Tensor) -> Tensor:
    """Map 32-bit words (int64) to float32 uniforms in the open interval (0, 1).

    Never 0, never 1, fine near 0 where rare events live; the same bits on every IEEE device.
    """
    return torch.from_numpy(_to_uniform(words.numpy()))


def _to_uniform(words: np.ndarray) -> np.ndarray:
    scaled = words.astype(np.float32)
    scaled *= np.float32(UNIFORM_SCALE)
    scaled += np.float32(UNIFORM_SHIFT)
    return np.minimum(scaled, np.float32(UNIFORM_MAX), out=scaled)


def coin(seed: int, position: int, base_len: int) -> float:
    """The accept coin of a position: u in (0, 1), a float32 value."""
    words = philox(seed, (0, position, base_len, Purpose.ACCEPT))
    return float(_to_uniform(np.array(words[:1]))[0])


def race_uniforms(seed: int, ids: Tensor, position: int, base_len: int, purpose: int) -> Tensor:
    """One uniform per token id (int64 [n], ascending), float32 [n].

    Keyed by token id: the uniform of an id does not depend on which other ids run.
    """
    return torch.from_numpy(_race_uniforms(seed, ids.numpy(), position, base_len, purpose))


def _race_uniforms(
    seed: int, ids: np.ndarray, position: int, base_len: int, purpose: int
) -> np.ndarray:
    first, last = int(ids[0]) >> 2, int(ids[-1]) >> 2
    if last - first < ids.size:  # one call per four ids of the span
        calls = np.arange(first, last + 1)
        words = _philox_calls(seed, calls, position, base_len, purpose).reshape(-1)
        start = int(ids[0]) - 4 * first
        if int(ids[-1]) - int(ids[0]) + 1 == ids.size:  # every id of the span runs
            return _to_uniform(words[start : start + ids.size])
        return _to_uniform(words[ids - 4 * first])
    words = _philox_calls(seed, ids >> 2, position, base_len, purpose)  # one call per id
    return _to_uniform(words[np.arange(ids.size), ids & 3])


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
    token_ids = np.arange(running.size) if ids is None else ids.numpy()
    may_win = running > 0
    if not may_win.all():
        running, token_ids = running[may_win], token_ids[may_win]
    if running.size == 0:
        raise ValueError("a race needs at least one positive weight")
    running = running.astype(np.float64, copy=False)
    uniforms = _race_uniforms(seed, token_ids, position, base_len, purpose).astype(np.float64)
    # u < E, so u / w bounds every finish from below: only ids that could still beat the leader's
    # real finish need the logarithm. The winner and its ties are always among them.
    bounds = uniforms / running
    leader = bounds.argmin()
    finish = -np.log1p(-uniforms[leader]) / running[leader]
    contenders = np.flatnonzero(bounds <= finish)
    times = -np.log1p(-uniforms[contenders]) / running[contenders]
    return int(token_ids[contenders[times.argmin()]])  # the first, so the lowest id, on a tie


def lowest_argmax(values: Tensor) -> int:
    """Index of the largest value of a 1-d tensor, the lowest on ties (torch leaves it open)."""
    return int((values == values.max()).nonzero()[0, 0])


# ---------------------------------------------------------------- shaping: one rule for p and q


@dataclass(frozen=True, slots=True)
class Shaping:
    """Sampling parameters of one request that act on a row. temperature 0 is greedy.

    top_k 0, top_p 1 and min_p 0 are off. repetition_penalty 1, presence 0, frequency 0 are off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def penalize(
    logits: Tensor,
    shaping: Shaping,
    bias: tuple[Tensor, Tensor] | None = None,
    prompt_ids: Tensor | None = None,
    output_ids: Tensor | None = None,
    output_counts: Tensor | None = None,
) -> Tensor:
    """Add logit bias, then apply repetition, presence and frequency penalties. Returns a new row.

    logits: [vocab_size]; bias: (ids int64, values). prompt_ids: distinct ids of the prompt;
    output_ids, output_counts: distinct ids of the output and how often each occurred. Repetition
    counts prompt and output; presence and frequency count output only.
    """
    row = logits.clone()
    if bias is not None:
        row[bias[0]] += bias[1].to(row.dtype)
    if shaping.repetition_penalty != 1.0:
        seen = [ids for ids in (prompt_ids, output_ids) if ids is not None and ids.numel()]
        if seen:
            ids = torch.cat(seen).unique()
            values = row[ids]
            scaled = (values / shaping.repetition_penalty, values * shaping.repetition_penalty)
            row[ids] = torch.where(values > 0, *scaled)
    if output_ids is not None and output_counts is not None and output_ids.numel():
        counts = output_counts.to(row.dtype)
        row[output_ids] -= shaping.presence_penalty + shaping.frequency_penalty * counts
    return row


def shape(
    logits: Tensor, shaping: Shaping, vocab_size: int, suppressed: Sequence[int] = ()
) -> Tensor:
    """Turn penalised logits into the row that is sampled: weights [width], 0 off the support.

    Order: temperature, top-k, top-p on the renormalised survivors, min-p relative to the largest.
    Ids >= vocab_size (padding) and suppressed ids have weight 0. x survives top-k iff fewer than
    top_k logits exceed it, and top-p iff the mass strictly above it is < top_p of the survivors':
    ties at a threshold are all kept, so no rule depends on a sort order. At temperature 0 the row
    is one-hot at the argmax, lowest id on ties. Keeps the dtype of `logits`.
    Raises FloatingPointError when a logit of a real id is NaN or +inf, or none is finite.
    """
    scores = logits
    if vocab_size < logits.numel() or suppressed:
        scores = logits.clone()
        scores[vocab_size:] = -torch.inf
    top = float(scores.max())  # NaN propagates through max
    if not math.isfinite(top):
        raise FloatingPointError(f"logits have no finite maximum (it is {top})")
    if suppressed:
        scores[torch.as_tensor(suppressed, dtype=torch.int64)] = -torch.inf
        top = float(scores.max())
        if not math.isfinite(top):
            raise FloatingPointError("every token id with a finite logit is suppressed")
    if shaping.temperature == 0.0:
        greedy = torch.zeros_like(scores)
        greedy[lowest_argmax(scores)] = 1.0
        return greedy
    weights = (scores - top).div_(shaping.temperature).exp_()
    if 0 < shaping.top_k < vocab_size:
        weights = weights * (scores >= torch.topk(scores, shaping.top_k).values[-1])
    if shaping.top_p < 1.0:
        weights = weights * (weights >= _top_p_threshold(weights, shaping.top_p))
    if shaping.min_p > 0.0:
        weights = weights * (weights >= shaping.min_p)  # the largest weight is exp(0) = 1
    return weights


def _top_p_threshold(weights: Tensor, top_p: float) -> Tensor:
    """The smallest weight that nucleus truncation keeps: mass strictly above it < top_p * total."""
    row_total = float(total(weights))
    heavy = _heavy_ids(weights, (1.0 - top_p) * row_total)
    largest = weights[heavy].sort(descending=True).values
    mass_through = largest.to(torch.float64).cumsum(0)
    beyond = (mass_through >= top_p * row_total).nonzero()
    # None when top_p is so near 1 that rounding leaves the whole row below the bound: keep all.
    return largest[beyond[0, 0]] if beyond.numel() else largest[-1]


def _heavy_ids(weights: Tensor, dispensable_mass: float) -> Tensor:
    """Ids (int64, ascending) whose weight alone reaches dispensable_mass / n, zeros left out.

    The others weigh less than dispensable_mass together, so a smallest set that may leave out
    that much never needs them: exact, and a peaked row costs no full sort.
    """
    least = max(dispensable_mass / weights.numel(), math.ulp(0.0))
    return torch.from_numpy(np.flatnonzero(weights.numpy() >= least))


def truncate(weights: Tensor, dropped_mass: float, max_ids: int) -> tuple[Tensor, Tensor, float]:
    """Keep the smallest set of mass >= 1 - dropped_mass, at most max_ids ids (DESIGN section 5).

    Done before the draw, so the truncated row *is* q: exact, at a cost in acceptance of at most
    the mass dropped. Of ids tied at the smallest weight kept, the lowest stay. Returns (ids int64
    ascending, weights at those ids, mass really dropped).
    """
    row_total = float(weights.sum(dtype=torch.float64))
    ids = _heavy_ids(weights, dropped_mass * row_total)
    kept = weights[ids]
    if ids.numel() > max_ids:  # selecting is cheaper than sorting the thousands of a flat row
        least = float(np.partition(kept.numpy(), -max_ids)[-max_ids])
        ids, kept = _drop_lightest(ids, kept, least, ids.numel() - max_ids)
    mass = float(kept.sum(dtype=torch.float64))
    if mass >= (1.0 - dropped_mass) * row_total:
        largest = kept.sort(descending=True).values
        mass_through = largest.to(torch.float64).cumsum(0)
        enough = (mass_through >= (1.0 - dropped_mass) * row_total).nonzero()
        num_kept = int(enough[0, 0]) + 1 if enough.numel() else kept.numel()
        least, num_dropped = float(largest[num_kept - 1]), kept.numel() - num_kept
        ids, kept = _drop_lightest(ids, kept, least, num_dropped)
        mass = float(mass_through[num_kept - 1])
    return ids, kept, max(0.0, 1.0 - mass / row_total)


def _drop_lightest(
    ids: Tensor, weights: Tensor, least: float, num_dropped: int
) -> tuple[Tensor, Tensor]:
    """Drop num_dropped entries: those below `least`, then the highest ids that equal it."""
    stays = weights >= least
    surplus = num_dropped - (ids.numel() - int(stays.sum()))
    if surplus:
        stays[(weights == least).nonzero()[-surplus:, 0]] = False
    return ids[stays], weights[stays]


def total(row: Row) -> Number:
    """Sum of a row's weights in ascending id order: float64 for tensors, exact for other types.

    Sequential (cumsum) rather than pairwise: adding zeros changes nothing, so a sparse and a dense
    encoding of one row have the same total, bit for bit, on both sides of the wire.
    """
    return exact(row).cumsum(0)[-1] if isinstance(row, Tensor) else sum(row)


def exact(row: Row) -> Row:
    """A row whose differences do not drown in rounding: float64 for tensors, others as they are."""
    return row.to(torch.float64) if isinstance(row, Tensor) else row


# ---------------------------------------------------------------- accept, residual, bonus


@dataclass(frozen=True, slots=True)
class Coin:
    """Ask whether candidate `index` is accepted: True iff u * draft_mass < target_mass.

    With P = sum(p), Q = sum(q): draft_mass = q(x) P and target_mass = p(x) Q, so nothing is
    divided and the comparison is exact for exact number types.
    """

    index: int
    draft_mass: Number
    target_mass: Number


@dataclass(frozen=True, slots=True)
class Draw:
    """Ask for one token drawn from `weights` (unnormalised) for position base_len + index."""

    index: int
    purpose: Purpose
    weights: Row


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of a round: accepted candidates, then at most one recovered or bonus token.

    tokens: the emitted ids. closing: RESIDUAL, BONUS or COUPLED for the draw that closed the
    round; None when an accepted stop token closed it (rule 5: no bonus, nothing after it).
    """

    num_accepted: int
    tokens: tuple[int, ...]
    closing: Purpose | None


Deciding = Generator[Coin | Draw, Any, Decision]


def decide(
    target_rows: Sequence[Row],
    draft_rows: Sequence[Row],
    candidates: Sequence[int],
    stop_ids: frozenset[int] = frozenset(),
) -> Deciding:
    """Judge a block of candidates exactly (Leviathan et al. 2211.17192, algorithm 1).

    target_rows: k+1 rows, row i for position base_len + i, each read once and only if judged (so
    they may be computed on access). draft_rows: the k rows the candidates were drawn from. Yields
    a `Coin` for each judged candidate and a `Draw` for the closing token; the caller sends the
    answers back. On the first rejection the residual [p - q]+ is drawn from; if rounding leaves it
    zero everywhere, p itself is. Zero mass is never divided by.
    """
    for index, candidate in enumerate(candidates):
        p, q = target_rows[index], draft_rows[index]
        p_total, q_total = total(p), total(q)
        accepted = yield Coin(index, q[candidate] * p_total, p[candidate] * q_total)
        if not accepted:
            surplus = exact(p) * q_total - exact(q) * p_total
            residual = surplus * (surplus > 0)
            weights = residual if bool((residual > 0).any()) else p
            recovered = yield Draw(index, Purpose.RESIDUAL, weights)
            return Decision(index, (*candidates[:index], recovered), Purpose.RESIDUAL)
        if candidate in stop_ids:
            return Decision(index + 1, tuple(candidates[: index + 1]), None)
    num_accepted = len(candidates)
    bonus = yield Draw(num_accepted, Purpose.BONUS, target_rows[num_accepted])
    return Decision(num_accepted, (*candidates, bonus), Purpose.BONUS)


def decide_coupled(
    target_rows: Sequence[Row],
    candidates: Sequence[int],
    stop_ids: frozenset[int] = frozenset(),
) -> Deciding:
    """Keep candidates while they equal the target's own draw (Daliri et al., arXiv 2408.07978).

    The emitted token is always the target's; with races shared by position the output depends on
    seed, target and parameters only. Greedy decoding is this rule with argmax for the draw.
    """
    for index, candidate in enumerate(candidates):
        token = yield Draw(index, Purpose.COUPLED, target_rows[index])
        if token != candidate:
            return Decision(index, (*candidates[:index], token), Purpose.COUPLED)
        if candidate in stop_ids:
            return Decision(index + 1, tuple(candidates[: index + 1]), None)
    num_accepted = len(candidates)
    token = yield Draw(num_accepted, Purpose.COUPLED, target_rows[num_accepted])
    return Decision(num_accepted, (*candidates, token), Purpose.COUPLED)


def run(deciding: Deciding, answer: Callable[[Coin | Draw], Any]) -> Decision:
    """Drive a decision to its end, answering each request with `answer`."""
    try:
        request = next(deciding)
        while True:
            request = deciding.send(answer(request))
    except StopIteration as finished:
        decision: Decision = finished.value
        return decision


def philox_answer(seed: int, base_len: int) -> Callable[[Coin | Draw], Any]:
    """Answer coins and draws from the request's random streams (DESIGN section 3)."""

    def answer(request: Coin | Draw) -> bool | int:
        position = base_len + request.index
        if isinstance(request, Coin):
            return bool(coin(seed, position, base_len) * request.draft_mass < request.target_mass)
        round_key = 0 if request.purpose is Purpose.COUPLED else base_len
        return race(request.weights, seed, position, round_key, request.purpose)

    return answer


def greedy_answer(request: Coin | Draw) -> int:
    """Answer draws with the argmax, lowest id on ties."""
    if isinstance(request, Coin):
        raise TypeError("greedy decoding compares tokens and throws no coins")
    return lowest_argmax(request.weights)
