"""Faults planted into a draft or a target under test; what watches them runs unchanged.

A target's faults replace its own decision only, so an audit in the same process stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draft_service.proposer import Proposer
from kernels import reference
from kernels.reference import Coin, Deciding, Decision, Draw
from kernels.streams import Purpose
from specmesh import wire
from target_service.verifier import Verifier
from tests.exact import mutants

SAMPLED_AT = 0.7  # a cold draft's temperature; its rows are sent as of temperature 1
COLD_OWN_NOISE, COLD_SHARED_NOISE = "cold_own_noise", "cold_shared_noise"
RESIDUAL_FROM_P, BONUS_FROM_PREVIOUS_ROW = "residual_from_p", "bonus_from_previous_row"
REUSED_NOISE = "reused_noise"

Answer = Callable[[Coin | Draw], Any]
# (seed of the request, base_len of the block) -> whether a token of it is not the honest draft's
Differences = dict[tuple[int, int], bool]


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> Differences:
    """Plant a fault ("none" plants none). Returns what a cold draft proposes, as it proposes."""
    found: Differences = {}
    if fault in (COLD_OWN_NOISE, COLD_SHARED_NOISE):
        _plant_cold_draft(monkeypatch, found, shares_noise=fault == COLD_SHARED_NOISE)
    elif fault == RESIDUAL_FROM_P:
        _plant_decision(monkeypatch, decider=mutants.residual_redrawn_from_target)
    elif fault == BONUS_FROM_PREVIOUS_ROW:
        _plant_decision(monkeypatch, decider=_bonus_from_previous_row)
    elif fault == REUSED_NOISE:
        _plant_decision(monkeypatch, spoil=_reusing)
    else:
        assert fault == "none"
    return found


def _plant_cold_draft(
    monkeypatch: pytest.MonkeyPatch, found: Differences, shares_noise: bool
) -> None:
    draw = Proposer._draw
    generator = torch.Generator().manual_seed(0)

    def cold(proposer: Proposer, task: Any, drafting: Any, logits: Any) -> None:
        draw(proposer, task, drafting, logits)
        row, honest = drafting.cuts[-1].row, drafting.tokens[-1]
        weights = row.weights.double().pow(1 / SAMPLED_AT).float()
        if shares_noise:
            sampled = wire.Row(row.vocab_size, weights, row.ids, row.encoding)
            position = task.base_len + len(drafting.tokens) - 1
            token = sampled.draw(task.session.seed, position, task.base_len, Purpose.PROPOSE)
        else:
            index = int(torch.multinomial(weights, 1, generator=generator))
            token = index if row.ids is None else int(row.ids[index])
        drafting.tokens[-1] = token
        key = (task.session.seed, task.base_len)
        found[key] = found.get(key, False) or token != honest

    monkeypatch.setattr(Proposer, "_draw", cold)


def _plant_decision(
    monkeypatch: pytest.MonkeyPatch,
    decider: mutants.Decider = reference.decide,
    spoil: Callable[[Answer], Answer] = lambda right: right,
) -> None:
    def decide(
        _: Verifier, session: Any, rows: Any, candidates: Any, base_len: int
    ) -> tuple[Decision, list[reference.Coin]]:
        stop_ids = session.shaper.stop_ids
        draft_rows = [row.dense() for row in candidates.rows]
        deciding = decider(rows, draft_rows, candidates.tokens, stop_ids)
        answer, coins = spoil(reference.philox_answer(session.seed, base_len)), []

        def noted(request: reference.Coin | reference.Draw) -> Any:
            if isinstance(request, reference.Coin):
                coins.append(request)
            return answer(request)

        return reference.run(deciding, noted), coins

    monkeypatch.setattr(Verifier, "_run_rule", decide)


def _bonus_from_previous_row(
    target_rows: Any, draft_rows: Any, candidates: Sequence[int], stop_ids: frozenset[int]
) -> Deciding:
    deciding = reference.decide(target_rows, draft_rows, candidates, stop_ids)
    try:
        request = next(deciding)
        while True:
            if isinstance(request, Draw) and request.purpose is Purpose.BONUS and candidates:
                request = Draw(request.index, request.purpose, target_rows[request.index - 1])
            request = deciding.send((yield request))
    except StopIteration as finished:
        decision: Decision = finished.value
        return decision


def _reusing(right: Answer) -> Answer:
    def answer(request: Coin | Draw) -> Any:
        if isinstance(request, Draw) and request.purpose is Purpose.RESIDUAL:
            request = Draw(request.index, Purpose.PROPOSE, request.weights)
        return right(request)

    return answer
