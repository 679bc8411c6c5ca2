"""Small shapes for NVIDIA's sanitizer, where it would take too long over the tests:

`compute-sanitizer --tool memcheck (or racecheck) python -m tests.kernels.sanitized NAME`, NAME one
of specialised, persistent and chain. Integers, whose sums are exact, so that results are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.configs.layers import Persistent, Specialised
from kernels.linear import linear
from kernels.linear_persistent import launch_persistent
from kernels.linear_specialised import launch_specialised
from kernels.norm import rmsnorm

NUM_CHUNKS = 4
SPECIALISED = (  # a launch, rows, and how it ends
    (Specialised(1, 3, 32, 8), 40, "residual"),
    (Specialised(2, 2, 64, 0, 128), 64, "residual"),
    (Specialised(1, 3, 64, 16), 160, "residual"),
    (Specialised(2, 3), 161, "residual"),
    (Specialised(1, 3, 64, 0, split=True), 50, "chunks"),
    (Specialised(1, 3, 64, 0), 64, "swiglu"),
)
PERSISTENT = ((160, 1024, True), (320, 832, False))  # rows, weights, SwiGLU


class Numbers:
    """Small random integers on the device."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cuda").manual_seed(1)

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.randint(-2, 3, shape, generator=self._generator, device="cuda")
        return drawn.to(torch.bfloat16)


def _swiglu(sums: Tensor) -> Tensor:
    gate, up = sums.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def _nothing(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


def specialised(numbers: Numbers) -> None:
    """`linear_specialised`: several turns of the pipeline, ragged rows, every end."""
    for own, rows, end in SPECIALISED:
        chunk, num_weights = own.step_k * (own.num_stages + 1), 128
        x, weight = numbers(rows, NUM_CHUNKS * chunk), numbers(num_weights, NUM_CHUNKS * chunk)
        width = num_weights // 2 if end == "swiglu" else num_weights
        residual = numbers(rows, width) if end == "residual" else None
        out = _nothing(rows, width)
        shape = (NUM_CHUNKS, rows, num_weights)
        partials = _nothing(*shape, dtype=torch.float32) if end == "chunks" else None
        for early in (True, False):
            launch_specialised(
                x, weight, residual, out, partials, end == "swiglu", chunk, own, early
            )
        torch.cuda.synchronize()
        expected = x.float() @ weight.float().T
        if partials is not None:
            assert torch.equal(partials.sum(0), expected), own
        elif residual is not None:
            assert torch.equal(out, (expected + residual.float()).bfloat16()), own
        else:
            torch.testing.assert_close(out.float(), _swiglu(expected), rtol=1e-2, atol=1e-2)


def persistent(numbers: Numbers) -> None:
    """`linear_persistent`: three programs take several tiles each."""
    for rows, num_weights, swiglu in PERSISTENT:
        x, weight = numbers(rows, 512), numbers(num_weights, 512)
        out = _nothing(rows, num_weights // 2 if swiglu else num_weights)
        launch_persistent(x, weight, out, swiglu, Persistent(3), True)
        torch.cuda.synchronize()
        sums = x.float() @ weight.float().T
        expected = _swiglu(sums) if swiglu else sums
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


def chain(numbers: Numbers) -> None:
    """`early_launch`: kernels that start before the one whose rows they read has ended."""
    down, up = numbers(64, 256), numbers(256, 64)
    x, ones = numbers(3, 256), torch.ones(256, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        x = linear(linear(rmsnorm(x, ones, 1e-5), down), up, residual=x)
    torch.cuda.synchronize()
    assert bool(x.isfinite().all())


NAMES: dict[str, Callable[[Numbers], None]] = {
    "specialised": specialised, "persistent": persistent, "chain": chain,
}  # fmt: skip

if __name__ == "__main__":
    NAMES[sys.argv[1]](Numbers())
