"""Everything that enters and leaves the protocol of one session: events in, actions out.

Owns the vocabulary between `coordinator/protocol.py` and its driver: frozen values without
behaviour. What travels to and from a service is in `coordinator/commands.py`. Knows no clock:
timers are actions and come back as events. Rounds and epochs are per side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from coordinator.commands import (
    Ahead,
    Closing,
    Command,
    Deferred,
    Failed,
    Logprobs,
    Opened,
    Outcome,
    Proposal,
    Rows,
    Verdict,
)


class Side(Enum):
    """The two services a session lives on."""

    TARGET = "target"
    DRAFT = "draft"


class Timer(Enum):
    """What a timer waits for; the driver knows how long each may take."""

    VERIFY = "verify"
    PROPOSE = "propose"
    FILL = "fill"
    LATE = "late"
    DEFERRED = "deferred"


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the session. First event, once."""


@dataclass(frozen=True, slots=True)
class TargetPlaced:
    """Answers `PlaceTarget`: the replica to use from `epoch` on.

    max_num_draft_tokens: most candidates it judges at once; None: as many as the plan allows.
    """

    epoch: int
    replica: str
    device_id: str = ""
    max_num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TargetUnplaced:
    """Answers `PlaceTarget`: no replica could be had within the configured wait."""

    epoch: int
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftPlaced:
    """Answers `PlaceDraft`, at once or after a health probe. max_len: the draft's context.

    max_num_draft_tokens: most candidates it proposes at once; None: as many as the plan allows.
    """

    epoch: int
    replica: str
    max_len: int
    device_id: str = ""
    max_num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The link to a replica ended, and every session on it with it."""

    side: Side
    replica: str


@dataclass(frozen=True, slots=True)
class TargetReply:
    """One result of the target. `report` travels into the round record untouched."""

    epoch: int
    round: int
    body: Opened | Deferred | Failed | Verdict
    cached_tokens: int = 0
    report: Any = None


@dataclass(frozen=True, slots=True)
class DraftReply:
    """One result of the draft."""

    epoch: int
    round: int
    body: Opened | Deferred | Failed | Proposal | Ahead
    report: Any = None


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer of `StartTimer` ran out."""

    side: Side
    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class Decided:
    """Answers `Decide`."""

    epoch: int
    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DecisionFailed:
    """Answers `Decide`: rows that are no law. blames_draft: the draft's, not the target's."""

    epoch: int
    round: int
    failure: Failed
    blames_draft: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller went away, ran out of time, or the replica stops."""

    reason: str
    message: str


Event = (
    Begin
    | TargetPlaced
    | TargetUnplaced
    | DraftPlaced
    | Lost
    | TargetReply
    | DraftReply
    | TimerFired
    | Decided
    | DecisionFailed
    | Cancel
)

# ---------------------------------------------------------------- refusals of an event


class IllegalEvent(Exception):
    """An event that this state does not know: a bug of the driver. The state is unchanged."""


class PeerViolation(Exception):
    """A reply that no correct service gives. The state is unchanged; the link should be dropped."""

    def __init__(self, side: Side, message: str) -> None:
        super().__init__(side, message)
        self.side = side
        self.message = message


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class PlaceTarget:
    """Choose a target replica, preferably not `avoid`; answer TargetPlaced or TargetUnplaced.

    prefer: its link just ended; its prefix cache is warm if it comes back at once.
    num_moves: how often this round was moved already; the wait before the next try grows with it.
    max_len: tokens that the session may come to, which the replica must be able to hold.
    """

    epoch: int
    avoid: str | None = None
    prefer: str | None = None
    num_moves: int = 0
    retry_after_s: float = 0.0
    max_len: int = 0


@dataclass(frozen=True, slots=True)
class PlaceDraft:
    """Offer a healthy draft, now or later; `avoid` just failed this session."""

    epoch: int
    avoid: str | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send commands to a replica, in order, in one frame."""

    side: Side
    replica: str
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Replace the side's timer. num_tokens: tokens to be computed before it answers."""

    side: Side
    epoch: int
    round: int
    timer: Timer
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StopTimer:
    """The side's timer is no longer needed."""

    side: Side


@dataclass(frozen=True, slots=True)
class Decide:
    """Decide a round here (coordinator placement); answer Decided or DecisionFailed.

    redraw_mismatch: what the target's check found; candidates are empty then.
    """

    epoch: int
    round: int
    base_len: int
    candidates: tuple[int, ...]
    draft_rows: Rows
    target_rows: Rows
    logprob_rows: Logprobs
    redraw_mismatch: int | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """Decide a round of the target again from the rows it returned, and compare."""

    base_len: int
    candidates: tuple[int, ...]
    draft_rows: Rows
    target_rows: Rows
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Deliver:
    """Confirmed ids of one round, with the text that is safe to show."""

    round_index: int
    tokens: tuple[int, ...]
    text: str
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class RoundDone:
    """The record of one committed round (DESIGN section 8). round_index 0 is the prompt's.

    offset: tokens of its command that rounds before this one brought. more: the next round is of
    the same command. was_ahead: the candidates were there when the round began.
    """

    round_index: int
    target_epoch: int
    draft_epoch: int
    base_len: int
    num_draft_tokens: int
    num_accepted: int
    num_tokens: int
    closing: Closing
    fallback: str
    is_prefill: bool
    audited: bool
    judged: tuple[tuple[float, float, float], ...] = ()
    emitted: tuple[tuple[bool, float], ...] = ()
    dropped_mass: tuple[float, ...] = ()
    redraw_mismatch: int | None = None
    num_judged: int = 0
    num_committed: int = 0
    num_retries: int = 0
    rows: Rows = ()
    target_replica: str = ""
    draft_replica: str = ""
    target_report: Any = None
    draft_report: Any = None
    candidates: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    offset: int = 0
    more: bool = False
    was_ahead: bool = False


@dataclass(frozen=True, slots=True)
class DraftSwitchedOff:
    """The draft is off for the rest of this request because its content failed a check."""

    replica: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of a whole sample. Rounds exclude the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted: int
    judged_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    fallback_rounds: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """The sample ended as asked."""

    reason: FinishReason
    matched_stop: str
    matched_stop_token_id: int | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Fail:
    """The sample ended with an error of specmesh/errors.py."""

    failure: Failed
    stats: Stats


Action = (
    PlaceTarget
    | PlaceDraft
    | Send
    | StartTimer
    | StopTimer
    | Decide
    | Audit
    | Deliver
    | RoundDone
    | DraftSwitchedOff
    | Finish
    | Fail
)
