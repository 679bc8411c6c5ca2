"""How many candidates are kept: decaying counts per position in the block, and rates from them.

Owns the estimates of acceptance, how well they are known, and whether a trial contradicts them.
Pure; sees judged positions only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.costs import FORGETTING

PRIOR_RATE = 0.6  # acceptance of the first candidate before any was judged
PRIOR_WEIGHT = 3.0  # in candidates
# Judged candidates that make a rate well known; with fewer, it is measured again sooner.
WELL_KNOWN = 40.0
# A trial that was as likely as this, or less, says that acceptance has changed.
SURPRISE = 0.03


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of judged and accepted candidates per position in the block."""

    judged: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, num_judged: int, num_accepted: int, keep: float = FORGETTING) -> None:
        """Observe one round's block. keep: weight of all earlier ones from now on."""
        for index in range(num_judged):
            if index == len(self.judged):
                self.judged.append(0.0)
                self.accepted.append(0.0)
            self.judged[index] = keep * self.judged[index] + 1.0
            self.accepted[index] = keep * self.accepted[index] + float(index < num_accepted)

    def at(self, index: int) -> tuple[float, float]:
        """(judged, accepted) of a position; zeros where nothing was judged."""
        if index >= len(self.judged):
            return 0.0, 0.0
        return self.judged[index], self.accepted[index]


@dataclass(slots=True)
class SharedAcceptance(Acceptance):
    """Of all requests of a replica. num_blocks: judged since it began or changed, undecayed."""

    num_blocks: int = 0

    def observe(self, num_judged: int, num_accepted: int, keep: float) -> None:
        """Take a round in."""
        self.add(num_judged, num_accepted, keep)
        self.num_blocks += num_judged > 0

    def contradicts(self, num_accepted: int) -> bool:
        """Whether a block of which so many were kept is hardly possible at the present rates."""
        return num_accepted > 0 and math.prod(self.rates(num_accepted)) <= SURPRISE

    def doubt(self) -> None:
        """Keep the rates, but as if little had been judged."""
        self.num_blocks = 0
        for index, judged in enumerate(self.judged):
            share = min(1.0, PRIOR_WEIGHT / judged) if judged else 1.0
            self.judged[index] *= share
            self.accepted[index] *= share

    def known(self, index: int) -> float:
        """How well the rate of candidate `index` is known, in [0, 1]."""
        judged = self.num_blocks if index == 0 else self.at(index)[0]
        return min(1.0, judged / WELL_KNOWN)

    def rates(self, count: int, *, hopeful: bool = False) -> list[float]:
        """Conditional acceptance of the first `count` candidates.

        A position of which little is known is taken to be like the one before it. hopeful: one
        standard deviation more, which would be no surprise either.
        """
        found: list[float] = []
        prior = PRIOR_RATE
        for index in range(count):
            judged, accepted = self.at(index)
            weight = judged + PRIOR_WEIGHT
            prior = (accepted + PRIOR_WEIGHT * prior) / weight
            spread = math.sqrt(prior * (1.0 - prior) / weight) if hopeful else 0.0
            found.append(min(1.0, prior + spread))
        return found
