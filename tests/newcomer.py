"""Tries the commands of README.md in a fresh clone, as a new user would: `make newcomer`.

Every ```sh block is run line by line, in order, in a clone of the last commit with an empty cache
and no environment of ours. `specmesh up` is left running for the blocks after it and stopped at the
end. Exit code 0 only if every command succeeded.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
STAYS_UP = "specmesh up"
READY_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 3600.0


def commands(readme: str) -> list[str]:
    """Every line of every ```sh block, in order."""
    return [line for block in BLOCK.findall(readme) for line in block.splitlines() if line.strip()]


def newcomers_environment() -> dict[str, str]:
    """This environment without an active virtual environment and without settings of specmesh."""
    active = os.environ.get("VIRTUAL_ENV", str(ROOT / ".venv"))
    path = os.environ["PATH"].split(os.pathsep)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "VIRTUAL_ENV" and not name.startswith(("SPECMESH_", "MAKE", "MFLAGS"))
    }
    return kept | {"PATH": os.pathsep.join(part for part in path if part != f"{active}/bin")}


def run(command: str, clone: Path, environment: dict[str, str]) -> bool:
    """Run one line in the clone, its virtual environment active as README.md says."""
    sys.stdout.write(f"$ {command}\n")
    sys.stdout.flush()
    began = time.monotonic()
    active = environment | {"PATH": f"{clone}/.venv/bin{os.pathsep}{environment['PATH']}"}
    code = subprocess.run(
        command,
        shell=True,
        cwd=clone,
        env=active,
        stdin=subprocess.DEVNULL,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    ).returncode
    sys.stdout.write(f"-> exit code {code} after {time.monotonic() - began:.1f} s\n\n")
    return code == 0


def start(command: str, clone: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command that stays up; return when it says it is ready. Raises RuntimeError."""
    sys.stdout.write(f"$ {command} &\n")
    active = environment | {"PATH": f"{clone}/.venv/bin{os.pathsep}{environment['PATH']}"}
    process = subprocess.Popen(
        [*command.split(), "--start-timeout", str(READY_TIMEOUT_S)],
        cwd=clone,
        env=active,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None, "a pipe was asked for"
    for line in process.stdout:
        sys.stdout.write(line)
        if line.startswith("try:"):
            return process
    raise RuntimeError(f"{command} ended with exit code {process.wait()}")


def main() -> int:
    """Clone, run, report; return the exit code."""
    failed: list[str] = []
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="specmesh-newcomer-") as folder:
        clone = Path(folder) / "specmesh"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = newcomers_environment() | {"XDG_CACHE_HOME": f"{folder}/cache"}
        try:
            for command in commands((clone / "README.md").read_text()):
                if command == STAYS_UP:
                    running.append(start(command, clone, environment))
                elif not run(command, clone, environment):
                    failed.append(command)
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
                process.wait()
    verdict = f"FAILED: {'; '.join(failed)}" if failed else "every command of README.md works"
    sys.stdout.write(verdict + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
