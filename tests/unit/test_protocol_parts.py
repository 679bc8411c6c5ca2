"""Answers in parts: tokens of plain decoding are committed as they come, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.commands import Close, Deferred, Failed, Verdict, Verify
from coordinator.messages import (
    Action,
    Event,
    Fail,
    Finish,
    Lost,
    PeerViolation,
    Send,
    Side,
    StartTimer,
    TargetReply,
    Timer,
    TimerFired,
)
from coordinator.session_plan import SessionPlan
from coordinator.stages import Stage
from coordinator.verdicts import news_of
from tests.sim.fakes import VOCAB_SIZE, FakeTarget, Loopback, make_session, timers
from tests.unit.session_plan import PROMPT, WANTED, plan_of

STOP = min(set(range(VOCAB_SIZE)) - set(WANTED))  # a token that is never drawn
CHAINS = ((1,), (4, 1), (8,), (3, 1, 2))


def plain(**changes: object) -> SessionPlan:
    return plan_of(num_draft_tokens=0, plain_steps=16, **changes)


def loopback_of(
    plan: SessionPlan | None = None, chains: tuple[int, ...] = (3,), **options: object
) -> Loopback:
    plan = plan or plain()
    targets = {name: FakeTarget(name, stop_ids=plan.stop_ids, chains=chains) for name in ("a", "b")}
    return Loopback(make_session(plan, **options), targets, {})  # type: ignore[arg-type]  # test options


def part_of(event: Event) -> Verdict | None:
    """The verdict of a part after which its command goes on."""
    if isinstance(event, TargetReply) and isinstance(event.body, Verdict) and event.body.more:
        return event.body
    return None


def at_part(loopback: Loopback, number: int, change: Callable[[TargetReply], list[Event]]) -> None:
    """Deliver, in place of the part numbered `number` from 1, what `change` makes of it."""
    seen = 0

    def deliver(event: Event) -> None:
        nonlocal seen
        events = [event]
        if part_of(event) is not None:
            seen += 1
            if seen == number:
                assert isinstance(event, TargetReply)
                events = change(event)
        for each in events:
            Loopback.deliver(loopback, each)

    loopback.deliver = deliver  # type: ignore[method-assign]  # scripted


def finish(loopback: Loopback) -> Finish:
    """Run to the end, which must be the undisturbed one, with nothing left behind."""
    ended = loopback.run()
    assert isinstance(ended, Finish), ended
    assert loopback.tokens == WANTED
    assert [chunk.round_index for chunk in loopback.chunks] == list(range(len(loopback.chunks)))
    assert ended.stats.num_rounds == len(loopback.chunks) - 1
    assert not any(target.sessions for target in loopback.targets.values())
    return ended


def commands_of(loopback: Loopback) -> list[Verify]:
    return [c for send in loopback.sent for c in send.commands if isinstance(c, Verify)]


@pytest.mark.parametrize("chains", CHAINS)
def test_each_part_is_a_round_of_its_own(chains: tuple[int, ...]) -> None:
    """Every part is delivered and recorded as it comes; the command is sent once."""
    loopback = loopback_of(chains=chains)
    finish(loopback)
    sizes = [len(chunk.tokens) for chunk in loopback.chunks]
    assert max(sizes) == max(chains)
    assert [command.num_steps for command in commands_of(loopback)] == [1, 16, 13]
    offset = 0
    for record, following in zip(loopback.records, loopback.records[1:], strict=False):
        offset = offset + record.num_tokens if record.more else 0
        assert (following.offset, following.base_len) == (
            offset,
            record.base_len + record.num_tokens,
        )
    assert not loopback.records[-1].more


@pytest.mark.parametrize("plain_steps", [1, 8, 64])
def test_tokens_do_not_depend_on_the_steps_of_a_command(plain_steps: int) -> None:
    """The output is the target's, however it is cut into commands and parts."""
    finish(loopback_of(plan_of(num_draft_tokens=0, plain_steps=plain_steps), chains=(5, 1)))


def test_the_deadline_begins_anew_with_every_part() -> None:
    """A part restarts the timer of its command, for what comes up to the next one."""
    loopback = loopback_of()
    finish(loopback)
    started = [timer for timer in timers(loopback.others) if timer.timer is Timer.VERIFY]
    rounds = {command.round: 0 for command in commands_of(loopback)}
    for timer in started:
        rounds[timer.round] += 1
        assert timer.num_tokens == (1 + len(PROMPT) if timer.round == 0 else 1)
    num_parts = sum(record.more for record in loopback.records)
    assert len(started) == len(rounds) + num_parts > 8


def test_a_part_that_comes_twice_is_taken_once() -> None:
    """At once, or after the parts that followed it."""
    loopback = loopback_of()
    at_part(loopback, 2, lambda event: [event, event])
    finish(loopback)
    loopback = loopback_of()
    at_part(loopback, 2, lambda event: loopback.inbox.append(event) or [event])  # type: ignore[func-returns-value]  # append gives None
    finish(loopback)


def test_a_missing_part_is_a_violation() -> None:
    """Nothing of the part after a gap is used; the session leaves and goes on from what it has."""
    loopback = loopback_of()
    at_part(loopback, 2, lambda event: [])
    with pytest.raises(PeerViolation, match="from token 6 on, where 3 are known"):
        loopback.run()
    assert loopback.tokens == WANTED[:4]
    loopback = loopback_of()
    loopback.violations = []
    at_part(loopback, 2, lambda event: [])
    finish(loopback)
    assert loopback.session.target.epoch == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 0, "tokens": (1, 2, 3, 4)}, "other tokens"),
        ({"offset": 0, "more": False, "tokens": tuple(WANTED[1:4])}, "ends where it went on"),
        ({"tokens": tuple(WANTED[4:17])}, "goes on after its end"),
        ({"tokens": (*WANTED[4:6], STOP)}, "goes on after its end"),
        ({"tokens": tuple(WANTED[4:6]), "more": False}, "without a stop token"),
    ],
)
def test_parts_that_contradict_what_is_known_change_nothing(
    change: dict[str, object], message: str
) -> None:
    """A verdict that cannot follow the parts before it is refused with the state unchanged."""

    def forge(event: TargetReply) -> list[Event]:
        verdict = event.body
        assert isinstance(verdict, Verdict)
        assert verdict.outcome is not None
        fields = dict(change)
        outcome = replace(verdict.outcome, tokens=fields.pop("tokens"))
        forged = replace(event, body=replace(verdict, outcome=outcome, **fields))
        before = loopback.session.ledger.confirmed_len
        with pytest.raises(PeerViolation, match=message):
            loopback.session.step(forged)
        assert loopback.session.ledger.confirmed_len == before
        return [event]

    loopback = loopback_of(plain(stop_ids=frozenset({STOP})))
    at_part(loopback, 2, forge)
    finish(loopback)


def test_rows_for_a_decision_here_never_come_in_parts() -> None:
    """What is decided here is one row a command."""
    plan = plain(decide_here=True)
    target = FakeTarget(decide_here=True)
    loopback = Loopback(make_session(plan), {"target": target}, {})
    forged = 0

    def deliver(event: Event) -> None:
        nonlocal forged
        if isinstance(event, TargetReply) and isinstance(event.body, Verdict) and not forged:
            forged += 1
            with pytest.raises(PeerViolation, match="in parts"):
                loopback.session.step(replace(event, body=replace(event.body, more=True)))
        Loopback.deliver(loopback, event)

    loopback.deliver = deliver  # type: ignore[method-assign]  # scripted
    finish(loopback)


@pytest.mark.parametrize("chains", CHAINS)
@pytest.mark.parametrize("stop_at", range(2, 14))
def test_a_stop_token_ends_the_output_anywhere_in_a_part(
    chains: tuple[int, ...], stop_at: int
) -> None:
    """A stop id is the last token of the last part, wherever in a chain it was drawn."""
    stop_id = WANTED[stop_at - 1]
    first = WANTED.index(stop_id) + 1
    loopback = loopback_of(plain(stop_ids=frozenset({stop_id})), chains=chains)
    ended = loopback.run()
    assert isinstance(ended, Finish)
    assert loopback.tokens == WANTED[:first]
    assert ended.matched_stop_token_id == stop_id
    assert not loopback.records[-1].more
    assert loopback.session.target.in_flight is None


@pytest.mark.parametrize("chains", CHAINS)
def test_a_stop_string_closes_the_session_while_its_command_works(chains: tuple[int, ...]) -> None:
    """The target does not know of stop strings: it is told to close, and its late parts are
    ignored. No round follows the one that ended the output."""
    stop = f"{WANTED[4]}.{WANTED[5]}"
    loopback = loopback_of(chains=chains, stop_strings=[stop])
    ended = loopback.run()
    assert isinstance(ended, Finish)
    assert loopback.tokens == WANTED[:6]
    assert ended.stats.completion_tokens == 6
    assert not loopback.records[-1].more
    assert isinstance(loopback.sent[-1].commands[0], Close)
    assert not loopback.targets["a"].sessions
    late = TargetReply(0, 1, Verdict(None, more=True, offset=7))
    assert loopback.session.step(late) == ()


def test_a_repeat_while_the_command_works_changes_nothing() -> None:
    """The timer runs out between two parts: the command is repeated, the parts go on."""
    loopback = loopback_of()

    def fire(event: TargetReply) -> list[Event]:
        return [event, TimerFired(Side.TARGET, event.epoch, event.round)]

    at_part(loopback, 2, fire)
    finish(loopback)
    repeated = commands_of(loopback)
    assert len(repeated) == len(set(repeated)) + 1
    assert sum(record.num_retries for record in loopback.records) == 1


def test_a_repeat_after_the_end_is_answered_with_everything_once_more() -> None:
    """The last part is lost: the stored answer has all tokens, and those known are cut."""
    loopback = loopback_of()
    lost: list[TargetReply] = []

    def deliver(event: Event) -> None:
        is_last = (
            isinstance(event, TargetReply)
            and event.round == 1
            and isinstance(event.body, Verdict)
            and not event.body.more
        )
        if is_last and not lost:
            assert isinstance(event, TargetReply)
            lost.append(event)
            return
        Loopback.deliver(loopback, event)

    loopback.deliver = deliver  # type: ignore[method-assign]  # scripted
    finish(loopback)
    assert len(lost) == 1
    assert len(commands_of(loopback)) == 4
    assert loopback.session.target.epoch == 0


def test_what_is_known_is_cut_with_its_report() -> None:
    """Log-probabilities and figures of tokens that are known already go with them."""
    loopback = loopback_of()
    parts: list[TargetReply] = []
    at_part(loopback, 1, lambda event: parts.append(event) or [event])  # type: ignore[func-returns-value]  # append gives None
    finish(loopback)
    verdict = parts[0].body
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is not None
    tokens = verdict.outcome.tokens
    reported = replace(
        verdict.outcome, logprobs=("x", "y", "z"), emitted=((True, 0.5), (False, 0.2), (True, 0.9))
    )
    news = news_of(replace(verdict, outcome=reported), tokens[:2])
    assert news is not None
    assert news.outcome is not None
    assert (news.offset, news.outcome.tokens) == (2, tokens[2:])
    assert (news.outcome.logprobs, news.outcome.emitted) == (("z",), ((True, 0.9),))
    assert news_of(replace(verdict, outcome=reported), tokens) is None


@pytest.mark.parametrize("reason", ["INTERNAL", "NOT_READY", "SESSION_NOT_FOUND"])
@pytest.mark.parametrize("num_parts", [0, 1, 2])
def test_a_failure_after_parts_goes_on_from_the_last_of_them(reason: str, num_parts: int) -> None:
    """What was delivered stays; the rest is asked for again, there or at another replica."""
    loopback = loopback_of()
    loopback.targets["a"].part_failures.extend([None] * num_parts + [Failed(reason, "scripted")])
    finish(loopback)
    again = next(command for command in commands_of(loopback) if command.epoch == 1)
    known = 1 + 3 * (1 + num_parts)
    assert again.prefix.append == PROMPT + tuple(WANTED[:known])
    assert again.num_steps == 16 - 3 * (1 + num_parts)


def test_a_failure_that_ends_the_request_keeps_what_was_delivered() -> None:
    """NaN in a row after some parts: the request fails with those tokens."""
    loopback = loopback_of()
    loopback.targets["a"].part_failures.extend([None, Failed("NUMERIC_FAULT", "scripted")])
    ended = loopback.run()
    assert isinstance(ended, Fail)
    assert loopback.tokens == WANTED[:7]
    assert ended.stats.completion_tokens == 7


def test_a_prefix_that_differs_after_parts_is_repaired_from_there() -> None:
    """The command is repeated after the target failed and forgot it: it says where it stands, and
    what is left is appended under a new round."""
    loopback = loopback_of()

    def forget(event: TargetReply) -> list[Event]:
        loopback.targets["a"].sessions["s"].at_work = None
        return [event, TimerFired(Side.TARGET, event.epoch, event.round)]

    at_part(loopback, 2, forget)
    finish(loopback)
    (resync,) = [command for command in commands_of(loopback) if command.prefix.resync]
    assert resync.epoch == 0
    assert resync.prefix.base_len + resync.num_steps == len(PROMPT) + 1 + 16


def test_preemption_between_parts_is_waited_for() -> None:
    """DEFERRED between two parts: the session waits on, and the next part counts as ever."""
    loopback = loopback_of()

    def defer(event: TargetReply) -> list[Event]:
        return [event, TargetReply(event.epoch, event.round, Deferred())]

    at_part(loopback, 2, defer)
    finish(loopback)
    deferred = [timer for timer in timers(loopback.others) if timer.timer is Timer.DEFERRED]
    assert len(deferred) == 1
    assert len(commands_of(loopback)) == 3


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_lost_link_between_parts_loses_no_token(number: int) -> None:
    """Tokens of the parts that came stay; the next replica begins after them, on the steps left."""
    loopback = loopback_of()

    def lose(event: TargetReply) -> list[Event]:
        loopback.targets["a"].lose_sessions()
        return [event, Lost(Side.TARGET, "a")]

    at_part(loopback, number, lose)
    finish(loopback)
    moved = next(command for command in commands_of(loopback) if command.epoch == 1)
    assert moved.prefix.base_len == len(PROMPT) + 1 + 3 * number
    assert moved.num_steps == 16 - 3 * number
    records = [record for record in loopback.records if record.target_epoch == 1]
    assert records[0].offset == 0, "its command's span hangs under this round"


def test_a_target_that_falls_silent_between_parts_is_left() -> None:
    """The deadline passes twice after a part: the session moves."""
    loopback = loopback_of()

    def silence(event: TargetReply) -> list[Event]:
        loopback.targets["a"].go_on = lambda: None  # type: ignore[method-assign]  # falls silent
        return [event]

    at_part(loopback, 2, silence)
    ended = loopback.run()
    assert isinstance(ended, Finish)
    assert loopback.tokens == WANTED
    assert {record.target_replica for record in loopback.records} == {"a", "b"}


def test_the_session_verifies_until_the_last_part() -> None:
    """A part leaves the stage; its command stays in flight."""
    loopback = loopback_of()
    stages: list[Stage] = []

    def look(action: Action) -> None:
        if isinstance(action, StartTimer):
            stages.append(loopback.session.stage)
            assert loopback.session.target.in_flight is not None

    loopback.tamper = look
    finish(loopback)
    assert set(stages) == {Stage.PREFILLING, Stage.VERIFYING}
    assert not any(isinstance(action, Send) for action in loopback.others)
