"""What a session asks of a service, and what the service answers: commands and results.

Owns frozen values without behaviour, the same for either placement of the decision. Knows no wire
format (`coordinator/translate.py`) and no rows: distribution frames pass through as opaque objects.
Rounds and epochs are per side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

Rows = tuple[Any, ...]  # Distribution frames, never looked into here
Logprobs = tuple[Any, ...]  # one per token, or empty


class Closing(Enum):
    """What closed a round."""

    RECOVERED = "recovered"
    BONUS = "bonus"
    STOPPED = "stopped"


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
    """Candidates, the rows they were drawn from and the mass truncation dropped per row. is_cut:
    fewer than asked for, as the row behind the last one holds no law."""

    tokens: tuple[int, ...]
    rows: Rows = ()
    dropped_mass: tuple[float, ...] = ()
    is_cut: bool = False


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
