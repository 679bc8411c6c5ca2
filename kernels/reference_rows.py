"""The specification of checks and figures of rows (`kernels/redraw.py`, `kernels/row_report.py`).

Plain PyTorch beside `kernels/reference.py`, whose rows and races these functions take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import exponentials, total
from kernels.streams import Purpose

NEAR_TIE = 2.0**-18  # relative distance below which rounding may choose (DESIGN section 5)


def is_redrawn(
    weights: Tensor, ids: Tensor, token: int, seed: int, position: int, base_len: int
) -> bool:
    """Whether PROPOSE noise draws `token` from a sparse row (as `race`), or ties with what it does.

    A token that has no weight in the row is never redrawn. ids: int64 [n] ascending.
    """
    running = weights > 0
    weights, ids = weights[running].double(), ids[running]
    own = (ids == token).nonzero()
    if not own.numel():
        return False
    times = exponentials(seed, ids, position, base_len, Purpose.PROPOSE) / weights
    slowest = float(times[own[0, 0]])
    return slowest - float(times.min()) < NEAR_TIE * slowest


def overlap(target: Tensor, draft: Tensor) -> float:
    """Sum of min(p, q) of two rows of weights over the same ids: the chance to be accepted."""
    laws = (row.double() / total(row) for row in (target, draft))
    return float(torch.minimum(*laws).sum())
