"""The same interpreter in a fraction of the time: what Triton works out anew at each step is kept.

Interpreted, a kernel of a few hundred operations spends most of its time on bookkeeping: every call
of one jitted function from another patches all of `triton.language` again, every sum is taken a
second time to see whether it overflows and the answer is thrown away, and what types come of an
operation is asked anew each time (`interpreter_types`). None of that depends on what is computed.
Values still come from Triton's own operations; nothing here touches a number
(`tests/kernels/test_interpreter_speed.py` compares both ways).

Reaches into Triton's internals, so it is for the versions named below, and others run unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.kernels.interpreter_types import replacements

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
    builder = interpreter.interpreter_builder
    for owner, name, new in (
        (interpreter, "_patch_lang", _Patching(interpreter._patch_lang).patch),
        (interpreter, "_patch_builtin", _patch_builtin),
        (interpreter, "_patch_attr", _patch_attr),
        (builder, "options", _without_unread_checks(builder.options)),
        *replacements(),
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


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """One call in place of three: a builtin's own function with what Triton passes it."""
    semantic = TritonSemantic(builder)
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _without_unread_checks(options: Any) -> Any:
    """Integer sums and products are taken again in 64 bits, for an assertion that only `debug`
    looks at."""
    return options if options.debug else replace(options, sanitize_overflow=False)
