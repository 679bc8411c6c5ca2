"""`python -m specmesh.inflate`: as `specmesh inflate`, with torch and safetensors alone."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from specmesh.errors import ConfigError
from specmesh.inflate import PRESETS, InflateOptions, Shape, inflate, requested_shape
from specmesh.inflate.checkpoint import DTYPES


def main(argv: list[str]) -> int:
    """Write one model; return 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m specmesh.inflate", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the small model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--shape", choices=PRESETS)
    for each in fields(Shape):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, dest=each.name)
    parser.add_argument("--embedding-from", type=Path, help="model that a draft shares it with")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cpu", help="where random numbers are drawn")
    parser.add_argument("--tied", action="store_true", help="the embedding serves as head")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    try:
        numbers = {each.name: getattr(flags, each.name) for each in fields(Shape)}
        done = inflate(
            flags.model,
            flags.out,
            requested_shape(flags.shape, numbers),
            InflateOptions(flags.dtype, flags.device, flags.tied, flags.seed),
            embedding_from=flags.embedding_from,
        )
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"inflate: {error}\n")
        return 2
    sys.stdout.write(f"{done.describe()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
