"""Compile the shipped attention configurations for sm_90 and print one JSON object a kernel.

Run as `python -m tests.kernels.audit_attention` without TRITON_INTERPRET; `test_compile_audit_
attention` does, and holds the bars. Inputs are meta tensors: no GPU, no memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from kernels import (
    attention_backward,
    attention_forward,
    attention_specialised,
    paged_attention,
)
from kernels.attention_forward import Inputs
from kernels.attention_inputs import FreshRows
from kernels.configs import attention as configs
from kernels.reference_attention import AttentionOptions, PagedBatch
from tests.kernels.sm90_audit import Launch, compile_launches, recorded

ARCHITECTURE = "sm_90"
CAUSAL = AttentionOptions(causal=True)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense_launches(head_dim: int) -> Iterator[tuple[str, Launch]]:
    """The forward and both backward kernels of one head_dim, causal, 32 over 8 heads."""
    q, kv = meta(4, 32, 4096, head_dim), meta(4, 8, 4096, head_dim)
    inputs, key = Inputs(q, kv, kv), (ARCHITECTURE, head_dim)
    tiles = configs.FORWARD[key]
    with recorded(attention_forward, "_forward_kernel") as launches:
        attention_forward.launch_forward(inputs, CAUSAL, replace(tiles, specialised=False))
    yield f"forward-{head_dim}", launches[0]
    if tiles.specialised:
        with recorded(attention_specialised, "_specialised_kernel") as launches:
            attention_forward.launch_forward(inputs, CAUSAL, tiles)
        yield f"specialised-{head_dim}", launches[0]
    lse = meta(4, 32, 4096, dtype=torch.float32)
    names = ("_rows_kernel", "_key_value_kernel", "_query_kernel")
    with recorded(attention_backward, *names) as launches:
        attention_backward.launch_backward(
            q, inputs, attention_backward.Saved(q, lse), CAUSAL,
            tiles=(configs.BACKWARD_KV[key], configs.BACKWARD_Q[key]),
        )  # fmt: skip
    yield f"key-value-{head_dim}", launches[1]
    yield f"query-{head_dim}", launches[2]


def paged_launches(head_dim: int) -> Iterator[tuple[str, Launch]]:
    """Verify by leaf and by chunk, and prefill over whole sequences, pages of 64."""
    pool = meta(4096, 8, 64, head_dim)
    verify, prefill = configs.PAGED[ARCHITECTURE, head_dim]
    for name, split, tiles, query_len in (
        ("leaf", paged_attention.Split.LEAF, verify, 5),
        ("chunk", paged_attention.Split.CHUNK, verify, 5),
        ("prefill", paged_attention.Split.SEQUENCE, prefill, 512),
    ):
        batch = PagedBatch(
            meta(9, dtype=torch.int32), meta(8, dtype=torch.int32),
            meta(8, 128, dtype=torch.int32), query_len, 8192,
        )  # fmt: skip
        with recorded(paged_attention, "_paged_kernel", "_fold_kernel") as launches:
            q = meta(8 * query_len, 32, head_dim)
            paged_attention.launch(q, pool, pool, batch, CAUSAL, split, tiles)
        yield f"paged-{name}-{head_dim}", launches[0]


def fresh_launches(head_dim: int) -> Iterator[tuple[str, Launch]]:
    """Steps that rotate and store their own tokens: a verify of one sequence by leaf, of chunks'
    sums, and a decode of 64 over whole sequences."""
    pool, ints = meta(4096, 8, 64, head_dim), torch.int32
    tables = (meta(8192, head_dim // 2, dtype=torch.float32),) * 2
    width = (32 + 2 * 8) * head_dim
    for name, split, num_seqs, query_len, heads in (
        ("leaf", paged_attention.Split.LEAF, 1, 5, meta(4, 5, width, dtype=torch.float32)),
        ("sequence", paged_attention.Split.SEQUENCE, 64, 1, meta(64, width)),
    ):
        num_tokens = num_seqs * query_len
        fresh = FreshRows(
            heads, None, tables, meta(num_tokens, dtype=ints), meta(8 * num_seqs, dtype=ints), 32
        )
        batch = PagedBatch(
            meta(num_seqs + 1, dtype=ints), meta(num_seqs, dtype=ints),
            meta(num_seqs, 16, dtype=ints), query_len, 1024,
        )  # fmt: skip
        with recorded(paged_attention, "_paged_kernel", "_fold_kernel") as launches:
            tiles = configs.PAGED[ARCHITECTURE, head_dim][0]
            paged_attention.launch(fresh, pool, pool, batch, CAUSAL, split, tiles)
        yield f"fresh-{name}-{head_dim}", launches[0]


def main() -> int:
    named = [
        *(launch for _, head_dim in configs.FORWARD for launch in dense_launches(head_dim)),
        *(launch for _, head_dim in configs.PAGED for launch in paged_launches(head_dim)),
        *(launch for _, head_dim in configs.PAGED for launch in fresh_launches(head_dim)),
    ]
    reports = compile_launches(launch for _, launch in named)
    for (name, _), report in zip(named, reports, strict=True):
        sys.stdout.write(json.dumps({"name": name, **asdict(report)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
