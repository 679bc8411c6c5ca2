"""Seeded runs of the whole system under faults, and that a seed says all about its run."""

from __future__ import annotations

import pytest

from tests.sim.options import FAULT_NAMES, Faults, Setup, drawn_setup, without
from tests.sim.world import World

NUM_SEEDS = 240
CHUNK = 40


@pytest.mark.parametrize("start", range(0, NUM_SEEDS, CHUNK))
def test_seeds(start: int) -> None:
    """No fault changes an output, loses or repeats a token, leaks a page or hangs a request."""
    failed = {}
    for seed in range(start, start + CHUNK):
        report = World(drawn_setup(seed)).run()
        if report.failures:
            failed[seed] = report.failures[0]
    assert failed == {}


@pytest.mark.parametrize("seed", [3, 12])
def test_a_seed_gives_one_run(seed: int) -> None:
    """Two runs of a seed see the same faults at the same times and deliver the same."""
    first, second = (World(drawn_setup(seed)).run() for _ in range(2))
    assert first.injected.total() > 0
    assert (first.digest, first.sim_s, first.injected) == (
        second.digest,
        second.sim_s,
        second.injected,
    )


def test_a_reset_is_noticed_at_both_ends_before_quiet() -> None:
    """Named seed: the target noticed a reset so late that it still held the session when nobody
    spoke any more."""
    report = World(drawn_setup(13042)).run()
    assert report.injected["resets"] > 0
    assert report.failures == []


@pytest.mark.parametrize("name", FAULT_NAMES)
def test_every_fault_happens(name: str) -> None:
    """Each option by itself injects its fault within a few runs, which pass all the same."""
    rate = {"duplicate": 0.2, "drop": 0.1, "delay": 0.2, "lie": 0.5}.get(name, 0.7)
    value = rate if isinstance(getattr(Faults(), name), float) else 3
    faults = Faults(window_s=0.1, **{name: value})
    for seed in range(10):
        report = World(Setup(seed=seed, max_tokens=10, num_draft_tokens=2, faults=faults)).run()
        assert report.failures == []
        assert set(report.injected) <= {name}
        if report.injected[name]:
            return
    pytest.fail("ten runs without it")


def test_without_faults_nothing_is_injected() -> None:
    """The undisturbed system passes the same oracles, and every request gets all its tokens."""
    for seed in range(5):
        world = World(without(drawn_setup(seed)))
        report = world.run()
        assert (report.failures, report.injected.total()) == ([], 0)
        assert all(caller.received.finished for caller in world.callers)
        assert all(caller.received.num_attempts == 1 for caller in world.callers)
