"""The draft as a Hugging Face folder: what the draft service and transformers load.

Must not know training.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmesh.distill.checkpoints import WEIGHTS_FILE
from specmesh.distill.student import Plan
from specmesh.distill.transformer import Transformer
from specmesh.engine.families import read_json
from specmesh.engine.restricted_head import HEAD_IDS
from specmesh.engine.weights import CHECKSUMS_FILE, EMBEDDING, HEAD, Checkpoint, record_files
from specmesh.errors import ConfigError
from specmesh.tokenizer import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE

_SHARED_FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE, "generation_config.json")


def write_folder(folder: Path, student: Transformer, plan: Plan, target: Path) -> None:
    """Write configuration, tokenizer and weights (layers in bfloat16, embedding and head as the
    target has them), and the checksums of these: not of what a run goes on to write beside them.

    All are made apart, then renamed into place; the folder never has checksums of other files than
    it holds. Raises ConfigError where the disk refuses.
    """
    tensors = {
        f"model.{name}": parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in student.named_parameters()
    }
    with Checkpoint(target) as checkpoint:
        for name in (EMBEDDING, HEAD):
            if name in checkpoint:
                tensors[name] = checkpoint.tensor(name)
    if student.head_ids is not None:
        tensors[HEAD_IDS] = student.head_ids.cpu()
    dtype = read_json(target / "config.json").get("dtype", "float32")
    try:
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as made:
            into = Path(made)
            for name in _SHARED_FILES:
                if (target / name).is_file():
                    shutil.copyfile(target / name, into / name)
            _save(tensors, into / WEIGHTS_FILE)
            config = json.dumps({**plan.config, "dtype": dtype}, indent=2, sort_keys=True) + "\n"
            (into / "config.json").write_text(config, encoding="utf-8")
            record_files(into)
            _put_in_place(into, folder)
    except OSError as failed:
        raise ConfigError(f"cannot write {folder}: {failed}", field="out") from failed


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename every file into the folder: checksums are the first to go and the last to come."""
    (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
    for file in sorted(made.iterdir(), key=lambda file: file.name == CHECKSUMS_FILE):
        file.chmod(0o644)  # readable by the services' own user
        os.replace(file, folder / file.name)


def write_text(path: Path, text: str) -> None:
    """Write text, whole or not at all. Raises ConfigError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)  # readable by the services' own user
        os.replace(temporary, path)
    except OSError as failed:
        raise ConfigError(f"cannot write {path}: {failed}", field="out") from failed
    finally:
        temporary.unlink(missing_ok=True)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except Exception as failed:  # the Rust library has its own class for a full disk
        raise OSError(str(failed)) from failed
