"""Which page belongs to whom: reference counts, prefix reuse, eviction, copy on write.

Owns page *ids* only. Must not know tensors, sessions or sequences: `kv_cache.py` owns the memory,
`sessions.py` the block tables. A page is in exactly one state:

    free       no references, content meaningless                (the free list)
    cached     no references, published: found by its prefix     (evicted least recently used first)
    used       referenced by one or more block tables, published or not

A published page holds confirmed tokens only and is immutable. Not thread-safe: the engine's one
worker owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specmesh.errors import OutOfPages
from specmesh.ledger import EMPTY_DIGEST, extend_digest

ROOT = 0  # the serial of the empty prefix
UNPUBLISHED = -1  # of a prefix that lookups do not find


@dataclass(frozen=True, slots=True)
class _Published:
    """A full page that lookups may find. serial is unique for ever, and above ROOT."""

    page: int
    digest: int
    tokens: tuple[int, ...]
    serial: int
    parent_serial: int


class BlockPool:
    """Pages [0, num_pages) of page_size tokens each."""

    def __init__(self, num_pages: int, page_size: int = 64) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need pages and tokens, got {num_pages} pages of {page_size} tokens")
        self.num_pages = num_pages
        self.page_size = page_size
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the lowest page goes first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._by_page: dict[int, _Published] = {}
        self._by_digest: dict[int, _Published] = {}
        self._serials: set[int] = {ROOT}  # of what lookups may find
        self._last_serial = ROOT

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now: free ones and cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """Unreferenced pages kept for prefix reuse."""
        return len(self._evictable)

    def ref_count(self, page: int) -> int:
        """Block tables that hold the page."""
        return self._ref_counts[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that num_tokens tokens occupy."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages with one reference each, evicting cached ones where free ones run out.

        Raises OutOfPages, and changes nothing, when fewer than num_pages can be had.
        """
        if num_pages > self.num_free:
            raise OutOfPages(
                f"need {num_pages} pages of {self.page_size} tokens, {self.num_free} of "
                f"{self.num_pages} are free"
            )
        pages = []
        for _ in range(num_pages):
            page = self._free.pop() if self._free else self._evict()
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def retain(self, page: int) -> None:
        """Add a reference to a page that is used or cached."""
        assert self._ref_counts[page] or page in self._evictable, f"page {page} is free"
        self._ref_counts[page] += 1
        self._evictable.pop(page, None)

    def release(self, page: int) -> None:
        """Drop a reference. The last one frees the page, or keeps it cached if it is published."""
        assert self._ref_counts[page] > 0, f"page {page} is released more often than retained"
        self._ref_counts[page] -= 1
        if self._ref_counts[page]:
            return
        if page in self._by_page:
            self._evictable[page] = None
        else:
            self._free.append(page)

    def release_all(self, pages: Iterable[int]) -> None:
        """Release a block table, last page first, so that prefixes outlive what follows them."""
        for page in reversed(list(pages)):
            self.release(page)

    def publish(self, page: int, digest: int, parent_serial: int, tokens: Sequence[int]) -> int:
        """Let lookups find a full page of confirmed tokens whose K/V is written.

        digest: the ledger's at the page's end. parent_serial: what publishing the page before it
        returned (ROOT for the first page). tokens: the page's own. Returns the serial of the page
        that stands for this prefix from now on, this one or another that did already; UNPUBLISHED,
        changing nothing, where the prefix before it is not published, or a page of another prefix
        with the same digest is. Idempotent for the same page.

        Prefixes are told apart by their tokens: whoever may choose tokens can find two prefixes of
        one digest, and what is computed behind the one must not be found behind the other.
        """
        assert len(tokens) == self.page_size, "only full pages are published"
        assert self._ref_counts[page] > 0, f"page {page} is not in use"
        if parent_serial not in self._serials:
            return UNPUBLISHED
        own = tuple(tokens)
        known = self._by_page.get(page) or self._by_digest.get(digest)
        if known is not None:
            stands = (known.digest, known.parent_serial, known.tokens) == (
                digest,
                parent_serial,
                own,
            )
            return known.serial if stands else UNPUBLISHED
        self._last_serial += 1
        entry = _Published(page, digest, own, self._last_serial, parent_serial)
        self._by_page[page] = entry
        self._by_digest[digest] = entry
        self._serials.add(entry.serial)
        return entry.serial

    def serial_of(self, page: int) -> int:
        """The serial of a published page; UNPUBLISHED for any other."""
        entry = self._by_page.get(page)
        return UNPUBLISHED if entry is None else entry.serial

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """Find and retain the pages of the longest published prefix of tokens.

        Compares tokens, not digests alone, and follows parents, so a digest collision cannot hand
        out another prompt's K/V. The caller passes tokens without the last one where it needs that
        one's logits: only what is fed has any.
        """
        pages = []
        digest, parent_serial = EMPTY_DIGEST, ROOT
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            own = tuple(tokens[start : start + self.page_size])
            digest = extend_digest(digest, own)
            entry = self._by_digest.get(digest)
            if entry is None or entry.parent_serial != parent_serial or entry.tokens != own:
                break
            self.retain(entry.page)
            pages.append(entry.page)
            parent_serial = entry.serial
        return pages

    def is_shared(self, page: int) -> bool:
        """Whether writing to the page could change what someone else reads."""
        return self._ref_counts[page] > 1 or page in self._by_page

    def copy_on_write(self, page: int) -> int:
        """Exchange the caller's reference for a page that it may write.

        Returns the same page where nobody else can read it. Otherwise allocates one, releases the
        old and returns the new id; the caller copies the content before anything else is
        allocated (`KVCache.copy_pages`). Raises OutOfPages and changes nothing.
        """
        if not self.is_shared(page):
            return page
        (fresh,) = self.allocate(1)
        self.release(page)
        return fresh

    def forget_cached(self) -> int:
        """Free every cached page. Returns how many there were."""
        count = len(self._evictable)
        self._free.extend(self._evict() for _ in range(count))
        return count

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one state and that the indexes agree."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert not free & evictable, "a page is both free and cached"
        for page, count in enumerate(self._ref_counts):
            assert count >= 0
            assert (count == 0) == (page in free or page in evictable), f"page {page}: {count}"
        assert evictable <= set(self._by_page), "a cached page nobody can find"
        assert not free & set(self._by_page), "a free page that lookups find"
        assert set(self._by_digest.values()) == set(self._by_page.values())
        assert self._serials == {ROOT, *(entry.serial for entry in self._by_page.values())}
        for page, entry in self._by_page.items():
            assert entry.page == page
            assert self._by_digest[entry.digest] is entry
            assert ROOT <= entry.parent_serial < entry.serial <= self._last_serial

    def _evict(self) -> int:
        """Unpublish the page that was released longest ago. What follows it ages out as well."""
        page, _ = self._evictable.popitem(last=False)
        entry = self._by_page.pop(page)
        del self._by_digest[entry.digest]
        self._serials.remove(entry.serial)
        return page
