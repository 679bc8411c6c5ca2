"""Which pages a session holds: reservation, prefix reuse, copy before write, publication, release.

Owns the block tables of sessions and `allocated_len` of their ledgers. Must not know torch: a copy
of a page is returned as a pair of ids for the runner to perform before the next forward pass. Who
loses pages when the pool is full is decided in specmesh/engine/scheduler.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specmesh.engine.block_pool import ROOT, BlockPool
from specmesh.engine.sessions import Session


class PageTables:
    """Pages of all sessions in one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.page_size = pool.page_size

    def attach_prefix(self, session: Session, max_len: int) -> int:
        """Give an empty session the cached pages of its confirmed prefix, at most max_len tokens.

        Returns how many tokens were found. Their K/V counts as written.
        """
        if session.block_table:
            return 0
        ledger = session.ledger
        limit = min(max_len, ledger.confirmed_len)
        session.block_table = self.pool.lookup(ledger.tokens[:limit])
        session.published = [self.pool.serial_of(page) for page in session.block_table]
        ledger.allocated_len = len(session.block_table) * self.page_size
        ledger.wrote(ledger.allocated_len)
        return ledger.allocated_len

    def num_missing(self, session: Session, length: int) -> int:
        """Pages that `reserve` would take from the pool."""
        grow = self.pool.pages_for(length) - len(session.block_table)
        return max(0, grow) + len(self._immutable(session, length))

    def reserve(self, session: Session, length: int) -> list[tuple[int, int]]:
        """Make positions [written_len, length) writable. Raises OutOfPages, changing nothing.

        Returns (source, copy) pairs of page ids: pages that are shared or published are replaced,
        and the one that holds valid K/V before written_len must be copied before the next write.
        """
        replaced = self._immutable(session, length)
        grow = max(0, self.pool.pages_for(length) - len(session.block_table))
        fresh = self.pool.allocate(len(replaced) + grow)
        copies = []
        written_len = session.ledger.written_len
        for index in replaced:
            page = session.block_table[index]
            session.block_table[index] = fresh.pop()
            if index * self.page_size < written_len:
                copies.append((page, session.block_table[index]))
            self.pool.release(page)
        session.block_table += fresh
        del session.published[written_len // self.page_size :]
        session.ledger.allocated_len = len(session.block_table) * self.page_size
        return copies

    def publish(self, session: Session) -> None:
        """Offer full pages of confirmed, valid K/V to the prefix cache."""
        ledger = session.ledger
        num_full = min(ledger.kv_len, ledger.confirmed_len) // self.page_size
        published = session.published
        for index in range(len(published), num_full):
            start, end = index * self.page_size, (index + 1) * self.page_size
            serial = self.pool.publish(
                session.block_table[index],
                ledger.digest(end),
                published[-1] if published else ROOT,
                ledger.tokens[start:end],
            )
            published.append(serial)

    def release(self, session: Session) -> None:
        """Give every page back. Published ones stay in the prefix cache until they are evicted."""
        self.pool.release_all(session.block_table)
        session.block_table = []
        session.published = []
        session.ledger.drop_kv()

    def num_freed(self, sessions: Iterable[Session]) -> int:
        """Pages that would come free if all these sessions gave theirs back: those that no other
        session holds as well."""
        held = Counter(page for session in sessions for page in session.block_table)
        return sum(self.pool.ref_count(page) == count for page, count in held.items())

    def private_pages(self, session: Session) -> list[int]:
        """Pages that nobody but this session can read."""
        return [page for page in session.block_table if not self.pool.is_shared(page)]

    def _immutable(self, session: Session, length: int) -> list[int]:
        """Indices of held pages that [written_len, length) would write into but must not."""
        first = session.ledger.written_len // self.page_size
        last = min(len(session.block_table), self.pool.pages_for(length))
        table = session.block_table
        return [index for index in range(first, last) if self.pool.is_shared(table[index])]
