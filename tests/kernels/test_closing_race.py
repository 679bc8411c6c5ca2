"""What the closing race leaves to the end: seconds of a slot, rows of no residual, long rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference, sampling
from kernels.configs.sampling import Launch
from kernels.sampling import DraftKind, DraftRows, Rule, accept, workspace
from kernels.streams import Purpose
from tests.kernels.rounds import (
    decision,
    emitted,
    logits_draft,
    proposed,
    round_of,
    shaped,
)

TILE = 512  # of a launch of one warp
NARROW = Launch(1, per_program=2)


@pytest.mark.parametrize("apart", [TILE + 128, 1])
@pytest.mark.parametrize("other", [0.0, 0.1])
def test_the_second_best_wins_where_the_first_leaves_no_residual(
    device: str, other: float, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q takes all of x, so y wins though x has the higher bound.

    apart: from x to y; they share a slot of two tiles, or four lanes look at their slots in turn.
    other: what a third id holds, in a slot of its own: then a winner stands while y is looked for.
    """
    monkeypatch.setattr(sampling, "close_launch", lambda *_: NARROW)
    num, vocab_size, x, y, z, refused = 9, 3 * TILE, 37, 37 + apart, 1300, 5
    target = torch.zeros(vocab_size)
    target[[x, y, z]] = torch.tensor([0.5, 0.5 - other, other])
    draft = torch.zeros(vocab_size)
    draft[[x, refused]] = torch.tensor([0.5, 0.5])
    logits = target.log().to(device).expand(2 * num, vocab_size)
    round_ = round_of(torch.full((num, 1), refused, device=device))
    weights = draft.to(device).expand(num, 1, vocab_size)
    outcome = accept(
        logits, round_, DraftRows(DraftKind.WEIGHTS, weights), vocab_size, workspace(num, device)
    )
    residual = target.clone()
    residual[x] = 0.0
    hidden = 0
    for session in range(num):
        winner = reference.race(residual, session, 100, 100, Purpose.RESIDUAL)
        assert emitted(outcome, session) == (winner,)
        hidden += reference.race(target, session, 100, 100, Purpose.RESIDUAL) == x
    assert hidden, "in no session did x have the higher bound"


@pytest.mark.parametrize("per_program", [1, 3])
def test_no_residual_in_many_programs_draws_from_the_target(
    device: str, per_program: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q is p but for 2^-30 at an id of no weight: [p - q]+ is zero, p's winner is drawn."""
    monkeypatch.setattr(sampling, "close_launch", lambda *_: Launch(1, per_program=per_program))
    num, vocab_size, refused = 2, 2300, 700
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(vocab_size, generator=generator)
    row[refused] = -torch.inf
    held = row.clone()
    held[refused] = row.max() - 21.0
    logits = row.to(device).expand(2 * num, vocab_size)
    round_ = round_of(torch.full((num, 1), refused, device=device))
    rows = logits_draft(held.to(device).expand(num, 1, vocab_size), round_)
    outcome = accept(logits, round_, rows, vocab_size, workspace(num, device))
    for session in range(num):
        winner = reference.race(shaped(row, 1.0, vocab_size), session, 100, 100, Purpose.RESIDUAL)
        assert emitted(outcome, session) == (winner,)


def test_rounds_of_more_candidates_than_lanes_of_four(device: str) -> None:
    """Seven candidates a session, of every rule, decide as the reference does."""
    bucket, vocab_size = 7, 1500
    generator = torch.Generator().manual_seed(17)
    target = torch.randn(3, bucket + 1, vocab_size, generator=generator) * 2
    draft = target[:, :bucket] + torch.randn(3, bucket, vocab_size, generator=generator) * 0.2
    target, draft = target.view(-1, vocab_size).to(device), draft.to(device)
    round_ = round_of(
        torch.zeros(3, bucket, dtype=torch.int64, device=device),
        num_candidates=[7, 6, 7],
        rules=[Rule.RESIDUAL, Rule.RESIDUAL, Rule.COUPLED],
    )
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    outcome = accept(target, round_, logits_draft(draft, round_), vocab_size, workspace(3, device))
    for session in range(3):
        expected = decision(target, draft, round_, session, vocab_size)
        assert emitted(outcome, session) == expected.tokens
    assert int(outcome.num_accepted.max()) > 3


def test_rows_past_the_last_candidate_need_not_exist(device: str) -> None:
    """With first_rows a session without candidates may own the last row; else rows are counted."""
    vocab_size = 1100
    generator = torch.Generator().manual_seed(29)
    logits = (torch.randn(5, vocab_size, generator=generator) * 2).to(device)
    draft = logits[None, 1:4].expand(2, 3, vocab_size).contiguous()
    round_ = round_of(
        torch.zeros(2, 3, dtype=torch.int64, device=device), num_candidates=[0, 3],
        first_rows=torch.tensor([4, 0], dtype=torch.int32, device=device),
    )  # fmt: skip
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    rows = logits_draft(draft, round_)
    outcome = accept(logits, round_, rows, vocab_size, workspace(2, device))
    bonus = reference.race(shaped(logits[4], 1.0, vocab_size), 0, 100, 100, Purpose.BONUS)
    assert emitted(outcome, 0) == (bonus,)
    assert int(outcome.num_emitted[1]) >= 1
    with pytest.raises(ValueError, match="rows of logits"):
        accept(logits, replace(round_, first_rows=None), rows, vocab_size, workspace(2, device))


def test_rows_that_four_runs_do_not_divide_are_refused() -> None:
    """The race bounds four runs at a time."""
    with pytest.raises(ValueError, match="multiple of four"):
        Launch(1, rows=6)
