"""The law through real gRPC services and a real decoder: over 100,000 rounds, every rule and place.

One run generates all sequences, with all rules, placements and sampling parameters mixed in the
same batches. The target's law is worked out apart, from one cold pass over each whole sequence and
an oracle that shapes rows without sorting. The seeds are fixed, so the outcome is reproducible. The
tests below would fail a right implementation, had the seeds been drawn at random, with probability
FALSE_ALARM a statistic: at most 1e-4 for all of them together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from kernels import reference
from specmesh.engine.decoder import Decoder
from tests.exact import mutants
from tests.exact.grpc_sessions import Generation, serve
from tests.exact.tiny_llama import VOCAB_SIZE, logits_after, tiny_llama
from tests.rpc.peers import AT_COORDINATOR, AT_TARGET, COUPLED, RESIDUAL
from tests.telemetry.rounds import first_alarms

FALSE_ALARM = 1e-6
PROMPT = [1, 3]
MAX_TOKENS = 16
NUM_SEQUENCES = 480  # of each combination; 100,000 rounds in all
WAVE = 24  # sequences of each combination that run at once
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.15},
    "penalties": {
        "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": -0.15,
    },
}  # fmt: skip
RULES = {"residual": RESIDUAL, "coupled": COUPLED}
PLACES = {"target": AT_TARGET, "coordinator": AT_COORDINATOR}
COMBINATIONS = list(itertools.product(RULES, PLACES, PARAMETERS))


def next_k(round_index: int) -> int:
    """Rounds with up to three candidates and plain ones in turn."""
    return (1, 3, 0, 1, 2, 0)[round_index % 6]


def generation(combination: tuple[str, str, str], number: int, seed: int) -> Generation:
    rule, place, parameters = combination
    return Generation(
        session_id=f"{rule}-{place}-{parameters}-{number}",
        prompt=list(PROMPT),
        max_tokens=MAX_TOKENS,
        next_k=next_k,
        seed=seed,
        params=PARAMETERS[parameters],
        rule=RULES[rule],
        decide_at=PLACES[place],
    )


@dataclass
class Run:
    """What one run gave."""

    target: Decoder
    draft: Decoder
    generations: dict[tuple[str, str, str], list[Generation]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """A target and a draft that agrees with it about two times in three."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    torch.set_num_threads(1)
    return (
        tiny_llama(folder / "target", seed=7),
        tiny_llama(folder / "draft", seed=7, noise_seed=5, noise=0.25),
    )


@pytest.fixture(scope="module")
def mixed_run(models: tuple[Decoder, Decoder]) -> Run:
    """All combinations, NUM_SEQUENCES of each, every seed its own."""
    seeds = itertools.count(1)
    generations = {
        combination: [generation(combination, i, next(seeds)) for i in range(NUM_SEQUENCES)]
        for combination in COMBINATIONS
    }
    waves = [
        [each for own in generations.values() for each in own[start : start + WAVE]]
        for start in range(0, NUM_SEQUENCES, WAVE)
    ]
    asyncio.run(serve(*models, waves))
    return Run(*models, generations)


# ---------------------------------------------------------------- the target's law, apart


def oracle(logits: np.ndarray, tokens: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Probabilities [num_seqs, MAX_TOKENS, VOCAB_SIZE] of each output token of whole sequences.

    logits: float64 [num_seqs, len, VOCAB_SIZE]; tokens: [num_seqs, len]. Counts, compares and adds;
    never sorts.
    """
    start = len(PROMPT)
    scores = logits[:, start - 1 : start - 1 + MAX_TOKENS].copy()
    one_hot = np.eye(VOCAB_SIZE)[tokens]
    before = np.cumsum(one_hot, axis=1)[:, start - 1 : start - 1 + MAX_TOKENS]
    output = before - before[:, :1]
    repetition = params.get("repetition_penalty", 1.0)
    penalised = np.where(scores > 0, scores / repetition, scores * repetition)
    scores = np.where(before > 0, penalised, scores)
    scores -= params.get("presence_penalty", 0.0) * (output > 0)
    scores -= params.get("frequency_penalty", 0.0) * output
    scores /= params.get("temperature", 1.0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exceeds = weights[..., None, :] > weights[..., :, None]  # [.., x, y]: y is heavier than x
    if "top_k" in params:
        weights = weights * (exceeds.sum(axis=-1) < params["top_k"])
    if "top_p" in params:
        mass_above = (exceeds * weights[..., None, :]).sum(axis=-1)
        weights = weights * (mass_above < params["top_p"] * weights.sum(axis=-1, keepdims=True))
    if "min_p" in params:
        weights = weights * (weights >= params["min_p"])
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def expected(decoder: Decoder, generations: Sequence[Generation]) -> np.ndarray:
    """The oracle's probabilities for every output token of these sequences under a model."""
    sequences = [each.tokens for each in generations]
    logits = logits_after(decoder, sequences).double().numpy()
    return oracle(logits, np.array(sequences), generations[0].params)


def favour_ranks(target_probs: np.ndarray, draft_probs: np.ndarray) -> np.ndarray:
    """Rank of each id by q / p, 0 for what the draft favours most; impossible ids come last."""
    possible = target_probs > 0
    ratio = np.where(possible, draft_probs / np.where(possible, target_probs, 1.0), -1.0)
    return np.asarray(np.argsort(np.argsort(-ratio, axis=-1), axis=-1))


def martingale_chi_square(
    generations: Sequence[Generation], target_probs: np.ndarray, ranks: np.ndarray | None = None
) -> tuple[float, int]:
    """(statistic, degrees of freedom) of observed minus expected counts over every token.

    Each emitted token minus its conditional law is a martingale difference, whatever rounds it came
    from. Sums are taken apart by the place in the round (0, 1, 2 or later) and by the token before,
    both known before the token is drawn; each sum's covariance is the sum of the conditional ones.
    With ranks ([num_seqs, MAX_TOKENS, VOCAB_SIZE], known before as well) tokens are counted by rank
    in place of id, and not taken apart by the token before.
    """
    differences: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(VOCAB_SIZE))
    covariances: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros((VOCAB_SIZE, VOCAB_SIZE)))
    identity = np.eye(VOCAB_SIZE)
    for number, each in enumerate(generations):
        places = [i for emitted in each.emitted_per_round for i in range(len(emitted))]
        last = each.prompt[-1]
        for index, (token, place) in enumerate(zip(each.output, places, strict=True)):
            p = target_probs[number, index]
            assert p[token] > 0, "a token outside the target's support was emitted"
            observed, stratum = identity[token], (min(place, 2), last)
            if ranks is not None:
                by_rank = np.argsort(ranks[number, index])
                observed, p, stratum = observed[by_rank], p[by_rank], (min(place, 2), -1)
            differences[stratum] += observed - p
            covariances[stratum] += np.diag(p) - np.outer(p, p)
            last = token
    statistic, freedom = 0.0, 0
    for stratum, difference in differences.items():
        values, vectors = np.linalg.eigh(covariances[stratum])
        kept = values > 5.0  # variances of fewer than a handful of events are not Gaussian
        statistic += float(((vectors[:, kept].T @ difference) ** 2 / values[kept]).sum())
        freedom += int(kept.sum())
    return statistic, freedom


def first_tokens_chi_square(
    generations: Sequence[Generation], target: Decoder
) -> tuple[float, int]:
    """Pearson's statistic of the first two output tokens against their joint law."""
    pairs = list(itertools.product(range(VOCAB_SIZE), repeat=2))
    params, padding = generations[0].params, [0] * (MAX_TOKENS - 2)
    sequences = [[*PROMPT, a, b, *padding] for a, b in pairs]
    logits = logits_after(target, sequences).double().numpy()
    rows = oracle(logits, np.array(sequences), params)
    joint = {(a, b): row[0, a] * row[1, b] for (a, b), row in zip(pairs, rows, strict=True)}
    assert sum(joint.values()) == pytest.approx(1.0)
    observed = Counter((each.output[0], each.output[1]) for each in generations)
    cells = [(observed[pair], p * len(generations)) for pair, p in joint.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    if sum(e for _, e in rest) >= 5:
        large.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    return sum((o - e) ** 2 / e for o, e in large), len(large) - 1


# ---------------------------------------------------------------- tests


def test_the_run_is_as_large_as_it_says(mixed_run: Run) -> None:
    """At least 100,000 rounds in multi-round sequences, with rejections and acceptances."""
    everything = [each for own in mixed_run.generations.values() for each in own]
    assert sum(len(each.emitted_per_round) for each in everything) >= 100_000
    assert all(len(each.output) == MAX_TOKENS for each in everything)
    for rule in RULES:
        own = [
            each for key, some in mixed_run.generations.items() if key[0] == rule for each in some
        ]
        acceptance = sum(e.num_accepted for e in own) / sum(e.num_judged for e in own)
        assert 0.4 < acceptance < 0.9


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_law_over_grpc(mixed_run: Run, combination: tuple[str, str, str]) -> None:
    """Each rule, place and set of parameters emits the target's law: by id, by rank, in pairs."""
    generations = mixed_run.generations[combination]
    target_probs = expected(mixed_run.target, generations)
    ranks = favour_ranks(target_probs, expected(mixed_run.draft, generations))
    for found, least in (
        (martingale_chi_square(generations, target_probs), 20),
        (martingale_chi_square(generations, target_probs, ranks), 5),
        (first_tokens_chi_square(generations, mixed_run.target), 4),
    ):
        statistic, freedom = found
        assert freedom >= least
        assert chi2.sf(statistic, freedom) > FALSE_ALARM


@pytest.mark.parametrize("rule", RULES)
def test_law_over_grpc_pooled(mixed_run: Run, rule: str) -> None:
    """Rank statistics of a rule's combinations summed: a small bias everywhere would show."""
    total, total_freedom = 0.0, 0
    for combination, generations in mixed_run.generations.items():
        if combination[0] == rule:
            target_probs = expected(mixed_run.target, generations)
            ranks = favour_ranks(target_probs, expected(mixed_run.draft, generations))
            statistic, freedom = martingale_chi_square(generations, target_probs, ranks)
            total, total_freedom = total + statistic, total_freedom + freedom
    assert chi2.sf(total, total_freedom) > FALSE_ALARM


def test_no_running_score_passes_5_over_grpc(mixed_run: Run) -> None:
    """Over 50,000 rounds that the target decided, both rules in turn: no alarm. The coupled rule
    has no overlaps to report, as no rows of the draft cross."""
    rounds = [
        report
        for (rule, _, _), generations in mixed_run.generations.items()
        for each in generations
        for report in (
            each.reports
            if rule == "residual"
            else [dataclasses.replace(report, overlaps=[]) for report in each.reports]
        )
    ]
    assert len(rounds) >= 50_000
    assert first_alarms(rounds) == {}


@pytest.mark.parametrize("place", PLACES)
def test_law_over_grpc_detects_a_wrong_residual(
    models: tuple[Decoder, Decoder], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank statistic, over some thousand rounds, rejects residuals redrawn from p."""
    monkeypatch.setattr(reference, "decide", mutants.residual_redrawn_from_target)
    target = models[0]
    draft = tiny_llama(tmp_path / "draft", seed=7, noise_seed=5, noise=0.6)
    generations = [
        generation(("residual", place, "temperature"), number, seed=number) for number in range(140)
    ]
    asyncio.run(serve(target, draft, [generations]))
    target_probs = expected(target, generations)
    ranks = favour_ranks(target_probs, expected(draft, generations))
    statistic, freedom = martingale_chi_square(generations, target_probs, ranks)
    assert chi2.sf(statistic, freedom) < FALSE_ALARM
