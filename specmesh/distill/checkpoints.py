"""Checkpoints of a run: written whole or not at all, the last good one kept.

A checkpoint is a file of tensors and numbers (`torch.load(weights_only=True)` reads it: nothing in
it is executed). Everything else of a run follows from its seed. Must not know models.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specmesh.errors import ConfigError

FILE = "checkpoint.pt"
WEIGHTS_FILE = "model.safetensors"  # of a draft that is finished


@dataclass(slots=True)
class Place:
    """How far a run has come: optimizer steps, seconds used, the pool it trains on and batches of
    it that are done, and tokens sampled and trained on by all processes."""

    step: int = 0
    elapsed_s: float = 0.0
    pool: int = 0
    batch: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0


def save(folder: Path, identity: dict[str, Any], place: Place, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint. Raises ConfigError where it cannot be written.

    identity: what a run that resumes must share. The old checkpoint stays until the new one is
    whole on disk.
    """
    path, temporary = folder / FILE, folder / f".{FILE}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            torch.save({"identity": identity, "place": asdict(place), "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as failed:  # torch reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        kept = f"; the checkpoint before it is kept in {path}" if path.is_file() else ""
        raise ConfigError(f"cannot write {path}: {failed}{kept}", field="out") from failed


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise ConfigError where there is nothing to resume, or a new run would overwrite a draft."""
    if resume:
        if not (folder / FILE).is_file():
            raise ConfigError(f"{folder} holds no checkpoint to resume", field="out")
        return
    for name, goes_on in ((FILE, "resume goes on with it, "), (WEIGHTS_FILE, "")):
        if (folder / name).is_file():
            raise ConfigError(
                f"{folder} holds {name}: {goes_on}a new run needs another folder", field="out"
            )


def place_of(folder: Path, identity: dict[str, Any]) -> Place:
    """How far the folder's checkpoint came, its tensors left on disk. Raises as `load`."""
    return _read(folder / FILE, identity, torch.device("cpu"), mmap=True)[0]


def load(
    folder: Path, identity: dict[str, Any], device: torch.device
) -> tuple[Place, dict[str, Any]]:
    """The folder's checkpoint.

    Raises ConfigError for a missing or damaged one, or one of a run with other settings.
    """
    return _read(folder / FILE, identity, device, mmap=False)


def _read(
    path: Path, identity: dict[str, Any], device: torch.device, *, mmap: bool
) -> tuple[Place, dict[str, Any]]:
    check_folder(path.parent, resume=True)
    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        found, place, state = content["identity"], Place(**content["place"]), content["state"]
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError, EOFError) as broken:
        raise ConfigError(f"{path} is damaged: {broken}", field="resume") from broken
    differences = [
        f"{name}: {found.get(name)!r} there, {value!r} now"
        for name, value in identity.items()
        if found.get(name) != value
    ]
    if differences:
        raise ConfigError(f"{path} is of another run: " + "; ".join(differences), field="resume")
    return place, state
