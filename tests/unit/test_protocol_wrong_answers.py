"""Answers that no correct service gives: noticed before they count, and none changes the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.commands import Closing, Failed, Outcome, Proposal, Propose, Verdict, Verify
from coordinator.messages import (
    Action,
    Decide,
    Decided,
    DraftSwitchedOff,
    Event,
    Finish,
    IllegalEvent,
    Lost,
    PeerViolation,
    Side,
    TargetReply,
)
from coordinator.session_plan import Rule
from tests.sim.fakes import (
    VOCAB_SIZE,
    FakeDraft,
    FakeSession,
    FakeTarget,
    Loopback,
    Reply,
    agreeable,
    judge,
    make_session,
)
from tests.unit.disturbed_session import finish, is_working, loopback_of
from tests.unit.session_plan import WANTED, plan_of


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda p: Proposal(p.tokens[:-1]) if len(p.tokens) > 1 else p,
        lambda p: Proposal((), is_cut=True) if p.tokens else p,
        lambda p: Proposal((*p.tokens, 1)) if p.tokens else p,
        lambda p: Proposal(tuple(VOCAB_SIZE for _ in p.tokens)),
        lambda p: Proposal(p.tokens, rows=tuple(b"row" for _ in p.tokens)),
    ],
    ids=[
        "too few",
        "cut before the first",
        "too many",
        "outside the vocabulary",
        "rows where none belong",
    ],
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


def test_a_cut_proposal_is_judged_as_far_as_it_goes() -> None:
    """Fewer candidates than asked for, with the word that nothing could be drawn behind them: they
    are judged, the draft is asked again and told of those that were kept."""

    def cut(proposal: Proposal) -> Proposal:
        return Proposal(proposal.tokens[:1], is_cut=True) if len(proposal.tokens) > 1 else proposal

    loopback = loopback_of(draft=FakeDraft(model=agreeable, corrupt=cut))
    stats = finish(loopback).stats
    drafted = [record for record in loopback.records if record.draft_replica]
    assert {record.num_draft_tokens for record in drafted} == {1}
    assert stats.num_accepted == stats.num_draft_tokens == len(drafted) > 3
    assert not [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]


def test_missing_rows_are_a_bad_proposal_under_the_residual_rule() -> None:
    """Without the rows it was drawn from a candidate cannot be judged exactly."""
    loopback = loopback_of(plan_of(rule=Rule.RESIDUAL, num_draft_tokens=3))
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
    plan = plan_of(decide_here=decide_here, with_logprobs=True, num_draft_tokens=3)
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
    loopback = loopback_of(plan_of(decide_here=True, num_draft_tokens=3))

    def decide(action: Action) -> list[Event] | None:
        if not isinstance(action, Decide):
            return None
        return [Decided(action.epoch, action.round, Outcome(0, (), Closing.BONUS))]

    loopback.tamper = decide
    with pytest.raises(IllegalEvent, match="0 tokens"):
        loopback.run()
