"""`python -m specmesh.bench.device_checks`: a GPU computes what it should, on a real pair.

Four checks, each a JSON object: logits beside the CPU's float32 decoder, the overlap sum(min(p, q))
beside the CPU's, bits of a row however its context was fed, and, on a running stack, greedy tokens
with speculation beside those without. `--weight-dtype fp8`: of a target over such weights, on both
devices. Owns the comparisons; prints one line a check and exits with status 1 when one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.reference_attention import PagedBatch
from specmesh import event_loop
from specmesh.bench.stack_cases import chat_ids, read_prompts
from specmesh.client import AsyncClient, Chunk, GenerateOptions
from specmesh.engine.decoder import Decoder, StepBatch, load_decoder
from specmesh.engine.fused import PagedAttention, PagedGroup
from specmesh.engine.kv_cache import KVCache
from specmesh.tokenizer import load_tokenizer

PAGE = 64
OVERLAP_TOLERANCE = 0.01
# Relative error of bfloat16 logits on the GPU over that of the same model in bfloat16 on a CPU.
ERROR_RATIO = 1.5
PREFIXES = ("", "In two sentences: ", "Answer briefly. ")  # make more prompts of the shipped ones


@dataclass(frozen=True, slots=True)
class Fed:
    """One sequence whose last tokens are fed now: tokens, how many were fed before, its pages."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


def paged_logits(decoder: Decoder, cache: KVCache, fed: Sequence[Fed]) -> list[Tensor]:
    """Logits of every token fed, [num_fed, width] each, by the paged kernels in one step."""
    device = decoder.device
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    for each in fed:
        own = range(each.start, len(each.tokens))
        token_ids += each.tokens[each.start :]
        positions += own
        slots += [each.table[i // PAGE] * PAGE + i % PAGE for i in own]
        cu_seqlens.append(len(token_ids))
    longest = max(len(each.table) for each in fed)

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = PagedBatch(
        ints(cu_seqlens),
        ints([len(each.tokens) for each in fed]),
        ints([[*each.table, *[0] * (longest - len(each.table))] for each in fed]),
        max(len(each.tokens) - each.start for each in fed),
        longest * PAGE,
    )
    attention = PagedAttention(
        decoder.spec,
        cache,
        decoder.rope_tables(),
        ints(positions),
        ints(slots),
        (PagedGroup(0, len(token_ids), batch),),
    )
    with torch.inference_mode():
        logits = decoder.run(ints(token_ids), attention, None)
    sizes = [len(each.tokens) - each.start for each in fed]
    return list(torch.split(logits[:, : decoder.spec.vocab_size], sizes))


def reference_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits of every token by the reference path, float32 [num_tokens, vocab_size]."""
    pages = -(-len(tokens) // PAGE)
    cache = decoder.new_cache(pages, PAGE)
    batch = StepBatch.pack(
        [list(tokens)], [0], [list(range(pages))], range(len(tokens)), page_size=PAGE
    )
    return decoder.forward(batch, cache)[:, : decoder.spec.vocab_size]


def _table(index: int, num_pages: int) -> list[int]:
    return list(range(index * num_pages, (index + 1) * num_pages))


def check_logits(
    on_gpu: Decoder,
    wide: Decoder,
    plain: tuple[Decoder, Decoder],
    sequences: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Relative error ||gpu - cpu float32|| / ||cpu float32||, beside the CPU's own in bfloat16.

    plain: the folder's own weights on the CPU in float32 and in bfloat16.
    """
    errors, own_errors, same_argmax = [], [], []
    for tokens in sequences:
        pages = -(-len(tokens) // PAGE)
        cache = on_gpu.new_cache(pages, PAGE)
        found = paged_logits(on_gpu, cache, [Fed(tokens, 0, range(pages))])[0].float().cpu()
        truth = reference_logits(wide, tokens)
        exact, rounded = (reference_logits(each, tokens) for each in plain)
        errors.append(float((found - truth).norm() / truth.norm()))
        own_errors.append(float((rounded - exact).norm() / exact.norm()))
        same_argmax.append(float((found.argmax(-1) == truth.argmax(-1)).float().mean()))
    mean, own = sum(errors) / len(errors), sum(own_errors) / len(own_errors)
    return {
        "name": "logits-against-cpu-float32",
        "value": mean,
        "unit": "relative error",
        "baseline": {"name": "bfloat16 on the CPU", "value": own},
        "same_argmax": sum(same_argmax) / len(same_argmax),
        "passed": mean <= ERROR_RATIO * own,
    }


def _overlaps(target: Tensor, draft: Tensor) -> Tensor:
    p, q = (torch.softmax(each.float().cpu(), -1) for each in (target, draft))
    return torch.minimum(p, q).sum(-1)


def check_overlap(
    on_gpu: tuple[Decoder, Decoder],
    on_cpu: tuple[Decoder, Decoder],
    sequences: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Mean of sum(min(p, q)) over all positions at temperature 1, whole rows on both sides."""
    found, truth = [], []
    for tokens in sequences:
        pages = -(-len(tokens) // PAGE)
        rows = [
            paged_logits(each, each.new_cache(pages, PAGE), [Fed(tokens, 0, range(pages))])[0]
            for each in on_gpu
        ]
        found.append(_overlaps(*rows))
        truth.append(_overlaps(*(reference_logits(each, tokens) for each in on_cpu)))
    ours, theirs = float(torch.cat(found).mean()), float(torch.cat(truth).mean())
    return {
        "name": "overlap-against-cpu-float32",
        "value": ours,
        "unit": "1",
        "baseline": {"name": "float32 on the CPU", "value": theirs},
        "passed": abs(ours - theirs) <= OVERLAP_TOLERANCE,
    }


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)


def check_bits(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Logits of the last 10 tokens: decoded one by one, verified five at a time, in a batch of all
    sequences, and with the context in one piece or in chunks of 48. Counts differing bits."""
    differing = num_numbers = 0
    tail = 10
    pages = max(-(-len(tokens) // PAGE) for tokens in sequences)
    cache = decoder.new_cache(pages * len(sequences), PAGE)

    def feed(cuts: Sequence[int], together: bool) -> list[Tensor]:
        """Feed every sequence up to each cut (counted from the end); logits of the tail."""
        rows: list[list[Tensor]] = [[] for _ in sequences]
        groups = [range(len(sequences))] if together else [[i] for i in range(len(sequences))]
        for group in groups:
            start = dict.fromkeys(group, 0)
            for cut in cuts:
                fed = [
                    Fed(sequences[i][: len(sequences[i]) - cut], start[i], _table(i, pages))
                    for i in group
                ]
                for i, each in zip(group, paged_logits(decoder, cache, fed), strict=True):
                    start[i] = len(sequences[i]) - cut
                    rows[i].append(each)
        return [torch.cat(each)[-tail:] for each in rows]

    shortest = min(len(tokens) for tokens in sequences)
    chunks = list(range(shortest - 48, tail, -48))
    expected = feed([tail, *range(tail - 1, -1, -1)], together=False)
    variants = {
        "verified": ([tail, 5, 0], False),
        "batched": ([tail, *range(tail - 1, -1, -1)], True),
        "batched and verified": ([tail, 5, 0], True),
        "chunked": ([*chunks, tail, 0], False),
        "whole": ([0], True),
    }
    counts = {}
    for name, (cuts, together) in variants.items():
        found = feed(cuts, together)
        counts[name] = sum(
            int((_bits(a) != _bits(b)).sum()) for a, b in zip(found, expected, strict=True)
        )
        differing += counts[name]
        num_numbers += sum(each.numel() for each in found)
    return {
        "name": "bits-of-a-row",
        "value": differing,
        "unit": "differing logits",
        "compared": num_numbers,
        "by_way": counts,
        "baseline": None,
        "passed": differing == 0,
    }


async def _texts(
    address: str, prompts: Sequence[Sequence[int]], options: GenerateOptions, concurrency: int
) -> list[list[int]]:
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(address) as client:

        async def one(prompt: Sequence[int]) -> list[int]:
            async with gate:
                tokens: list[int] = []
                async for event in client.stream(list(prompt), options):
                    if isinstance(event, Chunk):
                        tokens += event.token_ids
                return tokens

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def check_greedy(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """Greedy tokens with k = 4 and with k = 0 through the stack, equal token for token."""

    def texts(k: int, concurrency: int) -> list[list[int]]:
        options = GenerateOptions(
            temperature=0.0, max_tokens=max_tokens, num_draft_tokens=k, ignore_eos=True
        )
        return event_loop.run(_texts(address, prompts, options, concurrency))

    speculated, plain = texts(4, 32), texts(0, 48)
    wrong = sum(a != b for a, b in zip(speculated, plain, strict=True))
    return {
        "name": "greedy-with-speculation-equals-plain",
        "value": wrong,
        "unit": "differing requests",
        "requests": len(prompts),
        "tokens": sum(map(len, plain)),
        "baseline": None,
        "passed": wrong == 0 and all(len(text) == max_tokens for text in plain),
    }


def main(argv: list[str]) -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="specmesh.bench.device_checks", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--weight-dtype", choices=("model", "fp8"), default="model", help="of the target"
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--address", help="of a coordinator: also compare greedy requests")
    parser.add_argument("--requests", type=int, default=208)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    tokenizer = load_tokenizer(options.target)
    texts = read_prompts(options.prompts)
    prompts = chat_ids(tokenizer, [prefix + text for prefix in PREFIXES for text in texts])
    reports = []
    if options.address:
        reports.append(
            check_greedy(options.address, prompts[: options.requests], options.max_tokens)
        )
    else:
        sequences = sorted(prompts, key=len)[-options.sequences :]
        torch.cuda.set_device(options.device)  # Triton launches on the current device
        kind, narrow = options.weight_dtype, torch.bfloat16
        on_gpu = (
            load_decoder(options.target, narrow, options.device, weight_dtype=kind, fused=True),
            load_decoder(options.draft, narrow, options.device, fused=True),
        )
        on_cpu = load_decoder(options.target, weight_dtype=kind), load_decoder(options.draft)
        plain = load_decoder(options.target), load_decoder(options.target, narrow)
        reports = [
            check_logits(on_gpu[0], on_cpu[0], plain, sequences),
            check_overlap(on_gpu, on_cpu, sequences),
            check_bits(on_gpu[0], sequences),
        ]
    command = shlex.join(["python", "-m", "specmesh.bench.device_checks", *argv])
    for report in reports:
        line = json.dumps(report | {"command": command})
        sys.stdout.write(line + "\n")
        if options.output:
            with options.output.open("a") as lines:
                lines.write(line + "\n")
    return 0 if all(report["passed"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
