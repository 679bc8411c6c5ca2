"""How many candidates are kept: decaying counts per position in the block, and rates from them.

Owns the estimates of acceptance, how well they are known, and whether a trial contradicts them.
Pure; sees judged positions only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORGETTING = 0.99  # weight of the past per round of every session: a memory of about 100 rounds
PRIOR_RATE = 0.6  # acceptance of the first candidate before any was judged
PRIOR_WEIGHT = 3.0  # in candidates
# Judged candidates that make a rate well known; with fewer, it is measured again sooner.
WELL_KNOWN = 40.0
OWN_FORGETTING = 0.98  # of what one request shows: texts change
RECENT_FORGETTING = 0.95
# Standard deviations between what is recent and the rest that are no chance.
CHANGE = 3.5
# A trial that was as likely as this, or less, says that acceptance has changed.
SURPRISE = 0.03


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of judged and accepted candidates per position in the block."""

    judged: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, num_judged: int, num_accepted: int, keep: float = OWN_FORGETTING) -> None:
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
    """Of all requests of a replica. num_blocks: judged since it began or changed, undecayed.

    recent_judged, recent_accepted: of first candidates, with a short memory.
    """

    num_blocks: int = 0
    recent_judged: float = 0.0
    recent_accepted: float = 0.0

    def observe(
        self, num_judged: int, num_accepted: int, num_sessions: float = 1.0, *, is_trial: bool
    ) -> bool:
        """Take a round in. num_sessions: that have such rounds. is_trial: few have, now and then.

        Returns whether acceptance seems to have changed: little counts as known then.
        """
        if not num_judged:
            return False
        has_changed = is_trial and self._contradicts(num_accepted)
        if has_changed:
            self._doubt()
        self.add(num_judged, num_accepted, FORGETTING ** (1.0 / num_sessions))
        self.num_blocks += 1
        keep = RECENT_FORGETTING ** (1.0 / num_sessions)
        self.recent_judged = keep * self.recent_judged + 1.0
        self.recent_accepted = keep * self.recent_accepted + float(num_accepted > 0)
        if self._has_changed():
            has_changed = True
            self._doubt()
        return has_changed

    def _contradicts(self, num_accepted: int) -> bool:
        """Whether a block of which so many were kept is hardly possible at the present rates."""
        return num_accepted > 0 and math.prod(self.rates(num_accepted)) <= SURPRISE

    def _has_changed(self) -> bool:
        """Whether recent rounds are no part of what was known before."""
        if self.num_blocks < WELL_KNOWN:
            return False
        (rate,) = self.rates(1)
        # Of a mean whose weights decay: twice as many count as their sum says.
        spread = math.sqrt(rate * (1.0 - rate) / (2.0 * self.recent_judged))
        return abs(self.recent_accepted / self.recent_judged - rate) > CHANGE * spread

    def _doubt(self) -> None:
        """Keep the rates, but as if little had been judged."""
        self.num_blocks = 0
        self.recent_judged = self.recent_accepted = 0.0
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
