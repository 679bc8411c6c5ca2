"""What a session waits for, and every event it takes then: the protocol's transitions as a table.

The rows name methods of `coordinator/protocol.py`, which performs them and asserts where they lead.
`coordinator/README.md` shows the same table; a test compares the two. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from coordinator.messages import (
    Begin,
    Cancel,
    Decided,
    DecisionFailed,
    DraftPlaced,
    DraftReply,
    Lost,
    TargetPlaced,
    TargetReply,
    TargetUnplaced,
    TimerFired,
)


class Stage(Enum):
    """What the session waits for."""

    NEW = "new"  # Begin
    PLACING = "placing"  # a target replica
    PREFILLING = "prefilling"  # the verdict of the prompt's round
    DRAFTING = "drafting"  # candidates
    VERIFYING = "verifying"  # a verdict
    DECIDING = "deciding"  # the arithmetic, done here
    DONE = "done"  # nothing: finished, failed or cancelled


class Transition(NamedTuple):
    """One row of the table: the method that handles the event, the stages it may lead to."""

    handler: str
    next: frozenset[Stage]


def _to(handler: str, *stages: Stage) -> Transition:
    return Transition(handler, frozenset(stages))


_NEW, _PLACING, _PREFILLING, _DRAFTING, _VERIFYING, _DECIDING, _DONE = Stage
_ROUND = (_PLACING, _DRAFTING, _VERIFYING)  # where a round can stand after it was begun


def _everywhere(stage: Stage) -> dict[type, Transition]:
    """Rows of every stage between Begin and the end. Only a stage that waits for the draft or for
    the replica that was lost leaves by one of them."""
    waits_for_draft = _ROUND if stage is _DRAFTING else ()
    loses_target = (_PLACING,) if stage in (_PREFILLING, _VERIFYING) else ()
    return {
        DraftPlaced: _to("_draft_event", stage),
        DraftReply: _to("_draft_event", stage, *waits_for_draft),
        Lost: _to("_lost", stage, *waits_for_draft, *loses_target, _DONE),
        TimerFired: _to("_timer", stage, *waits_for_draft, *loses_target, _DONE),
        TargetReply: _to("_stray_reply", stage),
        Cancel: _to("_cancel", _DONE),
    }


def _placement(stage: Stage) -> dict[type, Transition]:
    """A target lost while the round waits for something else is sought beside it."""
    return {
        TargetPlaced: _to("_target_placed_aside", stage),
        TargetUnplaced: _to("_target_unplaced", stage, _DONE),
    }


_ANSWERED = (*_ROUND, _DECIDING, _DONE)

TRANSITIONS: Final[Mapping[Stage, Mapping[type, Transition]]] = {
    _NEW: {Begin: _to("_begin", _PLACING, _DONE), Cancel: _to("_cancel", _DONE)},
    _PLACING: {
        **_everywhere(_PLACING),
        TargetPlaced: _to("_target_placed", _PLACING, _PREFILLING, _DRAFTING, _VERIFYING),
        TargetUnplaced: _to("_target_unplaced", _PLACING, _DONE),
    },
    _PREFILLING: {
        **_everywhere(_PREFILLING),
        TargetReply: _to("_target_replied", _PREFILLING, *_ANSWERED),
    },
    _DRAFTING: {**_everywhere(_DRAFTING), **_placement(_DRAFTING)},
    # A part of an answer leaves a session verifying: its command goes on.
    _VERIFYING: {**_everywhere(_VERIFYING), TargetReply: _to("_target_replied", *_ANSWERED)},
    _DECIDING: {
        **_everywhere(_DECIDING),
        **_placement(_DECIDING),
        Decided: _to("_decided", *_ROUND, _DONE),
        DecisionFailed: _to("_decision_failed", *_ROUND, _DONE),
    },
    _DONE: {
        event: _to("_ignore", _DONE)
        for event in (
            TargetPlaced,
            TargetUnplaced,
            DraftPlaced,
            Lost,
            TargetReply,
            DraftReply,
            TimerFired,
            Decided,
            DecisionFailed,
            Cancel,
        )
    },
}
