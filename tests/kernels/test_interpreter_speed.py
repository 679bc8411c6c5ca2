"""The quickened interpreter computes what Triton's own does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

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


KINDS = (
    tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64,
    tl.float8e4nv, tl.float8e5, tl.float16, tl.bfloat16, tl.float32, tl.float64,
)  # fmt: skip
NUMBERS = (0, 1, 3, -2, 200, 2**31, -(2**40), 2**63, 2**64, True, 0.5, -0.0, 1e300, float("nan"))
SHAPES = ((), (4,), (1, 4), (2, 4), (2,), (2, 1))
Operand = Callable[[], Any]


def of(kind: Any, shape: tuple[int, ...] = (4,)) -> Operand:
    """Makes a tensor of small, negative and large values; () for one that is no block."""

    def make() -> Any:
        words = np.array([3, -2, 0x7FFFFFFF7FFF7F7C, 200], dtype=np.int64)
        values = np.resize(words, shape or (1,)).astype(interpreter._get_np_dtype(kind))
        handle = interpreter.TensorHandle(values, kind)
        return tl.core.tensor(handle, tl.core.block_type(kind, list(shape)) if shape else kind)

    return make


def _itself(number: float) -> float:
    return number


def pairs() -> Iterator[tuple[Operand, Operand]]:
    """Every two types, as blocks and single values, with numbers, pointers and other shapes."""
    kinds = (*KINDS, tl.pointer_type(tl.float32), tl.pointer_type(tl.int32))
    for left in kinds:
        for right in kinds:
            yield of(left), of(right)
            yield of(left), of(right, ())
            yield of(left, ()), of(right)
        for number in NUMBERS:
            for shape in SHAPES[:2]:
                yield of(left, shape), partial(_itself, number)
                yield partial(_itself, number), of(left, shape)
    for left in (tl.int32, tl.float32):
        for right in (tl.int32, tl.float32):
            for one in SHAPES:
                for other in SHAPES:
                    yield of(left, one), of(right, other)


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Type, shape and bits of what a call makes, or what it raises."""
    try:
        with np.errstate(all="ignore"):
            made = call()
    except Exception as error:  # noqa: BLE001 - whatever Triton refuses
        return type(error), str(error)
    data = made.handle.data
    assert made.dtype == made.type.scalar
    lengths = tuple(length.value for length in made.shape)
    return str(made.type), lengths, made.numel.value, data.dtype, data.shape, data.tobytes()


def outcomes(calls: Sequence[Callable[[], Any]]) -> list[tuple[Any, ...]]:
    """With the language as it is while a kernel runs."""
    patched = interpreter._patch_lang(_everything_kernel.fn)
    try:
        return [outcome(call) for call in calls]
    finally:
        patched.restore()


def assert_same_both_ways(calls: Sequence[Callable[[], Any]]) -> list[tuple[Any, ...]]:
    found = outcomes(calls)
    with unhurried():
        expected = outcomes(calls)
    for one, other in zip(found, expected, strict=True):
        assert one == other
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["add", "sub", "mul", "truediv", "floordiv", "mod", "fdiv", "minimum", "and_", "shl", "lshr",
     "ashr", "less_than", "equal", "where"],
)  # fmt: skip
def test_operations_take_and_refuse_what_tritons_own_do(name: str) -> None:
    """Types, shapes and bits of results, and the words of every refusal."""
    semantic = TritonSemantic(interpreter.interpreter_builder)
    more: tuple[Any, ...] = {
        "add": (True,), "sub": (True,), "mul": (True,), "fdiv": (False,),
        "minimum": (tl.PropagateNan.NONE,),
    }.get(name, ())  # fmt: skip

    def call(left: Operand, right: Operand) -> Any:
        if name == "where":
            return semantic.where(of(tl.int1)(), left(), right())
        return getattr(semantic, name)(left(), right(), *more)

    found = assert_same_both_ways([partial(call, *pair) for pair in pairs()])
    refused = sum(isinstance(own[0], type) for own in found)
    assert 0 < refused < len(found)


@pytest.mark.filterwarnings("ignore")
def test_casts_are_tritons_own() -> None:
    """Every type into every other, rounded to the nearest and towards zero."""
    semantic = TritonSemantic(interpreter.interpreter_builder)

    def cast(source: Operand, kind: Any, rounding: str | None) -> Any:
        return semantic.cast(source(), kind, rounding)

    assert_same_both_ways([
        partial(cast, of(source, shape), kind, rounding)
        for source in KINDS for kind in KINDS for shape in SHAPES for rounding in (None, "rtz")
    ])  # fmt: skip


def test_handles_and_options_are_tritons_own() -> None:
    """Values wider than their type are refused, no two handles share attributes, and nothing is
    left out but checks that only debugging reads."""
    with pytest.raises(ValueError, match="exceeds"):
        interpreter.TensorHandle(np.zeros(1, dtype=np.int64), tl.int32)
    first, second = (interpreter.TensorHandle(np.zeros(1), tl.float64) for _ in range(2))
    first.set_attr("tt.divisibility", 16)
    assert second.attr == {}
    options = interpreter.interpreter_builder.options
    assert (options.debug, options.sanitize_overflow) == (False, False)
    with unhurried():
        own = interpreter.interpreter_builder.options
        assert (own.debug, own.sanitize_overflow) == (False, True)
