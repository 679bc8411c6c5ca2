"""Which models the engine runs, and what their configuration means.

Turns a Hugging Face `config.json` into a `ModelSpec`, or refuses with what is wrong and what is
supported. Must not know weights or devices. A new family of the Llama shape is one more entry in
`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernels.reference_layers import Rope
from specmesh.errors import ConfigError
from specmesh.model_fields import MAX_COUNT, count, number, read_object, token_ids

Config = Mapping[str, Any]

# What Mistral and Qwen2 configurations mean where they leave the field out.
DEFAULT_WINDOW = 4096
DEFAULT_FIRST_WINDOW_LAYER = 28
MAX_LAYERS = 4096
# Numbers of a rotary scaling, with the least that the formulas take.
ROPE_NUMBERS = {
    "factor": 1e-6,
    "low_freq_factor": 0.0,
    "high_freq_factor": 0.0,
    "beta_fast": 1e-6,
    "beta_slow": 1e-6,
    "attention_factor": 0.0,
    "mscale": 0.0,
    "mscale_all_dim": 0.0,
}


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
    return read_object(path)


def spec_from_config(
    config: Config, vocab_size: int | None = None, eos_ids: int | list[int] | None = None
) -> ModelSpec:
    """Interpret a Hugging Face configuration. Raises ConfigError for anything unsupported."""
    family, architecture = _family(config)
    _refuse_unsupported(config)
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    num_layers = count(config, "num_hidden_layers", high=MAX_LAYERS)
    num_embeddings = count(config, "vocab_size")
    max_context_len = count(config, "max_position_embeddings")
    head_dim = count(config, "head_dim", family.default_head_dim or hidden // heads)
    kv_heads = count(config, "num_key_value_heads", heads)
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
        intermediate_size=count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6, 0.0, 1.0),
        rope=_rope(config, family, head_dim, max_context_len),
        max_context_len=max_context_len,
        windows=_windows(config, family, num_layers),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_id=next(iter(token_ids(config.get("bos_token_id"), "bos_token_id")), None),
        eos_ids=token_ids(ends, "eos_token_id"),
    )


def _family(config: Config) -> tuple[Family, str]:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        names = [names]
    for name in map(str, names):
        if name in FAMILIES:
            return FAMILIES[name], name
    found = (
        ", ".join(str(name) for name in names) or f"none (model_type {config.get('model_type')!r})"
    )
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
    if window is not None:
        window = int(number(config, "sliding_window", DEFAULT_WINDOW, 1, MAX_COUNT))
    if family.window == "never" or (
        family.window == "flagged" and not config.get("use_sliding_window", False)
    ):
        window = None
    if window is None or family.window == "always":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = number(config, "max_window_layers", DEFAULT_FIRST_WINDOW_LAYER, 0, MAX_COUNT)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list):
        raise ConfigError(f"layer_types is {kinds!r}, expected a list")
    kinds = [str(kind) for kind in kinds]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise ConfigError(
            f"layer_types: expected full_attention or sliding_attention for {num_layers} layers, "
            f"got {len(kinds)} of {sorted(set(kinds))}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Config, family: Family, head_dim: int, max_context_len: int) -> Rope:
    """Rotary embedding: `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old)."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, dict):
        raise ConfigError(f"config.json: rotary parameters are {fields!r}, expected an object")
    # Some fields may stand in either place.
    both = {**config, **{name: value for name, value in fields.items() if value is not None}}
    theta = number(both, "rope_theta", family.default_theta, 1.001, 1e12)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"unsupported rotary scaling {kind!r}; {SUPPORTED}")
    rotary_dim = int(head_dim * number(both, "partial_rotary_factor", 1.0, 0.0, 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"{rotary_dim} of {head_dim} dimensions rotate, expected an even number")
    given: dict[str, Any] = {
        name: number(fields, name, None, low, 1e9)
        for name, low in ROPE_NUMBERS.items()
        if fields.get(name) is not None
    }
    if fields.get("truncate") is not None:
        given["truncate"] = bool(fields["truncate"])
    if kind != "default" and "factor" not in given:
        raise ConfigError(f"rotary scaling {kind!r} needs a factor")
    low, high = given.get("low_freq_factor", 1.0), given.get("high_freq_factor", 4.0)
    if kind == "llama3" and low >= high:
        raise ConfigError(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return Rope(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        original_context_len=count(fields, "original_max_position_embeddings", max_context_len),
        **given,
    )
