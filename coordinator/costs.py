"""What rounds take at a load: samples of committed rounds, and estimates fitted to them.

Owns the times (draft, passes of the target, everything between them) at numbers of sessions that
share a table. Pure: times come in as numbers. Rates of acceptance, choices and trials are
`coordinator/policy.py`'s.

Sessions share the target's passes, so what a pass costs depends on what all of them do: a session
that alone decodes plainly waits for the others' candidates all the same. Pass times are therefore
fitted over the rows of the whole pass, and each k is rated as if every session chose it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

FORGETTING = 0.98  # weight of the past per round of every session: a memory of about 50 rounds
SLOPE_WEIGHT = 0.5  # of the assumed slope of a line, in observations one token apart
MAX_ROWS = 17  # of a sequence in a pass: no block has more than 16 candidates
CHAIN_WAIT = 1.5  # passes: who waits longer waits for a chain of them
SLOWDOWN_TOKENS = 32.0  # of every session, that outweigh the guess that chains are whole
LINE_WEIGHT = 2.0  # observations at one number of rows that outweigh the line through all
CARRIED_WEIGHT = 1.0  # of what another load showed, in observations


@dataclass(frozen=True, slots=True)
class RoundSample:
    """What one committed round took, in seconds. draft_s, target_s: the network included.

    num_tokens: tokens it brought. forward_s: of target_s, the target's passes (0: not known, all of
    it); one pass with candidates, one a token without. queue_s: of target_s, waiting for passes
    that others were in. batch_size, batch_rows: sequences and token rows of all of them in the
    largest pass (0 rows: as many for each as this one had).
    is_later_part: of plain decoding, tokens that came without being asked for. is_cut: the end of a
    command, perhaps of fewer tokens than the passes it waited for. was_ahead: the draft was not
    waited for.
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
    queue_s: float = 0.0
    is_later_part: bool = False
    is_cut: bool = False
    was_ahead: bool = False

    @property
    def duration_s(self) -> float:
        """The whole round."""
        return self.draft_s + self.target_s + self.manage_s

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
    def is_alone(self) -> bool:
        """Whether fewer than half of the sessions in its pass had candidates, judged by rows."""
        others = self.batch_size - 1
        candidates = self.rows - self.batch_size - self.num_draft_tokens
        return others > 0 and 2 * candidates < others * self.num_draft_tokens

    @property
    def is_clean(self) -> bool:
        """Whether its passes held one row of each sequence: nobody's candidates, no prompt."""
        return self.rows <= self.batch_size

    @property
    def other_s(self) -> float:
        """Besides passes: queue, network, decision, management. Once a command, and less for parts
        of an answer that follow by themselves.

        A round with candidates among plain decoding waits for the chains of passes of others. If
        all had candidates there were none, and it would meet a pass half done.
        """
        outside = self.target_s - self.forward_s if self.forward_s else 0.0
        if self.num_draft_tokens and self.queue_s > CHAIN_WAIT * self.pass_s:
            outside -= self.queue_s - 0.5 * self.pass_s
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

    def carried(self, growth: float = 1.0) -> Line:
        """A line to begin another load with: this one times `growth`, soon outweighed."""
        line = Line(self.relative_slope)
        if self.weight:
            share = min(1.0, CARRIED_WEIGHT / self.weight)
            line.weight, line.x, line.xx = self.weight * share, self.x * share, self.xx * share
            line.y, line.xy = growth * self.y * share, growth * self.xy * share
            line._mean_x, line._mean_y = self._mean_x, growth * self._mean_y
            line._slope = growth * self._slope
        return line


@dataclass(slots=True)
class PassTimes:
    """Time of a pass over its rows: a line, corrected where it was measured.

    Passes are flat until arithmetic binds them, then rise. What was measured at a number of rows
    stays known while others are run. step: rows between two measured places. nearby: passes at
    another load, which give the shape until two places were measured here.
    """

    step: int = 1
    nearby: PassTimes | None = None
    # A verify pass grows little per row.
    line: Line = field(default_factory=lambda: Line(relative_slope=0.05))
    # By place, rows / step: weight and weighted sum of decaying observations.
    cells: dict[int, tuple[float, float]] = field(default_factory=dict)
    _measured_cells: list[int] = field(default_factory=list)  # ascending

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
                if (weight < 1.0) != (self.cells[cell][0] < 1.0):
                    self._measured_cells = sorted(
                        cell for cell, (weight, _) in self.cells.items() if weight >= 1.0
                    )

    def at(self, rows: float) -> float:
        """The estimate for `rows` rows. 0 before any observation."""
        place = rows / self.step
        measured = self._measured_cells
        if len(measured) < 2:
            return self._like_nearby(rows) if self.nearby is not None else self.line.at(place)
        # Between two measured places, or in line with the nearest two.
        above = min(max(1, bisect_left(measured, place)), len(measured) - 1)
        low, high = measured[above - 1], measured[above]
        at_low, at_high = self._measured(low), self._measured(high)
        slope = max(0.0, (at_high - at_low) / (high - low))
        return max(0.1 * at_low, at_low + slope * (place - low))

    def _like_nearby(self, rows: float) -> float:
        """The other load's estimate, scaled by what was measured here."""
        assert self.nearby is not None
        there, line = self.nearby.at(rows), self.line
        if not line.weight:
            return there
        place = line.x / line.weight
        like = self.nearby.at(place * self.step)
        return there * line.at(place) / like if like > 0.0 else line.at(rows / self.step)

    def _measured(self, cell: int) -> float:
        weight, total = self.cells[cell]
        return (total + LINE_WEIGHT * self.line.at(cell)) / (weight + LINE_WEIGHT)


@dataclass(slots=True)
class Costs:
    """Times at numbers of sessions that share a table, in seconds.

    passes: of the target, over rows of all sequences. share: of the sessions, how many are in a
    verifying pass. draft: of a proposal that a round waits for; waited: share of rounds that do,
    others begin with candidates drafted ahead. other: of a round with candidates, what it takes
    besides; plain_other: of a command of plain decoding; part_other: of a token that comes while
    such a command goes on; among: of a whole token of plain decoding in passes with others'
    candidates.
    num_drafted, num_plain: choices measured, with candidates and without. is_carried: these costs
    began with those of another load.
    """

    # A draft's time is about proportional to its tokens.
    draft: Line = field(default_factory=lambda: Line(relative_slope=0.3))
    passes: PassTimes = field(default_factory=PassTimes)
    other: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    plain_other: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    part_other: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    among: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    share: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    waited: Line = field(default_factory=lambda: Line(relative_slope=0.0))
    num_chain_tokens: float = 0.0
    num_steady_tokens: float = 0.0
    num_drafted: int = 0
    num_plain: int = 0
    is_carried: bool = False

    def carry(self, there: Costs, growth: float) -> None:
        """Take over from another load what this one has not shown yet. growth: of `other`."""
        self.draft, self.other = there.draft.carried(), there.other.carried(growth)
        self.waited = there.waited.carried()
        self.passes.nearby = there.passes
        self.is_carried = True
        if not self.plain_other.weight:
            self.plain_other = there.plain_other.carried(growth)
        if not self.part_other.weight:
            self.part_other = there.part_other.carried()

    def add(self, sample: RoundSample, num_sessions: float, keep: float) -> None:
        """Observe a round. keep: weight of all earlier ones from now on."""
        k = sample.num_draft_tokens
        if k == 0:
            self.num_plain += not sample.is_later_part
            if sample.is_cut:
                return
            if sample.is_clean:
                self._add_plain(sample, keep)
            elif sample.rows <= MAX_ROWS * num_sessions:
                self.among.add(0.0, sample.duration_s / max(1, sample.num_tokens), keep)
            return
        self.num_drafted += 1
        if sample.rows <= MAX_ROWS * num_sessions:  # else prompts were computed in the same pass
            self.passes.add(self._rows_of_all(sample), sample.pass_s, keep)
        self.waited.add(0.0, 0.0 if sample.was_ahead else 1.0, keep)
        if not sample.was_ahead:
            self.draft.add(k, sample.draft_s, keep)
        self.other.add(0.0, sample.other_s, keep)
        self.share.add(0.0, min(1.0, sample.batch_size / num_sessions), keep)

    def _add_plain(self, sample: RoundSample, keep: float) -> None:
        """What shared its passes with candidates or prompts says nothing of plain decoding."""
        self.passes.add(sample.rows, sample.pass_s, keep)
        if sample.is_later_part:
            self.part_other.add(0.0, sample.other_s / max(1, sample.num_tokens), keep)
        else:
            self.plain_other.add(0.0, sample.other_s, keep)

    def _rows_of_all(self, sample: RoundSample) -> int:
        """Rows of a pass with candidates. Where one session alone had some, as many as if all had:
        programs are made for the most rows of a sequence, and all sequences pay for them."""
        if sample.is_alone:
            return sample.batch_size * (sample.num_draft_tokens + 1)
        return sample.rows

    def plain_s(self, plain_steps: int, num_sessions: float) -> float:
        """Estimated time of a token while no session drafts."""
        doubt = SLOWDOWN_TOKENS * num_sessions
        slowdown = (self.num_chain_tokens + doubt) / (self.num_steady_tokens + doubt)
        return slowdown * self.chain_s(plain_steps, num_sessions)

    def chain_s(self, plain_steps: int, num_sessions: float) -> float:
        """The same where every chain of passes is whole."""
        other = self.plain_other if self.plain_other.weight else self.other
        per_token = other.at(0.0) / plain_steps + self.part_other.at(0.0)
        return self.passes.at(num_sessions) + per_token

    def add_steady(
        self, sample: RoundSample, plain_steps: int, num_sessions: float, keep: float
    ) -> None:
        """Observe plain decoding as it is while none draft: prompts, beginnings and ends cut its
        chains short, which rounds with candidates suffer less from."""
        chain_s = self.chain_s(plain_steps, num_sessions)
        if chain_s > 0.0:
            self.num_chain_tokens = keep * self.num_chain_tokens + sample.duration_s / chain_s
            self.num_steady_tokens = keep * self.num_steady_tokens + sample.num_tokens

    def among_s(self, k: int, num_sessions: float) -> float:
        """Estimated time of a token of plain decoding while others have k candidates each."""
        if self.among.weight:
            return self.among.at(0.0)
        return self.passes.at(num_sessions * (k + 1)) + self.plain_other.at(0.0)

    def round_s(self, k: int, num_sessions: float) -> float:
        """Estimated time of a round with k >= 1 candidates while every session drafts as many."""
        sequences = num_sessions * (self.share.at(0.0) or 1.0)
        waited = self.waited.at(0.0) if self.waited.weight else 1.0
        return waited * self.draft.at(k) + self.passes.at(sequences * (k + 1)) + self.other.at(0.0)


class CostTables:
    """Costs by load: one table per power of two of sessions; costs at another load say little.

    A table without rounds with candidates goes by the nearest that has some until it has its own.
    """

    def __init__(self) -> None:
        self._tables: dict[int, Costs] = {}

    def at(self, num_sessions: float) -> Costs:
        """The table of this load."""
        bucket = bucket_of(num_sessions)
        costs = self._tables.get(bucket)
        if costs is None:
            # Half of the sessions lie between two measured numbers of rows.
            costs = self._tables[bucket] = Costs(passes=PassTimes(max(1, (1 << bucket) // 2)))
        if not (costs.is_carried or costs.num_drafted):
            self._carry(bucket, costs)
        return costs

    def _carry(self, bucket: int, costs: Costs) -> None:
        known = [each for each, other in self._tables.items() if other.num_drafted]
        if known:
            nearest = min(known, key=lambda each: (abs(each - bucket), each))
            # What rounds wait for is shared in part: it grows, but less than the sessions do.
            costs.carry(self._tables[nearest], math.sqrt(2.0 ** (bucket - nearest)))


def bucket_of(num_sessions: float) -> int:
    """Which table: that of the nearest power of two, 0 for one session."""
    return round(math.log2(max(1.0, num_sessions)))
