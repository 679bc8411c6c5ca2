"""Fake services and a loopback that speak the protocol's commands as the contract says.

`FakeTarget` and `FakeDraft` keep sessions, ledgers and one stored answer each, and check from
outside what the protocol must guarantee: every K/V entry a "model pass" reads was computed from
exactly the tokens that precede it. The model is a deterministic function of the prefix, so the
undisturbed output is known (`expected_output`). A target that decodes plainly answers in parts, a
chain of passes each, and works on while the session takes them in. Nothing here knows the
protocol's states.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from coordinator.commands import (
    Ahead,
    Close,
    Closing,
    Command,
    Continuation,
    Deferred,
    Failed,
    Open,
    Opened,
    Outcome,
    Proposal,
    Propose,
    Verdict,
    Verify,
)
from coordinator.detokenizer import Detokenizer
from coordinator.messages import (
    Action,
    Audit,
    Begin,
    Decide,
    Decided,
    Deliver,
    DraftPlaced,
    DraftReply,
    Event,
    Fail,
    Finish,
    Lost,
    PeerViolation,
    PlaceDraft,
    PlaceTarget,
    RoundDone,
    Send,
    Side,
    StartTimer,
    StopTimer,
    TargetPlaced,
    TargetReply,
    TimerFired,
)
from coordinator.protocol import Session
from coordinator.session_plan import SessionPlan
from coordinator.stops import Output, StopRules
from specmesh.errors import PrefixMismatch, SpecmeshError, StaleRound
from specmesh.ledger import EMPTY_DIGEST, Ledger, extend_digest

VOCAB_SIZE = 97
PAGE_SIZE = 4
Reply = TargetReply | DraftReply


def next_token(prefix: Sequence[int]) -> int:
    """The target model: a function of the whole prefix."""
    return extend_digest(EMPTY_DIGEST, prefix) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The undisturbed continuation."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def agreeable(prefix: Sequence[int]) -> int:
    """A draft model that always agrees with the target."""
    return next_token(prefix)


def fickle(prefix: Sequence[int]) -> int:
    """A draft model that disagrees at about a third of the positions."""
    token = next_token(prefix)
    return token if extend_digest(7, prefix) % 3 else (token + 1) % VOCAB_SIZE


@dataclass
class FakeSession:
    """One session of a fake service. kv: digest of the tokens each position was computed from.

    last: the last command and its whole answer. at_work: a command that goes on, emitted: its
    tokens so far.
    """

    epoch: int
    ledger: Ledger
    kv: list[int] = field(default_factory=list)
    last: tuple[Command, Reply] | None = None
    at_work: Verify | None = None
    emitted: list[int] = field(default_factory=list)

    def feed(self, tokens: Sequence[int], written_len: int) -> None:
        """Write K/V for [kv_len, written_len) of `tokens`, then check all of it against them."""
        ledger = self.ledger
        del self.kv[ledger.kv_len :]
        for end in range(ledger.kv_len + 1, written_len + 1):
            self.kv.append(extend_digest(EMPTY_DIGEST, tokens[:end]))
        for end in (1, ledger.kv_len, written_len):  # a stale entry differs in its digest
            if 0 < end <= written_len:
                wanted = extend_digest(EMPTY_DIGEST, tokens[:end])
                assert self.kv[end - 1] == wanted, f"K/V of position {end - 1} is not this prefix's"
        ledger.wrote(written_len)


class FakeService(ABC):
    """What both sides share: sessions, idempotence, prefix updates, errors as replies."""

    side: Side

    def __init__(self, name: str, device_id: str = "", *, stop_ids: Iterable[int] = ()) -> None:
        self.name = name
        self.device_id = device_id or name
        self.stop_ids = frozenset(stop_ids)
        self.sessions: dict[str, FakeSession] = {}
        self.failures: deque[Failed] = deque()  # answered instead of the next working commands
        self.num_carried_out = 0

    def receive(self, session_id: str, command: Command) -> Reply | None:
        """Carry out one command and answer it; None for a repeat of one that is at work."""
        if isinstance(command, Verify | Propose) and self.failures:
            return self._reply(command, self.failures.popleft())
        try:
            return self._carry_out(session_id, command)
        except PrefixMismatch as error:
            session = self.sessions[session_id]
            digests = session.ledger.page_digests(PAGE_SIZE)
            confirmed = session.ledger.confirmed_len
            failed = Failed(error.reason, error.message, "", 0.0, confirmed, digests)
            return self._reply(command, failed)
        except SpecmeshError as error:
            return self._reply(command, Failed(error.reason, error.message, error.field))

    def lose_sessions(self) -> None:
        """The link ended, or the service restarted."""
        self.sessions.clear()

    def _carry_out(self, session_id: str, command: Command) -> Reply | None:
        session = self.sessions.get(session_id)
        if isinstance(command, Close):
            if session is not None and command.epoch >= session.epoch:
                del self.sessions[session_id]
            return self._reply(command, Opened())
        if isinstance(command, Open):
            if session is not None and command.epoch <= session.epoch:
                return self._reply(command, Failed("SESSION_EXISTS", "opened before"))
            ledger = Ledger(prompt_len=1, max_len=command.max_len, epoch=command.epoch)
            ledger.allocated_len = command.max_len + 16
            self.sessions[session_id] = FakeSession(command.epoch, ledger)
            return self._reply(command, Opened())
        if session is None or command.epoch > session.epoch:
            return self._reply(command, Failed("SESSION_NOT_FOUND", "no such session"))
        if command.epoch < session.epoch:
            raise StaleRound("an older epoch")
        if session.at_work is not None and command == session.at_work:
            return None
        if session.last is not None and command.round <= session.last[0].round:
            if command == session.last[0]:
                return session.last[1]
            reason = "ROUND_CONFLICT" if command.round == session.last[0].round else "STALE_ROUND"
            return self._reply(command, Failed(reason, "an older round"))
        assert session.at_work is None, "one command is out per side"
        prefix = command.prefix
        session.ledger.apply_update(
            base_len=prefix.base_len,
            append_from=prefix.append_from,
            append=prefix.append,
            num_accepted=prefix.num_accepted,
            digest=prefix.digest,
            resync=prefix.resync,
        )
        reply = self._work(session, command)
        session.ledger.check()
        if session.at_work is None and (session.last is None or session.last[0] is not command):
            session.last = (command, reply)
        self.num_carried_out += 1
        return reply

    @abstractmethod
    def _work(self, session: FakeSession, command: Verify | Propose) -> Reply:
        """Carry out a working command on a session whose prefix is up to date."""

    def _reply(self, command: Command, body: object) -> Reply:
        kind = TargetReply if self.side is Side.TARGET else DraftReply
        return kind(command.epoch, command.round, body)  # type: ignore[arg-type]  # bodies as given


class FakeDraft(FakeService):
    """Proposes with `model`. corrupt(proposal) may spoil what it sends.

    Where continuations are wanted it foresees every outcome, and drafts on with `ahead_model`, by
    default its own; spoil(ahead) may spoil them. Rows are stood for by the tokens drawn.
    """

    side = Side.DRAFT
    ahead_model: Callable[[Sequence[int]], int] | None = None
    spoil: Callable[[Ahead], Ahead] = staticmethod(lambda ahead: ahead)

    def __init__(
        self,
        name: str = "draft",
        device_id: str = "",
        model: Callable[[Sequence[int]], int] = fickle,
        corrupt: Callable[[Proposal], Proposal] = lambda proposal: proposal,
    ) -> None:
        super().__init__(name, device_id)
        self.model = model
        self.corrupt = corrupt
        self.max_len = 1 << 20
        self._wishes: deque[tuple[Propose, list[int], tuple[int, ...]]] = deque()

    def _work(self, session: FakeSession, command: Verify | Propose) -> Reply:
        assert isinstance(command, Propose)
        ledger, k = session.ledger, command.num_draft_tokens
        tokens = list(ledger.tokens)
        for _ in range(k):
            tokens.append(self.model(tokens))
        ledger.begin_round(k)
        session.feed(tokens, ledger.confirmed_len + max(0, k - 1))
        drafted = tuple(tokens[ledger.confirmed_len :])
        self._wishes.clear()  # overtaken
        if command.num_ahead:
            self._wishes.append((command, list(ledger.tokens), drafted))
        return self._reply(command, self.corrupt(self._proposal(command, drafted)))

    @staticmethod
    def _proposal(command: Propose, drafted: tuple[int, ...]) -> Proposal:
        return Proposal(drafted, rows=drafted if command.num_ahead else ())

    @property
    def foresees(self) -> bool:
        """Whether it still has something to say of its last proposal."""
        return bool(self._wishes)

    def look_ahead(self) -> Reply | None:
        """What follows the last proposal; None where nobody wants to know."""
        if not self._wishes:
            return None
        command, base, drafted = self._wishes.popleft()
        model = self.ahead_model or self.model
        found = []
        for num_kept in range(len(drafted) + 1):
            path = [*base, *drafted[:num_kept]]
            path.append(next_token(path))
            tokens = list(path)
            for _ in drafted:
                tokens.append(model(tokens))
            proposal = self._proposal(command, tuple(tokens[len(path) :]))
            found.append(Continuation(num_kept, path[-1], proposal))
        return self._reply(command, self.spoil(Ahead(tuple(found))))


class FakeTarget(FakeService):
    """Judges with the target model, by itself or (decide_here) by returning what to judge with.

    chains: passes of plain decoding between two parts of an answer. part_failures: what goes wrong
    with coming chains, None where nothing does.
    """

    side = Side.TARGET

    def __init__(
        self,
        name: str = "target",
        device_id: str = "",
        *,
        stop_ids: Iterable[int] = (),
        decide_here: bool = False,
        refute: bool = False,
        chains: Iterable[int] = (3, 1, 2),
    ) -> None:
        super().__init__(name, device_id, stop_ids=stop_ids)
        self.chains: Iterator[int] = itertools.cycle(chains)
        self.part_failures: deque[Failed | None] = deque()
        self.decide_here = decide_here
        self.refute = refute

    def _work(self, session: FakeSession, command: Verify | Propose) -> Reply:
        assert isinstance(command, Verify)
        ledger, candidates = session.ledger, command.candidates
        base = list(ledger.tokens)
        if not candidates and not self.decide_here:
            session.emitted = []
            return self._decode(session, command)
        ledger.begin_round(len(candidates))
        session.feed([*base, *candidates], len(base) + len(candidates))
        winners = tuple(
            next_token([*base, *candidates[:index]]) for index in range(len(candidates) + 1)
        )
        if self.decide_here:
            return self._reply(command, Verdict(None, rows=winners))
        if self.refute:
            outcome = Outcome(0, winners[:1], Closing.BONUS, redraw_mismatch=0)
        else:
            outcome = judge(candidates, winners, self.stop_ids)
        ledger.settle(outcome.num_accepted)
        ledger.extend(outcome.tokens)
        return self._reply(command, Verdict(outcome, winners if command.audit else ()))

    def go_on(self) -> Reply | None:
        """One more chain of a command at work, and the part it gives; None where none is."""
        for session in self.sessions.values():
            command = session.at_work
            if command is not None:
                failure = self.part_failures.popleft() if self.part_failures else None
                if failure is None:
                    return self._decode(session, command)
                session.at_work = None  # what was answered stays
                return self._reply(command, failure)
        return None

    def _decode(self, session: FakeSession, command: Verify) -> Reply:
        ledger, offset = session.ledger, len(session.emitted)
        emitted: list[int] = []
        for _ in range(min(next(self.chains), command.num_steps - offset)):
            ledger.begin_round(0)
            session.feed(ledger.tokens, ledger.confirmed_len)
            ledger.settle(0)
            emitted.append(next_token(ledger.tokens))
            ledger.extend(emitted[-1:])
            if emitted[-1] in self.stop_ids:
                break
        whole = session.emitted + emitted
        more = len(whole) < command.num_steps and emitted[-1] not in self.stop_ids
        rows = (emitted[0],) if command.audit else ()
        session.at_work, session.emitted = (command, whole) if more else (None, [])
        if not more:
            session.last = (command, self._verdict(command, whole, rows))
        part = self._verdict(command, emitted, rows)
        assert isinstance(part.body, Verdict)
        return replace(part, body=replace(part.body, more=more, offset=offset))

    def _verdict(self, command: Verify, tokens: Sequence[int], rows: Sequence[int]) -> TargetReply:
        outcome = Outcome(0, tuple(tokens), Closing.BONUS)
        return TargetReply(command.epoch, command.round, Verdict(outcome, tuple(rows)))


def judge(candidates: Sequence[int], winners: Sequence[int], stop_ids: frozenset[int]) -> Outcome:
    """Keep candidates while they equal the target's own, then its own token; none after a stop."""
    for index, candidate in enumerate(candidates):
        if candidate != winners[index]:
            tokens = (*candidates[:index], winners[index])
            return Outcome(index, tokens, Closing.RECOVERED)
        if candidate in stop_ids:
            return Outcome(index + 1, tuple(candidates[: index + 1]), Closing.STOPPED)
    return Outcome(len(candidates), (*candidates, winners[-1]), Closing.BONUS)


@dataclass
class Loopback:
    """One session against fake services, events delivered in order; what came out is recorded.

    tamper(action) -> list of events to deliver instead of performing the action, or None.
    Timers run out where `tamper` says so, and where nothing else will ever happen. violations: for
    these the session left a replica, as under `coordinator/driver.py`; None: they are raised.
    """

    session: Session
    targets: dict[str, FakeTarget]
    drafts: dict[str, FakeDraft]
    tamper: Callable[[Action], list[Event] | None] = lambda action: None
    inbox: deque[Event] = field(default_factory=deque)
    chunks: list[Deliver] = field(default_factory=list)
    records: list[RoundDone] = field(default_factory=list)
    sent: list[Send] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    others: list[Action] = field(default_factory=list)
    ended: Finish | Fail | None = None
    timers: dict[Side, StartTimer] = field(default_factory=dict)
    violations: list[PeerViolation] | None = None

    def run(self, limit: int = 10_000) -> Finish | Fail:
        """Run to the end; a session that does not end within `limit` events is stuck."""
        self.inbox.append(Begin())
        for _ in range(limit):
            self.work()
            if not self.inbox:
                self._let_time_pass()
            if not self.inbox:
                break
            self.deliver(self.inbox.popleft())
        assert self.ended is not None, f"stuck in {self.session.stage}"
        return self.ended

    def work(self) -> None:
        """Every target that is at work takes its next chain; every draft foresees what it may."""
        for draft in self.drafts.values():
            ahead = draft.look_ahead()
            if ahead is not None:
                self.inbox.append(ahead)
        for target in self.targets.values():
            part = target.go_on()
            if part is not None:
                self.inbox.append(part)

    def _let_time_pass(self) -> None:
        for timer in list(self.timers.values())[:1]:
            self.inbox.append(TimerFired(timer.side, timer.epoch, timer.round))
            del self.timers[timer.side]

    def deliver(self, event: Event) -> None:
        """One step of the session."""
        try:
            actions = self.session.step(event)
        except PeerViolation as violation:
            if self.violations is None:
                raise
            self.violations.append(violation)
            side = self.session.target if violation.side is Side.TARGET else self.session.draft
            services = self.targets if violation.side is Side.TARGET else self.drafts
            services[side.replica or ""].receive("s", Close(side.epoch, side.round))
            self.inbox.appendleft(Lost(violation.side, side.replica or ""))
            return
        for action in actions:
            instead = self.tamper(action)
            if instead is None:
                self.perform(action)
            else:
                self.inbox.extend(instead)

    def perform(self, action: Action) -> None:
        """Do what the action says."""
        match action:
            case PlaceTarget(epoch=epoch, avoid=avoid):
                names = [name for name in self.targets if name != avoid] or list(self.targets)
                chosen = self.targets[names[0]]
                self.inbox.append(TargetPlaced(epoch, chosen.name, chosen.device_id))
            case PlaceDraft(epoch=epoch, avoid=avoid):
                names = [name for name in self.drafts if name != avoid] or list(self.drafts)
                if names:
                    draft = self.drafts[names[0]]
                    self.inbox.append(
                        DraftPlaced(epoch, draft.name, draft.max_len, draft.device_id)
                    )
            case Send(side=side, replica=replica, commands=commands):
                self.sent.append(action)
                services = self.targets if side is Side.TARGET else self.drafts
                for command in commands:
                    reply = services[replica].receive("s", command)
                    if reply is not None and not isinstance(command, Close):
                        self.inbox.append(reply)
            case StartTimer(side=side):
                self.timers[side] = action
                self.others.append(action)
            case StopTimer(side=side):
                self.timers.pop(side, None)
                self.others.append(action)
            case Decide():
                winners = tuple(int(row) for row in action.target_rows)
                outcome = judge(action.candidates, winners, self.session.plan.stop_ids)
                self.inbox.append(Decided(action.epoch, action.round, outcome))
            case Deliver():
                self.chunks.append(action)
            case RoundDone():
                self.records.append(action)
            case Audit():
                self.audits.append(action)
            case Finish() | Fail():
                assert self.ended is None, "ended twice"
                self.ended = action
            case _:
                self.others.append(action)

    @property
    def tokens(self) -> list[int]:
        """Everything delivered."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def text(self) -> str:
        """All text shown."""
        return "".join(chunk.text for chunk in self.chunks)


def letter(token_id: int) -> bytes:
    """Text of a token: one or two printable characters, so that stop strings can span tokens."""
    return f"{token_id}.".encode()


def make_session(
    plan: SessionPlan,
    choose: Callable[[int], int] = lambda limit: min(3, limit),
    *,
    stop_strings: Sequence[str] = (),
    min_tokens: int = 0,
) -> Session:
    """A session whose stop rules fit the plan."""
    rules = StopRules(
        plan.max_len - len(plan.prompt), plan.stop_ids, tuple(stop_strings), min_tokens
    )
    return Session(plan, Output(rules, Detokenizer(letter)), choose)


def timers(actions: Iterable[Action]) -> list[StartTimer]:
    """The timers among actions."""
    return [action for action in actions if isinstance(action, StartTimer)]


__all__ = [
    "Deferred",
    "FakeDraft",
    "FakeTarget",
    "Loopback",
    "agreeable",
    "expected_output",
    "fickle",
    "judge",
    "make_session",
    "next_token",
    "timers",
]
