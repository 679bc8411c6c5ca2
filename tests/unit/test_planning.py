"""Planning: every number of the theory on costs, bucket choice and the gain of speculation."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmesh.planning import (
    Bucket,
    PaddingWaste,
    RoundTimes,
    amdahl,
    break_even_calls,
    bucket_of,
    expected_tokens,
    expected_tokens_at,
    long_run_cost,
    padding_waste,
    plan_buckets,
    roofline_time_s,
    speculative_speedup,
    worthwhile,
)


def test_amdahl_numbers() -> None:
    """f=.4, s=4 gives 1/0.7; f=.2 gives 1/0.82 at s=10 and 1.25 in the limit."""
    assert amdahl(Fraction(2, 5), 4) == Fraction(10, 7)
    assert amdahl(0.4, 4) == pytest.approx(1.43, abs=0.002)
    assert amdahl(Fraction(1, 5), 10) == 1 / Fraction(82, 100)
    assert amdahl(0.2, 10) == pytest.approx(1.2195, abs=5e-5)
    assert amdahl(0.2, math.inf) == pytest.approx(1.25)
    assert amdahl(1.0, math.inf) == math.inf


def test_roofline_takes_the_slower_of_compute_and_memory() -> None:
    """max(F/R, Q/b): whichever resource is short decides."""
    assert roofline_time_s(10.0, 1.0, 5.0, 1.0) == 2.0
    assert roofline_time_s(1.0, 10.0, 5.0, 2.0) == 5.0


def test_break_even_numbers() -> None:
    """3 s of compilation for 2 ms -> 1.5 ms pays after 6000 calls; no saving never pays."""
    assert break_even_calls(3, Fraction(2, 1000), Fraction(15, 10000)) == 6000
    assert break_even_calls(3.0, 0.002, 0.002) == math.inf


def test_three_buckets_of_which_one_pays() -> None:
    """Net +1, -5 and -0.8 s: only the first bucket is compiled."""
    milli = Fraction(1, 1000)
    buckets = [
        Bucket(2, 1000, 3 * milli), Bucket(10, 100, 50 * milli), Bucket(1, 20, 10 * milli),
    ]  # fmt: skip
    assert [bucket.net for bucket in buckets] == [1, -5, Fraction(-4, 5)]
    assert worthwhile(buckets) == [0]


def test_padding_waste_counts_positions_and_pairs() -> None:
    """E[b(T)-T] and E[b(T)^2-T^2] over a histogram, against a direct sum over calls."""
    calls, buckets = {1: 3, 3: 1, 8: 2}, (4, 8)
    each = [length for length, count in calls.items() for _ in range(count)]
    padded = [bucket_of(length, buckets) for length in each]
    waste = padding_waste(calls, buckets)
    assert waste.positions == sum(b - t for b, t in zip(padded, each, strict=True)) / 6
    assert waste.pairs == sum(b * b - t * t for b, t in zip(padded, each, strict=True)) / 6
    assert padding_waste({4: 5}, (4,)) == PaddingWaste(0.0, 0.0)


def test_a_length_beyond_every_bucket_is_refused() -> None:
    """No bucket is ever silently too small."""
    with pytest.raises(ValueError, match="no bucket"):
        bucket_of(9, (4, 8))


@given(
    calls=st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1, max_size=5),
    compile_cost=st.integers(0, 40),
    pair_cost=st.integers(0, 2),
    max_buckets=st.integers(1, 5),
)
def test_planned_buckets_are_optimal(
    calls: dict[int, int], compile_cost: int, pair_cost: int, max_buckets: int
) -> None:
    """Dynamic programming finds the cost that trying every subset of lengths finds."""

    def cost(buckets: tuple[int, ...]) -> float:
        waste = padding_waste(calls, buckets)
        num_calls = sum(calls.values())
        wasted = num_calls * (waste.positions + pair_cost * waste.pairs)
        return compile_cost * len(buckets) + round(wasted)

    subsets = [
        subset
        for size in range(1, max_buckets + 1)
        for subset in itertools.combinations(sorted(calls), size)
        if subset[-1] == max(calls)
    ]
    planned = plan_buckets(calls, compile_cost, 1, max_buckets, pair_cost)
    assert planned in subsets
    assert cost(planned) == min(map(cost, subsets))


def test_constant_rate_closed_form() -> None:
    """k=3, a=.8: E[N]=2.952; a=1 gives k+1; the closed form is the sum of powers."""
    assert expected_tokens_at(Fraction(4, 5), 3) == Fraction(2952, 1000)
    assert expected_tokens_at(1.0, 3) == 4
    assert expected_tokens_at(0.0, 3) == 1
    for k in range(6):
        rate = Fraction(3, 7)
        assert expected_tokens_at(rate, k) == expected_tokens([rate] * k)


def test_per_position_rates_are_not_pooled() -> None:
    """Rates (.9,.7,.5) give 2.845; the pooled mean raised to powers gives another number."""
    rates = [Fraction(9, 10), Fraction(7, 10), Fraction(1, 2)]
    assert expected_tokens(rates) == 1 + Fraction(9, 10) + Fraction(63, 100) + Fraction(315, 1000)
    assert expected_tokens(rates) == Fraction(2845, 1000)
    assert expected_tokens_at(sum(rates) / 3, 3) != Fraction(2845, 1000)


def test_budget_truncates_the_expectation() -> None:
    """With m tokens left the sum has m terms: the mean of min(N, m)."""
    rates = [Fraction(9, 10), Fraction(7, 10), Fraction(1, 2)]
    assert expected_tokens(rates, max_tokens=1) == 1
    assert expected_tokens(rates, max_tokens=2) == Fraction(19, 10)
    assert expected_tokens(rates, max_tokens=9) == Fraction(2845, 1000)
    law = {1: Fraction(1, 10), 2: Fraction(27, 100), 3: Fraction(315, 1000), 4: Fraction(315, 1000)}
    assert sum(law.values()) == 1
    for budget in (1, 2, 3, 4):
        assert expected_tokens(rates, budget) == sum(min(n, budget) * w for n, w in law.items())


def test_speedup_numbers() -> None:
    """c_t=10, c_d=1, c_m=1: 29.52/16 = 1.845 at c_v=12; below 1 at c_v=30."""
    tokens = expected_tokens_at(Fraction(4, 5), 3)
    assert speculative_speedup(tokens, 3, RoundTimes(10, 1, 12, 1)) == Fraction(1845, 1000)
    slow = speculative_speedup(tokens, 3, RoundTimes(10, 1, 30, 1))
    assert slow == Fraction(2952, 3400)
    assert slow < 1


def test_long_run_cost_is_summed_time_over_summed_tokens() -> None:
    """12 ms for 3 tokens beats 20 ms for 4; a mean of per-round ratios is another number."""
    assert long_run_cost([12], [3]) == 4
    assert long_run_cost([20], [4]) == 5
    assert long_run_cost([12, 20], [3, 1]) == 8 != (12 / 3 + 20 / 1) / 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: amdahl(1.5, 2),
        lambda: roofline_time_s(1, 1, 0, 1),
        lambda: expected_tokens([1.1]),
        lambda: expected_tokens([0.5], max_tokens=0),
        lambda: expected_tokens_at(0.5, -1),
        lambda: speculative_speedup(1, 0, RoundTimes(1, 1, 0, 0)),
        lambda: speculative_speedup(1, 0, RoundTimes(1, 1, math.inf, 0)),
        lambda: speculative_speedup(1, 0, RoundTimes(0, 1, 1, 0)),
        lambda: speculative_speedup(1, 0, RoundTimes(math.nan, 1, 1, 0)),
        lambda: long_run_cost([], []),
        lambda: padding_waste({}, (4,)),
        lambda: plan_buckets({4: 1}, 1, 1, 0),
    ],
)
def test_nonsense_is_refused(call: object) -> None:
    """Arguments outside a formula's domain raise instead of giving a number."""
    assert callable(call)
    with pytest.raises(ValueError):
        call()
