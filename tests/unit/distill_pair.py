"""A tiny target with a chat tokenizer, and runs of `specmesh distill` that take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specmesh.distill.run import Result, distill
from specmesh.distill.settings import Settings
from tests.unit.tiny_models import save, tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def tokenizer_files(folder: Path) -> int:
    """Write a byte-level tokenizer with a chat template; return its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend.get_vocab_size()


def tiny_target(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A random target of three layers whose laws a student can learn something of."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer_files(folder)
    fields = {"vocab_size": vocab_size, "tie_word_embeddings": False, "head_dim": 8,
              "bos_token_id": 256, "eos_token_id": 257, **changes}  # fmt: skip
    model = tiny_model(family, seed=3, **fields)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return save(model, folder)


def prompt_file(folder: Path, count: int = 4) -> Path:
    """Held-out prompts short enough for a tiny row."""
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(count)))
    return path


def settings(target: Path, out: Path, **changes: Any) -> Settings:
    """A run of a few steps on a CPU, bounded by steps alone so that it can be repeated."""
    fields: dict[str, Any] = {
        "layers": 1, "minutes": None, "max_steps": 6, "held_out": prompt_file(target),
        "batch_rows": 4, "micro_rows": 4, "length": 96, "sample_rows": 8, "pool_rows": 8,
        "reuse": 2, "report_steps": 3, "eval_rows": 4, "warmup_steps": 1,
    }  # fmt: skip
    return Settings(target=target, out=out, **{**fields, **changes})


def run(given: Settings) -> tuple[Result, list[dict[str, Any]]]:
    """Run; return the result and every record of the curve."""
    records: list[dict[str, Any]] = []
    result = distill(given, records.append)
    assert result is not None
    return result, records
