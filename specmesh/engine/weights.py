"""Reading a model folder's tensors and telling one model from another by its fingerprint.

Owns safetensors access, the names and shapes a checkpoint must have, and what its weights take.
Must not know how a layer computes. Reads lazily: a tensor's pages are touched when the decoder lays
it out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.fp8_weight import fp8_bytes
from specmesh.engine.families import ModelSpec, read_json
from specmesh.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
WeightDtype = Literal["model", "fp8"]  # as of EngineSettings.weight_dtype
CHECKSUMS_FILE = "checksums.json"
MAX_NAME_BYTES = 255  # of a file: no common file system takes more
_HASH_CHUNK_BYTES = 1 << 22
_FP8_MARK = b"fp8: e4m3, max of a channel / 448"  # changes with the rule of `kernels.fp8_weight`


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, shards in the order of their names. Raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index} has no weight_map")
        names = {str(name) for name in shards.values()}
        strangers = [name for name in names if not _is_file_name(name)]
        if strangers:  # nothing outside the folder is read
            stranger = f"{strangers[0][:MAX_NAME_BYTES]!r}"
            raise ConfigError(f"{index} names {stranger}, expected files of its own folder")
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"missing weight files: {', '.join(missing)}")
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors file: convert pickled checkpoints to safetensors first"
        )
    return files


def fingerprint(folder: Path, weight_dtype: WeightDtype = "model") -> str:
    """sha256 over config.json and every weight file: equal exactly for the same model bytes.

    Weights rounded to another type are another model, with a fingerprint of its own. Raises
    ConfigError where the folder's own checksums.json says that a file is damaged.
    """
    recorded = recorded_files(folder)
    total = hashlib.sha256()
    for file in [folder / "config.json", *weight_files(folder)]:
        digest = file_digest(file)
        expected = recorded.get(file.name, {}).get("sha256", digest)
        if digest != expected:
            raise ConfigError(
                f"{file} is damaged: sha256 {digest}, recorded {expected}; remove {folder}"
            )
        total.update(digest.encode())
    if weight_dtype == "fp8":
        total.update(_FP8_MARK)
    return total.hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether a folder with checksums holds every file at its recorded size. Reads no contents."""
    recorded = recorded_files(folder)
    return bool(recorded) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"]
        for name, entry in recorded.items()
    )


def recorded_files(folder: Path) -> dict[str, dict[str, Any]]:
    """`sha256` and `bytes` by file name as checksums.json has them; empty without one.

    Raises ConfigError where it holds something else.
    """
    path = folder / CHECKSUMS_FILE
    files = read_json(path).get("files", {}) if path.is_file() else {}
    if not isinstance(files, dict) or not all(map(_is_record, files, files.values())):
        raise ConfigError(f"{path}: files should map names of this folder to sha256 and bytes")
    return dict(files)


def record_files(folder: Path) -> None:
    """Write checksums.json: size and sha256 of every other file of the folder, all of them read."""
    files = {
        file.name: {"sha256": file_digest(file), "bytes": file.stat().st_size}
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name != CHECKSUMS_FILE
    }
    content = json.dumps({"files": files}, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / CHECKSUMS_FILE).write_text(content + "\n", "utf-8")


def _is_file_name(name: str) -> bool:
    """Whether a folder can hold a file of this name: what is none, even asking for it fails."""
    is_short = len(name.encode()) <= MAX_NAME_BYTES
    return is_short and Path(name).name == name and "\0" not in name


def _is_record(name: str, entry: Any) -> bool:
    if not isinstance(entry, dict) or not _is_file_name(name):
        return False
    size, digest = entry.get("bytes"), entry.get("sha256")
    return isinstance(size, int) and not isinstance(size, bool) and isinstance(digest, str)


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class Checkpoint:
    """Named tensors of a folder, as a context manager. Tensors are read-only views of the file.

    weight_dtype: what a decoder keeps the matrices of layers in.
    """

    def __init__(self, folder: Path, weight_dtype: WeightDtype = "model") -> None:
        self._folder, self.weight_dtype = folder, weight_dtype
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for path in weight_files(folder):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._file_of.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError) as broken:
            self._stack.close()
            raise ConfigError(f"{folder}: unreadable safetensors: {broken}") from broken
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files. Tensors already taken stay valid."""
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in the file's dtype. Raises ConfigError if there is none."""
        if name not in self._file_of:
            raise ConfigError(f"{self._folder} has no tensor {name!r}")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def check(self, spec: ModelSpec, *, shared_embedding: bool = False) -> None:
        """Compare names and shapes with what the spec needs. Raises ConfigError, listing all.

        shared_embedding: the embedding (and tied head) comes from another model.
        """
        wrong = []
        for name, shape in expected_shapes(spec):
            if shared_embedding and name in (EMBEDDING, HEAD):
                continue
            if name not in self._file_of:
                wrong.append(f"{name} is missing")
                continue
            found = tuple(self._file_of[name].get_slice(name).get_shape())
            if found != shape:
                wrong.append(f"{name} is {list(found)}, expected {list(shape)}")
        if wrong:
            listed = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" * (len(wrong) > 10))
            raise ConfigError(f"{self._folder} does not fit its config.json: {listed}")


def expected_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor a checkpoint of this spec must have, with its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield EMBEDDING, (spec.num_embeddings, hidden)
    yield FINAL_NORM, (hidden,)
    if not spec.tie_embeddings:
        yield HEAD, (spec.num_embeddings, hidden)
    linears = (
        ("self_attn.q_proj", q_width, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv_width, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv_width, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, spec.out_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        for name, n_out, n_in, bias in linears:
            yield f"{layer}.{name}.weight", (n_out, n_in)
            if bias:
                yield f"{layer}.{name}.bias", (n_out,)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if spec.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (spec.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (spec.head_dim,)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, weight_dtype: WeightDtype = "model") -> int:
    """Bytes of all weights in a type, the matrices of layers as `weight_dtype` says."""
    total = 0
    for name, shape in expected_shapes(spec):
        if weight_dtype == "fp8" and len(shape) == 2 and name not in (EMBEDDING, HEAD):
            total += fp8_bytes(*shape)
        else:
            total += dtype.itemsize * math.prod(shape)
    return total
