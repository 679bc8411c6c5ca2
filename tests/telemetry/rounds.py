"""Rounds of the production accept path on a small vocabulary, with faults planted on request.

`kernels.reference.decide` itself is run, on numpy rows; only the answers (coins and draws) come
from a seeded numpy generator, which is much faster than the product's streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.reference import Coin, Draw, decide, run
from kernels.streams import Purpose
from specmesh.detectors import LawWatch

VOCAB_SIZE = 8
NUM_CONTEXTS = 64
NUM_DRAFT_TOKENS = 4

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """What the target reports of a round: see Verdict.judged and Verdict.emitted."""

    num_accepted: int
    overlaps: list[float]
    is_argmax: list[bool]
    max_probs: list[float]


def first_alarms(rounds: Iterable[Round]) -> dict[str, int]:
    """Rounds after which each detector first raised its alarm."""
    watch, found = LawWatch(), {}
    for number, step in enumerate(rounds, start=1):
        if watch.observe_candidates(step.num_accepted, step.overlaps):
            found["acceptance"] = number
        if watch.observe_emitted(step.is_argmax, step.max_probs):
            found["argmax"] = number
    return found


def _softmax(logits: Rows) -> Rows:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def simulate(fault: str, seed: int, num_rounds: int) -> Iterator[Round]:
    """Yield rounds of one long sequence over a context-dependent model (context: last two tokens).

    The draft is what a smaller model is: less certain than the target, and noisy. fault: "none";
    "temperature" (the draft samples at 0.7 what it sends at 1.0); "residual_from_p";
    "bonus_from_previous_row".
    """
    rng = np.random.default_rng(seed)
    target_logits = rng.normal(0.0, 2.0, (NUM_CONTEXTS, VOCAB_SIZE))
    draft_logits = 0.7 * target_logits + rng.normal(0.0, 0.7, (NUM_CONTEXTS, VOCAB_SIZE))
    target, draft = _softmax(target_logits), _softmax(draft_logits)
    sampled = _softmax(draft_logits / 0.7) if fault == "temperature" else draft
    overlaps = np.minimum(target, draft).sum(axis=-1).tolist()
    tops, top_probs = target.argmax(axis=-1).tolist(), target.max(axis=-1).tolist()
    context = 0
    for _ in range(num_rounds):
        contexts, candidates = [context], []
        for _ in range(NUM_DRAFT_TOKENS):
            candidates.append(_draw(sampled[contexts[-1]], rng))
            contexts.append(_next(contexts[-1], candidates[-1]))
        target_rows = [target[index] for index in contexts]
        draft_rows = [draft[index] for index in contexts[:-1]]

        def answer(request: Coin | Draw, rows: list[Rows] = target_rows) -> bool | int:
            if isinstance(request, Coin):
                return bool(rng.random() * request.draft_mass < request.target_mass)
            weights = request.weights
            if fault == "residual_from_p" and request.purpose is Purpose.RESIDUAL:
                weights = rows[request.index]
            if fault == "bonus_from_previous_row" and request.purpose is Purpose.BONUS:
                weights = rows[request.index - 1]
            return _draw(weights, rng)

        decision = run(decide(target_rows, draft_rows, candidates), answer)
        num_judged = min(decision.num_accepted + 1, NUM_DRAFT_TOKENS)
        emitted = list(zip(decision.tokens, contexts, strict=False))
        yield Round(
            decision.num_accepted,
            [overlaps[index] for index in contexts[:num_judged]],
            [token == tops[index] for token, index in emitted],
            [top_probs[index] for _, index in emitted],
        )
        for token in decision.tokens:
            context = _next(context, token)


def _draw(weights: Rows, rng: np.random.Generator) -> int:
    mass_through = weights.cumsum()
    return int(mass_through.searchsorted(rng.random() * mass_through[-1], side="right"))


def _next(context: int, token: int) -> int:
    return (context * VOCAB_SIZE + token) % NUM_CONTEXTS
