"""The session protocol and its target: lost, late, failing, limited. None changes the output."""

from __future__ import annotations

import pytest

from coordinator.commands import Close, Deferred, Failed, Open, Propose, Verify
from coordinator.messages import (
    Action,
    Decide,
    DraftPlaced,
    DraftSwitchedOff,
    Event,
    Fail,
    Lost,
    PlaceDraft,
    PlaceTarget,
    Side,
    StartTimer,
    TargetPlaced,
    TargetReply,
    TargetUnplaced,
    Timer,
    TimerFired,
)
from tests.unit.disturbed_session import finish, is_working, loopback_of, once
from tests.unit.session_plan import plan_of


@pytest.mark.parametrize("decide_here", [False, True])
@pytest.mark.parametrize("nth", range(7))
def test_target_lost_at_every_round(nth: int, decide_here: bool) -> None:
    """A lost target costs one rebuild elsewhere: epoch + 1, the whole prefix in one append, and the
    same candidates judged again."""
    loopback = loopback_of(plan_of(decide_here=decide_here, num_draft_tokens=3))
    loopback.targets["spare"].decide_here = decide_here

    def lose(action: Action) -> list[Event]:
        loopback.targets.pop("target").lose_sessions()
        return [Lost(Side.TARGET, "target")]

    loopback.tamper = once(lambda action: is_working(action, Side.TARGET, nth), lose)
    finish(loopback)
    opens = [
        (send, command)
        for send in loopback.sent
        for command in send.commands
        if isinstance(command, Open) and send.side is Side.TARGET
    ]
    send, opened = opens[-1]
    assert send.replica == "spare"
    assert opened.epoch == 1
    verify = send.commands[1]
    assert isinstance(verify, Verify)
    assert verify.prefix.append_from == 0


def test_target_lost_while_the_round_is_decided_here() -> None:
    """The decision stands; the new session elsewhere is not told of candidates it never had."""
    loopback = loopback_of(plan_of(decide_here=True, num_draft_tokens=3))
    loopback.targets["spare"].decide_here = True

    def lose(action: Action) -> None:
        if isinstance(action, Decide) and len(loopback.records) > 2 and not lost:
            lost.append(True)
            loopback.targets.pop("target").lose_sessions()
            loopback.inbox.appendleft(Lost(Side.TARGET, "target"))

    lost: list[bool] = []
    loopback.tamper = lose
    finish(loopback)
    assert lost
    assert not any(isinstance(action, DraftSwitchedOff) for action in loopback.others)


def test_target_lost_while_the_draft_proposes() -> None:
    """The new replica is found beside the draft's work; the proposal is judged there."""
    loopback = loopback_of()

    def lose(action: Action) -> None:
        if isinstance(action, StartTimer) and action.timer is Timer.PROPOSE and not lost:
            lost.append(True)
            loopback.targets.pop("target").lose_sessions()
            loopback.inbox.appendleft(Lost(Side.TARGET, "target"))

    lost: list[bool] = []
    loopback.tamper = lose
    stats = finish(loopback).stats
    assert set(stats.fallback_rounds) <= {"budget"}


def test_unanswered_round_is_asked_again_then_moved() -> None:
    """First the same command under the same key, then another replica and a new epoch."""
    loopback = loopback_of()
    fired = 0

    def tamper(action: Action) -> list[Event] | None:
        nonlocal fired
        if (
            isinstance(action, StartTimer)
            and action.timer is Timer.VERIFY
            and (loopback.session.target.replica == "target" and action.round == 3)
        ):
            for event in [e for e in loopback.inbox if isinstance(e, TargetReply)]:
                loopback.inbox.remove(event)
            fired += 1
            return [TimerFired(Side.TARGET, action.epoch, action.round)]
        return None

    loopback.tamper = tamper
    finish(loopback)
    assert fired == 2
    repeats = [
        c
        for s in loopback.sent
        if s.replica == "target"
        for c in s.commands
        if isinstance(c, Verify) and c.round == 3
    ]
    assert len(repeats) == 2
    assert repeats[0] == repeats[1]
    assert any(
        c.epoch == 0
        for s in loopback.sent
        if s.replica == "target"
        for c in s.commands
        if isinstance(c, Close)
    ), "the old session is closed"


def test_repeated_round_is_answered_once() -> None:
    """A repeat whose first answer arrives too commits one round: the second answer is late."""
    loopback = loopback_of()

    def tamper(action: Action) -> list[Event] | None:
        if isinstance(action, StartTimer) and action.timer is Timer.VERIFY and not repeated:
            repeated.append(action)
            loopback.inbox.appendleft(TimerFired(Side.TARGET, action.epoch, action.round))
        return None

    repeated: list[Action] = []
    loopback.tamper = tamper
    finish(loopback)
    assert repeated
    keys = [c.round for s in loopback.sent for c in s.commands if isinstance(c, Verify)]
    assert len(keys) == len(set(keys)) + 1, "one command was out twice"


def test_preempted_target_that_says_so_is_never_taken_for_lost() -> None:
    """Each deadline asks again under the same key; a replica that answers DEFERRED is there, so the
    session waits on however long the older ones take. Silence after it moves the session."""
    loopback = loopback_of()
    waits = 0
    held: list[Event] = []

    def tamper(action: Action) -> list[Event] | None:
        nonlocal waits
        if not isinstance(action, StartTimer) or action.side is Side.DRAFT or action.round != 3:
            return None
        for event in [e for e in loopback.inbox if isinstance(e, TargetReply)]:
            loopback.inbox.remove(event)
            held.append(event)
        if action.timer is Timer.VERIFY and waits < 10:
            waits += 1
            return [TargetReply(action.epoch, action.round, Deferred())]
        if action.timer is Timer.DEFERRED and waits < 10:
            return [TimerFired(Side.TARGET, action.epoch, action.round)]
        return held[-1:]

    loopback.tamper = tamper
    finish(loopback)
    assert waits == 10
    assert loopback.session.target.epoch == 0
    asked = {c for s in loopback.sent for c in s.commands if isinstance(c, Verify) and c.round == 3}
    assert len(asked) == 1


@pytest.mark.parametrize("reason", ["SESSION_NOT_FOUND", "STALE_ROUND", "ROUND_CONFLICT"])
def test_session_gone_at_the_target_is_reopened_there(reason: str) -> None:
    """An expired or confused session is opened again at epoch + 1 on the same replica."""
    loopback = loopback_of()

    def fail(action: Action) -> None:
        if is_working(action, Side.TARGET, 3) and not failed:
            failed.append(True)
            loopback.targets["target"].failures.append(Failed(reason, "scripted"))

    failed: list[bool] = []
    loopback.tamper = fail
    finish(loopback)
    epochs = [
        c.epoch
        for s in loopback.sent
        if s.side is Side.TARGET
        for c in s.commands
        if isinstance(c, Open) and s.replica == "target"
    ]
    assert epochs == [0, 1]


@pytest.mark.parametrize("reason", ["NOT_READY", "TOO_BUSY", "INTERNAL"])
def test_target_that_cannot_serve_is_left(reason: str) -> None:
    """Draining, full or broken: another replica takes over."""
    loopback = loopback_of()
    loopback.targets["target"].failures.append(Failed(reason, "scripted", retry_after_s=0.5))
    finish(loopback)
    assert loopback.targets["spare"].num_carried_out > 0


@pytest.mark.parametrize("reason", ["NUMERIC_FAULT", "OUT_OF_PAGES", "CONTEXT_TOO_LONG"])
def test_errors_that_end_the_request(reason: str) -> None:
    """NaN in a judged row, a request that can never fit: that request fails, with that reason."""
    loopback = loopback_of()
    loopback.targets["target"].failures.append(Failed(reason, "scripted"))
    ended = loopback.run()
    assert isinstance(ended, Fail)
    assert ended.failure.reason == reason


def test_failovers_are_bounded() -> None:
    """A target that never works ends the request with NOT_READY after max_failovers moves."""
    loopback = loopback_of(plan_of(max_failovers=3, num_draft_tokens=3))
    for target in loopback.targets.values():
        target.failures.extend([Failed("NOT_READY", "scripted")] * 10)
    moves: list[PlaceTarget] = []

    def watch(action: Action) -> None:
        if isinstance(action, PlaceTarget):
            moves.append(action)

    loopback.tamper = watch
    ended = loopback.run()
    assert isinstance(ended, Fail)
    assert ended.failure.reason == "NOT_READY"
    assert [move.num_moves for move in moves] == [0, 1, 2, 3]


def test_no_target_to_be_had() -> None:
    """The driver's word that no replica is there ends the request as retryable."""
    loopback = loopback_of()

    def refuse(action: Action) -> list[Event] | None:
        if isinstance(action, PlaceTarget):
            return [TargetUnplaced(action.epoch, "none is connected", 1.5)]
        return None

    loopback.tamper = refuse
    ended = loopback.run()
    assert isinstance(ended, Fail)
    assert (ended.failure.reason, ended.failure.retry_after_s) == ("NOT_READY", 1.5)


def test_target_prefix_mismatch_is_repaired() -> None:
    """After PREFIX_MISMATCH the same round goes on from the last equal page, as a new command."""
    loopback = loopback_of()

    def spoil(action: Action) -> None:
        if is_working(action, Side.TARGET, 3) and not spoiled:
            spoiled.append(True)
            session = loopback.targets["target"].sessions["s"]
            session.ledger.truncate(session.ledger.confirmed_len - 2)
            session.ledger.extend([1, 2])
            del session.kv[session.ledger.kv_len :]

    spoiled: list[bool] = []
    loopback.tamper = spoil
    finish(loopback)
    resyncs = [
        c for s in loopback.sent for c in s.commands if isinstance(c, Verify) and c.prefix.resync
    ]
    assert len(resyncs) == 1
    assert resyncs[0].candidates, "the proposal is kept"


@pytest.mark.parametrize("decide_here", [False, True])
@pytest.mark.parametrize(("draft_most", "target_most"), [(2, None), (None, 1), (1, 2), (None, 0)])
def test_replicas_are_asked_for_no_more_than_they_do(
    draft_most: int | None, target_most: int | None, decide_here: bool
) -> None:
    """Limits are each replica's own, told when it is placed; the first of a service to be met says
    nothing of the others. A round that moved to a target that judges fewer is cut to them."""
    loopback = loopback_of(plan_of(decide_here=decide_here, num_draft_tokens=4))
    loopback.targets["spare"].decide_here = decide_here
    lost: list[bool] = []

    def place(action: Action) -> list[Event] | None:
        if isinstance(action, PlaceDraft):
            return [DraftPlaced(action.epoch, "draft", 1 << 20, "d", draft_most)]
        if isinstance(action, PlaceTarget):
            name, most = ("spare", target_most) if action.epoch else ("target", None)
            return [TargetPlaced(action.epoch, name, name, most)]
        if is_working(action, Side.TARGET, 3) and not lost:
            lost.append(True)
            loopback.targets["target"].lose_sessions()
            return [Lost(Side.TARGET, "target")]
        return None

    loopback.tamper = place
    finish(loopback)
    asked = {"draft": [0], "target": [0], "spare": [0]}
    for send in loopback.sent:
        for command in send.commands:
            if isinstance(command, Verify):
                asked[send.replica].append(len(command.candidates))
            elif isinstance(command, Propose):
                asked[send.replica].append(command.num_draft_tokens)
    most = 4 if draft_most is None else draft_most
    assert max(asked["draft"]) == max(asked["target"]) == most
    assert max(asked["spare"]) == (most if target_most is None else min(most, target_most))
    assert not any(isinstance(action, DraftSwitchedOff) for action in loopback.others)
