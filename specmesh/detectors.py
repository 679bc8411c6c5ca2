"""Two running z-scores that watch the output law in production (DESIGN section 8). Pure.

Both sum differences between what happened and what was certain to be expected before it happened,
so the sums are martingales whatever the model, the prompt and the batch do, as long as nobody could
know the noise beforehand. They are therefore fed only rounds whose seed was drawn for the call: a
seed that callers choose can be chosen for its outcome, and a request that is repeated with it
brings the same differences again, whose z grows with the square root of the number of repetitions.

    acceptance   accepted - sum(min(p, q))        per judged candidate, residual rule only
    argmax       [emitted = argmax p] - max p     per emitted token, both rules

The first moves when the draft samples from something other than the row that it sends; the second
when a recovered or bonus token is drawn from the wrong law. They find gross faults within thousands
of rounds and subtle ones late: the re-draw check and the audit are the primary detectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ALARM_Z = 5.0
# Past observations lose weight with this time constant, so that a fault which begins after months
# of correct service is not averaged away. A Gaussian z with this memory passes 5 by chance about
# once in 65536 / (2 * 5 * phi(5)) = 4e9 observations (Rice's formula for an Ornstein-Uhlenbeck
# process).
MEMORY = 65_536
# Below this summed variance z is not yet near a Gaussian: one rejection at an expected acceptance
# of 0.999 alone gives z = -31. At 100, |z| = 5 needs an excess of 50 events.
MIN_VARIANCE = 100.0


class RunningZ:
    """z of a sum of (indicator - its probability), with exponential forgetting.

    An alarm is latched until `reset`: it stays visible after the fault is gone.
    """

    __slots__ = ("_excess", "_keep", "_variance", "alarmed", "num_observed")

    def __init__(self, memory: int = MEMORY) -> None:
        """`memory`: time constant in observations."""
        self._keep = 1.0 - 1.0 / memory
        self.reset()

    def reset(self) -> None:
        """Forget everything, the alarm included."""
        self._excess = 0.0
        self._variance = 0.0
        self.num_observed = 0
        self.alarmed = False

    def observe(self, happened: bool, probability: float) -> bool:
        """Add one event and its probability. True when this observation raises the alarm.

        Probabilities are clamped to [0, 1] (float32 sums may miss by rounding); NaN is ignored.
        """
        if probability != probability:
            return False
        expected = min(1.0, max(0.0, probability))
        self._excess = self._keep * self._excess + (float(happened) - expected)
        self._variance = self._keep**2 * self._variance + expected * (1.0 - expected)
        self.num_observed += 1
        if self.alarmed or self._variance < MIN_VARIANCE:
            return False
        self.alarmed = self._excess**2 > ALARM_Z**2 * self._variance
        return self.alarmed

    @property
    def z(self) -> float:
        """The score; 0 while too little has been seen to say anything."""
        if self._variance < MIN_VARIANCE:
            return 0.0
        return self._excess / math.sqrt(self._variance)


class LawWatch:
    """Both scores over the rounds of one coordinator (or of one draft replica)."""

    __slots__ = ("acceptance", "argmax")

    def __init__(self, memory: int = MEMORY) -> None:
        self.acceptance = RunningZ(memory)
        self.argmax = RunningZ(memory)

    def observe_candidates(self, num_accepted: int, overlaps: Sequence[float]) -> bool:
        """One round's judged candidates under the residual rule, sum(min(p, q)) of each.

        The first num_accepted were accepted, one more may have been rejected. True on alarm.
        """
        raised = False
        for index, overlap in enumerate(overlaps):
            raised |= self.acceptance.observe(index < num_accepted, overlap)
        return raised

    def observe_emitted(self, is_argmax: Sequence[bool], max_probs: Sequence[float]) -> bool:
        """One round's emitted tokens, accepted ones included. True on alarm."""
        raised = False
        for hit, max_prob in zip(is_argmax, max_probs, strict=True):
            raised |= self.argmax.observe(hit, max_prob)
        return raised
