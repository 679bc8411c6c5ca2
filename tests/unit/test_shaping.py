"""Shaping against an oracle that knows no sort: one rule for p and q, ties kept, order fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from protos.specmesh.v1 import session_pb2
from specmesh.errors import InvalidRequest, NumericFault
from specmesh.shaping import TokenShaper, validate

VOCAB_SIZE = 8
OFF: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}


def parameters(**changes: Any) -> session_pb2.SamplingParams:
    """Neutral parameters with some replaced; logit_bias as {id: bias}."""
    bias = changes.pop("logit_bias", {})
    params = session_pb2.SamplingParams(**(OFF | changes))
    for token_id, value in bias.items():
        params.logit_bias.add(token_id=token_id, bias=value)
    return params


def shaper(prompt_len: int = 1, vocab_size: int = VOCAB_SIZE, **changes: Any) -> TokenShaper:
    return TokenShaper(parameters(**changes), vocab_size, prompt_len)


def law(row: Tensor) -> list[float]:
    return [float(p) for p in row.double() / row.double().sum()]


def oracle_support(weights: Sequence[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """Which ids survive, by counting and adding exactly: no order is ever made."""
    exact = [Fraction(weight) for weight in weights]
    alive = [weight > 0 for weight in exact]
    if top_k:
        alive = [a and sum(o > w for o in exact) < top_k for a, w in zip(alive, exact, strict=True)]
    mass = sum(w for a, w in zip(alive, exact, strict=True) if a)
    above = [sum(o for b, o in zip(alive, exact, strict=True) if b and o > w) for w in exact]
    if top_p < 1:
        alive = [a and m < Fraction(top_p) * mass for a, m in zip(alive, above, strict=True)]
    return [a and w >= Fraction(min_p) * max(exact) for a, w in zip(alive, exact, strict=True)]


# Few distinct values, so that ties at every threshold are common.
logit_rows = st.lists(
    st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.5, -math.inf]),
    min_size=VOCAB_SIZE,
    max_size=VOCAB_SIZE,
).filter(lambda row: max(row) > -math.inf)


@settings(deadline=None, max_examples=400)
@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, VOCAB_SIZE + 2),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_truncation_keeps_what_the_oracle_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """top-k, then top-p on the renormalised survivors, then min-p; every tie is kept."""
    row = torch.tensor(logits)
    plain = shaper(temperature=temperature).row(row, [0])
    params = parameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = TokenShaper(params, VOCAB_SIZE, 1).row(row, [0])
    # The float32 values that travelled, not the decimals they came from.
    alive = oracle_support(plain.tolist(), params.top_k, params.top_p, params.min_p)
    expected = [w if a else 0.0 for w, a in zip(plain.tolist(), alive, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("top_k", [VOCAB_SIZE, 2**31, 2**32 - 1])
def test_a_top_k_of_every_id_is_off(top_k: int) -> None:
    """No row is filtered for it, and devices, which count in 32 bits with a sign, get 0."""
    made = shaper(top_k=top_k)
    assert made.filters.top_k == 0
    assert not made.is_filtered()
    assert shaper(top_k=VOCAB_SIZE - 1).filters.top_k == VOCAB_SIZE - 1


@settings(deadline=None, max_examples=100)
@given(logits=logit_rows, temperature=st.floats(0.0625, 5.0, width=32))
def test_temperature_is_softmax_of_scaled_logits(logits: list[float], temperature: float) -> None:
    """Weights are proportional to exp(z / T), float32, the largest exactly 1."""
    row = shaper(temperature=temperature).row(torch.tensor(logits), [0])
    assert row.dtype == torch.float32
    assert float(row.max()) == 1.0
    expected = torch.softmax(torch.tensor(logits).double() / temperature, 0)
    assert law(row) == pytest.approx(expected.tolist(), rel=2e-5, abs=1e-30)


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.floats(-4, 4, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    candidates=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([-0.5, 0.0, 0.7]),
    frequency=st.sampled_from([-0.25, 0.0, 0.4]),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-2.0, 0.5, 3.0])),
)
def test_bias_and_penalties_match_a_dumb_loop(
    logits: list[float], prompt: list[int], output: list[int], candidates: list[int],
    repetition: float, presence: float, frequency: float, bias: dict[int, float],
) -> None:  # fmt: skip
    """Bias first; repetition counts prompt and output, presence and frequency count output."""
    found = shaper(
        prompt_len=len(prompt), repetition_penalty=repetition, presence_penalty=presence,
        frequency_penalty=frequency, logit_bias=bias,
    ).row(torch.tensor(logits), prompt + output, candidates)  # fmt: skip
    scores = []
    generated = output + candidates
    for token, logit in enumerate(logits):
        score = logit + bias.get(token, 0.0)
        if token in prompt or token in generated:
            score = score / repetition if score > 0 else score * repetition
        if token in generated:
            score -= presence + frequency * generated.count(token)
        scores.append(score)
    expected = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
    assert law(found) == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("logits", "changes", "support"),
    [
        # After top-k = 3 the survivors' masses are 1/2, 1/4, 1/4: the first alone reaches 1/2.
        ([2.0, 1.0, 1.0, 0.999, 0.999], {"top_k": 3, "top_p": 0.4999}, [0]),
        # top-p over the whole row would have kept the second as well.
        ([3.0, 2.0, 1.0, 1.0, 1.0], {"top_k": 2, "top_p": 0.6}, [0]),
        # At temperature 4 the row is flat enough for top-p 0.5 to keep two.
        ([3.0, 2.0, 1.0, 0.0], {"temperature": 4.0, "top_p": 0.5}, [0, 1]),
        ([3.0, 2.0, 1.0, 0.0], {"top_p": 0.5}, [0]),
        # min-p looks at the largest weight, not at the mass.
        ([0.0, 0.0, 0.0, -2.0], {"min_p": 0.2}, [0, 1, 2]),
        # All ties at the k-th logit stay, whatever k says.
        ([1.0, 1.0, 1.0, 0.0], {"top_k": 1}, [0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, [0, 1, 2, 3]),
    ],
)
def test_the_order_of_the_rules(
    logits: list[float], changes: dict[str, Any], support: list[int]
) -> None:
    """Temperature, top-k, top-p of the survivors, min-p: cases where another order differs."""
    row = shaper(vocab_size=len(logits), **changes).row(torch.tensor(logits), [0])
    assert row.nonzero()[:, 0].tolist() == support


def test_bias_comes_before_the_repetition_penalty() -> None:
    """Logit -1, bias 3, penalty 4: (-1 + 3) / 4 = 0.5; the other order gives -4 + 3 = -1."""
    found = shaper(vocab_size=2, repetition_penalty=4.0, logit_bias={0: 3.0})
    row = found.row(torch.tensor([-1.0, 0.5]), [0])
    assert law(row)[0] == pytest.approx(1 / 2)  # a tie at 0.5


def test_large_rows_use_the_full_sort_only_when_they_must() -> None:
    """Both paths of top-p on 5000 ids agree with a threshold found by counting mass."""
    generator = torch.Generator().manual_seed(3)
    for scale in (0.5, 4.0):
        logits = scale * torch.randn(5000, generator=generator)
        plain = shaper(vocab_size=5000).row(logits, [0]).double()
        kept = shaper(vocab_size=5000, top_p=0.9).row(logits, [0])
        smallest = float(kept[kept > 0].min())
        mass_above = float(plain[plain > smallest].sum() / plain.sum())
        mass_through = float(plain[plain >= smallest].sum() / plain.sum())
        assert mass_above < 0.9 <= mass_through + 1e-7


@pytest.mark.parametrize(
    ("top_p", "smallest"), [(0.25, 1.0), (0.5, 1.0), (0.500001, 0.5), (0.75, 0.5), (0.76, 0.25)]
)
def test_top_p_drops_what_lies_below_enough_mass_exactly(top_p: float, smallest: float) -> None:
    """Weights 1, 1/2, 1/4, 1/4: the mass above an id must be strictly below top_p of the total."""
    weights = torch.tensor([0.25, 1.0, 0.25, 0.5])
    assert float(reference._top_p_threshold(weights, top_p)) == smallest


def test_greedy_is_one_hot_at_the_lowest_argmax() -> None:
    """Temperature 0: all weight on the argmax after bias and penalties, lowest id on ties."""
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    greedy = shaper(vocab_size=4, temperature=0.0)
    assert greedy.is_greedy
    assert greedy.row(logits, [0]).tolist() == [0, 1, 0, 0]
    biased = shaper(vocab_size=4, temperature=0.0, logit_bias={3: 1.5})
    assert biased.row(logits, [0]).tolist() == [0, 0, 0, 1]
    penalised = shaper(vocab_size=4, temperature=0.0, presence_penalty=2.0)
    assert penalised.row(logits, [0, 1]).tolist() == [0, 0, 1, 0]


def test_padded_vocabulary_rows_are_cut() -> None:
    """Ids past the real vocabulary have no weight on either side, whatever their logits hold."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    for garbage in (100.0, math.nan, math.inf):
        padded = torch.cat((logits, torch.full((5,), garbage)))
        for changes in ({}, {"top_k": 3, "top_p": 0.9}, {"temperature": 0.0}):
            found = shaper(**changes).row(padded, [0])
            assert found.shape == (VOCAB_SIZE,)
            assert torch.equal(found, shaper(**changes).row(logits, [0]))


def test_the_reference_gives_padding_no_weight() -> None:
    """`reference.shape` over a padded row: ids >= vocab_size have weight 0, whatever they hold."""
    logits = torch.tensor([0.0, 1.0, 50.0, math.nan])
    row = reference.shape(logits, reference.Shaping(), vocab_size=2)
    assert row.tolist() == [pytest.approx(math.exp(-1)), 1.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_fail_the_row_that_is_read_and_no_other(bad: float) -> None:
    """NaN and +inf raise NumericFault on access; rows that are not judged do not count."""
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, 4] = bad
    rows = shaper().rows(logits, [0], [1, 2])
    assert float(rows[0].sum()) == VOCAB_SIZE
    assert float(rows[2].sum()) == VOCAB_SIZE
    with pytest.raises(NumericFault, match="position 2"):
        rows[1]


def test_a_row_with_nothing_finite_is_a_fault() -> None:
    """All -inf, by the model or by min_tokens, is no law."""
    nothing = torch.full((VOCAB_SIZE,), -math.inf)
    with pytest.raises(NumericFault):
        shaper().row(nothing, [0])
    nothing[3] = 0.0
    assert law(shaper().row(nothing, [0]))[3] == 1.0
    with pytest.raises(NumericFault):
        shaper(stop_token_ids=[3], min_tokens=1).row(nothing, [0])


def test_stop_ids_are_impossible_before_min_tokens() -> None:
    """Output tokens 0..m-1 cannot be a stop id; candidates count as output, the prompt does not."""
    found = shaper(prompt_len=3, stop_token_ids=[2, 5], min_tokens=2)
    assert found.stop_ids == {2, 5}
    logits = torch.zeros(4, VOCAB_SIZE)
    rows = found.rows(logits, [1, 1, 1], [0, 0, 0])
    assert [float(row[2]) + float(row[5]) for row in rows] == [0, 0, 2, 2]
    assert float(found.row(logits[0], [1, 1, 1, 4, 4])[2]) == 1.0


def test_rows_see_the_prefix_and_the_candidates_before_them() -> None:
    """Row i equals the row of a fresh shaper on prefix + candidates[:i], read in any order."""
    changes = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    prefix, candidates = [1, 2, 2, 5], [5, 6, 1]
    rows = shaper(prompt_len=2, **changes).rows(logits, prefix, candidates)
    assert len(rows) == 4
    for index in (3, 0, 2, 1):
        fresh = shaper(prompt_len=2, **changes)
        assert torch.equal(rows[index], fresh.row(logits[index], prefix + candidates[:index]))
    assert rows[-1] is rows[3]  # shaped once
    assert [row.shape for row in rows[1:3]] == [(VOCAB_SIZE,)] * 2
    with pytest.raises(IndexError):
        rows[4]


def test_rows_do_not_change_with_the_prefix_that_made_them() -> None:
    """Rows read after the session moved on are still those of the prefix they were made for."""
    changes = {"presence_penalty": 1.0}
    logits = torch.zeros(1, VOCAB_SIZE)
    found, prefix = shaper(**changes), [0, 3]
    rows = found.rows(logits, prefix, [])
    prefix.append(4)
    found.row(logits[0], prefix)
    assert torch.equal(rows[0], shaper(**changes).row(logits[0], [0, 3]))


@settings(deadline=None, max_examples=60)
@given(
    prefixes=st.lists(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=8), min_size=1, max_size=6
    )
)
def test_a_row_depends_on_its_arguments_only(prefixes: list[list[int]]) -> None:
    """A shaper that saw other prefixes (grown, cut, replaced) gives what a fresh one gives."""
    changes = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    logits = torch.linspace(-1, 1, VOCAB_SIZE)
    used = shaper(prompt_len=2, **changes)
    for prefix in prefixes:
        for cut in (prefix, prefix[: len(prefix) // 2 + 1], prefix):
            if len(cut) >= 2:
                fresh = shaper(prompt_len=2, **changes).row(logits, cut)
                assert torch.equal(used.row(logits, cut), fresh)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-5}, "temperature"),
        ({"temperature": 101.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.01}, "min_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {0: 100.5}}, "logit_bias"),
        ({"logit_bias": {0: math.nan}}, "logit_bias"),
        ({"logit_bias": {0: -math.inf}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1}, "stop_token_ids"),
        ({"num_logprobs": 21}, "logprobs"),
    ],
)
def test_out_of_range_parameters_name_their_field(changes: dict[str, Any], field: str) -> None:
    """Every parameter has a range, and its error says which parameter it was."""
    with pytest.raises(InvalidRequest) as caught:
        validate(parameters(**changes), VOCAB_SIZE)
    assert caught.value.field == field


def test_a_token_biased_twice_is_refused() -> None:
    """Two biases for one id contradict each other."""
    params = parameters(logit_bias={1: 1.0})
    params.logit_bias.add(token_id=1, bias=2.0)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        validate(params, VOCAB_SIZE)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0}, {"temperature": 0.001}, {"temperature": 100.0},
        {"top_k": 2**31}, {"top_p": 1e-6}, {"min_p": 1.0},
        {"repetition_penalty": 0.1}, {"repetition_penalty": 10.0},
        {"presence_penalty": -2.0}, {"frequency_penalty": 2.0},
        {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}}, {"num_logprobs": 20},
        {"stop_token_ids": list(range(VOCAB_SIZE))},
    ],
    ids=str,
)  # fmt: skip
def test_the_ends_of_every_range_work(changes: dict[str, Any]) -> None:
    """Both ends are inside, in float32 as they travel, and give a law."""
    row = shaper(**changes).row(torch.linspace(-5, 5, VOCAB_SIZE), [0, 1])
    assert float(row.max()) == 1.0
    assert bool(torch.isfinite(row).all())
