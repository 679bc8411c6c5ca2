"""`python -m specmesh.distill`: the command as a training machine starts it, also under torchrun.

Flags are the fields of `Settings`. Needs torch, safetensors, tokenizers and jinja2 only, where
`specmesh distill` is part of a command line that needs everything.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from specmesh.distill.progress import say, show
from specmesh.distill.run import distill
from specmesh.distill.settings import Settings
from specmesh.errors import InvalidRequest, SpecmeshError

_TYPES = {
    "Path": Path, "Path | None": Path, "int": int, "int | None": int, "float": float,
    "float | None": float, "str": str, "Optimizer": str,
}  # fmt: skip


def _indices(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None = None) -> Settings:
    """Settings from flags: --field-name VALUE. Exits with a usage message for unknown ones."""
    parser = argparse.ArgumentParser(prog="python -m specmesh.distill", description=__doc__)
    for field in dataclasses.fields(Settings):
        flag, kind = "--" + field.name.replace("_", "-"), str(field.type)
        is_needed = field.default is dataclasses.MISSING
        arguments: dict[str, Any] = {"default": argparse.SUPPRESS, "required": is_needed}
        if kind == "bool":
            arguments["action"] = "store_true"
        elif field.name == "init_layers":
            arguments["type"] = _indices
        elif field.name == "optimizer":
            arguments["choices"] = ("muon", "adamw")
        else:
            arguments["type"] = _TYPES[kind]
        parser.add_argument(flag, **arguments)
    given = vars(parser.parse_args(argv))
    if "minutes" not in given and "max_steps" in given:
        given["minutes"] = None
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    return Settings(**given)


if __name__ == "__main__":
    try:
        result = distill(parse(), show)
    except SpecmeshError as error:
        say(f"error: {error}")
        sys.exit(2 if isinstance(error, InvalidRequest) else 5)  # as of `specmesh distill`
    if result is not None:
        say(f"draft written to {result.folder}")
