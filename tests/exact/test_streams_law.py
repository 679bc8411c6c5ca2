"""Random streams as used: races follow their weights, and no stream is shared by two purposes.

Chi-square tests run on fixed seeds, so they are reproducible. Each states its false-alarm rate: the
chance that a right implementation would have failed had the seeds been drawn at random.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from kernels import reference
from kernels.reference import Coin, Draw, race
from kernels.streams import Purpose

FALSE_ALARM = 1e-6


def chi_square(observed: Counter[Any], expected: dict[Any, float], num_samples: int) -> float:
    """p-value of Pearson's test; outcomes of expected count below 5 are pooled."""
    assert set(observed) <= {outcome for outcome, p in expected.items() if p > 0}
    cells = [(observed[outcome], p * num_samples) for outcome, p in expected.items() if p > 0]
    large = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if small:
        large.append((sum(o for o, _ in small), sum(e for _, e in small)))
    statistic = sum((o - e) ** 2 / e for o, e in large)
    return float(chi2.sf(statistic, len(large) - 1))


def law(row: Tensor) -> list[float]:
    """Probabilities of a row."""
    weights = row.double()
    return [float(p) for p in weights / weights.sum()]


@pytest.mark.parametrize(
    "weights",
    [
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.7, 0.2, 0.06, 0.03, 0.01],
        [3e4, 0.0, 1e4, 0.0, 5e3, 5e3],
        [1.0, 1e-3, 1e-3, 0.5],
    ],
)
def test_race_follows_its_weights(weights: list[float]) -> None:
    """10,000 draws over positions and seeds, zeros never drawn. False-alarm rate 1e-6 each."""
    row = torch.tensor(weights)
    observed = Counter(
        race(row, seed, position, 3, Purpose.BONUS)
        for seed in range(100)
        for position in range(100)
    )
    assert chi_square(observed, dict(enumerate(law(row))), 10_000) > FALSE_ALARM


def test_race_resolves_small_probabilities() -> None:
    """A weight of 1e-8 wins at the uniforms it must: the winning threshold is P to 1e-6 relative.

    No sample could count such an event, so the race is solved for the uniform at which it flips.
    """
    rare = 1e-8
    weights = torch.tensor([1.0, rare])
    wins = 0.0
    # P(id 1 wins) = mean over u_0 of the u_1 below which E_1 / w_1 < E_0, by midpoint rule.
    for cell in range(1000):
        time_0 = -np.log1p(-(cell + 0.5) / 1000)
        wins += -np.expm1(-time_0 * float(weights[1])) / 1000
    assert wins == pytest.approx(rare / (1 + rare), rel=2e-3)
    words = torch.arange(0, 4096)
    finest = reference.uniform(words).double()
    assert float(finest[0]) == 2.0**-33
    assert bool((finest[1:] > finest[:-1]).all())  # every word has its own uniform near 0


def test_race_with_ids_is_the_race_over_the_dense_row() -> None:
    """A sparse row and its dense form draw the same token: noise is keyed by token id."""
    generator = torch.Generator().manual_seed(5)
    for seed in range(40):
        dense = torch.zeros(5000)
        ids = torch.randperm(5000, generator=generator)[: 1 + seed * 7].sort().values
        dense[ids] = torch.rand(ids.numel(), generator=generator) + 1e-3
        sparse = race(dense[ids], seed, 9, 4, Purpose.PROPOSE, ids)
        assert sparse == race(dense, seed, 9, 4, Purpose.PROPOSE)


def test_race_pruning_changes_no_draw() -> None:
    """The race equals the plain argmin of E / w over every id, whatever it skips."""
    generator = torch.Generator().manual_seed(6)
    for seed in range(200):
        row = torch.exp(4 * torch.randn(300, generator=generator)) * (
            torch.rand(300, generator=generator) > 0.3
        )
        times = reference.exponentials(seed, torch.arange(300), 5, 2, Purpose.BONUS) / row.double()
        assert race(row, seed, 5, 2, Purpose.BONUS) == int(times.argmin())


def test_float16_rows_have_the_law_of_their_own_bits() -> None:
    """A rounded row is its own law: 10,000 draws. False-alarm rate 1e-6."""
    row = torch.tensor([0.1, 0.2, 0.3, 0.05]).half().float()
    observed = Counter(race(row, seed, 1, 1, Purpose.PROPOSE) for seed in range(10_000))
    assert chi_square(observed, dict(enumerate(law(row))), 10_000) > FALSE_ALARM


def test_a_race_without_runners_is_refused() -> None:
    """No weight, no draw: ValueError and not an arbitrary id."""
    with pytest.raises(ValueError, match="positive weight"):
        race(torch.zeros(4), 1, 1, 1, Purpose.BONUS)


# ---------------------------------------------------------------- whole sequences

# Bigram rows over four ids. Residuals have two ids or more, whose shares in q differ from theirs in
# the residual: what reused noise would distort. The draft ignores its context, so that a redraw of
# a position on the same noise would repeat the candidate.
TARGET = torch.tensor(
    [[0.05, 0.45, 0.4, 0.1], [0.05, 0.1, 0.4, 0.45], [0.4, 0.05, 0.1, 0.45], [0.1, 0.4, 0.45, 0.05]]
)
DRAFT = torch.tensor([[0.6, 0.3, 0.05, 0.05]]).repeat(4, 1)
NUM_TOKENS = 3
NUM_SEQUENCES = 5000

DraftDraw = Callable[[Tensor, int, int, int], int]
Answer = Callable[[int, int], Callable[[Coin | Draw], Any]]


def propose(row: Tensor, seed: int, position: int, base_len: int) -> int:
    """The draft's draw as DESIGN section 3 has it."""
    return race(row, seed, position, base_len, Purpose.PROPOSE)


@dataclass(frozen=True)
class Rounds:
    """Bigram models through production draws, round by round, k from a policy.

    next_k(unjudged candidates of the round before) -> candidates to draft.
    """

    next_k: Callable[[tuple[int, ...]], int]
    draw: DraftDraw = propose
    answer: Answer = reference.philox_answer

    def sequence(self, seed: int) -> tuple[int, ...]:
        """One output of NUM_TOKENS tokens after the prompt (0,)."""
        tokens, unjudged = [0], ()
        while len(tokens) < NUM_TOKENS + 1:
            base_len = len(tokens)
            k = min(self.next_k(unjudged), NUM_TOKENS - base_len)
            candidates: list[int] = []
            for index in range(k):
                row = DRAFT[(tokens + candidates)[-1]]
                candidates.append(self.draw(row, seed, base_len + index, base_len))
            context = [tokens[-1], *candidates]
            decision = reference.run(
                reference.decide(
                    [TARGET[token] for token in context],
                    [DRAFT[token] for token in context[:-1]],
                    candidates,
                ),
                self.answer(seed, base_len),
            )
            tokens += decision.tokens
            unjudged = tuple(candidates[decision.num_accepted + 1 :])
        return tuple(tokens[1:])

    def p_value(self) -> float:
        """Chi-square of NUM_SEQUENCES sequences against the target's autoregressive law."""
        expected = {}
        for output in itertools.product(range(4), repeat=NUM_TOKENS):
            p, last = 1.0, 0
            for token in output:
                p, last = p * law(TARGET[last])[token], token
            expected[output] = p
        observed = Counter(self.sequence(seed) for seed in range(NUM_SEQUENCES))
        return chi_square(observed, expected, NUM_SEQUENCES)


def two(unjudged: tuple[int, ...]) -> int:
    """A fixed k."""
    del unjudged
    return 2


def peeking(unjudged: tuple[int, ...]) -> int:
    """A policy that looks at candidates which were drafted and never judged."""
    return 0 if unjudged and unjudged[0] != 0 else 2


def test_production_streams_give_the_target_s_law() -> None:
    """Multi-round sequences with k = 2 over production noise. False-alarm rate 1e-6."""
    assert Rounds(two).p_value() > FALSE_ALARM


def test_round_key_makes_the_redraw_of_an_unjudged_position_fresh() -> None:
    """Even a policy that peeks at unjudged candidates keeps the law. False-alarm rate 1e-6."""
    assert Rounds(peeking).p_value() > FALSE_ALARM


def test_chi_square_detects_a_round_key_dropped_from_the_counter() -> None:
    """Without base_len in the counter the redraw repeats what the policy saw: biased."""

    def draw(row: Tensor, seed: int, position: int, base_len: int) -> int:
        del base_len
        return propose(row, seed, position, 0)

    def answer(seed: int, base_len: int) -> Callable[[Coin | Draw], Any]:
        def keyed_by_position_only(request: Coin | Draw) -> Any:
            position = base_len + request.index
            if isinstance(request, Coin):
                u = reference.coin(seed, position, 0)
                return bool(u * request.draft_mass < request.target_mass)
            return race(request.weights, seed, position, 0, request.purpose)

        return keyed_by_position_only

    assert Rounds(peeking, draw, answer).p_value() < FALSE_ALARM


def test_chi_square_detects_noise_reused_between_proposal_and_residual() -> None:
    """The residual race on the proposal's noise remembers that the candidate won: biased."""

    def answer(seed: int, base_len: int) -> Callable[[Coin | Draw], Any]:
        right = reference.philox_answer(seed, base_len)

        def reusing(request: Coin | Draw) -> Any:
            if isinstance(request, Draw) and request.purpose is Purpose.RESIDUAL:
                request = Draw(request.index, Purpose.PROPOSE, request.weights)
            return right(request)

        return reusing

    assert Rounds(two, answer=answer).p_value() < FALSE_ALARM


def test_chi_square_detects_noise_reused_between_proposal_and_coin() -> None:
    """A coin taken from the proposal's stream knows which candidate it judges: biased."""

    def answer(seed: int, base_len: int) -> Callable[[Coin | Draw], Any]:
        right = reference.philox_answer(seed, base_len)

        def reusing(request: Coin | Draw) -> Any:
            if isinstance(request, Coin):
                ids = torch.zeros(1, dtype=torch.int64)
                position = base_len + request.index
                u = reference.race_uniforms(seed, ids, position, base_len, Purpose.PROPOSE)
                return bool(float(u) * request.draft_mass < request.target_mass)
            return right(request)

        return reusing

    assert Rounds(two, answer=answer).p_value() < FALSE_ALARM
