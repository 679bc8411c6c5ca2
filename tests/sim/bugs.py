"""Bugs that serving engines have shipped, each as a change of production code.

`plant` puts one in for the time of a test. setup: the run in which its kind of fault happens often
enough to show it. What finds it is never told which bug it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator import verdicts
from coordinator.commands import Ahead, Verdict
from coordinator.drafting import Drafting
from coordinator.foresight import Foresight
from coordinator.links import ReplicaLink
from coordinator.protocol import Session as Protocol
from coordinator.stops import Output, Shown
from coordinator.tally import Round
from coordinator.target_side import TargetSide, prefix_of
from kernels import reference
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.commands import CommandDesk
from specmesh.engine.pages import PageTables
from specmesh.engine.scheduler import Scheduler
from specmesh.engine.sessions import Session
from specmesh.ledger import Ledger
from specmesh.resume import Resumption
from specmesh.shaping import ShapedRows, TokenShaper
from tests.sim.model import TinyCache
from tests.sim.options import Faults, Setup

MonkeyPatch = pytest.MonkeyPatch


def rejected_kv_kept(patch: MonkeyPatch) -> None:
    """The K/V of the first rejected candidate counts as that of the token drawn in its place."""

    def settle(self: Ledger, num_accepted: int) -> None:
        kept = min(self._written_len, self.confirmed_len + num_accepted + 1)
        self.kv_len = self._written_len = max(self.kv_len, kept)
        self.num_pending = 0
        self._preempted = False

    patch.setattr(Ledger, "settle", settle)


def boundary_after_full_acceptance(patch: MonkeyPatch) -> None:
    """After all k are accepted the draft believes that it fed the last of them."""
    right = Ledger.settle

    def settle(self: Ledger, num_accepted: int) -> None:
        all_accepted = 0 < num_accepted == self.num_pending
        right(self, num_accepted)
        if all_accepted and self.kv_len + 1 < self.allocated_len:
            self.kv_len += 1
            self._written_len = self.kv_len

    patch.setattr(Ledger, "settle", settle)


def late_replies_taken(patch: MonkeyPatch) -> None:
    """Epoch and round of a reply are not looked at: any reply answers the command that is out."""
    patch.setattr(Protocol, "_is_late_reply", lambda self, event: self.target.in_flight is None)


def late_proposals_taken(patch: MonkeyPatch) -> None:
    """Epoch and round of a proposal are not looked at."""
    right = Drafting._is_late

    def is_late(self: Drafting, event: Any) -> bool:
        if type(event).__name__ == "DraftReply":
            return self.in_flight is None
        return right(self, event)

    patch.setattr(Drafting, "_is_late", is_late)


def reply_applied_twice(patch: MonkeyPatch) -> None:
    """The second copy of a verdict is committed again."""
    right = Protocol._stray_reply

    def stray_reply(self: Protocol, event: Any) -> None:
        body = event.body
        if isinstance(body, Verdict) and body.outcome and event.round == self.target.round:
            current, stage = self._round, self.stage
            self._round = Round(self.ledger.confirmed_len)
            self._start_round = lambda: None  # type: ignore[method-assign]
            self._commit(body.outcome)
            del self._start_round
            self._round, self.stage = current, stage
        else:
            right(self, event)

    patch.setattr(Protocol, "_stray_reply", stray_reply)


def part_applied_twice(patch: MonkeyPatch) -> None:
    """Where a part begins is not looked at when it comes again."""
    right = verdicts.news_of

    def news_of(verdict: Verdict, taken: Sequence[int]) -> Verdict | None:
        return verdict if verdict.offset < len(taken) else right(verdict, taken)

    patch.setattr("coordinator.protocol.news_of", news_of)


def lost_part_passed_over(patch: MonkeyPatch) -> None:
    """A part after one that was lost is taken all the same."""
    right = verdicts.news_of

    def news_of(verdict: Verdict, taken: Sequence[int]) -> Verdict | None:
        return right(replace(verdict, offset=min(verdict.offset, len(taken))), taken)

    patch.setattr("coordinator.protocol.news_of", news_of)


def delivered_parts_asked_for_again(patch: MonkeyPatch) -> None:
    """After a failover the command goes out as it did at first, and its parts count once more."""
    begun: dict[int, int] = {}  # by epoch: where the command that is sent again began
    leave, verify, taken = TargetSide.leave, TargetSide.verify, TargetSide.taken

    def leave_with_it(self: TargetSide) -> None:
        if self.in_flight is not None and self.in_flight.num_steps > 1:
            begun[self.epoch + 1] = self.in_flight.prefix.base_len
        leave(self)

    def verify_again(self: TargetSide, ledger: Ledger, *fields: Any, **options: Any) -> Any:
        commands = verify(self, ledger, *fields, **options)
        base_len = begun.pop(self.epoch, ledger.confirmed_len)
        if self.in_flight is None or base_len == ledger.confirmed_len:
            return commands
        prefix = prefix_of(ledger, 0, 0, base_len=base_len)
        self.in_flight = replace(self.in_flight, prefix=prefix)
        return (*commands[:-1], self.in_flight)

    def nothing_taken(self: TargetSide, ledger: Ledger) -> tuple[int, ...]:
        found = taken(self, ledger)
        assert self.in_flight is not None
        return found if self.in_flight.epoch == 0 else ()

    patch.setattr(TargetSide, "leave", leave_with_it)
    patch.setattr(TargetSide, "verify", verify_again)
    patch.setattr(TargetSide, "taken", nothing_taken)


def bonus_after_stop(patch: MonkeyPatch) -> None:
    """Judging goes on past an accepted stop token, and stop rules look at the last token only."""
    decide, decide_coupled, push = reference.decide, reference.decide_coupled, Output.push
    patch.setattr(reference, "decide", lambda p, q, c, s: decide(p, q, c))
    patch.setattr(reference, "decide_coupled", lambda p, c, s: decide_coupled(p, c))

    def push_round(self: Output, tokens: Sequence[int]) -> Shown:
        rules, shown = self._rules, []
        for token in tokens[:-1]:
            self._rules = type(rules)(1 << 30)
            shown.append(push(self, [token]).text)
        self._rules = rules
        last = push(self, tokens[-1:])
        return Shown(len(tokens), "".join(shown) + last.text, last.ending)

    patch.setattr(Output, "push", push_round)


def penalties_count_rejected(patch: MonkeyPatch) -> None:
    """Candidates that were judged and rejected stay in the counts of the penalties."""
    counted: dict[TokenShaper, Counter[int]] = {}
    rows, count = TokenShaper.rows, TokenShaper._count

    def counting(
        self: TokenShaper, logits: Any, prefix: Sequence[int], candidates: Sequence[int]
    ) -> ShapedRows:
        found = rows(self, logits, prefix, candidates)
        counted.setdefault(self, Counter()).update(candidates)
        return found

    patch.setattr(TokenShaper, "rows", counting)
    patch.setattr(
        TokenShaper,
        "_count",
        lambda self, prefix: count(self, prefix) + counted.get(self, Counter()),
    )


def shared_page_rewritten(patch: MonkeyPatch) -> None:
    """Truncation into a published page writes into that very page."""
    patch.setattr(PageTables, "_immutable", lambda self, session, length: [])


def copy_forgotten(patch: MonkeyPatch) -> None:
    """A page that takes the place of a shared one starts out empty."""
    patch.setattr(TinyCache, "copy_pages", lambda self, pairs: None)


def preempted_segment_runs(patch: MonkeyPatch) -> None:
    """A session that lost its pages in this very pass is computed all the same."""
    right = Scheduler._preempt

    def preempt(self: Scheduler, victim: Session, step: Any) -> None:
        segments = list(step.segments)
        tables = {id(each): list(each.task.session.block_table) for each in segments}
        right(self, victim, step)
        for segment in segments:
            if segment not in step.segments:
                segment.task.session.block_table = tables[id(segment)]
        step.segments = segments

    patch.setattr(Scheduler, "_preempt", preempt)


def pages_of_closed_sessions_kept(patch: MonkeyPatch) -> None:
    """A session that is closed while its command works keeps its pages."""
    right = CommandDesk.end

    def end(self: CommandDesk, session: Session) -> None:
        if session.task is not None:
            session.block_table = []
        right(self, session)

    patch.setattr(CommandDesk, "end", end)


def resume_from_nothing(patch: MonkeyPatch) -> None:
    """The client asks again without saying what it holds."""
    right = Resumption.next_request

    def next_request(self: Resumption) -> Any:
        request = right(self)
        request.ClearField("resume_token_ids")
        request.resume_round = 0
        return request

    patch.setattr(Resumption, "next_request", next_request)


def no_deadline_for_drafts(patch: MonkeyPatch) -> None:
    """A round waits for its candidates however long that takes."""
    patch.setattr(Drafting, "_start_timer", lambda self, timer: None)


def forks_drafted_without_copies(patch: MonkeyPatch) -> None:
    """What is drafted ahead is written into the session's own pages."""
    patch.setattr(PageTables, "_immutable", lambda self, session, length: [])


def outcome_told_of_other_candidates(patch: MonkeyPatch) -> None:
    """A draft whose own answer differs from what it had drafted ahead is told that as many of it
    were kept."""
    keep = Foresight.keep

    def reordered(self: Foresight, drafted: Sequence[int], num_asked: int, ahead: Ahead) -> None:
        keep(self, drafted, num_asked, ahead)
        for path, each in self._by_path.items():  # what other rounding might have drawn
            self._by_path[path] = replace(each, tokens=each.tokens[::-1], rows=each.rows[::-1])

    def answered(self: Foresight, tokens: Sequence[int]) -> int:
        right(self, self._taken or tokens)
        return self._num_accepted

    right = Foresight.answered
    patch.setattr(Foresight, "keep", reordered)
    patch.setattr(Foresight, "answered", answered)


def cached_prefix_not_compared(patch: MonkeyPatch) -> None:
    """Pages of another prompt of the same length are taken for this one's."""

    def lookup(self: BlockPool, tokens: Sequence[int]) -> list[int]:
        pages: list[int] = []
        serial = 0
        for _ in range(len(tokens) // self.page_size):
            entry = next((e for e in self._by_page.values() if e.parent_serial == serial), None)
            if entry is None:
                break
            self.retain(entry.page)
            pages.append(entry.page)
            serial = entry.serial
        return pages

    patch.setattr(BlockPool, "lookup", lookup)


def reset_link_stays_down(patch: MonkeyPatch) -> None:
    """Streams that this side cancelled end the link's task with them."""
    right = ReplicaLink._exchange

    async def exchange(self: ReplicaLink) -> None:
        streams = list(self._streams)
        await right(self)
        if any(stream._call._cancelled for stream in streams):
            raise asyncio.CancelledError

    patch.setattr(ReplicaLink, "_exchange", exchange)


@dataclass(frozen=True)
class Bug:
    """A planted bug and the run that shows it."""

    plant: Callable[[MonkeyPatch], None]
    changes: dict[str, Any] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)

    @property
    def name(self) -> str:
        """What tests call it."""
        return self.plant.__name__

    def setup(self, seed: int) -> Setup:
        """The run of a seed."""
        fields: dict[str, Any] = {
            "seed": seed,
            "num_draft_tokens": 3,
            "num_coordinators": 1,
            "max_tokens": 14,
            **self.changes,
        }
        return Setup(faults=self.faults, **fields)


_TIGHT = {"num_requests": 4, "page_size": 2, "target_pages": 14, "draft_pages": 14}
_AHEAD = {"num_ahead": 16, "rules": ("residual",), "own_weight": 0.2}
_PLAIN = {"num_draft_tokens": 0, "plain_steps": 16, "chain_lens": (1, 2, 3)}
BUGS = (
    Bug(rejected_kv_kept),
    Bug(boundary_after_full_acceptance, {"own_weight": 0.0}),
    Bug(late_replies_taken, faults=Faults(duplicate=0.3)),
    Bug(late_proposals_taken, faults=Faults(duplicate=0.3)),
    Bug(reply_applied_twice, faults=Faults(duplicate=0.3)),
    Bug(part_applied_twice, _PLAIN, Faults(duplicate=0.3)),
    Bug(lost_part_passed_over, _PLAIN, Faults(drop=0.1)),
    Bug(delivered_parts_asked_for_again, _PLAIN, Faults(target_crashes=3, window_s=0.1)),
    Bug(bonus_after_stop, {"own_weight": 0.0, "vocab_size": 3}),
    Bug(penalties_count_rejected, {"own_weight": 0.5}),
    Bug(shared_page_rewritten, {"page_size": 3}, Faults(garble=4, window_s=0.2)),
    Bug(copy_forgotten, {"page_size": 3}, Faults(garble=4, window_s=0.2)),
    Bug(preempted_segment_runs, _TIGHT),
    Bug(pages_of_closed_sessions_kept, faults=Faults(cancel=0.8, window_s=0.1)),
    Bug(
        resume_from_nothing,
        {"num_coordinators": 2},
        Faults(coordinator_crashes=3, window_s=0.2),
    ),
    Bug(no_deadline_for_drafts, faults=Faults(drop=0.1)),
    Bug(forks_drafted_without_copies, _AHEAD),
    Bug(outcome_told_of_other_candidates, _AHEAD),
    Bug(cached_prefix_not_compared, {"num_requests": 3}),
    Bug(reset_link_stays_down, faults=Faults(resets=6, window_s=0.2)),
)
