"""fp8 weights in the engine: which matrices, what model they make, what is refused and said."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.fleet import Fleet
from coordinator.messages import Side
from kernels.fp8_weight import quantise
from protos.specmesh.v1 import session_pb2
from specmesh.bench import weight_error
from specmesh.cli.up import default_cache_dir
from specmesh.config import EngineSettings
from specmesh.engine.decoder import load_decoder
from specmesh.engine.families import read_spec
from specmesh.engine.loading import load_model
from specmesh.engine.model_folder import prepare_default_models
from specmesh.engine.weights import expected_shapes, fingerprint, weight_bytes
from specmesh.errors import ConfigError, ModelMismatch
from specmesh.tokenizer import load_tokenizer
from tests.e2e.tiny_pair import write_pair
from tests.unit.tiny_models import PackedRun, random_tokens, save, tiny_model

FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},  # biases of query, key and value
    "qwen3": {"head_dim": 16},  # norms of heads
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_one_of_rounded_matrices(family: str, tmp_path: Path) -> None:
    """Bit for bit the logits of a folder whose seven matrices a layer were rounded before, and
    nothing else of it; they are not those of the folder itself."""
    folder = save(tiny_model(family, **FAMILIES[family]), tmp_path / "model")
    rounded = save(tiny_model(family, **FAMILIES[family]), tmp_path / "rounded")
    tensors = load_file(rounded / "model.safetensors")
    matrices = [name for name in tensors if name.endswith("_proj.weight")]
    assert len(matrices) == 7 * 3
    for name in matrices:
        tensors[name] = quantise(tensors[name]).dequantised()
    save_file(tensors, rounded / "model.safetensors")
    tokens = random_tokens(23, seed=1)
    (found,), (wanted,), (own,) = (
        PackedRun(decoder, [tokens]).step([len(tokens)])
        for decoder in (
            load_decoder(folder, weight_dtype="fp8"),
            load_decoder(rounded),
            load_decoder(folder),
        )
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, own)


def test_fingerprints_tell_the_forms_apart(tmp_path: Path) -> None:
    """One folder, two models: replicas of different forms are not replicas of one target."""
    folder = save(tiny_model("llama"), tmp_path)
    plain, fp8 = fingerprint(folder), fingerprint(folder, "fp8")
    assert len(fp8) == len(plain) == 64
    assert fp8 != plain == load_decoder(folder).fingerprint
    assert load_decoder(folder, weight_dtype="fp8").fingerprint == fp8


def test_services_say_what_they_run(tmp_path: Path) -> None:
    """ModelInfo of an fp8 service differs in fingerprint and type; K/V and limits do not."""
    folder, _ = write_pair(tmp_path)
    plain, fp8 = (
        load_model(EngineSettings(model=folder, num_pages=8, weight_dtype=kind)).info
        for kind in ("model", "fp8")
    )
    assert (plain.dtype, fp8.dtype) == ("float32", "float32, fp8 weights")
    assert plain.fingerprint != fp8.fingerprint == fingerprint(folder, "fp8")
    assert plain.total_pages == fp8.total_pages == 8
    _check_replicas(plain, fp8)


def _check_replicas(plain: session_pb2.ModelInfo, fp8: session_pb2.ModelInfo) -> None:
    """A coordinator takes two targets of one form, and a draft of any; no targets of both."""
    vocabulary = SimpleNamespace(vocab_hash=plain.vocab_hash)
    for first, other in ((plain, fp8), (fp8, plain)):
        fleet: Any = SimpleNamespace(_vocabulary=vocabulary, _identity={})
        links: Any = [SimpleNamespace(side=Side.TARGET, address=str(i)) for i in range(3)]
        Fleet.check(fleet, links[0], first)
        Fleet.check(fleet, links[1], first)
        with pytest.raises(ModelMismatch, match="target 2 runs other weights than 0"):
            Fleet.check(fleet, links[2], other)
        drafting: Any = SimpleNamespace(side=Side.DRAFT, address="draft")
        Fleet.check(fleet, drafting, other)


def test_weights_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    """A byte a weight and four a channel for matrices of layers, the type's bytes for the rest."""
    folder = save(tiny_model("qwen2"), tmp_path)
    spec = read_spec(folder)
    shapes = dict(expected_shapes(spec))
    numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    rows = sum(shape[0] for name, shape in shapes.items() if "_proj.weight" in name)
    inside = sum(count for name, count in numbers.items() if "_proj.weight" in name)
    outside = sum(numbers.values()) - inside
    assert weight_bytes(spec, torch.bfloat16) == 2 * (inside + outside)
    assert weight_bytes(spec, torch.bfloat16, "fp8") == inside + 4 * rows + 2 * outside


def test_what_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    """The reference layers below float32, the vendor's products, weights that are not finite."""
    folder = save(tiny_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"fp8 weights in float32, not in torch.bfloat16") as told:
        load_decoder(folder, torch.bfloat16, weight_dtype="fp8")
    assert told.value.field == "engine.weight_dtype"
    with pytest.raises(ConfigError, match=r"engine.invariant must be true"):
        load_decoder(folder, weight_dtype="fp8", fused=True, invariant=False)
    settings = EngineSettings(model=folder, dtype="bfloat16", weight_dtype="fp8")
    with pytest.raises(ConfigError, match="fp8 weights in float32"):
        load_model(settings)
    with pytest.raises(ValueError, match="weight_dtype"):
        EngineSettings(model=folder, weight_dtype="fp4")  # type: ignore[arg-type]  # refused
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj.weight: .* not finite"):
        load_decoder(folder, weight_dtype="fp8")


# ---------------------------------------------------------------- what rounding costs


def test_errors_are_measured_as_defined() -> None:
    """Two rows whose figures are known: (1/2, 1/2) taken for (1/4, 3/4), and one that is equal."""
    ln3 = math.log(3)
    logits = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    found = weight_error.compare(logits, torch.tensor([[0.0, ln3], [1.0, 2.0]]))
    divergence = math.log(2) - ln3 / 2
    assert found.num_rows == 2
    assert found.logit_max_abs == pytest.approx(ln3)
    assert found.logit_rms == pytest.approx(ln3 / 2)
    assert found.divergence_max == pytest.approx(divergence)
    assert found.divergence_mean == pytest.approx(divergence / 2)
    assert (found.overlap_min, found.overlap_mean) == pytest.approx((0.75, 0.875))
    assert found.same_argmax == 0.5  # the lowest id of a tie


def test_a_tiny_model_changes_by_so_much(tmp_path: Path) -> None:
    """Random weights of three layers: errors of README's order, and never none."""
    folder = save(tiny_model("llama"), tmp_path)
    model, other = load_decoder(folder), load_decoder(folder, weight_dtype="fp8")
    prompts = [random_tokens(count, seed=count) for count in (5, 17)]
    found = weight_error.measure(model, other, prompts, 20)
    assert found.num_rows == 40
    assert 0 < found.logit_max_abs < 0.5
    assert 0 < found.divergence_mean < 5e-3
    assert 0.95 < found.overlap_mean < 1
    nothing = weight_error.measure(model, model, prompts, 20)
    assert nothing.logit_max_abs == nothing.divergence_max == 0


def test_smollm2_changes_by_what_is_written() -> None:
    """The figures of RESULTS.md, over fewer rows: fp8 against float32, on its own answers."""
    folder, _ = prepare_default_models(default_cache_dir() / "models")
    model, other = load_decoder(folder), load_decoder(folder, weight_dtype="fp8")
    tokenizer = load_tokenizer(folder)
    texts = ("Why do rainbows form?", "Explain inflation.", "Write a haiku about the sea.")
    prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    found = weight_error.measure(model, other, prompts, 24)
    assert 0.9 < found.overlap_mean < 0.97  # 0.931
    assert 0.005 < found.divergence_mean < 0.05  # 0.023 nats
    assert 1 < found.logit_max_abs < 10  # 6.9
