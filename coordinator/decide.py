"""The decision made in the coordinator: for `decide_at = "coordinator"`, and to audit a target.

Owns the step from received rows to an outcome. The arithmetic is `kernels.reference`, the same
functions a target calls, so both placements give the same tokens. Rows are decoded when they are
judged: a row without a law is a fault only then (exactness rule 12). Blocking; knows no links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator.commands import Closing, Outcome
from coordinator.messages import Audit, Decide
from kernels import reference
from kernels.reference_rows import NEAR_TIE
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2
from specmesh import wire
from specmesh.errors import CorruptFrame, NumericFault, SpecmeshError

_ROW_BYTES = 4


class DraftFault(Exception):
    """A draft's row is no law: the draft's content, not the target's."""

    def __init__(self, error: SpecmeshError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class Law:
    """What of a request shapes decisions. num_logprobs: None where none were asked for."""

    seed: int
    vocab_size: int
    is_greedy: bool
    is_coupled: bool
    stop_ids: frozenset[int]
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Whether a target's outcome was reproduced; margin: how close the first difference was."""

    is_mismatch: bool
    margin: float | None = None

    @property
    def is_near_tie(self) -> bool:
        """A difference that rounding explains: target and coordinator may break it either way."""
        return self.is_mismatch and self.margin is not None and self.margin < NEAR_TIE

    @property
    def is_alarm(self) -> bool:
        """A difference that rounding cannot explain."""
        return self.is_mismatch and not self.is_near_tie


class _LazyRows(Sequence[Tensor]):
    """Dense float32 rows [vocab_size], decoded on first use."""

    def __init__(
        self,
        frames: Sequence[session_pb2.Distribution],
        vocab_size: int,
        fault: Callable[[SpecmeshError], Exception],
    ) -> None:
        self._frames = frames
        self._vocab_size = vocab_size
        self._fault = fault
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]  # never sliced
        if index not in self._rows:
            try:
                self._rows[index] = wire.decode(self._frames[index], self._vocab_size).dense()
            except CorruptFrame as error:
                raise self._fault(error) from error
        return self._rows[index]


def _target_fault(error: SpecmeshError) -> Exception:
    return NumericFault(f"a judged row of the target is no law: {error.message}")


def _deciding(
    law: Law, candidates: Sequence[int], target_rows: Sequence[Tensor], draft_rows: _LazyRows
) -> reference.Deciding:
    if law.is_greedy or law.is_coupled:
        return reference.decide_coupled(target_rows, candidates, law.stop_ids)
    return reference.decide(target_rows, draft_rows, candidates, law.stop_ids)


def _answer(law: Law, base_len: int) -> Callable[[reference.Coin | reference.Draw], Any]:
    return reference.greedy_answer if law.is_greedy else reference.philox_answer(law.seed, base_len)


def decide_round(law: Law, request: Decide) -> Outcome:
    """Decide a round from its rows.

    Raises NumericFault (a judged row of the target) or DraftFault (a judged row of the draft).
    """
    targets = _LazyRows(request.target_rows, law.vocab_size, _target_fault)
    drafts = _LazyRows(request.draft_rows, law.vocab_size, DraftFault)
    deciding = _deciding(law, request.candidates, targets, drafts)
    decision = reference.run(deciding, _answer(law, request.base_len))
    num_judged = min(len(request.candidates), len(decision.tokens))
    return Outcome(
        num_accepted=decision.num_accepted,
        tokens=decision.tokens,
        closing=_closing(decision, len(request.candidates)),
        logprobs=_logprobs(law, request.logprob_rows, decision.tokens),
        judged=tuple(
            _judge(targets[index], drafts, request.candidates[index], index)
            for index in range(num_judged)
        ),
        emitted=tuple(_emit(targets[index], token) for index, token in enumerate(decision.tokens)),
        redraw_mismatch=request.redraw_mismatch,
    )


def _closing(decision: reference.Decision, num_candidates: int) -> Closing:
    if decision.closing is None:
        return Closing.STOPPED
    return Closing.RECOVERED if decision.num_accepted < num_candidates else Closing.BONUS


def _judge(
    target: Tensor, drafts: _LazyRows, candidate: int, index: int
) -> tuple[float, float, float]:
    """p(x), q(x) and sum(min(p, q)); without a row of the draft, p(x) alone."""
    target_law = target.double() / float(reference.total(target))
    if not len(drafts):
        return float(target_law[candidate]), 0.0, 0.0
    draft = drafts[index]
    draft_law = draft.double() / float(reference.total(draft))
    overlap = float(torch.minimum(target_law, draft_law).sum())
    return float(target_law[candidate]), float(draft_law[candidate]), overlap


def _emit(target: Tensor, token: int) -> tuple[bool, float]:
    top = reference.lowest_argmax(target)
    return token == top, float(target[top]) / float(reference.total(target))


def _logprobs(
    law: Law, rows: Sequence[bytes], tokens: Sequence[int]
) -> tuple[session_pb2.TokenLogprobs, ...]:
    """Per emitted token its log-probability and the largest of its row, lowest id on ties.

    rows: natural-log probabilities, float32 [vocab_size] each.
    """
    if law.num_logprobs is None:
        return ()
    found = []
    for data, token in zip(rows, tokens, strict=False):
        if len(data) != _ROW_BYTES * law.vocab_size:
            raise NumericFault(f"{len(data)} bytes of log-probabilities for {law.vocab_size} ids")
        row = np.frombuffer(data, "<f4")
        ranked = np.argsort(-row, kind="stable")[: law.num_logprobs]
        found.append(
            session_pb2.TokenLogprobs(
                logprob=float(row[token]),
                top=[
                    session_pb2.TokenLogprob(token_id=int(other), logprob=float(row[other]))
                    for other in ranked
                ],
            )
        )
    return tuple(found)


# ---------------------------------------------------------------- audit


def audit_round(law: Law, request: Audit) -> AuditResult:
    """Decide a target's round again from the rows it returned, and compare.

    A row that cannot be decoded is a mismatch without a margin.
    """
    outcome = request.outcome
    candidates = request.candidates if outcome.redraw_mismatch is None else ()
    targets = _LazyRows(request.target_rows, law.vocab_size, _target_fault)
    drafts = _LazyRows(request.draft_rows, law.vocab_size, DraftFault)
    answer = _answer(law, request.base_len)
    asked: list[tuple[reference.Coin | reference.Draw, Any]] = []

    def recording(step: reference.Coin | reference.Draw) -> Any:
        asked.append((step, answer(step)))
        return asked[-1][1]

    try:
        decision = reference.run(_deciding(law, candidates, targets, drafts), recording)
    except (SpecmeshError, DraftFault):
        return AuditResult(is_mismatch=True)
    if (decision.tokens, decision.num_accepted) == (outcome.tokens, outcome.num_accepted):
        return AuditResult(is_mismatch=False)
    return AuditResult(True, _margin(law, request, outcome, asked))


def _margin(
    law: Law,
    request: Audit,
    outcome: Outcome,
    asked: Sequence[tuple[reference.Coin | reference.Draw, Any]],
) -> float | None:
    """Relative distance of the first step that came out differently; None where none explains it.

    A coin: |u q(x) - p(x)| over the larger. A draw: the gap of the two finishing times over the
    slower one; at temperature 0 the gap of the two weights over the larger.
    """
    for step, own in asked:
        index = step.index
        theirs = outcome.tokens[index] if index < len(outcome.tokens) else None
        if isinstance(step, reference.Coin):
            if bool(own) != (index < outcome.num_accepted):
                position = request.base_len + index
                left = reference.coin(law.seed, position, request.base_len) * step.draft_mass
                right = step.target_mass
                larger = max(left, right)
                return float(abs(left - right) / larger) if larger > 0 else None
        elif theirs is not None and own != theirs:
            return _draw_margin(law, request.base_len, step, own, theirs)
    return None


def _draw_margin(
    law: Law, base_len: int, step: reference.Draw, own: int, theirs: int
) -> float | None:
    ids = torch.tensor(sorted((own, theirs)))
    weights = step.weights[ids].to(torch.float64)
    if float(weights.min()) <= 0.0:
        return None  # one of the two cannot be drawn at all
    if law.is_greedy:
        return float((weights.max() - weights.min()) / weights.max())
    key = 0 if step.purpose is Purpose.COUPLED else base_len
    times = reference.exponentials(law.seed, ids, base_len + step.index, key, step.purpose)
    finishes = times / weights
    return float((finishes.max() - finishes.min()) / finishes.max())
