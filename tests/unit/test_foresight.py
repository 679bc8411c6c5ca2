"""Rounds whose candidates were drafted ahead: what is taken, what the draft is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from coordinator.commands import (
    Ahead,
    Command,
    Continuation,
    Failed,
    Proposal,
    Propose,
    Verdict,
    Verify,
)
from coordinator.drafting import DraftState
from coordinator.foresight import NUM_RESTS, Foresight
from coordinator.messages import (
    Action,
    DraftReply,
    DraftSwitchedOff,
    Event,
    Send,
    Side,
    StartTimer,
    TargetReply,
    Timer,
    TimerFired,
)
from coordinator.session_plan import Rule, SessionPlan
from tests.sim.fakes import FakeDraft, Loopback, agreeable, fickle
from tests.unit.disturbed_session import finish, is_working, loopback_of, once
from tests.unit.session_plan import plan_of

K = 3


def ahead_plan(**changes: object) -> SessionPlan:
    """Blocks of K, and continuations of each."""
    fields = {"num_draft_tokens": K, "rule": Rule.RESIDUAL, "num_ahead": K + 1, **changes}
    return plan_of(**fields)


def commands_of(loopback: Loopback, side: Side) -> list[Verify | Propose]:
    """Working commands that went to a side, in order."""
    return [
        command
        for send in loopback.sent
        if send.side is side
        for command in send.commands
        if isinstance(command, Verify | Propose)
    ]


# ---------------------------------------------------------------- what a round takes


def proposal(*tokens: int) -> Proposal:
    """Candidates, a row and a share of dropped mass each."""
    return Proposal(tokens, tuple(f"row {token}" for token in tokens), (0.01,) * len(tokens))


def foresight_of(*continuations: Continuation) -> Foresight:
    """After a proposal of 5, 6, 7."""
    foresight = Foresight()
    foresight.answered((5, 6, 7))
    foresight.keep((5, 6, 7), K, Ahead(continuations))
    return foresight


def test_a_continuation_is_found_by_the_tokens_that_lead_to_it() -> None:
    """The candidates kept, then the closing token: nothing shorter, longer or other fits."""
    foresight = foresight_of(
        Continuation(0, 9, proposal(1, 2, 3)), Continuation(2, 9, proposal(4, 4, 4))
    )
    assert foresight.take((5, 6, 9), 3) == proposal(4, 4, 4)
    for path in ((9, 9), (5, 9), (5, 6), (5, 6, 8), (), (5, 6, 9, 1)):
        assert foresight.take(path, 3) is None
    foresight.forget()
    assert foresight.take((5, 6, 9), 3) is None


def test_a_round_takes_as_many_candidates_as_it_wants() -> None:
    """Fewer are a beginning, with their rows; more were not drafted, whatever ends them."""
    continuation = Continuation(0, 9, proposal(1, 2, 3))
    assert foresight_of(continuation).take((9,), 2) == proposal(1, 2)
    assert foresight_of(continuation).take((9,), 4) is None
    assert foresight_of(continuation).take((9,), 0) is None


def test_a_continuation_that_was_cut_is_taken_as_any_other() -> None:
    """It is what the draft would answer; left out for its length it were left out by its values."""
    cut = replace(proposal(1, 2), is_cut=True)
    continuation = Continuation(0, 9, cut)
    assert foresight_of(continuation).take((9,), 3) == cut
    assert foresight_of(continuation).take((9,), 2) == proposal(1, 2)
    assert foresight_of(continuation).take((9,), 1) == proposal(1)
    assert foresight_of(continuation).take((9,), 4) is None


@pytest.mark.parametrize(
    ("own", "num_accepted", "kept"),
    [((1, 2, 3), 2, 2), ((1, 2, 3), 3, 3), ((1, 8, 3), 3, 1), ((8, 2, 3), 3, 0), ((1,), 2, 1)],
)
@pytest.mark.parametrize("judged_first", [False, True])
def test_a_draft_is_told_of_candidates_that_it_has(
    own: tuple[int, ...], num_accepted: int, kept: int, judged_first: bool
) -> None:
    """What the round took may differ from the draft's own answer by rounding: only what both begin
    with was fed there. The verdict may come before that answer, or after it."""
    foresight = foresight_of(Continuation(0, 9, proposal(1, 2, 3)))
    assert foresight.take((9,), 3) is not None
    if judged_first:
        assert foresight.judged(num_accepted) is None
        assert foresight.answered(own) == kept
    else:
        assert foresight.answered(own) == 0
        assert foresight.judged(num_accepted) == kept


def test_a_draft_that_does_not_answer_is_told_of_nothing_kept() -> None:
    """It has not drafted what the round took."""
    foresight = foresight_of(Continuation(0, 9, proposal(1, 2, 3)))
    foresight.take((9,), 3)
    foresight.unanswered()
    assert foresight.judged(3) == 0


def test_a_draft_that_works_in_vain_is_let_alone_for_a_while() -> None:
    """After four proposals in a row whose continuations never came in time none is asked for with
    the next 64; one that comes begins the count anew."""
    foresight = Foresight()
    assert [foresight.num_worth(8) for _ in range(3)] == [8] * 3
    foresight.keep((5,), 1, Ahead(()))
    assert [foresight.num_worth(8) for _ in range(4)] == [8] * 4
    assert [foresight.num_worth(8) for _ in range(NUM_RESTS)] == [0] * NUM_RESTS
    assert [foresight.num_worth(8) for _ in range(4)] == [8] * 4
    assert foresight.num_worth(8) == 0
    assert [Foresight().num_worth(0) for _ in range(9)] == [0] * 9


# ---------------------------------------------------------------- rounds


def with_slow_target(loopback: Loopback) -> Loopback:
    """Verdicts come when nothing more can come from the draft."""
    deliver = loopback.deliver

    def draft_first(event: Event) -> None:
        is_verdict = isinstance(event, TargetReply) and isinstance(event.body, Verdict)
        more = any(isinstance(other, DraftReply) for other in loopback.inbox)
        if is_verdict and (more or any(draft.foresees for draft in loopback.drafts.values())):
            loopback.inbox.append(event)
        else:
            deliver(event)

    loopback.deliver = draft_first  # type: ignore[method-assign]  # the order of events
    return loopback


def test_rounds_begin_with_candidates_drafted_ahead() -> None:
    """All but the first; the target is asked before the draft is told; no other number changes."""
    loopback = with_slow_target(loopback_of(ahead_plan()))
    stats = finish(loopback).stats
    assert stats == finish(loopback_of(ahead_plan(rule=Rule.COUPLED))).stats
    drafted = [record for record in loopback.records if record.num_draft_tokens]
    assert [record.was_ahead for record in drafted] == [False, *[True] * (len(drafted) - 1)]
    working = [c for send in loopback.sent for c in send.commands if is_round(c)]
    kinds = [type(command) for command in working]
    assert kinds[:8] == [Propose, Verify, Verify, Propose, Verify, Propose, Verify, Propose]


def is_round(command: Command) -> bool:
    """Whether it proposes or judges candidates."""
    if isinstance(command, Propose):
        return command.num_draft_tokens > 0
    return isinstance(command, Verify) and bool(command.candidates)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_other_rules_ask_for_none(rule: Rule) -> None:
    """Without rows a draft says little of what may close a round."""
    loopback = loopback_of(ahead_plan(rule=rule))
    finish(loopback)
    asked = [c for c in commands_of(loopback, Side.DRAFT) if isinstance(c, Propose)]
    assert asked
    assert not any(command.num_ahead for command in asked)


@pytest.mark.parametrize("ahead_model", [agreeable, lambda prefix: 1], ids=["better", "worse"])
def test_a_draft_may_answer_otherwise_than_it_had_drafted_ahead(
    ahead_model: Callable[[Sequence[int]], int],
) -> None:
    """The round keeps what it took; the draft's K/V stays right (the fake checks each entry)."""
    draft = FakeDraft(model=fickle)
    draft.ahead_model = ahead_model
    loopback = with_slow_target(loopback_of(ahead_plan(), draft))
    finish(loopback)
    assert sum(record.was_ahead for record in loopback.records) > 3


def test_a_round_waits_for_the_answer_to_the_one_before() -> None:
    """The verdict may overtake the draft's own answer: the draft has one command out, so the next
    round's candidates are asked for when it has come."""
    loopback = loopback_of(ahead_plan())  # the target answers at once
    waited: set[int] = set()
    deliver = loopback.deliver

    def watched(event: Event) -> None:
        deliver(event)
        if loopback.session.draft.state is DraftState.CONFIRMING:
            waited.add(loopback.session.draft.awaited_k)

    loopback.deliver = watched  # type: ignore[method-assign]  # looks on
    finish(loopback)
    assert waited >= {0, K}


@pytest.mark.parametrize("nth", range(2, 6))
def test_a_late_answer_costs_the_round_nothing(nth: int) -> None:
    """The deadline of an answer that no round waits for leaves its round alone; rounds go on
    without candidates until it is there."""
    loopback = with_slow_target(loopback_of(ahead_plan()))
    fired: list[TimerFired] = []

    def fire(action: Action) -> list[Event] | None:
        is_own = isinstance(action, StartTimer) and action.timer is Timer.PROPOSE
        if is_own and loopback.session.draft.state is DraftState.CONFIRMING and len(fired) < nth:
            fired.append(TimerFired(action.side, action.epoch, action.round))
            if len(fired) == nth:
                loopback.inbox.appendleft(fired[-1])
        return None

    loopback.tamper = fire
    finish(loopback)
    assert len(fired) == nth
    reasons = {record.fallback for record in loopback.records if not record.num_draft_tokens}
    assert reasons <= {"", "draft_late", "budget"}


@pytest.mark.parametrize("reason", ["TOO_BUSY", "SESSION_NOT_FOUND", "OUT_OF_PAGES"])
@pytest.mark.parametrize("nth", [2, 3, 4])
def test_a_draft_that_fails_behind_its_own_candidates(reason: str, nth: int) -> None:
    """The round that took them is judged all the same; the draft is told of none of them."""
    loopback = with_slow_target(loopback_of(ahead_plan()))

    def fail(action: Action) -> list[Event]:
        assert isinstance(action, Send)
        loopback.drafts["draft"].failures.append(Failed(reason, "scripted"))
        loopback.perform(action)
        return []

    loopback.tamper = once(lambda action: is_working(action, Side.DRAFT, nth), fail)
    finish(loopback)
    assert sum(record.was_ahead for record in loopback.records) >= 2


SPOILED: dict[str, Callable[[Ahead], Ahead]] = {
    "too many": lambda ahead: Ahead(ahead.continuations * 2),
    "a row too few": lambda ahead: changed(ahead, lambda p: replace(p, rows=p.rows[:-1])),
    "outside the vocabulary": lambda ahead: changed(
        ahead, lambda p: replace(p, tokens=(1 << 20, *p.tokens[1:]))
    ),
    "too few candidates": lambda ahead: changed(
        ahead, lambda p: replace(p, tokens=p.tokens[:-1], rows=p.rows[:-1])
    ),
}


def changed(ahead: Ahead, change: Callable[[Proposal], Proposal]) -> Ahead:
    """The same with another last proposal."""
    *others, last = ahead.continuations
    return Ahead((*others, last._replace(proposal=change(last.proposal))))


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_bad_continuations_switch_the_draft_off(spoil: Callable[[Ahead], Ahead]) -> None:
    """One that no draft sends is a fault of content: reported, and nothing of it is judged."""
    draft = FakeDraft()
    draft.spoil = spoil  # type: ignore[method-assign]  # an option of the fake
    loopback = loopback_of(ahead_plan(), draft)
    finish(loopback)
    off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
    assert [action.reason for action in off] == ["draft_bad_proposal"]
    assert not any(record.was_ahead for record in loopback.records)


def test_continuations_that_nobody_asked_for_switch_the_draft_off() -> None:
    """A draft that sends them all the same is one that does not keep to its commands."""
    loopback = loopback_of(ahead_plan(num_ahead=0))
    deliver = loopback.deliver

    def unasked(event: Event) -> None:
        deliver(event)
        if isinstance(event, DraftReply) and isinstance(event.body, Proposal):
            ahead = Ahead((Continuation(0, 1, event.body),))
            deliver(DraftReply(event.epoch, event.round, ahead))

    loopback.deliver = unasked  # type: ignore[method-assign]  # adds to what arrives
    loopback.run()
    off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
    assert [action.reason for action in off] == ["draft_bad_proposal"]


def test_continuations_of_a_fill_switch_the_draft_off() -> None:
    """Nothing was drafted: whatever is sent as if, empty or not, is a fault and no crash."""
    loopback = loopback_of(ahead_plan(parallel_prefill=True))
    deliver = loopback.deliver
    verdicts: list[Event] = []  # held back until the fill is answered, and then some

    def unasked(event: Event) -> None:
        is_verdict = isinstance(event, TargetReply) and isinstance(event.body, Verdict)
        if is_verdict and not loopback.session.draft.reason.startswith("draft_bad"):
            verdicts.append(event)
            return
        deliver(event)
        if isinstance(event, DraftReply) and event.body == Proposal(()):
            empty = tuple(Continuation(0, token, Proposal(())) for token in range(K + 1))
            deliver(DraftReply(event.epoch, event.round, Ahead(empty)))
            loopback.inbox.extend(verdicts)

    loopback.deliver = unasked  # type: ignore[method-assign]  # adds to what arrives
    finish(loopback)
    off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
    assert [action.reason for action in off] == ["draft_bad_proposal"]


def test_what_was_drafted_ahead_is_not_kept_beyond_its_round() -> None:
    """A round without candidates leaves nothing of it."""
    loopback = with_slow_target(loopback_of(ahead_plan(num_draft_tokens=None)))
    session = loopback.session
    session._choose = lambda limit: min(limit, K) if session.round_index <= 3 else 0
    deliver = loopback.deliver
    kept: list[int] = []

    def watched(event: Event) -> None:
        deliver(event)
        kept.append(len(session.draft._foresight._by_path))

    loopback.deliver = watched  # type: ignore[method-assign]  # looks on
    finish(loopback)
    assert any(record.was_ahead for record in loopback.records)
    assert max(kept) > 0
    assert kept[-1] == 0
