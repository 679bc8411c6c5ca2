"""Mergeable softmax statistics: the theory's numbers, merging in any order, the empty state."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference_attention import (
    SoftmaxState,
    block_state,
    empty_state,
    finalize,
    merge,
    step,
)


def column(*values: float) -> Tensor:
    """Values of one dimension, float64 [n, 1]."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def scores(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def output(state: SoftmaxState) -> float:
    return float(finalize(state)[0])


def test_two_blocks_of_the_theory() -> None:
    """Scores (log 2, log 1, log 6), values (1, 4, 5): l = 3/2, u = 6, o = 4, not 7 and not 3.5."""
    first = block_state(scores(math.log(2), 0.0), column(1, 4))
    second = block_state(scores(math.log(6)), column(5))
    assert float(first.m) == math.log(2)
    assert float(first.l) == pytest.approx(1.5, rel=1e-15)
    assert float(first.u) == pytest.approx(3.0, rel=1e-15)
    assert (float(second.m), float(second.l), float(second.u)) == (math.log(6), 1.0, 5.0)
    merged = merge(first, second)
    assert float(merged.m) == math.log(6)
    assert float(merged.l) == pytest.approx(1.5, rel=1e-15)
    assert float(merged.u) == pytest.approx(6.0, rel=1e-15)
    assert output(first) == pytest.approx(2.0)
    assert output(second) == 5.0
    assert output(merged) == pytest.approx(4.0, rel=1e-15)
    assert output(merged) not in (pytest.approx(7.0), pytest.approx(3.5))


def test_blocks_weigh_by_their_mass() -> None:
    """Exponential mass 1 with value 0 against mass 3 with value 4 gives 3, not the mean 2."""
    merged = merge(block_state(scores(0.0), column(0)), block_state(scores(math.log(3)), column(4)))
    assert output(merged) == pytest.approx(3.0, rel=1e-15)


@settings(deadline=None, max_examples=100)
@given(
    keys=st.lists(
        st.tuples(st.floats(-30, 30), st.floats(-5, 5), st.booleans()), min_size=1, max_size=12
    ),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_any_split_in_any_order_gives_the_softmax(
    keys: list[tuple[float, float, bool]], cuts: list[int]
) -> None:
    """Blocks of any size (empty and fully masked ones too), merged in every order: one output."""
    masked = scores(*(z if visible else -math.inf for z, _, visible in keys))
    values = column(*(v for _, v, _ in keys))
    edges = sorted({0, len(keys), *(min(cut, len(keys)) for cut in cuts)})
    blocks = [block_state(masked[a:b], values[a:b]) for a, b in itertools.pairwise(edges)]
    any_visible = any(visible for _, _, visible in keys)
    probabilities = torch.softmax(masked, 0) if any_visible else torch.zeros_like(masked)
    expected = float(probabilities @ values)
    for order in itertools.permutations(blocks):
        state = empty_state((), values)
        for block in order:
            state = merge(state, block)
        out, lse = finalize(state)
        assert float(out) == pytest.approx(expected, abs=1e-12)
        assert float(lse) == pytest.approx(float(torch.logsumexp(masked, 0)), abs=1e-12)
    walked = empty_state((), values)
    for a, b in itertools.pairwise(edges):
        walked = step(walked, masked[a:b], values[a:b])
    assert output(walked) == pytest.approx(expected, abs=1e-12)


def test_three_blocks_merge_at_once_as_in_pairs() -> None:
    """Scaling each block by e^(m_i - m) and adding is what two merges give."""
    blocks = [block_state(scores(z, z / 2), column(z, 1.0)) for z in (-3.0, 5.0, 2.0)]
    m = max(float(block.m) for block in blocks)
    mass = sum(math.exp(float(block.m) - m) * float(block.l) for block in blocks)
    weighted = sum(math.exp(float(block.m) - m) * float(block.u) for block in blocks)
    merged = merge(merge(blocks[0], blocks[1]), blocks[2])
    assert float(merged.l) == pytest.approx(mass, rel=1e-14)
    assert float(merged.u) == pytest.approx(weighted, rel=1e-14)


def test_empty_is_neutral_and_never_a_number_out_of_nothing() -> None:
    """-inf - (-inf) is not formed: empty joins empty to empty, a masked row gives 0 and -inf."""
    values = column(1.0, 2.0)
    nothing = block_state(scores(-math.inf, -math.inf), values)
    both = merge(nothing, empty_state((), values))
    out, lse = finalize(both)
    assert (float(out), float(lse)) == (0.0, -math.inf)
    some = block_state(scores(3.0, -math.inf), values)
    for merged in (merge(nothing, some), merge(some, nothing)):
        assert (merged.m, merged.l, merged.u) == (some.m, some.l, some.u)


def test_masked_blocks_before_the_first_visible_key_change_nothing() -> None:
    """The first non-empty block initialises, however many masked ones came before."""
    values = column(1.0, 2.0)
    state = empty_state((), values)
    for _ in range(3):
        state = step(state, scores(-math.inf, -math.inf), values)
    state = step(state, scores(-1000.0, -math.inf), values)
    assert output(state) == 1.0
