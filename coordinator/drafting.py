"""The draft's side of one session: a small sans-IO machine of its own, optional at every round.

Owns where the draft stands (`DraftState`), its epoch, its command numbers and what its K/V must be
told. A round asks it for candidates and gets, now or with a later event, `Proposed` or
`Unavailable` with a reason; no fault here ever fails a request. Knows no clock, no wire, and
nothing of candidates that were drafted and never judged but that they were dropped.

The transitions are the table `DRAFT_TRANSITIONS`. A draft that is lost, late or full is sought
again and filled in the background (rounds go on with k = 0 meanwhile); one whose content fails a
check is off for the rest of the request (DESIGN section 2, rule 12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from coordinator.commands import Ahead, Close, Deferred, Failed, Open, Opened, Proposal, Propose
from coordinator.foresight import Foresight
from coordinator.messages import (
    Action,
    DraftPlaced,
    DraftReply,
    DraftSwitchedOff,
    IllegalEvent,
    Lost,
    PeerViolation,
    PlaceDraft,
    Send,
    Side,
    StartTimer,
    StopTimer,
    Timer,
    TimerFired,
)
from coordinator.session_plan import Rule, SessionPlan
from coordinator.target_side import last_equal, prefix_of
from specmesh.ledger import Ledger


class DraftState(Enum):
    """Where the draft stands for this session."""

    SEEKING = "seeking"  # no replica; one was asked for
    PLACED = "placed"  # a replica is known, no session on it yet
    SYNCING = "syncing"  # opened, its K/V is being filled
    READY = "ready"
    PROPOSING = "proposing"  # a round waits for candidates
    CONFIRMING = "confirming"  # a round has candidates drafted ahead, the answer is still out
    LATE = "late"  # no round waits any more, the answer is still out
    OFF = "off"  # for the rest of the request


class Transition(NamedTuple):
    """One row of a table: the method that handles the event, the states it may lead to."""

    handler: str
    next: frozenset[DraftState]


def _to(handler: str, *states: DraftState) -> Transition:
    return Transition(handler, frozenset(states))


_S = DraftState
_LOST = _to("_lost", _S.SEEKING, _S.OFF)
# Events that are not listed for a state are late and dropped when their key is old; otherwise they
# are illegal.
DRAFT_TRANSITIONS: Final[Mapping[DraftState, Mapping[type, Transition]]] = {
    _S.SEEKING: {DraftPlaced: _to("_placed", _S.PLACED, _S.SYNCING)},
    _S.PLACED: {Lost: _LOST},
    _S.SYNCING: {
        DraftReply: _to(
            "_replied", _S.SYNCING, _S.READY, _S.PROPOSING, _S.LATE, _S.SEEKING, _S.OFF
        ),
        TimerFired: _to("_too_late", _S.LATE),
        Lost: _LOST,
    },
    _S.READY: {DraftReply: _to("_drafted_ahead", _S.READY, _S.OFF), Lost: _LOST},
    _S.PROPOSING: {
        DraftReply: _to("_replied", _S.PROPOSING, _S.READY, _S.LATE, _S.SEEKING, _S.OFF),
        TimerFired: _to("_too_late", _S.LATE),
        Lost: _LOST,
    },
    _S.CONFIRMING: {
        DraftReply: _to(
            "_replied", _S.CONFIRMING, _S.READY, _S.PROPOSING, _S.LATE, _S.SEEKING, _S.OFF
        ),
        TimerFired: _to("_too_late", _S.LATE),
        Lost: _LOST,
    },
    _S.LATE: {
        DraftReply: _to("_replied", _S.LATE, _S.READY, _S.SEEKING, _S.OFF),
        TimerFired: _to("_given_up", _S.SEEKING, _S.OFF),
        Lost: _LOST,
    },
    _S.OFF: {},
}

# Failures after which the session is opened afresh, at once or on another replica. All of them
# come before anything is drawn, and so do a bug (INTERNAL) and NaN: behind a drawn token these cut
# the proposal, for leaving out just those tokens would bend the law. They would come again.
_SESSION_GONE = frozenset(
    {"SESSION_NOT_FOUND", "SESSION_EXISTS", "STALE_ROUND", "ROUND_CONFLICT", "PREFIX_MISMATCH"}
)
_ELSEWHERE = {"OUT_OF_PAGES": "draft_out_of_memory", "NOT_READY": "draft_not_ready"}


@dataclass(frozen=True, slots=True)
class Proposed:
    """The candidates a round waited for. was_ahead: it did not wait."""

    proposal: Proposal
    epoch: int
    replica: str
    report: object
    was_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The round that waited goes on without candidates."""

    reason: str


Signal = Proposed | Unavailable | None


class Drafting:
    """Mutable. Actions are appended to the list that is passed in; methods return a `Signal`.

    confirmed_len: tokens the replica has confirmed in this epoch. num_accepted: outcome of its last
    proposal, 0 where that was never judged. reason: why it cannot be used now.
    """

    def __init__(self, plan: SessionPlan, ledger: Ledger, actions: list[Action]) -> None:
        self._plan = plan
        self._ledger = ledger
        self._actions = actions
        self.state = DraftState.SEEKING
        self.reason = "draft_unavailable"
        self.epoch = 0
        self.round = -1
        self.replica = ""
        self.device_id = ""
        self.max_len = 0
        self.max_num_draft_tokens = plan.max_num_draft_tokens
        self.in_flight: Propose | None = None
        self.awaited_k = 0  # what a round waits for; 0: none waits
        self._fill_awaited = False
        self._opened = False
        self._confirmed_len = 0
        self._num_accepted = 0
        self._num_asked = self._num_ahead = 0  # candidates and continuations of the last command
        self._drafted: tuple[int, ...] = ()  # those of the last answer
        self._foresight = Foresight()
        self._num_resyncs = 0
        self._num_failures = 0  # in a row, without a proposal between

    # ------------------------------------------------------------ asked by the session

    def begin(self) -> None:
        """Look for a replica, unless the request wants none."""
        if self._plan.num_draft_tokens == 0 or self._plan.max_num_draft_tokens == 0:
            self.state, self.reason = DraftState.OFF, "request"
            return
        self._actions.append(PlaceDraft(self.epoch))

    def limit(self, *, first_round: bool) -> tuple[int, str]:
        """Most candidates a round could ask for, and what stands in its way now (or "")."""
        if self.state in (DraftState.SEEKING, DraftState.LATE, DraftState.OFF):
            return 0, self.reason
        room = min(self.max_num_draft_tokens, self.max_len - self._ledger.confirmed_len)
        if room <= 0:
            return 0, "draft_context"
        if self.state is DraftState.SYNCING and not self._fill_awaited:
            return room, "draft_resync"
        if self.state is DraftState.PLACED and not first_round:
            return room, "draft_resync"
        return room, ""

    def request(self, num_draft_tokens: int) -> None:
        """Ask for candidates; a `Signal` of a later event answers."""
        is_busy = self.state in (DraftState.SYNCING, DraftState.CONFIRMING)
        assert is_busy or self.state in (DraftState.PLACED, DraftState.READY)
        self.awaited_k = num_draft_tokens
        if not is_busy:
            self._propose(num_draft_tokens)

    def foresee(self, num_draft_tokens: int) -> Proposed | None:
        """Candidates that were drafted ahead for what is confirmed now. `follow` must come next."""
        if self.state is not DraftState.READY:
            return None
        path = self._ledger.tokens[self._confirmed_len :]
        proposal = self._foresight.take(path, num_draft_tokens)
        if proposal is None:
            return None
        return Proposed(proposal, self.epoch, self.replica, None, was_ahead=True)

    def pass_over(self) -> None:
        """A round begins without candidates: nothing that was drafted ahead is behind it."""
        self._foresight.forget()

    def follow(self, num_draft_tokens: int) -> None:
        """Let the draft catch up with a round that took what `foresee` gave, and draft ahead."""
        self._issue(num_draft_tokens, DraftState.CONFIRMING, Timer.PROPOSE)

    @property
    def is_waited_for_again(self) -> bool:
        """Whether a round waits until the draft has answered behind the one before."""
        return self.state is DraftState.CONFIRMING and self.awaited_k > 0

    def fill(self, *, awaited: bool) -> None:
        """Bring a placed draft's K/V up to date. awaited: the first round will wait for it."""
        if self.state is not DraftState.PLACED or self._ledger.confirmed_len >= self.max_len:
            return
        self._fill_awaited = awaited
        self._issue(0, DraftState.SYNCING, Timer.FILL)

    def judged(self, epoch: int, num_accepted: int) -> None:
        """The outcome of the proposal that `epoch` gave."""
        num_kept = self._foresight.judged(num_accepted) if epoch == self.epoch else None
        if num_kept is not None:
            self._num_accepted = num_kept

    def switch_off(self, reason: str, message: str) -> None:
        """Content failed a check: off for the rest of the request, and reported."""
        self._actions.append(DraftSwitchedOff(self.replica, reason, message))
        self.close()
        self._leave(DraftState.OFF, reason)

    def close(self) -> None:
        """Free the session on the replica, if there is one."""
        if self._opened:
            self._send((Close(self.epoch, self.round),))
            self._opened = False
        self._actions.append(StopTimer(Side.DRAFT))

    def step(self, event: DraftPlaced | DraftReply | Lost | TimerFired) -> Signal:
        """Take one event. Late ones are dropped.

        Raises IllegalEvent or PeerViolation with the state unchanged.
        """
        if self._is_late(event):
            return None
        row = DRAFT_TRANSITIONS[self.state].get(type(event))
        if row is None:
            raise IllegalEvent(f"draft is {self.state.value}: {event}")
        signal: Signal = getattr(self, row.handler)(event)
        assert self.state in row.next, (self.state, event)
        return signal

    # ------------------------------------------------------------ handlers

    def _is_late(self, event: DraftPlaced | DraftReply | Lost | TimerFired) -> bool:
        if self.state is DraftState.OFF:
            return True
        if isinstance(event, Lost):
            return not self.replica or event.replica != self.replica
        if event.epoch > self.epoch:
            if isinstance(event, DraftReply):
                raise PeerViolation(Side.DRAFT, f"epoch {event.epoch} was never opened")
            raise IllegalEvent(f"draft epoch is {self.epoch}: {event}")
        if event.epoch < self.epoch or isinstance(event, DraftPlaced):
            return event.epoch < self.epoch
        if event.round > self.round:
            raise PeerViolation(Side.DRAFT, f"round {event.round} was never asked for")
        if isinstance(event, DraftReply) and isinstance(event.body, Ahead):
            return self.state is not DraftState.READY or event.round != self.round
        return self.in_flight is None or event.round != self.in_flight.round

    def _placed(self, event: DraftPlaced) -> Signal:
        self.state = DraftState.PLACED
        self.replica, self.device_id, self.max_len = event.replica, event.device_id, event.max_len
        most = self._plan.max_num_draft_tokens
        own = event.max_num_draft_tokens
        self.max_num_draft_tokens = most if own is None else min(most, own)
        return None

    def _lost(self, _event: Lost) -> Signal:
        self._opened = False  # its sessions ended with the link
        self._actions.append(StopTimer(Side.DRAFT))
        return self._seek("draft_lost", avoid=None)

    def _replied(self, event: DraftReply) -> Signal:
        body = event.body
        if isinstance(body, Opened):
            return None
        if isinstance(body, Deferred):
            return self._deferred()
        if isinstance(body, Failed):
            return self._failed(body)
        assert isinstance(body, Proposal)
        return self._proposed(body, event.report)

    def _drafted_ahead(self, event: DraftReply) -> Signal:
        ahead = event.body
        assert isinstance(ahead, Ahead)
        fault = ""
        if len(ahead.continuations) > self._num_ahead:
            fault = f"{len(ahead.continuations)} continuations of {self._num_ahead} asked for"
        faults = (self._fault(self._num_asked, each.proposal) for each in ahead.continuations)
        fault = fault or next(filter(None, faults), "")
        if fault:
            self.switch_off("draft_bad_proposal", f"drafted ahead: {fault}")
        else:
            self._foresight.keep(self._drafted, self._num_asked, ahead)
        return None

    def _proposed(self, proposal: Proposal, report: object) -> Signal:
        command, was = self.in_flight, self.state
        assert command is not None
        fault = self._fault(command.num_draft_tokens, proposal)
        if fault:
            waited = self._stop_waiting("draft_bad_proposal")
            self.switch_off("draft_bad_proposal", fault)
            return waited
        self.in_flight = None
        self._confirmed_len = command.prefix.base_len
        self._num_accepted = self._foresight.answered(proposal.tokens)
        self._drafted = proposal.tokens
        self._num_resyncs = self._num_failures = 0
        self._fill_awaited = False
        self.state = DraftState.READY
        self._actions.append(StopTimer(Side.DRAFT))
        if was is DraftState.PROPOSING:
            self.awaited_k = 0
            return Proposed(proposal, self.epoch, self.replica, report)
        if self.awaited_k:  # one waited for a fill, or for the answer to the round before
            self._propose(self.awaited_k)
        return None

    def _fault(self, asked: int, proposal: Proposal) -> str:
        """What is wrong with a proposal's content; empty when nothing is.

        A draft may end its block early only with a token after which nothing can follow, or where
        it says that it could draw nothing behind it: both follow from the tokens that it sends.
        """
        tokens = proposal.tokens
        may_end = proposal.is_cut or not self._plan.stop_ids.isdisjoint(tokens[-1:])
        if len(tokens) != asked and not (0 < len(tokens) < asked and may_end):
            return f"{len(tokens)} candidates where {asked} were asked for"
        if any(token >= self._plan.vocab_size for token in tokens):
            return f"a candidate is outside the vocabulary of {self._plan.vocab_size}"
        num_rows = len(tokens) if self._plan.rule is Rule.RESIDUAL else 0
        if len(proposal.rows) != num_rows:
            return f"{len(proposal.rows)} rows where {num_rows} were expected"
        if len(proposal.dropped_mass) not in (0, num_rows):
            return f"{len(proposal.dropped_mass)} shares of dropped mass for {num_rows} rows"
        if not all(0.0 <= share <= 1.0 for share in proposal.dropped_mass):  # NaN is no share
            return "a share of dropped mass is outside [0, 1]"
        return ""

    def _deferred(self) -> Signal:
        assert self.in_flight is not None
        if self.state is not DraftState.LATE:
            self.state, self.reason = DraftState.LATE, "draft_deferred"
            self._start_timer(Timer.DEFERRED)
        return self._stop_waiting("draft_deferred")

    def _too_late(self, _event: TimerFired) -> Signal:
        self.state, self.reason = DraftState.LATE, "draft_late"
        self._start_timer(Timer.LATE)
        return self._stop_waiting("draft_deadline")

    def _given_up(self, _event: TimerFired) -> Signal:
        avoid = self.replica
        self.close()
        return self._seek("draft_late", avoid=avoid)

    def _failed(self, failure: Failed) -> Signal:
        command = self.in_flight
        assert command is not None
        if failure.reason == "PREFIX_MISMATCH" and self._num_resyncs < 1:
            self._resync(command, failure)
            return None
        self._foresight.unanswered()
        if failure.reason == "TOO_BUSY" and self._confirmed_len:
            self.in_flight = None  # nothing changed there, the session stands
            self.state = DraftState.READY
            self._actions.append(StopTimer(Side.DRAFT))
            return self._stop_waiting("draft_overloaded")
        drew_nothing = failure.reason == "INTERNAL" and not command.num_draft_tokens
        if failure.reason in _SESSION_GONE or drew_nothing:
            self.close()
            return self._seek("draft_session_lost", avoid=None)
        if failure.reason in _ELSEWHERE or failure.reason == "TOO_BUSY":
            avoid = self.replica
            self.close()
            return self._seek(_ELSEWHERE.get(failure.reason, "draft_overloaded"), avoid=avoid)
        waited = self._stop_waiting("draft_error")
        self.switch_off("draft_error", f"{failure.reason}: {failure.message}")
        return waited

    # ------------------------------------------------------------ moves

    def _resync(self, command: Propose, failure: Failed) -> None:
        base_len = command.prefix.base_len
        shared_len = last_equal(self._ledger, failure.page_digests, base_len)
        self.round += 1
        self._num_resyncs += 1
        prefix = prefix_of(self._ledger, shared_len, 0, resync=True, base_len=base_len)
        self.in_flight = Propose(
            self.epoch, self.round, prefix, command.num_draft_tokens, command.num_ahead
        )
        self._send((self.in_flight,))
        self._start_timer(
            {
                DraftState.SYNCING: Timer.FILL,
                DraftState.PROPOSING: Timer.PROPOSE,
                DraftState.CONFIRMING: Timer.PROPOSE,
            }.get(self.state, Timer.LATE)
        )

    def _propose(self, num_draft_tokens: int) -> None:
        self._issue(num_draft_tokens, DraftState.PROPOSING, Timer.PROPOSE)

    def _issue(self, num_draft_tokens: int, state: DraftState, timer: Timer) -> None:
        self.round += 1
        prefix = prefix_of(self._ledger, self._confirmed_len, self._num_accepted)
        # Rows go with what is drafted ahead: under the other rules too few outcomes are foreseen.
        is_ahead = num_draft_tokens > 0 and self._plan.rule is Rule.RESIDUAL
        self._num_asked = num_draft_tokens
        self._num_ahead = self._foresight.num_worth(self._plan.num_ahead) if is_ahead else 0
        command = Propose(self.epoch, self.round, prefix, num_draft_tokens, self._num_ahead)
        self._foresight.forget()
        self.in_flight = command
        self.state = state
        if self._opened:
            self._send((command,))
        else:
            self._opened = True
            max_len = min(self._ledger.max_len, self.max_len)
            self._send((Open(self.epoch, self.round, max_len), command))
        self._start_timer(timer)

    def _send(self, commands: tuple[Open | Propose | Close, ...]) -> None:
        self._actions.append(Send(Side.DRAFT, self.replica, commands))

    def _start_timer(self, timer: Timer) -> None:
        command = self.in_flight
        assert command is not None
        num_tokens = len(command.prefix.append) + command.num_draft_tokens
        self._actions.append(StartTimer(Side.DRAFT, self.epoch, self.round, timer, num_tokens))

    def _seek(self, reason: str, avoid: str | None) -> Signal:
        """Leave the replica and ask for one again, a bounded number of times in a row."""
        waited = self._stop_waiting(reason)
        self._num_failures += 1
        if self._num_failures > self._plan.max_failovers:
            self._leave(DraftState.OFF, "draft_unstable")
            return waited
        self._leave(DraftState.SEEKING, reason)
        self._actions.append(PlaceDraft(self.epoch, avoid))
        return waited

    def _leave(self, state: DraftState, reason: str) -> None:
        self.epoch += 1
        self.state, self.reason = state, reason
        self.replica = self.device_id = ""
        self.in_flight = None
        self._fill_awaited = self._opened = False
        self._foresight.forget()
        self._foresight.unanswered()
        self._confirmed_len = self._num_accepted = self._num_resyncs = 0

    def _stop_waiting(self, reason: str) -> Signal:
        if not self.awaited_k:
            return None
        self.awaited_k = 0
        self._fill_awaited = False
        return Unavailable(reason)
