"""Random Llama models, by default over five tokens: real decoders, rows of the whole context."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmesh.engine.decoder import Decoder, StepBatch, load_decoder
from specmesh.engine.families import spec_from_config
from specmesh.engine.weights import expected_shapes

VOCAB_SIZE = 5
WEIGHT_SCALE = 0.35  # logits spread over a few nats
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def tiny_llama(
    folder: Path,
    seed: int,
    noise_seed: int = 0,
    noise: float = 0.0,
    vocab_size: int = VOCAB_SIZE,
) -> Decoder:
    """Make a model in `folder`: random weights, plus `noise` times others (a draft of one)."""
    config = CONFIG | {"vocab_size": vocab_size}
    generator = torch.Generator().manual_seed(seed)
    other = torch.Generator().manual_seed(noise_seed)
    tensors = {}
    for name, shape in expected_shapes(spec_from_config(config)):
        own = torch.randn(shape, generator=generator)
        own += noise * torch.randn(shape, generator=other)
        tensors[name] = torch.ones(shape) if len(shape) == 1 else WEIGHT_SCALE * own
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return load_decoder(folder)


def logits_after(decoder: Decoder, sequences: list[list[int]]) -> Tensor:
    """Logits of every position, from one pass without any cached K/V: [num_seqs, len, vocab_size].

    All sequences have one length, at most one page.
    """
    length = len(sequences[0])
    cache = decoder.new_cache(len(sequences), page_size=64)
    batch = StepBatch.pack(
        sequences,
        [0] * len(sequences),
        [[page] for page in range(len(sequences))],
        range(length * len(sequences)),
        page_size=64,
    )
    logits = decoder.forward(batch, cache)
    return logits.view(len(sequences), length, -1)
