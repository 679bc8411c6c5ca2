"""The running z-scores: silent on a correct system, loud on planted faults."""

from __future__ import annotations

import math

import pytest

from specmesh.detectors import ALARM_Z, MIN_VARIANCE, LawWatch, RunningZ
from tests.telemetry.rounds import first_alarms, simulate


@pytest.mark.parametrize("seed", [0, 1])
def test_a_correct_system_raises_no_alarm_in_50_000_rounds(seed: int) -> None:
    """Neither score passes 5 over 50,000 rounds of the production accept path."""
    assert first_alarms(simulate("none", seed, 50_000)) == {}


def test_a_draft_sampled_at_another_temperature_moves_the_acceptance_score() -> None:
    """Sampled at 0.7, sent at 1.0: found within 5,000 rounds (here 240) from outcomes alone."""
    assert first_alarms(simulate("temperature", 0, 5_000))["acceptance"] < 1_000


@pytest.mark.parametrize(
    ("fault", "bound"), [("residual_from_p", 5_000), ("bonus_from_previous_row", 5_000)]
)
def test_a_closing_draw_from_the_wrong_law_moves_the_argmax_score(fault: str, bound: int) -> None:
    """Residual drawn from p (here after 1,356 rounds), bonus from the row before it (827). The
    acceptance score is blind to both: coins are thrown before the closing draw."""
    alarms = first_alarms(simulate(fault, 0, bound))
    assert alarms.keys() == {"argmax"}


def test_the_score_is_the_standardised_sum() -> None:
    """Without forgetting to speak of, z = sum(x - a) / sqrt(sum(a (1 - a)))."""
    score = RunningZ(memory=10**12)
    for index in range(1000):
        score.observe(index % 2 == 0, 0.4)
    assert score.z == pytest.approx((500 - 400) / math.sqrt(1000 * 0.24), rel=1e-9)
    assert score.alarmed
    assert score.num_observed == 1000


def test_little_evidence_raises_no_alarm() -> None:
    """A rejection at an expected acceptance of 0.999 is 31 sigma of nearly nothing: no alarm."""
    score = RunningZ()
    assert not score.observe(False, 0.999)
    assert score.z == 0.0
    assert not score.alarmed


def test_certain_events_and_rounding_add_no_variance() -> None:
    """Greedy rows (probability 1, or a hair more by float32 sums) leave the score at zero."""
    watch = LawWatch()
    for _ in range(1000):
        assert not watch.observe_emitted([True], [1.0000001])
        assert not watch.observe_candidates(1, [1.0])
    assert watch.argmax.z == watch.acceptance.z == 0.0


def test_nan_is_ignored() -> None:
    """A row that is no law says nothing about the law, and must not poison the sum."""
    score = RunningZ()
    assert not score.observe(True, math.nan)
    assert score.num_observed == 0


def test_an_alarm_is_raised_once_and_latched_until_reset() -> None:
    """One alarm a fault, visible afterwards, armed again by `reset`."""
    score = RunningZ()
    raised = sum(score.observe(True, 0.5) for _ in range(2000))
    assert raised == 1
    assert score.alarmed
    needed = math.ceil(max(MIN_VARIANCE / 0.25, (2 * ALARM_Z * 0.5) ** 2 / 0.25))
    score.reset()
    assert not any(score.observe(True, 0.5) for _ in range(needed // 2))
    assert any(score.observe(True, 0.5) for _ in range(needed))


def test_a_fault_after_a_long_correct_life_is_found() -> None:
    """Old evidence fades: ten memories of correct events do not hide a shift that follows."""
    score = RunningZ(memory=2_000)
    for index in range(20_000):
        assert not score.observe(index % 2 == 0, 0.5)
    assert any(score.observe(index % 5 < 4, 0.5) for index in range(2_000))


def test_old_evidence_fades_from_both_sums() -> None:
    """A burst short of an alarm is gone after ten memories of events that balance."""
    score = RunningZ(memory=1_000)
    for _ in range(100):
        score.observe(True, 0.5)
    for index in range(1_000):
        score.observe(index % 2 == 0, 0.5)
    burst = score.z
    for index in range(10_000):
        score.observe(index % 2 == 0, 0.5)
    assert burst > 1.0
    assert abs(score.z) < 0.1
