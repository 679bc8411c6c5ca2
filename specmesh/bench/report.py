"""JSON lines of a run: one per measurement, each with the command and every version."""

from __future__ import annotations

import json
from typing import Any

from specmesh.bench.measure import versions
from specmesh.bench.suite import Results


def json_lines(results: Results, command: str) -> list[str]:
    """One line per measurement and comparison, each with the command and every version."""
    common: dict[str, Any] = {"command": command, "versions": versions()}
    records: list[dict[str, Any]] = [measured.record() for measured in results.series]
    records += [ratio.record() for ratio in results.ratios]
    records += [
        {
            "case": f"acceptance at position {entry.position}",
            "unit": "1",
            "value": entry.rate,
            "judged": entry.judged,
            "accepted": entry.accepted,
        }
        for entry in results.positions
    ]
    records.append(
        {
            "case": "tokens per round",
            "unit": "{token}",
            "predicted": results.predicted_tokens,
            "measured": results.measured_tokens,
        }
    )
    return [json.dumps(record | common) for record in records]
