"""Tiny random models of every family, made by transformers, and packed steps over them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from specmesh.engine.decoder import Decoder, StepBatch
from specmesh.engine.kv_cache import KVCache

VOCAB = 97
PAGE = 16
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model whose every weight (norms and biases too) matters."""
    make_config, make_model = FAMILIES[family]
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        **changes,
    }
    model = make_model(make_config(**fields)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + noise if is_norm else noise)
    return model


def save(model: Any, folder: Path) -> Path:
    """Write the model as a Hugging Face folder."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits of every position, float32 [num_tokens, vocab_size]."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids, reproducible."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
    return ids


class PackedRun:
    """Several sequences fed step by step through one decoder and cache."""

    def __init__(
        self, decoder: Decoder, sequences: Sequence[Sequence[int]], cache: KVCache | None = None
    ) -> None:
        self.decoder, self.sequences = decoder, sequences
        self.done = [0] * len(sequences)
        self.tables: list[list[int]] = []
        used = 0
        for tokens in sequences:
            count = -(-len(tokens) // PAGE)
            self.tables.append(list(range(used, used + count))[::-1])  # any order will do
            used += count
        self.cache = cache or decoder.new_cache(used + 1, PAGE)

    def step(self, counts: Sequence[int]) -> list[Tensor]:
        """Feed the next counts[i] tokens of sequence i; logits of each, [counts[i], vocab]."""
        fed = [
            list(tokens[done : done + count])
            for tokens, done, count in zip(self.sequences, self.done, counts, strict=True)
        ]
        total = sum(counts)
        batch = StepBatch.pack(fed, self.done, self.tables, range(total), page_size=PAGE)
        logits = self.decoder.forward(batch, self.cache)
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        return list(logits.split(list(counts)))
