"""How many tokens to draft: tokens per second at the current load, k = 0 an ordinary value.

Owns the estimates (conditional acceptance per position, times of draft, target and management per
batch size) and the choice over them (reference: theory.md section 7). Pure: times come in as
numbers, nothing is drawn, `choose` changes nothing. It sees judged positions, times and loads only,
never the value of a token nor a candidate that was not judged (DESIGN section 2, rule 7).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specmesh.planning import expected_tokens

FORGETTING = 0.98  # weight of the past per observation: a memory of about 50 rounds
PRIOR_RATE = 0.7  # acceptance of a position nothing is known of
PRIOR_WEIGHT = 2.0  # in candidates
SHARED_WEIGHT = 8.0  # how many own candidates outweigh what other requests showed
SLOPE_WEIGHT = 0.5  # of the assumed slope of a line, in observations one token apart
FIRST_TRIES = (4, 2, 4, 1)  # candidates of the first rounds: two lengths give a slope
FIRST_PLAIN_ROUNDS = 2
RETRY_ROUNDS = 256  # rounds after which the other way (k = 0 or k > 0) is measured again
LONGER_ROUNDS = 32  # rounds after which one candidate more than the best is measured
RETRY_TOKENS = 2


@dataclass(frozen=True, slots=True)
class RoundSample:
    """What one committed round took, in seconds. draft_s, target_s: the network included.

    num_tokens: tokens it brought. batch_size: sequences in the target's largest batch of it.
    """

    num_draft_tokens: int
    num_tokens: int
    num_judged: int
    num_accepted: int
    draft_s: float
    target_s: float
    manage_s: float
    batch_size: int = 1


@dataclass(slots=True)
class Line:
    """A line through decaying observations (weighted least squares), with an assumed slope.

    relative_slope: slope assumed before x has varied, as a share of the mean per unit of x.
    """

    relative_slope: float
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Observe y at x."""
        self.weight = FORGETTING * self.weight + 1.0
        self.x = FORGETTING * self.x + x
        self.y = FORGETTING * self.y + y
        self.xx = FORGETTING * self.xx + x * x
        self.xy = FORGETTING * self.xy + x * y

    def at(self, x: float) -> float:
        """The estimate at x, never below a tenth of the mean. 0 before any observation."""
        if not self.weight:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = max(0.0, self.xx / self.weight - mean_x * mean_x)
        shared = self.xy / self.weight - mean_x * mean_y
        pull = SLOPE_WEIGHT / self.weight
        assumed = self.relative_slope * mean_y
        slope = max(0.0, (shared + pull * assumed) / (spread + pull))
        return max(0.1 * mean_y, mean_y + slope * (x - mean_x))


@dataclass(slots=True)
class Costs:
    """Times at one batch size, in seconds."""

    # A draft's time is about proportional to its tokens; a verify pass grows little per row.
    draft: Line = field(default_factory=lambda: Line(relative_slope=0.3))
    verify: Line = field(default_factory=lambda: Line(relative_slope=0.05))
    manage: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    plain: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    num_drafted_rounds: int = 0
    num_plain_rounds: int = 0

    def add(self, sample: RoundSample) -> None:
        """Observe a round."""
        k = sample.num_draft_tokens
        if k == 0:
            self.num_plain_rounds += 1
            self.plain.add(0.0, (sample.target_s + sample.manage_s) / sample.num_tokens)
            return
        self.num_drafted_rounds += 1
        self.draft.add(k, sample.draft_s)
        self.verify.add(k, sample.target_s)
        self.manage.add(0.0, sample.manage_s)

    def round_s(self, k: int) -> float:
        """Estimated time of a round with k candidates; per token for k = 0."""
        if k == 0:
            one = self.plain.at(0.0)
            return one if self.plain.weight else self.verify.at(0) + self.manage.at(0)
        return self.draft.at(k) + self.verify.at(k) + self.manage.at(0)


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of judged and accepted candidates per position in the block."""

    judged: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, num_judged: int, num_accepted: int) -> None:
        """Observe one round's block."""
        for index in range(num_judged):
            if index == len(self.judged):
                self.judged.append(0.0)
                self.accepted.append(0.0)
            self.judged[index] = FORGETTING * self.judged[index] + 1.0
            self.accepted[index] = FORGETTING * self.accepted[index] + float(index < num_accepted)

    def at(self, index: int) -> tuple[float, float]:
        """(judged, accepted) of a position; zeros where nothing was judged."""
        if index >= len(self.judged):
            return 0.0, 0.0
        return self.judged[index], self.accepted[index]


class SharedPolicy:
    """What all requests of a coordinator replica have shown. Mutable, event-loop only."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self._bucket = 1
        self.acceptance = Acceptance()
        self.rounds_since_draft = 0
        self.rounds_since_plain = 0
        self.rounds_since_longer = 0

    @property
    def costs(self) -> Costs:
        """Times at the batch size of the last round."""
        return self._costs.setdefault(self._bucket, Costs())

    def observe(self, sample: RoundSample) -> None:
        """Take a committed round in."""
        # One table per power of two: costs at other loads say little about this one's.
        self._bucket = max(1, sample.batch_size).bit_length()
        longest = len(self.acceptance.judged)
        self.costs.add(sample)
        if sample.num_draft_tokens:
            self.rounds_since_draft = 0
            self.rounds_since_plain += 1
            self.acceptance.add(sample.num_judged, sample.num_accepted)
        else:
            self.rounds_since_plain = 0
            self.rounds_since_draft += 1
        grew = sample.num_judged > longest or sample.num_draft_tokens >= longest > 0
        self.rounds_since_longer = 0 if grew else self.rounds_since_longer + 1

    def rate(self, index: int) -> float:
        """Conditional acceptance of candidate `index` over all requests."""
        judged, accepted = self.acceptance.at(index)
        return (accepted + PRIOR_WEIGHT * PRIOR_RATE) / (judged + PRIOR_WEIGHT)


class SessionPolicy:
    """The choice for one sample: what others showed, outweighed by what it shows itself."""

    def __init__(self, shared: SharedPolicy) -> None:
        self._shared = shared
        self._own = Acceptance()

    def observe(self, sample: RoundSample) -> None:
        """Take a committed round of this sample in."""
        self._shared.observe(sample)
        self._own.add(sample.num_judged, sample.num_accepted)

    def rates(self, num_draft_tokens: int) -> list[float]:
        """Conditional acceptance of each candidate of a block."""
        found = []
        for index in range(num_draft_tokens):
            judged, accepted = self._own.at(index)
            shared = self._shared.rate(index)
            found.append((accepted + SHARED_WEIGHT * shared) / (judged + SHARED_WEIGHT))
        return found

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """E[N] of a round with that many candidates."""
        return expected_tokens(self.rates(num_draft_tokens))

    def goodput(self, num_draft_tokens: int) -> float:
        """Expected tokens per second of such rounds, as summed tokens over summed time."""
        round_s = self._shared.costs.round_s(num_draft_tokens)
        return self.expected_tokens(num_draft_tokens) / round_s if round_s > 0 else 0.0

    def best(self, limit: int) -> int:
        """The k in [0, limit] of the largest goodput, the smallest on ties."""
        return max(range(limit + 1), key=lambda k: (self.goodput(k), -k))

    def choose(self, limit: int) -> int:
        """k in [0, limit] for the next round; now and then another one than the best, to learn.

        Depends on counts, times and judged positions. Changes nothing: asked twice, it says the
        same.
        """
        shared, costs = self._shared, self._shared.costs
        if costs.num_drafted_rounds < len(FIRST_TRIES):
            return min(limit, FIRST_TRIES[costs.num_drafted_rounds])
        if costs.num_plain_rounds < FIRST_PLAIN_ROUNDS:
            return 0
        best = self.best(limit)
        if best == 0 and shared.rounds_since_draft >= RETRY_ROUNDS:
            return min(limit, RETRY_TOKENS)
        if best > 0 and shared.rounds_since_plain >= RETRY_ROUNDS:
            return 0
        known = len(shared.acceptance.judged)
        if best == min(known, limit) < limit and shared.rounds_since_longer >= LONGER_ROUNDS:
            return best + 1
        return best
