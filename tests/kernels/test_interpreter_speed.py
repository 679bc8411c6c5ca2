"""The quickened interpreter computes what Triton's own does."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.philox import exponential, uniform
from kernels.softmax_state import merge
from tests.kernels.interpreter_speed import VERSIONS, unhurried

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or triton.__version__ not in VERSIONS,
    reason="another interpreter, or none",
)


@triton.jit
def _everything_kernel(words, table, floats, out, num, wide, SIZE: tl.constexpr):
    """Jitted calls, shapes of one and two axes, masks, reductions, a product, a loop, atomics."""
    places = tl.arange(0, SIZE)
    inside = places < num
    u = uniform(tl.load(words + places, inside, other=0).to(tl.uint32))
    times = tl.where(inside, exponential(u), float("inf"))
    matrix = tl.load(table + places[:, None] * SIZE + places[None, :])
    product = tl.dot(matrix, matrix, input_precision="ieee")
    total = tl.zeros((SIZE,), tl.float32)
    for step in range(num // 3):
        total += tl.sum(product, axis=1) * (step + 1)
    other = tl.max(matrix, axis=0), tl.exp(tl.min(matrix, axis=1)), tl.trans(matrix)
    top, mass, sums = merge(total, times, product, *other, 1)
    tl.store(floats + places, top + tl.cumsum(mass, axis=0) - tl.sum(sums, axis=0), inside)
    best = tl.argmin(times, axis=0) + tl.num_programs(0) * wide
    tl.atomic_add(out + tl.program_id(0), best.to(tl.int64) << 3)


def computed() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(-(2**31), 2**31, (16,), generator=generator, dtype=torch.int32)
    table = torch.randn(16, 16, generator=generator)
    floats, out = torch.zeros(16), torch.zeros(2, dtype=torch.int64)
    _everything_kernel[(2,)](words, table, floats, out, 13, 2**33 + 1, SIZE=16)
    return floats, out


def test_every_bit_is_that_of_tritons_own_interpreter() -> None:
    """One kernel of many kinds of operations gives the same floats and integers both ways."""
    own = tl.core.tensor.__init__
    floats, out = computed()
    with unhurried():
        assert tl.core.tensor.__init__ is not own
        expected_floats, expected_out = computed()
    assert tl.core.tensor.__init__ is own
    assert floats[:13].isfinite().all()
    assert len(set(floats.tolist())) == 14  # the last three places are left alone
    assert torch.equal(floats, expected_floats)
    assert torch.equal(out, expected_out)
    assert out[0] > 2**36


def test_what_triton_refuses_stays_refused() -> None:
    """A block of no axes, and one whose length is no power of two."""
    with pytest.raises(TypeError, match="0d"):
        tl.core.block_type(tl.float32, [])
    with pytest.raises(ValueError, match="power of 2"):
        tl.core.block_type(tl.float32, [tl.core.constexpr(12)])
    assert str(tl.core.block_type(tl.float32, [4, 8])) == "<['4', '8'], fp32>"
    assert tl.core.block_type(tl.float32, [4]) != tl.core.block_type(tl.float32, [8])
    value = tl.core.tensor(None, tl.core.block_type(tl.float32, [4, 8]))
    assert (value.numel.value, value.dtype) == (32, tl.float32)
    assert [length.value for length in value.shape] == [4, 8]
