"""How many tokens to draft: tokens per second at the current load, k = 0 an ordinary value.

Owns the estimates (conditional acceptance per position, times of draft, target and management at
the present number of sessions) and the choice over them (reference: theory.md section 7). Pure:
times come in as numbers, nothing is drawn, `choose` changes nothing. It sees judged positions,
times and loads only, never the value of a token nor a candidate that was not judged (DESIGN section
2, rule 7).

Sessions share the target's passes, so what a pass costs depends on what all of them do: a session
that alone decodes plainly waits for the others' candidates all the same. Pass times are therefore
fitted over the rows of the whole pass, and each k is rated as if every session chose it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from specmesh.planning import expected_tokens

FORGETTING = 0.98  # weight of the past per round of every session: a memory of about 50 rounds
PRIOR_RATE = 0.6  # acceptance of the first candidate before any was judged
PRIOR_WEIGHT = 3.0  # in candidates
SHARED_WEIGHT = 16.0  # how many own candidates outweigh what other requests showed
SLOPE_WEIGHT = 0.5  # of the assumed slope of a line, in observations one token apart
FIRST_TRIES = (4, 2, 4, 1)  # candidates of the first rounds: several lengths give a slope
FIRST_PLAIN_ROUNDS = 2
RETRY_ROUNDS = 256  # own choices after which the other way (k = 0 or k > 0) is measured again
LONGER_ROUNDS = 32  # own choices after which one candidate more than the best is measured
# Judged candidates that make a rate well known; with fewer, it is measured again sooner.
WELL_KNOWN = 40.0
RETRY_TOKENS = 2
MAX_ROWS = 17  # of a sequence in a pass: no block has more than 16 candidates
LINE_WEIGHT = 2.0  # observations at one number of rows that outweigh the line through all
# A k is kept until another one promises this much more: estimates waver, and k with them.
MARGIN = 0.02
PHASE_STEP = 97  # sessions measure again at different times, not all of them at once
SESSIONS_MEMORY = 16  # rounds over which the number of sessions is averaged


@dataclass(frozen=True, slots=True)
class RoundSample:
    """What one committed round took, in seconds. draft_s, target_s: the network included.

    num_tokens: tokens it brought. forward_s: of target_s, the target's passes (0: not known, all of
    it); one pass with candidates, one a token without. batch_size, batch_rows: sequences and token
    rows of all of them in the largest pass (0 rows: as many for each as this one had).
    is_later_part: of plain decoding, tokens that came without being asked for.
    """

    num_draft_tokens: int
    num_tokens: int
    num_judged: int
    num_accepted: int
    draft_s: float
    target_s: float
    manage_s: float
    batch_size: int = 1
    batch_rows: int = 0
    forward_s: float = 0.0
    is_later_part: bool = False

    @property
    def pass_s(self) -> float:
        """One pass of the target."""
        passes = 1 if self.num_draft_tokens else max(1, self.num_tokens)
        return (self.forward_s or self.target_s) / passes

    @property
    def rows(self) -> int:
        """Token rows of a pass."""
        return self.batch_rows or self.batch_size * (self.num_draft_tokens + 1)

    @property
    def other_s(self) -> float:
        """Besides passes: queue, network, decision, management. Once a command, and less for parts
        of an answer that follow by themselves."""
        outside = self.target_s - self.forward_s if self.forward_s else 0.0
        return max(0.0, outside) + self.manage_s


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
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _slope: float = 0.0

    def add(self, x: float, y: float, keep: float = FORGETTING) -> None:
        """Observe y at x. keep: weight of all earlier observations from now on."""
        self.weight = keep * self.weight + 1.0
        self.x = keep * self.x + x
        self.y = keep * self.y + y
        self.xx = keep * self.xx + x * x
        self.xy = keep * self.xy + x * y
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = max(0.0, self.xx / self.weight - mean_x * mean_x)
        shared = self.xy / self.weight - mean_x * mean_y
        pull = SLOPE_WEIGHT / self.weight
        assumed = self.relative_slope * mean_y
        self._slope = max(0.0, (shared + pull * assumed) / (spread + pull))
        self._mean_x, self._mean_y = mean_x, mean_y

    def at(self, x: float) -> float:
        """The estimate at x, never below a tenth of the mean. 0 before any observation."""
        return max(0.1 * self._mean_y, self._mean_y + self._slope * (x - self._mean_x))


@dataclass(slots=True)
class PassTimes:
    """Time of a pass over its rows: a line, corrected where it was measured.

    Passes are flat until arithmetic binds them, then rise. What was measured at a number of rows
    stays known while others are run. step: rows between two measured places.
    """

    step: int = 1
    # A verify pass grows little per row.
    line: Line = field(default_factory=lambda: Line(relative_slope=0.05))
    # By place, rows / step: weight and weighted sum of decaying observations.
    cells: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, rows: float, seconds: float, keep: float) -> None:
        """Observe a pass of `rows` rows; between two places it counts for both in part."""
        place = rows / self.step
        self.line.add(place, seconds, keep)
        below = int(place)
        for cell, part in ((below, 1.0 - (place - below)), (below + 1, place - below)):
            if part > 0.0:
                weight, total = self.cells.get(cell, (0.0, 0.0))
                fade = keep**part
                self.cells[cell] = (fade * weight + part, fade * total + part * seconds)

    def at(self, rows: float) -> float:
        """The estimate for `rows` rows. 0 before any observation."""
        place = rows / self.step
        measured = sorted(cell for cell, (weight, _) in self.cells.items() if weight >= 1.0)
        if len(measured) < 2:
            return self.line.at(place)
        # Between two measured places, or in line with the nearest two.
        above = min(max(1, bisect_left(measured, place)), len(measured) - 1)
        low, high = measured[above - 1], measured[above]
        at_low, at_high = self._measured(low), self._measured(high)
        slope = max(0.0, (at_high - at_low) / (high - low))
        return max(0.1 * at_low, at_low + slope * (place - low))

    def _measured(self, cell: int) -> float:
        weight, total = self.cells[cell]
        return (total + LINE_WEIGHT * self.line.at(cell)) / (weight + LINE_WEIGHT)


@dataclass(slots=True)
class Costs:
    """Times at numbers of sessions that share a table, in seconds.

    passes: of the target, over rows of all sequences. share: of the sessions, how many are in a
    verifying pass. other: of a round with candidates, what it takes besides; plain_other: of a
    command of plain decoding; part_other: of a token that comes while such a command goes on.
    """

    # A draft's time is about proportional to its tokens.
    draft: Line = field(default_factory=lambda: Line(relative_slope=0.3))
    passes: PassTimes = field(default_factory=PassTimes)
    other: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    plain_other: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    part_other: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    share: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    num_drafted_rounds: int = 0
    num_plain_rounds: int = 0

    def add(self, sample: RoundSample, num_sessions: float, keep: float) -> None:
        """Observe a round. keep: weight of all earlier ones from now on."""
        k = sample.num_draft_tokens
        if sample.rows <= MAX_ROWS * num_sessions:  # else prompts were computed in the same pass
            self.passes.add(sample.rows, sample.pass_s, keep)
        if k == 0:
            self.num_plain_rounds += 1
            if sample.is_later_part:
                self.part_other.add(0.0, sample.other_s / max(1, sample.num_tokens), keep)
            else:
                self.plain_other.add(0.0, sample.other_s, keep)
            return
        self.num_drafted_rounds += 1
        self.draft.add(k, sample.draft_s, keep)
        self.other.add(0.0, sample.other_s, keep)
        self.share.add(0.0, min(1.0, sample.batch_size / num_sessions), keep)

    def plain_s(self, plain_steps: int, num_sessions: float) -> float:
        """Estimated time of a token while no session drafts."""
        other = self.plain_other if self.plain_other.weight else self.other
        per_token = other.at(0.0) / plain_steps + self.part_other.at(0.0)
        return self.passes.at(num_sessions) + per_token

    def round_s(self, k: int, num_sessions: float) -> float:
        """Estimated time of a round with k >= 1 candidates while every session drafts as many."""
        sequences = num_sessions * (self.share.at(0.0) or 1.0)
        return self.draft.at(k) + self.passes.at(sequences * (k + 1)) + self.other.at(0.0)


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


class SharedPolicy:
    """What all requests of a coordinator replica have shown. Mutable, event-loop only."""

    def __init__(self, plain_steps: int = 4) -> None:
        """plain_steps: tokens of a command while nothing is drafted."""
        self.plain_steps = plain_steps
        self.acceptance = Acceptance()
        self.num_rounds = 0
        self._costs: dict[int, Costs] = {}
        self._num_sessions = 1.0
        self._batch_size = 1
        self._last_between = 1
        self._num_started = 0

    @property
    def num_sessions(self) -> float:
        """Sessions that share the target: this replica's (rounds of all between two of one), and
        no fewer than the last pass held, other replicas' among them."""
        return max(self._num_sessions, float(self._batch_size))

    @property
    def costs(self) -> Costs:
        """Times at the present number of sessions."""
        # One table per power of two: costs at other loads say little about this one's.
        bucket = round(self.num_sessions).bit_length()
        costs = self._costs.get(bucket)
        if costs is None:
            step = max(1, (1 << bucket) // 4)  # half of the fewest sessions of the table
            costs = self._costs[bucket] = Costs(passes=PassTimes(step))
        return costs

    def next_phase(self) -> int:
        """Own choices that a new session counts as already made."""
        self._num_started += 1
        return (self._num_started - 1) * PHASE_STEP % RETRY_ROUNDS

    def observe(self, sample: RoundSample, rounds_between: int | None) -> None:
        """Take a committed round in. rounds_between: of all sessions since this one's last."""
        self.num_rounds += 1
        if rounds_between is not None:
            self._num_sessions += (rounds_between - self._num_sessions) / SESSIONS_MEMORY
            # Two short waits in a row: sessions have ended, and an average would notice late.
            short = max(rounds_between, self._last_between)
            if short < self._num_sessions / 2:
                self._num_sessions = float(short)
            self._last_between = rounds_between
        self._batch_size = max(1, sample.batch_size)
        count = self.num_sessions
        keep = FORGETTING ** (1.0 / count)
        self.costs.add(sample, count, keep)
        if sample.num_draft_tokens:
            self.acceptance.add(sample.num_judged, sample.num_accepted, keep)

    def known(self, index: int) -> float:
        """How well the rate of candidate `index` is known, in [0, 1]."""
        return min(1.0, self.acceptance.at(index)[0] / WELL_KNOWN)

    def rates(self, count: int) -> list[float]:
        """Conditional acceptance of the first `count` candidates over all requests.

        A position of which little is known is taken to be like the one before it.
        """
        found: list[float] = []
        prior = PRIOR_RATE
        for index in range(count):
            judged, accepted = self.acceptance.at(index)
            prior = (accepted + PRIOR_WEIGHT * prior) / (judged + PRIOR_WEIGHT)
            found.append(prior)
        return found


class SessionPolicy:
    """The choice for one sample: what others showed, outweighed by what it shows itself."""

    def __init__(self, shared: SharedPolicy) -> None:
        self._shared = shared
        self._own = Acceptance()
        self._seen_at: int | None = None
        self._kept: int | None = None
        phase = shared.next_phase()
        # A pace of its own, in (0.5, 1]: sessions that change k together do not stay in step.
        self._pace = 1.0 - phase / (2.0 * RETRY_ROUNDS)
        self._since_draft = self._since_plain = phase
        self._since_longer = phase % LONGER_ROUNDS

    def observe(self, sample: RoundSample) -> None:
        """Take a committed round of this sample in."""
        shared, k = self._shared, sample.num_draft_tokens
        is_trial = self._is_trial(k)
        shared.observe(sample, None if self._seen_at is None else shared.num_rounds - self._seen_at)
        self._seen_at = shared.num_rounds - 1
        self._own.add(sample.num_judged, sample.num_accepted)
        if sample.is_later_part:  # nothing was chosen: the command goes on
            return
        is_longer = self._kept is not None and k > self._kept > 0
        self._since_longer = 0 if is_longer else self._since_longer + 1
        self._since_draft = 0 if k else self._since_draft + 1
        self._since_plain = 0 if k == 0 else self._since_plain + 1
        if not is_trial:
            self._kept = k

    def _is_trial(self, k: int) -> bool:
        """Whether the round just run was another than the steady choice, to learn."""
        if not self._kept:
            return self._kept == 0 and k > 0 and self._drafts_again()
        return (k == 0 and self._decodes_again()) or (k > self._kept and self._longer_again())

    def _drafts_again(self) -> bool:
        """Whether to try candidates although none pay. Soon while little is known of them."""
        return self._since_draft >= self._pace * RETRY_ROUNDS * self._shared.known(0) ** 3

    def _decodes_again(self) -> bool:
        """Whether to decode plainly although candidates pay."""
        return self._since_plain >= self._pace * RETRY_ROUNDS

    def _longer_again(self) -> bool:
        """Whether to try one candidate more than the best.

        Sooner while little is known of it and most blocks are kept whole, so that it is judged.
        """
        kept = self._kept or 0
        survival = self.expected_tokens(kept) - self.expected_tokens(max(0, kept - 1))
        wait = max(0.125, self._shared.known(kept), 1.0 - survival)
        return self._since_longer >= self._pace * LONGER_ROUNDS * wait

    def rates(self, num_draft_tokens: int) -> list[float]:
        """Conditional acceptance of each candidate of a block."""
        found = []
        for index, shared in enumerate(self._shared.rates(num_draft_tokens)):
            judged, accepted = self._own.at(index)
            found.append((accepted + SHARED_WEIGHT * shared) / (judged + SHARED_WEIGHT))
        return found

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """E[N] of a round with that many candidates."""
        return expected_tokens(self.rates(num_draft_tokens))

    def goodputs(self, limit: int) -> list[float]:
        """Expected tokens per second with k = 0, 1, .. limit candidates, of one session.

        Summed tokens over summed time; 0 where nothing is known yet.
        """
        costs, num_sessions = self._shared.costs, self._shared.num_sessions
        plain_s = costs.plain_s(self._shared.plain_steps, num_sessions)
        found = [1 / plain_s if plain_s > 0 else 0.0]
        survival = tokens = 1.0
        for k, rate in enumerate(self.rates(limit), 1):
            survival *= rate
            tokens += survival
            round_s = costs.round_s(k, num_sessions)
            found.append(tokens / round_s if round_s > 0 else 0.0)
        return found

    def best(self, limit: int) -> int:
        """The k in [0, limit] of the largest goodput, the smallest on ties."""
        found = self.goodputs(limit)
        return found.index(max(found))

    def choose(self, limit: int) -> int:
        """k in [0, limit] for the next round; now and then another one than the best, to learn.

        Depends on counts, times and judged positions. Changes nothing: asked twice, it says the
        same.
        """
        shared, costs = self._shared, self._shared.costs
        tried = int(costs.num_drafted_rounds / shared.num_sessions)
        if tried < len(FIRST_TRIES):
            return min(limit, FIRST_TRIES[tried])
        if costs.num_plain_rounds < FIRST_PLAIN_ROUNDS * shared.num_sessions:
            return 0
        best = self._steady(limit)
        if best == 0:
            return min(limit, RETRY_TOKENS) if self._drafts_again() else 0
        if self._decodes_again():
            return 0
        return best + 1 if best < limit and self._longer_again() else best

    def _steady(self, limit: int) -> int:
        """The best k, or the one of the rounds before where it is as good but for a margin."""
        found = self.goodputs(limit)
        best = found.index(max(found))
        kept = self._kept
        if kept is not None and kept <= limit and found[best] < (1 + MARGIN) * found[kept]:
            return kept
        return best
