"""Kernels that start early wait for what they read: a chain has the bits of launches in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import linear as linear_module
from kernels import linear_norm as linear_norm_module
from kernels import norm, paged_attention, rope_kv
from kernels.attention_inputs import FreshRows
from kernels.linear import linear, linear_chunks
from kernels.linear_norm import linear_norm
from kernels.reference_attention import AttentionOptions, PagedBatch
from kernels.rotary_attention import rotary_attention

NUM_LAYERS, NUM_SEQS, HEADS, KV_HEADS, HEAD_DIM, PAGE, CONTEXT = 8, 3, 8, 2, 64, 64, 150
WIDTH, INNER, EPS = HEADS * HEAD_DIM, 1536, 1e-5
REPLAYS = 20


class Layers:
    """Random layers, their pools and one step of NUM_SEQS tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to("cuda", torch.bfloat16)

        rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.weights = [
            (
                random(rows, WIDTH, scale=WIDTH**-0.5),
                random(WIDTH, WIDTH, scale=WIDTH**-0.5),
                random(2 * INNER, WIDTH, scale=WIDTH**-0.5),
                random(WIDTH, INNER, scale=INNER**-0.5),
                random(WIDTH),
            )
            for _ in range(NUM_LAYERS)
        ]
        pages = -(-CONTEXT // PAGE)
        self.pools = [random(2, NUM_SEQS * pages, KV_HEADS, PAGE, HEAD_DIM) for _ in self.weights]
        cos, sin = (torch.rand(CONTEXT, HEAD_DIM // 2, device="cuda") for _ in range(2))
        self.tables = cos, sin
        self.arrivals = torch.zeros(NUM_SEQS * KV_HEADS, dtype=torch.int32, device="cuda")
        table = torch.arange(NUM_SEQS * pages, dtype=torch.int32).view(NUM_SEQS, pages)
        self.positions = torch.full((NUM_SEQS,), CONTEXT - 1, device="cuda")
        self.slots = (table[:, -1] * PAGE + (CONTEXT - 1) % PAGE).cuda()
        self.batch = PagedBatch(
            torch.arange(NUM_SEQS + 1, dtype=torch.int32).cuda(),
            torch.full((NUM_SEQS,), CONTEXT, dtype=torch.int32).cuda(),
            table.cuda(), 1, 1024,
        )  # fmt: skip

    def attend(self, normed: Tensor, qkv: Tensor, pool: Tensor) -> Tensor:
        heads = linear(normed, qkv).view(NUM_SEQS, -1, HEAD_DIM)
        queries = rope_kv.rope_kv(
            heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :],
            self.tables, self.positions, self.slots, (pool[0], pool[1]),
        )  # fmt: skip
        return paged_attention.paged_attention(queries, pool[0], pool[1], self.batch)[0]

    def attend_fresh(self, normed: Tensor, qkv: Tensor, pool: Tensor) -> Tensor:
        heads, bias = linear_chunks(normed, qkv, None)
        fresh = FreshRows(heads, bias, self.tables, self.slots, self.arrivals, HEADS)
        return rotary_attention(fresh, (pool[0], pool[1]), self.batch, AttentionOptions())

    def run(self, x: Tensor) -> Tensor:
        """The stream after all layers."""
        stream, normed = x, norm.rmsnorm(x, self.weights[0][4], EPS)
        for index, (weights, pool) in enumerate(zip(self.weights, self.pools, strict=True)):
            qkv, out, gate_up, down, scale = weights
            attend = self.attend_fresh if index % 2 else self.attend
            attended = attend(normed, qkv, pool)
            stream, normed = linear_norm(
                attended.view(NUM_SEQS, WIDTH), out, None, stream, scale, EPS
            )
            inner = linear(normed, gate_up, activation="swiglu")
            stream, normed = linear_norm(inner, down, None, stream, scale, EPS)
        return stream


def test_a_captured_chain_has_the_bits_of_launches_in_turn(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over fresh inputs, replays of a graph whose kernels start early equal launches that do not;
    stale or half-written rows of the replay before would differ."""
    if device == "cpu":
        pytest.skip("nothing starts early in the interpreter")
    layers = Layers()
    x = torch.empty(NUM_SEQS, WIDTH, device="cuda", dtype=torch.bfloat16)
    x.normal_()
    layers.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layers.run(x)
    inputs, results = [], []
    for _ in range(REPLAYS):
        x.normal_()
        inputs.append(x.clone())
        graph.replay()
        results.append(result.clone())
    for module in (linear_module, linear_norm_module, norm, rope_kv, paged_attention):
        monkeypatch.setattr(module, "launches_early", lambda _device: False)
    for one, expected in zip(inputs, results, strict=True):
        assert torch.equal(layers.run(one), expected)
