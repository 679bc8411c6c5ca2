"""A pair of model folders small enough to start in seconds: byte-level tokens, random weights.

The draft is the target's first layer under the target's own embedding, so that some candidates are
accepted and some are not.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
NUM_LAYERS = 2
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write `target` and `draft` under `folder`; return both."""
    tokenizer = _tokenizer()
    weights = _weights(tokenizer.get_vocab_size())
    folders = []
    for name, num_layers in (("target", NUM_LAYERS), ("draft", 1)):
        into = folder / name
        into.mkdir(parents=True)
        tokenizer.save(str(into / "tokenizer.json"))
        tokenizer_config = {"eos_token": SPECIAL[1], "chat_template": TEMPLATE}
        (into / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        config = _config(tokenizer.get_vocab_size(), num_layers)
        (into / "config.json").write_text(json.dumps(config))
        kept = {
            key: value
            for key, value in weights.items()
            if not key.startswith("model.layers.") or int(key.split(".")[2]) < num_layers
        }
        save_file(kept, into / "model.safetensors")
        folders.append(into)
    return folders[0], folders[1]


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def _config(vocab_size: int, num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": vocab_size - 1,
    }


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(20260101)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    # A wide embedding makes the output far from uniform, so that drafting is worth something.
    weights = {
        "model.embed_tokens.weight": normal(vocab_size, HIDDEN, std=0.45),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for part, shape in shapes.items():
            weights[f"{name}.{part}.weight"] = normal(*shape, std=0.15)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{part}.weight"] = torch.ones(HIDDEN)
    return weights
