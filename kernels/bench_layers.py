"""Benchmarks of the linear, norm and rotary kernels: G320, G64, G1, N32k, R32k and kin.

G*: a Llama-8B-shaped gate/up projection with SwiGLU; anchors are the vendor library's product and
a pointwise end, eager and compiled. `-inv` cases keep the bit contract (`kernels/linear.py`), the
plain G320 is the same op without it; `-fp8` ones read weights of one byte, beside the same anchors
over bfloat16. N32k, R32k: RMSNorm with residual, and rotation with the write to the pools, over
32768 tokens. Checks: float64 on some rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_layers as reference
from kernels.bench import Case, Workload, floor_ms
from kernels.fp8_weight import Fp8Weight, quantise
from kernels.linear import linear
from kernels.norm import rmsnorm_residual
from kernels.reference_layers import Rope
from kernels.rope_kv import rope_kv

WIDTH, GATE_UP = 4096, 28672
NUM_TOKENS, NUM_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32768, 32, 8, 128, 64
EPS = 1e-5


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


_compiled_swiglu = torch.compile(_torch_swiglu, dynamic=False)


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
        "compiled": lambda: _compiled_swiglu(x, weight),
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


_compiled_norm = torch.compile(reference.rmsnorm_residual, dynamic=False)


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
        "compiled": lambda: _compiled_norm(x, residual, weight, EPS),
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


_compiled_rope = torch.compile(_torch_rope, dynamic=False)


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
        "compiled": lambda: _compiled_rope(qkv, *own, slots, keys, values),
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
    Case("N32k", _norm, floor_ms(8.0 * NUM_TOKENS * WIDTH), 0.28, graph=True),
    Case("R32k", _rope, floor_ms(ROPE_BYTES), 0.23, graph=True),
]
