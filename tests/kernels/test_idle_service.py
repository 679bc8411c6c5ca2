"""Services whose device computes nothing: how long their launches take and what they have drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draft_service.device_proposer import DeviceProposer
from specmesh.bench.idle_service import (
    Drawn,
    IdleCache,
    IdleDecoder,
    IdlePrograms,
    Judged,
    Stream,
    drawn_token,
    row_ids,
)
from specmesh.engine.program_set import ProgramSet
from specmesh.engine.step_programs import StepProgram, StepShape
from target_service.device_verifier import UNUSED, DeviceVerifier

VOCAB = 258
STEP_S = 0.25
CHAIN = StepShape(16, 1, num_passes=8)


class Clock:
    """A time that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def make_program(side: str, shape: StepShape, clock: Clock) -> StepProgram:
    """An idle program of a draft or target."""
    make: Any = DeviceProposer if side == "draft" else DeviceVerifier
    sampler = make(VOCAB, 17, 3, torch.device("cpu")).sampler
    decoder: Any = IdleDecoder(VOCAB)
    cache: Any = IdleCache(64)
    like = ProgramSet(decoder, cache, sampler, 64)
    made_up = (Drawn if side == "draft" else Judged)(VOCAB, STEP_S)
    programs = IdlePrograms(like, made_up, Stream(clock))
    programs.capture([shape])
    return programs.programs[shape]


def test_a_chain_of_a_target_lasts_as_long_as_its_passes() -> None:
    """Eight passes take eight steps, and the chain launched behind begins when they are over."""
    clock = Clock()
    program = make_program("target", CHAIN, clock)
    assert program.launch().done.instant == 12.0
    clock.now_s = 11.9
    behind = program.launch_again()
    assert (behind.done.instant, behind.is_behind) == (14.0, True)
    clock.now_s = 20.0  # idle in between
    assert program.launch().done.instant == 22.0
    one = make_program("target", StepShape(1, 4, rows_per_seq=4), clock)
    assert one.launch().done.instant == 20.25


def test_a_proposal_lasts_one_step_of_a_draft() -> None:
    """Three candidates take no longer than one, and a second launch waits for the first."""
    clock = Clock()
    program = make_program("draft", StepShape(1, 2, num_passes=3), clock)
    assert program.launch().done.instant == 10.25
    assert program.launch().done.instant == 10.5


def test_a_target_keeps_candidates_in_turn_in_every_session() -> None:
    """0, 1, 2, 0, .. of two candidates, each session for itself; nothing of plain decoding, of
    padding, or left from the launch before."""
    program = make_program("target", StepShape(4, 4, rows_per_seq=4), Clock())
    host = program.buffers.inputs.host
    found = []
    for counts in ([2, 0, 1, UNUSED], [2, 2, 0, UNUSED], [2, 2, 1, UNUSED], [2, 2, 1, UNUSED]):
        host["seeds"][:] = [-5, 6, 7, 0]
        host["num_candidates"][:] = counts
        outputs = program.launch().outputs
        found.append(outputs["counts"][0, :, 0].tolist())
        emitted, status = outputs["counts"][0, :, 1].tolist(), outputs["counts"][0, :, 2]
        assert emitted == [1 + kept for kept in found[-1]]
        assert not status.any()
        assert set(outputs["mismatch"].tolist()) == {-1}
    assert found == [[0, 0, 0, 0], [1, 0, 0, 0], [2, 1, 1, 0], [0, 2, 0, 0]]


@pytest.mark.parametrize("vocab_size", [30, 258, 49_152])
def test_what_is_drawn_is_in_its_row(vocab_size: int) -> None:
    """Ids of rows ascend within any vocabulary, and both roles draw the same one of them."""
    ids = row_ids(vocab_size)
    assert ids.diff().min() > 0
    assert ids[-1] < vocab_size
    drawn = [torch.zeros(2, 3, dtype=torch.int32) for _ in range(2)]
    others = {"mismatch": torch.zeros(3), "counts": torch.zeros(2, 3, 3)}
    others |= {name: torch.zeros(2, 3) for name in ("max_probs", "judged", "dropped_mass")}
    rows = {"ids": torch.zeros(2, 3, 1024), "weights": torch.zeros(2, 3, 1024)}
    reports = {"reports": torch.zeros(2, 3, 3)}
    Judged(vocab_size, STEP_S).fill({"tokens": drawn[0], **others})
    Drawn(vocab_size, STEP_S).fill({"tokens": drawn[1], **others, **rows, **reports})
    assert drawn[0].unique().tolist() == drawn[1].unique().tolist() == [drawn_token(ids)]
    assert drawn_token(ids) in ids
    assert rows["ids"][0, 0, : len(ids)].tolist() == ids.tolist()
    assert (rows["weights"].sum(-1) == len(ids)).all()
