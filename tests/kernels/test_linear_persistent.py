"""Products of many rows with wide weights: who takes them, every tile once, equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import linear as module
from kernels import linear_persistent
from kernels.configs.layers import LinearTiles, Persistent, linear_tiles
from kernels.fp8_weight import FP8
from kernels.linear import chunk_depth, linear
from kernels.linear_persistent import TILE_ROWS, fits_persistent, tiles_of
from tests.kernels.gluon_model import Model, names_in, run_launch
from tests.kernels.sm90_audit import recorded

PERSISTENT, PRESENT = "_persistent_linear_kernel", "_linear_kernel"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_of(
    x: Tensor, weight: Tensor, activation: str = "swiglu", bias: Tensor | None = None,
    residual: Tensor | None = None, scale: Tensor | None = None,
) -> str:  # fmt: skip
    """The kernel that sm_90 would run a product with."""
    with (
        recorded(linear_persistent, PERSISTENT) as persistent,
        recorded(module, PRESENT) as present,
        recorded(module, "_finish_kernel"),
    ):
        module._launch_linear(x, weight, scale, bias, residual, activation, True)
    assert len(persistent) + len(present) == 1
    return PERSISTENT if persistent else PRESENT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "activation"), [(28672, "swiglu"), (128256, "none"), (151936, "none")]
)
def test_many_rows_of_wide_weights_take_it(width: int, activation: str, dtype: torch.dtype) -> None:
    """Gate and up of an 8B model, and heads, of one tile of rows alone."""
    weight = meta(width, 4096, dtype=dtype)
    takes = (129, 160, 161, 300, 320) if activation == "swiglu" else (65, 100, 160)
    for rows in takes:
        assert kernel_of(meta(rows, 4096, dtype=dtype), weight, activation) == PERSISTENT, rows
    for rows in (takes[0] - 1, takes[-1] + 1):
        assert kernel_of(meta(rows, 4096, dtype=dtype), weight, activation) == PRESENT, rows


def test_everything_else_stays() -> None:
    """Few rows, very many, other types, weights of one byte, bias, residuals, other activations,
    several chunks, cut units and stages, rows off their 16 bytes, and tiles that leave a device
    idle."""
    x, weight = meta(320, 4096), meta(28672, 4096)
    assert kernel_of(x, weight) == PERSISTENT
    for rows in (1, 64, 128, 321, 4096):
        assert kernel_of(meta(rows, 4096), weight) == PRESENT, rows
    assert kernel_of(x, weight, bias=meta(28672)) == PRESENT
    assert kernel_of(x, weight, residual=meta(320, 14336)) == PRESENT
    assert kernel_of(meta(160, 4096), weight, "none") == PERSISTENT
    assert kernel_of(meta(160, 4096), weight, "none", residual=meta(160, 28672)) == PRESENT
    assert kernel_of(meta(160, 4096), weight, "none", bias=meta(28672)) == PRESENT
    assert kernel_of(meta(160, 4096), weight, "silu") == PRESENT
    assert kernel_of(x, weight.to(FP8), scale=meta(28672).float()) == PRESENT
    assert kernel_of(x.float(), weight.float()) == PRESENT
    assert kernel_of(x, meta(8192, 4096)) == PRESENT  # four chunks
    assert kernel_of(x, meta(28672 + 32, 4096)) == PRESENT
    assert kernel_of(meta(320, 4128), meta(28672, 4128)) == PRESENT
    assert kernel_of(meta(320, 192), meta(28672, 192)) == PRESENT  # three stages
    assert kernel_of(meta(320, 256), meta(28672, 256)) == PERSISTENT
    assert kernel_of(meta(320, 4104)[:, :4096], weight) == PERSISTENT
    assert kernel_of(meta(320, 4100)[:, :4096], weight) == PRESENT
    assert kernel_of(x, meta(28672, 4104)[:, :4096]) == PERSISTENT
    assert kernel_of(x, meta(28672, 4100)[:, :4096]) == PRESENT
    assert kernel_of(x, meta(4096, 28672).T) == PRESENT
    assert kernel_of(meta(160, 3072), meta(16384, 3072)) == PRESENT  # 86 programs of three units
    assert kernel_of(meta(320, 3072), meta(16384, 3072)) == PERSISTENT


@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_what_it_cannot_end_is_refused_whatever_the_table_asks(activation: str) -> None:
    """Scales, bias, residuals, other activations and a second chunk."""
    x, weight, own = meta(320, 4096), meta(28672, 4096), Persistent()
    more = meta(28672).float(), meta(28672), meta(320, 28672)
    assert fits_persistent(x, weight, None, None, None, activation, 4096, own)
    for index in range(3):
        scale, bias, residual = (t if i == index else None for i, t in enumerate(more))
        assert not fits_persistent(x, weight, scale, bias, residual, activation, 4096, own)
    assert not fits_persistent(x, weight, None, None, None, "silu", 4096, own)
    assert not fits_persistent(x, weight, None, None, None, activation, 2048, own)


@pytest.mark.parametrize("rows", [1, 160, 161, 320, 321])
@pytest.mark.parametrize("num_programs", [2, 5, 12, 132])
@pytest.mark.parametrize("num_units", [1, 7, 24, 448, 2004])
def test_tiles_cover_every_unit_once(rows: int, num_programs: int, num_units: int) -> None:
    """No unit is two tiles', none is left, and past the last are fewer than a tile's. Smaller tiles
    are at most a round, and no program has more of any than a program of full tiles alone."""
    row_tiles, full_columns, num_tiles = tiles_of(rows, num_units, num_programs)
    assert row_tiles == -(-rows // TILE_ROWS)
    place_of = names_in(linear_persistent, Model(0, 1, 0))["_place_of"]
    units = []
    for tile in range(num_tiles):
        first_row, first, count = place_of(tile, row_tiles, full_columns)
        assert count == (4 if tile < full_columns * row_tiles else 3)
        units += [(first_row, unit) for unit in range(first, first + count)]
    assert len(set(units)) == len(units)
    past = max(unit for _, unit in units) + 1
    assert num_units <= past < num_units + 4
    assert set(units) == {
        (TILE_ROWS * tile, unit) for tile in range(row_tiles) for unit in range(past)
    }
    assert num_tiles - full_columns * row_tiles <= max(num_programs, row_tiles)


def test_a_last_round_is_spread_over_the_device() -> None:
    """Gate and up of an 8B model at 320 rows: seven units a program, not eight; at 160 a round of
    112 full tiles, since smaller ones would be more than a round."""
    assert tiles_of(320, 448, 132) == (2, 66, 132 + 124)
    assert tiles_of(160, 448, 132) == (1, 112, 112)


def without(tiles: LinearTiles) -> LinearTiles:
    return replace(tiles, persistent=None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", [65, 129, 160, 161, 288, 289, 320])
@pytest.mark.parametrize(
    ("width", "depth", "activation"),
    [
        (28672, 4096, "swiglu"), (24576, 2048, "swiglu"), (28672, 256, "swiglu"),
        (128256, 4096, "none"), (24640, 512, "none"),
    ],
)  # fmt: skip
def test_bits_are_those_of_the_other_kernel(
    dtype: torch.dtype, rows: int, width: int, depth: int, activation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Over reused memory full of NaN, rows and weights of views; repeated, since a race would show
    as bits that move. Rows alone have the bits of rows among others."""
    generator = torch.Generator("cuda").manual_seed(rows + width + depth)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    x = random(rows, depth + 8)[:, :depth]
    weight = random(width, depth + 8)[:, :depth] * depth**-0.5

    def product() -> Tensor:
        poison = torch.full((rows, width), torch.nan, device="cuda", dtype=dtype)
        torch.cuda.synchronize()
        del poison
        return linear(x, weight, activation=activation).view(torch.int16)

    takes_it = kernel_of(
        meta(rows, depth, dtype=dtype), meta(width, depth, dtype=dtype), activation
    )
    launched: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "launch_persistent", lambda *_: launched.append(1))
        linear(x, weight, activation=activation)
    assert bool(launched) == (takes_it == PERSISTENT)
    ours = [product() for _ in range(3)]
    alone = linear(x[:1], weight, activation=activation)
    assert torch.equal(alone[0].view(torch.int16), ours[0][0])
    with monkeypatch.context() as patch:
        patch.setattr(module, "linear_tiles", lambda *args: without(linear_tiles(*args)))
        expected = product()
    for own in ours:
        assert torch.equal(own, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("rows", [160, 320])
def test_a_captured_chain_has_the_bits_of_launches_in_turn(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch starts before the one whose rows it reads, and over whose input it may write, has
    ended: replays over fresh inputs equal launches of the other kernels that wait for each
    other."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    ups = [random(28672, 4096) * 4096**-0.5 for _ in range(3)]
    downs = [random(4096, 14336) * 14336**-0.5 for _ in range(3)]

    def run(x: Tensor) -> Tensor:
        for up, down in zip(ups, downs, strict=True):
            x = linear(linear(x, up, activation="swiglu"), down, residual=x)
        return x

    x = random(rows, 4096)
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x)
    inputs, results = [], []
    for _ in range(10):
        x.copy_(random(rows, 4096))
        inputs.append(x.clone())
        graph.replay()
        results.append(result.clone())
    monkeypatch.setattr(module, "launches_early", lambda _device: False)
    monkeypatch.setattr(module, "linear_tiles", lambda *args: without(linear_tiles(*args)))
    for one, expected in zip(inputs, results, strict=True):
        assert torch.equal(run(one), expected)


@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize(
    ("rows", "num_units", "num_programs", "full", "fewer"),
    [
        (160, 8, 2, 2, 0),
        (161, 12, 4, 4, 4),  # a program has one of each; the last two units are past the end
        (320, 13, 2, 8, 0),  # four a program; three of the last four units are past the end
        (129, 27, 3, 6, 1),
        (160, 6, 3, 0, 2),  # the first ones are smaller already
    ],
)
@pytest.mark.parametrize("first", [0, -1], ids=["multiply first", "copy first"])
def test_the_text_of_the_kernel_adds_what_it_should(
    activation: str, rows: int, num_units: int, num_programs: int, full: int, fewer: int,
    first: int,
) -> None:  # fmt: skip
    """Run in a model of barriers, copies and late products: small integers, whose sums are exact,
    over several tiles a program and turns of the pipeline, for rows and weights of views."""
    depth, width = 64 * 9, 64 * num_units
    generator = torch.Generator().manual_seed(rows)

    def small(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(torch.bfloat16)

    x, weight = small(rows, depth + 8)[:, :depth], small(width, depth + 8)[:, :depth]
    swiglu = activation == "swiglu"
    out = torch.full((rows, width // 2 if swiglu else width), torch.nan, dtype=torch.bfloat16)
    with recorded(linear_persistent, PERSISTENT) as launches:
        linear_persistent.launch_persistent(x, weight, out, swiglu, Persistent(num_programs), True)
    row_tiles, full_columns, num_tiles = tiles_of(rows, num_units, num_programs)
    assert (full_columns * row_tiles, num_tiles) == (full, full + fewer)
    run_launch(linear_persistent, launches[0], min(num_tiles, num_programs), first)
    sums = x.float() @ weight.float().T
    if swiglu:
        gate, up = sums.chunk(2, 1)
        sums = gate * (1 / (1 + torch.exp(-gate))) * up
    assert torch.equal(out, sums.to(torch.bfloat16))


def test_the_table_asks_for_what_fits() -> None:
    """Where it was measured, and where programs would be idle too long it is refused."""
    for rows, width in ((160, 28672), (320, 28672), (65, 128256), (160, 128256)):
        x, weight = meta(rows, 4096), meta(width, 4096)
        own = linear_tiles(x, weight, width == 28672).persistent
        assert own is not None
        activation, chunk = "swiglu" if width == 28672 else "none", chunk_depth(weight, x.dtype)
        assert fits_persistent(x, weight, None, None, None, activation, chunk, own)
        idle = Persistent(100_000)
        assert not fits_persistent(x, weight, None, None, None, activation, chunk, idle)
