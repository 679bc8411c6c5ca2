"""Each planted bug is found by the oracles within a few runs, and only because of the bug."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, Bug
from tests.sim.world import World

NUM_SEEDS = 20


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug) -> None:
    """Some run of at most NUM_SEEDS fails with the bug, and the same run passes without it."""
    for seed in range(NUM_SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            failures = World(bug.setup(seed)).run().failures
        if failures:
            assert World(bug.setup(seed)).run().failures == []
            return
    pytest.fail(f"{NUM_SEEDS} runs with this bug passed every oracle")
