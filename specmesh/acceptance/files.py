"""Writing a measurement beside what it is about: table, JSON and plot."""

from __future__ import annotations

import json
from pathlib import Path

from specmesh.acceptance.measure import Measurement
from specmesh.acceptance.report import markdown, svg
from specmesh.errors import ConfigError


def write_measurement(folder: Path, measurement: Measurement) -> list[Path]:
    """Write acceptance.md, acceptance.json and acceptance.svg. Raises ConfigError."""
    contents = {
        "acceptance.md": markdown(measurement),
        "acceptance.json": json.dumps(measurement.record(), indent=2) + "\n",
        "acceptance.svg": svg(measurement),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as refused:
        raise ConfigError(f"cannot write {folder}: {refused}", field="out") from refused
    return [folder / name for name in contents]
