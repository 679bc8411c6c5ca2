"""Which models the engine runs, and what their configuration means.

Turns a Hugging Face `config.json` into a `ModelSpec`, or refuses with what is wrong and what is
supported. Must not know weights or devices. A new family of the Llama shape is one more entry in
`FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernels.reference_layers import Rope
from specmesh.errors import ConfigError

Config = Mapping[str, Any]

# What Mistral and Qwen2 configurations mean where they leave the field out.
DEFAULT_WINDOW = 4096
DEFAULT_FIRST_WINDOW_LAYER = 28


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture does that its configuration does not say."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the configuration's attention_bias
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_theta: float = 10000.0
    window: Literal["never", "always", "flagged"] = "never"  # flagged: with use_sliding_window


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, window="always"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="flagged"),
    "Qwen3ForCausalLM": Family(qk_norm=True, window="flagged", default_head_dim=128),
}
SUPPORTED = (
    "supported: " + ", ".join(FAMILIES) + " (SmolLM and SmolLM2 are LlamaForCausalLM), "
    "activation silu, rotary scaling default, linear, llama3 or yarn"
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and arithmetic of one decoder.

    vocab_size: ids that the tokenizer has; num_embeddings: rows of the embedding and the head,
    padding included (num_embeddings >= vocab_size). windows[i]: tokens a query of layer i sees,
    itself included, or None. qkv_bias, out_bias, mlp_bias: which linear layers have a bias.
    """

    architecture: str
    vocab_size: int
    num_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_context_len: int
    windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def read_spec(folder: Path, vocab_size: int | None = None) -> ModelSpec:
    """Read `folder/config.json` (and `generation_config.json` for the end ids, if there).

    vocab_size is the tokenizer's, None to take the configuration's. Raises ConfigError.
    """
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    return spec_from_config(config, vocab_size, eos_ids=eos)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError for a missing or broken file."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: a model folder holds config.json, tokenizer.json and *.safetensors"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise ConfigError(f"{path} is not valid JSON: {broken}") from broken
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


def spec_from_config(
    config: Config, vocab_size: int | None = None, eos_ids: int | list[int] | None = None
) -> ModelSpec:
    """Interpret a Hugging Face configuration. Raises ConfigError for anything unsupported."""
    family, architecture = _family(config)
    _refuse_unsupported(config)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        num_layers, num_embeddings = int(config["num_hidden_layers"]), int(config["vocab_size"])
        intermediate = int(config["intermediate_size"])
        max_context_len = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as missing:
        raise ConfigError(f"config.json of a {architecture}: no usable {missing}") from missing
    head_dim = int(config.get("head_dim") or family.default_head_dim or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{heads} query heads over {kv_heads} key/value heads of width {head_dim}: expected "
            "a whole number of query heads per key/value head and an even width"
        )
    if vocab_size is not None and vocab_size > num_embeddings:
        raise ConfigError(
            f"the tokenizer has {vocab_size} ids, the model only {num_embeddings} embeddings"
        )
    attention_bias = bool(config.get("attention_bias", False))
    ends = eos_ids if eos_ids is not None else config.get("eos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab_size=num_embeddings if vocab_size is None else vocab_size,
        num_embeddings=num_embeddings,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, family, head_dim, max_context_len),
        max_context_len=max_context_len,
        windows=_windows(config, family, num_layers),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_id=config.get("bos_token_id"),
        eos_ids=_as_ids(ends),
    )


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(sorted(set(value))) if isinstance(value, list) else (value,)


def _family(config: Config) -> tuple[Family, str]:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name], name
    found = ", ".join(map(str, names)) or f"none (model_type {config.get('model_type')!r})"
    raise ConfigError(f"unsupported architecture: {found}; {SUPPORTED}")


def _refuse_unsupported(config: Config) -> None:
    """Features that would change the arithmetic and that the decoder does not have."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"unsupported activation {activation!r}; {SUPPORTED}")
    if config.get("quantization_config"):
        raise ConfigError(
            "quantized checkpoints are not supported: use float32, bfloat16 or float16 safetensors"
        )
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "num_local_experts",
        "num_experts",
    ):
        if config.get(name):
            raise ConfigError(f"unsupported feature {name} = {config[name]}; {SUPPORTED}")


def _windows(config: Config, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: from layer_types where given, else from the family's fields."""
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if family.window == "never" or (
        family.window == "flagged" and not config.get("use_sliding_window", False)
    ):
        window = None
    if window is not None and int(window) < 1:
        raise ConfigError(f"sliding_window {window} is not a positive number of tokens")
    if window is None or family.window == "always":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", DEFAULT_FIRST_WINDOW_LAYER))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise ConfigError(
            f"layer_types: expected full_attention or sliding_attention for {num_layers} layers, "
            f"got {len(kinds)} of {sorted(set(kinds))}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Config, family: Family, head_dim: int, max_context_len: int) -> Rope:
    """Rotary embedding: `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old)."""
    fields: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(fields.get("rope_theta") or config.get("rope_theta") or family.default_theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"unsupported rotary scaling {kind!r}; {SUPPORTED}")
    share = float(fields.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    names = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    if kind != "default" and "factor" not in given:
        raise ConfigError(f"rotary scaling {kind!r} needs a factor")
    original = fields.get("original_max_position_embeddings") or max_context_len
    return Rope(
        theta=theta,
        rotary_dim=int(head_dim * share),
        kind=kind,
        original_context_len=int(original),
        **given,
    )
