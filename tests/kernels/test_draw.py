"""The draft's draw: the race of the reference, whatever the launch, the batch or the place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels import sampling
from kernels.configs.sampling import Launch
from kernels.sampling import Draws, Rule, Status, draw, workspace
from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.rounds import drawn_by_reference

RULES = (Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY)


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def draw_rows(logits: Tensor, rules: list[Rule], vocab_size: int, *, first_seed: int = 1) -> Draws:
    """Row i: seed first_seed + 7 i, position 40 + i, base_len 33 + i, temperature 1."""
    rows, device = logits.shape[0], str(logits.device)
    return draw(
        logits,
        torch.arange(first_seed, first_seed + 7 * rows, 7, device=device),
        ints(list(range(40, 40 + rows)), device),
        ints(list(range(33, 33 + rows)), device),
        ints([int(rule) for rule in rules], device),
        torch.ones(rows, device=device),
        vocab_size,
        workspace(rows, device),
    )


def random_rows(rows: int, width: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * 2.5).to(device)


@pytest.mark.parametrize("vocab_size", [7, 1023, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_equal_the_reference(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    """Every rule draws the reference's token from its own stream, for odd vocabulary sizes."""
    logits = random_rows(6, vocab_size, device).to(dtype)
    rules = [RULES[i % 3] for i in range(6)]
    draws = draw_rows(logits, rules, vocab_size)
    for i, rule in enumerate(rules):
        expected = drawn_by_reference(logits[i], 1 + 7 * i, 40 + i, 33 + i, rule, vocab_size)
        assert draws.tokens[i] == expected
        assert draws.status[i] == Status.OK


def test_log_prob_and_mass_are_as_accurate_as_plain_softmax(device: str) -> None:
    """ln q(token) and the row's normaliser err at most twice as much as torch in float32."""
    vocab_size = 9001
    logits = random_rows(8, vocab_size, device, seed=3)
    draws = draw_rows(logits, [Rule.RESIDUAL] * 8, vocab_size)
    picked = draws.tokens.long()[:, None]
    exact = logits.cpu().double().log_softmax(-1).gather(1, picked.cpu())[:, 0]
    plain = logits.log_softmax(-1).gather(1, picked)[:, 0]
    assert_as_accurate(draws.log_probs, plain, exact)
    normaliser = draws.exponents.double() + torch.log2(draws.masses.double()) - 40.0
    exact = logits.cpu().double().logsumexp(-1)
    ours = (normaliser * np.log(2.0)).float()
    assert_as_accurate(ours, logits.logsumexp(-1), exact)


@pytest.mark.parametrize("launch", [Launch(2), Launch(8)])
def test_draws_do_not_depend_on_the_launch(
    device: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps a program and ids raced side by side change no bit of token, log_prob or mass."""
    logits = random_rows(3, 20_000, device, seed=5)
    expected = draw_rows(logits, list(RULES), 20_000)
    monkeypatch.setattr(sampling, "judge_launch", lambda _: launch)
    changed = draw_rows(logits, list(RULES), 20_000)
    for name in ("tokens", "log_probs", "exponents", "masses"):
        assert torch.equal(getattr(expected, name), getattr(changed, name)), name


def test_draws_do_not_depend_on_batch_place_or_memory(device: str) -> None:
    """A row alone, last in a batch, in a wider buffer off 16 bytes, or strided: the same bits."""
    vocab_size = 1023
    rows = random_rows(4, vocab_size, device, seed=6)
    one = ints([5], device)
    rule = ints([Rule.RESIDUAL], device)

    def alone(row: Tensor) -> Draws:
        return draw(
            row[None], one.long(), one, one, rule, torch.ones(1, device=device), vocab_size,
            workspace(1, device),
        )  # fmt: skip

    expected = alone(rows[2].clone())
    batch = draw(
        rows, one.long().expand(4).contiguous(), one.expand(4).contiguous(),
        one.expand(4).contiguous(), rule.expand(4).contiguous(), torch.ones(4, device=device),
        vocab_size, workspace(9, device),
    )  # fmt: skip
    padded = torch.full((4, vocab_size + 4), 1e4, device=device)
    padded[:, 1 : vocab_size + 1] = rows
    strided = torch.full((vocab_size, 8), 1e4, device=device)
    strided[:, 3] = rows[2]
    others = [alone(padded[2, 1:]), alone(strided.T[3])]
    for name in ("tokens", "log_probs", "exponents", "masses"):
        value = getattr(expected, name)[0]
        assert getattr(batch, name)[2] == value, name
        assert all(getattr(other, name)[0] == value for other in others), name


def test_a_row_beyond_two_to_the_31_elements_is_read_right(device: str) -> None:
    """Row offsets are 64 bit: the second row of a buffer with a stride of 2^31 is drawn from."""
    vocab_size, stride = 64, 2**31
    storage = torch.empty(stride + vocab_size, dtype=torch.float16, device=device)
    rows = storage.as_strided((2, vocab_size), (stride, 1))
    rows[0] = 0.0
    rows[1] = -torch.inf
    rows[1, 17] = 1.0
    draws = draw_rows(rows, [Rule.RESIDUAL] * 2, vocab_size)
    assert draws.tokens[1] == 17


def test_faulty_rows_are_flagged_and_the_others_kept(device: str) -> None:
    """NaN, +inf or no finite score gives token -1 and ROW_FAULT, and never an id past the end."""
    vocab_size = 1000
    logits = random_rows(5, vocab_size + 24, device)
    logits[:, vocab_size:] = 100.0
    expected = draw_rows(logits, [Rule.RESIDUAL] * 5, vocab_size)
    assert bool((expected.tokens < vocab_size).all())
    logits[1, 999] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, :vocab_size] = -torch.inf
    logits[4, vocab_size:] = torch.nan  # padding is not looked at
    with np.errstate(invalid="ignore"):
        draws = draw_rows(logits, [Rule.RESIDUAL, Rule.GREEDY, *[Rule.COUPLED] * 3], vocab_size)
    assert draws.status.tolist() == [0, 1, 1, 1, 0]
    assert draws.tokens[1:4].tolist() == [-1, -1, -1]
    assert draws.tokens[0] == expected.tokens[0]


def test_greedy_takes_the_lowest_id_of_equal_maxima_across_leaves(device: str) -> None:
    """Equal largest scores, -0 and 0 included, in different leaves: the lowest id wins."""
    vocab_size = 20_000
    logits = torch.full((2, vocab_size), -3.0, dtype=torch.float16, device=device)
    logits[0, [9_000, 12_345, 19_999]] = 4.5
    logits[1, 8_500] = -0.0
    logits[1, 19_000] = 0.0
    draws = draw_rows(logits, [Rule.GREEDY] * 2, vocab_size)
    assert draws.tokens.tolist() == [9_000, 8_500]
    assert draws.log_probs.tolist() == [0.0, 0.0]


def test_calls_leave_the_workspace_as_they_found_it(device: str) -> None:
    """Arrival counters return to zero, so a captured graph can be replayed."""
    logits = random_rows(3, 500, device)
    scratch = workspace(3, device)
    one = ints([1, 2, 3], device)
    for _ in range(2):
        draw(
            logits, one.long(), one, one, torch.zeros_like(one), torch.ones(3, device=device), 500,
            scratch,
        )  # fmt: skip
        assert not bool(scratch.any())


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema and fake of specmesh::draw agree with what it does."""
    one = ints([1, 2], device)
    arguments = (
        random_rows(2, 64, device), one.long(), one, one, torch.zeros_like(one),
        torch.ones(2, device=device), None, 64, workspace(2, device),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.specmesh.draw.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def counted(weights: Tensor, num: int, device: str) -> Tensor:
    """How often each id wins `num` races of the production op, one seed a race."""
    size = weights.numel()
    counts = torch.zeros(size, dtype=torch.int64)
    for first in range(0, num, 500_000):
        rows = min(500_000, num - first)
        logits = weights.log().to(device).expand(rows, size)
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        tokens = draw(
            logits, torch.arange(first, first + rows, device=device), zeros, zeros, zeros,
            torch.ones(rows, device=device), size, workspace(rows, device),
        ).tokens  # fmt: skip
        counts += tokens.cpu().bincount(minlength=size)
    return counts


def test_races_follow_the_law(device: str) -> None:
    """Draws over seeds (1e7 on a GPU) fit softmax by chi-square, false alarm 1e-6; on a GPU a law
    0.002 away is refused."""
    weights = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    num = 10_000_000 if device == "cuda" else 120
    counts = counted(weights, num, device).numpy()
    law = weights.double().numpy() / weights.double().sum().item()
    assert stats.chisquare(counts, num * law).pvalue > 1e-6
    if device == "cuda":
        shifted = law + np.array([0.002, -0.002, 0, 0, 0])
        assert stats.chisquare(counts, num * shifted).pvalue < 1e-6


def test_rare_ids_win_as_often_as_they_should(device: str) -> None:
    """1000 ids of probability 1e-7 each win 1e-4 of 1e7 races together (on a CPU, 5e-4 in
    60 races): the uniforms are fine where rare events live."""
    num, rare = (10_000_000, 1e-7) if device == "cuda" else (60, 5e-4)
    weights = torch.full((1001,), rare, dtype=torch.float64)
    weights[0] = 1.0 - 1000 * rare
    counts = counted(weights.float(), num, device)
    expected = num * 1000 * rare
    assert abs(int(counts[1:].sum()) - expected) < 5.0 * expected**0.5
    assert int((counts[1:] > 0).sum()) > expected / 3  # many different ids, not one
