"""Fields of the JSON files that came with a model: read with a type and a range, or refused.

Owns how such files are distrusted: whoever packed a model folder may have written anything into
them. Every refusal is a ConfigError naming file or field. Must not know what a field is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmesh.errors import ConfigError

MAX_COUNT = (1 << 31) - 1


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError where it cannot be read or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # an escape may stand for half a character
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as broken:
        raise ConfigError(f"{path} is not valid JSON: {broken}") from broken
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


def number(
    fields: Mapping[str, Any], name: str, default: float | None, low: float, high: float
) -> float:
    """A finite number in [low, high]; default where the field is absent or null (None: needed)."""
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)  # NaN and infinities are in no range
    raise ConfigError(f"config.json: {name} is {value!r}, expected in [{low:g}, {high:g}]")


def count(
    fields: Mapping[str, Any], name: str, default: int | None = None, high: int = MAX_COUNT
) -> int:
    """A whole number in [1, high]; default as in `number`, also for 0."""
    value = number(fields, name, default, 0, high) or default
    if value is None or value < 1 or value != int(value):
        raise ConfigError(f"config.json: {name} is {fields.get(name)!r}, expected in [1, {high}]")
    return int(value)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """One id, a list of ids or nothing, ascending without repeats."""
    if value is None:
        return ()
    found = value if isinstance(value, list) else [value]
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= MAX_COUNT:
            raise ConfigError(f"{name} is {value!r}, expected token ids")
    return tuple(sorted(set(found)))
