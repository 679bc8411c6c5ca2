"""Benchmarks of the linear, norm and rotary kernels: G320, G64, G1, N32k, R32k and kin.

G*: a Llama-8B-shaped gate/up projection with SwiGLU; anchors are the vendor library's product and
a pointwise end, eager and compiled. `-inv` cases keep the bit contract (`kernels/linear.py`), the
plain G320 is the same op without it; `-fp8` ones read weights of one byte, beside the same anchors
over bfloat16. N32k, R32k: RMSNorm with residual, and rotation with the write to the pools, over
32768 tokens. Checks: float64 on some rows.

qkv*, out*, up*, down*, head*: the products of an 8B layer and its head by rows, as a step launches
them (`Product`), and sums*: qkv's chunks as attention's launch takes them. `configs/sweep_layers`
decides the launches of `configs/layers.py` by these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_layers as reference
from kernels.bench import Case, Workload, floor_ms
from kernels.fp8_weight import Fp8Weight, quantise
from kernels.linear import linear, linear_chunks
from kernels.linear_norm import linear_norm
from kernels.norm import rmsnorm_residual
from kernels.reference_layers import Rope
from kernels.rope_kv import rope_kv

WIDTH, GATE_UP = 4096, 28672
NUM_TOKENS, NUM_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32768, 32, 8, 128, 64
EPS = 1e-5


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled by torch, when an anchor first asks: whoever imports this module need not wait."""
    return torch.compile(function, dynamic=False)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=_generator(seed), device="cuda", dtype=torch.bfloat16)
    return values * scale


def _close(ours: Tensor, exact: Tensor, allowed: float = 5e-3) -> None:
    ours = ours.double().cpu()
    error = float((ours - exact).norm() / exact.norm())
    assert error < allowed, f"relative error {error:.2e}"


def _torch_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    return reference.swiglu(F.linear(x, weight))


def _kept(weight: Tensor, fp8: bool) -> tuple[Tensor | Fp8Weight, Tensor]:
    """(a weight as the op takes it, what it stands for in float64)."""
    if not fp8:
        return weight, weight.double()
    made = quantise(weight)
    return made, made.dequantised(torch.float64)


def _gate_up(num_rows: int, invariant: bool, fp8: bool, seed: int) -> Workload:
    x = _random((num_rows, WIDTH), seed)
    weight = _random((GATE_UP, WIDTH), seed + 100, WIDTH**-0.5)
    own, _ = _kept(weight, fp8)
    last: list[Tensor] = []

    def run() -> None:
        last[:] = [linear(x, own, activation="swiglu", invariant=invariant)]

    def check() -> None:
        some = slice(0, num_rows, max(1, num_rows // 4))
        exact = _torch_swiglu(x[some].double(), _kept(weight, fp8)[1]).cpu()
        _close(last[0][some], exact)
        if invariant:
            alone = linear(x[:1], own, activation="swiglu")
            assert torch.equal(alone[0], last[0][0]), "bits depend on the number of rows"

    anchors = {
        "eager": lambda: _torch_swiglu(x, weight),
        "compiled": lambda: _compiled(_torch_swiglu)(x, weight),
        "product alone": lambda: F.linear(x, weight),
    }
    return Workload(run, anchors, check=check)


def _down(num_rows: int, fp8: bool, seed: int) -> Workload:
    depth = GATE_UP // 2
    x = _random((num_rows, depth), seed)
    weight = _random((WIDTH, depth), seed + 100, depth**-0.5)
    own, _ = _kept(weight, fp8)
    residual = _random((num_rows, WIDTH), seed + 200)
    last: list[Tensor] = []

    def run() -> None:
        last[:] = [linear(x, own, residual=residual)]

    def check() -> None:
        exact = reference.linear(x.double(), _kept(weight, fp8)[1], residual=residual.double())
        _close(last[0], exact.cpu())

    anchors = {"eager": lambda: F.linear(x, weight) + residual}
    return Workload(run, anchors, check=check)


# Weights [columns, depth] of an 8B model.
SHAPES = {
    "qkv": (6144, WIDTH), "sums": (6144, WIDTH), "out": (WIDTH, WIDTH), "up": (GATE_UP, WIDTH),
    "down": (WIDTH, GATE_UP // 2), "head": (128256, WIDTH),
}  # fmt: skip
PRODUCT_ROWS = (5, 40, 64, 160, 320)  # a sequence of 5, 8 of 5, 64 of 1, 32 and 64 of 5
L2_BYTES = 60e6


@dataclass(frozen=True, slots=True)
class Product:
    """A product of an 8B layer as a step runs it, with all the launches behind that end it.

    kind: "qkv" and "head" are plain, "up" is gate and up with SwiGLU, "out" and "down" go onto a
    residual with the norm behind; "sums" is qkv without the addition of its chunks.
    """

    kind: str
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.num_rows}"

    @property
    def activation(self) -> str:
        return "swiglu" if self.kind == "up" else "none"

    @property
    def has_norm(self) -> bool:
        return self.kind in ("out", "down")

    def meta(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(x, weight, residual or None) without storage."""
        width, depth = SHAPES[self.kind]
        x = torch.empty(self.num_rows, depth, dtype=torch.bfloat16, device="meta")
        residual = x.new_empty(self.num_rows, width) if self.has_norm else None
        return x, x.new_empty(width, depth), residual

    def workload(self, seed: int) -> Workload:
        """Inputs on the device. `run` returns what the launches make: see `finished`."""
        width, depth = SHAPES[self.kind]
        x = _random((self.num_rows, depth), seed)
        weight = _random((width, depth), seed + 100, depth**-0.5)
        residual = _random((self.num_rows, width if self.has_norm else 0), seed + 200)
        norm = _random((width,), seed + 300)

        def run(some: slice = slice(None)) -> tuple[Tensor, ...]:
            if self.has_norm:
                return linear_norm(x[some], weight, None, residual[some], norm, EPS)
            if self.kind == "sums":
                return (linear_chunks(x[some], weight, None)[0],)
            return (linear(x[some], weight, activation=self.activation),)

        def check() -> None:
            made, some = finished(run()), slice(0, self.num_rows, max(1, self.num_rows // 4))
            exact = F.linear(x[some].double(), weight.double())
            exact = reference.swiglu(exact) if self.kind == "up" else exact
            _close(made[0][some], (exact + residual[some] if self.has_norm else exact).cpu())
            if self.has_norm:
                normed = reference.rmsnorm(made[0][some].double(), norm.double(), EPS)
                _close(made[1][some], normed.cpu())
            for one, other in zip(finished(run(slice(1))), made, strict=True):
                assert torch.equal(one[0], other[0]), "bits depend on the number of rows"

        def eager() -> Tensor:
            y = F.linear(x, weight)
            if self.has_norm:
                return reference.rmsnorm(y + residual, norm, EPS)
            return reference.swiglu(y) if self.kind == "up" else y

        anchors = {"product alone": lambda: F.linear(x, weight), "eager": eager}
        return Workload(run, anchors, check=check)

    def case(self) -> Case:
        """As many sets of inputs as do not fit the L2 three times over."""
        width, depth = SHAPES[self.kind]
        num_bytes = 2.0 * (width * depth + self.num_rows * (depth + width))
        floor = floor_ms(num_bytes, 2.0 * self.num_rows * width * depth)
        num_sets = max(2, -int(-3 * L2_BYTES // num_bytes))
        return Case(self.name, self.workload, floor, num_sets=num_sets, graph=True, num_samples=15)


def finished(made: Sequence[Tensor]) -> list[Tensor]:
    """What a product's launches made, with chunks' sums [chunks, rows, n] added: their bits are
    those of a launch that adds them."""
    return [sum(t.unbind(0), torch.zeros_like(t[0])).bfloat16() if t.ndim == 3 else t for t in made]


def _norm(seed: int) -> Workload:
    x = _random((NUM_TOKENS, WIDTH), seed)
    residual = _random((NUM_TOKENS, WIDTH), seed + 1)
    weight = _random((WIDTH,), seed + 2)
    last: list[tuple[Tensor, Tensor]] = []

    def run() -> None:
        last[:] = [rmsnorm_residual(x, residual, weight, EPS)]

    def check() -> None:
        out, stream = reference.rmsnorm_residual(
            x[::997].double(), residual[::997].double(), weight.double(), EPS
        )
        _close(last[0][0][::997], out.cpu())
        _close(last[0][1][::997], stream.cpu())

    anchors = {
        "eager": lambda: reference.rmsnorm_residual(x, residual, weight, EPS),
        "compiled": lambda: _compiled(reference.rmsnorm_residual)(x, residual, weight, EPS),
    }
    return Workload(run, anchors, check=check)


def _torch_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    q, k, v = qkv.split([NUM_HEADS, KV_HEADS, KV_HEADS], 1)
    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
    keys[pages, :, offsets] = reference.rope(k, cos, sin)
    values[pages, :, offsets] = v
    return reference.rope(q, cos, sin)


def _rope(seed: int) -> Workload:
    qkv = _random((NUM_TOKENS, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM), seed)
    frequencies = reference.inverse_frequencies(Rope(500_000.0, HEAD_DIM))
    table = reference.rope_table(torch.arange(8192), frequencies, 1.0)
    cos, sin = (t.cuda() for t in table)
    positions = torch.arange(NUM_TOKENS, device="cuda") % 8192
    pages = torch.randperm(NUM_TOKENS // PAGE_SIZE, generator=_generator(seed), device="cuda")
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).view(-1)
    shape = (NUM_TOKENS // PAGE_SIZE, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    keys, values = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, k, v = qkv.split([NUM_HEADS, KV_HEADS, KV_HEADS], 1)
    last: list[Tensor] = []

    def run() -> None:
        last[:] = [rope_kv(q, k, v, (cos, sin), positions, slots, (keys, values))]

    def check() -> None:
        some = torch.arange(0, NUM_TOKENS, 997, device="cuda")
        where = positions[some]
        turn = (cos.double()[where], sin.double()[where])
        _close(last[0][some], reference.rope(q[some].double(), *turn).cpu())
        stored = keys[slots[some] // PAGE_SIZE, :, slots[some] % PAGE_SIZE]
        _close(stored, reference.rope(k[some].double(), *turn).cpu())
        stored = values[slots[some] // PAGE_SIZE, :, slots[some] % PAGE_SIZE]
        assert torch.equal(stored, v[some])
        assert not bool(keys.isnan().any() | values.isnan().any()), "a place was not written"

    own = (cos[positions], sin[positions])
    anchors = {
        "eager": lambda: _torch_rope(qkv, *own, slots, keys, values),
        "compiled": lambda: _compiled(_torch_rope)(qkv, *own, slots, keys, values),
    }
    return Workload(run, anchors, outputs=(keys, values), check=check)


def _gate_up_case(name: str, num_rows: int, invariant: bool, *, fp8: bool = False) -> Case:
    floor = floor_ms(
        (1.0 if fp8 else 2.0) * GATE_UP * WIDTH + 2.0 * num_rows * (WIDTH + GATE_UP // 2),
        2.0 * num_rows * GATE_UP * WIDTH,
    )
    return Case(
        name,
        lambda seed: _gate_up(num_rows, invariant, fp8, seed),
        floor,
        graph=True,
        num_samples=15,
    )


ROPE_BYTES = 2.0 * NUM_TOKENS * HEAD_DIM * 2 * (NUM_HEADS + 2 * KV_HEADS)
DOWN_WEIGHTS = WIDTH * GATE_UP // 2

PRODUCTS = [
    Product(kind, rows)
    for kind in SHAPES
    for rows in PRODUCT_ROWS
    if kind != "sums" or rows >= 40  # fewer sequences take attention's launches apart
]
CASES = [
    _gate_up_case("G1", 1, True),
    _gate_up_case("G64", 64, True),
    _gate_up_case("G320", 320, False),
    _gate_up_case("G320-inv", 320, True),
    Case("down5-inv", lambda seed: _down(5, False, seed), floor_ms(2.0 * DOWN_WEIGHTS), graph=True),
    Case(
        "down320-inv",
        lambda seed: _down(320, False, seed),
        floor_ms(2.0 * DOWN_WEIGHTS, 2.0 * 320 * DOWN_WEIGHTS),
        graph=True,
    ),
    _gate_up_case("G1-fp8", 1, True, fp8=True),
    _gate_up_case("G64-fp8", 64, True, fp8=True),
    _gate_up_case("G320-fp8", 320, True, fp8=True),
    Case("down5-fp8", lambda seed: _down(5, True, seed), floor_ms(DOWN_WEIGHTS), graph=True),
    Case("down64-fp8", lambda seed: _down(64, True, seed), floor_ms(DOWN_WEIGHTS), graph=True),
    *(product.case() for product in PRODUCTS),
    Case("N32k", _norm, floor_ms(8.0 * NUM_TOKENS * WIDTH), 0.28, graph=True),
    Case("R32k", _rope, floor_ms(ROPE_BYTES), 0.23, graph=True),
]
