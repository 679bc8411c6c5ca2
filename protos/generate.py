"""Generates the Python code of `protos/specmesh/v1/*.proto` beside the files it comes from.

python -m protos.generate            write it
python -m protos.generate --check    exit with 1 if what is committed differs
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("protos/specmesh/v1")
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(into: Path) -> None:
    """Write the generated modules under `into`. Raises RuntimeError when the compiler refuses."""
    from grpc_tools import protoc

    sources = sorted(str(FOLDER / path.name) for path in (ROOT / FOLDER).glob("*.proto"))
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "pyi")]
    if protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources]) != 0:
        raise RuntimeError("protoc refused the contract")


def stale_files(fresh: Path) -> list[str]:
    """Names that differ between `fresh` and the checkout, or exist in one of them only."""
    expected = {path.name for pattern in PATTERNS for path in (fresh / FOLDER).glob(pattern)}
    present = {path.name for pattern in PATTERNS for path in (ROOT / FOLDER).glob(pattern)}
    both = sorted(expected & present)
    _, differing, broken = filecmp.cmpfiles(fresh / FOLDER, ROOT / FOLDER, both, shallow=False)
    return sorted({*differing, *broken, *(expected ^ present)})


def main() -> int:
    """Generate or check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, report differences")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = stale_files(Path(folder))
    if stale:
        sys.stdout.write(f"out of date: {', '.join(stale)}; run `make protos`\n")
        return 1
    sys.stdout.write("generated code is up to date\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
