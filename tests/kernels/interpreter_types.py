"""Types of the interpreter's values, each worked out once; a part of `interpreter_speed`.

Owns the shortcuts: what Triton finds by comparing names and lists is found by a look at the objects
themselves where they are the usual ones. Whatever is not usual (pointers, numbers out of range,
types of eight bits, operands of different shapes) goes to Triton's own function, which decides or
refuses. Must not compute a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Function = Callable[..., Any]

_INTEGERS = frozenset(tl.core.dtype.SINT_TYPES + tl.core.dtype.UINT_TYPES)
_FLOATS = frozenset(tl.core.dtype.FP_TYPES)
_RANGES = {
    kind.name: (kind.get_int_min_value(), kind.get_int_max_value())
    for kind in (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
}
# Types that numpy has, but for truth values.
_NUMBERS = frozenset((*_RANGES, "fp16", "fp32", "fp64"))


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, what stands in for it)."""
    core, builder = tl.core, interpreter.InterpreterBuilder
    return [
        (interpreter, "_get_np_dtype", _Remembered(interpreter._get_np_dtype).of),
        (interpreter.TensorHandle, "__init__", _handle),
        (builder, "create_splat", _splat),
        (TritonSemantic, "binary_op_type_checking_impl", _operands(
            TritonSemantic.binary_op_type_checking_impl
        )),
        (TritonSemantic, "broadcast_impl_value", _broadcast(TritonSemantic.broadcast_impl_value)),
        (TritonSemantic, "cast", _cast(TritonSemantic.cast)),
        (core, "_unwrap_if_constexpr", _Unwrapping(core._unwrap_if_constexpr).unwrap),
        (core.dtype, "__eq__", _same_or(core.dtype.__eq__, True)),
        (core.dtype, "is_int", _is_int),
        (core.dtype, "is_floating", _is_floating),
        (core.tuple_type, "__init__", _tuple_type),
        (core.tuple_type, "name", property(_tuple_name)),
        (core.tuple, "__eq__", _same_or(core.tuple.__eq__, core.constexpr(True))),
        (core.block_type, "__init__", _block_type),
        (core.block_type, "name", property(_block_name)),
        (core.block_type, "with_element_ty", _with_element(core.block_type.with_element_ty)),
        (core.block_type, "to_ir", _to_ir(core.block_type.to_ir)),
        (core.tensor, "__init__", _tensor),
    ]  # fmt: skip


class _Remembered:
    """numpy's type by the name of a plain one; a block's is that of its elements."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._known: dict[str, Any] = {}

    def of(self, kind: Any) -> Any:
        if type(kind) is tl.core.block_type:
            kind = kind.element_ty
        if type(kind) is not tl.core.dtype:
            return self._function(kind)
        found = self._known.get(kind.name)
        if found is None:
            found = self._known[kind.name] = self._function(kind)
        return found


def _handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.core.dtype or data.itemsize * 8 > max(8, dtype.primitive_bitwidth):
        self.__post_init__()


def _is_int(self: Any) -> bool:
    return self.name in _INTEGERS


def _is_floating(self: Any) -> bool:
    return self.name in _FLOATS


def _tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    self.types = types
    self.fields = fields or [""] * len(types)


def _tuple_name(self: Any) -> str:
    return "[" + ",".join(f"{k}:{v}" for k, v in zip(self.fields, self.types, strict=True)) + "]"


class _Unwrapping:
    """What is no constant and no list is its own value, found by a look at its class."""

    def __init__(self, unwrap: Function) -> None:
        self._unwrap = unwrap
        self._plain = frozenset((tl.core.tensor, tl.core.dtype, int, float, bool, type(None)))

    def unwrap(self, value: Any) -> Any:
        kind = type(value)
        if kind in self._plain:
            return value
        return value.value if kind is tl.core.constexpr else self._unwrap(value)


def _same_or(compare: Function, true: Any) -> Function:
    """Types and shapes are mostly one object here, which no element need be looked at for."""

    def equal(self: Any, other: Any) -> Any:
        return true if self is other else compare(self, other)

    return equal


# By lengths: the shape of block types and their number of elements, that shape's name, and shape
# and number of elements of tensors. Never forgotten, so that two of one id are one.
_shapes: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
_scalar = (tl.core.tuple([]), tl.core.constexpr(1))


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = tuple(shape.values if type(shape) is tl.core.tuple else shape)
    known = _shapes.get(key) if all(type(length) is int for length in key) else None
    if known is None:
        assert isinstance(shape, list | tuple | tl.core.tuple)
        key = tuple(tl.core._unwrap_shape(shape))
        known = _shapes.get(key)
    if known is None:
        if not key:
            raise TypeError("0d block_type is forbidden")
        shape = tl.core.tuple(key)
        numel = tl.core.validate_block_shape(shape)
        lengths = tl.core.tuple([tl.core.constexpr(length) for length in key])
        known = _shapes[key] = shape, numel, str(shape), (lengths, tl.core.constexpr(numel))
    self.element_ty = element_ty
    self.shape, self.numel, self._shape_name, self._of_tensors = known


def _block_name(self: Any) -> str:
    return f"<{self._shape_name}, {self.element_ty}>"


def _with_element(make: Function) -> Function:
    """Blocks of plain types, one of each shape."""
    known: dict[tuple[str, int], Any] = {}

    def with_element_ty(self: Any, element: Any) -> Any:
        if type(element) is not tl.core.dtype:
            return make(self, element)
        key = (element.name, id(self.shape))
        found = known.get(key)
        if found is None:
            found = known[key] = make(self, element)
        return found

    return with_element_ty


def _to_ir(make: Function) -> Function:
    """The interpreter has no other types: a block of plain numbers stands for itself."""

    def to_ir(self: Any, builder: Any) -> Any:
        element = self.element_ty
        if type(element) is tl.core.dtype and element.name in _NUMBERS:
            return self
        return make(self, builder)

    return to_ir


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    if type.__class__ is tl.core.block_type:
        self.dtype = type.element_ty
        self.shape, self.numel = type._of_tensors
    else:
        self.dtype = type.scalar
        self.shape, self.numel = _scalar


def _splat(self: Any, kind: Any, scalar: Any) -> Any:
    """numpy would ask Triton's shape for each of its lengths, several times."""
    of = interpreter._get_np_dtype(scalar.dtype)
    is_block = isinstance(scalar.dtype, tl.core.block_type)
    value = scalar.data[0] if is_block else scalar.data
    return interpreter.TensorHandle(
        np.full(kind.shape.values, value, dtype=of), scalar.dtype.scalar
    )  # fmt: skip


def _broadcast(broadcast: Function) -> Function:
    """Operands of one shape stay as they are."""
    block = tl.core.block_type

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if type(left) is block and type(right) is block and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value


def _takes(kind: Any, number: Any) -> bool:
    """Whether an operation on such elements takes the number as one of them."""
    if type(kind) is not tl.core.dtype or kind.name not in _NUMBERS:
        return False
    if type(number) is int:
        low, high = _RANGES.get(kind.name, _RANGES["int64"])
        return bool(low <= number <= high)
    return type(number) is float and kind.name in _FLOATS


def _operands(check: Function) -> Function:
    """Two tensors of one type, or a tensor and a number that such a tensor may hold, need no
    promotion. Division is left alone where it promotes."""
    tensor, plain = tl.core.tensor, tl.core.dtype

    def binary_op_type_checking_impl(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        left = lhs.dtype if type(lhs) is tensor else None
        right = rhs.dtype if type(rhs) is tensor else None
        own: Any = right if left is None else left
        if type(own) is plain and (not div_or_mod or own.primitive_bitwidth > 16):
            if left is right:
                return self.broadcast_impl_value(lhs, rhs)
            if arithmetic_check and right is None and _takes(left, rhs):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, left))
            if arithmetic_check and left is None and _takes(right, lhs):
                return self.broadcast_impl_value(self.scalar_constant(lhs, right), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def _cast(cast: Function) -> Function:
    """Between numbers that numpy has, the builder's own cast, whatever Triton calls it; halves
    become anything but float32 by way of that."""

    def converted(self: Any, value: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
        source = value.dtype
        if source is kind:
            return value
        if (
            fp_downcast_rounding is None
            and type(source) is type(kind) is tl.core.dtype
            and source.name in _NUMBERS
            and kind.name in _NUMBERS
            and (source.name != "fp16" or kind.name == "fp32")
        ):
            made = value.type.with_element_ty(kind)
            return self.tensor(self.builder.cast_impl(value.handle, made), made)
        return cast(self, value, kind, fp_downcast_rounding)

    return converted
