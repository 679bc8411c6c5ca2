"""Benchmark cases of the attention kernels: prefill, its backward, offset prefill, verify, decode.

Owns the named shapes of attention, their floors, checks and anchors. Anchors get what suits them:
K/V already gathered into contiguous tensors (the gather is not charged), bottom-right masks where
queries are fewer than keys. Must not know how time is taken (`bench`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels import reference_attention as reference
from kernels.attention import AttentionOptions, attention
from kernels.bench import Case, Workload, floor_ms
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.reference_attention import PagedBatch

DTYPE = torch.bfloat16
CAUSAL = AttentionOptions(causal=True)
PAGE = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention call; queries are the last ones of the keys (bottom-right)."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int = 128

    @property
    def flop(self) -> float:
        """Two products over the visible pairs of query and key."""
        pairs = self.queries * self.keys - self.queries * (self.queries - 1) / 2
        return 4.0 * self.batch * self.heads * pairs * self.dim

    @property
    def bytes(self) -> float:
        """Each of q, k, v and out once, at 2 bytes."""
        q = self.batch * self.heads * self.queries * self.dim
        return 2.0 * (2 * q + 2 * self.batch * self.kv_heads * self.keys * self.dim)

    def tensors(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v of this shape, on the GPU."""
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(heads: int, tokens: int) -> Tensor:
            shape = (self.batch, heads, tokens, self.dim)
            return torch.randn(shape, dtype=DTYPE, device="cuda", generator=generator)

        return (
            randn(self.heads, self.queries),
            randn(self.kv_heads, self.keys),
            randn(self.kv_heads, self.keys),
        )


PREFILL = Shape(4, 32, 32, 8192, 8192)
PREFILL_64 = Shape(4, 32, 32, 8192, 8192, dim=64)
OFFSET = Shape(8, 32, 8, 512, 8192)
VERIFY = Shape(64, 32, 8, 5, 8192)
VERIFY_ALONE = Shape(1, 32, 8, 5, 32768)
DECODE = Shape(64, 32, 8, 1, 8192)


def poison_free_memory(like: Tensor) -> None:
    """Leave NaN in the block that the allocator hands out next for a tensor like this one."""
    torch.empty_like(like).fill_(math.nan)


def assert_accurate(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """||ours - exact|| <= 2 ||plain - exact||: twice plain PyTorch's error at this dtype."""
    error = float((ours.double() - exact).norm())
    allowed = 2.0 * float((plain.double() - exact).norm())
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


# ---------------------------------------------------------------- anchors


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def dense_anchors(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """SDPA with flash and cuDNN, FlexAttention and eager PyTorch on contiguous tensors."""
    gqa = shape.heads != shape.kv_heads
    offset = shape.keys - shape.queries
    square = offset == 0
    mask = None if square else reference.visible_keys(shape.queries, shape.keys, CAUSAL).cuda()
    sdpa = functional.scaled_dot_product_attention

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            if square:
                return sdpa(q, k, v, is_causal=True, enable_gqa=gqa)
            bias = causal_lower_right(shape.queries, shape.keys)
            return sdpa(q, k, v, attn_mask=bias, enable_gqa=gqa)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(q, k, v, attn_mask=mask, is_causal=square, enable_gqa=gqa)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + offset

    @functools.cache
    def block_mask() -> Any:
        return create_block_mask(visible, None, None, shape.queries, shape.keys, "cuda")

    def flex() -> Tensor:
        result: Tensor = _compiled_flex()(q, k, v, block_mask=block_mask(), enable_gqa=gqa)
        return result

    def eager() -> Tensor:
        group = shape.heads // shape.kv_heads
        scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * shape.dim**-0.5
        seen = (
            mask if mask is not None else reference.visible_keys(shape.queries, shape.keys, CAUSAL)
        )
        scores.masked_fill_(~seen.to(scores.device), -math.inf)
        return torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)

    return {"flash": flash, "cudnn": cudnn, "flex": flex, "eager": eager}


# ---------------------------------------------------------------- dense cases


def _check_rows(shape: Shape, tensors: tuple[Tensor, ...], out: Tensor) -> None:
    """Compare 64 query rows of three heads with float64; every element must be finite."""
    assert bool(torch.isfinite(out).all())
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(shape.queries, (62,), generator=generator).tolist()
    rows = torch.tensor([0, shape.queries - 1, *chosen], device="cuda")
    q, k, v = tensors
    for head in (0, shape.heads // 2, shape.heads - 1):
        kv_head = head // (shape.heads // shape.kv_heads)
        own = [q[-1, head, rows], k[-1, kv_head], v[-1, kv_head]]
        visible = torch.arange(shape.keys, device="cuda") <= (
            rows[:, None] + shape.keys - shape.queries
        )

        def attend(dtype: torch.dtype, own=own, visible=visible) -> Tensor:
            row_q, row_k, row_v = (t.to(dtype) for t in own)
            scores = row_q @ row_k.T * shape.dim**-0.5
            return torch.softmax(torch.where(visible, scores, -math.inf), -1) @ row_v

        assert_accurate(out[-1, head, rows], attend(DTYPE), attend(torch.float64))


def dense_case(name: str, shape: Shape, target_ms: float | None) -> Case:
    """Forward attention over dense tensors beside its anchors."""

    def make(seed: int) -> Workload:
        q, k, v = shape.tensors(seed)
        result: list[Tensor] = []

        def run() -> None:
            result[:] = attention(q, k, v, CAUSAL)[:1]

        def check() -> None:
            result.clear()
            poison_free_memory(q)
            run()
            _check_rows(shape, (q, k, v), result[0])

        return Workload(run, dense_anchors(shape, q, k, v), check=check)

    return Case(name, make, floor_ms(shape.bytes, shape.flop), target_ms)


def _make_backward(seed: int) -> Workload:
    q, k, v = leaves = tuple(t.requires_grad_() for t in PREFILL.tensors(seed))
    grad_out = torch.randn_like(q)
    out, _ = attention(q, k, v, CAUSAL)

    def backward_of(result: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(result, leaves, grad_out, retain_graph=True)

    run = backward_of(out)

    def anchor(forward: Callable[[], Tensor]) -> Callable[[], object]:
        graph: list[Callable[[], object]] = []

        def call() -> object:
            if not graph:
                graph.append(backward_of(forward()))
            return graph[0]()

        return call

    def check() -> None:
        poison_free_memory(q)
        first, second = (torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
                         for _ in range(2))  # fmt: skip
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b), "two backward passes differ"
            assert bool(torch.isfinite(a).all())
        own = [t.detach()[-1:, -1:] for t in leaves]

        def gradients(dtype: torch.dtype) -> list[Tensor]:
            own_q, own_k, own_v = (t.to(dtype) for t in own)
            grads = reference.attention_backward(
                grad_out[-1:, -1:].to(dtype), own_q, own_k, own_v, CAUSAL
            )
            return [grads.q, grads.k, grads.v]

        for ours, plain, exact in zip(
            first, gradients(DTYPE), gradients(torch.float64), strict=True
        ):
            assert_accurate(ours[-1:, -1:], plain, exact)

    forwards = dense_anchors(PREFILL, q, k, v)
    del forwards["eager"]  # its graph holds three matrices of 17 GB
    return Workload(run, {name: anchor(f) for name, f in forwards.items()}, check=check)


# ---------------------------------------------------------------- paged cases


def paged_tensors(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Packed queries, pools of randomly permuted pages, and the batch that describes them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages_each = (shape.keys + PAGE - 1) // PAGE
    num_pages = shape.batch * pages_each

    def randn(*size: int) -> Tensor:
        return torch.randn(size, dtype=DTYPE, device="cuda", generator=generator)

    q = randn(shape.batch * shape.queries, shape.heads, shape.dim)
    pools = [randn(num_pages, shape.kv_heads, PAGE, shape.dim) for _ in range(2)]
    order = torch.randperm(num_pages, device="cuda", generator=generator)
    batch = PagedBatch(
        torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.queries,
        torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda"),
        order.to(torch.int32).view(shape.batch, pages_each),
        shape.queries,
        shape.keys,
    )
    return q, pools[0], pools[1], batch


def _check_paged(shape: Shape, q: Tensor, pools: list[Tensor], batch: PagedBatch,
                 out: Tensor) -> None:  # fmt: skip
    """Three sequences against float64, and the last query of each against a single decode."""
    assert bool(torch.isfinite(out).all())
    for index in {0, shape.batch // 2, shape.batch - 1}:
        rows = slice(index * shape.queries, (index + 1) * shape.queries)
        alone = PagedBatch(
            batch.cu_seqlens_q[:2],
            batch.context_lens[:1],
            batch.block_tables[index : index + 1],
            shape.queries,
            shape.keys,
        )

        def attend(dtype: torch.dtype, rows=rows, alone=alone) -> Tensor:
            own_k, own_v = (pool[alone.block_tables[0].long()].to(dtype) for pool in pools)
            table = torch.arange(len(own_k), dtype=torch.int32, device="cuda")[None]
            moved = PagedBatch(
                alone.cu_seqlens_q, alone.context_lens, table, shape.queries, shape.keys
            )
            return reference.paged_attention(q[rows].to(dtype), own_k, own_v, moved)[0]

        assert_accurate(out[rows], attend(DTYPE), attend(torch.float64))
    last = q.view(shape.batch, shape.queries, shape.heads, shape.dim)[:, -1].contiguous()
    ranges = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
    decode = PagedBatch(ranges, batch.context_lens, batch.block_tables, 1, shape.keys)
    decoded, _ = paged_attention(last, pools[0], pools[1], decode)
    verified = out.view(shape.batch, shape.queries, shape.heads, shape.dim)[:, -1]
    differing = int((decoded != verified).sum())
    assert not differing, f"{differing} elements differ between verify and decode"


def paged_case(name: str, shape: Shape, target_ms: float | None, num_sets: int = 2) -> Case:
    """Attention over paged K/V beside its anchors, which get the same K/V dense."""
    call = paged_attention if shape.queries <= 8 else paged_prefill

    def make(seed: int) -> Workload:
        q, k_pool, v_pool, batch = paged_tensors(shape, seed)
        result: list[Tensor] = []

        def run() -> None:
            result[:] = call(q, k_pool, v_pool, batch)[:1]

        def check() -> None:
            result.clear()
            poison_free_memory(q)
            run()
            _check_paged(shape, q, [k_pool, v_pool], batch, result[0])

        @functools.cache
        def anchors() -> dict[str, Callable[[], Tensor]]:
            tables = batch.block_tables.long()
            gathered = [pool[tables].transpose(1, 2).flatten(2, 3) for pool in (k_pool, v_pool)]
            dense_q = q.view(shape.batch, shape.queries, shape.heads, shape.dim)
            return dense_anchors(shape, dense_q.transpose(1, 2).contiguous(), *gathered)

        names = ("flash", "cudnn", "flex", "eager")
        calls = {name: functools.partial(lambda name: anchors()[name](), name) for name in names}
        return Workload(run, calls, check=check)

    floor = floor_ms(shape.bytes, shape.flop)
    return Case(name, make, floor, target_ms, num_sets=num_sets, graph=True)


CASES = [
    dense_case("P8k", PREFILL, 4.9),
    Case("P8k-bwd", _make_backward, floor_ms(flop=2.5 * PREFILL.flop), 18.7),
    dense_case("P8k-d64", PREFILL_64, None),
    dense_case("P-off", OFFSET, 1.1),
    paged_case("P-off-paged", OFFSET, None),
    paged_case("V64", VERIFY, 0.60),
    paged_case("V1", VERIFY_ALONE, 0.045, num_sets=3),
    paged_case("D64", DECODE, 0.58),
]
