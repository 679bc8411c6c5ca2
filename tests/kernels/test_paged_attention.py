"""Paged attention: verify equals decode bit for bit, splits and pages do not matter, traps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference_attention as reference
from kernels.attention import AttentionOptions
from kernels.configs.attention import PagedTiles
from kernels.paged_attention import (
    MAX_VERIFY_LEN,
    Split,
    _page_descriptors,
    choose_split,
    launch,
    paged_attention,
)
from kernels.paged_prefill import paged_prefill
from kernels.reference_attention import PagedBatch
from tests.kernels.accuracy import assert_as_accurate

PLAIN = AttentionOptions()
# The interpreter's matrix product may depend on a row's place in the tile; the GPU's does not.
ORDERED = not torch.cuda.is_available()
TILES = PagedTiles(32, 16, ordered=True) if ORDERED else PagedTiles(64, 64)
WIDE_TILES = replace(TILES, rows=64) if ORDERED else replace(TILES, rows=128, num_warps=8)


class Pages:
    """Random K/V of sequences, dealt over randomly permuted pages; slots past a length are NaN."""

    def __init__(
        self, lens: list[int], page: int, kv_heads: int = 2, dim: int = 64, seed: int = 0,
        dtype: torch.dtype = torch.float32, device: str = "cpu",
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.dim, self.kv_heads = device, dtype, dim, kv_heads
        counts = [(length + page - 1) // page for length in lens]
        order = torch.randperm(sum(counts) + 2, generator=generator)
        shape = (sum(counts) + 2, kv_heads, page, dim)
        self.k_pool, self.v_pool = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        self.tables = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
        next_page = 0
        for index, (length, count) in enumerate(zip(lens, counts, strict=True)):
            pages = order[next_page : next_page + count]
            next_page += count
            self.tables[index, :count] = pages
            for pool in (self.k_pool, self.v_pool):
                tokens = torch.randn(kv_heads, count * page, dim, generator=generator).to(dtype)
                tokens[:, length:] = math.nan
                pool[pages] = tokens.view(kv_heads, count, page, dim).transpose(0, 1)
        self.lens = lens
        self.generator = generator

    def queries(self, query_lens: list[int], heads: int) -> Tensor:
        q = torch.randn(sum(query_lens), heads, self.dim, generator=self.generator)
        return q.to(self.dtype)

    def batch(self, query_lens: list[int], lens: list[int] | None = None) -> PagedBatch:
        lens = lens or self.lens
        ranges = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
        return PagedBatch(
            ranges.to(self.device),
            torch.tensor(lens, dtype=torch.int32, device=self.device),
            self.tables.to(self.device),
            max(query_lens),
            max(lens),
        )

    def pools(self) -> tuple[Tensor, Tensor]:
        return self.k_pool.to(self.device), self.v_pool.to(self.device)


def cpu(batch: PagedBatch) -> PagedBatch:
    return replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q.cpu(),
        context_lens=batch.context_lens.cpu(),
        block_tables=batch.block_tables.cpu(),
    )


def check(pages: Pages, q: Tensor, query_lens: list[int], options: AttentionOptions) -> None:
    batch = pages.batch(query_lens)
    pools = pages.pools()
    call = paged_attention if max(query_lens) <= MAX_VERIFY_LEN else paged_prefill
    out, lse = call(q.to(pages.device), *pools, batch, options)
    # Plain PyTorch multiplies unwritten slots by 0, so it gets clean pools.
    clean = [torch.nan_to_num(pool) for pool in (pages.k_pool, pages.v_pool)]
    local = [t.to(pages.device) for t in (q, *clean)]
    plain, _ = reference.paged_attention(*local, batch, options)
    exact, exact_lse = reference.paged_attention(
        q.double(), *(pool.double() for pool in clean), cpu(batch), options
    )
    assert_as_accurate(out, plain, exact)
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 300])
def test_accuracy_over_pages_windows_and_ragged_lengths(
    device: str, page: int, window: int | None
) -> None:
    """Ragged sequences over permuted pages match float64; slots past a length hold NaN."""
    pages = Pages([700, 5, 257], page, device=device)
    query_lens = [5, 3, 1]
    check(pages, pages.queries(query_lens, 4), query_lens, AttentionOptions(window=window))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "options"),
    [
        (3, 1, 96, PLAIN),
        (2, 2, 128, AttentionOptions(softcap=1.5)),
        (8, 1, 64, AttentionOptions(scale=-0.2)),
        (2, 1, 256, PLAIN),
    ],
)
def test_head_groups_dims_cap_and_scale(
    device: str, heads: int, kv_heads: int, dim: int, options: AttentionOptions
) -> None:
    """Odd groups, MQA, padded and wide head dims, softcap and a negative scale match float64."""
    pages = Pages([150, 40], 64, kv_heads=kv_heads, dim=dim, device=device)
    check(pages, pages.queries([4, 1], heads), [4, 1], options)


def test_half_precision(device: str) -> None:
    """float16 pools are as accurate as plain PyTorch in float16."""
    pages = Pages([520, 33], 64, dtype=torch.float16, device=device)
    check(pages, pages.queries([5, 1], 4), [5, 1], PLAIN)


@pytest.mark.parametrize("window", [None, 270])
def test_verify_has_the_bits_of_single_decodes(device: str, window: int | None) -> None:
    """Five queries in one call equal five one-query calls bit for bit, across leaf and chunk edges,
    whatever the split and the rows a program packs; so a verify step cannot flip a near-tie.
    """
    lens, query_lens = [1027, 258, 5], [5, 5, 5]
    pages = Pages(lens, 16, dtype=torch.float16, device=device)
    q, pools = pages.queries(query_lens, 4).to(device), pages.pools()
    options = AttentionOptions(window=window)
    verified, verified_lse = launch(q, *pools, pages.batch(query_lens), options, Split.CHUNK, TILES)
    rows = q.view(3, 5, 4, 64)
    for step, split in enumerate((Split.SEQUENCE, Split.LEAF, Split.CHUNK, Split.LEAF, 0)):
        batch = pages.batch([1, 1, 1], [length - 4 + step for length in lens])
        tiles = WIDE_TILES if step == 1 else TILES
        out, lse = launch(rows[:, step].contiguous(), *pools, batch, options, Split(split), tiles)
        assert torch.equal(out, verified.view(3, 5, 4, 64)[:, step])
        assert torch.equal(lse, verified_lse.view(3, 5, 4)[:, step])


def test_prefill_has_the_bits_of_verify_however_it_is_cut(device: str) -> None:
    """A prompt in one call, in uneven chunks, and token by token at its end gives the same bits."""
    length = 300
    pages = Pages([length], 64, kv_heads=1, dtype=torch.float16, device=device)
    num_queries = 40
    q, pools = pages.queries([num_queries], 2).to(device), pages.pools()
    whole, _ = launch(q, *pools, pages.batch([num_queries]), PLAIN, Split.SEQUENCE, WIDE_TILES)
    pieces, start = [], 0
    for count in (13, 19, 7, 1):
        context_len = length - num_queries + start + count
        batch = pages.batch([count], [context_len])
        pieces.append(launch(q[start : start + count], *pools, batch, PLAIN, Split.LEAF, TILES)[0])
        start += count
    assert torch.equal(torch.cat(pieces), whole)


def test_splits_do_not_change_bits(device: str) -> None:
    """A program for a leaf, a chunk or a sequence: equal bits, also where windows skip splits."""
    pages = Pages([1500, 1024, 256, 1], 128, kv_heads=1, dtype=torch.float16, device=device)
    query_lens = [2, 2, 2, 1]
    q, pools, batch = (
        pages.queries(query_lens, 2).to(device),
        pages.pools(),
        pages.batch(query_lens),
    )
    for window in (None, 400):
        options = AttentionOptions(window=window)
        results = [launch(q, *pools, batch, options, split, TILES) for split in Split]
        copied = replace(TILES, descriptors=True)  # bulk copies in place of pointers
        results.append(launch(q, *pools, batch, options, Split.CHUNK, copied))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])


def test_page_and_batch_permutations_do_not_change_bits(device: str) -> None:
    """The same tokens on other pages of another size, in another batch order: equal bits."""
    lens, query_lens = [300, 77, 130], [3, 1, 2]
    pages = Pages(lens, 64, kv_heads=1, device=device)
    q = pages.queries(query_lens, 2).to(device)
    out, _ = paged_attention(q, *pages.pools(), pages.batch(query_lens), PLAIN)
    pieces = out.split(query_lens)
    small = Pages(lens, 16, kv_heads=1, seed=9, device=device)
    for index, length in enumerate(lens):
        for source, target in ((pages.k_pool, small.k_pool), (pages.v_pool, small.v_pool)):
            tokens = source[pages.tables[index].long()].transpose(0, 1).flatten(1, 2)[:, :length]
            for start in range(0, length, 16):
                piece = tokens[:, start : start + 16]
                target[small.tables[index, start // 16].long(), :, : piece.shape[1]] = piece
    order = [2, 0, 1]
    small.tables = small.tables[order]
    batch = small.batch([query_lens[i] for i in order], [lens[i] for i in order])
    shuffled = torch.cat([q.split(query_lens)[i] for i in order])
    again, _ = paged_attention(shuffled, *small.pools(), batch, PLAIN)
    assert torch.equal(again, torch.cat([pieces[i] for i in order]))


def test_padding_of_a_graph_bucket_is_inert(device: str) -> None:
    """Sequences with no query and length 0 read nothing and write nothing, page 0 all NaN."""
    pages = Pages([100, 20], 64, device=device)
    q = pages.queries([2, 1], 4).to(device)
    expected, expected_lse = paged_attention(q, *pages.pools(), pages.batch([2, 1]), PLAIN)
    batch = pages.batch([2, 1])
    padded = replace(
        batch,
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].repeat(2)]),
        context_lens=torch.cat([batch.context_lens, batch.context_lens[:2] * 0]),
        block_tables=torch.cat([batch.block_tables, batch.block_tables[:2] * 0]),
        max_query_len=8,
        max_context_len=4000,
    )
    out, lse = paged_attention(q, *pages.pools(), padded, PLAIN)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_queries_before_the_first_token_are_empty(device: str) -> None:
    """With more queries than context, rows at negative positions give output 0 and lse -inf."""
    pages = Pages([2], 64, device=device)
    q = pages.queries([5], 4).to(device)
    for split in Split:
        out, lse = launch(q, *pages.pools(), pages.batch([5]), PLAIN, split, TILES)
        assert not bool(out[:3].any())
        assert bool((lse[:3] == -math.inf).all())
        assert bool(torch.isfinite(lse[3:]).all())
        assert bool(torch.isfinite(out).all())


def test_rejected_tokens_are_hidden_by_the_context_length(device: str) -> None:
    """After a rejection the shorter context gives a fresh decode's bits: stale K/V is unread."""
    pages = Pages([260], 64, device=device)
    q = pages.queries([1], 4).to(device)
    stale, _ = paged_attention(q, *pages.pools(), pages.batch([1], [257]), PLAIN)
    k_pool, v_pool = pages.pools()
    for position in range(257, 260):
        page = pages.tables[0, position // 64].long()
        k_pool[page, :, position % 64] = math.nan
        v_pool[page, :, position % 64] = math.nan
    fresh, _ = paged_attention(q, k_pool, v_pool, pages.batch([1], [257]), PLAIN)
    assert torch.equal(stale, fresh)


def test_strided_queries_and_pools(device: str) -> None:
    """Queries sliced from a fused QKV row and pools of the other layout (token, head) work."""
    pages = Pages([100, 20], 64, device=device)
    fused = pages.queries([3, 1], 8).to(device)
    q = fused[:, 2:6]
    k_pool, v_pool = (pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in pages.pools())
    batch = pages.batch([3, 1])
    out, _ = paged_attention(q, k_pool, v_pool, batch, PLAIN)
    expected, _ = paged_attention(q.contiguous(), *pages.pools(), batch, PLAIN)
    assert torch.equal(out, expected)


def test_page_offsets_are_64_bit(device: str) -> None:
    """A page id times a page stride beyond 2**31 elements reads the right page."""
    pages = Pages([10], 16, kv_heads=1, dtype=torch.float16, device=device)
    q, (k_pool, v_pool), batch = pages.queries([1], 1).to(device), pages.pools(), pages.batch([1])
    expected, _ = paged_attention(q, k_pool, v_pool, batch, PLAIN)
    page, stride = int(pages.tables[0, 0]), 2**29
    # Page 4 of a pool with a 2**29-element stride lies 2**31 elements after its base.
    far = [_far_view(pool, page, stride) for pool in (k_pool, v_pool)]
    moved = replace(batch, block_tables=torch.full_like(batch.block_tables, 4))
    assert torch.equal(paged_attention(q, *far, moved, PLAIN)[0], expected)


def _far_view(pool: Tensor, page: int, stride: int) -> Tensor:
    """A pool of 5 huge-stride pages, lazily allocated, whose page 4 holds `pool[page]`."""
    room = torch.empty(4 * stride + pool[page].numel(), dtype=pool.dtype, device=pool.device)
    room[4 * stride :] = pool[page].flatten()
    return room.as_strided((5, *pool.shape[1:]), (stride, *pool.stride()[1:]))


def test_the_split_follows_host_bounds_only(device: str) -> None:
    """Small launches split finer, one-chunk contexts not at all; device lengths play no part."""
    tiles = PagedTiles(64, 32, min_programs=128)
    lens = torch.zeros(64, dtype=torch.int32, device="meta")
    tables = torch.zeros(64, 512, dtype=torch.int32, device="meta")

    def chosen(num_seqs: int, max_context_len: int) -> Split:
        batch = PagedBatch(lens, lens[:num_seqs], tables[:num_seqs], 5, max_context_len)
        return choose_split(batch, 8, tiles)

    assert chosen(64, 8192) is Split.CHUNK
    assert chosen(64, 1000) is Split.SEQUENCE
    assert chosen(8, 8192) is Split.CHUNK
    assert chosen(1, 4096) is Split.LEAF
    assert chosen(1, 200) is Split.SEQUENCE


@pytest.mark.parametrize(
    ("head_dim", "described"), [(8, False), (16, True), (48, False), (64, True), (128, True)]
)
def test_bulk_copies_are_of_heads_that_a_tile_does_not_pad(head_dim: int, described: bool) -> None:
    """A copy of 8 columns does not compile for a tile of 16; layouts that the launch does not ask
    bulk copies for, and tiles that pages do not hold whole, have none either."""
    tiles = PagedTiles(32, 16, descriptors=True)
    pools = [torch.zeros(3, 2, 64, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    found = _page_descriptors(*pools, tiles)
    assert (found is not None) == described
    for each, pool in zip(found or (), pools, strict=described):
        assert each.base is pool
        assert each.block_shape == [1, 1, 32, head_dim]
    assert _page_descriptors(*pools, replace(tiles, descriptors=False)) is None
    assert _page_descriptors(*pools, replace(tiles, tile=128)) is None


def test_inputs_that_do_not_fit_are_refused(device: str) -> None:
    """Too many queries for verify, odd page sizes, dtypes and shapes raise ValueError."""
    pages = Pages([20], 64, device=device)
    q, pools = pages.queries([9], 4).to(device), pages.pools()
    with pytest.raises(ValueError, match="paged_prefill"):
        paged_attention(q, *pools, pages.batch([9]), PLAIN)
    with pytest.raises(ValueError, match="page size"):
        paged_prefill(q, pools[0][:, :, :48], pools[1][:, :, :48], pages.batch([9]), PLAIN)
    with pytest.raises(ValueError, match="dtypes"):
        paged_prefill(q.half(), *pools, pages.batch([9]), PLAIN)
    with pytest.raises(ValueError, match="fit"):
        paged_prefill(q[:, :3], *pools, pages.batch([9]), PLAIN)


def test_the_op_is_registered_for_compile(device: str) -> None:
    """torch.library.opcheck passes on schema and fake tensors, so compile sees one node."""
    pages = Pages([20], 64, device=device)
    batch = pages.batch([2])
    torch.library.opcheck(
        torch.ops.specmesh.paged_attention.default,
        (pages.queries([2], 4).to(device), *(torch.nan_to_num(p) for p in pages.pools()),
         batch.cu_seqlens_q, batch.context_lens, batch.block_tables, 2, 20, None, 0.0, None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 is wrong in the interpreter")
@pytest.mark.parametrize("window", [None, 3000])
def test_bfloat16_verify_at_serving_shape(device: str, window: int | None) -> None:
    """bfloat16, 32/8 heads of 128: accurate, and verify has the bits of decodes over all splits."""
    lens = [8192, 4097, 1029, 260, 7]
    pages = Pages(lens, 64, kv_heads=8, dim=128, dtype=torch.bfloat16, device=device)
    query_lens = [5] * 5
    q = pages.queries(query_lens, 32)
    options = AttentionOptions(window=window)
    check(pages, q, query_lens, options)
    verified, _ = paged_attention(q.to(device), *pages.pools(), pages.batch(query_lens), options)
    rows = q.to(device).view(5, 5, 32, 128)
    for step in range(5):
        batch = pages.batch([1] * 5, [length - 4 + step for length in lens])
        for split in Split:
            out, _ = launch(
                rows[:, step].contiguous(), *pages.pools(), batch, options, split, TILES
            )
            assert torch.equal(out, verified.view(5, 5, 32, 128)[:, step])
