"""transformers on the same weights, in the same run: `generate`, plain and assisted by the draft.

Whole calls are timed, the prompt's pass included, as a user of it would. Owns loading in the
precision and on the device asked for, and a bound on time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmesh.bench.measure import Series
from specmesh.bench.windows import Measured


class TransformersModels:
    """A target and, for assisted generation, a draft, loaded once in this process."""

    def __init__(self, target: Path, draft: Path | None, *, device: str, dtype: str) -> None:
        """Load both on `device` (a torch device) in `dtype` (float32, bfloat16 or float16)."""
        import torch

        self._torch = torch
        self._device = device
        self._dtype: Any = getattr(torch, dtype)
        self._target = self._load(target)
        self._draft = None if draft is None else self._load(draft)

    def _load(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"dtype": self._dtype}
        if not self._device.startswith("cpu"):
            options["device_map"] = {"": self._device}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        model.train(False)
        return model

    def ms_per_token(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        seconds: float,
        assisted: bool,
    ) -> Measured:
        """Summed time over summed tokens of whole calls, one after another, for about `seconds`.

        One call is made first and not counted. p20 and p80 are over calls.
        """
        self._call(prompts[0], max_tokens, temperature, assisted=assisted)
        times, tokens = [], []
        deadline = time.perf_counter() + seconds
        for prompt in prompts[1:] or prompts:
            elapsed, count = self._call(prompt, max_tokens, temperature, assisted=assisted)
            times.append(1000 * elapsed)
            tokens.append(count)
            if time.perf_counter() > deadline:
                break
        per_call = Series("", "ms", tuple(t / n for t, n in zip(times, tokens, strict=True)))
        value = sum(times) / sum(tokens)
        return Measured(value, "ms", per_call.quantile(0.2), per_call.quantile(0.8))

    def _call(
        self, prompt: Sequence[int], max_tokens: int, temperature: float, *, assisted: bool
    ) -> tuple[float, int]:
        torch = self._torch
        ids = torch.tensor([list(prompt)], device=self._device)
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if assisted:
            options["assistant_model"] = self._draft
        with torch.inference_mode():
            self._wait()
            began = time.perf_counter()
            output = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                pad_token_id=0,
                **options,
            )
            self._wait()
            elapsed = time.perf_counter() - began
        return elapsed, int(output.shape[1]) - len(prompt)

    def _wait(self) -> None:
        if not self._device.startswith("cpu"):
            self._torch.cuda.synchronize(self._device)
