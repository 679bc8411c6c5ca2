"""What the coordinator believes about the target's side of a session, and the commands that follow.

Owns epochs, command numbers and boundaries: which tokens the replica has confirmed, which
candidates it still holds unsettled, what its next `Prefix` must say. When a command is sent is
decided in `coordinator/protocol.py`; the draft's side is in `coordinator/drafting.py`. The table
of boundaries is in `specmesh/ledger.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.commands import Open, Prefix, Rows, Verify
from specmesh.ledger import Ledger


@dataclass(slots=True)
class TargetSide:
    """The target's side. confirmed_len: tokens the replica has confirmed in this epoch.

    num_accepted: outcome of its pending candidates that the next command must settle (coordinator
    placement only; a target that decides settles its own). rounds grow over all epochs. in_flight:
    unanswered, or answered in part.
    max_num_draft_tokens: most candidates that the replica judges at once.
    """

    max_num_draft_tokens: int
    epoch: int = 0
    round: int = -1
    replica: str | None = None
    device_id: str = ""
    opened: bool = False
    confirmed_len: int = 0
    num_accepted: int = 0
    in_flight: Verify | None = None
    num_repeats: int = 0
    num_resyncs: int = 0
    num_moves: int = 0  # replacements and reopenings since the last commit

    def verify(
        self, ledger: Ledger, candidates: Sequence[int], rows: Rows, *, num_steps: int, audit: bool
    ) -> tuple[Open | Verify, ...]:
        """The next command, with an Open before it where the epoch has none yet."""
        self.round += 1
        command = Verify(
            epoch=self.epoch,
            round=self.round,
            prefix=prefix_of(ledger, self.confirmed_len, self.num_accepted),
            candidates=tuple(candidates),
            rows=rows,
            num_steps=num_steps,
            audit=audit,
        )
        self.in_flight = command
        if self.opened:
            return (command,)
        self.opened = True
        return (Open(self.epoch, self.round, ledger.max_len), command)

    def resync(self, ledger: Ledger, shared_len: int) -> Verify:
        """What is left of the command in flight, its append starting at the last equal boundary."""
        assert self.in_flight is not None
        num_taken = len(self.taken(ledger))
        self.round += 1
        self.num_resyncs += 1
        self.in_flight = Verify(
            epoch=self.epoch,
            round=self.round,
            prefix=prefix_of(ledger, shared_len, 0, resync=True),
            candidates=self.in_flight.candidates,
            rows=self.in_flight.rows,
            num_steps=self.in_flight.num_steps - num_taken,
            audit=self.in_flight.audit,
        )
        return self.in_flight

    def taken(self, ledger: Ledger) -> tuple[int, ...]:
        """Tokens that parts of the answer to the command in flight have brought already."""
        assert self.in_flight is not None
        return tuple(ledger.tokens[self.in_flight.prefix.base_len :])

    def leave(self) -> None:
        """Enter a new epoch without a session: nothing of the old one counts any more."""
        self.epoch += 1
        self.replica = None
        self.reopen_state()

    def reopen(self) -> None:
        """Enter a new epoch on the same replica."""
        self.epoch += 1
        self.reopen_state()

    def reopen_state(self) -> None:
        """Forget what the old epoch's session held."""
        self.opened = False
        self.confirmed_len = 0
        self.num_accepted = 0
        self.in_flight = None
        self.num_repeats = 0
        self.num_resyncs = 0


def last_equal(ledger: Ledger, page_digests: Sequence[tuple[int, int]], base_len: int) -> int:
    """Length of the longest reported prefix, at most base_len, that equals the coordinator's."""
    equal = (
        length
        for length, digest in page_digests
        if 0 < length <= base_len and ledger.digest(length) == digest
    )
    return max(equal, default=0)


def prefix_of(
    ledger: Ledger,
    append_from: int,
    num_accepted: int,
    *,
    resync: bool = False,
    base_len: int | None = None,
) -> Prefix:
    """What a service at append_from must be told to stand at base_len (default: all confirmed)."""
    base = ledger.confirmed_len if base_len is None else base_len
    return Prefix(
        base_len=base,
        append_from=append_from,
        append=tuple(ledger.tokens[append_from:base]),
        num_accepted=num_accepted,
        digest=ledger.digest(base),
        resync=resync,
    )
