"""Verifying: the target's rows, the decision on candidates, plain decoding.

Owns what Verify means. The arithmetic of the decision is `kernels.reference` alone; this module
feeds it rows, coins and draws, and reports what it judged. Rows are shaped only when they are
judged, so that NaN counts in judged rows only (exactness rule 12). Must not know links or batches.
The checks of what a draft sent are in target_service/candidates.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from opentelemetry.util.types import AttributeValue
from torch import Tensor

from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh import wire
from specmesh.config import MAX_PLAIN_STEPS
from specmesh.engine.role import Finished, Outlook, Part, Wire, isolated
from specmesh.engine.scheduler import Task
from specmesh.engine.sessions import Session
from specmesh.errors import ContextTooLong, InvalidRequest, NumericFault, SpecmeshError
from specmesh.spans import TARGET_FORWARD, VERIFY, Key
from target_service.candidates import Candidates, RedrawCheck

Verdict = target_pb2.Verdict
MAX_CHAIN = 8  # steps of plain decoding in one part of an answer: more would keep others waiting
STEPS_AHEAD = 64  # steps that a command has pages for


@dataclass(slots=True)
class Verifying:
    """A verdict in the making. num_steps: tokens of plain decoding; 1 with candidates.

    steps_done: passes taken, a token each. on_device: the device decides
    (target_service/device_verifier.py). verdict: the next one, or the next part of it.
    """

    candidates: Candidates
    num_steps: int
    at_coordinator: bool
    audit: bool
    on_device: bool = False
    steps_done: int = 0
    verdict: Verdict = field(default_factory=target_pb2.Verdict)


@dataclass(frozen=True, slots=True)
class VerifierOptions:
    """Bounds of the target's commands; see TargetSettings."""

    vocab_size: int
    max_num_draft_tokens: int = 8
    max_plain_steps: int = MAX_PLAIN_STEPS
    max_message_bytes: int = 64 << 20


def joined(verdicts: Sequence[Verdict]) -> Verdict:
    """The parts of one verdict, in order, as one."""
    whole = target_pb2.Verdict()
    for verdict in verdicts:
        whole.MergeFrom(verdict)
    whole.ClearField("offset")
    whole.ClearField("more")
    return whole


class Verifier:
    """The target's role: one pass over base and candidates, then the decision."""

    wire = Wire(
        side="target",
        kind="verify",
        answer="verdict",
        result_type=target_pb2.TargetResult,
        span=VERIFY,
        forward_span=TARGET_FORWARD,
        join=joined,
    )

    def __init__(
        self,
        options: VerifierOptions,
        redraw: RedrawCheck,
        on_device: Callable[[Session, Verifying, int], bool] = lambda *_: False,
    ) -> None:
        """on_device: whether the device decides a command, given its base_len; candidates are then
        drawn again there."""
        self._options = options
        self._redraw = redraw
        self._on_device = on_device

    # ------------------------------------------------------------ check

    def check(self, session: Session, command: target_pb2.Verify) -> Verifying:
        """Parse candidates and rows, and re-draw them. Raises InvalidRequest, CorruptFrame or
        ContextTooLong."""
        num_candidates = len(command.candidates)
        num_steps = self._num_steps(command)
        if command.decide_at not in (
            session_pb2.DECIDE_AT_TARGET,
            session_pb2.DECIDE_AT_COORDINATOR,
        ):
            raise InvalidRequest(f"unknown placement {command.decide_at}", field="decide_at")
        at_coordinator = command.decide_at == session_pb2.DECIDE_AT_COORDINATOR
        if at_coordinator and num_steps > 1:
            raise InvalidRequest("several steps need the target to decide", field="num_steps")
        if num_candidates > self._options.max_num_draft_tokens:
            raise InvalidRequest(
                f"at most {self._options.max_num_draft_tokens}, got {num_candidates}",
                field="candidates",
            )
        end = command.prefix.base_len + num_candidates + num_steps
        if end > session.ledger.max_len:
            raise ContextTooLong(
                f"base_len {command.prefix.base_len} leaves no room for {num_candidates} "
                f"candidates and {num_steps} tokens within max_len {session.ledger.max_len}"
            )
        if at_coordinator or command.audit:
            self._check_answer_bytes(session, num_candidates + num_steps)
        candidates = Candidates.parse(session, command, self._options.vocab_size)
        verifying = Verifying(candidates, num_steps, at_coordinator, command.audit)
        verifying.on_device = self._on_device(session, verifying, command.prefix.base_len)
        if verifying.on_device:
            return verifying
        refuted = self._redraw.find_mismatch(session, candidates, command.prefix.base_len)
        if refuted is not None:
            # Decided as if nothing were proposed: exact, as the bonus noise is keyed by base_len.
            verifying.verdict.redraw_mismatch = refuted
            verifying.candidates = Candidates.none()
        return verifying

    def _num_steps(self, command: target_pb2.Verify) -> int:
        if command.candidates:
            if command.num_steps > 1:
                raise InvalidRequest(
                    "several steps and candidates exclude each other", field="num_steps"
                )
            return 1
        if not 1 <= command.num_steps <= self._options.max_plain_steps:
            raise InvalidRequest(
                f"must be in [1, {self._options.max_plain_steps}], got {command.num_steps}",
                field="num_steps",
            )
        return int(command.num_steps)

    def _check_answer_bytes(self, session: Session, num_rows: int) -> None:
        copies = 1 + session.opening.sampling.HasField("num_logprobs")
        limit = self._options.max_message_bytes
        most = wire.max_dense_rows(limit, self._options.vocab_size, copies)
        if num_rows > most:
            raise InvalidRequest(
                f"{num_rows} rows are asked for, a message of {limit} bytes holds {most}",
                field="candidates",
            )

    # ------------------------------------------------------------ work

    def begin(self, task: Task) -> None:
        """The pass writes K/V up to base_len + k; its last k+1 tokens give the rows."""
        verifying: Verifying = task.role_state
        tokens = verifying.candidates.tokens
        task.fed = list(tokens)
        task.num_rows = len(tokens) + 1
        steps = min(verifying.num_steps, STEPS_AHEAD)
        task.reserve_len = task.base_len + len(tokens) + steps - 1
        if tokens:
            task.session.ledger.begin_round(len(tokens))

    def advance(
        self, finished: Sequence[Finished], logits: Tensor
    ) -> list[Verdict | Part | SpecmeshError | None]:
        """Decide on every session of the pass."""
        outcomes: list[Verdict | Part | SpecmeshError | None] = []
        for entry in finished:
            own = logits[entry.first_row : entry.first_row + entry.num_rows]
            at_coordinator = entry.task.role_state.at_coordinator
            decide = self._rows_only if at_coordinator else self._decide
            outcomes.append(isolated(decide, entry.task, own))
        return outcomes

    def _rows_only(self, task: Task, logits: Tensor) -> Verdict:
        """Coordinator placement: exact rows; the ledger stays at base_len, candidates pending."""
        session, verifying = task.session, task.role_state
        tokens = verifying.candidates.tokens
        rows = session.shaper.rows(logits, session.ledger.tokens, tokens)
        verdict: Verdict = verifying.verdict
        rows[0]  # always judged: a fault there fails the command
        task.is_tainted = self._has_fault(logits[1:])
        verdict.distributions.extend(self._encode_rows(rows))
        if session.opening.sampling.HasField("num_logprobs"):
            for row in self._log_softmax(logits):
                verdict.logprobs.add(row=row.numpy().astype("<f4", copy=False).tobytes())
        return verdict

    def _encode_rows(self, rows: Sequence[Tensor]) -> list[session_pb2.Distribution]:
        """Rows as they are; one without a law becomes an empty frame, a fault only if judged."""
        encoded = []
        for index in range(len(rows)):
            try:
                encoded.append(wire.encode(wire.target_row(rows[index])))
            except NumericFault:
                encoded.append(session_pb2.Distribution())
        return encoded

    def _decide(self, task: Task, logits: Tensor) -> Verdict | Part:
        session, verifying = task.session, task.role_state
        ledger, candidates = session.ledger, verifying.candidates
        base_len = ledger.confirmed_len  # grows with every step of plain decoding
        rows = session.shaper.rows(logits, ledger.tokens, candidates.tokens)
        decision, coins = self._run_rule(session, rows, candidates, base_len)
        verdict: Verdict = verifying.verdict
        self._report(verdict, rows, candidates, decision, coins)
        if verifying.audit:
            verdict.distributions.extend(self._encode_rows(rows))
        if session.opening.sampling.HasField("num_logprobs"):
            emitted = logits[: len(decision.tokens)]
            self._add_logprobs(verdict, session, emitted, decision.tokens)
        task.is_tainted = self._has_fault(logits[len(decision.tokens) :])
        ledger.settle(decision.num_accepted)
        ledger.extend(decision.tokens)
        task.fed.clear()
        task.num_rows = 1
        verdict.tokens.extend(decision.tokens)
        verifying.verdict = target_pb2.Verdict()
        return answer(task, 1, decision.tokens[-1], verdict)

    def _has_fault(self, logits: Tensor) -> bool:
        """Whether rows that nobody judged hold NaN or +inf: so may the K/V of their tokens."""
        real = logits.numpy()[:, : self._options.vocab_size]
        return bool(real.size) and not math.isfinite(real.max())

    def _run_rule(
        self,
        session: Session,
        rows: Sequence[Tensor],
        candidates: Candidates,
        base_len: int,
    ) -> tuple[reference.Decision, list[reference.Coin]]:
        """The decision, and the coins that were thrown for it."""
        shaper = session.shaper
        coins: list[reference.Coin] = []
        if shaper.is_greedy:
            deciding = reference.decide_coupled(rows, candidates.tokens, shaper.stop_ids)
            return reference.run(deciding, reference.greedy_answer), coins
        if session.is_coupled:
            deciding = reference.decide_coupled(rows, candidates.tokens, shaper.stop_ids)
        else:
            deciding = reference.decide(rows, candidates.laws(), candidates.tokens, shaper.stop_ids)
        throw = reference.philox_answer(session.seed, base_len)

        def answer(request: reference.Coin | reference.Draw) -> Any:
            if isinstance(request, reference.Coin):
                coins.append(request)
            return throw(request)

        return reference.run(deciding, answer), coins

    # ------------------------------------------------------------ report

    def _report(
        self,
        verdict: Verdict,
        rows: Sequence[Tensor],
        candidates: Candidates,
        decision: reference.Decision,
        coins: Sequence[reference.Coin],
    ) -> None:
        """coins: those thrown, one per judged candidate; their totals are not summed again."""
        verdict.num_accepted = decision.num_accepted
        verdict.closing = _closing(decision, len(candidates.tokens))
        # An accepted stop token ends the judging; else one rejected candidate was judged as well.
        num_judged = min(len(decision.tokens), len(candidates.tokens))
        totals = [each.target_total for each in coins]
        unjudged = range(len(coins), len(decision.tokens))
        totals += [reference.total(rows[index]) for index in unjudged]
        for index in range(num_judged):
            draft_total = coins[index].draft_total if coins else 0.0
            judged = _judged(rows[index], totals[index], candidates, draft_total, index)
            verdict.judged.append(judged)
        for index, token in enumerate(decision.tokens):
            row = rows[index].numpy()
            largest = row.max()
            verdict.emitted.add(
                is_argmax=_is_argmax(row, token, largest),
                max_prob=float(largest) / totals[index],
            )

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Natural-log probabilities of the unshaped target, float32 [num_rows, vocab_size]."""
        real = logits[:, : self._options.vocab_size].float()
        return torch.log_softmax(real.double(), dim=-1).float().cpu()

    def _add_logprobs(
        self, verdict: Verdict, session: Session, logits: Tensor, tokens: Sequence[int]
    ) -> None:
        num_top = min(session.opening.sampling.num_logprobs, self._options.vocab_size)
        rows = self._log_softmax(logits)
        for row, token in zip(rows, tokens, strict=True):
            entry = verdict.logprobs.add(logprob=float(row[token]))
            if num_top:
                # Stable on ties: the lower id first, as everywhere.
                ranked = torch.sort(row, descending=True, stable=True).indices[:num_top].tolist()
                for other in ranked:
                    entry.top.add(token_id=other, logprob=float(row[other]))

    def salvage(self, task: Task) -> None:
        """Nothing: what was decided is answered, and the request fails on the rest."""

    def looks_ahead(self, task: Task) -> bool:
        """Never: what a target is asked next, its draft has to say."""
        return False

    def outlooks(self, task: Task, answer: Any) -> Sequence[Outlook]:
        """Not asked for."""
        return ()

    def foreseen(self, found: Sequence[tuple[Outlook, Any]], result: Any) -> None:
        """Never called: there are no outlooks."""

    def span_attributes(self, task: Task, answer: Verdict) -> Mapping[str, AttributeValue]:
        """What was decided, where, and what the checks found."""
        verifying: Verifying = task.role_state
        attributes: dict[str, AttributeValue] = {
            Key.NUM_DRAFT_TOKENS: len(verifying.candidates.tokens),
            Key.NUM_ACCEPTED: answer.num_accepted,
            Key.NUM_EMITTED: len(answer.tokens),
            Key.DECIDE_AT: "coordinator" if verifying.at_coordinator else "target",
            Key.AUDITED: verifying.audit,
        }
        if answer.closing:
            name = target_pb2.Closing.Name(answer.closing)
            attributes[Key.CLOSING] = name.removeprefix("CLOSING_").lower()
        if answer.HasField("redraw_mismatch"):
            attributes[Key.REDRAW_MISMATCH] = answer.redraw_mismatch
        return attributes


def answer(task: Task, num_steps: int, last_token: int, verdict: Verdict) -> Verdict | Part:
    """What a command is answered after num_steps more of its steps; last_token ended them.

    verdict: all but its place among the parts, which it is given here. Whether it ends the command
    is told by the message alone, never by when it comes.
    """
    verifying: Verifying = task.role_state
    verdict.offset = verifying.steps_done
    verifying.steps_done += num_steps
    steps_left = verifying.num_steps - verifying.steps_done
    verdict.more = steps_left > 0 and last_token not in task.session.shaper.stop_ids
    if not verdict.more:
        return verdict
    _reserve_ahead(task, steps_left)
    return Part(verdict)


def _reserve_ahead(task: Task, steps_left: int) -> None:
    """Ask for the pages of later steps, where the next chain would not fit into those it has.

    A long command does not hold from its beginning what it may need at its end.
    """
    confirmed_len = task.session.ledger.confirmed_len
    if confirmed_len + min(steps_left, MAX_CHAIN) - 1 > task.reserve_len:
        task.reserve_len = confirmed_len + min(steps_left, STEPS_AHEAD) - 1
        task.is_reserved = False


def _closing(decision: reference.Decision, num_candidates: int) -> target_pb2.Closing:
    if decision.closing is None:
        return target_pb2.CLOSING_STOPPED
    if decision.closing is Purpose.RESIDUAL or decision.num_accepted < num_candidates:
        return target_pb2.CLOSING_RECOVERED
    return target_pb2.CLOSING_BONUS


def _is_argmax(row: np.ndarray, token: int, largest: np.float32) -> bool:
    """Whether token is the lowest id among the largest weights."""
    return bool(row[token] == largest) and not bool((row[:token] == largest).any())


def _judged(
    row: Tensor, target_total: float, candidates: Candidates, draft_total: float, index: int
) -> target_pb2.JudgedCandidate:
    """p(x), q(x) and the overlap of one judged row; without a row of the draft, p(x) alone."""
    token = candidates.tokens[index]
    weights = row.numpy()
    judged = target_pb2.JudgedCandidate(target_prob=float(weights[token]) / target_total)
    if candidates.rows:
        draft = candidates.rows[index]
        judged.draft_prob = draft.weight(token) / draft_total
        own = weights if draft.ids is None else weights[draft.ids.numpy()]
        target_law = own.astype(np.float64) / target_total
        draft_law = draft.weights.numpy().astype(np.float64) / draft_total
        judged.overlap = float(np.minimum(target_law, draft_law, out=draft_law).sum())
    return judged
