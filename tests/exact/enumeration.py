"""Exact laws of generated sequences, by enumeration of every branch with rational probabilities.

The deciders that are enumerated are generators with the interface of `kernels.reference.decide`:
the production code itself. A generator cannot be forked, so each branch replays it with its own
script of answers. Rows are numpy object arrays of Fractions, unnormalised like production rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from kernels import reference
from kernels.reference import Coin, Deciding, Decision, Draw

Row = Any  # numpy object array of Fractions
Prefix = tuple[int, ...]
Model = Callable[[Prefix], Row]
Law = dict[Prefix, Fraction]
Decider = Callable[[Sequence[Row], Sequence[Row], Sequence[int], frozenset[int]], Deciding]


def fractions(*weights: int | Fraction | str) -> Row:
    """A row of exact weights."""
    return np.array([Fraction(weight) for weight in weights], dtype=object)


def law_of(row: Row) -> list[Fraction]:
    """Probabilities of an unnormalised row."""
    mass = sum(row)
    return [weight / mass for weight in row]


def context_model(salt: int, vocab_size: int, num_zeros: int = 0) -> Model:
    """A model whose row depends on every token of the context, with `num_zeros` impossible ids.

    Weights are small integers, so that all arithmetic stays cheap; totals differ between rows.
    """

    def row(prefix: Prefix) -> Row:
        state = salt
        for token in prefix:
            state = (state * 31 + 7 * (token + 1) + 3) % 1009
        weights = [Fraction(1 + (state * (x + 3) + x * x) % 11) for x in range(vocab_size)]
        for offset in range(num_zeros):
            weights[(state + offset) % vocab_size] = Fraction(0)
        return np.array(weights, dtype=object)

    return row


def branches(request: Coin | Draw) -> list[tuple[bool | int, Fraction]]:
    """Every answer to a request with its probability; u is uniform on (0, 1)."""
    if isinstance(request, Coin):
        accept = min(Fraction(1), Fraction(request.target_mass) / Fraction(request.draft_mass))
        return [(answer, p) for answer, p in ((True, accept), (False, 1 - accept)) if p]
    return [(token, p) for token, p in enumerate(law_of(request.weights)) if p]


def outcomes(start: Callable[[], Deciding]) -> Iterator[tuple[Decision, Fraction]]:
    """Every outcome of a round with its probability, one per path through coins and draws."""
    pending: list[tuple[list[Any], Fraction]] = [([], Fraction(1))]
    while pending:
        script, probability = pending.pop()
        deciding = start()
        try:
            request = next(deciding)
            for answer in script:
                request = deciding.send(answer)
        except StopIteration as finished:
            yield finished.value, probability
            continue
        pending += [([*script, answer], probability * p) for answer, p in branches(request)]


def autoregressive(target: Model, prompt: Prefix, budget: int, stops: frozenset[int]) -> Law:
    """The law of plain decoding: up to `budget` tokens, ending at the first stop token."""
    law: Law = defaultdict(Fraction)

    def extend(output: Prefix, probability: Fraction) -> None:
        if len(output) == budget or (output and output[-1] in stops):
            law[output] += probability
            return
        for token, p in enumerate(law_of(target(prompt + output))):
            if p:
                extend((*output, token), probability * p)

    extend((), Fraction(1))
    return dict(law)


def drafted(draft: Model, prefix: Prefix, k: int) -> Iterator[tuple[Prefix, list[Row], Fraction]]:
    """Every block of k candidates with the rows it was drawn from and its probability."""
    blocks: list[tuple[Prefix, list[Row], Fraction]] = [((), [], Fraction(1))]
    for _ in range(k):
        blocks = [
            ((*tokens, token), [*rows, row], probability * p)
            for tokens, rows, probability in blocks
            for row in (draft(prefix + tokens),)
            for token, p in enumerate(law_of(row))
            if p
        ]
    yield from blocks


@dataclass(frozen=True)
class Protocol:
    """The multi-round loop around a decider: what is drafted, judged, committed and cut.

    draft_counts: candidates of each round, the last one repeating; 0 is a plain step.
    recorded_draft: the rows handed to the decider where they are not the ones drawn from (a fault).
    """

    target: Model
    draft: Model
    draft_counts: tuple[int, ...]
    budget: int
    stops: frozenset[int] = frozenset()
    decider: Decider = reference.decide
    recorded_draft: Model | None = None
    _memo: dict[tuple[Prefix, int], list[tuple[Prefix, Fraction]]] = field(default_factory=dict)

    def round(self, prefix: Prefix, k: int) -> list[tuple[Prefix, Fraction]]:
        """Tokens emitted by one round from `prefix` with k candidates, with their probabilities."""
        if (prefix, k) in self._memo:
            return self._memo[prefix, k]
        emitted: dict[Prefix, Fraction] = defaultdict(Fraction)
        for candidates, draft_rows, drawn in drafted(self.draft, prefix, k):
            target_rows = [self.target(prefix + candidates[:i]) for i in range(k + 1)]
            if self.recorded_draft is not None:
                draft_rows = [self.recorded_draft(prefix + candidates[:i]) for i in range(k)]
            deciding = lambda c=candidates, p=target_rows, q=draft_rows: (  # noqa: E731
                self.decider(p, q, c, self.stops)
            )
            for decision, probability in outcomes(deciding):
                emitted[decision.tokens] += drawn * probability
        self._memo[prefix, k] = list(emitted.items())
        return self._memo[prefix, k]

    def law(self, prompt: Prefix = (0,)) -> Law:
        """The law of the whole output. k never exceeds the remaining budget less one (rule 5)."""
        law: Law = defaultdict(Fraction)

        def extend(output: Prefix, probability: Fraction, round_index: int) -> None:
            if len(output) >= self.budget or (output and output[-1] in self.stops):
                law[output] += probability
                return
            wanted = self.draft_counts[min(round_index, len(self.draft_counts) - 1)]
            k = min(wanted, self.budget - len(output) - 1)
            for tokens, p in self.round(prompt + output, k):
                extend(output + tokens, probability * p, round_index + 1)

        extend((), Fraction(1), 0)
        return dict(law)
