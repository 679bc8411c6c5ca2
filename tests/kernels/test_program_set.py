"""Shapes that are captured while sessions are served: apart, and without harm where it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specmesh.engine import program_set
from specmesh.engine.program_set import ProgramSet
from specmesh.engine.step_programs import StepShape
from specmesh.engine.waits import Apart, block_on

SHAPE = StepShape(num_seqs=4, max_query_len=5)


class Program:
    """A program that is captured by saying so."""

    def __init__(self, shape: StepShape, *others: Any) -> None:
        self.shape = shape
        self.is_captured = False
        self.buffers = SimpleNamespace(num_bytes=0)

    def capture(self, pool: Any) -> None:
        self.is_captured = True


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ProgramSet:
    """Programs of a device that captures, of which there is none."""
    monkeypatch.setattr(program_set, "StepProgram", Program)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    spec = SimpleNamespace(num_embeddings=1)
    decoder: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, spec=spec)
    nothing: Any = None
    found = ProgramSet(decoder, nothing, nothing, 1)
    found._captures = True
    return found


def test_a_capture_that_pays_is_work_apart(programs: ProgramSet) -> None:
    """Nothing is captured before whoever drives the step has given the work to a thread."""
    need = StepShape(num_seqs=3, max_query_len=5)
    program = block_on(programs.find(need, lambda shape: SHAPE))
    assert program.shape == SHAPE
    programs._spent_s[SHAPE] = 1.0
    finding = programs.find(need, lambda shape: SHAPE)
    wait = next(finding)
    assert isinstance(wait, Apart)
    assert not program.is_captured
    wait.block()
    with pytest.raises(StopIteration) as end:
        finding.send(None)
    assert end.value.value is program
    assert program.is_captured
    assert programs.is_ready(need)
    assert block_on(programs.find(need, lambda shape: SHAPE)) is program  # and once only
    assert programs.cost.num_programs == 1


@pytest.mark.parametrize("when", ["serving", "idle"])
def test_a_shape_that_cannot_be_captured_runs_on_uncaptured(
    programs: ProgramSet, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once: commands of its shape are served as before, and the engine lives."""
    tries: list[StepShape] = []

    def fail(self: Program, pool: Any) -> None:
        tries.append(self.shape)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Program, "capture", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for _ in range(3):
        program = block_on(programs.find(SHAPE, lambda shape: shape))
        if SHAPE not in programs._uncapturable:
            programs._spent_s[SHAPE] = 1.0
        if when == "serving":
            assert block_on(programs.find(SHAPE, lambda shape: shape)) is program
        else:
            programs.capture_next()
    programs.capture_next()
    assert tries == [SHAPE]
    assert not program.is_captured


def test_a_device_that_is_lost_with_a_capture_is_no_shape_to_go_on_without(
    programs: ProgramSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the engine must hear of it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(Program, "capture", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    block_on(programs.find(SHAPE, lambda shape: shape))
    programs._spent_s[SHAPE] = 1.0
    with pytest.raises(RuntimeError, match="lost"):
        programs.capture_next()
