"""Everything that enters and leaves the protocol of one session: events in, actions out.

Owns the vocabulary of `coordinator/protocol.py`: frozen values without behaviour. Knows no wire
format (the links translate), no clock (timers are actions and come back as events) and no rows
(distribution frames pass through as opaque objects). Rounds and epochs are per side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

Rows = tuple[Any, ...]  # Distribution frames, never looked into here
Logprobs = tuple[Any, ...]  # one per token, or empty


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


class Closing(Enum):
    """What closed a round."""

    RECOVERED = "recovered"
    BONUS = "bonus"
    STOPPED = "stopped"


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"


class Rule(Enum):
    """How candidates are judged (DESIGN section 3)."""

    RESIDUAL = "residual"
    COUPLED = "coupled"
    GREEDY = "greedy"


# ---------------------------------------------------------------- commands to a service


@dataclass(frozen=True, slots=True)
class Prefix:
    """Brings a service's confirmed prefix to base_len = append_from + len(append)."""

    base_len: int
    append_from: int
    append: tuple[int, ...]
    num_accepted: int
    digest: int
    resync: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Open the session at this epoch; never more than max_len tokens."""

    epoch: int
    round: int
    max_len: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Judge `candidates` after the prefix, or decode num_steps tokens when there are none.

    Tokens of several steps come in parts; each is a round of its own.
    """

    epoch: int
    round: int
    prefix: Prefix
    candidates: tuple[int, ...] = ()
    rows: Rows = ()
    num_steps: int = 1
    audit: bool = False


@dataclass(frozen=True, slots=True)
class Propose:
    """Draw num_draft_tokens candidates after the prefix; 0 only fills K/V.

    num_ahead: continuations to draft ahead afterwards, at most.
    """

    epoch: int
    round: int
    prefix: Prefix
    num_draft_tokens: int
    num_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Free the session's pages."""

    epoch: int
    round: int


Command = Open | Verify | Propose | Close

# ---------------------------------------------------------------- results of a service


@dataclass(frozen=True, slots=True)
class Opened:
    """The session exists."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """The session was preempted; the real result follows under the same key."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed and changed nothing. `reason` is one of specmesh/errors.py."""

    reason: str
    message: str = ""
    field: str = ""
    retry_after_s: float = 0.0
    confirmed_len: int = 0
    page_digests: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates, the rows they were drawn from and the mass truncation dropped per row."""

    tokens: tuple[int, ...]
    rows: Rows = ()
    dropped_mass: tuple[float, ...] = ()


class Continuation(NamedTuple):
    """What would be proposed next if the round kept num_accepted candidates and closed with this
    token."""

    num_accepted: int
    closing_token: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Ahead:
    """Continuations of a proposal, drafted while the target verifies it. Comes after it, or not."""

    continuations: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A decided round: accepted candidates, then at most one recovered or bonus token.

    judged: one (target prob, draft prob, overlap) per judged candidate; emitted: one
    (is_argmax, max_prob) per token. redraw_mismatch: the first candidate that does not follow from
    its own row; the round was then decided without candidates.
    """

    num_accepted: int
    tokens: tuple[int, ...]
    closing: Closing
    logprobs: Logprobs = ()
    judged: tuple[tuple[float, float, float], ...] = ()
    emitted: tuple[tuple[bool, float], ...] = ()
    redraw_mismatch: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer. outcome is None where the coordinator decides: only rows came then.

    redraw_mismatch with it: the candidates were refuted, and the one row is for a round without.
    more: the command goes on, this is a part of its answer. offset: tokens in the parts before.
    """

    outcome: Outcome | None
    rows: Rows = ()
    logprob_rows: Logprobs = ()
    redraw_mismatch: int | None = None
    more: bool = False
    offset: int = 0


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


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What is fixed for one sample. Tokens [0, len(prompt)) are the prompt, `resume` is output.

    max_len: prompt plus output never exceed it. num_draft_tokens: fixed k, or None for the policy.
    parallel_prefill: None prefills the draft beside the target where their devices differ.
    with_logprobs: every emitted token comes with its log-probabilities. max_rows: rows that fit
    into one answer of a target; None: any number. num_ahead: continuations that a draft is asked to
    draft ahead, at most.
    """

    prompt: tuple[int, ...]
    max_len: int
    vocab_size: int
    rule: Rule = Rule.RESIDUAL
    stop_ids: frozenset[int] = frozenset()
    resume: tuple[int, ...] = ()
    resume_round: int = 0
    decide_here: bool = False
    with_logprobs: bool = False
    num_draft_tokens: int | None = None
    max_num_draft_tokens: int = 8
    plain_steps: int = 256
    audit_ratio: float = 0.0
    parallel_prefill: bool | None = None
    max_round_retries: int = 3
    max_failovers: int = 5
    max_rows: int | None = None
    num_ahead: int = 0


class IllegalEvent(Exception):
    """An event that this state does not know: a bug of the driver. The state is unchanged."""


class PeerViolation(Exception):
    """A reply that no correct service gives. The state is unchanged; the link should be dropped."""

    def __init__(self, side: Side, message: str) -> None:
        super().__init__(side, message)
        self.side = side
        self.message = message


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
