"""The round in progress and the counts of a sample: what a commit adds up and records. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.commands import Outcome, Rows
from coordinator.messages import RoundDone, Stats


@dataclass(slots=True)
class Round:
    """One round from its beginning to its commit.

    num_draft_tokens: candidates asked for. fallback: why there are none; empty when there are some.
    num_steps: tokens still to come of its command; offset: of those that rounds before it brought.
    """

    base_len: int
    is_prefill: bool = False
    num_draft_tokens: int = 0
    candidates: tuple[int, ...] = ()
    rows: Rows = ()
    dropped_mass: tuple[float, ...] = ()
    fallback: str = ""
    num_steps: int = 1
    offset: int = 0
    audit: bool = False
    num_retries: int = 0
    draft_epoch: int = 0
    draft_replica: str = ""
    draft_report: object = None
    was_ahead: bool = False
    target_epoch: int = 0
    target_replica: str = ""
    target_report: object = None

    def rest(self, num_tokens: int) -> Round:
        """The round that follows when num_tokens were a part of the answer: its command goes on."""
        return Round(
            self.base_len + num_tokens,
            fallback=self.fallback,
            num_steps=self.num_steps - num_tokens,
            offset=self.offset + num_tokens,
            target_epoch=self.target_epoch,
            target_replica=self.target_replica,
        )

    def drop_candidates(self, fallback: str) -> None:
        """Go on without the draft."""
        self.num_draft_tokens = 0
        self.candidates = self.rows = self.dropped_mass = ()
        self.was_ahead = False
        self.fallback = fallback

    def cut_candidates(self, most: int, fallback: str) -> None:
        """Leave the candidates beyond the first `most` unjudged; fallback: why, if none is left."""
        if most == 0 and self.candidates:
            self.drop_candidates(fallback)
        self.num_draft_tokens = min(self.num_draft_tokens, most)
        self.candidates, self.rows = self.candidates[:most], self.rows[:most]
        self.dropped_mass = self.dropped_mass[:most]

    def num_judged(self, outcome: Outcome) -> int:
        """Candidates judged: the accepted ones and the first rejected; none after a bad re-draw."""
        if outcome.redraw_mismatch is not None:
            return 0
        return min(len(self.candidates), len(outcome.tokens))

    def record(
        self, round_index: int, outcome: Outcome, num_committed: int, *, more: bool
    ) -> RoundDone:
        """The record of this round, num_committed of its tokens having reached the caller."""
        return RoundDone(
            round_index=round_index,
            target_epoch=self.target_epoch,
            draft_epoch=self.draft_epoch,
            base_len=self.base_len,
            num_draft_tokens=len(self.candidates),
            num_accepted=outcome.num_accepted,
            num_tokens=len(outcome.tokens),
            closing=outcome.closing,
            fallback=self.fallback,
            is_prefill=self.is_prefill,
            audited=self.audit,
            judged=outcome.judged,
            emitted=outcome.emitted,
            dropped_mass=self.dropped_mass,
            redraw_mismatch=outcome.redraw_mismatch,
            num_judged=self.num_judged(outcome),
            num_committed=num_committed,
            num_retries=self.num_retries,
            rows=self.rows,
            target_replica=self.target_replica,
            draft_replica=self.draft_replica,
            target_report=self.target_report,
            draft_report=self.draft_report,
            candidates=self.candidates,
            tokens=tuple(outcome.tokens),
            offset=self.offset,
            more=more,
            was_ahead=self.was_ahead,
        )


@dataclass(slots=True)
class Tally:
    """Counts of one sample. Rounds exclude the prompt's; positions are those within a block."""

    cached_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    judged: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)

    def count(self, current: Round, outcome: Outcome) -> None:
        """Add a committed round."""
        if current.is_prefill:
            return
        self.num_rounds += 1
        if not current.candidates:
            reason = current.fallback
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
            return
        self.num_draft_tokens += len(current.candidates)
        self.num_accepted += outcome.num_accepted
        grow = len(current.candidates) - len(self.judged)
        self.judged += [0] * grow
        self.accepted += [0] * grow
        for index in range(current.num_judged(outcome)):
            self.judged[index] += 1
            self.accepted[index] += index < outcome.num_accepted

    def stats(self, prompt_len: int, confirmed_len: int) -> Stats:
        """The counts so far, frozen. Resumed tokens are output."""
        return Stats(
            prompt_tokens=prompt_len,
            completion_tokens=max(0, confirmed_len - prompt_len),
            cached_tokens=min(self.cached_tokens, prompt_len),
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted=self.num_accepted,
            judged_per_position=tuple(self.judged),
            accepted_per_position=tuple(self.accepted),
            fallback_rounds=dict(self.fallbacks),
        )
