"""Exact law: the production decider, enumerated over every branch with rationals, is the target's.

Every comparison here is an equality of Fractions. What is enumerated is `kernels.reference.decide`
and `decide_coupled` themselves.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from kernels import reference
from kernels.reference import Coin, Draw
from kernels.streams import Purpose
from tests.exact import mutants
from tests.exact.enumeration import (
    Model,
    Prefix,
    Protocol,
    Row,
    autoregressive,
    context_model,
    drafted,
    fractions,
    law_of,
    outcomes,
)

TARGET = context_model(salt=5, vocab_size=3)
DRAFT = context_model(salt=17, vocab_size=3)
STOPS = frozenset({2})


def one_token_law(p: Row, q: Row) -> tuple[dict[int, Fraction], list[Fraction], Row | None]:
    """(law of the first emitted token, acceptance per drawable candidate, residual if drawn)."""
    law: dict[int, Fraction] = dict.fromkeys(range(len(p)), Fraction(0))
    acceptance, residual = [], None
    for candidate, drawn in enumerate(law_of(q)):
        if not drawn:
            continue
        deciding = reference.decide([p, p], [q], [candidate])
        coin = next(deciding)
        assert isinstance(coin, Coin)
        acceptance.append(min(Fraction(1), coin.target_mass / coin.draft_mass))
        if acceptance[-1] < 1:
            draw = deciding.send(False)
            assert isinstance(draw, Draw)
            assert draw.purpose is Purpose.RESIDUAL
            residual = draw.weights
        for decision, probability in outcomes(
            lambda c=candidate: reference.decide([p, p], [q], [c])
        ):
            law[decision.tokens[0]] += drawn * probability
    return law, acceptance, residual


@pytest.mark.parametrize(
    ("p", "q", "acceptance", "accepted_mass", "residual_law"),
    [
        (
            fractions(".5", ".3", ".2"), fractions(".2", ".5", ".3"),
            fractions(1, ".6", "2/3"), fractions(".2", ".3", ".2"), [1, 0, 0],
        ),
        (
            fractions(".1", ".6", ".3"), fractions(".5", ".2", ".3"),
            fractions(".2", 1, 1), fractions(".1", ".2", ".3"), [0, 1, 0],
        ),
        (
            fractions(".8", ".2"), fractions("2/3", "1/3"),
            fractions(1, ".6"), fractions("2/3", ".2"), [1, 0],
        ),
        (  # the same numbers, unnormalised by different factors
            fractions(5, 3, 2), fractions("1.4", "3.5", "2.1"),
            fractions(1, ".6", "2/3"), fractions(".2", ".3", ".2"), [1, 0, 0],
        ),
    ],
)  # fmt: skip
def test_single_token_numbers_of_the_theory(
    p: Row, q: Row, acceptance: Row, accepted_mass: Row, residual_law: list[int]
) -> None:
    """Acceptance, accepted masses, A = sum(min(p, q)) = 1 - TV, residual, total: the theory's."""
    law, accepted, residual = one_token_law(p, q)
    target, draft = law_of(p), law_of(q)
    assert accepted == list(acceptance)
    masses = [d * a for d, a in zip(draft, accepted, strict=True)]
    assert masses == list(accepted_mass) == [min(a, b) for a, b in zip(target, draft, strict=True)]
    variation = sum(abs(a - b) for a, b in zip(target, draft, strict=True)) / 2
    assert sum(masses) == 1 - variation
    assert residual is not None
    assert law_of(residual) == residual_law
    assert list(law.values()) == target


def test_redrawing_from_the_target_gives_the_theory_s_wrong_law() -> None:
    """p in place of the residual gives (.35, .39, .26): the number that identifies the fault."""
    p, q = fractions(".5", ".3", ".2"), fractions(".2", ".5", ".3")
    law = dict.fromkeys(range(3), Fraction(0))
    for candidate, drawn in enumerate(law_of(q)):
        for decision, probability in outcomes(
            lambda c=candidate: mutants.residual_redrawn_from_target([p, p], [q], [c], frozenset())
        ):
            law[decision.tokens[0]] += drawn * probability
    assert list(law.values()) == list(fractions(".35", ".39", ".26"))


def test_equal_laws_are_never_rejected() -> None:
    """p = q up to a factor: every coin is accepted with certainty and nothing divides by Z = 0."""
    law, acceptance, residual = one_token_law(fractions(1, 2, 3), fractions(2, 4, 6))
    assert acceptance == [1, 1, 1]
    assert residual is None
    assert list(law.values()) == law_of(fractions(1, 2, 3))


def test_a_draft_need_not_cover_the_target() -> None:
    """Disjoint supports: always rejected, residual is p itself, law is p."""
    p, q = fractions(0, 3, 1), fractions(1, 0, 0)
    law, acceptance, residual = one_token_law(p, q)
    assert acceptance == [0]
    assert residual is not None
    assert law_of(residual) == law_of(p)
    assert list(law.values()) == law_of(p)


def test_impossible_target_tokens_are_never_emitted() -> None:
    """p(x) = 0 < q(x) is rejected always, and x is not in the residual."""
    law, acceptance, _ = one_token_law(fractions(0, 1, 2), fractions(2, 1, 1))
    assert acceptance[0] == 0
    assert law == {0: 0, 1: Fraction(1, 3), 2: Fraction(2, 3)}


@pytest.mark.parametrize("stops", [frozenset(), STOPS], ids=["endless", "stops"])
@pytest.mark.parametrize("num_zeros", [0, 1], ids=["full", "zeros"])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "draft_counts", [(0,), (1,), (2,), (3,), (3, 0, 3), (1, 0, 2), (2, 3)], ids=str
)
def test_multi_round_law_is_the_targets(
    draft_counts: tuple[int, ...], budget: int, num_zeros: int, stops: frozenset[int]
) -> None:
    """Every k, plain steps between, stop tokens, budgets: the sequence law is the target's."""
    target = context_model(salt=5, vocab_size=3, num_zeros=num_zeros)
    draft = context_model(salt=17, vocab_size=3, num_zeros=num_zeros)
    protocol = Protocol(target, draft, draft_counts, budget, stops)
    assert protocol.law() == autoregressive(target, (0,), budget, stops)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "draft",
    [
        lambda prefix: fractions(1, 1, 1),
        lambda prefix: fractions(0, 0, 1),
        lambda prefix: fractions(*(x == (len(prefix) + 1) % 3 for x in range(3))),
        TARGET,
    ],
    ids=["uniform", "always-stop", "one-hot", "target"],
)
def test_adversarial_drafts_do_not_move_the_law(draft: Model, k: int) -> None:
    """Noise, a constant, scripted one-hot rows and the target itself as draft: the same law."""
    protocol = Protocol(TARGET, draft, (k,), 4, STOPS)
    assert protocol.law() == autoregressive(TARGET, (0,), 4, STOPS)


def test_prompts_of_every_length_have_their_own_law() -> None:
    """Prompt lengths 1..k+2: the law is conditional on the whole prompt."""
    laws = []
    for prompt_len in range(1, 6):
        prompt = tuple(i % 3 for i in range(prompt_len))
        law = Protocol(TARGET, DRAFT, (3,), 3).law(prompt)
        assert law == autoregressive(TARGET, prompt, 3, frozenset())
        laws.append(tuple(sorted(law.items())))
    assert len(set(laws)) == len(laws)


def test_the_target_as_draft_is_always_accepted() -> None:
    """q = p: no branch rejects, every round emits k + 1 tokens."""
    rounds = Protocol(TARGET, TARGET, (3,), 9).round((0,), 3)
    assert {len(tokens) for tokens, _ in rounds} == {4}


def test_forced_rejection_at_each_index_keeps_exactly_the_prefix() -> None:
    """Rejecting candidate j emits x_<j and one recovered token; what follows is dropped."""
    p = [fractions(1, 2, 3)] * 4
    q = [fractions(3, 2, 1)] * 3
    for rejected in range(3):
        deciding = reference.decide(p, q, (0, 0, 0))
        request = next(deciding)
        for index in range(rejected):
            assert request.index == index
            request = deciding.send(True)
        draw = deciding.send(False)
        assert (draw.index, draw.purpose) == (rejected, Purpose.RESIDUAL)
        with pytest.raises(StopIteration) as finished:
            deciding.send(2)
        assert finished.value.value.tokens == (*[0] * rejected, 2)
        assert finished.value.value.num_accepted == rejected


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_stop_token_at_every_index_ends_the_round(k: int) -> None:
    """An accepted stop ends the request where it stands: no bonus, nothing after it."""
    p, q = [fractions(1, 1, 1)] * (k + 1), [fractions(1, 1, 1)] * k
    for stop_index in range(k):
        candidates = [0] * stop_index + [2] + [1] * (k - stop_index - 1)
        decision = reference.run(reference.decide(p, q, candidates, STOPS), lambda request: True)
        assert decision.tokens == tuple(candidates[: stop_index + 1])
        assert decision.num_accepted == stop_index + 1
        assert decision.closing is None


def test_a_block_may_end_after_a_token_but_never_be_left_out_for_it() -> None:
    """Rule 7: drafting on or not after the value of a judged candidate is exact; a candidate that
    its own value takes out of the judging (a draft that fails on it) is another law."""
    prompt, unlucky = (0,), 1
    target = law_of(TARGET(prompt))
    ended: dict[int, Fraction] = dict.fromkeys(range(3), Fraction(0))
    left_out = dict(ended)
    for candidates, rows, drawn in drafted(DRAFT, prompt, 2):
        cut = 1 if candidates[0] == unlucky else 2
        judged = [TARGET(prompt + candidates[:i]) for i in range(3)]
        for k, law in ((cut, ended), (0 if cut == 1 else 2, left_out)):
            for decision, probability in outcomes(
                lambda k=k, p=judged, q=rows, c=candidates: reference.decide(
                    p[: k + 1], q[:k], c[:k]
                )
            ):
                law[decision.tokens[0]] += drawn * probability
    assert list(ended.values()) == target
    assert sum(left_out.values()) == 1
    assert list(left_out.values()) != target


MUTANTS = {
    "residual redrawn from p": mutants.residual_redrawn_from_target,
    "residual at the wrong row": mutants.residual_at_the_wrong_row,
    "residual without clamp": mutants.residual_without_clamp,
    "residual of unnormalised rows": mutants.residual_of_unnormalised_rows,
    "bonus after stop": mutants.bonus_after_stop,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_detects(name: str) -> None:
    """A wrong decider has another law, so equality above is evidence."""
    mutant = Protocol(TARGET, DRAFT, (2,), 3, STOPS, decider=MUTANTS[name])
    assert sum(mutant.law().values()) == 1
    assert mutant.law() != autoregressive(TARGET, (0,), 3, STOPS)


def at_temperature_two(model: Model) -> Model:
    """The rows of a model whose weights are squares, at twice the temperature: their roots."""
    return lambda prefix: fractions(*(Fraction(int(w) ** 2) for w in model(prefix)))


def test_enumeration_detects_a_draft_recorded_at_the_wrong_temperature() -> None:
    """Drawn at temperature 2, recorded at 1: wrong. Recorded as drawn: exact."""
    recorded = at_temperature_two(DRAFT)  # weights w^2 are temperature 1 where w is temperature 2
    honest = Protocol(TARGET, DRAFT, (2,), 3)
    lying = Protocol(TARGET, DRAFT, (2,), 3, recorded_draft=recorded)
    assert honest.law() == autoregressive(TARGET, (0,), 3, frozenset())
    assert lying.law() != honest.law()


# ---------------------------------------------------------------- the coupled rule

NOISE_LEVELS = 12  # every row below has an integer mass that divides it


def coupled_model(salt: int) -> Model:
    """Context-dependent rows of mass 12 over three ids: 12 noise levels draw them exactly."""
    masses = [(1, 5, 6), (4, 4, 4), (2, 7, 3), (9, 1, 2), (0, 6, 6), (3, 8, 1)]

    def row(prefix: Prefix) -> Row:
        state = salt
        for token in prefix:
            state = state * 5 + token + 1
        return fractions(*masses[state % len(masses)])

    return row


def draw_at(level: int, row: Row) -> int:
    """The id that noise level 0..11 selects: inverse of the cumulative mass."""
    reached = Fraction(0)
    for token, weight in enumerate(row):
        reached += weight
        if level < reached:
            return token
    raise AssertionError("rows have mass 12")


def coupled_output(
    target: Model, draft: Model, noise: tuple[int, ...], k: int, stops: frozenset[int]
) -> Prefix:
    """Rounds of the coupled rule on given noise per position; the draft uses the same noise."""
    prompt, output = (0,), ()
    while len(output) < len(noise) and not (output and output[-1] in stops):
        num_candidates = min(k, len(noise) - len(output) - 1)
        candidates: Prefix = ()
        for _ in range(num_candidates):
            position = len(output) + len(candidates)
            row = draft(prompt + output + candidates)
            candidates = (*candidates, draw_at(noise[position], row))
        rows = [target(prompt + output + candidates[:i]) for i in range(num_candidates + 1)]
        base = len(output)

        def answer(request: Coin | Draw, base: int = base) -> int:
            assert isinstance(request, Draw)
            assert request.purpose is Purpose.COUPLED
            return draw_at(noise[base + request.index], request.weights)

        decision = reference.run(reference.decide_coupled(rows, candidates, stops), answer)
        output += decision.tokens
    return output


@pytest.mark.parametrize("stops", [frozenset(), STOPS], ids=["endless", "stops"])
def test_coupled_output_depends_on_noise_and_target_only(stops: frozenset[int]) -> None:
    """Over every noise vector: the same tokens for k = 0..3 and any draft, of the target's law."""
    target = coupled_model(1)
    drafts = [coupled_model(2), target, lambda prefix: fractions(12, 0, 0)]
    law: dict[Prefix, Fraction] = {}
    for noise in itertools.product(range(NOISE_LEVELS), repeat=3):
        plain = coupled_output(target, target, noise, 0, stops)
        for draft, k in itertools.product(drafts, (1, 2, 3)):
            assert coupled_output(target, draft, noise, k, stops) == plain
        law[plain] = law.get(plain, Fraction(0)) + Fraction(1, NOISE_LEVELS**3)
    assert law == autoregressive(target, (0,), 3, stops)


def test_coupled_candidates_equal_to_the_target_s_draw_are_kept() -> None:
    """Draft = target under the same noise: every candidate is kept."""
    target = coupled_model(1)
    rows = [target((0,)), target((0, 1))]
    for token in range(3):
        decision = reference.run(reference.decide_coupled(rows, (token,)), lambda r, t=token: t)
        assert decision.num_accepted == 1
        assert decision.tokens == (token, token)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_coupled_stop_at_every_index_ends_the_round(k: int) -> None:
    """A kept stop candidate closes the round without another draw."""
    rows = [fractions(1, 1, 1)] * (k + 1)
    for stop_index in range(k):
        candidates = [0] * stop_index + [2] + [1] * (k - stop_index - 1)
        asked: list[int] = []

        def answer(
            request: Coin | Draw, asked: list[int] = asked, script: list[int] = candidates
        ) -> int:
            asked.append(request.index)
            return script[request.index]

        decision = reference.run(reference.decide_coupled(rows, candidates, STOPS), answer)
        assert decision.tokens == tuple(candidates[: stop_index + 1])
        assert decision.closing is None
        assert asked == list(range(stop_index + 1))
