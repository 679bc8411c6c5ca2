"""Looks up known vulnerabilities of every pinned dependency: `make audit` (needs pip-audit).

pip-audit says that there are none where its source knows nothing of a package, and ends with the
code of a finding where no source answers. Here every pin is accounted for. Exit codes: 0 every pin
was looked up and none has a known vulnerability, 1 some have, 3 some could not be looked up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CLEAN, VULNERABLE, UNCHECKED = 0, 1, 3
LONGEST_S = 600.0
FLAGS = ("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off")


def looked_up(tool: Path, lock: Path) -> tuple[list[dict[str, Any]] | None, str]:
    """What pip-audit says of each pin, None where it did not get so far; and its last line."""
    command = [str(tool), *FLAGS, "--requirement", str(lock)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {LONGEST_S:g} s"
    lines = done.stderr.strip().splitlines()
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return found, ""


def judged(found: Sequence[dict[str, Any]] | None, why: str, tell: Callable[[str], object]) -> int:
    """Tell one line a vulnerability, then one for all; return the exit code."""
    if not found:
        tell(f"audit: nothing was looked up, no advisory source answers: {why or 'no pins'}")
        return UNCHECKED
    skipped = [each for each in found if "skip_reason" in each]
    vulnerable = [each for each in found if each.get("vulns")]
    for each in vulnerable:
        for known in each["vulns"]:
            fixed = ", ".join(known.get("fix_versions", ())) or "no version"
            tell(f"{each['name']} {each['version']}: {known['id']}, fixed in {fixed}")
    sums = f"{len(found) - len(skipped)} of {len(found)} pins looked up"
    tell(
        f"audit: {sums}, {len(vulnerable)} with known vulnerabilities"
        + (f"; not looked up: {skipped[0]['skip_reason']}" if skipped else "")
    )
    if vulnerable:
        return VULNERABLE
    return UNCHECKED if skipped else CLEAN


def main() -> int:
    """Audit one lock file."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--tool", type=Path, required=True, help="the pip-audit to run")
    parser.add_argument("lock", type=Path)
    arguments = parser.parse_args()
    found, why = looked_up(arguments.tool, arguments.lock)
    return judged(found, why, lambda line: sys.stdout.write(line + "\n"))


if __name__ == "__main__":
    sys.exit(main())
