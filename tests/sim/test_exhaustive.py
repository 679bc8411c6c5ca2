"""One session, two rounds after the prompt's, k <= 2: one fault at every step, every order."""

from __future__ import annotations

import pytest

from tests.sim.caller import RULES
from tests.sim.explore import explore, small_run

FAULTS = {"target0", "draft0", "coordinator0", "caller", "deadline target", "deadline draft"}


@pytest.mark.parametrize("place", ["target", "coordinator"])
@pytest.mark.parametrize("k", [1, 2])
def test_one_fault_at_every_step(k: int, place: str) -> None:
    """Whichever process dies, or deadline passes, at whichever step: the output is whole."""
    setup, request = small_run("coupled", k, place)
    found = explore(setup, request, after_fault=False)
    assert found.failures == []
    assert set(found.faults) == {"none", *FAULTS}
    assert found.num_runs > 100


def test_every_order_without_faults() -> None:
    """Draft and target answer in any order; no order of replies changes the output."""
    for rule in RULES:
        setup, request = small_run(rule, 2, "target", num_targets=2)
        found = explore(setup, request, num_faults=0)
        assert found.failures == []
        assert found.num_runs >= 2
