"""The baseline: the same weights in transformers, in this process.

Float32 on the CPU with as many threads as the services. Owns timing of `generate` and
of one forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ReferenceModel:
    """A transformers model, loaded once. Every call is timed with a monotonic clock."""

    def __init__(self, folder: Path, num_threads: int | None = None) -> None:
        """Load `folder` in float32; num_threads is set for the whole process."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train(False)
        self.vocab_size = len(self.tokenizer)

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a chat prompt, as the coordinator makes them."""
        turns = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        return [int(token_id) for token_id in ids]

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[float, list[int]]:
        """Greedy `generate` of exactly `num_tokens`: (seconds, output ids)."""
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            began = time.perf_counter()
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - began
        return seconds, output[0, len(prompt) :].tolist()

    def forward(self, prompt: Sequence[int]) -> float:
        """Seconds of one forward pass over `prompt`, logits of the last position only."""
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            began = time.perf_counter()
            self._model(ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began
