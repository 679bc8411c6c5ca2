"""How many tokens to draft: tokens per second at the current load, k = 0 an ordinary value.

Owns the choice over rates (`coordinator/acceptance.py`) and costs (`coordinator/costs.py`) at the
present number of sessions (reference: THEORY.md section 7), and what trials measure
(`coordinator/trials.py` says when). Pure: times come in as numbers, nothing is drawn. It sees
judged positions, times and loads only, never the value of a token nor a candidate that was not
judged (DESIGN section 2, rule 7).

Rates, costs and trials are the replica's: what one session measures, all know. Where sessions share
passes, whether to draft is one choice for all of them, since a session that drafts alone ends the
chains of passes that the others decode in; how many, each chooses within it.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.acceptance import Acceptance, SharedAcceptance
from coordinator.costs import FORGETTING, MAX_ROWS, Costs, CostTables, RoundSample, bucket_of
from coordinator.trials import WIDE, Attempt, Load, Trial, Trials
from specmesh.planning import expected_tokens

SHARED_WEIGHT = 16.0  # how many own candidates outweigh what other requests showed
FIRST_TRIES = (4, 2, 4, 1)  # candidates of a replica's first rounds: several lengths give a slope
FIRST_PLAIN_ROUNDS = 2
RETRY_ROUNDS = 256  # rounds of every session at least, between two trials of k = 0
LONGER_ROUNDS = 32  # and between two of one candidate more than the best
RETRY_TOKENS = 2  # candidates of a trial at least, once rates are known: one tells little
BURST_ROUNDS = 4  # of a trial while rates are not known and nobody else pays for it
PROMISING = 1.1  # goodput, if all goes well, over plain decoding's, that is worth more trials
LEAST_PATIENCE = 0.25  # the same where others do: such a trial may cost 4 % of the time, not more
TRIAL_FORGETTING = 0.9  # weight of the past per trial: costs that few rounds show
FLOOR = 0.5  # of a trial's round counts as cost at least: luck does not make trials free
# Of what a trial costs its session where passes are shared, over what its rounds show: the draft's
# fill before it, and the wait for another chain of passes to come back into.
HIDDEN = 2.0
# A k is kept until another one promises this much more: estimates waver, and k with them.
MARGIN = 0.02
# To begin drafting where passes are shared takes more: chains end long before all draft. So much
# more where little is known; and twice the margin each time it was given up again.
BEGIN_MARGIN = 0.05
DOUBT = 0.2
MAX_RELUCTANCE = 8.0
STAY_ROUNDS = 16.0  # of every session, before drafting that looks no better is given up again
TOGETHER = 1.5  # sessions from which on they share passes
REFRESH = 4.0  # times in a round of every session that costs are looked at again
SESSIONS_MEMORY = 16  # rounds over which the number of sessions is averaged


class SharedPolicy:
    """What all requests of a coordinator replica have shown. Mutable, event-loop only."""

    def __init__(self, plain_steps: int = 4) -> None:
        """plain_steps: tokens of a command while nothing is drafted."""
        self.plain_steps = plain_steps
        self.acceptance = SharedAcceptance()
        self.num_rounds = 0
        self._tables = CostTables()
        self._loads: dict[int, Load] = {}
        self._num_sessions = 1.0
        self._batch_size = 1
        self._last_between = 1
        self._times_s: list[float] = []  # empty: to be worked out again
        self._times_of: Costs | None = None
        self._worked_out_at = 0
        self.limit = 1  # the most candidates that any session could have asked for

    @property
    def num_sessions(self) -> float:
        """Sessions that share the target: this replica's (rounds of all between two of one), and
        no fewer than the last pass held, other replicas' among them."""
        return max(self._num_sessions, float(self._batch_size))

    @property
    def is_shared(self) -> bool:
        """Whether sessions share passes."""
        return self.num_sessions >= TOGETHER

    @property
    def costs(self) -> Costs:
        """Times at the present number of sessions."""
        return self._tables.at(self.num_sessions)

    @property
    def load(self) -> Load:
        """Trials and choices at the present number of sessions."""
        bucket = bucket_of(self.num_sessions)
        load = self._loads.get(bucket)
        if load is None:
            load = self._loads[bucket] = Load()
        return load

    # ------------------------------------------------------------ what was measured

    def observe(
        self, sample: RoundSample, rounds_between: int | None, session: object = None
    ) -> bool:
        """Take a committed round in. rounds_between: of all sessions since this one's last.

        Returns whether it belonged to a trial of `session`.
        """
        self._count_sessions(sample, rounds_between)
        count, load, costs = self.num_sessions, self.load, self.costs
        load.trials.passed(sample.duration_s, count)
        keep = FORGETTING ** (1.0 / count)
        if not sample.num_draft_tokens:
            costs.add(sample, count, keep)
            if self.is_shared and not load.kept and not load.trials.is_felt(Trial.DRAFT):
                costs.add_steady(sample, self.plain_steps, count, keep)
            is_trial = self._observe_plain(sample, load, session)
        else:
            is_trial = self._observe_block(sample, load, session, keep)
        if is_trial or self.num_rounds >= self._worked_out_at + count / REFRESH:
            self._times_s = []
            self._worked_out_at = self.num_rounds
            if self.is_shared and self.first_try() is None:
                self._keep(load)
        return is_trial

    def _count_sessions(self, sample: RoundSample, rounds_between: int | None) -> None:
        self.num_rounds += 1
        self._batch_size = max(1, sample.batch_size)
        if rounds_between is None:
            return
        self._num_sessions += (rounds_between - self._num_sessions) / SESSIONS_MEMORY
        # Two short waits in a row: sessions have ended, and an average would notice late.
        short = max(rounds_between, self._last_between)
        if short < self._num_sessions / 2:
            self._num_sessions = float(short)
        self._last_between = rounds_between

    def _observe_block(self, sample: RoundSample, load: Load, session: object, keep: float) -> bool:
        """A round with candidates. keep: weight of all earlier ones from now on."""
        trials, count = load.trials, self.num_sessions
        is_trial = trials.attempt(Trial.DRAFT, session) is not None
        self.costs.add(sample, count, TRIAL_FORGETTING if is_trial else keep)
        if self.acceptance.observe(
            sample.num_judged, sample.num_accepted, 1.0 if is_trial else count, is_trial=is_trial
        ):
            for each in self._loads.values():
                each.reluctance = 1.0
        if is_trial:
            cost_s = max(FLOOR * sample.duration_s, self._lost_s(sample, 0))
            hidden = HIDDEN if self.is_shared else 1.0
            trials.charge(Trial.DRAFT, hidden * cost_s / count)
            trials.measured(Trial.DRAFT, self._ratio(sample.num_draft_tokens))
            return True
        longer = trials.attempt(Trial.LONGER, session)
        if longer is not None and longer.num_draft_tokens == sample.num_draft_tokens:
            trials.charge(Trial.LONGER, self._lost_s(sample, load.kept or 0))  # all passes are long
            trials.measured(Trial.LONGER)
            return True
        if trials.open is None or trials.open.trial is not Trial.DRAFT:
            trials.measured(Trial.DRAFT)
        return False

    def _observe_plain(self, sample: RoundSample, load: Load, session: object) -> bool:
        """Plain decoding, whether chosen, on trial, or in the passes of others' trials."""
        trials = load.trials
        if not load.kept:
            is_near = not sample.is_clean and sample.rows < sample.batch_size + MAX_ROWS
            if is_near and trials.is_felt(Trial.DRAFT):
                trials.charge(Trial.DRAFT, self._lost_s(sample, 0) / self.num_sessions)
            if sample.is_clean:
                trials.measured(Trial.PLAIN)
            return False
        is_trial = trials.attempt(Trial.PLAIN, session) is not None
        if is_trial:
            trials.charge(Trial.PLAIN, self._lost_s(sample, load.kept) / self.num_sessions)
        if sample.is_clean:
            ratio = 1.0 / max(self._ratio(load.kept), 1e-9) if is_trial else None
            trials.measured(Trial.PLAIN, ratio)
        return is_trial

    def _lost_s(self, sample: RoundSample, kept: int) -> float:
        """What a round took beyond its tokens' time at the steady choice."""
        goodput = self.goodputs(kept, self.rates(kept))[kept]
        return sample.duration_s - sample.num_tokens / goodput if goodput > 0.0 else 0.0

    def _keep(self, load: Load) -> None:
        """Make the steady choice of sessions that share passes."""
        was, load.kept = load.kept, self.steady(self.limit)
        load.num_rounds = load.num_rounds + 1.0 / REFRESH if was else 0.0
        if was and not load.kept:
            load.reluctance = min(MAX_RELUCTANCE, 2.0 * load.reluctance)

    # ------------------------------------------------------------ what follows from it

    def rates(self, count: int) -> list[float]:
        """Conditional acceptance of the first `count` candidates over all requests."""
        return self.acceptance.rates(count)

    def goodputs(self, limit: int, rates: Sequence[float]) -> list[float]:
        """Expected tokens per second with k = 0, 1, .. limit candidates, of one session.

        Summed tokens over summed time; 0 where nothing is known yet.
        """
        times_s = self._round_times_s(limit)
        found = [1 / times_s[0] if times_s[0] > 0 else 0.0]
        survival = tokens = 1.0
        for rate, round_s in zip(rates[:limit], times_s[1:], strict=False):
            survival *= rate
            tokens += survival
            found.append(tokens / round_s if round_s > 0 else 0.0)
        return found

    def _round_times_s(self, limit: int) -> list[float]:
        """Of a plain token, and of rounds with 1, 2, .. candidates, `limit` of them at least.

        Worked out REFRESH times in a round of every session: all of them ask.
        """
        times_s, costs = self._times_s, self.costs
        if len(times_s) <= limit or costs is not self._times_of:
            num_sessions = self.num_sessions
            self._times_of = costs
            plain_s = costs.plain_s(self.plain_steps, num_sessions)
            later = (costs.round_s(k, num_sessions) for k in range(1, limit + 1))
            times_s = self._times_s = [plain_s, *later]
        return times_s

    def _ratio(self, limit: int) -> float:
        """Goodput of the best k in [1, limit] over that of plain decoding."""
        found = self.goodputs(limit, self.rates(limit))
        return max(found[1:]) / found[0] if found[0] > 0.0 else 1.0

    def first_try(self) -> int | None:
        """What a replica that knows nothing does first; None once both ways are known."""
        costs = self.costs
        if costs.is_carried:
            return None
        # Of one session four rounds, of many one each.
        num_rounds = costs.num_drafted * len(FIRST_TRIES)
        tried = int(num_rounds / max(len(FIRST_TRIES), self.num_sessions))
        if tried < len(FIRST_TRIES):
            return FIRST_TRIES[tried]
        return 0 if costs.num_plain < FIRST_PLAIN_ROUNDS else None

    def steady(self, limit: int) -> int:
        """The best k in [0, limit] for all sessions, with hysteresis."""
        found = self.goodputs(limit, self.rates(limit))
        load, best = self.load, found.index(max(found))
        kept, margin = load.kept, MARGIN
        if kept is None or kept > limit:
            return best
        if kept == 0:
            margin = load.reluctance * BEGIN_MARGIN + DOUBT * (1.0 - self.acceptance.known(0))
        elif best == 0:
            is_known = self.acceptance.known(0) == 1.0
            found = self.goodputs(limit, self.acceptance.rates(limit, hopeful=is_known))
            if load.num_rounds < STAY_ROUNDS:
                margin = 1.0 / WIDE - 1.0
        return best if found[best] > (1.0 + margin) * found[kept] else kept

    def trial_of_drafting(self, session: object, limit: int) -> int:
        """Candidates of a trial of `session` while none pay; 0: none now."""
        trials = self.load.trials
        if trials.is_due(Trial.DRAFT, patience=0.0):  # else spare the arithmetic
            self._try_drafting(trials, session, limit)
        attempt = trials.open
        if attempt is None or attempt.trial is not Trial.DRAFT or attempt.holder is not session:
            return 0
        return min(limit, attempt.num_draft_tokens)

    def _try_drafting(self, trials: Trials, session: object, limit: int) -> None:
        known, count = self.acceptance.known(0), self.num_sessions
        found = self.goodputs(limit, self.rates(limit))
        hope = max(self.goodputs(limit, self.acceptance.rates(limit, hopeful=True))[1:])
        patience, num_rounds, least = None, 1, RETRY_TOKENS
        if known < 1.0 and hope > found[0]:
            patience = known**3 if hope > PROMISING * found[0] else known**2
            if self.is_shared:
                patience = max(LEAST_PATIENCE, patience)
            else:
                num_rounds, least = BURST_ROUNDS, 1
        k = min(limit, max(least, found.index(max(found[1:]))))
        cost_s = FLOOR * self.costs.round_s(k, count) / count
        if trials.is_due(Trial.DRAFT, cost_s, patience):
            trials.begin(Attempt(Trial.DRAFT, session, k, num_rounds))

    def plain_trial(self, session: object) -> Attempt | None:
        """The trial of plain decoding that `session` takes part in; of all at once, where they
        share passes: only then do chains form, and show what they cost."""
        trials, kept = self.load.trials, self.load.kept
        if kept and trials.is_due(Trial.PLAIN, num_rounds=RETRY_ROUNDS):
            trials.begin(Attempt(Trial.PLAIN, None if self.is_shared else session, 0))
        attempt = trials.open
        is_open = attempt is not None and attempt.trial is Trial.PLAIN and attempt.is_of(session)
        return attempt if is_open else None

    def is_longer_trial(self, session: object, num_draft_tokens: int, wait: float) -> bool:
        """Whether to try so many candidates, one more than the best. wait: factor on the rounds
        between."""
        trials = self.load.trials
        if trials.is_due(Trial.LONGER, patience=wait, num_rounds=wait * LONGER_ROUNDS):
            trials.begin(Attempt(Trial.LONGER, session, num_draft_tokens))
        attempt = trials.open
        return attempt is not None and attempt.trial is Trial.LONGER and attempt.holder is session


class SessionPolicy:
    """The choice for one sample: what others showed, outweighed by what it shows itself."""

    def __init__(self, shared: SharedPolicy) -> None:
        self._shared = shared
        self._own = Acceptance()
        self._seen_at: int | None = None
        self._kept: int | None = None
        self._is_asked = False  # a request with a k of its own never is
        self._has_drafted = False
        self._joined: Attempt | None = None

    def observe(self, sample: RoundSample) -> None:
        """Take a committed round of this sample in."""
        shared, k = self._shared, sample.num_draft_tokens
        between = None if self._seen_at is None else shared.num_rounds - self._seen_at
        is_trial = shared.observe(sample, between, self)
        self._seen_at = shared.num_rounds - 1
        self._own.add(sample.num_judged, sample.num_accepted)
        self._has_drafted = self._has_drafted or k > 0
        if not is_trial and not sample.is_later_part:  # a part is not chosen: its command goes on
            self._kept = k
            if self._is_asked and not shared.is_shared:
                shared.load.kept = k

    def rates(self, num_draft_tokens: int, *, hopeful: bool = False) -> list[float]:
        """Conditional acceptance of each candidate of a block. hopeful: if all goes well."""
        found = []
        known = self._shared.acceptance.rates(num_draft_tokens, hopeful=hopeful)
        for index, shared in enumerate(known):
            judged, accepted = self._own.at(index)
            found.append((accepted + SHARED_WEIGHT * shared) / (judged + SHARED_WEIGHT))
        return found

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """E[N] of a round with that many candidates."""
        return expected_tokens(self.rates(num_draft_tokens))

    def best(self, limit: int) -> int:
        """The k in [0, limit] of the largest goodput, the smallest on ties."""
        found = self._shared.goodputs(limit, self.rates(limit))
        return found.index(max(found))

    def choose(self, limit: int) -> int:
        """k in [0, limit] for the next round; now and then another one than the best, to learn.

        Depends on counts, times and judged positions. Asked twice it says the same, but for a trial
        of plain decoding, which it takes part in once.
        """
        shared, self._is_asked = self._shared, True
        shared.limit = max(shared.limit, limit)
        first = shared.first_try()
        if first is not None or limit == 0:
            return min(limit, first or 0)
        steady = self._steady(limit)
        if steady == 0:
            return shared.trial_of_drafting(self, limit)
        # The first command of a request that decodes plainly is a long one: no trial.
        if self._has_drafted and (attempt := shared.plain_trial(self)) is not self._joined:
            self._joined = attempt
            if attempt is not None:
                return 0
        if steady < limit and shared.is_longer_trial(self, steady + 1, self._wait(steady)):
            return steady + 1
        return steady

    def _wait(self, kept: int) -> float:
        """Share of the usual wait for a longer block: little while little is known of it and most
        blocks are kept whole, so that it is judged."""
        survival = self.expected_tokens(kept) - self.expected_tokens(kept - 1)
        return max(0.125, self._shared.acceptance.known(kept), 1.0 - survival)

    def _steady(self, limit: int) -> int:
        """The best k, or the one of the rounds before where it is as good but for a margin.

        Where passes are shared, 0 where all are better off so, and no more than all have: the
        longest block makes the pass.
        """
        shared, most = self._shared, limit
        found = []
        if shared.is_shared:
            kept = shared.load.kept
            most = shared.steady(limit) if kept is None else min(kept, limit)
            if most == 0:
                return 0
        found = shared.goodputs(most, self.rates(most))
        if shared.is_shared:
            found[0] = WIDE / shared.costs.among_s(most, shared.num_sessions)
        best = found.index(max(found))
        kept = shared.load.kept if self._kept is None else self._kept
        if kept is None or kept > most:
            return best
        # Of what is given up little will be learnt: not for bad luck.
        if best == 0 < kept and shared.acceptance.known(0) == 1.0:
            found[kept] = shared.goodputs(kept, self.rates(kept, hopeful=True))[kept]
        return best if found[best] > (1 + MARGIN) * found[kept] else kept
