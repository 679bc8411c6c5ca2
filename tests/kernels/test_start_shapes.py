"""Every step that a service can be asked for at any time is captured before it serves.

What is not runs with its kernels compiled and launched one by one in a request's path: seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.device_proposer import DeviceProposer
from specmesh.config import EngineSettings
from specmesh.engine import serving
from specmesh.engine.buckets import filtered_shapes, start_shapes
from specmesh.engine.executor import MAX_SLOTS
from specmesh.engine.serving import buckets_for
from specmesh.engine.step_programs import StepShape
from target_service.device_verifier import PASS_COUNTS, DeviceVerifier

VOCAB, CONTEXT = 49152, 8192
MAX_DRAFT_TOKENS = 8
NUM_SEQS = (1, 2, 5, 16, 37, 64)
CONTEXTS = (100, 1024, 1025, CONTEXT)
CHUNKS = (3, 10, 64, 65, 256, 265)


def made(make: Any, device: str) -> tuple[list[StepShape], list[StepShape], Any]:
    """Shapes captured and shapes compiled only, of a role with settings as they are by default."""
    settings = EngineSettings(model=Path("anything"))
    side = make(VOCAB, MAX_SLOTS, settings.max_num_draft_tokens, torch.device(device))
    buckets = buckets_for(settings, side, CONTEXT)
    return start_shapes(side, buckets), filtered_shapes(side, buckets), buckets


def assert_covered(needs: list[StepShape], shapes: list[StepShape]) -> None:
    missing = [need for need in needs if not any(shape.covers(need) for shape in shapes)]
    assert not missing


def test_the_targets_steps_are_there(device: str) -> None:
    """Plain chains, rounds of every k, prompts of any length, alone and beside plain decoding."""
    shapes, _, buckets = made(DeviceVerifier, device)
    assert buckets.max_query_lens == (1, 2, 3, 5, 9)
    needs = []
    for context in CONTEXTS:
        for n in NUM_SEQS:
            needs += [StepShape(n, 1, 0, passes, 1, context) for passes in PASS_COUNTS]
            needs += [
                StepShape(n, 1 + k, 0, 1, 1 + k, context, ids)
                for k in range(1, MAX_DRAFT_TOKENS + 1)
                for ids in (0, 300, 1024)
            ]
            needs += [StepShape(n, 1, rows, 1, 1, context) for rows in CHUNKS]
            needs += [StepShape(n, q, 0, 1, 1, context) for q in range(1, 10)]  # short prompts
        needs += [StepShape(0, 1, rows, 1, 1, context) for rows in CHUNKS]
    assert_covered(needs, shapes)


def test_the_drafts_steps_are_there(device: str) -> None:
    """Chains of every k from one token or two, and chunks: a draft that is three tokens behind or
    more takes one, as no chain begins with so many."""
    shapes, _, buckets = made(DeviceProposer, device)
    assert buckets.max_query_lens == (1, 2)
    needs = []
    for context in CONTEXTS:
        for n in NUM_SEQS:
            needs += [
                StepShape(n, fed, 0, passes, 1, context)
                for fed in (1, 2)
                for passes in range(1, MAX_DRAFT_TOKENS + 1)
            ]
            needs += [StepShape(n, 2, rows, 1, 1, context) for rows in CHUNKS]
        needs += [StepShape(0, 1, rows, 1, 1, context) for rows in CHUNKS]
    assert_covered(needs, shapes)


@pytest.mark.parametrize("make", [DeviceVerifier, DeviceProposer])
def test_filters_are_compiled_with_every_number_of_rows(make: Any, device: str) -> None:
    """Once for every kernel that a filtered step takes: whatever rows of logits it has."""
    shapes, compiled, _ = made(make, device)
    assert all(shape.is_filtered for shape in compiled)
    assert {shape.rows_per_seq for shape in compiled} == {shape.rows_per_seq for shape in shapes}
    assert not any(shape.is_filtered for shape in shapes)


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "num_threads"), [(None, False, None), (None, True, 1), (3, True, 3)]
)
def test_a_gpus_host_works_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, on_gpu: bool, num_threads: int | None
) -> None:
    """Unless told otherwise: what is left to the host is too little for more."""
    monkeypatch.setattr(serving, "runs_captured", lambda settings: on_gpu)
    settings = EngineSettings(model=Path("anything"), num_threads=wanted)
    assert serving.host_threads(settings) == num_threads
