"""The float path against exact thresholds: coins bisected in u, residual weights, u at both ends.

Rows are float32 as in production; their exact values are Fractions of the same bits.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.reference import Coin, Draw
from kernels.streams import UNIFORM_MAX, Purpose

SMALLEST_UNIFORM = 2.0**-33


def exact_row(row: Tensor) -> Any:
    """The same weights as Fractions."""
    return np.array([Fraction(float(weight)) for weight in row], dtype=object)


def rows(vocab_size: int = 6) -> st.SearchStrategy[Tensor]:
    """Float32 rows as shaping makes them: weights in [0, 1], the largest 1, some zero or tiny."""
    weight = st.one_of(
        st.floats(0.0, 1.0, width=32), st.just(0.0), st.floats(0.0, 2.0**-20, width=32)
    )
    return st.tuples(
        st.lists(weight, min_size=vocab_size, max_size=vocab_size),
        st.integers(0, vocab_size - 1),
    ).map(lambda drawn: _with_one(*drawn))


def _with_one(weights: list[float], index: int) -> Tensor:
    row = torch.tensor(weights, dtype=torch.float32)
    row[index] = 1.0
    return row


def accepted(coin: Coin, u: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What the production answer says when the coin shows u."""
    with monkeypatch.context() as patched:
        patched.setattr(reference, "coin", lambda seed, position, base_len: u)
        return bool(reference.philox_answer(seed=1, base_len=4)(coin))


def first_request(p: Tensor, q: Tensor, candidate: int) -> Coin:
    request = next(reference.decide([p, p], [q], [candidate]))
    assert isinstance(request, Coin)
    return request


@settings(deadline=None, max_examples=60)
@given(p=rows(), q=rows(), candidate=st.integers(0, 5))
def test_bisected_coin_threshold_is_the_exact_one(p: Tensor, q: Tensor, candidate: int) -> None:
    """The u at which acceptance flips is p(x)/q(x) of the exact rows, to 2^-50 relative."""
    if not float(q[candidate]):
        return
    coin = first_request(p, q, candidate)
    exact_p, exact_q = exact_row(p), exact_row(q)
    threshold = (exact_p[candidate] * sum(exact_q)) / (exact_q[candidate] * sum(exact_p))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if accepted(coin, UNIFORM_MAX, monkeypatch):
            assert threshold * (1 + Fraction(1, 2**50)) > Fraction(UNIFORM_MAX)
            return
        if not accepted(coin, SMALLEST_UNIFORM, monkeypatch):
            assert threshold * (1 - Fraction(1, 2**50)) <= Fraction(SMALLEST_UNIFORM)
            return
        low, high = SMALLEST_UNIFORM, UNIFORM_MAX  # accepted at low, rejected at high
        while math.nextafter(low, high) < high:
            middle = low + (high - low) / 2
            if accepted(coin, middle, monkeypatch):
                low = middle
            else:
                high = middle
    assert abs(Fraction(high) - threshold) <= threshold / 2**50


@settings(deadline=None, max_examples=200)
@given(p=rows(), q=rows(), candidate=st.integers(0, 5))
def test_residual_weights_are_the_exact_ones(p: Tensor, q: Tensor, candidate: int) -> None:
    """[p - q]+ in float64 differs from the exact one by 2^-49 of its terms at most, id by id."""
    deciding = reference.decide([p, p], [q], [candidate])
    next(deciding)
    draw = deciding.send(False)
    exactly = reference.decide([exact_row(p)] * 2, [exact_row(q)], [candidate])
    next(exactly)
    expected = exactly.send(False)
    assert isinstance(draw, Draw)
    assert isinstance(expected, Draw)
    p_total, q_total = sum(exact_row(p)), sum(exact_row(q))
    if all(weight == w for weight, w in zip(expected.weights, exact_row(p), strict=True)):
        return  # the exact residual is p itself or zero: covered by the edge tests below
    found = exact_row(draw.weights)
    terms = exact_row(p) * q_total + exact_row(q) * p_total
    tolerance = max(terms) / 2**49
    if not any(weight > tolerance for weight in expected.weights):
        return  # what is left is rounding of the totals, whichever way it falls
    for weight, exact_weight in zip(found, expected.weights, strict=True):
        assert abs(weight - exact_weight) <= tolerance


def test_a_coin_of_zero_never_accepts_an_impossible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison is strict: at u = 0 (which no stream yields) p(x) = 0 is still rejected."""
    impossible = first_request(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), 0)
    assert impossible.target_mass == 0.0
    assert not accepted(impossible, 0.0, monkeypatch)


def test_a_coin_at_the_upper_end_accepts_what_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p >= q accepts at the largest uniform, and u = 1 (which no stream yields) would not."""
    certain = first_request(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5]), 0)
    assert accepted(certain, UNIFORM_MAX, monkeypatch)
    assert not accepted(certain, 1.0, monkeypatch)


@pytest.mark.parametrize("scale", [1.0, 0.3, 7.0])
def test_equal_rows_always_accept_and_fall_back_to_the_target(scale: float) -> None:
    """p = q (q rescaled): all coins accept; a forced rejection draws from p, never divides by 0."""
    p = torch.tensor([0.3, 1.0, 0.0, 0.7, 1e-6])
    q = p * scale
    for candidate in (0, 1, 3, 4):
        coin = first_request(p, q, candidate)
        assert UNIFORM_MAX * coin.draft_mass < coin.target_mass
    deciding = reference.decide([p, p], [p.clone()], [1])
    next(deciding)
    draw = deciding.send(False)
    assert isinstance(draw, Draw)
    assert draw.purpose is Purpose.RESIDUAL
    assert torch.equal(draw.weights, p)
    assert reference.philox_answer(3, 0)(draw) in (0, 1, 3, 4)


def test_disjoint_supports_reject_always_and_draw_from_the_target() -> None:
    """p and q share no id: every candidate is rejected and the residual's law is p."""
    p, q = torch.tensor([0.0, 0.0, 1.0, 0.25]), torch.tensor([1.0, 0.5, 0.0, 0.0])
    for candidate in (0, 1):
        for seed in range(20):
            deciding = reference.decide([p, p], [q], [candidate])
            decision = reference.run(deciding, reference.philox_answer(seed, 7))
            assert decision.num_accepted == 0
            assert decision.tokens[0] in (2, 3)
    deciding = reference.decide([p, p], [q], [0])
    next(deciding)
    draw = deciding.send(False)
    assert isinstance(draw, Draw)
    assert torch.allclose(draw.weights / draw.weights.sum(), p.double() / p.double().sum())


def test_decision_reads_no_row_past_the_first_rejection() -> None:
    """Rows are computed on access: what is not judged is not touched, so its NaN cannot count."""

    class Recording(list[Tensor]):
        """A list that remembers which indices were read."""

        read: set[int]

        def __getitem__(self, index: Any) -> Any:
            self.read.add(index)
            return super().__getitem__(index)

    p = Recording([torch.tensor([0.0, 1.0]), torch.full((2,), torch.nan)])
    p.read = set()
    decision = reference.run(
        reference.decide(p, [torch.tensor([1.0, 0.0])], [0]), reference.philox_answer(1, 1)
    )
    assert decision.tokens == (1,)
    assert p.read == {0}


def test_greedy_answers_with_the_lowest_argmax() -> None:
    """Ties go to the lowest id, and greedy decoding refuses coins."""
    row = torch.tensor([0.5, 1.0, 1.0])
    assert reference.greedy_answer(Draw(0, Purpose.COUPLED, row)) == 1
    with pytest.raises(TypeError):
        reference.greedy_answer(Coin(0, 1.0, 1.0))
