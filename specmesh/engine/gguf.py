"""Reading a GGUF file of the Llama family as a Hugging Face configuration, tensors and tokenizer.

Owns GGUF's names, its quantised blocks (through the `gguf` package) and its order of rotary rows.
Must not know where the result is kept: `model_folder.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from specmesh.errors import ConfigError

_SUPPORTED = "supported: GGUF files of architecture llama with a byte-level BPE tokenizer"
_PRE_TOKENIZERS = ("smollm", "gpt-2")
_CONTROL, _USER_DEFINED = 3, 4  # token_type values of the format

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@contextmanager
def _distrusted(path: Path) -> Iterator[None]:
    """Whatever a damaged file makes the readers raise (anything, they promise nothing) is a
    ConfigError naming the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as broken:
        raise ConfigError(
            f"{path} is not a usable GGUF file: {type(broken).__name__}: {broken}"
        ) from broken


class _BoundedReader(GGUFReader):
    """Refuses whatever reaches past the end of the file.

    An array of 24 bytes may say that it has 2^60 elements. The package would go on for ever,
    reading nothing and keeping each.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.size:
            raise ValueError("the file ends within a field")
        return super()._get(offset, dtype, count, override_order)


class GgufModel:
    """One GGUF file, opened for reading. Raises ConfigError for anything unsupported."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"{path} is missing")
        self._path = path
        with _distrusted(path):
            self._reader = _BoundedReader(path)
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ConfigError(
                f"{path}: unsupported GGUF architecture {architecture!r}; {_SUPPORTED}"
            )
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        unknown = sorted(name for name in self._tensors if _hf_name(name) is None)
        if unknown:
            raise ConfigError(f"{path}: unsupported tensors {', '.join(unknown[:5])}; {_SUPPORTED}")

    def config(self) -> dict[str, Any]:
        """Return the equivalent Hugging Face config.json. Raises ConfigError."""
        with _distrusted(self._path):
            return self._config()

    def _config(self) -> dict[str, Any]:
        heads = int(self._field("llama.attention.head_count"))
        hidden = int(self._field("llama.embedding_length"))
        head_dim = int(self._field("llama.rope.dimension_count", hidden // heads))
        if self._field("llama.rope.scaling.type", "none") != "none":
            raise ConfigError(f"{self._path}: unsupported rotary scaling; {_SUPPORTED}")
        if head_dim != int(self._field("llama.attention.key_length", head_dim)):
            raise ConfigError(f"{self._path}: unsupported partial rotation; {_SUPPORTED}")
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "dtype": "float32",
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": int(self._field("llama.feed_forward_length")),
            "max_position_embeddings": int(self._field("llama.context_length")),
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": int(self._field("llama.block_count")),
            "num_key_value_heads": int(self._field("llama.attention.head_count_kv", heads)),
            "rms_norm_eps": _shortest(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_parameters": {
                "rope_theta": _shortest(self._field("llama.rope.freq_base", 10000.0)),
                "rope_type": "default",
            },
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, float32 tensor), dequantised, rotary rows in half order.

        Raises ConfigError.
        """
        with _distrusted(self._path):
            yield from self._converted()

    def _converted(self) -> Iterator[tuple[str, Tensor]]:
        heads = int(self._field("llama.attention.head_count"))
        kv_heads = int(self._field("llama.attention.head_count_kv", heads))
        for name, tensor in self._tensors.items():
            values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            weight = torch.from_numpy(values)
            if ".attn_q." in name:
                weight = _half_order(weight, heads)
            elif ".attn_k." in name:
                weight = _half_order(weight, kv_heads)
            hf_name = _hf_name(name)
            assert hf_name is not None
            yield hf_name, weight

    def tokenizer(self) -> tuple[FastTokenizer, dict[str, Any]]:
        """Build the tokenizer and its tokenizer_config.json from the metadata.

        Raises ConfigError.
        """
        with _distrusted(self._path):
            return self._tokenizer()

    def _tokenizer(self) -> tuple[FastTokenizer, dict[str, Any]]:
        kind, pre = self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
            raise ConfigError(
                f"{self._path}: unsupported tokenizer {kind!r} with pre-tokenizer {pre!r}; "
                f"{_SUPPORTED}, pre-tokenizer {' or '.join(_PRE_TOKENIZERS)}"
            )
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        tokenizer = FastTokenizer(model)
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, by_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        for token, token_kind in zip(tokens, kinds, strict=True):
            if token_kind == _CONTROL:
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif token_kind == _USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, normalized=False)])
        return tokenizer, self._tokenizer_config(tokens)

    def _tokenizer_config(self, tokens: list[str]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self._field("llama.context_length")),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        for theirs, ours in names.items():
            token_id = self._field(f"tokenizer.ggml.{theirs}_token_id", None)
            if token_id is not None:
                config[f"{ours}_token"] = tokens[token_id]
        template = self._field("tokenizer.chat_template", None)
        return config if template is None else {**config, "chat_template": template}

    _REQUIRED = object()

    def _field(self, name: str, default: Any = _REQUIRED) -> Any:
        field = self._reader.fields.get(name)
        if field is not None:
            with _distrusted(self._path):
                return field.contents()
        if default is self._REQUIRED:
            raise ConfigError(f"{self._path} has no metadata field {name}")
        return default


def _hf_name(name: str) -> str | None:
    """Hugging Face's name of a tensor, None for one that the family does not have."""
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] != "weight":
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"


def _half_order(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (2i, 2i+1), which GGUF keeps, to halves (i, i + width/2)."""
    rows, width = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width)


def _shortest(value: float) -> float:
    """The decimal that a float32 of the metadata was written as: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, readable and in stable order."""
    path.write_text(
        json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8"
    )
