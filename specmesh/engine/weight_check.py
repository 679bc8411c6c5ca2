"""`python -m specmesh.engine.weight_check check|seal|default`: model folders on a shared volume.

`check DIR...` is what a pod runs before its service: every file has the size and sha256 that the
folder's checksums.json records, and there is one. `seal DIR...` records them for a folder of your
own. `default DIR` puts the shipped pair under DIR/target and DIR/draft. Exit status: 0, or 2 with
one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from specmesh.engine.model_folder import prepare_default_models
from specmesh.engine.weights import (
    CHECKSUMS_FILE,
    file_digest,
    record_files,
    recorded_files,
    weight_files,
)
from specmesh.errors import ConfigError


def check(folder: Path) -> None:
    """Compare every recorded file. Raises ConfigError that lists all that differ."""
    recorded = recorded_files(folder)
    if not recorded:
        raise ConfigError(
            f"{folder} has no {CHECKSUMS_FILE}: are the weights there? To record checksums of "
            f"your own: python -m specmesh.engine.weight_check seal {folder}"
        )
    unrecorded = [file.name for file in weight_files(folder) if file.name not in recorded]
    wrong = [f"{name} is not recorded" for name in unrecorded]
    for name, entry in recorded.items():
        file = folder / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif (size := file.stat().st_size) != entry["bytes"]:
            wrong.append(f"{name} has {size} bytes, recorded {entry['bytes']}")
        elif (digest := file_digest(file)) != entry["sha256"]:
            wrong.append(f"{name} has sha256 {digest}, recorded {entry['sha256']}")
    if wrong:
        raise ConfigError(f"{folder}: {'; '.join(wrong)}")


def seal(folder: Path) -> None:
    """Record size and sha256 of every file. Raises ConfigError where there are no weights."""
    weight_files(folder)
    record_files(folder)


def place_default(folder: Path) -> None:
    """Put the shipped pair under folder/target and folder/draft. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as cache:
        made = prepare_default_models(Path(cache), _report)
        for name, source in zip(("target", "draft"), made, strict=True):
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
            check(folder / name)


def _report(step: str) -> None:
    sys.stderr.write(f"{step}\n")


COMMANDS: Mapping[str, Callable[[Path], None]] = {
    "check": check,
    "seal": seal,
    "default": place_default,
}


def main(argv: list[str]) -> int:
    """Run one command on every folder; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m specmesh.engine.weight_check", description=__doc__
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    arguments = parser.parse_args(argv)
    try:
        for folder in arguments.folders:
            COMMANDS[arguments.command](folder)
            sys.stderr.write(f"{folder}: {arguments.command} ok\n")
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"weights: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
