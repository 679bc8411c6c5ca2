"""Wrong samplers that have shipped elsewhere. Each must be told from the right one by a test.

A decider takes (target_rows, draft_rows, candidates, stop_ids) and is a generator like
`kernels.reference.decide`, which these wrap so that only the fault differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernels.reference import Deciding, Decision, Draw, decide, total
from kernels.streams import Purpose

Row = Any
Rows = Sequence[Row]
Decider = Callable[[Rows, Rows, Sequence[int], frozenset[int]], Deciding]


def drawing_residuals_from(weights_of: Callable[[Rows, Rows, int], Row]) -> Decider:
    """The right decider, but for the weights of residual draws: weights_of(p rows, q rows, i)."""

    def decider(
        target_rows: Rows, draft_rows: Rows, candidates: Sequence[int], stop_ids: frozenset[int]
    ) -> Deciding:
        deciding = decide(target_rows, draft_rows, candidates, stop_ids)
        try:
            request = next(deciding)
            while True:
                if isinstance(request, Draw) and request.purpose is Purpose.RESIDUAL:
                    weights = weights_of(target_rows, draft_rows, request.index)
                    request = Draw(request.index, request.purpose, weights)
                answer = yield request
                request = deciding.send(answer)
        except StopIteration as finished:
            decision: Decision = finished.value
            return decision

    return decider


def _next_rows_residual(target_rows: Rows, draft_rows: Rows, index: int) -> Row:
    other = min(index + 1, len(draft_rows) - 1)
    p, q = target_rows[other], draft_rows[other]
    surplus = p * total(q) - q * total(p)
    residual = surplus * (surplus > 0)
    return residual if bool((residual > 0).any()) else p


# After a rejection, p in place of [p - q]+.
residual_redrawn_from_target = drawing_residuals_from(lambda p, q, i: p[i])
# |p - q| in place of [p - q]+.
residual_without_clamp = drawing_residuals_from(
    lambda p, q, i: abs(p[i] * total(q[i]) - q[i] * total(p[i]))
)
# Weights subtracted before either side is normalised, so that a scale of q leaks into the law.
residual_of_unnormalised_rows = drawing_residuals_from(
    lambda p, q, i: (p[i] - q[i]) * (p[i] > q[i]) if bool((p[i] > q[i]).any()) else p[i]
)
# The residual of the row after the rejected one.
residual_at_the_wrong_row = drawing_residuals_from(_next_rows_residual)


def bonus_after_stop(
    target_rows: Rows, draft_rows: Rows, candidates: Sequence[int], stop_ids: frozenset[int]
) -> Deciding:
    """Goes on judging past an accepted stop token and draws a bonus after it."""
    del stop_ids
    return (yield from decide(target_rows, draft_rows, candidates, frozenset()))
