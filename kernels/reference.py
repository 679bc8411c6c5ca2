"""The specification: what every kernel computes, in plain PyTorch, in the order of the theory.

A CPU device runs this code in production; a GPU runs the Triton twin of each function and is
tested against it. p is the target distribution, q the draft distribution (Leviathan et al.,
arXiv 2211.17192, section 2). A *row* holds unnormalised weights over the vocabulary: its law is
w / sum(w), with the sum taken in float64 over ascending token ids. `decide` and `decide_coupled`
work on any number type (tensors, or numpy object arrays of Fractions), so that the law of the
production code itself can be enumerated exactly.

Random words and races are in `kernels/reference_races.py`, and imported here. Attention and layer
references are in `kernels/reference_attention.py` and
`kernels/reference_layers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.reference_races import (
    coin,
    exponentials,
    philox_words,
    race,
    race_uniforms,
    races,
    uniform,
)
from kernels.streams import Purpose

__all__ = [
    "coin",
    "exponentials",
    "philox_words",
    "race",
    "race_uniforms",
    "races",
    "uniform",
]

Row = Any  # Tensor [vocab_size], `SparseRow`, or a numpy object array of Fractions
Number = Any


def _largest(values: Tensor) -> float:
    """The largest value, NaN where there is one. A pass of numpy is half the price of torch's."""
    return float(values.numpy().max())


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
    is one-hot at the argmax, lowest id on ties. Keeps the dtype of `logits`, one that numpy has.
    Raises FloatingPointError when a logit of a real id is NaN or +inf, or none is finite.
    """
    scores = logits
    if vocab_size < logits.numel() or suppressed:
        scores = logits.clone()
        scores[vocab_size:] = -torch.inf
    top = _largest(scores)
    if not math.isfinite(top):
        raise FloatingPointError(f"logits have no finite maximum (it is {top})")
    if suppressed:
        scores[torch.as_tensor(suppressed, dtype=torch.int64)] = -torch.inf
        top = _largest(scores)
        if not math.isfinite(top):
            raise FloatingPointError("every token id with a finite logit is suppressed")
    if shaping.temperature == 0.0:
        greedy = torch.zeros_like(scores)
        greedy[lowest_argmax(scores)] = 1.0
        return greedy
    values = scores.numpy()
    weights = torch.from_numpy(values - values.dtype.type(top))
    if shaping.temperature != 1.0:  # dividing by 1 changes no bit
        weights.div_(shaping.temperature)
    weights.exp_()
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
    row = weights.numpy()
    row_total = float(row.sum(dtype=np.float64))
    ids = _heaviest(row, max_ids, dropped_mass * row_total / row.size)  # as in `_heavy_ids`
    kept = row[ids]
    largest = np.sort(kept)[::-1][:max_ids]
    mass_through = largest.cumsum(dtype=np.float64)
    needed = (1.0 - dropped_mass) * row_total
    num_kept = min(int(mass_through.searchsorted(needed)) + 1, largest.size)
    ids, kept = _drop_lightest(ids, kept, largest[num_kept - 1], ids.size - num_kept)
    dropped = max(0.0, 1.0 - float(mass_through[num_kept - 1]) / row_total)
    return torch.from_numpy(ids), torch.from_numpy(kept), dropped


def _heaviest(row: np.ndarray, num_ids: int, least: float) -> np.ndarray:
    """Ids (int64, ascending) of weight >= least, or enough: the num_ids heaviest are there.

    Of 2 num_ids groups of ids, num_ids have a largest weight that reaches a threshold, so as many
    ids do, and not many more: one pass finds it, and what is selected from stays small.
    """
    num_each = row.size // (2 * num_ids)
    if num_each > 1:
        groups = row[: num_each * 2 * num_ids].reshape(num_each, -1).max(axis=0)
        groups.sort()
        least = max(least, groups[-num_ids])
    return (row >= least if least > 0 else row > 0).nonzero()[0]


def _drop_lightest(
    ids: np.ndarray, weights: np.ndarray, least: float, num_dropped: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drop num_dropped entries: those below `least`, then the highest ids that equal it."""
    if not num_dropped:
        return ids, weights
    stays = (weights >= least).nonzero()[0]
    num_kept = ids.size - num_dropped
    if stays.size > num_kept:
        tied = (weights[stays] == least).nonzero()[0]
        stays = np.delete(stays, tied[num_kept - stays.size :])
    return ids[stays], weights[stays]


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row by its support: weights, float32 [num_ids], at ids, int64 [num_ids] ascending."""

    ids: Tensor
    weights: Tensor

    def __getitem__(self, token_id: int) -> float:
        """Weight of one token id; 0 outside the support."""
        ids = self.ids.numpy()
        index = int(ids.searchsorted(token_id))
        found = index < ids.size and ids[index] == token_id
        return float(self.weights.numpy()[index]) if found else 0.0


def weight(row: Row, token_id: int) -> Number:
    """A row's weight of one token id: a float for tensors, as it is for other types."""
    return float(row.numpy()[token_id]) if isinstance(row, Tensor) else row[token_id]


def total(row: Row) -> Number:
    """Sum of a row's weights in ascending id order: in float64 for tensors, exact for other types.

    Sequential (cumsum) rather than pairwise: adding zeros changes nothing, so a sparse and a dense
    encoding of one row have the same total, bit for bit, on both sides of the wire.
    """
    if isinstance(row, SparseRow):
        row = row.weights
    if isinstance(row, Tensor):
        return float(row.cumsum(0, dtype=torch.float64)[-1])
    return sum(row)


def exact(row: Row) -> Row:
    """A row whose differences do not drown in rounding: float64 for tensors, others as they are."""
    return row.to(torch.float64) if isinstance(row, Tensor) else row


def residual(p: Row, q: Row, p_total: Number, q_total: Number) -> Row:
    """[p Q - q P]+ with P = sum(p), Q = sum(q): the residual's weights, nothing divided."""
    if isinstance(q, SparseRow):  # the same bits: off the support p Q - 0 P is p Q
        surplus, ids = p.numpy().astype(np.float64), q.ids.numpy()
        surplus *= q_total
        on_support = surplus[ids] - q.weights.numpy().astype(np.float64) * p_total
        surplus[ids] = np.maximum(on_support, 0.0, out=on_support)
        return torch.from_numpy(surplus)
    surplus = exact(p) * q_total - exact(q) * p_total
    return surplus * (surplus > 0)


def is_zero(row: Row) -> bool:
    """Whether no weight of a row is positive."""
    return not (_largest(row) if isinstance(row, Tensor) else row.max()) > 0


# ---------------------------------------------------------------- accept, residual, bonus


@dataclass(frozen=True, slots=True)
class Coin:
    """Ask whether candidate `index` is accepted: True iff u * draft_mass < target_mass.

    With P = sum(p), Q = sum(q): draft_mass = q(x) P and target_mass = p(x) Q, so nothing is
    divided and the comparison is exact for exact number types. target_total, draft_total: P and Q,
    for whoever reports the judgement.
    """

    index: int
    draft_mass: Number
    target_mass: Number
    target_total: Number = 0
    draft_total: Number = 0


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
    they may be computed on access). draft_rows: the k rows the candidates were drawn from, dense or
    `SparseRow`. Yields a `Coin` for each judged candidate and a `Draw` for the closing token; the
    caller sends the answers back. On the first rejection the residual [p - q]+ is drawn from; if
    rounding leaves it zero everywhere, p itself is. Zero mass is never divided by.
    """
    for index, candidate in enumerate(candidates):
        p, q = target_rows[index], draft_rows[index]
        p_total, q_total = total(p), total(q)
        draft_mass = weight(q, candidate) * p_total
        target_mass = weight(p, candidate) * q_total
        accepted = yield Coin(index, draft_mass, target_mass, p_total, q_total)
        if not accepted:
            surplus = residual(p, q, p_total, q_total)
            recovered = yield Draw(index, Purpose.RESIDUAL, p if is_zero(surplus) else surplus)
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
