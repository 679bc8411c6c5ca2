"""Products by specialised warps: who takes them, every tile once, equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels import linear as module
from kernels import linear_specialised
from kernels.configs import layers
from kernels.configs.layers import LinearTiles, Specialised, linear_tiles
from kernels.configs.sweep_layers import shown
from kernels.fp8_weight import FP8
from kernels.linear import chunk_depth, linear, linear_chunks
from kernels.linear_norm import linear_norm
from kernels.linear_specialised import (
    begins_on_16,
    fits,
    fits_multiprocessor,
    grid_of,
    registers_of,
)
from tests.kernels.gluon_model import run_launch
from tests.kernels.sm90_audit import recorded

SPECIALISED, PRESENT = "_specialised_linear_kernel", "_linear_kernel"


# Small tiles, one of each kind: the device's own must have the bits of the general kernel's.
SMALL = [
    Specialised(1, 12, 64, 0), Specialised(1, 12, 32, 8), Specialised(2, 8, 64, 0),
    Specialised(2, 4, 64, 0, at_once=2), Specialised(2, 4, 32, 8, at_once=2),
    Specialised(1, 3, 64, 0, at_once=4), Specialised(1, 3, 32, 8, at_once=4),
    Specialised(1, 4, 64, 0, 128), Specialised(2, 2, 32, 8, 128, at_once=2),
    Specialised(1, 8, 64, 16), Specialised(1, 8, 32, 16),
]  # fmt: skip


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


def launches_of_the_table() -> list[Specialised]:
    """Of every kind of weight and number of rows, each once."""
    of_rows = [tiles.specialised for rows in layers._LINEAR.values() for _, tiles in rows]
    return list(dict.fromkeys(own for own in of_rows if own is not None))


@pytest.mark.parametrize("rows", [49, 64, 65, 129, 160, 161, 300, 320])
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
    """Few rows, very many, other types, weights of one byte, bias and activations, cut tiles and
    chunks, chunks shorter than the stages, rows off their 16 bytes, and more tiles than a round."""
    x, weight = meta(320, 4096), meta(4096, 4096)
    assert kernel_of(x, weight) == SPECIALISED
    for rows in (1, 40, 48, 321, 4096):
        assert kernel_of(meta(rows, 4096), weight) == PRESENT, rows
    for rows, own in ((1, PRESENT), (32, PRESENT), (33, SPECIALISED), (40, SPECIALISED)):
        assert kernel_of(meta(rows, 4096), meta(6144, 4096)) == own, rows
    for rows in (40, 64, 160):
        assert kernel_of(meta(rows, 4096), meta(6144, 4096), bias=meta(6144)) == PRESENT, rows
        assert kernel_of(meta(rows, 4096), meta(6144, 4096), activation="silu") == PRESENT, rows
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
    assert kernel_of(meta(160, 4096), meta(4352, 4096)) == PRESENT
    assert kernel_of(meta(64, 4096), meta(3840, 4096)) == SPECIALISED
    assert kernel_of(meta(64, 4096), meta(3776, 4096)) == PRESENT  # 59 programs
    assert kernel_of(meta(64, 8192), meta(2048, 8192)) == PRESENT  # 32
    assert kernel_of(meta(320, 1024), meta(4096, 1024)) == SPECIALISED  # one chunk
    assert kernel_of(meta(160, 1024), meta(4096, 1024)) == SPECIALISED
    assert kernel_of(meta(320, 1280), meta(4096, 1280)) == PRESENT  # chunks of five stages
    assert kernel_of(meta(40, 2048), meta(6144, 2048)) == PRESENT  # of eight
    assert kernel_of(meta(64, 2048), meta(4096, 2048)) == PRESENT  # of four, of 128 columns


def test_what_a_split_leaves_to_the_launch_that_adds_does_not_matter() -> None:
    """Bias and activations; a product of one chunk has nothing to split."""
    x, weight = meta(80, 4096), meta(4096, 4096)
    assert kernel_of(x, weight, bias=meta(4096), activation="silu") == SPECIALISED
    assert kernel_of(x, weight, residual=x) == SPECIALISED
    assert kernel_of(meta(80, 1024), meta(4096, 1024)) == PRESENT


@pytest.mark.parametrize("split", [False, True])
def test_what_it_cannot_end_is_refused_whatever_the_table_asks(split: bool) -> None:
    """Scales always; bias and activations but SwiGLU unless another launch adds the chunks, SwiGLU
    where one does; one chunk where it should."""
    x, weight = meta(160, 4096), meta(6144, 4096)
    own = Specialised(1, 7, split=split, num_multiprocessors=384)
    assert fits(x, weight, None, None, "none", 1024, own)
    assert fits(x, weight, None, meta(6144), "none", 1024, own) is split
    assert fits(x, weight, None, None, "silu", 1024, own) is split
    assert not fits(x, weight, meta(6144).float(), None, "none", 1024, own)
    assert fits(x, weight, None, None, "swiglu", 1024, own) is not split
    assert fits(x, weight, None, None, "none", 4096, own) is not split


def heads_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[str, Tensor]:
    """(the kernel that `linear_chunks` runs on sm_90, what it leaves), as its fake says too."""
    with (
        recorded(linear_specialised, SPECIALISED) as specialised,
        recorded(module, PRESENT) as present,
    ):
        made = module._launch_chunks(x, weight, None, bias, True)
    assert len(specialised) + len(present) == 1
    told = module._chunks_fake(x, weight, None, bias, True)
    assert (made.shape, made.dtype) == (told.shape, told.dtype)
    if present:
        assert present[0].options["SPLIT"] is (made.ndim == 3)
    return SPECIALISED if specialised else PRESENT, made


@pytest.mark.parametrize("rows", [40, 64, 65, 160, 320])
@pytest.mark.parametrize("width", [4096, 6144])
def test_the_fake_tells_a_finished_product(rows: int, width: int) -> None:
    """`linear_chunks` describes what the kernel that runs will leave."""
    kernel, made = heads_of(meta(rows, 4096), meta(width, 4096))
    if (rows, width) == (40, 4096):
        assert (kernel, made.shape) == (PRESENT, (4, rows, width))
    elif (rows, width) == (65, 4096):
        assert (kernel, made.shape) == (SPECIALISED, (4, rows, width))
    else:
        assert (kernel, made.shape) == (SPECIALISED, (rows, width))


def test_the_fake_tells_chunks_that_are_stored_apart() -> None:
    """By the specialised launch's own split, and none where there is one chunk."""
    kernel, made = heads_of(meta(80, 4096), meta(4096, 4096))
    assert (kernel, made.shape) == (SPECIALISED, (4, 80, 4096))
    kernel, made = heads_of(meta(80, 1024), meta(4096, 1024))
    assert (kernel, made.shape) == (PRESENT, (80, 4096))


def test_the_fake_sees_rows_off_their_16_bytes() -> None:
    """By their place in their storage: what is fake has no memory to look at."""
    weight = meta(6144, 4096)
    for offset, own in ((0, SPECIALISED), (8, SPECIALISED), (4, PRESENT)):
        x = meta(64, 4104)[:, offset : offset + 4096]
        assert heads_of(x, weight)[0] == own, offset
        with FakeTensorMode():
            fake, fake_weight = torch.empty(64, 4104).bfloat16(), torch.empty(6144, 4096).bfloat16()
            assert begins_on_16(fake[:, offset : offset + 4096]) == (own == SPECIALISED)
            assert begins_on_16(fake_weight)


def test_devices_with_fewer_multiprocessors_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are to run at once are made for 132: parts of sm_90 with fewer take the general
    kernel, split as it is."""
    x, weight, head = meta(64, 4096), meta(6144, 4096), meta(128256, 4096)
    assert linear_tiles(x, weight, False).specialised is not None
    assert linear_tiles(meta(160, 4096), head, False).persistent is not None
    monkeypatch.setattr(layers, "multiprocessors", lambda _device: 114)
    assert linear_tiles(x, weight, False).specialised is None
    assert linear_tiles(x, weight, False).split
    assert linear_tiles(meta(160, 4096), head, False).persistent is None
    assert kernel_of(x, weight) == PRESENT


@pytest.mark.parametrize("rows", [49, 64])
def test_what_does_not_fit_keeps_the_split_of_its_general_tile(rows: int) -> None:
    """qkv of a 1B model: chunks of 512 columns hold fewer than 6 stages of 128, and one launch that
    ends the product would leave most of a device idle. A bias is no launch's of one chunk."""
    for depth, width in ((2048, 3072), (2048, 6144)):
        x, weight = meta(rows, depth), meta(width, depth)
        tiles = linear_tiles(x, weight, False)
        assert tiles.split
        assert tiles.specialised is not None
        assert not tiles.specialised.split
        kernel, made = heads_of(x, weight)
        assert (kernel, made.shape) == (PRESENT, (4, rows, width))
    for width in (4096, 6144):
        kernel, made = heads_of(meta(rows, 4096), meta(width, 4096), meta(width))
        assert (kernel, made.shape) == (PRESENT, (4, rows, width))
        assert heads_of(meta(rows, 4096), meta(width, 4096))[0] == SPECIALISED


@pytest.mark.parametrize("rows", [1, 40, 41, 64, 160, 161, 320, 321])
@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("own", [Specialised(1, 7), Specialised(2, 6), *SMALL], ids=shown)
def test_programs_cover_every_tile_once(rows: int, num_chunks: int, own: Specialised) -> None:
    """Tiles of rows, columns and chunks, each a single program's, and none outside."""
    width = 768
    row_tiles, column_tiles, programs = grid_of(rows, width, num_chunks, own)
    tiles = [
        linear_specialised._tile_of.fn(program, row_tiles, column_tiles)
        for program in range(programs)
    ]
    assert len(set(tiles)) == programs
    rows_of_tile = own.rows + own.more_rows
    assert {rows_of for rows_of, _, _ in tiles} == set(range(-(-rows // rows_of_tile)))
    assert {columns for _, columns, _ in tiles} == set(range(width // (64 * own.groups)))
    assert {chunk for _, _, chunk in tiles} == set(range(num_chunks))
    assert programs == row_tiles * column_tiles * num_chunks


def test_tiles_are_those_that_the_kernel_has() -> None:
    """Sides of operands, stages of whole bulk copies, and one warpgroup or two."""
    for own in ((1, 4, 48, 0), (1, 4, 256, 0), (1, 4, 64, 4), (1, 4, 64, 64), (1, 4, 64, 0, 32)):
        with pytest.raises(ValueError, match="no tile"):
            Specialised(*own)
    with pytest.raises(ValueError, match="no tile"):
        Specialised(3, 4)


@pytest.mark.parametrize("own", SMALL, ids=shown)
def test_programs_of_a_multiprocessor_share_it(own: Specialised) -> None:
    """Registers of all threads at once are no more than there are, and warps that ask for others
    than they start with ask for no more; memory is within the limit, and a stage more is not for
    tiles that fill it."""
    most, (second, copying) = registers_of(own)
    threads = 128 * (own.groups + 1)
    assert (most is None) == (own.at_once == 1)
    if most is not None:
        assert most * threads * own.at_once <= 1 << 16
        first = most * (own.groups + 1) - copying - second * (own.groups - 1)
        assert first >= second >= 64
        assert most % 8 == second % 8 == 0
    assert fits_multiprocessor(replace(own, split=True), False)
    assert fits_multiprocessor(own, True)
    assert fits_multiprocessor(own, False) or own.at_once == 4
    assert not fits_multiprocessor(Specialised(2, 1, 64, 0, split=True, at_once=3), False)
    assert not fits_multiprocessor(Specialised(2, 1, split=True, at_once=2), False)
    assert fits_multiprocessor(Specialised(2, 1, 32, 8, split=True, at_once=3), False)
    more = 2 * own.at_once  # half as much memory for each
    assert not fits_multiprocessor(replace(own, at_once=more, num_stages=own.num_stages + 1), False)


def test_registers_of_the_table_are_those_that_were_measured() -> None:
    """One program a multiprocessor: no cap, 240 for a second warpgroup, and for the copies 24
    beside sums of 128 rows; and their stages are in memory beside what they leave."""
    found = launches_of_the_table()
    assert len(found) == 7
    for own in found:
        assert registers_of(own) == (None, (240, 24 if own.rows == 128 else 40)), own
        assert fits_multiprocessor(own, False), own
    assert fits_multiprocessor(Specialised(2, 6, split=True), False)
    assert not fits_multiprocessor(Specialised(2, 6), False)


@pytest.mark.parametrize("rows", [1, 33, 40, 64])
def test_small_tiles_fit_where_a_table_would_ask(rows: int) -> None:
    """The products of an 8B model's layers at few rows, gate and up with SwiGLU in turn alone;
    today's table asks for qkv, and not for gate and up."""
    x, gate_up, qkv = meta(rows, 4096), meta(28672, 4096), meta(6144, 4096)
    tile = {"rows": 64, "more_rows": 0} if rows > 40 else {"rows": 32, "more_rows": 8}
    two = Specialised(2, 4, **tile, at_once=2)
    assert fits(x, gate_up, None, None, "swiglu", 4096, two)
    assert not fits(x, gate_up, None, None, "swiglu", 1024, replace(two, split=True))
    assert fits(x, gate_up, None, None, "swiglu", 1024, two)
    assert not fits(x, gate_up, None, meta(28672), "swiglu", 4096, two)
    assert not fits(x, gate_up, None, None, "swiglu", 4096, replace(two, at_once=1))
    one = Specialised(1, 8, **tile)
    assert fits(x, qkv, None, None, "none", 1024, one)
    assert fits(x, qkv, None, None, "none", 1024, replace(one, split=True, at_once=3))
    assert not fits(x, qkv, None, None, "none", 1024, replace(one, split=True, at_once=2))
    assert fits(x, qkv, None, None, "none", 1024, replace(one, step_k=128))
    assert not fits(x, qkv, None, None, "none", 1024, replace(one, step_k=128, num_stages=9))
    assert not fits(x, qkv, None, None, "none", 64 * 17, replace(one, step_k=128))
    assert kernel_of(x, gate_up, activation="swiglu") == PRESENT
    assert kernel_of(x, qkv) == (PRESENT if rows == 1 else SPECIALISED)


def without(tiles: LinearTiles) -> LinearTiles:
    return replace(tiles, specialised=None)


def bits(*tensors: Tensor) -> list[Tensor]:
    return [t.view(torch.int16 if t.element_size() == 2 else torch.int32) for t in tensors]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "rows", [33, 39, 40, 41, 49, 63, 64, 65, 80, 81, 128, 129, 160, 161, 288, 289, 320]
)
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
@pytest.mark.parametrize(
    ("rows", "own"),
    [
        *((rows, linear_tiles(meta(rows, 4096), meta(4096, 4096), False).specialised)
          for rows in (64, 160, 320)),
        (40, Specialised(1, 16, 32, 8)), (64, Specialised(1, 6, 64, 0, at_once=2)),
        (64, Specialised(2, 4, 64, 0, split=True, at_once=2)),
        (160, Specialised(2, 6, split=True)),
    ],
)  # fmt: skip
def test_a_captured_chain_has_the_bits_of_launches_in_turn(
    rows: int, own: Specialised | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch starts before the one whose rows it reads, and over whose input it may write, has
    ended: replays over fresh inputs equal launches of the other kernel that wait for each other."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    def tiles_of(x: Tensor, weight: Tensor, swiglu: bool) -> LinearTiles:
        return replace(linear_tiles(x, weight, swiglu), specialised=own)

    assert own is not None
    assert fits(meta(rows, 4096), meta(4096, 4096), None, None, "none", 1024, own)
    monkeypatch.setattr(module, "linear_tiles", tiles_of)
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
    found = set()
    for rows, width, depth in (
        (40, 6144, 4096), (64, 6144, 4096), (64, 4096, 4096), (64, 4096, 14336),
        (80, 4096, 14336), (160, 6144, 4096), (160, 4096, 4096), (320, 6144, 4096),
        (320, 4096, 14336),
    ):  # fmt: skip
        x, weight = meta(rows, depth), meta(width, depth)
        own = linear_tiles(x, weight, False).specialised
        assert own is not None
        found.add(own)
        chunk = chunk_depth(weight, x.dtype)
        assert depth // chunk == 4
        programs = grid_of(rows, width, 4 if own.split else 1, own)[2]
        few = replace(own, num_multiprocessors=programs - 1)
        assert fits(x, weight, None, None, "none", chunk, own)
        assert not fits(x, weight, None, None, "none", chunk, few)
        for num_stages in (own.num_stages - 1, own.num_stages):
            short = own.step_k * num_stages
            cut = meta(rows, 4 * short), meta(width, 4 * short)
            assert fits(*cut, None, None, "none", short, own) is (num_stages == own.num_stages)
    assert found == set(launches_of_the_table())


def run_text(
    own: Specialised, rows: int, swiglu: bool, first: int, has_residual: bool = True
) -> None:
    """Launch on small integers, whose sums are exact, in a model of barriers, copies and late
    products: several chunks and turns of the pipeline, rows and weights of views."""
    own = replace(own, least_programs=1)
    steps, num_chunks = own.num_stages + 2, 3
    chunk, num_weights = own.step_k * steps, 128 * own.groups
    depth, width = chunk * num_chunks, num_weights // (2 if swiglu else 1)
    generator = torch.Generator().manual_seed(rows)

    def small(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(torch.bfloat16)

    x, weight = small(rows, depth + 8)[:, :depth], small(num_weights, depth + 8)[:, :depth]
    residual = small(rows, width + 8)[:, :width] if has_residual else None
    out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
    partials = torch.full((num_chunks, rows, width), torch.nan) if own.split else None
    activation = "swiglu" if swiglu else "none"
    assert fits(x, weight, None, None, activation, chunk, own)
    with recorded(linear_specialised, SPECIALISED) as launches:
        linear_specialised.launch_specialised(
            x, weight, residual, out, partials, swiglu, chunk, own, True
        )
    programs = grid_of(rows, num_weights, num_chunks if own.split else 1, own)[2]
    run_launch(linear_specialised, launches[0], programs, first)
    parts = zip(x.split(chunk, 1), weight.split(chunk, 1), strict=True)
    sums = torch.stack([a.float() @ b.float().T for a, b in parts])
    if partials is not None:
        assert torch.equal(partials, sums)
        assert bool(out.isnan().all())
        return
    expected = sums.sum(0)
    if swiglu:
        gate, up = expected.chunk(2, 1)
        expected = gate * (1 / (1 + torch.exp(-gate))) * up
    expected = expected if residual is None else expected + residual.float()
    assert torch.equal(out, expected.to(torch.bfloat16))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [65, 160, 161, 320])
@pytest.mark.parametrize("first", [0, -1], ids=["multiply first", "copy first"])
def test_the_text_of_the_kernel_adds_what_it_should(
    groups: int, split: bool, rows: int, first: int
) -> None:
    """Onto a residual, or chunks apart."""
    run_text(Specialised(groups, 3, split=split), rows, False, first)


@pytest.mark.parametrize("end", ["apart", "plain", "swiglu"])
@pytest.mark.parametrize("tile", [(64, 0), (32, 8), (32, 0), (64, 16)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("rows", "first"), [(1, 0), (39, -1), (40, 0), (64, -1), (65, 0)])
def test_small_tiles_add_what_they_should(
    end: str, tile: tuple[int, int], groups: int, rows: int, first: int
) -> None:
    """Ragged and whole tiles, whichever partition runs first; SwiGLU with a residual and without,
    its gate and up by eights; a second product that is not there."""
    own = Specialised(groups, 2 if rows % 2 else 3, *tile, split=end == "apart")
    run_text(own, rows, end == "swiglu", first, has_residual=rows != 64)


@pytest.mark.parametrize("own", [Specialised(1, 3), Specialised(2, 2, 64, 0)], ids=shown)
def test_chunks_are_added_as_the_contract_says(own: Specialised) -> None:
    """Ascending in float32: chunks are exact here, and the first and the last cancel, so that any
    other order has other bits."""
    steps, num_chunks, rows, num_weights = 3, 5, 40, 128
    chunk = own.step_k * steps
    depth = chunk * num_chunks
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.zeros(rows, depth), torch.randn(num_weights, depth, generator=generator)
    weight[:, :chunk] *= 2**18
    weight[:, -chunk:] = -weight[:, :chunk]  # what is left is what float32 kept of the others
    weight = weight.to(torch.bfloat16)
    for row in range(rows):  # one weight of each chunk
        x[row, torch.arange(num_chunks) * chunk + (7 * row) % chunk] = 1.0
    x, out = x.to(torch.bfloat16), torch.full((rows, num_weights), torch.nan, dtype=torch.bfloat16)
    with recorded(linear_specialised, SPECIALISED) as launches:
        linear_specialised.launch_specialised(x, weight, None, out, None, False, chunk, own, True)
    run_launch(linear_specialised, launches[0], grid_of(rows, num_weights, 1, own)[2], 0)
    parts = zip(x.split(chunk, 1), weight.split(chunk, 1), strict=True)
    sums = [a.float() @ b.float().T for a, b in parts]

    def added(ordered: list[Tensor]) -> Tensor:
        total = torch.zeros(rows, num_weights)
        for own_sums in ordered:
            total = total + own_sums
        return total.to(torch.bfloat16).view(torch.int16)

    assert torch.equal(out.view(torch.int16), added(sums))
    assert not torch.equal(added(sums), added(sums[::-1]))


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("tile", [(64, 0), (32, 8)])
def test_stages_of_128_columns_add_what_they_should(swiglu: bool, tile: tuple[int, int]) -> None:
    """Twice the columns of K a stage: the same sums, ascending."""
    run_text(Specialised(2, 2, *tile, step_k=128), 40, swiglu, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not model Gluon")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("own", SMALL, ids=shown)
def test_small_tiles_have_the_bits_of_the_other_kernel(
    own: Specialised, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no table asks for, at 1 to 64 rows: plain, onto a residual, in chunks apart
    and with SwiGLU, over reused memory full of NaN; repeated, since a race would show as bits that
    move."""
    generator = torch.Generator("cuda").manual_seed(own.num_stages)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    def use(split: bool, wanted: Specialised | None) -> None:
        def tiles_of(x: Tensor, weight: Tensor, swiglu: bool) -> LinearTiles:
            tiles = linear_tiles(x, weight, swiglu)
            return replace(tiles, split=split, specialised=wanted, persistent=None)

        monkeypatch.setattr(module, "linear_tiles", tiles_of)

    for width, depth, swiglu in ((4096, 4096, False), (2048, 14336, False), (16384, 2048, True)):
        weight = random(width, depth + 8)[:, :depth] * depth**-0.5
        for rows in (1, 7, 8, 31, 32, 33, 39, 40, 41, 48, 63, 64):
            x, residual = random(rows, depth), random(rows, width)
            activation = "swiglu" if swiglu else "none"
            ways = [(False, None)] if swiglu else [(False, None), (False, residual), (True, None)]
            for split, added in ways:
                chunk = chunk_depth(weight, dtype)
                # Several rounds are as good here.
                big = replace(own, split=split, num_multiprocessors=4096, least_programs=1)
                assert fits(x, weight, None, None, activation, chunk, big)
                if not fits_multiprocessor(big, swiglu):
                    continue
                use(split, None)
                expected = linear(x, weight, activation=activation, residual=added)
                use(split, big)
                launched = []
                with monkeypatch.context() as patch:
                    patch.setattr(
                        module, "launch_specialised", lambda *_, out=launched: out.append(1)
                    )
                    linear(x, weight, activation=activation, residual=added)
                assert launched == [1]
                for _ in range(3):
                    poison = [torch.full_like(expected, torch.nan) for _ in range(2)]
                    torch.cuda.synchronize()
                    del poison
                    made = linear(x, weight, activation=activation, residual=added)
                    assert torch.equal(bits(made)[0], bits(expected)[0]), (width, rows, split)
