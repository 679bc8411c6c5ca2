"""What a verdict must satisfy before the protocol believes it. Pure.

A target that contradicts the command it answers is broken or not the service it claims to be;
nothing of its answer is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.commands import Closing, Outcome, Verdict, Verify
from coordinator.messages import PeerViolation, Side
from coordinator.session_plan import SessionPlan


def news_of(verdict: Verdict, taken: Sequence[int]) -> Verdict | None:
    """What `verdict` says beyond the tokens that parts before it brought; None where nothing.

    A part that comes twice says nothing; the answer to a repeated command says all once more.
    Raises PeerViolation where a part is missing or tells other tokens than before.
    """
    if verdict.offset > len(taken):
        raise PeerViolation(
            Side.TARGET, f"a part from token {verdict.offset} on, where {len(taken)} are known"
        )
    outcome = verdict.outcome
    if outcome is None or verdict.offset == len(taken):
        return verdict
    again = taken[verdict.offset :][: len(outcome.tokens)]
    if outcome.tokens[: len(again)] != tuple(again):
        raise PeerViolation(Side.TARGET, "a part tells other tokens than the one before")
    if len(again) == len(outcome.tokens):
        if verdict.more:
            return None
        raise PeerViolation(Side.TARGET, "the answer ends where it went on before")
    news = replace(
        outcome,
        tokens=outcome.tokens[len(again) :],
        logprobs=outcome.logprobs[len(again) :],
        emitted=outcome.emitted[len(again) :],
    )
    return replace(verdict, outcome=news, offset=len(taken))


def check_verdict(plan: SessionPlan, command: Verify, num_steps: int, verdict: Verdict) -> None:
    """Raise PeerViolation unless `verdict` can be the answer to `command`.

    num_steps: of the command, how many are not answered yet.
    """
    refuted = verdict.redraw_mismatch
    if verdict.outcome is not None:
        refuted = verdict.outcome.redraw_mismatch
    if refuted is not None and refuted >= len(command.candidates):
        raise PeerViolation(Side.TARGET, f"candidate {refuted} was never sent, yet refuted")
    num_judged = len(command.candidates) if refuted is None else 0
    num_rows = num_judged + 1 if plan.decide_here or command.audit else 0
    if len(verdict.rows) != num_rows:
        raise PeerViolation(Side.TARGET, f"{len(verdict.rows)} rows where {num_rows} were expected")
    if (verdict.outcome is None) != plan.decide_here:
        raise PeerViolation(Side.TARGET, "the round was decided in the wrong place")
    # Counted here: once the round is decided, nobody is left to ask for it again.
    num_logprob_rows = num_rows if plan.decide_here and plan.with_logprobs else 0
    if len(verdict.logprob_rows) != num_logprob_rows:
        found = len(verdict.logprob_rows)
        raise PeerViolation(
            Side.TARGET, f"{found} rows of logprobs where {num_logprob_rows} were expected"
        )
    if verdict.outcome is not None:
        check_outcome(plan, command.candidates, num_steps, verdict.outcome, more=verdict.more)
    elif verdict.more:
        raise PeerViolation(Side.TARGET, "rows for a decision here came in parts")


def check_outcome(
    plan: SessionPlan,
    candidates: tuple[int, ...],
    num_steps: int,
    outcome: Outcome,
    *,
    more: bool = False,
) -> None:
    """Raise PeerViolation unless the tokens are what the counts say (DESIGN section 2).

    more: a part of plain decoding, after which its command goes on.
    """
    tokens, num_accepted = outcome.tokens, outcome.num_accepted
    fault = ""
    if more and (candidates or len(tokens) >= num_steps or not plan.stop_ids.isdisjoint(tokens)):
        fault = "the command goes on after its end"
    elif outcome.redraw_mismatch is not None:
        if num_accepted or len(tokens) != 1 or outcome.redraw_mismatch >= len(candidates):
            fault = "a refuted proposal must be decided without candidates"
    elif candidates:
        closing = 0 if outcome.closing is Closing.STOPPED else 1
        if num_accepted > len(candidates) or len(tokens) != num_accepted + closing:
            fault = f"{len(tokens)} tokens after {num_accepted} of {len(candidates)} accepted"
        elif tokens[:num_accepted] != candidates[:num_accepted]:
            fault = "accepted tokens are not the candidates"
        elif not closing and (not tokens or tokens[-1] not in plan.stop_ids):
            fault = "the round stopped without a stop token"
    elif num_accepted or not 1 <= len(tokens) <= num_steps:
        fault = f"{len(tokens)} tokens where {num_steps} were asked for"
    elif not more and len(tokens) < num_steps and tokens[-1] not in plan.stop_ids:
        fault = f"{len(tokens)} of {num_steps} tokens without a stop token"
    if not fault and any(not 0 <= token < plan.vocab_size for token in tokens):
        fault = f"a token is outside the vocabulary of {plan.vocab_size}"
    num_logprobs = len(tokens) if plan.with_logprobs else 0
    if not fault and len(outcome.logprobs) != num_logprobs:
        fault = f"{len(outcome.logprobs)} logprobs where {num_logprobs} were expected"
    if fault:
        raise PeerViolation(Side.TARGET, fault)
