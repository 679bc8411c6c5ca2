"""Services whose messages hold few rows, through the real coordinator."""

from __future__ import annotations

import pytest

from specmesh import wire
from specmesh.client import GenerateOptions
from specmesh.config import SpeculationSettings
from tests.e2e.stack import VOCAB_SIZE, running_stack
from tests.rpc import peers


@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_rows_that_no_message_holds_are_not_asked_for(decide_at: str) -> None:
    """Services with small messages: candidates go on, neither audits nor decisions made here take
    them for bad ones."""
    room = 2 * 4 * VOCAB_SIZE  # for two rows beside all else
    setup = peers.Setup(max_message_bytes=wire.REST_BYTES + room)
    speculation = SpeculationSettings(audit_ratio=1.0)
    async with running_stack(setup=setup, speculation=speculation) as stack:
        generation = await stack.client.generate(
            [1, 2, 3, 4, 5],
            GenerateOptions(
                max_tokens=9, ignore_eos=True, seed=5, num_draft_tokens=3, decide_at=decide_at
            ),
        )
    stats = generation.finished[0].speculation
    assert stats.num_draft_tokens > 0
    assert set(stats.fallback_rounds) <= {"budget"}
