"""The whole stack as costs and queues: the protocol as it is, services that only take time.

Where `policy_simulation.py` asks whether the best k is found, this asks what finding it costs: one
target whose plain commands go on in chains of passes that any round with candidates ends, a draft,
wires, a coordinator with one processor, requests that come and go. Sessions are the production
`Session` under the production policy; the chain rule is `target_service/device_verifier.py`'s.
Deterministic: times are added up, acceptance is drawn from one seed. Times in milliseconds, as
measured on two H200: an 8B-shaped target, a draft of 4 layers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.commands import Closing, Outcome, Proposal, Propose, Verdict, Verify
from coordinator.costs import RoundSample
from coordinator.detokenizer import Detokenizer
from coordinator.messages import (
    Begin,
    DraftPlaced,
    DraftReply,
    Finish,
    PlaceDraft,
    PlaceTarget,
    RoundDone,
    Send,
    Side,
    TargetPlaced,
    TargetReply,
)
from coordinator.policy import SessionPolicy, SharedPolicy
from coordinator.protocol import CHAIN_STEPS, Session
from coordinator.session_plan import Rule, SessionPlan
from coordinator.stops import Output, StopRules

TOKEN = 7
BEGIN_MS = 300.0  # within which all clients begin: requests do not come at the same time
PROMPT_LEN = 100
PASS_COUNTS = (1, 4, 8)
ROWS = (1, 2, 3, 5, 9)  # rows of a sequence that programs come in
SAMPLED = (1, 8, 32, 64)  # sequences at which passes were measured
ONE_ROW = (4.2, 4.5, 5.1, 6.3)
FIVE_ROWS = (4.35, 5.1, 6.7, 11.5)


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation, the last segment going on."""
    index = min(max(1, sum(each < x for each in xs)), len(xs) - 1)
    part = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + part * (ys[index] - ys[index - 1])


@dataclass(frozen=True)
class Costs:
    """What the parts of a round take besides passes.

    rates: acceptance of each candidate given those before it; the last serves all later ones.
    turn: of the target's host between two steps, and more of it a session. hop: one way of a wire.
    proposal, round, part: of the coordinator's processor, for a proposal, a verdict on candidates
    or the last part of an answer, and another part. prefill: of a prompt at the target.
    """

    rates: Sequence[float] = (0.62,)
    draft_token: float = 0.25
    turn: float = 0.3
    turn_per_session: float = 0.13
    hop: float = 0.55
    proposal: float = 0.45
    round: float = 0.65
    part: float = 0.1
    prefill: float = 4.0

    def pass_ms(self, num_seqs: int, rows: int) -> float:
        """One pass over `rows` rows of each of `num_seqs` sequences."""
        one, five = between(SAMPLED, ONE_ROW, num_seqs), between(SAMPLED, FIVE_ROWS, num_seqs)
        return one + (five - one) * (rows - 1) / 4


CHEAP = Costs(hop=0.04, turn=0.1, turn_per_session=0.01, proposal=0.1, round=0.15, part=0.02)


@dataclass(eq=False)
class Task:
    """A command at work. steps: tokens of plain decoding to come; 0 with candidates."""

    client: Client
    command: Any
    k: int
    steps: int
    is_prefill: bool
    ready_ms: float
    offset: int = 0


@dataclass
class Service:
    """One engine: what waits for its next step, and whether a step runs."""

    ready: list[Task] = field(default_factory=list)
    is_busy: bool = False


class Client:
    """One caller: a request after the other, each a session of the production protocol."""

    def __init__(self, stack: Stack, seed: int, delay_ms: float) -> None:
        self._stack = stack
        self._lengths = random.Random(seed)
        self.tokens = 0
        stack.after(delay_ms, self._begin)

    def _begin(self) -> None:
        stack = self._stack
        # Of other lengths each, so that requests do not begin and end together.
        answer_len = stack.answer_len * self._lengths.randint(75, 125) // 100
        plan = SessionPlan(
            prompt=(TOKEN,) * PROMPT_LEN,
            max_len=PROMPT_LEN + answer_len,
            vocab_size=50,
            rule=Rule.COUPLED,
            num_draft_tokens=stack.num_draft_tokens,
        )
        self.policy = SessionPolicy(stack.shared)
        output = Output(StopRules(answer_len), Detokenizer(lambda *_a, **_k: b""))
        self.session = Session(plan, output, self._choose)
        self._sent: dict[Side, float] = {}
        self._start: float | None = None
        stack.num_holders += 1
        self.step(Begin())

    def _choose(self, limit: int) -> int:
        return self.policy.choose(limit)

    def step(self, event: Any) -> None:
        """Take an event and perform what follows; the policy sees rounds after that."""
        stack, done = self._stack, []
        events = [event]
        for each in events:
            for action in self.session.step(each):
                if isinstance(action, PlaceTarget):
                    events.append(TargetPlaced(action.epoch, "t", "0"))
                elif isinstance(action, PlaceDraft):
                    events.insert(1, DraftPlaced(action.epoch, "d", 1 << 20, "1"))
                elif isinstance(action, Send):
                    self._send(action)
                elif isinstance(action, RoundDone):
                    done.append((action, self._end_round(action)))
                elif isinstance(action, Finish):
                    stack.num_holders -= 1
                    stack.after(stack.costs.hop, self._begin)
        for action, duration_ms in done:
            self._observe(action, duration_ms)

    def _send(self, action: Send) -> None:
        stack = self._stack
        for command in action.commands:
            if isinstance(command, Verify | Propose):
                self._start = stack.now_ms if self._start is None else self._start
                self._sent[action.side] = stack.now_ms
                task = self._task(command)
                stack.after(stack.costs.hop, lambda task=task: stack.arrive(action.side, task))

    def _task(self, command: Verify | Propose) -> Task:
        if isinstance(command, Propose):
            is_long = len(command.prefix.append) > PROMPT_LEN // 2
            return Task(self, command, command.num_draft_tokens, 0, is_long, 0.0)
        k = len(command.candidates)
        is_prefill = len(command.prefix.append) >= PROMPT_LEN
        return Task(self, command, k, 0 if k else command.num_steps, is_prefill, 0.0)

    def _end_round(self, done: RoundDone) -> float:
        """How long it took. The next one's command is sent after this, in the same step."""
        now_ms = self._stack.now_ms
        start_ms, self._start = self._start, now_ms if done.more else None
        return now_ms - (now_ms if start_ms is None else start_ms)

    def _observe(self, done: RoundDone, duration_ms: float) -> None:
        stack = self._stack
        if done.is_prefill:
            return
        self.tokens += done.num_tokens
        target_ms, queue_ms, forward_ms, batch_size, batch_rows = done.target_report
        draft_ms, was_long = done.draft_report if done.num_draft_tokens else (0.0, False)
        if was_long:
            return
        manage_ms = max(0.0, duration_ms - target_ms - draft_ms)
        sample = RoundSample(
            num_draft_tokens=done.num_draft_tokens,
            num_tokens=done.num_tokens,
            num_judged=done.num_judged,
            num_accepted=done.num_accepted,
            draft_s=draft_ms * 1e-3,
            target_s=target_ms * 1e-3,
            manage_s=manage_ms * 1e-3,
            batch_size=batch_size,
            batch_rows=batch_rows,
            forward_s=forward_ms * 1e-3,
            queue_s=queue_ms * 1e-3,
            is_later_part=done.offset > 0,
            is_cut=not (done.more or done.num_draft_tokens) and done.num_tokens < CHAIN_STEPS,
        )
        stack.num_drafted += done.num_draft_tokens > 0
        self.policy.observe(sample)

    def proposed(self, task: Task) -> None:
        """The draft's answer is here."""
        report = (self._stack.received_ms - self._sent[Side.DRAFT], task.is_prefill and task.k > 0)
        body = Proposal((TOKEN,) * task.k)
        self.step(DraftReply(task.command.epoch, task.command.round, body, report))

    def verdict(self, task: Task, num_tokens: int, offset: int, more: bool, spent: Any) -> None:
        """A part of the target's answer is here, or all of it."""
        stack = self._stack
        report = (stack.received_ms - self._sent[Side.TARGET], *spent)
        self._sent[Side.TARGET] = stack.received_ms  # the next part counts from this one
        num_accepted = num_tokens - 1 if task.k else 0
        closing = Closing.RECOVERED if task.k and num_accepted < task.k else Closing.BONUS
        outcome = Outcome(num_accepted, (TOKEN,) * num_tokens, closing)
        body = Verdict(outcome, more=more, offset=offset)
        self.step(TargetReply(task.command.epoch, task.command.round, body, report=report))


class Stack:
    """A target, a draft, a coordinator and `num_clients` callers on one clock."""

    def __init__(
        self,
        costs: Costs,
        num_clients: int,
        *,
        num_draft_tokens: int | None = None,
        shared: SharedPolicy | None = None,
        answer_len: int = 128,
        seed: int = 0,
    ) -> None:
        """num_draft_tokens None: the policy chooses. shared: what it knows from before."""
        self.costs, self.num_draft_tokens, self.answer_len = costs, num_draft_tokens, answer_len
        self.shared = SharedPolicy(256) if shared is None else shared
        self.now_ms = self.received_ms = 0.0
        self.num_holders = self.num_drafted = 0
        self._rng = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._processor_ms = 0.0
        self._services = {side: Service() for side in Side}
        self.clients = [
            Client(self, seed + index, index * BEGIN_MS / num_clients)
            for index in range(num_clients)
        ]

    def after(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do it later."""
        heapq.heappush(self._events, (self.now_ms + delay_ms, next(self._order), action))

    def run(self, duration_ms: float) -> float:
        """Go on for a while. Returns the milliseconds a token took one stream."""
        end_ms, before = self.now_ms + duration_ms, sum(each.tokens for each in self.clients)
        while self._events and self._events[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._events)
            action()
        self.now_ms = end_ms
        num_tokens = sum(each.tokens for each in self.clients) - before
        return duration_ms * len(self.clients) / max(1, num_tokens)

    # ------------------------------------------------------------ services

    def arrive(self, side: Side, task: Task) -> None:
        """A command reaches a service."""
        task.ready_ms = self.now_ms
        service = self._services[side]
        service.ready.append(task)
        if not service.is_busy:
            service.is_busy = True
            self.after(0.0, lambda: self._run(side))

    def _run(self, side: Side) -> None:
        service = self._services[side]
        tasks, service.ready = service.ready, []
        service.is_busy = bool(tasks)
        if not tasks:
            return
        run = self._draft_step if side is Side.DRAFT else self._target_step
        self.after(run(tasks), lambda: self._run(side))

    def _draft_step(self, tasks: list[Task]) -> float:
        costs = self.costs
        k = max(task.k for task in tasks)
        prefill = costs.prefill / 4 * sum(task.is_prefill for task in tasks)
        took_ms = 0.15 + k * (costs.draft_token + 0.004 * len(tasks)) + prefill
        for task in tasks:
            self._answer(took_ms, costs.proposal, lambda task=task: task.client.proposed(task))
        return took_ms

    def _target_step(self, tasks: list[Task]) -> float:
        costs, num_seqs = self.costs, len(tasks)
        num_prefills = sum(task.is_prefill for task in tasks)
        rows = next(rows for rows in ROWS if rows > max(task.k for task in tasks))
        chain = self._chain_len([task.steps for task in tasks]) if not num_prefills else 1
        device_ms = chain * costs.pass_ms(num_seqs, rows) + num_prefills * costs.prefill
        batch_rows = sum(PROMPT_LEN if task.is_prefill else 1 + task.k for task in tasks)
        took_ms = device_ms + costs.turn + costs.turn_per_session * num_seqs
        for task in tasks:
            spent = (self.now_ms - task.ready_ms, device_ms, num_seqs, batch_rows)
            task.ready_ms = self.now_ms + device_ms
            self._end_of_step(task, min(chain, max(1, task.steps)), took_ms, spent)
        return took_ms

    def _end_of_step(self, task: Task, num_tokens: int, took_ms: float, spent: Any) -> None:
        costs, offset = self.costs, task.offset
        if task.k:
            num_tokens = 1 + self._num_accepted(task.k)
        task.offset += num_tokens
        task.steps -= num_tokens
        task.is_prefill = False
        more = task.steps > 0
        if more:
            self._services[Side.TARGET].ready.append(task)

        def answer() -> None:
            task.client.verdict(task, num_tokens, offset, more, spent)

        self._answer(took_ms, costs.part if more else costs.round, answer)

    def _chain_len(self, wanted: list[int]) -> int:
        if 2 * len(wanted) < self.num_holders or not all(wanted):
            return 1
        served = sorted(wanted, reverse=True)[math.ceil(0.75 * len(wanted)) - 1]
        return max(count for count in PASS_COUNTS if count <= served)

    def _num_accepted(self, k: int) -> int:
        rates = self.costs.rates
        for index in range(k):
            if self._rng.random() >= rates[min(index, len(rates) - 1)]:
                return index
        return k

    # ------------------------------------------------------------ coordinator

    def _answer(self, delay_ms: float, busy_ms: float, action: Callable[[], None]) -> None:
        """A result comes back after delay_ms; the one processor takes busy_ms over it."""

        def arrived() -> None:
            begin_ms = max(self.now_ms, self._processor_ms)
            self._processor_ms = begin_ms + busy_ms

            def act() -> None:
                self.received_ms = begin_ms
                action()

            self.after(self._processor_ms - self.now_ms, act)

        self.after(delay_ms + self.costs.hop, arrived)
