"""`specmesh inflate`: the same function at another cost, and no path that is trivially zero."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmesh.engine import weight_check
from specmesh.engine.decoder import Decoder, load_decoder
from specmesh.engine.weights import (
    CHECKSUMS_FILE,
    EMBEDDING,
    HEAD,
    Checkpoint,
    fingerprint,
    recorded_files,
    weight_files,
)
from specmesh.errors import ConfigError
from specmesh.inflate import PRESETS, InflateOptions, Shape, inflate, layout, requested_shape
from specmesh.inflate.__main__ import main
from tests.e2e.tiny_pair import write_pair
from tests.unit.tiny_models import PackedRun, random_tokens, reference_logits, save, tiny_model

# Hidden 32 -> 84, heads 4/2 of 8 -> 12/4 of 16 (groups of 2 -> 3), 3 -> 5 layers.
LARGER = Shape(84, 112, 5, 12, 4, 16)
FLOAT32 = InflateOptions("float32")
TOKENS = random_tokens(40, seed=3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Weights are normal with deviation .15, logits of size about 1; float32 sums of other orders.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}

CASES: dict[str, tuple[str, dict[str, Any], Shape]] = {
    "llama": ("llama", {}, LARGER),
    "llama tied": ("llama", {"tie_word_embeddings": True}, LARGER),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, LARGER),
    "llama3 rotary": ("llama", {"rope_parameters": LLAMA3}, LARGER),
    "window": ("mistral", {"sliding_window": 7}, LARGER),
    "qkv bias": ("qwen2", {}, LARGER),
    "layer types": ("qwen2", {"use_sliding_window": True, "sliding_window": 5,
                              "max_window_layers": 1}, LARGER),
    "head norms": ("qwen3", {"head_dim": 8}, LARGER),
    "head norms, other eps": ("qwen3", {"head_dim": 8, "rms_norm_eps": 0.1}, LARGER),
    "groups of 3": ("llama", {"hidden_size": 24, "num_attention_heads": 6}, LARGER),
    "smaller groups": ("llama", {}, Shape(64, 48, 3, 8, 8, 8)),
    "same width": ("llama", {}, Shape(48, 64, 4, 8, 4, 8)),
    "three times as wide": ("llama", {}, Shape(48, 64, 3, 4, 2, 24)),
    "same shape": ("llama", {}, Shape(32, 48, 3, 4, 2, 8)),
}  # fmt: skip


def inflated(
    tmp_path: Path, family: str, changes: dict[str, Any], shape: Shape
) -> tuple[Any, Path]:
    model = tiny_model(family, **changes)
    small = save(model, tmp_path / "small")
    inflate(small, tmp_path / "large", shape, FLOAT32)
    return model, tmp_path / "large"


def logits_of(decoder: Decoder) -> Tensor:
    return PackedRun(decoder, [TOKENS]).step([len(TOKENS)])[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_small_models(tmp_path: Path, case: str) -> None:
    """Every family and every way to grow gives transformers' logits of the small model."""
    model, large = inflated(tmp_path, *CASES[case])
    decoder = load_decoder(large)
    shape = CASES[case][2]
    assert (decoder.spec.hidden_size, decoder.spec.num_layers) == shape_of_stream(shape)
    assert (decoder.spec.num_heads, decoder.spec.head_dim) == shape_of_heads(shape)
    torch.testing.assert_close(logits_of(decoder), reference_logits(model, TOKENS), **TOLERANCE)


def shape_of_stream(shape: Shape) -> tuple[int, int]:
    return shape.hidden_size, shape.num_hidden_layers


def shape_of_heads(shape: Shape) -> tuple[int, int]:
    return shape.num_attention_heads, shape.head_dim


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_reads_the_folder_alike(tmp_path: Path, family: str) -> None:
    """The folder is an ordinary checkpoint: another implementation computes the same."""
    import transformers

    model, large = inflated(tmp_path, family, {"head_dim": 8}, LARGER)
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(large, dtype=torch.float32)
    torch.testing.assert_close(
        reference_logits(read.eval(), TOKENS), reference_logits(model, TOKENS), **TOLERANCE
    )


def test_the_folder_is_sealed(tmp_path: Path) -> None:
    """Its checksums.json records every file as `weight_check` wants it: a byte that changes later
    is noticed there and when a service reads the folder."""
    _, large = inflated(tmp_path, "llama", {}, LARGER)
    weight_check.check(large)
    assert set(recorded_files(large)) == {file.name for file in large.iterdir()} - {CHECKSUMS_FILE}
    shard = weight_files(large)[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for read in (weight_check.check, fingerprint):
        with pytest.raises(ConfigError, match=shard.name):
            read(large)


def test_tied_embedding_serves_as_head(tmp_path: Path) -> None:
    """Tied and untied compute the same and read the same bytes a step."""
    model = tiny_model("llama", tie_word_embeddings=True)
    small = save(model, tmp_path / "small")
    tied = inflate(small, tmp_path / "tied", LARGER, InflateOptions("float32", tied=True))
    untied = inflate(small, tmp_path / "untied", LARGER, FLOAT32)
    decoder = load_decoder(tmp_path / "tied")
    torch.testing.assert_close(logits_of(decoder), reference_logits(model, TOKENS), **TOLERANCE)
    assert tied.step_bytes == untied.step_bytes == tied.total_bytes
    assert untied.total_bytes - tied.total_bytes == 97 * 84 * 4


def test_drawn_text_is_the_small_models(tmp_path: Path) -> None:
    """48 tokens drawn with the same noise, each from the distribution after all before it."""
    target, _ = write_pair(tmp_path)
    inflate(target, tmp_path / "large", LARGER, FLOAT32)

    def drawn(folder: Path) -> list[int]:
        decoder, tokens = load_decoder(folder), list(b"Once upon a time")
        prompt_len, generator = len(tokens), torch.Generator().manual_seed(5)
        while len(tokens) < prompt_len + 48:
            logits = PackedRun(decoder, [tokens]).step([len(tokens)])[0][-1]
            races = torch.rand(logits.shape, generator=generator).log().neg().log()
            tokens.append(int((logits - races).argmax()))
        return tokens[prompt_len:]

    text = drawn(target)
    assert text == drawn(tmp_path / "large")
    assert len(set(text)) > 5


# ---------------------------------------------------------------- nothing is trivially zero


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inflated(
        tmp_path_factory.mktemp("large"),
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        LARGER,
    )[1]


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(folder):
        yield from load_file(file).items()


def test_every_operand_has_numbers(large_folder: Path) -> None:
    """No tensor is all zeros but biases that write to the stream."""
    for name, tensor in tensors_of(large_folder):
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            continue  # they write to the stream: zeros in added layers
        share = float((tensor != 0).float().mean())
        least = {2: 0.3, 1: 0.3}[tensor.dim()]
        assert share > least, f"{name}: {share:.2f} of its numbers are not zero"


def test_added_heads_units_and_layers_are_active(
    large_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix of every layer sees and makes numbers, half of the added ones at least."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Recorded:
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            self._weight, self._bias = weight, bias

        def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = torch.nn.functional.linear(x, self._weight, self._bias)
            seen.append((x, y))
            return y if residual is None else y + residual

    monkeypatch.setattr("specmesh.engine.layer_ops._can_pack", lambda _dtype: False)
    monkeypatch.setattr("specmesh.engine.layer_ops.PlainLinear", Recorded)
    logits_of(load_decoder(large_folder))
    per_layer = [seen[start : start + 4] for start in range(0, 4 * LARGER.num_hidden_layers, 4)]
    for index, (qkv, out, gate_up, down) in enumerate(per_layer):
        for made in (qkv[1], gate_up[1], out[0], down[0]):
            columns = (made != 0).any(0).float().mean()
            assert columns >= 0.5, f"layer {index}"
        for written in (out[1], down[1]):
            assert bool((written[:, 32:] == 0).all()), f"layer {index} writes to added channels"
            assert bool((written[:, :32] != 0).any()) == (index < 3)


def test_tensors_do_not_repeat(large_folder: Path) -> None:
    """Two layers' random numbers differ."""
    tensors = dict(tensors_of(large_folder))
    first, second = (tensors[f"model.layers.{i}.mlp.gate_proj.weight"] for i in (3, 4))
    assert not torch.equal(first, second)


def test_same_seed_same_file(tmp_path: Path) -> None:
    """The seed decides the random numbers, all of it."""
    small = save(tiny_model("llama"), tmp_path / "small")
    name = "model.layers.4.self_attn.q_proj.weight"
    drawn = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        inflate(small, tmp_path / folder, LARGER, InflateOptions(seed=seed))
        with Checkpoint(tmp_path / folder) as checkpoint:
            drawn.append(checkpoint.tensor(name).clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# ---------------------------------------------------------------- drafts, files, refusals


def test_draft_without_embedding_takes_the_targets(tmp_path: Path) -> None:
    """Layers alone need the target's folder, and then equal the whole draft."""
    target, draft = write_pair(tmp_path)
    layers = tmp_path / "layers"
    layers.mkdir()
    kept = {k: v for k, v in load_file(draft / "model.safetensors").items() if k != EMBEDDING}
    save_file(kept, layers / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    del config["eos_token_id"]
    (layers / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"embedding_from: .* has no model.embed_tokens.weight"):
        inflate(layers, tmp_path / "large", LARGER, FLOAT32)
    inflate(layers, tmp_path / "large", LARGER, FLOAT32, embedding_from=target)
    ours, theirs = load_decoder(draft), load_decoder(tmp_path / "large")
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), **TOLERANCE)
    assert ours.spec.eos_ids == theirs.spec.eos_ids
    assert (tmp_path / "large" / "tokenizer.json").is_file()


def test_written_type_and_index(tmp_path: Path) -> None:
    """One shard a layer, an index that adds up, matrices in the type asked for."""
    small = save(tiny_model("llama"), tmp_path / "small")
    done = inflate(small, tmp_path / "large", LARGER)
    index = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.total_bytes
    assert len(set(index["weight_map"].values())) == LARGER.num_hidden_layers + 2
    with safe_open(weight_files(tmp_path / "large")[1], framework="pt") as shard:
        types = {name: shard.get_tensor(name).dtype for name in shard.keys()}  # noqa: SIM118
    assert {types[name] for name in types if "norm" in name} == {torch.float32}
    assert {types[name] for name in types if "norm" not in name} == {torch.bfloat16}
    difference = logits_of(load_decoder(tmp_path / "large")) - logits_of(load_decoder(small))
    assert difference.abs().max() < 0.15  # bfloat16 weights


def test_disk_too_small_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are in the message, and nothing was written."""
    small = save(tiny_model("llama"), tmp_path / "small")
    usage = type(shutil.disk_usage(tmp_path))(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ConfigError, match=r"out: the model needs 0.00 GB, .* has 0.00 GB free"):
        inflate(small, tmp_path / "large", LARGER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


def test_a_failure_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writing fails, neither the folder nor a part of it stays."""
    small = save(tiny_model("llama"), tmp_path / "small")

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specmesh.inflate.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        inflate(small, tmp_path / "large", LARGER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 16}, "hidden_size"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"num_attention_heads": 10}, "num_attention_heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, None),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, None),
        ({"head_dim": 12}, "head_dim"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path: Path, changes: dict[str, int], field: str | None) -> None:
    """The message names the field that is to blame."""
    from dataclasses import replace

    from specmesh.engine.families import read_spec

    small = read_spec(save(tiny_model("llama"), tmp_path / "small"))
    shape = replace(LARGER, **changes)
    if field is None:
        layout.make_layout(small, shape)
        return
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        layout.make_layout(small, shape)


def test_presets_hold_the_shipped_pair(tmp_path: Path) -> None:
    """9 query heads over 3 key/value heads of width 64 go into both presets."""
    from specmesh.engine.families import read_spec

    config = {
        "architectures": ["LlamaForCausalLM"],
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
        **{"max_position_embeddings": 8192, "vocab_size": 49152, "tie_word_embeddings": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for preset in PRESETS.values():
        made = layout.make_layout(read_spec(tmp_path), preset)
        assert [large for _, large in made.query_heads] == [0, 1, 2, 4, 5, 6, 8, 9, 10]
        assert [large for _, large in made.kv_heads] == [0, 1, 2]
        # Every query head reads the key/value head that its small one read.
        for small, large in made.query_heads:
            assert (small // 3, large // made.group_size) in made.kv_heads


def test_numbers_replace_a_presets() -> None:
    """Numbers win over a preset; without one all are needed."""
    assert requested_shape("llama-1b", {"num_hidden_layers": 3}).num_hidden_layers == 3
    with pytest.raises(ConfigError, match="give intermediate_size, num_hidden_layers"):
        requested_shape(None, {"hidden_size": 64})
    with pytest.raises(ConfigError, match="'llama-9b' is not one of llama-8b, llama-1b"):
        requested_shape("llama-9b", {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' is not one of"),
        ({"device": "cuda:77"}, "device: 'cuda:77' cannot be used"),
        ({"tied": True}, "tied: .* has a head of its own"),
        ({"seed": -1}, "seed: -1 is not in"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Refused before any work, naming the option."""
    small = save(tiny_model("llama"), tmp_path / "small")
    with pytest.raises(ConfigError, match=message):
        inflate(small, tmp_path / "large", LARGER, InflateOptions(**change))
    with pytest.raises(ConfigError, match=r"out: .* exists"):
        inflate(small, small, LARGER)


def test_module_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of machines without the other packages writes and refuses."""
    model = tiny_model("llama")
    small = save(model, tmp_path / "small")
    flags = ["--model", str(small), "--out", str(tmp_path / "large"), "--dtype", "float32"]
    flags += ["--hidden-size", "64", "--intermediate-size", "96", "--num-hidden-layers", "3"]
    flags += ["--num-attention-heads", "8", "--num-key-value-heads", "4", "--head-dim", "8"]
    assert main(flags) == 0
    assert "billion parameters" in capsys.readouterr().out
    assert main(flags) == 2
    assert "exists" in capsys.readouterr().err
    with Checkpoint(tmp_path / "large") as checkpoint:
        assert HEAD in checkpoint
