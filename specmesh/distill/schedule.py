"""How learning rate and loss move as training goes on. Progress runs from 0 to 1: pure functions.

Progress is the larger of steps done and time spent, each of its budget, so that a run of fixed
minutes ends at learning rate zero however fast the device is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specmesh.distill.losses import LossWeights

# Forward KL alone until TV_BEGINS, then total variation grows to its full weight at TV_IS_FULL.
TV_BEGINS, TV_IS_FULL = 0.30, 0.60
FINAL_WEIGHTS = LossWeights(kl=0.2, tv=3.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use; at least one of both is set. seconds counts training and sampling."""

    seconds: float | None
    max_steps: int | None

    def progress(self, elapsed_s: float, step: int) -> float:
        """Share of the budget that is used, in [0, 1]."""
        shares = [0.0]
        if self.seconds is not None:
            shares.append(elapsed_s / self.seconds)
        if self.max_steps is not None:
            shares.append(step / self.max_steps)
        return min(1.0, max(shares))


def learning_rate(peak: float, progress: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up over steps, then half a cosine over progress down to zero."""
    decayed = peak * 0.5 * (1 + math.cos(math.pi * progress))
    return decayed * min(1.0, (step + 1) / max(1, warmup_steps))


def loss_weights(progress: float) -> LossWeights:
    """The loss at a point of the run: forward KL first, mostly total variation at the end."""
    share = min(1.0, max(0.0, (progress - TV_BEGINS) / (TV_IS_FULL - TV_BEGINS)))
    return LossWeights(kl=1.0 + share * (FINAL_WEIGHTS.kl - 1.0), tv=share * FINAL_WEIGHTS.tv)
