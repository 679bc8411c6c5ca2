"""What overload and soak conclude from their samples: growth is found, noise is not called flat."""

from __future__ import annotations

import numpy as np
import pytest

from tests.chaos.load import Stream, drawn_jobs
from tests.chaos.measures import Samples, trend
from tests.chaos.overload import Tally, report

TIMES = np.arange(0.0, 1200.0, 2.0).tolist()
SHARE = 0.1  # of itself in an hour


def memory(per_minute: float, noise: float, warm_up: float = 0.0) -> list[float]:
    """MiB at TIMES around 500, with what caches take at first."""
    rng = np.random.default_rng(5)
    times = np.array(TIMES)
    filling = warm_up * (1 - np.exp(-times / 60))
    values = 500 + per_minute * times / 60 + filling + noise * rng.standard_normal(len(times))
    return values.tolist()


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        (memory(0.0, 2.0), True),
        (memory(0.0, 2.0, warm_up=100.0), True),
        (memory(-3.0, 2.0), True),
        (memory(2.0, 2.0), False),
        (memory(0.0, 200.0), False),
    ],
    ids=["level", "level after a warm-up", "falling", "rising", "too noisy to tell"],
)
def test_a_trend_is_flat_only_where_growth_is_ruled_out(values: list[float], flat: bool) -> None:
    """The upper end of the interval counts: what cannot be told from growth is not flat."""
    assert trend(TIMES, values).is_flat(SHARE) is flat


def test_a_slope_lies_in_its_interval() -> None:
    """The line through 2 MiB a minute of growth says so, within its own confidence."""
    found = trend(TIMES, memory(2.0, 5.0))
    assert abs(found.slope - 2.0) < found.half_width < 1.0
    assert found.mean == pytest.approx(525, abs=10)


def streams(*errors: str | None) -> list[Stream]:
    """Streams that ended, each with an error or after two tokens."""
    (job,) = drawn_jobs(1, 1)
    found = []
    for error in errors:
        stream = Stream("s", job)
        if error is None:
            stream.tokens, stream.times, stream.finished = [1, 2], [0.0, 0.1, 0.3], 2
        else:
            stream.error, stream.retry_after_s = error, 1.0
        found.append(stream)
    return found


def tally(tenant: str, *errors: str | None, delay_s: float = 1.0) -> Tally:
    """What callers of one tenant were given."""
    found = Tally()
    for stream in streams(*errors):
        stream.retry_after_s = delay_s
        found.take(tenant, stream)
    return found


def samples(running: float = 8, waiting: float = 16, grown: float = 0.0) -> Samples:
    """Four of each."""
    found = Samples(times_s=[0.0, 1.0, 2.0, 3.0])
    found.values["running"] = [1, running, 8, 8]
    found.values["waiting"] = [0, waiting, 16, 16]
    found.values["rss target0"] = [100, 500, 500, 500 + grown]
    return found


GOOD = tally("small", None, "TOO_BUSY: full")


@pytest.mark.parametrize(
    ("pressed", "measured", "held", "failed"),
    [
        (GOOD, samples(), "", []),
        (GOOD, samples(running=9), "", ["running"]),
        (GOOD, samples(waiting=17), "", ["waiting"]),
        (GOOD, samples(grown=65), "", ["memory"]),
        (GOOD, samples(), "a session", ["slow reader"]),
        (tally("large", None, "TOO_BUSY: full"), samples(), "", ["fairness"]),
        (tally("small", None, "TOO_BUSY: full", delay_s=0.0), samples(), "", ["errors"]),
        (tally("small", None, "INTERNAL: bug"), samples(), "", ["errors"]),
        (tally("small", None), samples(), "", ["errors"]),
    ],
)
def test_overload_names_what_is_not_as_it_should_be(
    pressed: Tally, measured: Samples, held: str, failed: list[str]
) -> None:
    """Each bound by itself; an overload in which nobody was refused was none."""
    assert report(tally("small", None), pressed, measured, held)["failed"] == failed


def test_overload_compares_latencies() -> None:
    """Twice the time between two chunks is too slow."""
    slow = tally("small", None, "TOO_BUSY: full")
    slow.gaps = [2 * gap for gap in slow.gaps]
    assert report(tally("small", None), slow, samples(), "")["failed"] == ["latency"]
