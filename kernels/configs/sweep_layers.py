"""Candidate launches of the linear, norm and rotary kernels, and what their times decide.

A product's candidates (`bench_layers.PRODUCTS`) must have the bits of the general kernel's launch
in the table; those that `linear_specialised` or `linear_persistent` would not take are left out.
`sweep` compiles and times them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial

from kernels.bench_layers import PRODUCTS, Product
from kernels.configs import layers
from kernels.configs.layers import (
    LinearTiles,
    Persistent,
    RopeLaunch,
    Specialised,
    linear_kind,
    linear_tiles,
)
from kernels.configs.trial import ARCHITECTURE, Trial
from kernels.linear import chunk_depth
from kernels.linear_persistent import fits_persistent
from kernels.linear_specialised import fits, fits_multiprocessor, grid_of

PRESENT, LIBRARY = "present", "library"  # candidates that are not: the table's launch, cuBLAS
SHARED_BYTES = 227 * 1024  # of a program
MOST_AT_ONCE = 4  # programs a multiprocessor: fewer registers each would not hold the sums
OF_A_LAYER = ("qkv", "out", "up", "down")

_turned = partial(LinearTiles, turned=True, descriptors=True)


def _linear(kind: str, tiles: LinearTiles) -> Callable[[], None]:
    return lambda: layers._LINEAR.__setitem__((ARCHITECTURE, kind), [(1 << 62, tiles)])


def _rope(launch: RopeLaunch) -> Callable[[], None]:
    return lambda: layers._ROPE.__setitem__(ARCHITECTURE, launch)


def _norm(values_per_thread: int) -> Callable[[], None]:
    return lambda: layers._NORM_VALUES.__setitem__(ARCHITECTURE, values_per_thread)


def shown(own: object) -> str:
    """A launch as a person would write it into the table: fields that are not the defaults."""
    given = []
    for field in fields(own):  # type: ignore[arg-type]  # a launch is a dataclass
        value = getattr(own, field.name)
        if field.default is MISSING:
            given.append(f"{value}")
        elif value != field.default:
            given.append(f"{field.name}={value}")
    return f"{type(own).__name__}({', '.join(given)})"


def _present(product: Product) -> tuple[LinearTiles, str]:
    """(the general kernel's launch of the table, the table's kind)."""
    x, weight, _ = product.meta()
    swiglu = product.activation == "swiglu"
    tiles = linear_tiles(x, weight, swiglu)
    return replace(tiles, specialised=None, persistent=None), linear_kind(weight, swiglu)


def general(product: Product) -> Trial:
    """The launch whose bits every candidate must have."""
    tiles, kind = _present(product)
    return Trial(product.name, "general", _linear(kind, tiles))


def _few_rows(has_chunks: bool) -> list[LinearTiles]:
    """Up to 16 rows."""
    steps = ((3, 128), (4, 128), (6, 128), (8, 64), (3, 256))
    found = [_turned(16, 64, 4, stages, block_k=k, split=has_chunks) for stages, k in steps]
    if has_chunks:
        return [*found, *(_turned(16, 64, 4, stages, block_k=128) for stages in (4, 6))]
    return [*found, _turned(16, 128, 4, 4, block_k=128), _turned(16, 128, 4, 6)]


def _some_rows(num_rows: int, has_chunks: bool) -> list[LinearTiles]:
    """Up to 64 rows. A second part of 8 would not be of wgmma, so that 40 rows are 32 and 16."""
    sides = [(64, 0)] if num_rows > 48 else [(64, 0), (32, 16)]
    found = []
    for block, more in sides:
        for stages, k, split in ((3, 128, True), (4, 128, True), (6, 64, True), (4, 128, False),
                                 (8, 64, False)):  # fmt: skip
            if has_chunks or not split:
                found.append(_turned(block, 64, 4, stages, more, k, split))
        found.append(_turned(block, 64, 4, 3, more, 128))
        found.append(_turned(block, 128, 4, 4, more, 64, has_chunks))
        found.append(_turned(block, 128, 8, 3, more, 128, has_chunks))
    return found


def _many_rows(num_rows: int, has_chunks: bool) -> list[LinearTiles]:
    found = [
        _turned(128, 64, 4, 3, 32), _turned(128, 64, 4, 4, 32), _turned(128, 64, 4, 6, 32),
        _turned(128, 64, 4, 4, 32, 128), _turned(128, 128, 8, 3, 32, split=has_chunks),
        _turned(128, 128, 8, 4, 32), _turned(128, 128, 8, 3, 32, 128, has_chunks),
    ]  # fmt: skip
    if num_rows > 160:
        found.append(_turned(256, 64, 8, 4, 64))
    if num_rows > 160 and not has_chunks:  # no registers for two sums of each
        found.append(_turned(256, 128, 8, 4, 64))
    return found


def _fits_shared(tiles: LinearTiles, swiglu: bool) -> bool:
    """Whether the stages of the general kernel fit a multiprocessor."""
    sides = tiles.block_m + tiles.more_m + tiles.block_n * (2 if swiglu else 1)
    return tiles.num_stages * tiles.block_k * sides * 2 <= SHARED_BYTES


def _general_tiles(product: Product) -> list[LinearTiles]:
    _, weight, _ = product.meta()
    has_chunks = chunk_depth(weight, weight.dtype) < weight.shape[1]
    rows = product.num_rows
    if rows <= 16:
        found = _few_rows(has_chunks)
    elif rows <= 64:
        found = _some_rows(rows, has_chunks)
    else:
        found = _many_rows(rows, has_chunks)
    return [tiles for tiles in found if _fits_shared(tiles, product.activation == "swiglu")]


def _deepest(
    product: Product, groups: int, tile: tuple[int, int], step_k: int, split: bool, spare: int
) -> Specialised | None:
    """The launch of as many stages as fit, of programs that all run at once with room for `spare`
    more on each multiprocessor, where the next launch can begin; None where there is none."""
    x, weight, _ = product.meta()
    swiglu, chunk = product.activation == "swiglu", chunk_depth(weight, x.dtype)
    own = Specialised(groups, 1, *tile, step_k, split)
    programs = grid_of(len(x), len(weight), weight.shape[1] // chunk if split else 1, own)[2]
    at_once = -(-programs // own.num_multiprocessors) + spare
    if programs < own.least_programs or at_once > MOST_AT_ONCE:
        return None
    for stages in range(chunk // step_k, 127 // step_k + 1, -1):
        own = Specialised(groups, stages, *tile, step_k, split, at_once)
        if fits_multiprocessor(own, swiglu):
            return own
    return None


def _specialised(product: Product) -> list[Specialised]:
    """Launches that fit."""
    x, weight, _ = product.meta()
    chunk, rows = chunk_depth(weight, x.dtype), product.num_rows
    tiles = [(64, 16), (128, 32)] if rows > 64 else [(64, 0)] if rows > 48 else [(32, 8), (64, 0)]
    wanted = []
    for tile, groups, split in itertools.product(tiles, (1, 2), (False, True)):
        for step_k, spare in ((64, 0), (128, 0), (64, 1)):
            if rows > 16 and (tile == tiles[0] or (step_k, spare) == (64, 0)):
                wanted.append(_deepest(product, groups, tile, step_k, split, spare))
    if rows > 64:
        wanted += [Specialised(1, 5), Specialised(1, 7, split=True)]
    end = product.activation
    return [own for own in wanted if own and fits(x, weight, None, None, end, chunk, own)]


def _takes_persistent(product: Product) -> bool:
    x, weight, residual = product.meta()
    chunk = chunk_depth(weight, x.dtype)
    return product.num_rows > 64 and fits_persistent(
        x, weight, None, None, residual, product.activation, chunk, Persistent()
    )


def product_trials(product: Product) -> list[Trial]:
    """The table's launch and every other candidate."""
    case, (base, kind) = product.name, _present(product)
    x, weight, _ = product.meta()
    present = linear_tiles(x, weight, product.activation == "swiglu")
    found = [(shown(tiles), tiles) for tiles in _general_tiles(product)]
    found += [(shown(own), replace(base, specialised=own)) for own in _specialised(product)]
    if _takes_persistent(product):
        found.append((shown(Persistent()), replace(base, persistent=Persistent())))
    trials_of = [Trial(case, name, _linear(kind, own)) for name, own in found if own != present]
    return [Trial(case, PRESENT, lambda: None), *trials_of]


def trials() -> list[Trial]:
    """Every candidate of the layers' kernels."""
    found = [trial for product in PRODUCTS for trial in product_trials(product)]
    found += _fp8_trials()
    found += [Trial("N32k", f"{n} values a thread", _norm(n)) for n in (8, 16, 32)]
    for turn in (RopeLaunch(16, 4), RopeLaunch(8, 2), RopeLaunch(16, 2)):
        found.append(Trial("R32k", f"{turn}", _rope(turn)))
    return found


def _fp8_trials() -> list[Trial]:
    """Launches over weights of one byte."""
    found: list[Trial] = []
    for case, kind, rows in (
        ("G1-fp8", "fp8 swiglu", 16), ("down5-fp8", "fp8 narrow", 16),
        ("G64-fp8", "fp8 swiglu", 64), ("down64-fp8", "fp8 narrow", 64),
    ):  # fmt: skip
        for step, stages in ((128, 3), (128, 4), (128, 6), (256, 3), (256, 4), (64, 12)):
            tiles = _turned(rows, 64, 4, stages, block_k=step, split=True)
            found.append(Trial(case, shown(tiles), _linear(kind, tiles)))
    many = (
        _turned(128, 64, 4, 3, 32), _turned(128, 64, 4, 4, 32), _turned(128, 128, 8, 4, 32),
        _turned(256, 64, 8, 4, 64),
    )  # fmt: skip
    return found + [Trial("G320-fp8", shown(t), _linear("fp8 swiglu", t)) for t in many]


def _line(kind: str, rows: int, present: float, best: float, more: str = "") -> str:
    times = f"{1e3 * present:>9.2f} {1e3 * best:>9.2f} {best / present:>6.3f}"
    return f"{kind:<6} {rows:>4} {times} {more}".rstrip()


def decided(results: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of a table, in microseconds: the fastest launch of each product beside the present one
    and the library's, then sums over a layer of those row counts whose four products are there.

    results: as `sweep` makes them, {"case", "candidate", "median_ms" or "error"}. The present
    launch may be there twice: the faster one counts. A product without a time for it is left out.
    """
    products = {product.name: product for product in PRODUCTS}
    times: dict[str, dict[str, float]] = {}
    for result in results:
        if result["case"] in products and "median_ms" in result:
            own = times.setdefault(str(result["case"]), {})
            label, median = str(result["candidate"]), float(str(result["median_ms"]))
            own[label] = min(median, own.get(label, median))
    lines, layer = [], dict[int, list[tuple[float, float]]]()
    for name, own in times.items():
        if PRESENT not in own:
            continue
        library = own.pop(LIBRARY, None)
        best = min(own, key=lambda label: own[label])
        kind, rows = products[name].kind, products[name].num_rows
        beside = f"{'-' if library is None else format(1e3 * library, '.2f'):>9}  {best}"
        lines.append(_line(kind, rows, own[PRESENT], own[best], beside))
        if kind in OF_A_LAYER:
            layer.setdefault(rows, []).append((own[PRESENT], own[best]))
    for rows, pairs in sorted(layer.items()):
        if len(pairs) == len(OF_A_LAYER):
            present, best_of_all = (sum(times_of) for times_of in zip(*pairs, strict=True))
            lines.append(_line("layer", rows, present, best_of_all))
    head = f"{'kind':<6} {'rows':>4} {'present':>9} {'best':>9} {'ratio':>6} {'library':>9}  launch"
    return [head, *lines] if lines else []
