"""The protocol of one session (one sample of a request), without IO: `step(event) -> actions`.

Owns the order of rounds: place a target, prefill, then draft / verify / (decide) / commit until the
output ends. Commit is the only place that moves shared state: confirmed prefix, stop rules, text,
usage (DESIGN section 2, rule 11). Knows no clock, socket, row content, torch or logging; the same
state and the same events give the same actions, so a simulator can own time and the network.

Every transition is a row of `coordinator/stages.py`. The draft's side is a machine of its own
(`coordinator/drafting.py`); the target's bookkeeping is `coordinator/target_side.py`;
`coordinator/driver.py` performs the actions. States, messages and the failure table are described
in `coordinator/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.commands import Close, Deferred, Failed, Opened, Outcome, Verdict
from coordinator.drafting import Drafting, Proposed, Signal, Unavailable
from coordinator.messages import (
    Action,
    Audit,
    Begin,
    Cancel,
    Decide,
    Decided,
    DecisionFailed,
    Deliver,
    DraftPlaced,
    DraftReply,
    Event,
    Fail,
    Finish,
    IllegalEvent,
    Lost,
    PeerViolation,
    PlaceTarget,
    Send,
    Side,
    StartTimer,
    Stats,
    StopTimer,
    TargetPlaced,
    TargetReply,
    TargetUnplaced,
    Timer,
    TimerFired,
)
from coordinator.session_plan import SessionPlan
from coordinator.stages import TRANSITIONS, Stage
from coordinator.stops import Ending, Output
from coordinator.tally import Round, Tally
from coordinator.target_side import TargetSide, last_equal
from coordinator.verdicts import check_outcome, check_verdict, news_of
from specmesh.ledger import Ledger

_REOPEN = frozenset(
    {"SESSION_NOT_FOUND", "SESSION_EXISTS", "STALE_ROUND", "ROUND_CONFLICT", "PREFIX_MISMATCH"}
)
_MOVE = frozenset({"NOT_READY", "TOO_BUSY", "INTERNAL"})
_BAD_CONTENT = frozenset({"INVALID_REQUEST", "CORRUPT_FRAME"})
MAX_TRIAL_ROUNDS = 3  # with candidates in a row, after which plain decoding goes on as before
CHAIN_STEPS = 8  # of a first plain command after more of them: a chain of passes of the target


class Session:
    """Mutable; one per sample. `step` is its only entry.

    choose(limit) -> k in [0, limit]: the policy, asked before anything of the round is drawn
    (DESIGN section 2, rule 7). output: the sample's stop rules and text.
    """

    def __init__(self, plan: SessionPlan, output: Output, choose: Callable[[int], int]) -> None:
        self.plan = plan
        self.stage = Stage.NEW
        self.ledger = Ledger(prompt_len=len(plan.prompt), max_len=plan.max_len)
        self.round_index = plan.resume_round
        self._output = output
        self._choose = choose
        self._actions: list[Action] = []
        self.target = TargetSide(max_num_draft_tokens=plan.max_num_draft_tokens)
        self.draft = Drafting(plan, self.ledger, self._actions)
        self._round: Round | None = None
        self._first_round = True  # no ordinary round was begun yet
        # Steps of the next plain command after rounds with candidates, or while a draft may come
        # back: more, the longer there were none.
        self._plain_steps = 1
        self._num_drafted = 0  # rounds in a row that asked for candidates
        self._tally = Tally()

    @property
    def is_prefilling(self) -> bool:
        """Whether the round in progress is the prompt's."""
        return self._round is not None and self._round.is_prefill

    def step(self, event: Event) -> tuple[Action, ...]:
        """Take one event and return what to do, in order.

        Raises IllegalEvent (the driver's bug) or PeerViolation (a reply no correct service gives),
        both with the state unchanged. Late replies of old epochs and rounds give no actions.
        """
        row = TRANSITIONS[self.stage].get(type(event))
        if row is None:
            raise IllegalEvent(f"session is {self.stage.value}: {type(event).__name__}")
        self._actions.clear()
        getattr(self, row.handler)(event)
        assert self.stage in row.next, (self.stage, event)
        return tuple(self._actions)

    # ------------------------------------------------------------ beginning, placement

    def _begin(self, _event: Begin) -> None:
        plan = self.plan
        self.ledger.extend(plan.prompt)
        self.ledger.extend(plan.resume)
        if plan.resume:
            shown = self._output.push(plan.resume)
            if shown.ending is not None and shown.num_kept < len(plan.resume):
                self._fail(
                    Failed(
                        "INVALID_REQUEST", "tokens follow the end of the output", "resume_token_ids"
                    )
                )
                return
            if shown.ending is not None:
                self._finish(shown.ending)
                return
        self.draft.begin()
        self.stage = Stage.PLACING
        self._actions.append(PlaceTarget(self.target.epoch, max_len=plan.max_len))

    def _target_placed(self, event: TargetPlaced) -> None:
        if not self._take_replica(event):
            return
        if self._round is not None:
            self._send_verify()
        elif self.plan.resume:
            self._start_round()
        else:
            self._round = Round(self.ledger.confirmed_len, is_prefill=True)
            self._send_verify()
            self._fill_beside_prefill(event.device_id)

    def _target_placed_aside(self, event: TargetPlaced) -> None:
        self._take_replica(event)

    def _take_replica(self, event: TargetPlaced) -> bool:
        if event.epoch < self.target.epoch:
            return False
        if event.epoch > self.target.epoch or self.target.replica is not None:
            raise IllegalEvent(f"no target was asked for: {event}")
        self.target.replica = event.replica
        self.target.device_id = event.device_id
        if event.max_num_draft_tokens is not None:
            self.target.max_num_draft_tokens = event.max_num_draft_tokens
        return True

    def _fill_beside_prefill(self, device_id: str) -> None:
        parallel = self.plan.parallel_prefill
        if parallel is None:
            parallel = self.draft.device_id != device_id
        if parallel and self._next_k()[0] > 0:
            self.draft.fill(awaited=True)

    def _target_unplaced(self, event: TargetUnplaced) -> None:
        if event.epoch < self.target.epoch:
            return
        if event.epoch > self.target.epoch or self.target.replica is not None:
            raise IllegalEvent(f"no target was asked for: {event}")
        self._fail(Failed("NOT_READY", event.message, retry_after_s=event.retry_after_s))

    # ------------------------------------------------------------ rounds

    def _next_k(self) -> tuple[int, str]:
        """Candidates to draft at the confirmed prefix; 0 comes with its reason."""
        room = self.plan.max_len - self.ledger.confirmed_len - 1
        if room <= 0:
            return 0, "budget"
        limit, blocked = self.draft.limit(first_round=self._first_round)
        if limit == 0:
            return 0, blocked
        limit = min(limit, room, self.target.max_num_draft_tokens)
        if self.plan.decide_here and self.plan.max_rows is not None:  # a row each, and the bonus's
            limit = min(limit, max(0, self.plan.max_rows - 1))
        fixed = self.plan.num_draft_tokens
        k = self._choose(limit) if fixed is None else min(fixed, limit)
        if k and blocked:
            return 0, blocked
        return k, "" if k else "policy"

    def _start_round(self) -> None:
        k, fallback = self._next_k()
        self._round = Round(self.ledger.confirmed_len, num_draft_tokens=k, fallback=fallback)
        if fallback == "draft_resync":
            self.draft.fill(awaited=False)
        self._first_round = False
        if k == 0:
            self.draft.pass_over()
            self._go_plain(fallback)
            return
        self._plain_steps = 1
        self._num_drafted += 1
        self.stage = Stage.DRAFTING
        foreseen = self.draft.foresee(k)
        if foreseen is None:
            self.draft.request(k)
        else:  # the target first: it is the slower side
            self._take_signal(foreseen)
            self.draft.follow(k)

    def _go_plain(self, fallback: str) -> None:
        """Let the target go on without candidates."""
        current = self._round
        assert current is not None
        current.drop_candidates(fallback)
        current.audit = self._is_audited()
        if self.plan.decide_here or current.audit:
            current.num_steps = 1
        else:
            room = self.plan.max_len - current.base_len
            current.num_steps = min(self._next_plain_steps(fallback), room)
        self._send_verify()

    def _next_plain_steps(self, fallback: str) -> int:
        """Steps of a plain command: all that may be where the request wants no candidates, or the
        policy none but for a trial; else more the longer there were none, so that the policy is
        asked again soon."""
        most, is_chosen = self.plan.plain_steps, fallback == "policy"
        was_trial = self._num_drafted <= MAX_TRIAL_ROUNDS
        self._num_drafted = 0
        if fallback == "request" or (is_chosen and was_trial and self._plain_steps == 1):
            return most
        steps = min(most, max(self._plain_steps, CHAIN_STEPS if is_chosen else 1))
        self._plain_steps = (CHAIN_STEPS if is_chosen else 2) * steps
        return steps

    def _is_audited(self) -> bool:
        """A fixed share of rounds, picked by the digest of the prefix: no draw is spent on it.

        None whose rows no message holds: what watches a round must not fail it.
        """
        plan, current = self.plan, self._round
        assert current is not None
        if plan.max_rows is not None and len(current.candidates) + 1 > plan.max_rows:
            return False
        share = (self.ledger.digest() & 0xFFFF) / 0x10000
        return not plan.decide_here and share < plan.audit_ratio

    def _draft_event(self, event: DraftPlaced | DraftReply | Lost | TimerFired) -> None:
        signal = self.draft.step(event)
        if isinstance(event, DraftPlaced) and self._next_k()[1] == "draft_resync":
            self.draft.fill(awaited=False)
        self._take_signal(signal)

    def _take_signal(self, signal: Signal) -> None:
        """Go on with the round that waited for the draft."""
        if isinstance(signal, Unavailable):
            self._go_plain(signal.reason)
        elif isinstance(signal, Proposed):
            current = self._round
            assert current is not None
            proposal = signal.proposal
            current.num_draft_tokens = len(proposal.tokens)
            current.candidates, current.rows = proposal.tokens, proposal.rows
            current.dropped_mass = proposal.dropped_mass
            current.draft_epoch, current.draft_replica = signal.epoch, signal.replica
            current.draft_report, current.was_ahead = signal.report, signal.was_ahead
            current.audit = self._is_audited()
            self._send_verify()

    def _send_verify(self) -> None:
        """Send the round to the target, or wait for one."""
        current, target = self._round, self.target
        assert current is not None
        if target.replica is None:
            self.stage = Stage.PLACING
            return
        current.target_epoch, current.target_replica = target.epoch, target.replica
        current.offset = 0
        # A round that moved may meet a replica that judges fewer.
        current.cut_candidates(target.max_num_draft_tokens, "target_limit")
        commands = target.verify(
            self.ledger,
            current.candidates,
            current.rows,
            num_steps=current.num_steps,
            audit=current.audit,
        )
        self._actions.append(Send(Side.TARGET, target.replica, commands))
        self._start_target_timer(Timer.VERIFY)
        self.stage = Stage.PREFILLING if current.is_prefill else Stage.VERIFYING

    def _start_target_timer(self, timer: Timer) -> None:
        command = self.target.in_flight
        assert command is not None
        num_tokens = 1  # the first of its tokens, or those up to the next part, as they come
        if not self.target.taken(self.ledger):
            num_tokens += len(command.prefix.append) + len(command.candidates)
        self._actions.append(
            StartTimer(Side.TARGET, command.epoch, command.round, timer, num_tokens)
        )

    # ------------------------------------------------------------ the target's answers

    def _stray_reply(self, event: TargetReply) -> None:
        """No command is out: the reply can only be a late one."""
        self._is_late_reply(event)

    def _is_late_reply(self, event: TargetReply) -> bool:
        target = self.target
        if event.epoch > target.epoch or event.round > target.round:
            raise PeerViolation(
                Side.TARGET, f"epoch {event.epoch}, round {event.round} was never asked for"
            )
        command = target.in_flight
        return event.epoch < target.epoch or command is None or event.round != command.round

    def _target_replied(self, event: TargetReply) -> None:
        if self._is_late_reply(event):
            return
        body = event.body
        if isinstance(body, Opened):
            return
        if isinstance(body, Deferred):
            self.target.num_repeats = 0  # it is there: only silence from here on is a loss
            self._start_target_timer(Timer.DEFERRED)
        elif isinstance(body, Failed):
            self._target_failed(body)
        else:
            self._take_verdict(event, body)

    def _take_verdict(self, event: TargetReply, verdict: Verdict) -> None:
        command, current, target = self.target.in_flight, self._round, self.target
        assert command is not None
        assert current is not None
        taken = target.taken(self.ledger)
        news = news_of(verdict, taken)
        if news is None:
            return
        verdict = news
        check_verdict(self.plan, command, current.num_steps, verdict)
        if not verdict.more:
            target.in_flight = None
        target.num_repeats = target.num_resyncs = target.num_accepted = 0
        target.confirmed_len = command.prefix.base_len + len(taken)
        self._actions.append(StopTimer(Side.TARGET))
        self._tally.cached_tokens = max(self._tally.cached_tokens, event.cached_tokens)
        current.target_report = event.report
        if verdict.outcome is None:
            refuted = verdict.redraw_mismatch
            self.stage = Stage.DECIDING
            self._actions.append(
                Decide(
                    command.epoch,
                    command.round,
                    current.base_len,
                    current.candidates if refuted is None else (),
                    current.rows if refuted is None else (),
                    verdict.rows,
                    verdict.logprob_rows,
                    refuted,
                )
            )
            return
        target.confirmed_len += len(verdict.outcome.tokens)
        if command.audit:
            self._actions.append(
                Audit(
                    current.base_len,
                    current.candidates,
                    current.rows,
                    verdict.rows,
                    verdict.outcome,
                )
            )
        self._commit(verdict.outcome, more=verdict.more)

    def _target_failed(self, failure: Failed) -> None:
        target, current = self.target, self._round
        assert current is not None
        self._actions.append(StopTimer(Side.TARGET))
        if failure.reason in _BAD_CONTENT and current.candidates:
            self._reject_proposal(failure)
        elif failure.reason == "PREFIX_MISMATCH" and (
            target.num_resyncs < self.plan.max_round_retries
        ):
            shared = last_equal(self.ledger, failure.page_digests, self.ledger.confirmed_len)
            command = target.resync(self.ledger, shared)
            current.offset = 0
            assert target.replica is not None
            self._actions.append(Send(Side.TARGET, target.replica, (command,)))
            self._start_target_timer(Timer.VERIFY)
        elif failure.reason in _REOPEN:
            target.reopen()
            if self._count_move(failure.message):
                self._send_verify()
        elif failure.reason in _MOVE:
            self._move_target(target.replica, failure.message, failure.retry_after_s)
        else:
            self._fail(failure)

    def _reject_proposal(self, failure: Failed) -> None:
        """The candidates failed a check: the draft is off, the round goes on without them."""
        self.draft.switch_off("draft_bad_proposal", f"{failure.reason}: {failure.message}")
        self.target.in_flight = None
        self._count_retry()
        self._go_plain("draft_bad_proposal")

    def _move_target(
        self, avoid: str | None, message: str, retry_after_s: float = 0.0, *, lost: bool = False
    ) -> None:
        """Leave the replica: a new epoch, the confirmed prefix rebuilt elsewhere or there again."""
        target, left = self.target, self.target.replica
        if target.opened and target.replica is not None and not lost:
            self._actions.append(
                Send(Side.TARGET, target.replica, (Close(target.epoch, target.round),))
            )
        self._actions.append(StopTimer(Side.TARGET))
        target.leave()
        if not self._count_move(message):
            return
        self._actions.append(
            PlaceTarget(
                target.epoch,
                avoid,
                left if lost else None,
                target.num_moves,
                retry_after_s,
                self.plan.max_len,
            )
        )
        if self.stage in (Stage.PREFILLING, Stage.VERIFYING):
            self.stage = Stage.PLACING

    def _count_move(self, message: str) -> bool:
        target = self.target
        target.num_moves += 1
        self._count_retry()
        if target.num_moves <= self.plan.max_failovers:
            return True
        self._fail(Failed("NOT_READY", f"gave up after {target.num_moves} tries: {message}"))
        return False

    def _count_retry(self) -> None:
        if self._round is not None:
            self._round.num_retries += 1

    def _lost(self, event: Lost) -> None:
        if event.side is Side.DRAFT:
            self._draft_event(event)
        elif event.replica == self.target.replica:
            self._move_target(None, f"the link to {event.replica} ended", lost=True)

    def _timer(self, event: TimerFired) -> None:
        if event.side is Side.DRAFT:
            self._draft_event(event)
            return
        target, command = self.target, self.target.in_flight
        if event.epoch > target.epoch or event.round > target.round:
            raise IllegalEvent(f"no such timer was started: {event}")
        if command is None or (event.epoch, event.round) != (command.epoch, command.round):
            return
        if target.num_repeats:
            self._move_target(target.replica, f"{target.replica} does not answer")
            return
        target.num_repeats += 1
        self._count_retry()
        assert target.replica is not None
        self._actions.append(Send(Side.TARGET, target.replica, (command,)))
        self._start_target_timer(Timer.VERIFY)

    # ------------------------------------------------------------ decisions made here

    def _decided(self, event: Decided) -> None:
        current = self._round
        assert current is not None
        try:
            check_outcome(self.plan, current.candidates, 1, event.outcome)
        except PeerViolation as violation:  # decided here: no peer to leave, none who asks again
            raise IllegalEvent(f"decided wrongly: {violation.message}") from violation
        if event.epoch == self.target.epoch:
            self.target.num_accepted = event.outcome.num_accepted
        self._commit(event.outcome)

    def _decision_failed(self, event: DecisionFailed) -> None:
        current = self._round
        assert current is not None
        if event.blames_draft and current.candidates:
            self._reject_proposal(event.failure)
        else:
            self._fail(event.failure)

    # ------------------------------------------------------------ commit and end

    def _commit(self, outcome: Outcome, *, more: bool = False) -> None:
        """The only event that moves shared state: confirm, count, show, go on or end.

        more: a part of an answer; the next round is what is left of the same command.
        """
        current = self._round
        assert current is not None
        if outcome.redraw_mismatch is not None:
            self.draft.switch_off(
                "draft_redraw_mismatch",
                f"candidate {outcome.redraw_mismatch} does not follow from its own row",
            )
        elif current.candidates:
            self.draft.judged(current.draft_epoch, outcome.num_accepted)
        shown = self._output.push(outcome.tokens)
        kept = outcome.tokens[: shown.num_kept]
        self.ledger.extend(kept)
        self._tally.count(current, outcome)
        self._actions.append(
            Deliver(self.round_index, kept, shown.text, outcome.logprobs[: shown.num_kept])
        )
        more = more and shown.ending is None
        self._actions.append(current.record(self.round_index, outcome, len(kept), more=more))
        self._round = current.rest(len(kept)) if more else None
        self.round_index += 1
        self.target.num_moves = 0
        if shown.ending is not None:
            self._finish(shown.ending)
        elif more:
            self._start_target_timer(Timer.VERIFY)
        else:
            self._start_round()

    def stats(self) -> Stats:
        """Counts so far."""
        return self._tally.stats(len(self.plan.prompt), self.ledger.confirmed_len)

    def _finish(self, ending: Ending) -> None:
        self._close_sides()
        self._actions.append(
            Finish(ending.reason, ending.matched_stop, ending.matched_stop_token_id, self.stats())
        )

    def _fail(self, failure: Failed) -> None:
        self._close_sides()
        self._actions.append(Fail(failure, self.stats()))

    def _cancel(self, event: Cancel) -> None:
        self._fail(Failed(event.reason, event.message))

    def _close_sides(self) -> None:
        target = self.target
        if target.opened and target.replica is not None:
            self._actions.append(
                Send(Side.TARGET, target.replica, (Close(target.epoch, target.round),))
            )
        self._actions.append(StopTimer(Side.TARGET))
        self.draft.close()
        self.stage = Stage.DONE

    def _ignore(self, _event: Event) -> None:
        """The session is over; what still arrives is late."""
