"""Which outcomes of a round a draft prepares for."""

from __future__ import annotations

import pytest
import torch

from draft_service.outcomes import Noise, is_foreseeable, likely_outcomes, ranked
from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import draft_pb2, session_pb2
from specmesh import wire

VOCAB, BASE_LEN = 64, 17
IDS = torch.arange(0, 40, 2)


def row(seed: int, *, is_half: bool = True) -> session_pb2.Distribution:
    """A sparse row of 20 ids."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(len(IDS), generator=generator).to(torch.float16).float()
    return wire.sparse_frame(IDS.int().numpy(), weights.numpy(), VOCAB, is_half=is_half)


def proposal(*tokens: int) -> draft_pb2.Proposal:
    """Candidates, each with a row of its own."""
    rows = [row(index, is_half=index % 2 == 0) for index in range(len(tokens))]
    return draft_pb2.Proposal(tokens=tokens, distributions=rows)


@pytest.mark.parametrize("num_outcomes", [1, 4, 16, 64])
@pytest.mark.parametrize("num_candidates", [1, 2, 4, 8])
def test_outcomes_are_ranked_by_their_chance(num_candidates: int, num_outcomes: int) -> None:
    """A further place in a race comes behind the one before it, as does one more candidate kept at
    the same place; fewer outcomes are the beginning of more."""
    found = ranked(num_candidates, num_outcomes)
    assert len(found) == len(set(found)) == num_outcomes
    for index, (kept, place) in enumerate(found):
        before = found[:index]
        assert place == 0 or (kept, place - 1) in before
        assert kept in (0, num_candidates) or (kept - 1, place) in before
    assert ranked(num_candidates, 64)[:num_outcomes] == found


def test_shares_of_a_block_of_four() -> None:
    """With 16 outcomes for four candidates: seven tokens where the first was rejected, the first
    of them before anything else."""
    kept = [kept for kept, _ in ranked(4, 16)]
    assert [kept.count(number) for number in range(5)] == [7, 4, 2, 1, 2]
    assert ranked(4, 3) == ((0, 0), (4, 0), (1, 0))


@pytest.mark.parametrize("seed", range(20))
def test_a_target_that_agrees_is_foreseen(seed: int) -> None:
    """Where the target's law is the draft's but for the rejected candidate, the first id foreseen
    is the one that the target draws, with its own noise at its own position."""
    drafted = proposal(4, 10, 38)
    behind = row(9)
    outcomes = list(likely_outcomes(drafted, behind, Noise(seed, BASE_LEN), 32))
    for kept, (frame, candidate) in enumerate(
        zip(drafted.distributions, drafted.tokens, strict=True)
    ):
        law = wire.decode(frame, VOCAB).dense().clone()
        law[candidate] = 0.0
        won = reference.race(law, seed, BASE_LEN + kept, BASE_LEN, Purpose.RESIDUAL)
        assert next(token for number, token in outcomes if number == kept) == won
    bonus = reference.race(
        wire.decode(behind, VOCAB).dense(), seed, BASE_LEN + 3, BASE_LEN, Purpose.BONUS
    )
    assert next(token for number, token in outcomes if number == 3) == bonus


def test_outcomes_are_distinct_and_possible() -> None:
    """No token twice behind the same candidates, never the one that was rejected, all of the row;
    as many as there are where more are wanted."""
    drafted = proposal(4, 10)
    for num_outcomes in (1, 5, 16, 64):
        outcomes = list(likely_outcomes(drafted, row(9), Noise(1, BASE_LEN), num_outcomes))
        assert len(set(outcomes)) == len(outcomes) <= num_outcomes
        assert all(token in IDS.tolist() for _, token in outcomes)
        assert not {(0, 4), (1, 10)} & set(outcomes)
        for kept in range(2):
            wanted = sum(number == kept for number, _ in ranked(2, num_outcomes))
            found = sum(number == kept for number, _ in outcomes)
            assert found == min(wanted, len(IDS) - 1)


def test_without_the_row_behind_all_candidates_none_of_its_outcomes_comes() -> None:
    """The draft did not look there."""
    outcomes = likely_outcomes(proposal(4, 10), None, Noise(1, BASE_LEN), 16)
    assert {kept for kept, _ in outcomes} == {0, 1}


def test_only_whole_proposals_of_sparse_rows_are_foreseen() -> None:
    """Dense rows are too many bytes; without rows nothing tells what is likely."""
    assert is_foreseeable(proposal(4, 10))
    assert not is_foreseeable(draft_pb2.Proposal())
    assert not is_foreseeable(draft_pb2.Proposal(tokens=[4, 10]))
    dense = wire.encode(wire.cut(torch.rand(2048), session_pb2.ROW_POLICY_DENSE_F32).row)
    mixed = draft_pb2.Proposal(tokens=[4, 10], distributions=[row(0), dense])
    assert dense.encoding == wire.DENSE_F32
    assert not is_foreseeable(mixed)
