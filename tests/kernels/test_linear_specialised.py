"""Products of many rows by specialised warps: who takes them, every tile once, equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import linear as module
from kernels import linear_specialised
from kernels.configs.layers import LinearTiles, Specialised, linear_tiles
from kernels.fp8_weight import FP8
from kernels.linear import chunk_depth, linear, linear_chunks
from kernels.linear_norm import linear_norm
from kernels.linear_specialised import TILE_ROWS, fits, grid_of
from tests.kernels.gluon_model import run_launch
from tests.kernels.sm90_audit import recorded

SPECIALISED, PRESENT = "_specialised_linear_kernel", "_linear_kernel"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_of(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    activation: str = "none", scale: Tensor | None = None,
) -> str:  # fmt: skip
    """The kernel that sm_90 would run a product with."""
    with (
        recorded(linear_specialised, SPECIALISED) as specialised,
        recorded(module, PRESENT) as present,
        recorded(module, "_finish_kernel"),
    ):
        module._launch_linear(x, weight, scale, bias, residual, activation, True)
    assert len(specialised) + len(present) == 1
    return SPECIALISED if specialised else PRESENT


@pytest.mark.parametrize("rows", [65, 129, 160, 161, 300, 320])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (4096, 4096), (4096, 14336)])
def test_many_rows_of_narrow_weights_take_it(
    rows: int, dtype: torch.dtype, width: int, depth: int
) -> None:
    """The products of an 8B model's layers but gate and up, with a residual or without."""
    x, weight = meta(rows, depth, dtype=dtype), meta(width, depth, dtype=dtype)
    assert kernel_of(x, weight) == SPECIALISED
    assert kernel_of(x, weight, residual=meta(rows, width, dtype=dtype)) == SPECIALISED


def test_everything_else_stays() -> None:
    """Few rows, very many, other types, weights of one byte, bias and activations where one launch
    ends the layer, cut tiles and chunks, rows off their 16 bytes, and more tiles than a round."""
    x, weight = meta(320, 4096), meta(4096, 4096)
    assert kernel_of(x, weight) == SPECIALISED
    for rows in (1, 64, 321, 4096):
        assert kernel_of(meta(rows, 4096), weight) == PRESENT, rows
    assert kernel_of(x, weight, bias=meta(4096)) == PRESENT
    assert kernel_of(x, weight, activation="silu") == PRESENT
    assert kernel_of(x, weight, activation="swiglu") == PRESENT
    assert kernel_of(x, meta(4096, 4096, dtype=FP8), scale=meta(4096).float()) == PRESENT
    assert kernel_of(x.float(), weight.float()) == PRESENT
    assert kernel_of(x, meta(4100, 4096)) == PRESENT
    assert kernel_of(meta(320, 4160), meta(4096, 4160)) == PRESENT  # chunks of 17, 17, 17, 14
    assert kernel_of(meta(320, 4104)[:, :4096], weight) == SPECIALISED
    assert kernel_of(meta(320, 4100)[:, :4096], weight) == PRESENT
    assert kernel_of(x, meta(4096, 4100)[:, :4096]) == PRESENT
    assert kernel_of(x, meta(4096, 4096).T) == PRESENT
    assert kernel_of(x, meta(4352, 4096)) == PRESENT  # 68 x 2 tiles
    assert kernel_of(meta(320, 1024), meta(4096, 1024)) == SPECIALISED  # one chunk
    assert kernel_of(meta(160, 1024), meta(4096, 1024)) == PRESENT  # and nothing to split
    assert kernel_of(meta(320, 1280), meta(4096, 1280)) == PRESENT  # chunks of five stages
    # What a split leaves to the launch that adds does not matter.
    split = meta(160, 4096)
    assert kernel_of(split, weight, bias=meta(4096), activation="silu") == SPECIALISED


@pytest.mark.parametrize("split", [False, True])
def test_what_it_cannot_end_is_refused_whatever_the_table_asks(split: bool) -> None:
    """Scales and SwiGLU always; bias and activations unless another launch adds the chunks; one
    chunk where it should."""
    x, weight, own = meta(160, 4096), meta(6144, 4096), Specialised(1, 7, most_programs=384)
    assert fits(x, weight, None, None, "none", 1024, split, own)
    assert fits(x, weight, None, meta(6144), "none", 1024, split, own) is split
    assert fits(x, weight, None, None, "silu", 1024, split, own) is split
    assert not fits(x, weight, meta(6144).float(), None, "none", 1024, split, own)
    assert not fits(x, weight, None, None, "swiglu", 1024, split, own)
    assert fits(x, weight, None, None, "none", 4096, split, own) is not split


@pytest.mark.parametrize("rows", [65, 160, 320])
@pytest.mark.parametrize("width", [4096, 6144])
def test_the_fake_tells_chunks_from_a_finished_product(rows: int, width: int) -> None:
    """`linear_chunks` describes what the kernel that runs will leave."""
    x, weight = meta(rows, 4096), meta(width, 4096)
    with recorded(linear_specialised, SPECIALISED) as launches:
        made = module._launch_chunks(x, weight, None, None, True)
    assert len(launches) == 1
    told = module._chunks_fake(x, weight, None, None, True)
    assert (made.shape, made.dtype) == (told.shape, told.dtype)


@pytest.mark.parametrize("rows", [1, 160, 161, 320, 321])
@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_programs_cover_every_tile_once(rows: int, num_chunks: int, groups: int) -> None:
    """Tiles of rows, columns and chunks, each a single program's, and none outside."""
    width = 768
    row_tiles, column_tiles, programs = grid_of(rows, width, num_chunks, groups)
    tiles = [
        linear_specialised._tile_of.fn(program, row_tiles, column_tiles)
        for program in range(programs)
    ]
    assert len(set(tiles)) == programs
    assert {rows_of for rows_of, _, _ in tiles} == set(range(-(-rows // TILE_ROWS)))
    assert {columns for _, columns, _ in tiles} == set(range(width // (64 * groups)))
    assert {chunk for _, _, chunk in tiles} == set(range(num_chunks))
    assert programs == row_tiles * column_tiles * num_chunks


def without(tiles: LinearTiles) -> LinearTiles:
    return replace(tiles, specialised=None)


def bits(*tensors: Tensor) -> list[Tensor]:
    return [t.view(torch.int16 if t.element_size() == 2 else torch.int32) for t in tensors]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", [65, 128, 129, 160, 161, 288, 289, 320])
@pytest.mark.parametrize(
    ("width", "depth"),
    [(4096, 4096), (6144, 4096), (5120, 2048), (4096, 14336), (2048, 8192), (4096, 1024)],
)
def test_bits_are_those_of_the_other_kernel(
    dtype: torch.dtype, rows: int, width: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain, onto a residual, with the norm behind, and in chunks, over reused memory full of NaN;
    repeated, since a race would show as bits that move. Rows alone have the bits of rows among
    others."""
    generator = torch.Generator("cuda").manual_seed(rows + width + depth)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    x, weight = random(rows, depth), random(width, depth) * depth**-0.5
    residual, norm = random(rows, width + 8)[:, :width], random(width)

    def products() -> list[Tensor]:
        poison = [torch.full((4, rows, width), torch.nan, device="cuda") for _ in range(3)]
        torch.cuda.synchronize()
        del poison
        return bits(
            linear(x, weight), linear(x, weight, residual=residual),
            *linear_norm(x, weight, None, residual, norm, 1e-5),
            linear_chunks(x, weight, None)[0],
        )  # fmt: skip

    takes_it = kernel_of(meta(rows, depth, dtype=dtype), meta(width, depth, dtype=dtype))
    ours = [products() for _ in range(3)]
    alone = linear(x[:1], weight, residual=residual[:1])
    assert torch.equal(bits(alone)[0][0], ours[0][1][0])
    launched: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "launch_specialised", lambda *_: launched.append(1))
        linear(x, weight)
    assert bool(launched) == (takes_it == SPECIALISED)
    with monkeypatch.context() as patch:
        patch.setattr(module, "linear_tiles", lambda *args: without(linear_tiles(*args)))
        expected = products()
    for own in ours:
        for one, other in zip(own, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("rows", [160, 320])
def test_a_captured_chain_has_the_bits_of_launches_in_turn(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch starts before the one whose rows it reads, and over whose input it may write, has
    ended: replays over fresh inputs equal launches of the other kernel that wait for each other."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    weights = [random(4096, 4096) * 4096**-0.5 for _ in range(6)]

    def run(x: Tensor) -> Tensor:
        for weight in weights:
            x = linear(linear(x, weight), weight, residual=x)
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


def test_whole_chunks_of_the_contract_fill_the_pipeline() -> None:
    """What the table asks for fits where it was measured: chunks are the contract's."""
    for rows, width, depth in ((160, 6144, 4096), (320, 4096, 14336)):
        x, weight = meta(rows, depth), meta(width, depth)
        own = linear_tiles(x, weight, False).specialised
        assert own is not None
        chunk = chunk_depth(weight, x.dtype)
        assert depth // chunk == 4
        few = replace(own, most_programs=grid_of(rows, width, 1, own.groups)[2] - 1)
        assert fits(x, weight, None, None, "none", chunk, False, own)
        assert not fits(x, weight, None, None, "none", 64 * (own.num_stages - 1), False, own)
        assert not fits(x, weight, None, None, "none", chunk, False, few)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [65, 160, 161, 320])
@pytest.mark.parametrize("first", [0, -1], ids=["multiply first", "copy first"])
def test_the_text_of_the_kernel_adds_what_it_should(
    groups: int, split: bool, rows: int, first: int
) -> None:
    """Run in a model of barriers, copies and late products: small integers, whose sums are exact,
    over several chunks and turns of the pipeline, onto a residual, for rows of a view."""
    width, steps, num_chunks = 128 * groups, 5, 3
    depth = 64 * steps * num_chunks
    generator = torch.Generator().manual_seed(rows)

    def small(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(torch.bfloat16)

    x, weight = small(rows, depth + 8)[:, :depth], small(width, depth)
    residual = small(rows, width + 8)[:, :width]
    out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
    partials = torch.full((num_chunks, rows, width), torch.nan) if split else None
    own = Specialised(groups, 3)
    assert fits(x, weight, None, None, "none", 64 * steps, split, own)
    with recorded(linear_specialised, SPECIALISED) as launches:
        linear_specialised.launch_specialised(
            x, weight, residual, out, partials, 64 * steps, own, True
        )
    programs = grid_of(rows, width, num_chunks if split else 1, groups)[2]
    run_launch(linear_specialised, launches[0], programs, first)
    sums = [
        a.float() @ b.float().T
        for a, b in zip(x.split(64 * steps, 1), weight.split(64 * steps, 1), strict=True)
    ]
    if partials is not None:
        assert torch.equal(partials, torch.stack(sums))
        assert bool(out.isnan().all())
        return
    assert torch.equal(out, (sum(sums) + residual.float()).to(torch.bfloat16))
