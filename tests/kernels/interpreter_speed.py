"""The same interpreter in less than half the time: what Triton works out anew at each step is kept.

Interpreted, a kernel of a few hundred operations spends most of its time on bookkeeping: every call
of one jitted function from another patches all of `triton.language` again, every tensor spells out
names of its types, every operation builds the same table of number types. None of that depends on
what is computed. Values still come from Triton's own operations; nothing here touches a number
(`tests/kernels/test_interpreter_speed.py` compares both ways).

Reaches into Triton's internals, so it is for the versions named below, and others run unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

VERSIONS = ("3.6.0",)


@dataclass(slots=True)
class _Replaced:
    """An attribute of Triton's and what stands in for it. old None: it had none."""

    owner: Any
    name: str
    old: Any
    new: Any


_replaced: list[_Replaced] = []


def quicken() -> None:
    """Make the interpreter of this process fast, where its version is known."""
    core = tl.core
    for owner, name, new in (
        (interpreter, "_patch_lang", _Patching(interpreter._patch_lang).patch),
        (interpreter, "_patch_builtin", _patch_builtin),
        (interpreter, "_get_np_dtype", _Remembered(interpreter._get_np_dtype).of),
        (core, "_unwrap_if_constexpr", _Unwrapping(core._unwrap_if_constexpr).unwrap),
        (core.tuple_type, "__init__", _tuple_type),
        (core.tuple_type, "name", property(_tuple_name)),
        (core.tuple, "__eq__", _equal_to(core.tuple.__eq__)),
        (core.block_type, "__init__", _block_type),
        (core.block_type, "name", property(_block_name)),
        (core.tensor, "__init__", _tensor),
    ):
        if triton.__version__ in VERSIONS:
            _replaced.append(_Replaced(owner, name, vars(owner).get(name), new))
            setattr(owner, name, new)


@contextmanager
def unhurried() -> Iterator[None]:
    """Triton's own interpreter meanwhile."""
    for each in _replaced:
        if each.old is None:
            delattr(each.owner, each.name)
        else:
            setattr(each.owner, each.name, each.old)
    try:
        yield
    finally:
        for each in _replaced:
            setattr(each.owner, each.name, each.new)


class _Patching:
    """Each module of the language is patched once a launch, and restored at the launch's end.

    Triton patches them at each call within a launch and never restores that.
    """

    def __init__(self, patch: Callable[..., Any]) -> None:
        self._patch = patch
        self._modules: dict[int, frozenset[Any]] = {}
        self._patched: set[Any] = set()
        self._scopes: list[Any] = []

    def patch(self, function: Any) -> _Patching:
        wanted = self._modules.get(id(function.__globals__))
        if wanted is None:
            values = function.__globals__.values()
            wanted = frozenset(each for each in (tl, tl.core) if any(each is v for v in values))
            self._modules[id(function.__globals__)] = wanted
        if not wanted or not wanted <= self._patched:
            self._scopes.append(self._patch(function))
            self._patched |= wanted
        return self

    def restore(self) -> None:
        self._patched.clear()
        while self._scopes:
            self._scopes.pop().restore()


_builtins: dict[Any, list[str]] = {}


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    if package not in _builtins:
        members = inspect.getmembers(package)
        _builtins[package] = [name for name, member in members if tl.core.is_builtin(member)]
    for name in _builtins[package]:
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


class _Remembered:
    """A pure function of a type, by the type's name."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._known: dict[tuple[type, str], Any] = {}

    def of(self, kind: Any) -> Any:
        key = (type(kind), kind.name)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._function(kind)
        return found


def _tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    self.types = types
    self.fields = fields or [""] * len(types)


def _tuple_name(self: Any) -> str:
    return "[" + ",".join(f"{k}:{v}" for k, v in zip(self.fields, self.types, strict=True)) + "]"


class _Unwrapping:
    """What is no constant and no list is its own value, found by a look at its class."""

    def __init__(self, unwrap: Callable[[Any], Any]) -> None:
        self._unwrap = unwrap
        self._plain = frozenset((tl.core.tensor, tl.core.dtype, int, float, bool, type(None)))

    def unwrap(self, value: Any) -> Any:
        kind = type(value)
        if kind in self._plain:
            return value
        return value.value if kind is tl.core.constexpr else self._unwrap(value)


def _equal_to(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Shapes of equal lengths are one object here, which no element need be looked at for."""

    def equal(self: Any, other: Any) -> Any:
        return tl.core.constexpr(True) if self is other else compare(self, other)

    return equal


_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_shapes_of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, list | tuple | tl.core.tuple)
    key = tuple(shape)
    if not all(type(length) is int for length in key):
        key = tuple(tl.core._unwrap_shape(shape))
    known = _shapes.get(key)
    if known is None:
        if not key:
            raise TypeError("0d block_type is forbidden")
        shape = tl.core.tuple(key)
        known = _shapes[key] = (shape, tl.core.validate_block_shape(shape), str(shape))
    self.element_ty = element_ty
    self.shape, self.numel, self._shape_name = known


def _block_name(self: Any) -> str:
    return f"<{self._shape_name}, {self.element_ty}>"


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    key = tuple(type.shape.values) if type.is_block() else ()
    known = _shapes_of_tensors.get(key)
    if known is None:
        numel = 1
        for length in key:
            numel *= length
        shape = tl.core.tuple([tl.core.constexpr(length) for length in key])
        known = _shapes_of_tensors[key] = (shape, tl.core.constexpr(numel))
    self.shape, self.numel = known
