"""Where two runs of one request part: how near the two tokens were, by an independent model.

Batches of other shapes round differently, so the best two of a row may change places. That is no
fault while both were as good as equal: the gap is recomputed here, in float64, by the plainest
possible reading of the model's architecture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from kernels import reference
from kernels.reference import Purpose
from tests.chaos.load import Job

NEAR_TIE = 2.0**-16  # of two finishing times, or logits: float32 over two layers rounds far finer


class Judge:
    """Holds the target's model. Loaded when first needed."""

    def __init__(self, target_dir: Path) -> None:
        self._target_dir = target_dir
        self._model: PlainLlama | None = None

    def gap(self, job: Job, wanted: Sequence[int], found: Sequence[int]) -> float | None:
        """Relative gap of the first two tokens that differ; None where one output is only longer.

        Coupled: of the finishing times of their race. Greedy: of their logits.
        """
        pairs = enumerate(zip(wanted, found, strict=False))
        index = next((i for i, (one, other) in pairs if one != other), None)
        if index is None:
            return None
        prefix = [*job.prompt, *wanted[:index]]
        logits = self._logits(prefix).to(torch.float64)
        ids = torch.tensor(sorted((wanted[index], found[index])))
        if job.seed is None:
            values = logits[ids]
        else:
            weights = torch.exp(logits[ids] - logits.max())
            times = reference.exponentials(job.seed, ids, len(prefix), 0, Purpose.COUPLED)
            values = times / weights
        return float((values.max() - values.min()) / values.abs().max())

    def _logits(self, prefix: Sequence[int]) -> torch.Tensor:
        if self._model is None:
            self._model = PlainLlama(self._target_dir)
        return self._model.logits(prefix)


class PlainLlama:
    """The last row of a Llama decoder (Touvron et al. 2302.13971), from its folder, in float64."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self._weights = {name: weight.to(torch.float64) for name, weight in weights.items()}

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """float64 [vocab_size] after these tokens."""
        weights = self._weights
        embedding = weights["model.embed_tokens.weight"]
        x = embedding[torch.tensor(list(prefix))]
        for layer in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attend(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate = normed @ weights[f"{name}.mlp.gate_proj.weight"].T
            up = normed @ weights[f"{name}.mlp.up_proj.weight"].T
            x = (
                x
                + (torch.nn.functional.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
            )
        return self._norm(x[-1:], "model.norm")[0] @ embedding.T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(mean + self._config["rms_norm_eps"])
        return scaled * self._weights[f"{name}.weight"]

    def _attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        length, width = x.shape[0], self._config["head_dim"]
        parts = [(x @ self._weights[f"{name}.{part}_proj.weight"].T) for part in "qkv"]
        q, k, v = (part.view(length, -1, width).transpose(0, 1) for part in parts)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = (q @ k.transpose(1, 2)) / width**0.5
        scores = scores + torch.full((length, length), -torch.inf).triu(1)
        mixed = (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(length, -1)
        return mixed @ self._weights[f"{name}.o_proj.weight"].T

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = self._config["rope_theta"] ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def parted(
    judge: Judge, job: Job, wanted: Sequence[int], found: Sequence[int]
) -> tuple[bool, float | None]:
    """Whether two outputs differ by more than a near-tie explains, and the gap."""
    if list(wanted) == list(found):
        return False, None
    gap = judge.gap(job, wanted, found)
    return gap is None or gap >= NEAR_TIE, gap
