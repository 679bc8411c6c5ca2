"""`python -m specmesh.bench.weight_error --model DIR`: what rounding a model's weights costs.

Draws answers to chat prompts from the model in float32, then compares what it says at every one of
their tokens with what another form of it says (fp8 weights, or another type): logits, divergence
and overlap of the two laws at temperature 1. The other form is a target in its own right:
speculation is exact for it. This says how far it is from the model it was made of.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from specmesh.bench.stack_cases import CHAT_PROMPTS, chat_ids, read_prompts
from specmesh.config import EngineSettings
from specmesh.engine.decoder import Decoder, StepBatch, load_decoder
from specmesh.engine.kv_cache import PAGE_SIZE
from specmesh.engine.loading import DTYPES, dtype_of, is_fused
from specmesh.errors import ConfigError
from specmesh.tokenizer import load_tokenizer

SEED = 7


@dataclass(frozen=True, slots=True)
class WeightError:
    """Over num_rows rows of logits. Divergence KL(model | other) in nats; overlap Σ min(p, q)."""

    num_rows: int
    logit_max_abs: float
    logit_rms: float
    divergence_mean: float
    divergence_max: float
    overlap_mean: float
    overlap_min: float
    same_argmax: float


def compare(logits: Tensor, other: Tensor) -> WeightError:
    """Errors of `other` beside `logits`, both [num_rows, vocab_size], in float64."""
    logits, other = logits.double(), other.double()
    error = other - logits
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    return WeightError(
        num_rows=len(logits),
        logit_max_abs=float(error.abs().max()),
        logit_rms=float(error.square().mean().sqrt()),
        divergence_mean=float(divergence.mean()),
        divergence_max=float(divergence.max()),
        overlap_mean=float(overlap.mean()),
        overlap_min=float(overlap.min()),
        same_argmax=float((logits.argmax(-1) == other.argmax(-1)).double().mean()),
    )


def _step(
    decoder: Decoder, fed: Sequence[Sequence[int]], kv_lens: Sequence[int], room: int
) -> StepBatch:
    """A batch of sequences that own `room` pages each, all logits wanted."""
    tables = [list(range(i * room, (i + 1) * room)) for i in range(len(fed))]
    num_rows = sum(map(len, fed))
    return StepBatch.pack(
        fed, kv_lens, tables, range(num_rows), page_size=PAGE_SIZE, device=decoder.device
    )


def draw_answers(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_new: int
) -> list[list[int]]:
    """num_new tokens after each prompt, drawn at temperature 1; past an end the text goes on."""
    room = -(-(max(map(len, prompts)) + num_new) // PAGE_SIZE)
    cache = decoder.new_cache(room * len(prompts))
    generator = torch.Generator().manual_seed(SEED)
    fed, kv_lens = [list(prompt) for prompt in prompts], [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_new):
        logits = decoder.forward(_step(decoder, fed, kv_lens, room), cache)
        ends = torch.tensor([len(tokens) for tokens in fed]).cumsum(0) - 1
        laws = logits[ends.to(logits.device), : decoder.spec.vocab_size].softmax(-1).cpu()
        drawn = torch.multinomial(laws, 1, generator=generator).flatten().tolist()
        kv_lens = [kv_len + len(tokens) for kv_len, tokens in zip(kv_lens, fed, strict=True)]
        fed = [[token] for token in drawn]
        for answer, token in zip(answers, drawn, strict=True):
            answer.append(token)
    return answers


def answer_logits(decoder: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The rows that an answer's tokens are drawn from, float32 [len(answer), vocab_size], on the
    CPU."""
    tokens = [*prompt, *answer[:-1]]
    room = -(-len(tokens) // PAGE_SIZE)
    logits = decoder.forward(_step(decoder, [tokens], [0], room), decoder.new_cache(room))
    return logits[len(prompt) - 1 :, : decoder.spec.vocab_size].cpu()


def measure(
    model: Decoder, other: Decoder, prompts: Sequence[Sequence[int]], num_new: int
) -> WeightError:
    """Compare two forms of a model on the first one's answers of num_new tokens; up to an end."""
    rows: tuple[list[Tensor], list[Tensor]] = [], []
    for prompt, drawn in zip(prompts, draw_answers(model, prompts, num_new), strict=True):
        ends = [i + 1 for i, token in enumerate(drawn) if token in model.spec.eos_ids]
        answer = drawn[: min([*ends, len(drawn)])]
        for found, decoder in zip(rows, (model, other), strict=True):
            found.append(answer_logits(decoder, prompt, answer))
    return compare(torch.cat(rows[0]), torch.cat(rows[1]))


def main(argv: list[str]) -> int:
    """Measure, print one JSON object; return the exit status: 2 for settings that cannot work."""
    parser = argparse.ArgumentParser(prog="specmesh.bench.weight_error", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weight-dtype", choices=("model", "fp8"), default="fp8")
    parser.add_argument("--dtype", default="auto", help="of the other form; the model is float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=24, help="how many of the chat prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args(argv)
    settings = EngineSettings(
        model=options.model, device=options.device, dtype=options.dtype,
        weight_dtype=options.weight_dtype,
    )  # fmt: skip
    try:
        tokenizer = load_tokenizer(options.model)
        dtype = dtype_of(settings)
        model = load_decoder(options.model, device=options.device)
        other = load_decoder(
            options.model, DTYPES[dtype], options.device, weight_dtype=options.weight_dtype,
            fused=is_fused(settings),
        )  # fmt: skip
    except ConfigError as error:
        sys.stderr.write(f"weight_error: {error}\n")
        return 2
    prompts = chat_ids(tokenizer, read_prompts(CHAT_PROMPTS)[: options.prompts])
    found = measure(model, other, prompts, options.tokens)
    form = {"model": options.model.resolve().name, "dtype": dtype, "device": options.device}
    report = {**form, "weight_dtype": options.weight_dtype, **asdict(found)}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
