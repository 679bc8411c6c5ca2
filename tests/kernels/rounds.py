"""Rounds for the tests of draw and accept: random batches, and what the reference says of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import Decision, Shaping
from kernels.sampling import DraftKind, DraftRows, Outcome, Round, Rule, draw, workspace
from kernels.streams import Purpose

MASK_64 = 2**64 - 1


def round_of(
    candidates: Tensor,
    *,
    num_candidates: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    base_lens: Sequence[int] | None = None,
    rules: Sequence[Rule] | None = None,
    temperatures: Sequence[float] | None = None,
    stop_ids: Sequence[Sequence[int]] | None = None,
    thresholds: Tensor | None = None,
    first_rows: Tensor | None = None,
) -> Round:
    """A round with plain defaults: full length, residual rule, temperature 1, no stop ids."""
    batch, bucket = candidates.shape
    device = candidates.device

    def column(values: Sequence[float] | None, default: float, dtype: torch.dtype) -> Tensor:
        chosen = [default] * batch if values is None else list(values)
        return torch.tensor(chosen, dtype=dtype, device=device)

    return Round(
        candidates=candidates,
        num_candidates=column(num_candidates, bucket, torch.int32),
        seeds=column(range(batch) if seeds is None else seeds, 0, torch.int64),
        base_lens=column(base_lens, 100, torch.int32),
        rules=column(rules, Rule.RESIDUAL, torch.int32),
        temperatures=column(temperatures, 1.0, torch.float32),
        stop_ids=torch.tensor(
            [[-1]] * batch if stop_ids is None else stop_ids, dtype=torch.int32, device=device
        ),
        thresholds=thresholds,
        first_rows=first_rows,
    )


def proposed(draft_logits: Tensor, round_: Round, vocab_size: int) -> Tensor:
    """Candidates [batch, bucket] drawn by the production op from draft_logits."""
    batch, bucket, _ = draft_logits.shape
    scratch = workspace(batch, draft_logits.device)
    columns = [
        draw(
            draft_logits[:, i], round_.seeds, round_.base_lens + i, round_.base_lens, round_.rules,
            round_.temperatures, vocab_size, scratch,
        ).tokens
        for i in range(bucket)
    ]  # fmt: skip
    return torch.stack(columns, 1).to(torch.int64)


def logits_draft(draft_logits: Tensor, round_: Round) -> DraftRows:
    return DraftRows(DraftKind.LOGITS, draft_logits, temperatures=round_.temperatures)


def shaped(row: Tensor, temperature: float, vocab_size: int) -> Tensor:
    return reference.shape(row.cpu().float(), Shaping(temperature=temperature), vocab_size)


def decision(
    logits: Tensor, draft: Tensor, round_: Round, session: int, vocab_size: int
) -> Decision:
    """What the reference decides: rows batch-major; draft [batch, bucket, width] of logits."""
    bucket = round_.candidates.shape[1]
    num = int(round_.num_candidates[session])
    rule = Rule(int(round_.rules[session]))
    temperature = float(round_.temperatures[session]) if rule is not Rule.GREEDY else 0.0
    first = session * (bucket + 1)
    target = [shaped(logits[first + i], temperature, vocab_size) for i in range(num + 1)]
    candidates = round_.candidates[session, :num].tolist()
    stops = frozenset(round_.stop_ids[session].tolist())
    answer = reference.philox_answer(
        int(round_.seeds[session]) & MASK_64, int(round_.base_lens[session])
    )
    if rule is Rule.GREEDY:
        return reference.run(
            reference.decide_coupled(target, candidates, stops), reference.greedy_answer
        )
    if rule is Rule.COUPLED:
        return reference.run(reference.decide_coupled(target, candidates, stops), answer)
    rows = [shaped(draft[session, i], temperature, vocab_size) for i in range(num)]
    return reference.run(reference.decide(target, rows, candidates, stops), answer)


def emitted(outcome: Outcome, session: int) -> tuple[int, ...]:
    count = int(outcome.num_emitted[session])
    assert (outcome.tokens[session, count:] == -1).all()
    return tuple(outcome.tokens[session, :count].tolist())


def assert_same(first: Outcome, second: Outcome) -> None:
    for name in ("tokens", "num_accepted", "num_emitted", "status", "log_probs"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def drawn_by_reference(
    row: Tensor, seed: int, position: int, base_len: int, rule: Rule, vocab_size: int
) -> int:
    if rule is Rule.GREEDY:
        return reference.lowest_argmax(row.cpu().float()[:vocab_size])
    weights = shaped(row, 1.0, vocab_size)
    purpose, key = (Purpose.COUPLED, 0) if rule is Rule.COUPLED else (Purpose.PROPOSE, base_len)
    return reference.race(weights, seed & MASK_64, position, key, purpose)
