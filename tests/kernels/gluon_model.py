"""A model of the part of Gluon that `linear_specialised` and `linear_persistent` are written in, on
torch tensors.

The kernel's own functions run, as Python, in a thread a partition; one runs at a time, until it
waits at a barrier. Copies into shared memory are done where they are asked for, those out of it and
products no sooner than they are waited for, and a barrier counts arrivals and bytes as the device's
do: a tile that is given away too soon, or asked for too late, gives a wrong sum or a deadlock,
which raises. What the compiler makes of the text is not modelled.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

from tests.kernels.sm90_audit import Launch


class Values(Tensor):
    """Values in registers: they name their layout, and no two names hold the same ones."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]  # Gluon's attribute

    def __iadd__(self, other: Tensor) -> Tensor:  # type: ignore[override,misc]  # a new tensor
        return self + other

    def split(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # Gluon's, of a last side of 2
        return self.unbind(-1)


@dataclass
class Tile:
    """Shared memory. index and permute are views."""

    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def index(self, at: Any) -> Tile:
        assert 0 <= int(at) < len(self.data)
        return Tile(self.data[int(at)])

    def permute(self, order: tuple[int, ...]) -> Tile:
        return Tile(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: None) -> Tile:
        assert dtype is self.dtype
        return Tile(self.data.view(shape))

    def store(self, own: Tensor) -> None:
        assert self.data.shape == own.shape
        self.data.copy_(own)


@dataclass(frozen=True)
class Pointer:
    """An address into a tensor's storage."""

    base: Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)

    @property
    def flat(self) -> Tensor:
        return self.base.as_strided((self.base.untyped_storage().nbytes() // 2,), (1,), 0)


@dataclass
class Described:
    """A tensor that bulk copies read and write by blocks; outside it are zeros."""

    tensor: Tensor
    block_shape: list[int]
    layout: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def inside(self, at: Sequence[Any]) -> Tensor:
        """The block at a place, as much of it as there is."""
        return self.tensor[tuple(
            slice(min(int(first), size), min(int(first) + width, size))
            for first, width, size in zip(at, self.block_shape, self.tensor.shape, strict=True)
        )]  # fmt: skip


@dataclass(eq=False)
class Barrier:
    """Phases that end when `count` have arrived and no bytes are awaited."""

    count: int = 0
    arrived: int = 0
    num_bytes: int = 0
    phases: int = 0

    def check(self) -> None:
        assert self.arrived <= self.count
        assert self.num_bytes >= 0
        if self.arrived == self.count and self.num_bytes == 0:
            self.phases, self.arrived = self.phases + 1, 0


@dataclass
class Barriers:
    """An array of them."""

    own: list[Barrier]

    def index(self, at: Any) -> Barrier:
        assert 0 <= int(at) < len(self.own)
        return self.own[int(at)]


@dataclass(eq=False)
class Product:
    """sums + weights x rows, once it is waited for."""

    weights: Tile
    rows: Tile
    sums: Any
    adds: bool
    value: Values | None = None

    def do(self) -> None:
        if self.value is None:
            own = self.weights.data.float() @ self.rows.data.float()
            before = self.sums.value if isinstance(self.sums, Product) else self.sums
            self.value = (before + own if self.adds else own).as_subclass(Values)


@dataclass
class Model:
    """One program's partitions and what they wait for. first: which partition runs first."""

    program: int
    programs: int
    first: int
    turn: threading.Condition = field(default_factory=threading.Condition)
    alive: int = 0
    waits: list[tuple[Barrier, int]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    local: threading.local = field(default_factory=threading.local)

    def wait(self, barrier: Barrier, parity: Any) -> None:
        own = (barrier, int(parity))
        self.waits.append(own)
        while barrier.phases % 2 == own[1] and not self.errors:
            if len(self.waits) == self.alive and all(b.phases % 2 == p for b, p in self.waits):
                self.errors.append(AssertionError("every partition waits"))
                self.turn.notify_all()
                break
            self.turn.wait()
        self.waits.remove(own)
        if self.errors:
            raise RuntimeError("a partition failed")

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrived += count
            barrier.check()
            self.turn.notify_all()

    def expect(self, barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
        if pred:
            barrier.num_bytes += int(num_bytes)
            self.arrive(barrier)

    def load(
        self, source: Described, at: Sequence[Any], barrier: Barrier, place: Tile, pred: Any = True
    ) -> None:
        if not pred:
            return
        block = source.inside(at)
        assert list(place.data.shape) == source.block_shape
        place.data.zero_()
        place.data[tuple(slice(size) for size in block.shape)] = block
        barrier.num_bytes -= place.data.numel() * place.data.element_size()
        barrier.check()
        self.turn.notify_all()

    def store(self, target: Described, at: Sequence[Any], place: Tile) -> None:
        assert list(place.data.shape) == target.block_shape
        self.local.stores = [*getattr(self.local, "stores", []), (target.inside(at), place.data)]

    def wait_stores(self, pending: int) -> None:
        stores = getattr(self.local, "stores", [])
        done = max(0, len(stores) - pending)
        for block, data in stores[:done]:
            assert bool(block.isnan().all()), "a place is written twice"
            block.copy_(data[tuple(slice(size) for size in block.shape)])
        self.local.stores = stores[done:]

    def multiply(
        self, weights: Tile, rows: Tile, sums: Any, *, use_acc: Any, is_async: bool
    ) -> Product:
        assert is_async
        self.local.queue = [*getattr(self.local, "queue", []), product := Product(
            weights, rows, sums, bool(use_acc)
        )]  # fmt: skip
        return product

    def wait_products(self, pending: int, deps: list[Product]) -> Any:
        queue = self.local.queue
        done = queue[: len(queue) - pending]
        for product in done:
            product.do()
        self.local.queue = queue[len(done) :]
        own = deps if pending else [product.value for product in deps]
        return own if len(own) > 1 else own[0]

    def specialise(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            with self.turn:
                try:
                    function(*arguments)
                    assert not getattr(self.local, "stores", []), "a store is not waited for"
                except BaseException as error:  # noqa: BLE001 - it is raised below
                    self.errors.append(error)
                self.alive -= 1
                self.turn.notify_all()

        order = partitions[self.first :] + partitions[: self.first]
        self.alive = len(order)
        threads = [threading.Thread(target=run, args=partition) for partition in order]
        with self.turn:
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def _allocate(dtype: Any, shape: list[int], _layout: None) -> Tile | Barriers:
    if dtype is torch.int64:
        return Barriers([Barrier() for _ in range(shape[0])])
    return Tile(torch.full(shape, torch.nan, dtype=dtype))


def _load(at: Pointer, live: Tensor, other: float) -> Values:
    flat = at.flat
    found = flat[at.offset.clamp(max=len(flat) - 1)]
    return torch.where(live, found, other).as_subclass(Values)


def _store(at: Pointer, own: Tensor, live: Tensor) -> None:
    live = live.expand(own.shape)
    at.base.view(-1)[at.offset[live]] = own[live]


def _initialise(barrier: Barrier, count: int) -> None:
    barrier.count = count


def _affirm(condition: bool) -> None:
    assert condition


def names_in(module: types.ModuleType, model: Model) -> dict[str, Any]:
    """The module's names with Gluon's by the model's, and its device functions as plain ones."""
    language = types.SimpleNamespace(
        static_range=range, constexpr=lambda value: value, float32=torch.float32,
        int64=torch.int64, to_tensor=lambda value: value, program_id=lambda _axis: torch.tensor(
            model.program
        ),
        num_programs=lambda _axis: model.programs, maximum=max,
        where=lambda condition, one, other: one if condition else other, exp=torch.exp,
        static_assert=_affirm, load=_load, store=_store, thread_barrier=lambda: None,
        arange=lambda first, end, _layout: torch.arange(first, end),
        full=lambda shape, value, dtype, _layout: torch.full(
            shape, value, dtype=dtype
        ).as_subclass(Values),
        allocate_shared_memory=_allocate,
        NVMMADistributedLayout=lambda *_: None, SliceLayout=lambda *_: None,
        warp_specialize=lambda partitions, _warps, _registers: model.specialise(partitions),
    )  # fmt: skip
    made = dict(vars(module))
    made |= {name: own.value for name, own in made.items() if isinstance(own, constexpr)}
    made |= {
        "gl": language,
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=_initialise, wait=model.wait, arrive=model.arrive,
            expect=model.expect,
        ),
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=model.load, async_copy_shared_to_global=model.store,
            store_wait=model.wait_stores,
        ),
        "warpgroup_mma": model.multiply, "warpgroup_mma_wait": model.wait_products,
        "fence_async_shared": lambda: None, "gdc_wait": lambda: None,
        "gdc_launch_dependents": lambda: None,
    }  # fmt: skip
    for name, function in vars(module).items():
        if isinstance(function, JITFunction):
            made[name] = types.FunctionType(
                function.fn.__code__, made, name, function.fn.__defaults__
            )
    return made


def run_launch(module: types.ModuleType, launch: Launch, programs: int, first: int) -> None:
    """Run the programs of a recorded launch one after the other, in an order of their own."""
    names = [parameter.name for parameter in launch.kernel.params]
    own = dict(zip(names, launch.args, strict=False))
    own |= {name: value for name, value in launch.options.items() if name in names}
    for name, value in own.items():
        if isinstance(value, TensorDescriptor):
            own[name] = Described(value.base, list(value.block_shape))
        elif isinstance(value, Tensor):
            own[name] = Pointer(value)
    for program in itertools.chain(range(1, programs), range(1)):
        made = names_in(module, Model(program, programs, first))
        made[launch.kernel.fn.__name__](**own)
