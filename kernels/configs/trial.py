"""One candidate launch of a sweep, put in the place of what the tables name for a while.

Must not know how candidates are timed: `sweep` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.configs import layers, sampling

ARCHITECTURE = "sm_90"


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: the case that times it, a label, and how to make it the launch in use."""

    case: str
    label: str
    choose: Callable[[], None]


def _tables() -> list[dict[Any, Any]]:
    return [
        sampling._JUDGE, sampling._CLOSE, sampling._SEARCH, sampling._DRAFT, layers._LINEAR,
        layers._ROPE, layers._NORM_VALUES,
    ]  # fmt: skip


@contextmanager
def in_use(trial: Trial) -> Iterator[None]:
    """The trial's launch is the one in use; behind it the tables are as they were."""
    saved = [dict(table) for table in _tables()]
    trial.choose()
    try:
        yield
    finally:
        for table, before in zip(_tables(), saved, strict=True):
            table.clear()
            table.update(before)
