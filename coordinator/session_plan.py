"""What is fixed for one sample before its session begins.

Owns the plan that `coordinator/requests.py` makes of a request and the protocol follows. Knows
neither requests nor settings: every number is resolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """How candidates are judged (DESIGN section 3)."""

    RESIDUAL = "residual"
    COUPLED = "coupled"
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Tokens [0, len(prompt)) are the prompt; `resume` is output that the caller has already.

    max_len: prompt plus output never exceed it. resume_round: index of the first round to run.
    decide_here: the coordinator decides every round, not the target. with_logprobs: every emitted
    token comes with its log-probabilities. num_draft_tokens: fixed k, or None for the policy.
    plain_steps: tokens of a command without candidates, at most. audit_ratio: share of the target's
    rounds that the coordinator decides again. parallel_prefill: None prefills the draft beside the
    target where their devices differ. max_rows: rows that fit into one answer of a target; None:
    any number. num_ahead: continuations that a draft is asked to draft ahead, at most.
    """

    prompt: tuple[int, ...]
    max_len: int
    vocab_size: int
    rule: Rule = Rule.RESIDUAL
    stop_ids: frozenset[int] = frozenset()
    resume: tuple[int, ...] = ()
    resume_round: int = 0
    decide_here: bool = False
    with_logprobs: bool = False
    num_draft_tokens: int | None = None
    max_num_draft_tokens: int = 8
    plain_steps: int = 256
    audit_ratio: float = 0.0
    parallel_prefill: bool | None = None
    max_round_retries: int = 3
    max_failovers: int = 5
    max_rows: int | None = None
    num_ahead: int = 0
