"""Decisions made in the coordinator: faults have an owner, audits tell near-ties from alarms."""

from __future__ import annotations

import math

import pytest
import torch

from coordinator.commands import Closing, Outcome
from coordinator.decide import AuditResult, DraftFault, Law, audit_round, decide_round
from coordinator.messages import Audit, Decide
from kernels import reference
from kernels.reference_rows import NEAR_TIE
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2
from specmesh import wire
from specmesh.errors import NumericFault

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.5, 0.3])
BASE = 7


def frame(weights: torch.Tensor) -> session_pb2.Distribution:
    return wire.encode(wire.Row(weights.numel(), weights.float(), None, wire.DENSE_F32))


def law(seed: int = 3, **changes: object) -> Law:
    fields = {"vocab_size": 3, "is_greedy": False, "is_coupled": False, "stop_ids": frozenset()}
    return Law(seed=seed, **{**fields, **changes})  # type: ignore[arg-type]  # test fields


def decide(rule: Law, candidates: tuple[int, ...], **changes: object) -> Outcome:
    frames = tuple(frame(P) for _ in range(len(candidates) + 1))
    drafts = tuple(frame(Q) for _ in candidates)
    fields = {
        "epoch": 0,
        "round": 0,
        "base_len": BASE,
        "candidates": candidates,
        "draft_rows": drafts,
        "target_rows": frames,
        "logprob_rows": (),
    }
    return decide_round(rule, Decide(**{**fields, **changes}))  # type: ignore[arg-type]  # as above


def test_same_decision_as_the_reference() -> None:
    """The outcome is `reference.decide` under the request's streams, nothing else."""
    seen = set()
    for seed in range(200):
        wanted = reference.run(
            reference.decide([P, P], [Q], [1]), reference.philox_answer(seed, BASE)
        )
        found = decide(law(seed), (1,))
        assert (found.num_accepted, found.tokens) == (wanted.num_accepted, wanted.tokens)
        seen.add((found.num_accepted, found.closing))
    assert seen == {(0, Closing.RECOVERED), (1, Closing.BONUS)}


def test_judged_and_emitted_are_reported() -> None:
    """p(x), q(x) and sum(min(p, q)) of judged rows only; the argmax and its mass per token."""
    found = next(
        outcome for seed in range(50) if (outcome := decide(law(seed), (1, 0))).num_accepted == 0
    )
    (judged,) = found.judged
    assert judged == pytest.approx((0.3, 0.5, 0.7), abs=1e-6)
    assert [most for _, most in found.emitted] == pytest.approx([0.5], abs=1e-6)


def test_stop_candidate_closes_the_round() -> None:
    """An accepted stop token: no bonus, nothing after it."""
    stopping = law(is_coupled=True, stop_ids=frozenset({0, 1, 2}))
    token = decide(law(is_coupled=True), ()).tokens[0]
    found = decide(stopping, (token, 1), draft_rows=())
    assert (found.tokens, found.closing) == ((token,), Closing.STOPPED)


def test_greedy_takes_the_argmax() -> None:
    """At temperature 0 rows are compared by their largest weight."""
    found = decide(law(is_greedy=True), (0, 1), draft_rows=())
    assert (found.num_accepted, found.tokens) == (1, (0, 0))


def test_fault_of_a_judged_target_row() -> None:
    """An empty target frame that is judged is a NumericFault; one that is not judged is nothing."""
    broken = session_pb2.Distribution()
    with pytest.raises(NumericFault):
        decide(law(), (1,), target_rows=(broken, frame(P)))
    rejected = next(seed for seed in range(50) if decide(law(seed), (1,)).num_accepted == 0)
    assert decide(law(rejected), (1,), target_rows=(frame(P), broken)).num_accepted == 0


def test_fault_of_a_draft_row_is_the_draft_s() -> None:
    """A draft row that is no law is blamed on the draft."""
    with pytest.raises(DraftFault):
        decide(law(), (1,), draft_rows=(frame(torch.tensor([1.0, math.nan, 1.0])),))


def test_logprobs_of_emitted_tokens() -> None:
    """Each emitted token's log-probability from its row, and the largest, lowest id on ties."""
    row = torch.tensor([0.25, 0.25, 0.5]).log().numpy().tobytes()
    found = decide(law(is_greedy=True, num_logprobs=2), (), logprob_rows=(row,))
    (entry,) = found.logprobs
    assert entry.logprob == pytest.approx(math.log(0.25))
    assert [top.token_id for top in entry.top] == [2, 0]
    with pytest.raises(NumericFault):
        decide(law(num_logprobs=1), (), logprob_rows=(b"short",))


# ---------------------------------------------------------------- audit


def audit(rule: Law, candidates: tuple[int, ...], outcome: Outcome, p: torch.Tensor = P) -> object:
    frames = tuple(frame(p) for _ in range(len(candidates) + 1))
    drafts = tuple(frame(Q) for _ in candidates)
    return audit_round(rule, Audit(BASE, candidates, drafts, frames, outcome))


def test_audit_agrees_with_an_honest_target() -> None:
    """What the rows decide is no mismatch, under every rule and after a refuted re-draw."""
    for rule in (law(), law(is_coupled=True), law(is_greedy=True)):
        assert not audit(rule, (1,), decide(rule, (1,))).is_mismatch  # type: ignore[attr-defined]  # AuditResult
    refuted = decide(law(), (), redraw_mismatch=0)
    assert not audit(law(), (1,), refuted).is_mismatch  # type: ignore[attr-defined]  # as above


def test_audit_finds_a_target_that_draws_from_another_law() -> None:
    """Another token than the rows give is an alarm with its margin."""
    honest = decide(law(is_coupled=True), ())
    other = (honest.tokens[0] + 1) % 3
    result = audit(law(is_coupled=True), (), Outcome(0, (other,), Closing.BONUS))
    assert result.is_alarm  # type: ignore[attr-defined]  # AuditResult
    assert result.margin > NEAR_TIE  # type: ignore[attr-defined]  # as above


def test_audit_finds_a_wrong_coin() -> None:
    """A target that rejects what its coin accepts is an alarm: the margin is the coin's."""
    accepted = next(seed for seed in range(50) if decide(law(seed), (1,)).num_accepted == 1)
    result = audit(law(accepted), (1,), Outcome(0, (0,), Closing.RECOVERED))
    left = reference.coin(accepted, BASE, BASE) * 0.5
    assert result.is_alarm  # type: ignore[attr-defined]  # AuditResult
    assert result.margin == pytest.approx(abs(left - 0.3) / max(left, 0.3), rel=1e-5)  # type: ignore[attr-defined]  # as above


def test_near_tie_is_no_alarm() -> None:
    """Two tokens whose finishing times differ by less than 2^-18 may come out either way."""
    ids = torch.tensor([0, 1, 2])
    times = reference.exponentials(5, ids, BASE, 0, Purpose.COUPLED)
    tied = torch.tensor([float(times[0]), float(times[1]) * (1 + 2.0**-21), 0.0])
    rule = law(5, is_coupled=True)
    winner = decide(rule, (), target_rows=(frame(tied),)).tokens[0]
    result = audit(rule, (), Outcome(0, (1 - winner,), Closing.BONUS), tied)
    assert result.is_mismatch  # type: ignore[attr-defined]  # AuditResult
    assert not result.is_alarm  # type: ignore[attr-defined]  # as above


@pytest.mark.parametrize(
    ("margin", "is_tie"), [(2.0**-19, True), (2.0**-18, False), (2.0**-17, False), (None, False)]
)
def test_a_mismatch_is_a_near_tie_or_an_alarm(margin: float | None, is_tie: bool) -> None:
    """Below 2^-18 rounding may have chosen; without a margin a mismatch is never excused."""
    result = AuditResult(is_mismatch=True, margin=margin)
    assert (result.is_near_tie, result.is_alarm) == (is_tie, not is_tie)
    agreed = AuditResult(is_mismatch=False)
    assert (agreed.is_near_tie, agreed.is_alarm) == (False, False)


def test_impossible_token_is_an_alarm() -> None:
    """A token without mass in its row cannot be a near-tie."""
    certain = torch.tensor([1.0, 0.0, 0.0])
    result = audit(law(is_coupled=True), (), Outcome(0, (1,), Closing.BONUS), certain)
    assert result.is_alarm  # type: ignore[attr-defined]  # AuditResult
