"""Projection, rotation, K/V write and attention in one launch: the bits of the launches in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import rotary_attention as module
from kernels.attention_inputs import FreshRows
from kernels.configs.attention import PagedTiles, paged_tiles
from kernels.linear import linear, linear_chunks
from kernels.paged_attention import Split, launch
from kernels.reference_attention import AttentionOptions, PagedBatch
from kernels.rope_kv import rope_kv
from kernels.rotary_attention import fits, rotary_attention

PAGE, KV_HEADS, DIM, MAX_POSITIONS = 64, 2, 64, 2048
PLAIN = AttentionOptions()


@dataclass
class Step:
    """Sequences with K/V behind their new tokens; slots of the new tokens hold NaN before."""

    heads: Tensor
    slots: Tensor
    positions: Tensor
    pools: tuple[Tensor, Tensor]
    tables: tuple[Tensor, Tensor]
    batch: PagedBatch
    num_heads: int

    def fresh(self, heads: Tensor | None = None, bias: Tensor | None = None) -> FreshRows:
        counters = self.batch.context_lens.numel() * KV_HEADS
        arrivals = torch.zeros(counters, dtype=torch.int32, device=self.slots.device)
        heads = self.heads if heads is None else heads
        return FreshRows(heads, bias, self.tables, self.slots, arrivals, self.num_heads)

    def clones(self) -> tuple[Tensor, Tensor]:
        return self.pools[0].clone(), self.pools[1].clone()


def make_step(
    device: str, lens: list[int], query_lens: list[int], *, group: int = 2, half: int = DIM // 2,
    dtype: torch.dtype = torch.float16, seed: int = 0,
) -> Step:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // PAGE) for length in lens]
    pages = torch.randperm(sum(counts) + 1, generator=generator)
    shape = (sum(counts) + 1, KV_HEADS, PAGE, DIM)
    pools = tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    tables = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
    positions, slots, first = [], [], 0
    for index, (length, count, new) in enumerate(zip(lens, counts, query_lens, strict=True)):
        tables[index, :count] = pages[first : first + count]
        first += count
        own = range(length - new, length)
        positions += own
        slots += [int(tables[index, i // PAGE]) * PAGE + i % PAGE if i >= 0 else -1 for i in own]
    for slot in slots:
        for pool in pools:
            if slot >= 0:
                pool[slot // PAGE, :, slot % PAGE] = torch.nan
    width = (group + 2) * KV_HEADS * DIM
    angles = torch.rand(MAX_POSITIONS, half, generator=generator) * 7
    ranges = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    return Step(
        torch.randn(len(slots), width, generator=generator).to(device, dtype),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(positions, device=device).clamp(min=0),
        (pools[0].to(device), pools[1].to(device)),
        (angles.cos().to(device), angles.sin().to(device)),
        PagedBatch(
            ranges.to(device), torch.tensor(lens, dtype=torch.int32, device=device),
            tables.to(device), max(query_lens), max(lens),
        ),
        group * KV_HEADS,
    )  # fmt: skip


def tiles_of(step: Step, **changes: Any) -> PagedTiles:
    """The shipped tiles, in the interpreter with products that ignore a row's place."""
    tiles = paged_tiles(step.pools[0], prefill=False)
    return replace(tiles, ordered=not torch.cuda.is_available(), **changes)


def in_turn(step: Step, options: AttentionOptions, split: Split) -> tuple[Tensor, ...]:
    """(out, keys, values) of rope_kv and then the paged kernel."""
    pools = step.clones()
    heads = step.heads.view(len(step.heads), -1, DIM)
    rotated = step.num_heads + KV_HEADS
    queries = rope_kv(
        heads[:, : step.num_heads], heads[:, step.num_heads : rotated], heads[:, rotated:],
        step.tables, step.positions, step.slots, pools,
    )  # fmt: skip
    tiles = tiles_of(step, folds=False)
    return launch(queries, *pools, step.batch, options, split, tiles)[0], *pools


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal as integers: NaN is itself and -0 is not 0."""
    kind = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind))


CASES = {
    "decode": ([300, 64, 1], [1, 1, 1], {}),
    "verify over tile, leaf and page edges": ([258, 66, 130, 3], [3, 3, 3, 3], {}),
    "ragged": ([330, 257, 65], [4, 1, 2], {}),
    "many heads a group": ([200, 70], [2, 2], {"group": 3}),
    "partly rotated": ([129, 65], [2, 2], {"half": 12}),
    "float32": ([259, 5], [2, 2], {"dtype": torch.float32}),
    "two chunks": ([1026], [3], {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("window", [None, 70])
def test_bits_are_those_of_launches_in_turn(device: str, name: str, window: int | None) -> None:
    """Output and both pools, whatever the split; leaves folded by the last program or by a launch,
    copied in bulk or not."""
    lens, query_lens, options = CASES[name]
    step = make_step(device, lens, query_lens, **options)
    attention = AttentionOptions(window=window)
    expected = in_turn(step, attention, Split.SEQUENCE)
    for split, changes in (
        (Split.SEQUENCE, {}),
        (Split.CHUNK, {}),
        (Split.LEAF, {"folds": True}),
        (Split.LEAF, {"folds": False}),
        (Split.LEAF, {"folds": True, "descriptors": True}),
    ):
        pools, fresh = step.clones(), step.fresh()
        tiles = tiles_of(step, **changes)
        out = launch(fresh, *pools, step.batch, attention, split, tiles)[0]
        for found, wanted in zip((out, *pools), expected, strict=True):
            assert same_bits(found, wanted)
        assert not bool(fresh.arrivals.any())  # ready for the next launch


def test_chunks_are_added_as_the_products_own_end_does(device: str) -> None:
    """Sums of chunks and bias, added by the attention: the bits of the finished projection."""
    step = make_step(device, [200, 40], [2, 1])
    generator = torch.Generator().manual_seed(1)
    depth, width = 320, step.heads.shape[1]
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(step.heads)
        for shape in ((3, depth), (width, depth), (width,))
    )
    finished = linear(x, weight, bias)
    chunks, left = linear_chunks(x, weight, bias)
    if device == "cpu":  # one program takes all chunks there
        assert left is None
        assert torch.equal(chunks, finished)
        parts = [x[:, k : k + 128].float() @ weight[:, k : k + 128].float().T for k in (0, 128)]
        chunks, left = torch.stack([*parts, torch.zeros_like(parts[0])]), bias
        finished = (((parts[0] + parts[1]) + 0.0) + bias.float()).to(step.heads)
    assert left is bias
    step = replace(step, heads=finished)
    expected = in_turn(step, PLAIN, Split.LEAF)
    pools = step.clones()
    out = launch(step.fresh(chunks, left), *pools, step.batch, PLAIN, Split.LEAF, tiles_of(step))[0]
    for found, wanted in zip((out, *pools), expected, strict=True):
        assert same_bits(found, wanted)


def test_padding_writes_nothing_and_disturbs_nobody(device: str) -> None:
    """A sequence that ended keeps its K/V though its length stays; one without tokens gives 0."""
    step = make_step(device, [130, 90, 70], [1, 1, 1])
    alone = launch(step.fresh(), *step.clones(), step.batch, PLAIN, Split.LEAF, tiles_of(step))[0]
    step.slots[1] = -1  # ended: token 0 at slot -1, context as before
    step.batch.context_lens[2] = 0  # never was
    step.slots[2] = -1
    step.pools[0].nan_to_num_(7.0)
    step.pools[1].nan_to_num_(7.0)
    for split in Split:
        for folds in (True, False):
            pools, fresh = step.clones(), step.fresh()
            tiles = tiles_of(step, folds=folds)
            out = launch(fresh, *pools, step.batch, PLAIN, split, tiles)[0]
            assert same_bits(out[0], alone[0])
            assert not bool(out[2].any())
            slot = int(step.slots[0])
            for pool, before in zip(pools, step.pools, strict=True):
                changed = (pool != before).any(-1).any(1).nonzero().tolist()
                assert changed == [[slot // PAGE, slot % PAGE]]
            assert not bool(fresh.arrivals.any())


def test_a_tokens_bits_ignore_the_others(device: str) -> None:
    """Three tokens verified have the bits of three decoded one after the other, pools included."""
    lens = [258, 66]
    step = make_step(device, lens, [3, 3])
    pools = step.clones()
    tiles = tiles_of(step)
    out = launch(step.fresh(), *pools, step.batch, PLAIN, Split.LEAF, tiles)[0].view(2, 3, -1)
    own = step.clones()
    for index in range(3):
        rows = torch.tensor([index, 3 + index], device=device)
        one = replace(
            step,
            heads=step.heads[rows],
            slots=step.slots[rows],
            batch=replace(
                step.batch,
                cu_seqlens_q=torch.arange(3, dtype=torch.int32, device=device),
                context_lens=step.batch.context_lens - 2 + index,
                max_query_len=1,
            ),
        )
        split = (Split.SEQUENCE, Split.CHUNK, Split.LEAF)[index]
        found = launch(one.fresh(), *own, one.batch, PLAIN, split, tiles)[0]
        assert same_bits(found.view(2, -1), out[:, index])
    for mine, theirs in zip(own, pools, strict=True):
        assert same_bits(mine, theirs)


def test_the_public_function_chooses_tiles_and_refuses_what_does_not_fit(device: str) -> None:
    """Shipped tiles give the bits too; rows past one tile, wrong widths and types are refused."""
    step = make_step(device, [100, 30], [1, 1], dtype=torch.float32)
    pools = step.clones()
    out = rotary_attention(step.fresh(), pools, step.batch, PLAIN)
    queries_pools = in_turn(step, PLAIN, Split.SEQUENCE)
    assert out.shape == queries_pools[0].shape
    assert same_bits(pools[0], queries_pools[1])
    torch.testing.assert_close(out, queries_pools[0])
    tile = paged_tiles(pools[0], prefill=False).rows
    assert fits(KV_HEADS * tile, pools[0], 1)
    assert not fits(KV_HEADS * tile, pools[0], 2)
    assert not fits(KV_HEADS, pools[0], 9)

    def refused(match: str, fresh: FreshRows, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            rotary_attention(fresh, pools, replace(step.batch, **changes), PLAIN)

    refused("rows of", step.fresh(step.heads[:, :-1]))
    refused("pools are", step.fresh(step.heads.half()))
    refused("bias", step.fresh(bias=step.heads[0]))
    refused("counters", replace(step.fresh(), arrivals=step.fresh().arrivals[:1]))
    refused("row tile", step.fresh(), max_query_len=9)
    refused("do not fit", replace(step.fresh(), tables=(pools[0][0, 0], pools[1][0, 0])))


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema (both pools are written) and fake of specmesh::rotary_attention agree with it."""
    step = make_step(device, [70, 30], [1, 1], dtype=torch.float32)
    fresh, batch = step.fresh(), step.batch
    torch.library.opcheck(
        torch.ops.specmesh.rotary_attention.default,
        (fresh.heads, None, *fresh.tables, fresh.slots, fresh.arrivals, fresh.num_heads,
         *step.pools, batch.cu_seqlens_q, batch.context_lens, batch.block_tables, 1, 70, None, 0.0,
         None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert module.rotary_attention is rotary_attention
