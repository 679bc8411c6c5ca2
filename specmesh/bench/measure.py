"""Series of measurements and what identifies a run. No clock, no printing."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

# What the numbers depend on.
PACKAGES = ("specmesh", "torch", "transformers", "grpcio", "ray", "triton", "numpy")


@dataclass(frozen=True, slots=True)
class Series:
    """Repeated measurements of one thing. `unit` is a UCUM-like unit: ms, s, {token}/s, 1."""

    name: str
    unit: str
    values: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The value below which `share` of the measurements lie, linearly interpolated."""
        ordered = sorted(self.values)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def median(self) -> float:
        """The middle measurement."""
        return self.quantile(0.5)

    def record(self) -> dict[str, Any]:
        """median, p20, p80 and n, as a JSON line holds them."""
        return {
            "case": self.name,
            "unit": self.unit,
            "median": self.median,
            "p20": self.quantile(0.2),
            "p80": self.quantile(0.8),
            "n": len(self.values),
        }


def series(name: str, unit: str, values: Sequence[float]) -> Series:
    """A Series. Raises ValueError when there is nothing in it."""
    if not values:
        raise ValueError(f"{name}: no measurements")
    return Series(name, unit, tuple(values))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two medians of one run against a stated bound.

    kind: "at least" or "at most". The value is `measured` over `baseline`, or `measured` itself
    where there is no baseline.
    """

    name: str
    measured: Series
    baseline: Series | None
    kind: str
    bound: float

    @property
    def value(self) -> float:
        """What is held against the bound."""
        return self.measured.median / (self.baseline.median if self.baseline else 1.0)

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        return self.value >= self.bound if self.kind == "at least" else self.value <= self.bound

    def record(self) -> dict[str, Any]:
        """The comparison as a JSON line holds it."""
        return {
            "case": self.name,
            "value": self.value,
            "unit": self.measured.unit if self.baseline is None else "1",
            "bound": f"{self.kind} {self.bound:g}",
            "met": self.met,
        }


def versions() -> dict[str, str]:
    """Versions of everything the numbers depend on, the interpreter and processor included."""
    found = {name: _version(name) for name in PACKAGES}
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # the source tree itself, or a baseline left out
        return "not installed"
