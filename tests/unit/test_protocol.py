"""The session protocol without faults: order, boundaries, stops, budgets, resume, accounting."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.commands import Close, Open, Propose, Verify
from coordinator.messages import Audit, Cancel, Fail, Finish, FinishReason, PlaceDraft, Side
from coordinator.session_plan import SessionPlan
from coordinator.stages import Stage
from tests.sim.fakes import (
    FakeDraft,
    FakeTarget,
    Loopback,
    agreeable,
    expected_output,
    make_session,
    next_token,
)
from tests.unit.session_plan import PROMPT, plan_of


def run(plan: SessionPlan, draft: FakeDraft | None = None, **options: object) -> Loopback:
    target = FakeTarget(stop_ids=plan.stop_ids, decide_here=plan.decide_here)
    drafts = {} if draft is None else {draft.name: draft}
    loopback = Loopback(make_session(plan, **options), {"target": target}, drafts)  # type: ignore[arg-type]  # test options
    loopback.run()
    assert not target.sessions, "the target's session was not closed"
    assert all(not draft.sessions for draft in drafts.values())
    return loopback


@pytest.mark.parametrize("decide_here", [False, True])
@pytest.mark.parametrize("k", [None, 0, 1, 2, 5, 8])
def test_output_depends_on_the_target_alone(k: int | None, decide_here: bool) -> None:
    """Any k and either placement deliver the target's own continuation, once each."""
    plan = plan_of(num_draft_tokens=k, decide_here=decide_here)
    loopback = run(plan, FakeDraft())
    assert loopback.tokens == expected_output(PROMPT, 30)
    assert isinstance(loopback.ended, Finish)
    assert loopback.ended.reason is FinishReason.LENGTH
    assert loopback.ended.stats.completion_tokens == 30


@pytest.mark.parametrize("prompt_len", range(1, 8))
def test_prompts_shorter_than_a_block(prompt_len: int) -> None:
    """Prompts of length 1..k+2 work: nothing assumes a block fits before the first token."""
    prompt = tuple(range(1, prompt_len + 1))
    loopback = run(plan_of(prompt=prompt, max_len=prompt_len + 9, num_draft_tokens=5), FakeDraft())
    assert loopback.tokens == expected_output(prompt, 9)


def test_boundaries_follow_the_table() -> None:
    """After j < k accepted the draft is fed 1 token, after all k it is fed 2 (DESIGN section 4)."""
    loopback = run(plan_of(num_draft_tokens=3), FakeDraft())
    proposals = [
        command
        for send in loopback.sent
        if send.side is Side.DRAFT
        for command in send.commands
        if isinstance(command, Propose) and command.num_draft_tokens
    ]
    judged = [record for record in loopback.records if record.num_draft_tokens]
    outcomes = set()
    for record, following in zip(judged, proposals[1:], strict=False):
        j, k = record.num_accepted, record.num_draft_tokens
        outcomes.add(j == k)
        assert following.prefix.num_accepted == j
        assert following.prefix.base_len == record.base_len + j + 1
        valid_kv = min(record.base_len + k - 1, record.base_len + j)
        assert following.prefix.base_len - valid_kv == (2 if j == k else 1)
    assert outcomes == {True, False}, "both a rejection and a full acceptance must occur"


def test_target_settles_what_the_coordinator_decided() -> None:
    """With coordinator placement the next command tells how many pending candidates were kept."""
    loopback = run(plan_of(num_draft_tokens=3, decide_here=True), FakeDraft())
    verifies = [
        command
        for send in loopback.sent
        if send.side is Side.TARGET
        for command in send.commands
        if isinstance(command, Verify)
    ]
    assert len(verifies) == len(loopback.records)
    for record, following in zip(loopback.records, verifies[1:], strict=False):
        assert following.prefix.append_from == record.base_len
        assert following.prefix.num_accepted == record.num_accepted
    assert any(record.num_accepted for record in loopback.records)


def test_acceptance_is_full_when_draft_is_target() -> None:
    """A draft that is the target loses no candidate, at every k."""
    for k in range(1, 9):
        ended = run(plan_of(num_draft_tokens=k), FakeDraft(model=agreeable)).ended
        assert isinstance(ended, Finish)
        assert ended.stats.num_accepted == ended.stats.num_draft_tokens > 0


def test_first_token_does_not_wait_for_the_draft() -> None:
    """On a shared device nothing is sent to the draft before the first token is out."""
    plan = plan_of(num_draft_tokens=3)
    draft = FakeDraft(device_id="cpu")
    loopback = Loopback(make_session(plan), {"t": FakeTarget("t", "cpu")}, {"draft": draft})
    seen: list[int] = []

    def count_chunks(action: object) -> None:
        if getattr(action, "side", None) is Side.DRAFT and hasattr(action, "commands"):
            seen.append(len(loopback.chunks))

    loopback.tamper = count_chunks
    loopback.run()
    assert seen[0] == 1


def test_draft_prefills_beside_the_target_on_its_own_device() -> None:
    """On separate devices Open and a fill (k = 0) go to the draft before the first verdict."""
    loopback = run(plan_of(num_draft_tokens=3), FakeDraft())
    first = next(send for send in loopback.sent if send.side is Side.DRAFT)
    assert [type(command) for command in first.commands] == [Open, Propose]
    assert first.commands[1].num_draft_tokens == 0  # type: ignore[union-attr]  # checked above
    assert loopback.sent.index(first) == 1


def test_k_never_exceeds_the_budget() -> None:
    """k <= remaining - 1 at every round, and max_tokens = 1 needs no round at all."""
    for budget in range(1, 12):
        loopback = run(plan_of(max_len=len(PROMPT) + budget, num_draft_tokens=8), FakeDraft())
        assert loopback.tokens == expected_output(PROMPT, budget)
        for record in loopback.records:
            remaining = len(PROMPT) + budget - record.base_len
            assert record.num_draft_tokens <= max(0, remaining - 1)


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("stop_at", range(1, 12))
@pytest.mark.parametrize("budget", [1, 3, 6, 20])
def test_stop_token_at_every_index(k: int, stop_at: int, budget: int) -> None:
    """The output ends with the first stop token, wherever in a block it falls, or at the budget."""
    natural = expected_output(PROMPT, 20)
    stop_id = natural[stop_at - 1]
    first = natural.index(stop_id) + 1
    plan = plan_of(
        max_len=len(PROMPT) + budget,
        num_draft_tokens=k,
        stop_ids=frozenset({stop_id}),
        plain_steps=8,
    )
    loopback = run(plan, FakeDraft(model=agreeable))
    assert loopback.tokens == natural[: min(first, budget)]
    assert isinstance(loopback.ended, Finish)
    stopped = first <= budget
    assert loopback.ended.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert loopback.ended.matched_stop_token_id == (stop_id if stopped else None)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 8])
def test_stop_string_cuts_text_and_keeps_ids(k: int) -> None:
    """Text ends where the stop string begins; ids and usage include the completing token and no
    later one, wherever in a block it falls."""
    natural = expected_output(PROMPT, 30)
    stop = f"{natural[4]}.{natural[5]}"
    loopback = run(
        plan_of(num_draft_tokens=k, plain_steps=8), FakeDraft(model=agreeable), stop_strings=[stop]
    )
    assert loopback.tokens == natural[:6]
    assert loopback.text == "".join(f"{token}." for token in natural[:4])
    assert isinstance(loopback.ended, Finish)
    assert loopback.ended.matched_stop == stop
    assert loopback.ended.stats.completion_tokens == 6


@pytest.mark.parametrize("k", [0, 3, None])
def test_resume_at_every_round(k: int | None) -> None:
    """Resumed at any round boundary, the rest is what the undisturbed run would have given: ids,
    and text to the letter, held back or not."""
    natural = expected_output(PROMPT, 30)
    stops = [f"{natural[index]}.?" for index in range(30)]  # every token may begin one
    whole = run(plan_of(num_draft_tokens=k), FakeDraft(), stop_strings=stops)
    held: list[int] = []
    text = ""
    for chunk in whole.chunks[:-1]:
        held.extend(chunk.tokens)
        text += chunk.text
        plan = plan_of(num_draft_tokens=k, resume=tuple(held), resume_round=chunk.round_index + 1)
        resumed = run(plan, FakeDraft(), stop_strings=stops)
        assert held + resumed.tokens == whole.tokens
        assert text + resumed.text == whole.text
        assert resumed.chunks[0].round_index == chunk.round_index + 1
        first = next(
            command
            for send in resumed.sent
            for command in send.commands
            if isinstance(command, Verify)
        )
        assert first.prefix.append == PROMPT + tuple(held), "one command rebuilds the whole prefix"


def test_resume_of_a_finished_output_only_finishes() -> None:
    """A client that lost only the last message gets it without a token being drawn again."""
    natural = expected_output(PROMPT, 3)
    plan = plan_of(resume=tuple(natural), resume_round=2, stop_ids=frozenset({natural[-1]}))
    loopback = run(plan, FakeDraft())
    assert not loopback.sent
    assert not loopback.tokens
    assert isinstance(loopback.ended, Finish)
    assert loopback.ended.reason is FinishReason.STOP


def test_resumed_ids_past_the_end_are_refused() -> None:
    """Ids that go on after a stop token are the caller's error, naming the field."""
    plan = plan_of(resume=(1, 2, 3), resume_round=1, stop_ids=frozenset({2}))
    ended = run(plan).ended
    assert isinstance(ended, Fail)
    assert (ended.failure.reason, ended.failure.field) == ("INVALID_REQUEST", "resume_token_ids")


def test_accounts_add_up() -> None:
    """Counts of the end equal the sums over the round records, position by position."""
    loopback = run(plan_of(num_draft_tokens=4), FakeDraft())
    assert isinstance(loopback.ended, Finish)
    stats, rounds = loopback.ended.stats, [r for r in loopback.records if not r.is_prefill]
    assert stats.num_rounds == len(rounds)
    assert stats.num_draft_tokens == sum(r.num_draft_tokens for r in rounds)
    assert stats.num_accepted == sum(r.num_accepted for r in rounds)
    assert sum(stats.accepted_per_position) == stats.num_accepted
    for position, judged in enumerate(stats.judged_per_position):
        assert judged == sum(r.num_judged > position for r in rounds)
    assert sum(stats.fallback_rounds.values()) == sum(not r.num_draft_tokens for r in rounds)
    assert stats.completion_tokens == sum(r.num_committed for r in loopback.records)


def asked_steps(loopback: Loopback) -> list[int]:
    return [
        command.num_steps
        for send in loopback.sent
        for command in send.commands
        if isinstance(command, Verify)
    ]


def test_plain_decoding_asks_for_many_steps() -> None:
    """Where no candidates are wanted a command asks for all it may at once, be it the request or
    the policy that wants none; where a draft may come back, for more the longer none was there."""
    fixed = run(plan_of(num_draft_tokens=0, plain_steps=8))
    assert asked_steps(fixed) == [1, 8, 8, 8, 5]
    assert not any(isinstance(action, PlaceDraft) for action in fixed.others)
    away = run(plan_of(plain_steps=8))
    assert asked_steps(away) == [1, 1, 2, 4, 8, 8, 6]
    unwanted = run(plan_of(plain_steps=8), FakeDraft(), choose=lambda limit: 0)
    assert asked_steps(unwanted) == asked_steps(fixed)


@pytest.mark.parametrize(("num_drafted", "steps"), [(1, [64]), (3, [64]), (4, [8, 64])])
def test_plain_decoding_goes_on_after_a_trial(num_drafted: int, steps: list[int]) -> None:
    """After up to three rounds with candidates plain commands are as long as before; where there
    were more the policy is asked again soon."""
    loopback: Loopback

    asked_at: set[int] = set()

    def choose(limit: int) -> int:
        asked_at.add(loopback.session.ledger.confirmed_len)
        return min(limit, 2) if len(asked_at - {len(PROMPT)}) <= num_drafted else 0

    plan = plan_of(max_len=len(PROMPT) + 200, plain_steps=64)
    loopback = Loopback(
        make_session(plan, choose), {"target": FakeTarget()}, {"draft": FakeDraft()}
    )
    loopback.run()
    plain = [count for count in asked_steps(loopback) if count > 1]
    assert plain[: len(steps)] == steps


def test_a_session_that_wants_no_candidates_does_what_a_plain_request_does() -> None:
    """At k = 0 under the policy every command is that of a request for k = 0, none of them is the
    draft's, and nothing is appended or filled there."""
    fixed = run(plan_of(num_draft_tokens=0, plain_steps=8), FakeDraft())
    chosen = run(plan_of(plain_steps=8), FakeDraft(), choose=lambda limit: 0)
    assert [send for send in chosen.sent if send.side is Side.DRAFT] == []
    assert [send.commands for send in chosen.sent] == [send.commands for send in fixed.sent]


def test_audited_rounds_come_back_with_rows() -> None:
    """With ratio 1 every round of the target is handed to the audit with its rows."""
    loopback = run(plan_of(num_draft_tokens=2, audit_ratio=1.0), FakeDraft())
    rounds = [record for record in loopback.records if not record.is_prefill]
    assert len(loopback.audits) == len(rounds)
    assert all(record.audited for record in rounds)
    for audit in loopback.audits:
        assert isinstance(audit, Audit)
        assert len(audit.target_rows) == len(audit.candidates) + 1


def test_no_round_is_audited_whose_rows_fill_a_message() -> None:
    """What watches a round must not fail it: the rows of two candidates do not fit, those of one
    at the end do, and a round without any is audited as ever."""
    plan = plan_of(num_draft_tokens=2, audit_ratio=1.0, max_rows=2)
    rounds = [each for each in run(plan, FakeDraft()).records if not each.is_prefill]
    assert {each.num_draft_tokens for each in rounds} >= {2, 1}
    assert all(each.audited == (each.num_draft_tokens < 2) for each in rounds)


@pytest.mark.parametrize(("max_rows", "most"), [(3, 2), (1, 0), (0, 0), (None, 4)])
def test_blocks_decided_here_are_as_long_as_their_rows_fit(max_rows: int | None, most: int) -> None:
    """A row for each candidate and one for the bonus come in one message."""
    plan = plan_of(num_draft_tokens=4, decide_here=True, max_rows=max_rows)
    loopback = run(plan, FakeDraft())
    assert max(each.num_draft_tokens for each in loopback.records) == most


@pytest.mark.parametrize("k", [0, 3])
def test_cancel_after_every_event(k: int) -> None:
    """Cancelled anywhere, the session closes what it opened, fails once and ignores the rest."""
    total = 0
    while True:
        plan = plan_of(num_draft_tokens=k, max_len=len(PROMPT) + 8)
        target, draft = FakeTarget(), FakeDraft()
        loopback = Loopback(make_session(plan), {"target": target}, {"draft": draft})
        seen: list[object] = []

        def cancel_later(
            action: object, seen: list[object] = seen, at: int = total, inbox: Any = loopback.inbox
        ) -> None:
            seen.append(action)
            if len(seen) == at:
                inbox.appendleft(Cancel("CANCELLED", "gone"))

        loopback.tamper = cancel_later
        ended = loopback.run()
        assert loopback.session.stage is Stage.DONE
        assert not target.sessions
        assert not draft.sessions
        if isinstance(ended, Finish) and len(seen) < total:
            break
        if isinstance(ended, Fail):
            assert ended.failure.reason == "CANCELLED"
            produced = loopback.tokens
            assert produced == expected_output(PROMPT, len(produced))
        total += 1
    assert total > 10


def test_closing_happens_once_per_side() -> None:
    """A finished session sends exactly one Close to each side it opened."""
    loopback = run(plan_of(num_draft_tokens=2), FakeDraft())
    closes = [
        send.side
        for send in loopback.sent
        for command in send.commands
        if isinstance(command, Close)
    ]
    assert sorted(side.value for side in closes) == ["draft", "target"]


@pytest.mark.parametrize("decide_here", [False, True])
@pytest.mark.parametrize("cycle", [(3, 0, 3), (1, 8, 0, 0, 2), (0, 5)])
def test_k_may_change_at_every_round(cycle: tuple[int, ...], decide_here: bool) -> None:
    """k = 3, 0, 3 and the like: what was not fed meanwhile is fed then, the tokens are the same."""
    plan = plan_of(decide_here=decide_here, plain_steps=4)
    loopback: Loopback

    def choose(limit: int) -> int:
        return min(limit, cycle[len(loopback.records) % len(cycle)])

    loopback = Loopback(
        make_session(plan, choose),
        {"target": FakeTarget(decide_here=decide_here)},
        {"draft": FakeDraft()},
    )
    loopback.run()
    assert loopback.tokens == expected_output(PROMPT, 30)
    assert len({record.num_draft_tokens for record in loopback.records}) >= 2


def test_choice_is_made_before_the_draw() -> None:
    """The policy is asked with the room left and nothing else; what it says is what is drafted."""
    asked: list[int] = []

    def choose(limit: int) -> int:
        asked.append(limit)
        return min(2, limit)

    plan = plan_of(max_len=len(PROMPT) + 5, max_num_draft_tokens=4)
    loopback = Loopback(
        make_session(plan, choose), {"target": FakeTarget()}, {"draft": FakeDraft()}
    )
    loopback.run()
    assert max(asked) <= 4
    assert all(record.num_draft_tokens <= 2 for record in loopback.records)
    assert next_token(PROMPT) == loopback.tokens[0]
