"""The residual rule keeps the target's law exactly, wherever a fault is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.commands import Proposal
from coordinator.driver import Driver
from coordinator.foresight import Foresight
from coordinator.messages import Deliver
from coordinator.protocol import Session
from draft_service.proposer import Proposer
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from specmesh.engine.role import Part
from target_service import verifier
from target_service.verifier import joined
from tests.sim.law import NoiseReused, Tape, law_of_system, law_of_target
from tests.sim.options import Faults, Setup
from tests.sim.world import Crash

LATENCY_S = 0.001
HELD_AT_S = 0.0125  # after a round whose ids were held back or not, as their values were
Crashes = Sequence[Crash]


def tiny(max_tokens: int = 4, k: int = 2, place: int = session_pb2.DECIDE_AT_TARGET) -> Any:
    """Two tokens in the vocabulary, integer weights, nothing random but the draws."""
    setup = Setup(
        seed=1,
        vocab_size=2,
        num_drafts=1,
        num_coordinators=1,
        num_requests=1,
        num_draft_tokens=k,
        steady=True,
        pass_s=0.001,
        faults=Faults(latency_s=LATENCY_S, window_s=0.3),
    )
    request = pb.GenerateRequest(
        max_tokens=max_tokens,
        seed=7,
        rule=session_pb2.DECISION_RULE_RESIDUAL,
        ignore_eos=True,
        decide_at=place,
    )
    request.tokens.token_ids.extend([0, 1])
    return setup, request


def law_is_kept(setup: Setup, request: pb.GenerateRequest, crashes: Crashes) -> bool:
    """Whether the law of the system under these crashes equals the target's."""
    law, num_runs = law_of_system(setup, request, crashes)
    assert num_runs >= 8, "a run enumerates almost nothing"
    wanted = law_of_target(setup, request, lambda output: len(output) == request.max_tokens)
    assert sum(law.values()) == 1
    return law == wanted


@pytest.mark.parametrize("place", [session_pb2.DECIDE_AT_TARGET, session_pb2.DECIDE_AT_COORDINATOR])
def test_law_without_faults(place: int) -> None:
    """Coins, residuals and bonuses of the running system, as fractions."""
    setup, request = tiny(place=place)
    assert law_is_kept(setup, request, [])


@pytest.mark.parametrize(
    "kinds",
    [("target",), ("draft",), ("coordinator",), ("caller",), ("coordinator", "draft")],
    ids="+".join,
)
def test_law_under_a_crash(kinds: tuple[str, ...]) -> None:
    """Processes die early, in the middle and late in the request."""
    setup, request = tiny()
    for at_s in (0.0105, 0.0185):
        assert law_is_kept(setup, request, crashes_of(kinds, at_s)), at_s


@pytest.mark.parametrize("k", [1, 2])
def test_law_of_rounds_drafted_ahead(k: int) -> None:
    """Candidates that were drafted for every outcome on one stream of noise: only those of the
    outcome that came count, and nothing chose it by them."""
    setup, request = tiny(k=k)
    assert law_is_kept(replace(setup, num_ahead=6), request, [])


def test_law_of_whole_blocks_drafted_ahead() -> None:
    """With room for it a round takes two candidates at once: neither which they are nor how they
    are judged has a say in whether it does."""
    setup, request = tiny(max_tokens=5, k=2)
    assert law_is_kept(replace(setup, num_ahead=2), request, [])


def test_law_where_some_rounds_were_foreseen_and_others_not() -> None:
    """Which of them begin at once depends on how the round before ended, and bends nothing, also
    where a coordinator is lost between them."""
    setup, request = tiny(max_tokens=4, k=1)
    for crashes in ([], crashes_of(("coordinator",), 0.0145)):
        assert law_is_kept(replace(setup, num_ahead=2), request, crashes)


@pytest.mark.parametrize(
    "kinds", [("target",), ("draft",), ("coordinator",), ("coordinator", "draft")], ids="+".join
)
def test_law_of_rounds_drafted_ahead_under_a_crash(kinds: tuple[str, ...]) -> None:
    """The same, with what was drafted ahead lost, or kept for a round that is done again."""
    setup, request = tiny(max_tokens=3)
    for at_s in (0.0105, 0.0145):
        assert law_is_kept(replace(setup, num_ahead=6), request, crashes_of(kinds, at_s)), at_s


def test_a_choice_by_what_was_drafted_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are there before the round begins: how many of them it takes must not depend on
    which they are."""
    take = Foresight.take

    def picky(self: Foresight, path: Sequence[int], num_draft_tokens: int) -> Proposal | None:
        found = take(self, path, num_draft_tokens)
        if found is not None and found.tokens[-1] == 0:
            return Proposal(found.tokens[:-1], found.rows[:-1], found.dropped_mass[:-1])
        return found

    monkeypatch.setattr(Foresight, "take", picky)
    setup, request = tiny(k=2)
    assert not law_is_kept(replace(setup, num_ahead=6), request, [])


def crashes_of(kinds: Sequence[str], at_s: float) -> list[Crash]:
    """All at once; a draft stays away for the rest of the request."""
    return [Crash(at_s, kind, 2.0 if kind == "draft" else 0.05) for kind in kinds]


def stopping(at_s: float, chain_len: int) -> tuple[Setup, pb.GenerateRequest, list[Crash]]:
    """The draft dies, the coordinator dies while the target decodes plainly in one command, the
    draft is back when the caller resumes; a stop token may be drawn at any step."""
    setup, request = tiny(max_tokens=6)
    setup = replace(setup, num_targets=1, plain_steps=4, pass_s=0.003, chain_lens=(chain_len,))
    request.ignore_eos = False
    return setup, request, [Crash(0.0085, "draft", 0.03), Crash(at_s, "coordinator", 0.03)]


def law_with_stops_is_kept(setup: Setup, request: pb.GenerateRequest, crashes: Crashes) -> bool:
    law, _ = law_of_system(setup, request, crashes)
    eos = setup.vocab_size - 1
    wanted = law_of_target(
        setup, request, lambda output: len(output) == 6 or (len(output) > 0 and output[-1] == eos)
    )
    return law == wanted


WHILE_DECODING_S = 0.0205


@pytest.mark.parametrize(
    ("at_s", "chain_len"), [(WHILE_DECODING_S, 1), (WHILE_DECODING_S, 2), (0.0185, 1)]
)
def test_law_where_a_stop_token_ends_plain_decoding(at_s: float, chain_len: int) -> None:
    """Tokens are told after every chain, whatever they are: when one comes tells nothing of it."""
    assert law_with_stops_is_kept(*stopping(at_s, chain_len))


def test_a_stop_that_is_told_before_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that answers when its steps are taken or a stop token ends them: sequences without
    one are drawn again after a crash, with other noise."""

    def late(task: Any, num_steps: int, last_token: int, verdict: Any) -> Any:
        outcome = answer(task, num_steps, last_token, verdict)
        told = outcome.body if isinstance(outcome, Part) else outcome
        held.setdefault(task, []).append(told)
        if told.more:
            return None
        return joined(held.pop(task))

    held: dict[Any, list[Any]] = {}
    answer = verifier.answer
    monkeypatch.setattr(verifier, "answer", late)
    assert not law_with_stops_is_kept(*stopping(WHILE_DECODING_S, 1))


def is_found(setup: Setup, request: pb.GenerateRequest, crashes: Crashes) -> bool:
    """Whether these crashes show another law, or one stream asked for two laws (what was drawn
    again is what the later tokens were conditioned on)."""
    try:
        return not law_is_kept(setup, request, crashes)
    except AssertionError as objection:
        return "NoiseReused" in str(objection)


def test_ids_held_back_with_their_text_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids must leave when they are confirmed: held back while their text is, they are drawn again
    after a crash, and only those of some values are."""
    held: dict[Driver, list[Deliver]] = {}
    deliver = Driver._deliver

    def holding(self: Driver, action: Deliver) -> None:
        chunks = held.setdefault(self, [])
        chunks.append(action)
        if action.text or self.is_done:
            for chunk in chunks:
                deliver(self, chunk)
            chunks.clear()

    monkeypatch.setattr(Driver, "_deliver", holding)
    monkeypatch.setitem(Driver._PERFORM, Deliver, holding)
    finish = Driver._finish

    def flushing(self: Driver, action: Any) -> None:
        for chunk in held.pop(self, []):
            deliver(self, chunk)
        finish(self, action)

    monkeypatch.setitem(
        Driver._PERFORM, next(t for t in Driver._PERFORM if t.__name__ == "Finish"), flushing
    )
    setup, request = tiny()
    request.stop.append("abbbbbbbb")
    assert is_found(setup, request, crashes_of(("coordinator", "draft"), HELD_AT_S))


def test_a_round_redone_for_its_outcome_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that asks again, without candidates, when none was accepted."""
    take_verdict = Session._take_verdict

    def impatient(self: Session, event: Any, verdict: Any) -> None:
        current = self._round
        outcome = verdict.outcome
        if current is not None and current.candidates and outcome and not outcome.num_accepted:
            self.target.reopen()
            self._go_plain("retry")
            return
        take_verdict(self, event, verdict)

    monkeypatch.setattr(Session, "_take_verdict", impatient)
    assert not law_is_kept(*tiny(max_tokens=3, k=1), [])


def test_a_draft_that_stops_at_unlikely_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of candidates must not depend on the value of the one that is dropped: the round
    then goes on as if that one had been asked for and nothing were known of it."""
    propose = Proposer._proposal

    def timid(self: Proposer, drafting: Any) -> Any:
        if drafting.tokens and drafting.tokens[0] == 0:
            drafting.tokens, drafting.cuts = [], []
        return propose(self, drafting)

    monkeypatch.setattr(Proposer, "_proposal", timid)
    monkeypatch.setattr("coordinator.drafting.Drafting._fault", lambda self, command, proposal: "")
    assert not law_is_kept(*tiny(max_tokens=3, k=1), [])


def test_noise_used_twice_is_found() -> None:
    """A stream that is asked for two laws is no fresh noise."""
    tape = Tape([])
    tape.ask((7, 3, 1, 4), ((0, 1), (1, 1)))
    with pytest.raises(NoiseReused):
        tape.ask((7, 3, 1, 4), ((0, 1),))
