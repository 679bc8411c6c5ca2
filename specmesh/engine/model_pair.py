"""Whether a draft can speak for a target: the same ids must mean the same on both sides.

Must not know where folders come from or what is done with them.
"""

from __future__ import annotations

from pathlib import Path

from specmesh.engine.families import ModelSpec, read_spec
from specmesh.errors import ModelMismatch
from specmesh.tokenizer import Tokenizer, load_tokenizer


def check_pair(target: Path, draft: Path) -> tuple[ModelSpec, ModelSpec]:
    """Check that a draft can speak for a target: the same ids mean the same everywhere.

    Returns both specs. Embedding paddings may differ. Raises ConfigError for a folder that cannot
    be used and ModelMismatch for two that do not fit.
    """
    ours, theirs = load_tokenizer(target), load_tokenizer(draft)
    differences = [
        f"{what}: target {a}, draft {b}" for what, a, b in _facts(ours, theirs) if a != b
    ]
    if differences:
        raise ModelMismatch(
            f"draft {draft} does not fit target {target}: " + "; ".join(differences)
        )
    return read_spec(target, ours.vocab_size), read_spec(draft, theirs.vocab_size)


def _facts(ours: Tokenizer, theirs: Tokenizer) -> list[tuple[str, object, object]]:
    return [
        ("vocabulary size", ours.vocab_size, theirs.vocab_size),
        ("vocabulary hash", f"{ours.vocab_hash:#x}", f"{theirs.vocab_hash:#x}"),
        ("end-of-text ids", list(ours.eos_ids), list(theirs.eos_ids)),
    ]
