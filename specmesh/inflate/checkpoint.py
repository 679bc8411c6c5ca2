"""Writing the large model's folder: configuration, tokenizer, a shard a layer, index, checksums.

Never holds more than one layer. The folder appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmesh.engine.families import ModelSpec, read_json, spec_from_config
from specmesh.engine.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Checkpoint,
    expected_shapes,
    record_files,
)
from specmesh.errors import ConfigError
from specmesh.inflate.layers import LayerInflator
from specmesh.inflate.layout import Shape, make_layout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG_FILE = "config.json"
ABOUT_FILE = "inflated.json"
# What a model folder may hold beside configuration and weights, and the large one needs as it is.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
ID_FIELDS = ("bos_token_id", "eos_token_id")
DISK_RESERVE = 0.01  # of what is written: file headers, file system

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InflateOptions:
    """How the large model is written. Raises ConfigError naming the field that cannot be.

    dtype: of matrices; norms are float32. device: where random numbers are drawn. tied: the
    embedding serves as head (zeros on added channels). seed: of the random numbers.
    """

    dtype: str = "bfloat16"
    device: str = "cpu"
    tied: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
        if not 0 <= self.seed < 1 << 31:
            raise ConfigError(f"{self.seed} is not in [0, 2^31)", field="seed")
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError) as refused:
            raise ConfigError(
                f"{self.device!r} cannot be used: {refused}", field="device"
            ) from refused


@dataclass(frozen=True, slots=True)
class Inflation:
    """What was written. step_bytes: weights that one decode step reads (no embedding lookup)."""

    folder: Path
    num_parameters: int
    total_bytes: int
    step_bytes: int
    tied: bool
    seconds: float

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.folder}: {self.num_parameters / 1e9:.3f} billion parameters, "
            f"{self.total_bytes / 1e9:.2f} GB, of which a step reads {self.step_bytes / 1e9:.2f}; "
            f"head {'tied' if self.tied else 'untied'}; {self.seconds:.1f} s"
        )


def inflate(
    source: Path,
    folder: Path,
    shape: Shape,
    options: InflateOptions | None = None,
    *,
    embedding_from: Path | None = None,
    report: Report | None = None,
) -> Inflation:
    """Write `folder`: the function of the model in `source`, at the cost of `shape`.

    embedding_from: the folder whose embedding, head, tokenizer and end ids a draft without its own
    uses. Raises ConfigError for what does not fit, for a folder that exists, and where the disk is
    too small, before anything is written; OSError where writing fails (nothing is left then).
    """
    began = time.monotonic()
    options = options or InflateOptions()
    dtype = DTYPES[options.dtype]
    config = _small_config(source, embedding_from)
    small = spec_from_config(config)
    if options.tied and not small.tie_embeddings:
        raise ConfigError(f"{source} has a head of its own: it cannot be tied", field="tied")
    layout = make_layout(small, shape)
    large_config = _large_config(config, shape, options)
    large = spec_from_config(large_config)
    sizes = {name: _bytes(of, dtype) for name, of in expected_shapes(large)}
    total = sum(sizes.values())
    _check_folder(folder, total)
    with ExitStack() as stack:
        own = stack.enter_context(Checkpoint(source))
        shared = stack.enter_context(Checkpoint(embedding_from)) if embedding_from else own
        own.check(small, shared_embedding=True)
        _check_embedding(shared, small, embedding_from or source)

        def read(name: str) -> Tensor:
            return (shared if name in (EMBEDDING, HEAD) else own).tensor(name)

        placed = torch.device(options.device)
        inflator = LayerInflator(layout, read, dtype=dtype, device=placed, seed=options.seed)
        about = {"source": source.resolve().name, **asdict(options), "shape": asdict(shape)}
        with _appearing(folder) as into:
            _write_json(into / CONFIG_FILE, large_config)
            _write_json(into / ABOUT_FILE, about)
            _copy_companions(source, embedding_from, into)
            _write_shards(into, _shards(inflator, large, small), report)
            if report is not None:
                report("recording checksums")
            record_files(into)
    count = sum(torch.Size(of).numel() for _, of in expected_shapes(large))
    step = total if options.tied else total - sizes[EMBEDDING]
    return Inflation(folder, count, total, step, options.tied, time.monotonic() - began)


def _small_config(source: Path, embedding_from: Path | None) -> dict[str, Any]:
    """The small model's configuration; ids that it leaves out are the embedding owner's."""
    config = read_json(source / CONFIG_FILE)
    if embedding_from is None:
        return config
    owner = read_json(embedding_from / CONFIG_FILE)
    for name in ("hidden_size", "vocab_size", "tie_word_embeddings"):
        if config.get(name) != owner.get(name):
            raise ConfigError(
                f"{embedding_from} has {name} {owner.get(name)}, {source} {config.get(name)}",
                field="embedding_from",
            )
    missing = {name: owner.get(name) for name in ID_FIELDS if config.get(name) is None}
    return {**config, **missing}


def _large_config(config: dict[str, Any], shape: Shape, options: InflateOptions) -> dict[str, Any]:
    small_width, layers = config["hidden_size"], config["num_hidden_layers"]
    changed: dict[str, Any] = {
        **asdict(shape),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) * small_width / shape.hidden_size,
        "tie_word_embeddings": options.tied,
        "dtype": options.dtype,
    }
    kinds = config.get("layer_types")
    if kinds:  # added layers are like the last one
        changed["layer_types"] = [*kinds, *[kinds[-1]] * (shape.num_hidden_layers - layers)]
    kept = {name: value for name, value in config.items() if name != "torch_dtype"}
    return {**kept, **changed}


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of one tensor at most: vectors count as float32, as norms are written (biases are less)."""
    return torch.Size(shape).numel() * (4 if len(shape) == 1 else dtype.itemsize)


def _check_folder(folder: Path, total: int) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists", field="out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as refused:
        raise ConfigError(f"cannot write {folder}: {refused}", field="out") from refused
    needed = int(total * (1 + DISK_RESERVE))
    if free < needed:
        raise ConfigError(
            f"the model needs {needed / 1e9:.2f} GB, {folder.parent} has {free / 1e9:.2f} GB free",
            field="out",
        )


def _check_embedding(shared: Checkpoint, small: ModelSpec, owner: Path) -> None:
    needed = [EMBEDDING] if small.tie_embeddings else [EMBEDDING, HEAD]
    missing = [name for name in needed if name not in shared]
    if missing:
        raise ConfigError(
            f"{owner} has no {', '.join(missing)}: name the model it shares them with",
            field="embedding_from",
        )
    expected = (small.num_embeddings, small.hidden_size)
    for name in needed:
        found = tuple(shared.tensor(name).shape)
        if found != expected:
            raise ConfigError(
                f"{name} is {list(found)}, expected {list(expected)}", field="embedding_from"
            )


def _shards(
    inflator: LayerInflator, large: ModelSpec, small: ModelSpec
) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """(number from 1, number of all, tensors): embedding, every layer, final norm and head."""
    count = large.num_layers + 2
    yield 1, count, {EMBEDDING: inflator.embedding(EMBEDDING)}
    for index in range(large.num_layers):
        yield index + 2, count, dict(inflator.layer(index))
    last = {FINAL_NORM: inflator.norm(FINAL_NORM, FINAL_NORM)}
    if not large.tie_embeddings:
        last[HEAD] = inflator.head(HEAD, EMBEDDING if small.tie_embeddings else HEAD)
    yield count, count, last


def _write_shards(
    into: Path, shards: Iterator[tuple[int, int, dict[str, Tensor]]], report: Report | None
) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, count, tensors in shards:
        file = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(tensors, into / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        if report is not None:
            report(f"{number} of {count} files, {total / 1e9:.2f} GB")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(into / "model.safetensors.index.json", index)


def _copy_companions(source: Path, embedding_from: Path | None, into: Path) -> None:
    for name in COMPANIONS:
        for owner in filter(None, (source, embedding_from)):
            if (owner / name).is_file():
                shutil.copyfile(owner / name, into / name)
                break


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
