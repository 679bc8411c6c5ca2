"""Where one side of a session stands: confirmed tokens, valid K/V, reserved pages, epoch, digest.

Pure: no torch, no sockets, no clock. The coordinator keeps one ledger per side, the service keeps
its own, and the digest tells when they disagree. Token ranges of a round that started at confirmed
length c with k candidates of which j were accepted (then one recovered or bonus token):

    index    0 ............ c-1 | c ... c+j-1 |  c+j  | c+j+1 ... c+k-1
             prompt and output  | accepted    | drawn | rejected, K/V never read again
    target   fed up to c+k        valid K/V [0, c+j)        = confirmed - 1, always
    draft    fed up to c+k-1      valid K/V [0, min(c+j, c+k-1))
                                  = confirmed - 1 after a rejection, confirmed - 2 after none

Invariants, checked after every transition: kv_len <= confirmed_len <= max_len between rounds and
kv_len <= allocated_len. Truncation only moves lengths. A failed transition changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specmesh.errors import ContextTooLong, InvalidRequest, PrefixMismatch, StaleRound

EMPTY_DIGEST = 0x9E3779B97F4A7C15  # any odd constant; the golden ratio, as in splitmix64
_MASK = (1 << 64) - 1


def extend_digest(digest: int, tokens: Iterable[int]) -> int:
    """Chain tokens into a 64-bit digest, a splitmix64 step each (Steele et al., OOPSLA'14)."""
    return [digest, *_digests(digest, tokens)][-1]


def _digests(digest: int, tokens: Iterable[int]) -> list[int]:
    """The digest after each token."""
    found = []
    for token in tokens:
        mixed = (digest + EMPTY_DIGEST * (token + 1)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        digest = mixed ^ (mixed >> 31)
        found.append(digest)
    return found


@dataclass(frozen=True, slots=True)
class Boundaries:
    """A side's lengths at one instant, in tokens."""

    confirmed_len: int
    kv_len: int
    allocated_len: int


@dataclass(slots=True)
class Ledger:
    """One side of one session.

    tokens: the confirmed prefix. num_pending: candidates proposed or verified past the confirmed
    prefix in the round in flight (their K/V may be written, none is valid yet). prompt_len: tokens
    [0, prompt_len) are the prompt. max_len: the session never exceeds it.
    """

    prompt_len: int
    max_len: int
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    kv_len: int = 0
    allocated_len: int = 0
    num_pending: int = 0
    _written_len: int = 0
    _preempted: bool = False
    # Of the prefixes of 0, 1, 2, .. tokens, as far as they were asked for.
    _digests: list[int] = field(default_factory=lambda: [EMPTY_DIGEST], compare=False)

    @property
    def confirmed_len(self) -> int:
        """Tokens decided so far, prompt included."""
        return len(self.tokens)

    @property
    def written_len(self) -> int:
        """Positions whose K/V has been written, valid or not."""
        return self._written_len

    @property
    def boundaries(self) -> Boundaries:
        """The three lengths, frozen."""
        return Boundaries(self.confirmed_len, self.kv_len, self.allocated_len)

    def digest(self, prefix_len: int | None = None) -> int:
        """Digest of tokens [0, prefix_len), by default of the whole confirmed prefix."""
        return self._known_digests()[self.confirmed_len if prefix_len is None else prefix_len]

    def _known_digests(self) -> list[int]:
        """Digests of all prefixes. Chained when asked for: tokens come where time is short."""
        digests = self._digests
        if len(digests) <= len(self.tokens):
            digests += _digests(digests[-1], self.tokens[len(digests) - 1 :])
        return digests

    def page_digests(self, page_size: int) -> tuple[tuple[int, int], ...]:
        """(prefix_len, digest) at every full page boundary, ascending, then at the very end."""
        ends = [*range(page_size, self.confirmed_len + 1, page_size)]
        if self.confirmed_len and (not ends or ends[-1] != self.confirmed_len):
            ends.append(self.confirmed_len)
        return tuple((end, self.digest(end)) for end in ends)

    def check_update(
        self,
        *,
        base_len: int,
        append_from: int,
        append: Sequence[int],
        num_accepted: int,
        digest: int,
        resync: bool,
    ) -> None:
        """Raise unless `apply_update` with the same arguments would succeed. Changes nothing.

        Raises InvalidRequest (lengths that contradict each other), ContextTooLong or PrefixMismatch
        (a gap, a start inside the confirmed prefix without resync, or other tokens).
        """
        if base_len != append_from + len(append):
            raise InvalidRequest(
                f"base_len {base_len} is not append_from {append_from} + {len(append)} tokens",
                field="prefix.base_len",
            )
        if base_len > self.max_len:
            raise ContextTooLong(
                f"base_len {base_len} exceeds the session's max_len {self.max_len}"
            )
        if num_accepted > self.num_pending:
            raise InvalidRequest(
                f"num_accepted {num_accepted} exceeds the {self.num_pending} pending candidates",
                field="prefix.num_accepted",
            )
        if append_from > self.confirmed_len:
            raise self._mismatch(f"append_from {append_from} is past the prefix", digest)
        if append_from < self.confirmed_len and not resync:
            raise self._mismatch(
                f"append_from {append_from} is inside the confirmed prefix", digest
            )
        if append_from == self.confirmed_len and num_accepted > len(append):
            raise InvalidRequest(
                f"num_accepted {num_accepted} exceeds the {len(append)} appended tokens",
                field="prefix.num_accepted",
            )
        found = extend_digest(self.digest(append_from), append)
        if found != digest:
            raise self._mismatch(f"digest {found:#018x} at length {base_len}", digest)

    def apply_update(
        self,
        *,
        base_len: int,
        append_from: int,
        append: Sequence[int],
        num_accepted: int,
        digest: int,
        resync: bool,
    ) -> None:
        """Bring the confirmed prefix to base_len and move the K/V boundary. Raises as the check.

        With c the old confirmed length, the K/V of candidates [c, c + num_accepted) becomes valid
        where it was written; everything past it is dropped. A resync truncates first.
        """
        self.check_update(
            base_len=base_len,
            append_from=append_from,
            append=append,
            num_accepted=num_accepted,
            digest=digest,
            resync=resync,
        )
        if append_from < self.confirmed_len:
            self.truncate(append_from)
        else:
            self.settle(num_accepted)
        self.extend(append)

    def settle(self, num_accepted: int) -> None:
        """End the round in flight: K/V of accepted candidates is valid, of the others dropped."""
        assert num_accepted <= self.num_pending
        self.kv_len = max(self.kv_len, min(self._written_len, self.confirmed_len + num_accepted))
        self._written_len = self.kv_len
        self.num_pending = 0
        self._preempted = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Confirm tokens. No K/V is written by this."""
        if self.confirmed_len + len(tokens) > self.max_len:
            raise ContextTooLong(
                f"{self.confirmed_len} + {len(tokens)} tokens exceed max_len {self.max_len}"
            )
        self.tokens.extend(tokens)

    def truncate(self, prefix_len: int) -> None:
        """Forget confirmed tokens from prefix_len on. Only a resync may ask for it."""
        if not 0 <= prefix_len <= self.confirmed_len:
            raise InvalidRequest(f"cannot truncate {self.confirmed_len} tokens to {prefix_len}")
        del self.tokens[prefix_len:]
        del self._digests[prefix_len + 1 :]
        self.kv_len = min(self.kv_len, prefix_len)
        self._written_len = self.kv_len
        self.num_pending = 0
        self._preempted = False

    def begin_round(self, num_candidates: int) -> None:
        """Open a round past the confirmed prefix with this many candidates.

        A round that preemption interrupted is opened again.
        """
        assert not self.num_pending or self._preempted, "a round is in flight"
        self.num_pending = num_candidates
        self._preempted = False

    def wrote(self, written_len: int) -> None:
        """K/V of positions [0, written_len) is written; what is confirmed of it is valid."""
        assert written_len <= self.confirmed_len + self.num_pending
        assert written_len <= self.allocated_len
        self._written_len = max(self._written_len, written_len)
        self.kv_len = max(self.kv_len, min(written_len, self.confirmed_len))

    def drop_kv(self, kv_len: int = 0) -> None:
        """Preemption: the K/V from kv_len on is gone, the confirmed prefix stays.

        Candidates stay pending: their outcome may still be told, though no K/V of theirs is left.
        """
        self.kv_len = min(self.kv_len, kv_len)
        self._written_len = self.kv_len
        self.allocated_len = 0 if kv_len == 0 else self.allocated_len
        self._preempted = True

    def advance_epoch(self, epoch: int) -> None:
        """Enter a newer epoch. Raises StaleRound when it is not newer."""
        if epoch <= self.epoch:
            raise StaleRound(f"epoch {epoch} is not past {self.epoch}")
        self.epoch = epoch

    def check(self) -> None:
        """Assert the invariants of DESIGN section 4."""
        assert self.kv_len <= self.confirmed_len <= self.max_len, self.boundaries
        assert self.kv_len <= self._written_len <= self.allocated_len, self.boundaries
        assert len(self._digests) <= self.confirmed_len + 1

    def _mismatch(self, found: str, digest: int) -> PrefixMismatch:
        return PrefixMismatch(
            f"epoch {self.epoch}: {found} (confirmed {self.confirmed_len}, expected digest "
            f"{digest:#018x})",
            confirmed_len=self.confirmed_len,
        )
