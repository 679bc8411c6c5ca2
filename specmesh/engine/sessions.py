"""Sessions of one service: who opened them, where they stand, what they wait for.

Owns the session table, the idempotence of commands by (epoch, round) and the undo of a command that
failed. Must not know models, devices or transports; the clock is an argument. Not thread-safe: the
engine's worker owns every session (specmesh/engine/runner.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from protos.specmesh.v1 import session_pb2
from specmesh.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelMismatch,
    OutOfPages,
    RoundConflict,
    SessionExists,
    SessionNotFound,
    StaleRound,
    TooBusy,
)
from specmesh.ledger import Ledger
from specmesh.shaping import TokenShaper

# Commands of one session that may wait behind the one at work. A coordinator has one or two
# outstanding; more is a peer that does not wait for answers.
MAX_QUEUED_PER_SESSION = 8


class Link(Protocol):
    """The service end of one stream. `group` names the coordinator; sessions are scoped by it."""

    group: str

    @property
    def has_sent(self) -> bool:
        """Whether the transport has taken all that was posted. On the loop's thread only."""

    def post(self, results: list[Any]) -> None:
        """Send results, from any thread. Results for a link that has ended are dropped."""

    def post_end(self) -> None:
        """Nothing more will be posted: close the stream once everything is sent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service refuses at admission."""

    vocab_size: int
    vocab_hash: int
    max_context_len: int
    max_sessions: int
    total_pages: int
    page_size: int

    def pages_for(self, length: int) -> int:
        """Pages that hold this many tokens."""
        return -(-length // self.page_size)


@dataclass(slots=True)
class Request:
    """A Propose or Verify as it arrived. command: DraftCommand or TargetCommand."""

    link: Link
    command: Any
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a ledger stood before a command, enough to go back to it."""

    confirmed_len: int
    written_len: int
    num_pending: int
    kept_len: int
    tail: tuple[int, ...]

    @classmethod
    def take(cls, ledger: Ledger, append_from: int) -> Checkpoint:
        """Remember `ledger` before an update that may truncate it to append_from."""
        kept_len = min(append_from, ledger.confirmed_len)
        return cls(
            confirmed_len=ledger.confirmed_len,
            written_len=ledger.written_len,
            num_pending=ledger.num_pending,
            kept_len=kept_len,
            tail=tuple(ledger.tokens[kept_len:]),
        )

    def restore(self, ledger: Ledger, overwritten_from: int) -> None:
        """Undo the command. K/V from position overwritten_from on no longer is what it was."""
        ledger.truncate(self.kept_len)
        ledger.extend(self.tail)
        if self.num_pending:
            ledger.begin_round(self.num_pending)
        still_written = min(self.written_len, overwritten_from, ledger.allocated_len)
        ledger.wrote(still_written)


@dataclass(slots=True, eq=False)
class Session:
    """One session on this side. serial orders sessions by age; the newest is preempted first.

    block_table: page ids in order of position. published: serials of leading pages that were
    offered to the prefix cache (specmesh/engine/block_pool.py). task: the command at work
    (specmesh/engine/scheduler.py), None when idle. answered: the last command that was answered to
    its end, for repeats (its answers: specmesh/engine/answers.py).
    """

    link: Link
    session_id: str
    epoch: int
    serial: int
    opening: session_pb2.OpenSession
    shaper: TokenShaper
    ledger: Ledger
    last_used_ns: int
    block_table: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    queued: deque[Request] = field(default_factory=deque)
    task: Any = None
    answered: Any = None

    @property
    def seed(self) -> int:
        """Key of the session's random streams."""
        return self.opening.sampling.seed

    @property
    def is_coupled(self) -> bool:
        """Whether target and draft share their race noise."""
        return bool(self.opening.rule == session_pb2.DECISION_RULE_COUPLED)

    def find_repeat(self, request: Request) -> Any:
        """What answered the last round, where `request` repeats it; None where it is new.

        A repeat of a command that still waits or works gives the request itself: its answer follows
        without help. Raises StaleRound and RoundConflict.
        """
        command = request.command
        for other in self.unanswered():
            if other.command.round == command.round:
                self._check_same(other.command, command)
                return other
        newest = max((other.command.round for other in self.unanswered()), default=-1)
        if self.answered is not None:
            last = self.answered.command
            if command.round == last.round:
                self._check_same(last, command)
                return self.answered
            newest = max(newest, last.round)
        if command.round < newest:
            raise StaleRound(f"round {command.round} is behind round {newest}")
        return None

    def unanswered(self) -> Iterator[Request]:
        """Commands at work or waiting, oldest first."""
        if self.task is not None:
            yield self.task.request
        yield from self.queued

    def _check_same(self, known: Any, repeated: Any) -> None:
        kind = known.WhichOneof("command")
        same = repeated.WhichOneof("command") == kind
        if not same or getattr(known, kind) != getattr(repeated, kind):
            raise RoundConflict(f"round {repeated.round} was given before with other content")


class SessionTable:
    """Sessions by (link group, session id)."""

    def __init__(self, limits: Limits, clock_ns: Callable[[], int]) -> None:
        """clock_ns: a monotonic clock in nanoseconds."""
        self.limits = limits
        self._clock_ns = clock_ns
        self._sessions: dict[tuple[str, str], Session] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, link: Link, session_id: str) -> Session | None:
        """The session of this coordinator, or None."""
        return self._sessions.get((link.group, session_id))

    def find(self, link: Link, session_id: str, epoch: int) -> Session:
        """The session at this epoch. Raises SessionNotFound, or StaleRound for an older epoch."""
        session = self.get(link, session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id!r} on this link")
        if epoch < session.epoch:
            raise StaleRound(f"epoch {epoch} is behind epoch {session.epoch}")
        if epoch > session.epoch:
            raise SessionNotFound(
                f"epoch {epoch} was never opened; the session is at {session.epoch}"
            )
        session.last_used_ns = self._clock_ns()
        return session

    def is_repeated_open(self, link: Link, command: Any) -> bool:
        """Whether an identical session was opened and has run nothing since.

        Raises SessionExists when it is open at this epoch otherwise, StaleRound for an older epoch.
        """
        session = self.get(link, command.session_id)
        if session is None or command.epoch > session.epoch:
            return False
        if command.epoch < session.epoch:
            raise StaleRound(f"epoch {command.epoch} is behind epoch {session.epoch}")
        untouched = not (
            session.answered or session.task or session.queued or session.ledger.tokens
        )
        if untouched and session.opening == command.open:
            return True
        raise SessionExists(f"session {command.session_id!r} is open at epoch {command.epoch}")

    def check_open(self, link: Link, command: Any) -> TokenShaper:
        """Raise unless `add` may follow; changes nothing. Returns the session's shaper.

        Raises InvalidRequest, ModelMismatch, ContextTooLong, OutOfPages (it could never fit) or
        TooBusy (max_sessions are open).
        """
        opening: session_pb2.OpenSession = command.open
        limits = self.limits
        if not command.session_id:
            raise InvalidRequest("must not be empty", field="session_id")
        if opening.vocab_hash != limits.vocab_hash:
            raise ModelMismatch(
                f"vocabulary hash {opening.vocab_hash:#018x} is not this model's "
                f"{limits.vocab_hash:#018x}",
                field="vocab_hash",
            )
        if opening.rule not in (
            session_pb2.DECISION_RULE_RESIDUAL,
            session_pb2.DECISION_RULE_COUPLED,
        ):
            raise InvalidRequest(f"unknown decision rule {opening.rule}", field="rule")
        if opening.row_policy not in session_pb2.RowPolicy.values():
            raise InvalidRequest(f"unknown row policy {opening.row_policy}", field="row_policy")
        if not 1 <= opening.prompt_len <= opening.max_len:
            raise InvalidRequest(
                f"must be in [1, max_len {opening.max_len}], got {opening.prompt_len}",
                field="prompt_len",
            )
        if opening.max_len > limits.max_context_len:
            raise ContextTooLong(
                f"max_len {opening.max_len} exceeds the model's {limits.max_context_len}",
                field="max_len",
            )
        if limits.pages_for(opening.max_len) > limits.total_pages:
            raise OutOfPages(
                f"{opening.max_len} tokens need {limits.pages_for(opening.max_len)} pages, the "
                f"pool has {limits.total_pages}",
                field="max_len",
            )
        replaces = self.get(link, command.session_id) is not None
        if len(self._sessions) - replaces >= limits.max_sessions:
            raise TooBusy(f"{limits.max_sessions} sessions are open", retry_after_s=1.0)
        return TokenShaper(opening.sampling, limits.vocab_size, opening.prompt_len)

    def add(self, link: Link, command: Any, shaper: TokenShaper) -> Session:
        """Enter a session that `check_open` allowed. One of a lower epoch must be removed first."""
        key = (link.group, command.session_id)
        assert key not in self._sessions, key
        session = Session(
            link=link,
            session_id=command.session_id,
            epoch=command.epoch,
            serial=self._next_serial,
            opening=command.open,
            shaper=shaper,
            ledger=Ledger(
                prompt_len=command.open.prompt_len,
                max_len=command.open.max_len,
                epoch=command.epoch,
            ),
            last_used_ns=self._clock_ns(),
        )
        self._next_serial += 1
        self._sessions[key] = session
        return session

    def remove(self, session: Session) -> None:
        """Forget a session. Its pages and its task are the scheduler's to free."""
        del self._sessions[session.link.group, session.session_id]

    def of_link(self, link: Link) -> list[Session]:
        """Sessions that end with this link: those it opened."""
        return [session for session in self if session.link is link]

    def awaits_answer(self, link: Link) -> bool:
        """Whether a command that came over this link is still unanswered."""
        return any(request.link is link for session in self for request in session.unanswered())

    def expired(self, idle_ns: int) -> list[Session]:
        """Sessions without a command for longer than idle_ns."""
        now = self._clock_ns()
        return [
            session
            for session in self
            if session.task is None and not session.queued and now - session.last_used_ns > idle_ns
        ]
