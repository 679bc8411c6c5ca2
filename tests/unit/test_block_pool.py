"""The block pool keeps every page in one state, whatever the order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specmesh.engine.block_pool import ROOT, UNPUBLISHED, BlockPool
from specmesh.errors import OutOfPages
from specmesh.ledger import EMPTY_DIGEST, extend_digest

PAGE = 4


def publish_all(pool: BlockPool, tokens: list[int], pages: list[int]) -> list[int]:
    """Publish every full page of tokens, first to last; the serials that stand for them."""
    serials, digest = [ROOT], EMPTY_DIGEST
    for i in range(len(tokens) // pool.page_size):
        own = tokens[i * pool.page_size : (i + 1) * pool.page_size]
        digest = extend_digest(digest, own)
        serials.append(pool.publish(pages[i], digest, serials[-1], own))
    return serials[1:]


def with_digest_of(tokens: list[int], *others: int) -> list[int]:
    """`others` and one more, chosen so that the digest is that of `tokens`.

    A single id of 64 bits; a search among prompts of real ids finds as much, with more work.
    """
    behind, mask = extend_digest(EMPTY_DIGEST, tokens[:-1]), (1 << 64) - 1
    before_mixing = behind + EMPTY_DIGEST * (tokens[-1] + 1)
    missing = before_mixing - extend_digest(EMPTY_DIGEST, others)
    found = [*others, (missing * pow(EMPTY_DIGEST, -1, 1 << 64) - 1) & mask]
    assert extend_digest(EMPTY_DIGEST, found) == extend_digest(EMPTY_DIGEST, tokens)
    return found


def test_allocate_hands_out_distinct_pages_and_fails_whole() -> None:
    """A request for too many pages raises and takes none."""
    pool = BlockPool(4, PAGE)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    with pytest.raises(OutOfPages, match="need 2 pages of 4 tokens, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.release_all(pages)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (4, 0, 0)
    pool.check_integrity()


def test_pages_for_rounds_up() -> None:
    """A partial page counts as one, no tokens as none."""
    pool = BlockPool(4, PAGE)
    assert [pool.pages_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_lookup_returns_the_longest_published_prefix_and_retains_it() -> None:
    """Only full equal pages from the beginning are found, and their references counted."""
    pool = BlockPool(8, PAGE)
    tokens = list(range(11))
    pages = pool.allocate(3)
    assert publish_all(pool, tokens, pages) == [1, 2]
    assert pool.lookup([*range(8), 99]) == pages[:2]
    assert pool.lookup([0, 1, 2, 3, 4, 5, 6, 99]) == pages[:1]
    assert pool.lookup([99, 1, 2, 3, 4, 5, 6, 7]) == []
    assert pool.lookup([0, 1, 2]) == []
    assert [pool.ref_count(page) for page in pages] == [3, 2, 1]
    pool.check_integrity()


def test_published_pages_survive_their_last_reference() -> None:
    """Released published pages are found again; released unpublished ones are free."""
    pool = BlockPool(3, PAGE)
    pages = pool.allocate(3)
    publish_all(pool, list(range(8)), pages)
    pool.release_all(pages)
    assert (pool.num_free, pool.num_cached) == (3, 2)
    assert pool.lookup(list(range(8))) == pages[:2]
    assert pool.num_used == 2
    pool.check_integrity()


def test_eviction_takes_the_page_released_longest_ago() -> None:
    """A prefix used recently outlives one that was not, and later pages go before their prefix."""
    pool = BlockPool(4, PAGE)
    old, new = list(range(8)), list(range(100, 108))
    old_pages, new_pages = pool.allocate(2), pool.allocate(2)
    publish_all(pool, old, old_pages)
    publish_all(pool, new, new_pages)
    pool.release_all(old_pages)
    pool.release_all(new_pages)
    assert pool.allocate(1) == [old_pages[1]]
    assert pool.lookup(old) == [old_pages[0]]
    assert pool.lookup(new) == new_pages
    pool.check_integrity()


def test_forget_cached_frees_all_and_finds_nothing() -> None:
    """Dropping the prefix cache returns every unreferenced page."""
    pool = BlockPool(3, PAGE)
    pages = pool.allocate(2)
    publish_all(pool, list(range(8)), pages)
    pool.release_all(pages)
    assert pool.forget_cached() == 2
    assert (pool.num_cached, pool.num_free, pool.lookup(list(range(8)))) == (0, 3, [])
    pool.check_integrity()


def test_publish_refuses_a_second_page_for_a_prefix_and_orphans() -> None:
    """One page stands for a prefix, and a page whose prefix is not published cannot be."""
    pool = BlockPool(4, PAGE)
    first, second = pool.allocate(2), pool.allocate(2)
    tokens = list(range(8))
    serials = publish_all(pool, tokens, first)
    assert serials == [pool.serial_of(page) for page in first]
    assert publish_all(pool, tokens, second) == serials
    assert publish_all(pool, tokens, first) == serials
    assert [pool.serial_of(page) for page in second] == [UNPUBLISHED] * 2
    orphan_digest = extend_digest(EMPTY_DIGEST, [50, 51, 52, 53, 1, 2, 3, 4])
    for parent_serial in (UNPUBLISHED, max(serials) + 1):
        assert pool.publish(second[1], orphan_digest, parent_serial, [1, 2, 3, 4]) == UNPUBLISHED
    pool.check_integrity()


def test_a_page_whose_prefix_was_evicted_is_not_found_under_another() -> None:
    """A page stays bound to the very page before it, even if an equal prefix is published anew."""
    pool = BlockPool(3, PAGE)
    tokens = list(range(8))
    pages = pool.allocate(2)
    publish_all(pool, tokens, pages)
    pool.release(pages[0])  # released first, so evicted first
    pool.release(pages[1])
    taken = pool.allocate(2)
    assert pages[0] in taken
    assert pages[1] not in taken
    publish_all(pool, tokens[:4], taken)
    assert pool.lookup(tokens) == taken[:1]
    pool.check_integrity()


def test_lookup_compares_tokens_behind_equal_digests() -> None:
    """A colliding digest never hands out another prompt's page."""
    pool = BlockPool(2, PAGE)
    (page,) = pool.allocate(1)
    digest = extend_digest(EMPTY_DIGEST, [1, 2, 3, 4])
    assert pool.publish(page, digest, ROOT, [9, 9, 9, 9]) > ROOT
    assert pool.lookup([1, 2, 3, 4]) == []
    assert pool.ref_count(page) == 1


def test_a_page_behind_a_colliding_prefix_is_not_found_behind_another() -> None:
    """A prompt made to have another's digest publishes nothing behind it: K/V that was computed
    behind other tokens would be read by whoever sends the first prompt."""
    pool = BlockPool(4, PAGE)
    prompt, more = [1, 2, 3, 4], [5, 6, 7, 8]
    other = with_digest_of(prompt, 9, 9, 9)
    honest, hostile = pool.allocate(1), pool.allocate(2)
    publish_all(pool, prompt, honest)
    assert publish_all(pool, [*other, *more], hostile) == [UNPUBLISHED] * 2
    assert pool.lookup([*prompt, *more]) == honest
    pool.check_integrity()


def test_copy_on_write_keeps_private_pages_and_replaces_shared_ones() -> None:
    """Only a page that someone else could read is exchanged."""
    pool = BlockPool(3, PAGE)
    private, published = pool.allocate(2)
    publish_all(pool, [1, 2, 3, 4], [published])
    assert not pool.is_shared(private)
    assert pool.copy_on_write(private) == private
    assert pool.is_shared(published)
    fresh = pool.copy_on_write(published)
    assert fresh not in (private, published)
    assert (pool.ref_count(fresh), pool.ref_count(published)) == (1, 0)
    assert pool.lookup([1, 2, 3, 4]) == [published]
    with pytest.raises(OutOfPages):
        pool.copy_on_write(published)
    assert pool.ref_count(published) == 1
    pool.check_integrity()


def test_releasing_a_free_page_is_a_bug() -> None:
    """A double release is caught at once."""
    pool = BlockPool(2, PAGE)
    (page,) = pool.allocate(1)
    pool.release(page)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(page)
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(page)


class PoolMachine(RuleBasedStateMachine):
    """Sessions over a tiny alphabet, so that prefixes collide, against a model of who holds what.

    Pages hold "content" as the model sees it: the whole prefix that ends there. A lookup must only
    return pages whose content is the prefix asked for.
    """

    @initialize(num_pages=st.integers(1, 9))
    def start(self, num_pages: int) -> None:
        self.pool = BlockPool(num_pages, PAGE)
        self.sessions: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(blocks=st.lists(st.integers(0, 1), max_size=5), tail=st.integers(0, PAGE - 1))
    def open_session(self, blocks: list[int], tail: int) -> None:
        tokens = [token for block in blocks for token in [block] * PAGE] + [7] * tail
        found = self.pool.lookup(tokens)
        for i, page in enumerate(found):
            assert self.content[page] == tuple(tokens[: (i + 1) * PAGE])
        try:
            fresh = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(found))
        except OutOfPages:
            self.pool.release_all(found)
            return
        pages = found + fresh
        for i, page in enumerate(pages):
            if page in fresh:
                self.content[page] = tuple(tokens[: (i + 1) * PAGE])
        publish_all(self.pool, tokens, pages)
        self.sessions.append((tokens, pages))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sessions) - 1))
        _, pages = self.sessions.pop(index)
        self.pool.release_all(pages)

    @precondition(lambda self: any(pages for _, pages in self.sessions))
    @rule(data=st.data())
    def overwrite_last_page(self, data: st.DataObject) -> None:
        candidates = [i for i, (_, pages) in enumerate(self.sessions) if pages]
        index = data.draw(st.sampled_from(candidates))
        tokens, pages = self.sessions[index]
        try:
            page = self.pool.copy_on_write(pages[-1])
        except OutOfPages:
            return
        kept = tokens[: (len(pages) - 1) * PAGE]
        pages[-1] = page
        self.content[page] = (*kept, 9)
        self.sessions[index] = ([*kept, 9], pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()
        assert self.pool.num_cached == 0

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held: dict[int, int] = {}
        for tokens, pages in self.sessions:
            for i, page in enumerate(pages):
                held[page] = held.get(page, 0) + 1
                expected = tuple(tokens[: (i + 1) * PAGE])
                assert self.content[page] == expected, "someone wrote into another's page"
        assert held == {
            page: count
            for page in range(self.pool.num_pages)
            if (count := self.pool.ref_count(page))
        }


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
