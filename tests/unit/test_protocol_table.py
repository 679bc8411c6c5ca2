"""The transition tables: every (state, event) is a row, or refused with the state unchanged."""

from __future__ import annotations

import dataclasses
from collections import deque
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

import coordinator
from coordinator import messages
from coordinator.commands import Closing, Deferred, Failed, Opened, Outcome, Proposal, Verdict
from coordinator.drafting import DRAFT_TRANSITIONS, DraftState
from coordinator.messages import (
    Begin,
    Cancel,
    Decided,
    DecisionFailed,
    DraftPlaced,
    DraftReply,
    IllegalEvent,
    Lost,
    PeerViolation,
    Side,
    TargetPlaced,
    TargetReply,
    TargetUnplaced,
    TimerFired,
)
from coordinator.protocol import Session
from coordinator.session_plan import Rule, SessionPlan
from coordinator.stages import TRANSITIONS, Stage
from specmesh import errors
from tests.sim.fakes import VOCAB_SIZE, FakeDraft, FakeTarget, Loopback, make_session

EVENTS = get_args(messages.Event)
PROMPT = (3, 4)


def freeze(value: Any) -> Any:
    """The whole state as a comparable value. Pending actions are output, not state."""
    if isinstance(value, (str, bytes, int, float, bool, type(None), Enum)):
        return value
    if isinstance(value, dict):
        return tuple(sorted((repr(key), freeze(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return tuple(freeze(item) for item in value)
    if dataclasses.is_dataclass(value):
        return tuple((f.name, freeze(getattr(value, f.name))) for f in dataclasses.fields(value))
    if hasattr(value, "getstate"):  # the UTF-8 decoder
        return freeze(value.getstate())
    if callable(value):
        return "callable"
    kept = {key: item for key, item in vars(value).items() if key != "_actions"}
    return freeze(kept)


def session_after(num_events: int, k: int | None, decide_here: bool) -> Session:
    """A session that has taken this many events of an undisturbed run."""
    plan = SessionPlan(
        prompt=PROMPT,
        max_len=14,
        vocab_size=VOCAB_SIZE,
        rule=Rule.COUPLED,
        num_draft_tokens=k,
        decide_here=decide_here,
    )
    loopback = Loopback(
        make_session(plan), {"target": FakeTarget(decide_here=decide_here)}, {"draft": FakeDraft()}
    )
    if num_events:
        loopback.inbox.append(Begin())
    for _ in range(num_events):
        if loopback.inbox:
            loopback.deliver(loopback.inbox.popleft())
    return loopback.session


small = st.integers(0, 6)
tokens = st.lists(st.integers(0, VOCAB_SIZE), max_size=4).map(tuple)
outcomes = st.builds(
    Outcome,
    small,
    tokens,
    st.sampled_from(Closing),
    st.just(()),
    st.just(()),
    st.just(()),
    st.one_of(st.none(), small),
)
failures = st.builds(
    Failed,
    st.sampled_from(sorted(errors.BY_REASON)),
    st.just("scripted"),
    confirmed_len=small,
    page_digests=st.just(((4, 1),)),
)
replicas = st.sampled_from(["target", "draft", "other"])
target_bodies = st.one_of(
    st.just(Opened()),
    st.just(Deferred()),
    failures,
    st.builds(Verdict, st.one_of(st.none(), outcomes), tokens),
)
draft_bodies = st.one_of(
    st.just(Opened()), st.just(Deferred()), failures, st.builds(Proposal, tokens, tokens)
)
events = st.one_of(
    st.just(Begin()),
    st.builds(TargetPlaced, small, replicas),
    st.builds(TargetUnplaced, small, st.just("none")),
    st.builds(DraftPlaced, small, replicas, st.integers(0, 40)),
    st.builds(Lost, st.sampled_from(Side), replicas),
    st.builds(TargetReply, small, small, target_bodies),
    st.builds(DraftReply, small, small, draft_bodies),
    st.builds(TimerFired, st.sampled_from(Side), small, small),
    st.builds(Decided, small, small, outcomes),
    st.builds(DecisionFailed, small, small, failures, st.booleans()),
    st.builds(Cancel, st.just("CANCELLED"), st.just("gone")),
)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    st.integers(0, 26),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.lists(events, min_size=1, max_size=4),
)
def test_illegal_events_leave_the_state_unchanged(
    num_events: int, k: int | None, decide_here: bool, unexpected: list[messages.Event]
) -> None:
    """From any reachable state any event is taken by its row, or raises and changes nothing."""
    session = session_after(num_events, k, decide_here)
    for event in unexpected:
        before, stage = freeze(session), session.stage
        try:
            session.step(event)
        except (IllegalEvent, PeerViolation):
            assert freeze(session) == before, event
        else:
            assert type(event) in TRANSITIONS[stage]
            assert session.stage in TRANSITIONS[stage][type(event)].next
            session.ledger.check()


def test_every_event_outside_the_table_is_refused() -> None:
    """Stages refuse exactly the events without a row."""
    samples = {
        Begin: Begin(),
        TargetPlaced: TargetPlaced(0, "target"),
        TargetUnplaced: TargetUnplaced(0, "none"),
        DraftPlaced: DraftPlaced(0, "draft", 9),
        Lost: Lost(Side.TARGET, "x"),
        TargetReply: TargetReply(0, 0, Opened()),
        DraftReply: DraftReply(0, 0, Opened()),
        TimerFired: TimerFired(Side.TARGET, 0, 0),
        Decided: Decided(0, 0, Outcome(0, (1,), Closing.BONUS)),
        DecisionFailed: DecisionFailed(0, 0, Failed("INTERNAL"), blames_draft=False),
        Cancel: Cancel("CANCELLED", "gone"),
    }
    assert set(samples) == set(EVENTS)
    seen = set()
    for num_events in range(26):
        for decide_here in (False, True):
            stage = session_after(num_events, 2, decide_here).stage
            seen.add(stage)
            for kind, event in samples.items():
                if kind in TRANSITIONS[stage]:
                    continue
                session = session_after(num_events, 2, decide_here)
                before = freeze(session)
                try:
                    session.step(event)
                except IllegalEvent:
                    assert freeze(session) == before
                else:
                    raise AssertionError(f"{stage} took {event}")
    assert seen == set(Stage), "the run must visit every stage"


def test_tables_are_complete() -> None:
    """Every state has its rows, every handler exists, and the end is never left."""
    assert set(TRANSITIONS) == set(Stage)
    assert set(DRAFT_TRANSITIONS) == set(DraftState)
    for stage, rows in TRANSITIONS.items():
        for kind, row in rows.items():
            assert kind in EVENTS
            assert callable(getattr(Session, row.handler))
            if stage is Stage.DONE:
                assert row.next == {Stage.DONE}
    assert not DRAFT_TRANSITIONS[DraftState.OFF]
    reachable = {nxt for rows in TRANSITIONS.values() for row in rows.values() for nxt in row.next}
    assert reachable == set(Stage) - {Stage.NEW}


def rendered(table: Any) -> list[str]:
    """A table as the README shows it: a line per state and event, next states in order."""
    return [
        f"| {state.value} | {event.__name__} | "
        f"{', '.join(each.value for each in type(state) if each in row.next)} |"
        for state, rows in table.items()
        if state is not Stage.DONE
        for event, row in rows.items()
    ]


def test_readme_shows_the_tables() -> None:
    """The README's tables are the code's, line by line."""
    readme = (Path(coordinator.__file__).parent / "README.md").read_text(encoding="utf-8")
    shown = [line for line in readme.splitlines() if line.count("|") == 4]
    for line in (*rendered(TRANSITIONS), *rendered(DRAFT_TRANSITIONS)):
        assert line in shown, f"coordinator/README.md lacks: {line}"


def test_same_events_give_the_same_actions() -> None:
    """The protocol is deterministic: two sessions fed alike answer alike, action by action."""

    def actions(decide_here: bool) -> list[Any]:
        plan = SessionPlan(
            prompt=PROMPT,
            max_len=30,
            vocab_size=VOCAB_SIZE,
            rule=Rule.COUPLED,
            num_draft_tokens=3,
            decide_here=decide_here,
            audit_ratio=0.3,
        )
        loopback = Loopback(
            make_session(plan),
            {"target": FakeTarget(decide_here=decide_here)},
            {"draft": FakeDraft()},
        )
        taken: list[Any] = []
        loopback.tamper = lambda action: taken.append(action)
        loopback.run()
        return taken

    for decide_here in (False, True):
        assert actions(decide_here) == actions(decide_here)
