"""`python -m tests.fuzz`: fuzz every decoder of bytes from outside (`make fuzz`).

Writes one line a target. What grew the coverage is kept under --corpus and is where the next run
begins; an input that failed is written beside it. Returns 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
from pathlib import Path

from tests.fuzz.fuzzer import fuzz
from tests.fuzz.targets import all_targets


def main() -> int:
    """Fuzz, report, and say with the exit code whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--corpus", type=Path, help="folder to begin from and to add to")
    parser.add_argument("--replay", type=Path, help="feed this one file to --only and show what")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    num_failed = 0
    with all_targets() as targets:
        for name, target in targets.items():
            if arguments.only not in name:
                continue
            if arguments.replay is not None:
                target.check(arguments.replay.read_bytes())
                continue
            began = time.monotonic()
            folder = arguments.corpus / name.replace(" ", "-") if arguments.corpus else None
            kept = [] if folder is None else [file.read_bytes() for file in _files(folder)]
            result = fuzz(target, arguments.inputs, arguments.seed, kept)
            num_failed += len(result.failures)
            sys.stdout.write(
                f"{name}: {result.num_inputs} inputs ({result.num_refused} refused), "
                f"{result.num_edges} edges, corpus {len(result.corpus)}, "
                f"{len(result.failures)} failures, {time.monotonic() - began:.0f} s\n"
            )
            for content, what in result.failures:
                sys.stdout.write(f"  {what.strip()}\n  input {content[:200]!r}\n")
            sys.stdout.flush()
            if folder is not None:
                failed = [content for content, _ in result.failures]
                for kind, contents in (("", result.corpus), ("failed-", failed)):
                    _keep(folder, kind, contents)
    return 1 if num_failed else 0


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.is_dir() else []


def _keep(folder: Path, kind: str, contents: list[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for content in contents:
        digest = hashlib.sha256(content).hexdigest()[:16]
        (folder / f"{kind}{digest}").write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
