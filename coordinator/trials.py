"""When to measure what is not chosen: trials paid from a share of the time of all sessions.

Owns the budget. A trial is the replica's: one session makes it and all learn from it. All pay as
well, because a round with candidates ends the chains of passes that plain decoding runs in; so
what it costs is measured on every round that it touches, and the next one waits until the time
since is worth that much. Pure: time is the sum of rounds observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

BUDGET = 0.01  # of the time may go into trials of candidates while none pay,
STEADY_BUDGET = 0.004  # and into each other sort of trial while some do
MAX_PATIENCE = 8.0  # most that waits grow by, while trials only confirm what was known
WIDE = 0.8  # goodput of the other way, over that of the chosen one, that is clearly worse
LAPSE_ROUNDS = 32.0  # of every session, after which a trial that nobody ends is given up
FELT_ROUNDS = 2.0  # of every session, for which a trial is felt after its end


class Trial(Enum):
    """What is measured beside the steady choice."""

    DRAFT = "draft"  # candidates while k = 0 is best
    PLAIN = "plain"  # k = 0 while candidates are best
    LONGER = "longer"  # one candidate more than the best


_BUDGETS = {Trial.DRAFT: BUDGET, Trial.PLAIN: STEADY_BUDGET, Trial.LONGER: STEADY_BUDGET}


@dataclass(slots=True, eq=False)
class Attempt:
    """One trial. holder: the session that makes it; None: all do.

    num_draft_tokens: of its rounds. rounds_left: to be measured. age: rounds of every session.
    """

    trial: Trial
    holder: object
    num_draft_tokens: int
    rounds_left: int = 1
    age: float = 0.0

    def is_of(self, session: object) -> bool:
        """Whether a session takes part."""
        return self.holder is None or self.holder is session


@dataclass(slots=True)
class Account:
    """Trials of one sort. Times in seconds that every session spent at this load.

    since_s, num_rounds: passed since the last one; since_s is None before the first. spent_s: what
    the last one cost. patience: factor on the wait.
    """

    since_s: float | None = None
    num_rounds: float = 0.0
    spent_s: float = 0.0
    patience: float = 1.0


@dataclass(slots=True)
class Trials:
    """Trials at one load, one at a time. last: the one before."""

    accounts: dict[Trial, Account] = field(default_factory=lambda: {t: Account() for t in Trial})
    open: Attempt | None = None
    last: Attempt | None = None

    def passed(self, duration_s: float, num_sessions: float) -> None:
        """A round of one of the sessions took so long."""
        rounds, share_s = 1.0 / num_sessions, duration_s / num_sessions
        for account in self.accounts.values():
            account.num_rounds += rounds
            if account.since_s is not None:
                account.since_s += share_s
        if self.open is not None:
            self.open.age += rounds
            if self.open.age > LAPSE_ROUNDS:  # its session ended, or cannot draft
                self._end()

    def is_due(
        self,
        trial: Trial,
        expected_s: float = 0.0,
        patience: float | None = None,
        num_rounds: float = 0.0,
    ) -> bool:
        """Whether to begin one. expected_s: what it costs at least, in seconds of every session.

        patience: factor on the wait; None: the account's. num_rounds: of every session, that must
        lie between two. A trial of the time before candidates began or ceased to pay is given up.
        """
        account = self.accounts[trial]
        if self.open is not None and (self.open.trial is Trial.DRAFT) == (trial is Trial.DRAFT):
            return False
        if account.num_rounds < num_rounds:
            return False
        if account.since_s is None:
            return True
        factor = account.patience if patience is None else patience
        cost_s = max(account.spent_s, expected_s)
        return account.since_s * _BUDGETS[trial] >= factor * cost_s

    def begin(self, attempt: Attempt) -> None:
        """Open a trial; others wait until it is closed."""
        self.open = attempt
        self.accounts[attempt.trial].spent_s = 0.0

    def attempt(self, trial: Trial, session: object) -> Attempt | None:
        """The trial of this sort that a round of `session` belongs to. The next round is chosen
        before the one that ends a trial is measured, so one more round may belong to it."""
        if self.open is not None:
            found = self.open
        elif self.last is not None and self.is_felt(trial):
            found = self.last
        else:
            return None
        return found if found.trial is trial and found.is_of(session) else None

    def is_felt(self, trial: Trial) -> bool:
        """Whether one is open, or over so lately that rounds were in its passes."""
        if self.open is not None:
            return self.open.trial is trial
        return self.accounts[trial].num_rounds < FELT_ROUNDS

    def charge(self, trial: Trial, cost_s: float) -> None:
        """Rounds took longer for it, in seconds of every session."""
        self.accounts[trial].spent_s += max(0.0, cost_s)

    def measured(self, trial: Trial, ratio: float | None = None) -> None:
        """What the trial is for was measured, in one or by the way: waits begin anew.

        ratio: goodput of that way over the chosen one's; where it is clearly worse, again, waits
        grow.
        """
        account = self.accounts[trial]
        account.since_s, account.num_rounds = 0.0, 0.0
        if ratio is not None:
            is_worse = ratio < WIDE
            account.patience = min(MAX_PATIENCE, 2.0 * account.patience) if is_worse else 1.0
        if self.open is not None and self.open.trial is trial:
            self.open.rounds_left -= 1
            if self.open.rounds_left <= 0:
                self._end()

    def _end(self) -> None:
        self.last, self.open = self.open, None


@dataclass(slots=True)
class Load:
    """What was chosen at a load. kept: the steady k there; None before the first.

    num_rounds: of every session, since they draft. reluctance: factor on the margin to begin.
    """

    trials: Trials = field(default_factory=Trials)
    kept: int | None = None
    num_rounds: float = 0.0
    reluctance: float = 1.0
