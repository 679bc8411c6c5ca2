"""Online-softmax statistics: the algebra of empty, step, merge and finalize, in the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import reference_attention as reference
from kernels.softmax_state import finalize_state, merge_states, softmax_state
from tests.kernels.accuracy import assert_as_accurate

State = tuple[Tensor, Tensor, Tensor]


def fold(*states: State) -> State:
    m, l, u = (torch.stack(parts) for parts in zip(*states, strict=True))  # noqa: E741
    return merge_states(m, l, u)


def random_state(generator: torch.Generator, device: str, rows: int = 5, dim: int = 7) -> State:
    scores = torch.randn(rows, 9, generator=generator).to(device)
    return softmax_state(scores, torch.randn(9, dim, generator=generator).to(device))


def test_theory_numbers_come_out_of_the_kernels(device: str) -> None:
    """The two worked examples of blocks merged by statistics give 4 and 3, not 7, 3.5 or 2."""
    scores = torch.log(torch.tensor([[2.0, 1.0, 6.0]], device=device))
    values = torch.tensor([[1.0], [4.0], [5.0]], device=device)
    first = softmax_state(scores[:, :2], values[:2])
    second = softmax_state(scores[:, 2:], values[2:])
    torch.testing.assert_close(first[1], torch.tensor([1.5], device=device))
    torch.testing.assert_close(first[2], torch.tensor([[3.0]], device=device))
    m, l, u = fold(first, second)  # noqa: E741
    torch.testing.assert_close(m * math.log(2.0), torch.log(torch.tensor([6.0], device=device)))
    torch.testing.assert_close(l, torch.tensor([1.5], device=device))
    torch.testing.assert_close(u, torch.tensor([[6.0]], device=device))
    out, lse = finalize_state(m, l, u)
    torch.testing.assert_close(out, torch.tensor([[4.0]], device=device))
    torch.testing.assert_close(lse, torch.log(torch.tensor([9.0], device=device)))
    one = softmax_state(torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device))
    three = softmax_state(torch.zeros(1, 3, device=device), torch.full((3, 1), 4.0, device=device))
    out, _ = finalize_state(*fold(one, three))
    torch.testing.assert_close(out, torch.tensor([[3.0]], device=device))


@pytest.mark.parametrize("empty_first", [True, False])
def test_merging_an_empty_state_keeps_every_bit(device: str, empty_first: bool) -> None:
    """merge(empty, x) and merge(x, empty) are x bit for bit, -0 and denormals included."""
    m, l, u = random_state(torch.Generator().manual_seed(1), device)  # noqa: E741
    u[0, 0], u[1, 1], u[2, 2] = -0.0, 1e-42, 3e38
    empty = (torch.full_like(m, -math.inf), torch.zeros_like(l), torch.zeros_like(u))
    merged = fold(empty, (m, l, u)) if empty_first else fold((m, l, u), empty)
    for got, expected in zip(merged, (m, l, u), strict=True):
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


def test_a_fully_masked_tile_before_a_valid_one_is_harmless(device: str) -> None:
    """-inf minus -inf is never formed: a masked first tile leaves the later keys' softmax alone."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 70, generator=generator)
    scores[:, :40] = -math.inf  # more than one tile of 32
    values = torch.randn(70, 4, generator=generator)
    out, lse = finalize_state(*softmax_state(scores.to(device), values.to(device)))
    expected = torch.softmax(scores[:, 40:].double(), 1) @ values[40:].double()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        lse.cpu().double(), torch.logsumexp(scores[:, 40:].double(), 1), rtol=1e-6, atol=1e-6
    )


def test_rows_without_keys_finalize_to_zero_and_minus_infinity(device: str) -> None:
    """A row that saw no key has output 0 and lse -inf, next to rows that did."""
    scores = torch.zeros(2, 5, device=device)
    scores[1] = -math.inf
    out, lse = finalize_state(*softmax_state(scores, torch.ones(5, 3, device=device)))
    assert torch.equal(out.cpu(), torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert lse[1] == -math.inf
    assert abs(float(lse[0]) - math.log(5.0)) < 1e-6


@pytest.mark.parametrize("cut", [1, 31, 32, 99])
def test_any_cut_merges_to_the_softmax(device: str, cut: int) -> None:
    """Statistics of two parts merge to the whole's, as accurately as plain PyTorch's softmax."""
    generator = torch.Generator().manual_seed(cut)
    scores = torch.randn(17, 100, generator=generator) * 4
    values = torch.randn(100, 33, generator=generator)
    parts = [
        softmax_state(scores[:, part].to(device), values[part].to(device))
        for part in (slice(0, cut), slice(cut, 100))
    ]
    out, lse = finalize_state(*fold(*parts))
    exact = torch.softmax(scores.double(), 1) @ values.double()
    assert_as_accurate(out, torch.softmax(scores, 1) @ values, exact)
    torch.testing.assert_close(lse.cpu(), torch.logsumexp(scores, 1), rtol=1e-6, atol=1e-6)


def test_the_fold_is_ascending(device: str) -> None:
    """merge_states folds left to right: equal to nested pair merges in that order, bit for bit."""
    generator = torch.Generator().manual_seed(5)
    states = [random_state(generator, device) for _ in range(4)]
    nested = fold(fold(fold(states[0], states[1]), states[2]), states[3])
    for got, expected in zip(fold(*states), nested, strict=True):
        assert torch.equal(got, expected)
    backwards = fold(*reversed(states))
    assert not torch.equal(fold(*states)[2], backwards[2])


def test_the_specification_agrees_with_itself_and_with_the_kernel(device: str) -> None:
    """reference.step over blocks equals softmax in float64, and empty merges away bit for bit."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(4, 20, generator=generator, dtype=torch.float64)
    scores[2] = -math.inf
    values = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    state = reference.empty_state((4,), values)
    for start in range(0, 20, 6):
        block = slice(start, start + 6)
        state = reference.step(state, scores[:, block], values[block])
    out, lse = reference.finalize(state)
    expected = torch.softmax(scores, 1) @ values
    expected[2] = 0.0
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.logsumexp(scores, 1))
    kernel_out, kernel_lse = finalize_state(
        *softmax_state(scores.float().to(device), values.float().to(device))
    )
    torch.testing.assert_close(kernel_out.cpu().double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernel_lse.cpu().double(), lse, rtol=1e-5, atol=1e-6)
