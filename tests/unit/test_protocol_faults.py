"""The session protocol under faults: what each one costs, and that none changes the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.messages import (
    Action,
    Close,
    Closing,
    Decide,
    Decided,
    Deferred,
    DraftPlaced,
    DraftReply,
    DraftSwitchedOff,
    Event,
    Fail,
    Failed,
    Finish,
    IllegalEvent,
    Lost,
    Open,
    Opened,
    Outcome,
    PeerViolation,
    PlaceDraft,
    PlaceTarget,
    Proposal,
    Propose,
    RoundDone,
    Rule,
    Send,
    SessionPlan,
    Side,
    StartTimer,
    TargetPlaced,
    TargetReply,
    TargetUnplaced,
    Timer,
    TimerFired,
    Verdict,
    Verify,
)
from tests.sim.fakes import (
    VOCAB_SIZE,
    FakeDraft,
    FakeSession,
    FakeTarget,
    Loopback,
    Reply,
    expected_output,
    judge,
    make_session,
)

PROMPT = (11, 12)
NUM_TOKENS = 24
WANTED = expected_output(PROMPT, NUM_TOKENS)


def plan_of(**changes: object) -> SessionPlan:
    fields: dict[str, object] = {
        "prompt": PROMPT,
        "max_len": len(PROMPT) + NUM_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "rule": Rule.COUPLED,
        "num_draft_tokens": 3,
    }
    return SessionPlan(**{**fields, **changes})  # type: ignore[arg-type]  # test fields


def loopback_of(
    plan: SessionPlan | None = None,
    draft: FakeDraft | None = None,
    target: FakeTarget | None = None,
) -> Loopback:
    plan = plan or plan_of()
    target = target or FakeTarget(decide_here=plan.decide_here)
    draft = draft or FakeDraft()
    return Loopback(
        make_session(plan),
        {target.name: target, "spare": FakeTarget("spare")},
        {draft.name: draft},
    )


def finish(loopback: Loopback) -> Finish:
    """Run to the end, which must be the undisturbed one."""
    ended = loopback.run()
    assert isinstance(ended, Finish), ended
    assert loopback.tokens == WANTED
    for service in (*loopback.targets.values(), *loopback.drafts.values()):
        assert not service.sessions, f"{service.name} holds a session"
    return ended


def once(
    when: Callable[[Action], bool], events: Callable[[Action], list[Event]]
) -> Callable[[Action], list[Event] | None]:
    """Tamper with the first action that matches."""
    done = False

    def tamper(action: Action) -> list[Event] | None:
        nonlocal done
        if done or not when(action):
            return None
        done = True
        return events(action)

    return tamper


def is_working(action: Action, side: Side, nth: int = 1) -> bool:
    """Whether the action sends a working command numbered >= nth to this side."""
    return (
        isinstance(action, Send)
        and action.side is side
        and any(isinstance(c, Verify | Propose) and c.round >= nth for c in action.commands)
    )


# ---------------------------------------------------------------- draft


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
    """Each draft error is a k = 0 round with its reason; final are those that may come with a token
    that was drawn, for a draft that fails on some tokens only proposes from another law."""
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


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda p: Proposal(p.tokens[:-1]) if len(p.tokens) > 1 else p,
        lambda p: Proposal((*p.tokens, 1)) if p.tokens else p,
        lambda p: Proposal(tuple(VOCAB_SIZE for _ in p.tokens)),
        lambda p: Proposal(p.tokens, rows=tuple(b"row" for _ in p.tokens)),
    ],
    ids=["too few", "too many", "outside the vocabulary", "rows where none belong"],
)
def test_bad_proposals_switch_the_draft_off(corrupt: Callable[[Proposal], Proposal]) -> None:
    """A proposal whose content fails a check is never judged and the draft never asked again."""
    loopback = loopback_of(draft=FakeDraft(corrupt=corrupt))
    stats = finish(loopback).stats
    assert stats.num_draft_tokens == 0
    asked = [s for s in loopback.sent if is_working(s, Side.DRAFT, 0)]
    assert len(asked) == 2  # the fill and the first proposal
    off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
    assert [action.reason for action in off] == ["draft_bad_proposal"]


def test_missing_rows_are_a_bad_proposal_under_the_residual_rule() -> None:
    """Without the rows it was drawn from a candidate cannot be judged exactly."""
    loopback = loopback_of(plan_of(rule=Rule.RESIDUAL))
    finish(loopback)
    assert any(isinstance(action, DraftSwitchedOff) for action in loopback.others)


def test_refuted_redraw_switches_the_draft_off() -> None:
    """The target's re-draw check ends drafting for the request and is reported as such."""
    loopback = loopback_of(target=FakeTarget(refute=True))
    stats = finish(loopback).stats
    off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
    assert [action.reason for action in off] == ["draft_redraw_mismatch"]
    assert stats.num_accepted == 0
    assert sum(r.redraw_mismatch is not None for r in loopback.records) == 1


@pytest.mark.parametrize("reason", ["INVALID_REQUEST", "CORRUPT_FRAME"])
def test_target_that_refuses_candidates(reason: str) -> None:
    """Candidates that the target refuses cost the draft; the round goes on at the same base."""
    loopback = loopback_of()

    def fail(action: Action) -> None:
        if is_working(action, Side.TARGET, 2) and not failed:
            failed.append(True)
            loopback.targets["target"].failures.append(Failed(reason, "scripted"))

    failed: list[bool] = []
    loopback.tamper = fail
    stats = finish(loopback).stats
    assert stats.fallback_rounds["draft_bad_proposal"] >= 1
    assert any(isinstance(action, DraftSwitchedOff) for action in loopback.others)


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


# ---------------------------------------------------------------- target


@pytest.mark.parametrize("decide_here", [False, True])
@pytest.mark.parametrize("nth", range(7))
def test_target_lost_at_every_round(nth: int, decide_here: bool) -> None:
    """A lost target costs one rebuild elsewhere: epoch + 1, the whole prefix in one append, and the
    same candidates judged again."""
    loopback = loopback_of(plan_of(decide_here=decide_here))
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
    loopback = loopback_of(plan_of(decide_here=True))
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
    loopback = loopback_of(plan_of(max_failovers=3))
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


def test_verdict_that_contradicts_its_command_changes_nothing() -> None:
    """A verdict no correct target gives is refused; the driver drops the link and it is redone."""
    loopback = loopback_of()
    refused = 0

    def deliver(event: Event) -> None:
        nonlocal refused
        if (
            isinstance(event, TargetReply)
            and event.round == 2
            and not refused
            and isinstance(event.body, Verdict)
        ):
            refused += 1
            forged = TargetReply(event.epoch, event.round, Verdict(None))
            with pytest.raises(PeerViolation):
                loopback.session.step(forged)
            event = Lost(Side.TARGET, "target")
        Loopback.deliver(loopback, event)

    loopback.deliver = deliver  # type: ignore[method-assign]  # scripted
    ended = loopback.run()
    assert isinstance(ended, Finish)
    assert loopback.tokens == WANTED
    assert refused == 1


class TargetWithLogprobs(FakeTarget):
    """Sends a row of log-probabilities with each row, but for its second answer: that one `lacks`
    some of them."""

    lacks = 0

    def _work(self, session: FakeSession, command: Verify | Propose) -> Reply:
        reply = super()._work(session, command)
        assert isinstance(reply, TargetReply)
        assert isinstance(reply.body, Verdict)
        verdict = reply.body
        if verdict.outcome is None:
            rows = tuple(b"row" for _ in verdict.rows)
            verdict = replace(verdict, logprob_rows=rows[: len(rows) - self._missing()])
        else:
            own = tuple("logprob" for _ in verdict.outcome.tokens)
            outcome = replace(verdict.outcome, logprobs=own[: len(own) - self._missing()])
            verdict = replace(verdict, outcome=outcome)
        return replace(reply, body=verdict)

    def _missing(self) -> int:
        return self.lacks if self.num_carried_out == 1 else 0


@pytest.mark.parametrize("decide_here", [False, True])
@pytest.mark.parametrize("lacks", [1, 100])
def test_missing_logprobs_are_noticed_while_the_round_can_be_asked_again(
    decide_here: bool, lacks: int
) -> None:
    """A verdict with too few log-probabilities, or none, is refused on arrival: a round that was
    decided before anyone counted them could not go on at all."""
    plan = plan_of(decide_here=decide_here, with_logprobs=True)
    targets = {name: TargetWithLogprobs(name, decide_here=decide_here) for name in ("t0", "t1")}
    targets["t0"].lacks = lacks
    draft = FakeDraft()
    loopback = Loopback(make_session(plan), dict(targets), {draft.name: draft})
    violations = []

    def decide(action: Action) -> list[Event] | None:
        if not isinstance(action, Decide):
            return None
        outcome = judge(action.candidates, action.target_rows, frozenset())
        logprobs = action.logprob_rows[: len(outcome.tokens)]
        return [Decided(action.epoch, action.round, replace(outcome, logprobs=logprobs))]

    def deliver(event: Event) -> None:
        try:
            Loopback.deliver(loopback, event)
        except PeerViolation as violation:  # as coordinator/driver.py does
            violations.append(violation)
            targets["t0"].lose_sessions()
            loopback.inbox.append(Lost(Side.TARGET, "t0"))

    loopback.deliver = deliver  # type: ignore[method-assign]  # scripted
    loopback.tamper = decide
    finish(loopback)
    assert len(violations) == 1
    assert "logprobs" in violations[0].message


def test_decision_made_here_that_contradicts_its_round_is_a_bug_of_ours() -> None:
    """Nobody would decide again: the driver must end the request, not leave the target and wait."""
    loopback = loopback_of(plan_of(decide_here=True))

    def decide(action: Action) -> list[Event] | None:
        if not isinstance(action, Decide):
            return None
        return [Decided(action.epoch, action.round, Outcome(0, (), Closing.BONUS))]

    loopback.tamper = decide
    with pytest.raises(IllegalEvent, match="0 tokens"):
        loopback.run()


# ---------------------------------------------------------------- everything at once


class Chaos:
    """Injects faults at random, from one seed: only such as the network or a peer can cause."""

    def __init__(self, loopback: Loopback, seed: int, num_faults: int) -> None:
        self.loopback = loopback
        self.rng = random.Random(seed)
        self.left = num_faults
        self.kinds: list[str] = []

    def __call__(self, action: Action) -> list[Event] | None:
        if self.left == 0 or self.rng.random() > 0.2:
            return None
        fault = self.rng.choice(
            ["lose", "timer", "duplicate", "delay", "drop", "fail", "fail_later", "expire", "defer"]
        )
        acted = getattr(self, "_" + fault)(action)
        if acted is not None:
            self.left -= 1
            self.kinds.append(fault)
        return None if acted is None or acted is True else acted  # type: ignore[no-any-return]  # fault methods return events or True

    def _lose(self, action: Action) -> object:
        if not isinstance(action, Send):
            return None
        services = self.loopback.targets if action.side is Side.TARGET else self.loopback.drafts
        services[action.replica].lose_sessions()
        return [Lost(action.side, action.replica)]

    def _timer(self, action: Action) -> object:
        if isinstance(action, StartTimer):
            self.loopback.inbox.appendleft(TimerFired(action.side, action.epoch, action.round))
            return True
        return None

    def _duplicate(self, action: Action) -> object:
        replies = [e for e in self.loopback.inbox if isinstance(e, TargetReply | DraftReply)]
        if replies:
            self.loopback.inbox.append(self.rng.choice(replies))
            return True
        return None

    def _delay(self, action: Action) -> object:
        inbox = self.loopback.inbox
        drafts = [e for e in inbox if isinstance(e, DraftReply)]
        if drafts and any(isinstance(e, TimerFired | TargetReply) for e in inbox):
            inbox.remove(drafts[0])
            inbox.append(drafts[0])
            return True
        return None

    def _drop(self, action: Action) -> object:
        parts = [
            e for e in self.loopback.inbox if isinstance(e, TargetReply) and e.body != Opened()
        ]
        if parts:
            self.loopback.inbox.remove(self.rng.choice(parts))
            return True
        return None

    def _fail_later(self, action: Action) -> object:
        target = self.rng.choice(list(self.loopback.targets.values()))
        reasons = ["NOT_READY", "INTERNAL", "SESSION_NOT_FOUND"]
        failure = Failed(self.rng.choice(reasons), "scripted")
        target.part_failures.extend([None] * self.rng.randrange(3) + [failure])
        return True

    def _fail(self, action: Action) -> object:
        if not isinstance(action, Send):
            return None
        reasons = ["NOT_READY", "TOO_BUSY", "SESSION_NOT_FOUND", "STALE_ROUND"]
        service = (self.loopback.targets if action.side is Side.TARGET else self.loopback.drafts)[
            action.replica
        ]
        service.failures.append(Failed(self.rng.choice(reasons), "scripted"))
        return True

    def _expire(self, action: Action) -> object:
        service = self.rng.choice([*self.loopback.targets.values(), *self.loopback.drafts.values()])
        service.lose_sessions()
        return True

    def _defer(self, action: Action) -> object:
        if isinstance(action, StartTimer):
            kind = TargetReply if action.side is Side.TARGET else DraftReply
            self.loopback.inbox.appendleft(kind(action.epoch, action.round, Deferred()))
            return True
        return None


@pytest.mark.parametrize("block", range(20))
def test_random_faults_never_change_the_output(block: int) -> None:
    """20 seeds a block: whatever is lost, late, doubled or refused, the tokens are the same."""
    kinds: set[str] = set()
    for seed in range(20 * block, 20 * block + 20):
        decide_here = seed % 3 == 0
        k = (None, 0, 1, 3, 6)[seed % 5]
        plan = plan_of(
            decide_here=decide_here, num_draft_tokens=k, max_failovers=100, max_round_retries=3
        )
        loopback = Loopback(
            make_session(plan),
            {
                name: FakeTarget(name, decide_here=decide_here, chains=chains)
                for name, chains in (("t0", (1, 8)), ("t1", (4, 2, 1)))
            },
            {name: FakeDraft(name) for name in ("d0", "d1")},
            violations=[],
        )
        chaos = Chaos(loopback, seed, num_faults=12)
        loopback.tamper = chaos
        ended = loopback.run()
        assert isinstance(ended, Finish), (seed, chaos.kinds, ended)
        assert loopback.tokens == WANTED, (seed, chaos.kinds)
        off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
        assert not off, (seed, chaos.kinds, "no fault here is one of content")
        kinds.update(chaos.kinds)
    assert len(kinds) >= 6


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
