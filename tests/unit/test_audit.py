"""An audit that could not look something up never passes for a clean one."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import audit

CLEAN = {"name": "a", "version": "1", "vulns": []}
HARMFUL = {"name": "b", "version": "2", "vulns": [{"id": "X-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found: c (3)"}


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        ([CLEAN], audit.CLEAN, "audit: 1 of 1 pins looked up, 0 with known vulnerabilities"),
        ([CLEAN, HARMFUL], audit.VULNERABLE, "audit: 2 of 2 pins looked up, 1 with"),
        ([HARMFUL, SKIPPED], audit.VULNERABLE, "1 of 2 pins looked up, 1 with"),
        ([CLEAN, SKIPPED], audit.UNCHECKED, "not looked up: not found: c (3)"),
        ([SKIPPED], audit.UNCHECKED, "0 of 1 pins looked up"),
        ([], audit.UNCHECKED, "nothing was looked up"),
        (None, audit.UNCHECKED, "no advisory source answers: the network is gone"),
    ],
)
def test_every_pin_is_accounted_for(
    found: list[dict[str, Any]] | None, code: int, line: str
) -> None:
    """The last line says how many were looked up, the code whether that was enough."""
    told: list[str] = []
    assert audit.judged(found, "the network is gone" if found is None else "", told.append) == code
    assert line in told[-1]
    assert len(told) == 1 + (HARMFUL in (found or []))


def test_a_tool_that_fails_before_it_reports_is_told_from_a_finding(tmp_path: Path) -> None:
    """pip-audit ends with the same code for both."""
    for printed, error, wanted in (
        ("", "ConnectionError: no route", (None, "ConnectionError: no route")),
        ("", "", (None, "exit code 1")),
        (json.dumps({"dependencies": [HARMFUL]}), "warnings", ([HARMFUL], "")),
    ):
        tool = tmp_path / "tool"
        tool.write_text(
            f"#!{sys.executable}\nimport sys\nsys.stdout.write({printed!r})\n"
            f"sys.stderr.write({error!r})\nsys.exit(1)\n"
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        assert audit.looked_up(tool, tmp_path / "x.lock") == wanted
