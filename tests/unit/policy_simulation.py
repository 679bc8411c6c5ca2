"""A stack of known costs for the policy to find its way in: times of GPU shapes, noise, sessions.

Times are in milliseconds, as measured and aimed at on one H200: an 8B-shaped target, a draft of 4
layers or of 1B's shape, one wire and one coordinator. Sessions run their rounds in turn and share
one policy; every round's time is the model's at the batch size, times noise.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.costs import RoundSample
from coordinator.policy import SessionPolicy, SharedPolicy
from specmesh.planning import expected_tokens

LIMIT = 8
PLAIN_STEPS = 4


@dataclass(frozen=True)
class World:
    """What rounds cost and which candidates are kept.

    rates: acceptance of each candidate given those before it; the last one serves all later ones.
    draft: per candidate, at batch 1. verify: of one row a sequence at batch 1; per_sequence: K/V
    and sampling of one more sequence; per_row: of one more row of a sequence; past `free_rows` rows
    the products are bound by arithmetic and each costs `bound_row` more.
    """

    rates: Sequence[float]
    draft: float = 0.15
    draft_per_sequence: float = 0.004
    verify: float = 4.38
    per_sequence: float = 0.028
    per_row: float = 0.0078
    free_rows: int = 184
    bound_row: float = 0.013
    wire: float = 0.3
    manage: float = 0.1

    def acceptance(self, k: int) -> list[float]:
        """Rates of a block of k."""
        return [self.rates[min(i, len(self.rates) - 1)] for i in range(k)]

    def target_ms(self, batch: int, rows: float) -> float:
        """One pass of the target over `rows` rows of each of `batch` sequences, on average."""
        bound = max(0.0, batch * rows - self.free_rows) * self.bound_row
        return self.verify + batch * (self.per_sequence + self.per_row * (rows - 1)) + bound

    def draft_ms(self, batch: int, k: int) -> float:
        """k steps of the draft for `batch` sequences."""
        return k * (self.draft + batch * self.draft_per_sequence)

    def round_ms(self, batch: int, k: int) -> float:
        """A whole round with k candidates; of PLAIN_STEPS tokens for k = 0."""
        if k == 0:
            return PLAIN_STEPS * self.target_ms(batch, 1) + self.wire + self.manage
        service = self.draft_ms(batch, k) + self.target_ms(batch, k + 1)
        return service + 2 * self.wire + self.manage

    def tokens(self, k: int) -> float:
        """E[N] of such a round."""
        return expected_tokens(self.acceptance(k)) if k else float(PLAIN_STEPS)

    def goodput(self, batch: int, k: int) -> float:
        """Tokens per millisecond of one session: what the planning model maximises."""
        return self.tokens(k) / self.round_ms(batch, k)

    def best(self, batch: int) -> int:
        """The k of the largest goodput."""
        return max(range(LIMIT + 1), key=lambda k: (self.goodput(batch, k), -k))


@dataclass(eq=False)
class Active:
    """A session's round in progress: passes it takes, passes left, time in them so far."""

    k: int = 0
    steps: int = 0
    steps_left: int = 0
    plain_steps: int = 1
    forward_ms: float = 0.0
    batch_rows: int = 0


@dataclass
class Run:
    """Sessions of one coordinator. chosen[i]: the k of every session in pass i."""

    world: World
    batch: int
    noise: float = 0.0
    seed: int = 0
    shared: SharedPolicy = field(default_factory=lambda: SharedPolicy(PLAIN_STEPS))
    chosen: list[list[int]] = field(default_factory=list)
    tokens: float = 0.0
    time_ms: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.sessions = [SessionPolicy(self.shared) for _ in range(self.batch)]
        self._active = [Active() for _ in range(self.batch)]
        self.restart()

    def passes(self, count: int) -> None:
        """The target runs `count` passes over all sessions.

        A session with candidates is through after one; plain decoding stays for its tokens. All
        choose before any of them is observed, and a pass costs what the rows of all of them cost.
        """
        world, batch = self.world, self.batch
        for _ in range(count):
            for active in self._active:
                if active.steps_left == 0:
                    self._start(active)
            self.chosen.append([active.k for active in self._active])
            rows = sum(1 + active.k for active in self._active)
            pass_ms = world.target_ms(batch, rows / batch)
            for active in self._active:
                active.forward_ms += pass_ms
                active.batch_rows = max(active.batch_rows, rows)
                active.steps_left -= 1
            for session, active in zip(self.sessions, self._active, strict=True):
                if active.steps_left == 0:
                    self.last_sample = self._finish(active)
                    session.observe(self.last_sample)

    def _start(self, active: Active) -> None:
        session = self.sessions[self._active.index(active)]
        active.k, active.forward_ms, active.batch_rows = session.choose(LIMIT), 0.0, 0
        active.steps = 1 if active.k else active.plain_steps
        active.steps_left = active.steps
        active.plain_steps = 1 if active.k else min(PLAIN_STEPS, 2 * active.plain_steps)

    def _finish(self, active: Active) -> RoundSample:
        world, k, steps = self.world, active.k, active.steps
        draft_ms = world.draft_ms(self.batch, k) + world.wire if k else 0.0
        self.time_ms += draft_ms + active.forward_ms + world.wire + world.manage
        # Expected, not drawn: luck is no merit of a choice.
        self.tokens += world.tokens(k) if k else steps
        accepted = 0
        for rate in world.acceptance(k):
            if self._rng.random() >= rate:
                break
            accepted += 1
        forward_s = self._noisy(active.forward_ms)
        return RoundSample(
            num_draft_tokens=k,
            num_tokens=accepted + 1 if k else steps,
            num_judged=min(k, accepted + 1),
            num_accepted=accepted,
            draft_s=self._noisy(draft_ms),
            target_s=forward_s + self._noisy(world.wire),
            manage_s=self._noisy(world.manage),
            batch_size=self.batch,
            batch_rows=active.batch_rows,
            forward_s=forward_s,
        )

    def _noisy(self, ms: float) -> float:
        return ms * 1e-3 * max(0.1, self._rng.gauss(1.0, self.noise))

    def replace_session(self, index: int) -> None:
        """A request ends and another takes its place."""
        self.sessions[index] = SessionPolicy(self.shared)
        self._active[index] = Active()

    def goodput_share(self) -> float:
        """Tokens over time since `restart`, over what every session at the best k would have."""
        best = self.world.goodput(self.batch, self.world.best(self.batch))
        return self.tokens / self.time_ms / best

    def restart(self) -> None:
        """Count tokens and time, and keep choices, from here on."""
        self.tokens = self.time_ms = 0.0
        self.chosen = []

    def changes(self) -> float:
        """How often a session's k differs from that of the pass before, since `restart`."""
        rounds = self.chosen
        moves = sum(
            a != b
            for before, after in itertools.pairwise(rounds)
            for a, b in zip(before, after, strict=True)
        )
        return moves / (self.batch * (len(rounds) - 1))
