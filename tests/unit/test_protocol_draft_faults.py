"""The session protocol and its draft: lost, late, failing, refused. None changes the output."""

from __future__ import annotations

import pytest

from coordinator.commands import Deferred, Failed, Proposal, Propose
from coordinator.messages import (
    Action,
    DraftPlaced,
    DraftReply,
    DraftSwitchedOff,
    Event,
    Lost,
    PlaceDraft,
    RoundDone,
    Side,
    StartTimer,
    Timer,
    TimerFired,
)
from tests.sim.fakes import VOCAB_SIZE, FakeDraft
from tests.unit.disturbed_session import finish, is_working, loopback_of, once
from tests.unit.session_plan import PROMPT


def test_no_draft_at_all() -> None:
    """Without a draft every round is plain decoding with that reason."""
    loopback = loopback_of()
    loopback.drafts.clear()
    stats = finish(loopback).stats
    assert set(stats.fallback_rounds) <= {"draft_unavailable", "budget"}
    assert stats.num_draft_tokens == 0


@pytest.mark.parametrize("nth", range(6))
def test_draft_lost_then_readmitted(nth: int) -> None:
    """A lost draft costs its round the candidates; a new session elsewhere is filled beside the
    rounds and drafts again before the end."""
    loopback = loopback_of()
    spare = FakeDraft("spare")
    loopback.drafts["spare"] = spare

    def lose(action: Action) -> list[Event]:
        loopback.drafts.pop("draft").lose_sessions()
        return [Lost(Side.DRAFT, "draft")]

    loopback.tamper = once(lambda action: is_working(action, Side.DRAFT, nth), lose)
    stats = finish(loopback).stats
    assert spare.num_carried_out > 0
    assert any(record.draft_replica == "spare" for record in loopback.records)
    assert sum(stats.fallback_rounds.values()) <= 4


@pytest.mark.parametrize("nth", range(1, 6))
def test_late_draft_costs_one_deadline(nth: int) -> None:
    """A proposal past its deadline is dropped unjudged; nothing more is asked until it arrives, and
    the next proposal reports that none of it was kept."""
    loopback = loopback_of()
    held: list[Event] = []
    asked_while_late = 0

    def tamper(action: Action) -> list[Event] | None:
        nonlocal asked_while_late
        if (
            isinstance(action, StartTimer)
            and action.timer is Timer.PROPOSE
            and (action.round == nth and not held)
        ):
            late = next(
                e
                for e in loopback.inbox
                if isinstance(e, DraftReply) and isinstance(e.body, Proposal)
            )
            loopback.inbox.remove(late)
            held.append(late)
            return [TimerFired(Side.DRAFT, action.epoch, action.round)]
        if held and is_working(action, Side.DRAFT):
            asked_while_late += 1
        if isinstance(action, RoundDone) and action.fallback == "draft_late" and not released:
            released.append(True)
            loopback.inbox.append(held[0])
            assert asked_while_late == 0
        return None

    released: list[bool] = []
    loopback.tamper = tamper
    stats = finish(loopback).stats
    assert stats.fallback_rounds["draft_deadline"] == 1
    assert stats.fallback_rounds["draft_late"] >= 1
    asked = [c for s in loopback.sent for c in s.commands if isinstance(c, Propose)]
    after = next(c for c in asked if c.round == nth + 1)
    assert after.prefix.num_accepted == 0
    assert asked_while_late > 0, "the draft was never asked again"


def test_draft_that_never_answers_is_left() -> None:
    """When the late timer runs out too, the session there is closed and another draft sought."""
    loopback = loopback_of(draft=FakeDraft("mute"))
    loopback.drafts["spare"] = FakeDraft("spare")

    def tamper(action: Action) -> list[Event] | None:
        if isinstance(action, StartTimer) and action.side is Side.DRAFT:
            mute = loopback.session.draft.replica == "mute"
            for event in [e for e in loopback.inbox if isinstance(e, DraftReply) and mute]:
                loopback.inbox.remove(event)
            return [TimerFired(Side.DRAFT, action.epoch, action.round)] if mute else []
        return None

    loopback.tamper = tamper
    finish(loopback)
    assert any(record.draft_replica == "spare" for record in loopback.records)


@pytest.mark.parametrize(
    ("reason", "label", "again"),
    [
        ("TOO_BUSY", "draft_overloaded", True),
        ("OUT_OF_PAGES", "draft_out_of_memory", True),
        ("NOT_READY", "draft_not_ready", True),
        ("SESSION_NOT_FOUND", "draft_session_lost", True),
        ("STALE_ROUND", "draft_session_lost", True),
        ("INTERNAL", "draft_error", False),
        ("NUMERIC_FAULT", "draft_error", False),
        ("INVALID_REQUEST", "draft_error", False),
        ("MODEL_MISMATCH", "draft_error", False),
    ],
)
def test_draft_errors(reason: str, label: str, again: bool) -> None:
    """Each draft error is a k = 0 round with its reason; final are those that would come again with
    the same prefix. None follows from a token that was drawn: such a proposal is cut."""
    loopback = loopback_of()

    def fail(action: Action) -> None:
        if is_working(action, Side.DRAFT, 2) and not failed:
            failed.append(True)
            loopback.drafts["draft"].failures.append(Failed(reason, "scripted"))

    failed: list[bool] = []
    loopback.tamper = fail
    stats = finish(loopback).stats
    assert stats.fallback_rounds[label] >= 1
    after = [r for r in loopback.records if r.draft_replica]
    off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
    assert bool(off) is not again
    assert (after[-1].base_len > len(PROMPT) + 10) is again


def test_draft_that_fails_while_it_only_fills_is_asked_again() -> None:
    """Nothing was drawn that could be left out: a bug in a fill is a lost session, not more."""
    loopback = loopback_of()
    loopback.drafts["draft"].failures.append(Failed("INTERNAL", "scripted"))
    stats = finish(loopback).stats
    assert stats.num_draft_tokens > 0
    assert not [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]


def test_late_copies_of_proposals_are_never_judged() -> None:
    """Each proposal arrives once more while the next one is awaited: nothing comes of it."""
    undisturbed = finish(loopback_of())
    loopback = loopback_of()
    last: list[DraftReply] = []

    def copy(action: Action) -> None:
        replies = [e for e in loopback.inbox if isinstance(e, DraftReply)]
        if isinstance(action, StartTimer) and action.side is Side.DRAFT:
            if last:
                loopback.inbox.appendleft(last.pop())
            last.extend(reply for reply in replies if isinstance(reply.body, Proposal))

    loopback.tamper = copy
    assert finish(loopback).stats == undisturbed.stats
    assert not any(isinstance(action, DraftSwitchedOff) for action in loopback.others)


def test_draft_lost_while_its_proposal_is_judged() -> None:
    """The verdict on a lost draft's proposal is not told to the session that replaced it."""
    loopback = loopback_of()

    def lose(action: Action) -> None:
        if is_working(action, Side.TARGET, 3) and not lost:
            lost.append(True)
            loopback.drafts["draft"].lose_sessions()
            loopback.inbox.appendleft(Lost(Side.DRAFT, "draft"))
            loopback.drafts["spare"] = FakeDraft("spare")

    lost: list[bool] = []
    loopback.tamper = lose
    finish(loopback)
    assert not any(isinstance(action, DraftSwitchedOff) for action in loopback.others)


def test_offer_of_an_older_epoch_is_ignored() -> None:
    """A draft offered for a search that was given up is not taken."""
    loopback = loopback_of()
    late = DraftPlaced(0, "draft", 1 << 20)

    def lose(action: Action) -> list[Event] | None:
        if is_working(action, Side.DRAFT, 3) and not lost:
            lost.append(True)
            loopback.drafts.pop("draft").lose_sessions()
            return [Lost(Side.DRAFT, "draft"), late]
        return None

    lost: list[bool] = []
    loopback.tamper = lose
    finish(loopback)
    assert lost
    assert loopback.session.draft.epoch == 1
    assert not loopback.session.draft.replica


def test_deferred_draft_does_not_hold_the_round() -> None:
    """DEFERRED of the draft ends the wait at once; its answer makes it usable again."""
    loopback = loopback_of()

    def defer(action: Action) -> None:
        if isinstance(action, StartTimer) and action.timer is Timer.PROPOSE and not deferred:
            deferred.append(True)
            loopback.inbox.appendleft(DraftReply(action.epoch, action.round, Deferred()))

    deferred: list[bool] = []
    loopback.tamper = defer
    stats = finish(loopback).stats
    assert stats.fallback_rounds["draft_deferred"] == 1
    assert stats.num_accepted > 0


def test_draft_prefix_mismatch_is_repaired_once() -> None:
    """The draft's answer names its pages; the repair appends from the last equal one."""
    loopback = loopback_of()

    def spoil(action: Action) -> None:
        if is_working(action, Side.DRAFT, 5) and not spoiled:
            spoiled.append(True)
            session = loopback.drafts["draft"].sessions["s"]
            last = session.ledger.tokens[-1]
            session.ledger.truncate(session.ledger.confirmed_len - 1)
            session.ledger.extend([(last + 1) % VOCAB_SIZE])
            del session.kv[session.ledger.kv_len :]

    spoiled: list[bool] = []
    loopback.tamper = spoil
    finish(loopback)
    resyncs = [
        c for s in loopback.sent for c in s.commands if isinstance(c, Propose) and c.prefix.resync
    ]
    assert len(resyncs) == 1
    assert 0 < resyncs[0].prefix.append_from < resyncs[0].prefix.base_len


def test_place_draft_names_what_to_avoid() -> None:
    """After a draft ran out of memory the next offer should not be the same replica."""
    loopback = loopback_of()
    loopback.drafts["draft"].failures.append(Failed("OUT_OF_PAGES", "scripted"))
    asked: list[PlaceDraft] = []

    def watch(action: Action) -> None:
        if isinstance(action, PlaceDraft):
            asked.append(action)

    loopback.tamper = watch
    finish(loopback)
    assert [action.avoid for action in asked] == [None, "draft"]
