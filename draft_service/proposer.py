"""Drafting: candidates and the rows they were drawn from.

Owns what Propose means. The row that is sent is the row that was drawn from: truncation and
rounding come before the draw (exactness rule 1). Each candidate's noise is keyed by its position
and the round's base_len, or by the position alone under the coupled rule. How many candidates are
drawn is the coordinator's choice and never depends on their values (rule 7). Must not know links,
batches or the target. Where it runs: specmesh/engine/runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.util.types import AttributeValue
from torch import Tensor

from draft_service.outcomes import Noise, is_foreseeable, likely_outcomes
from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import draft_pb2, session_pb2
from specmesh import wire
from specmesh.config import MAX_AHEAD
from specmesh.engine.role import Finished, Outlook, Wire, isolated
from specmesh.engine.scheduler import Task
from specmesh.engine.sessions import Session
from specmesh.errors import ContextTooLong, InvalidRequest, NumericFault, SpecmeshError
from specmesh.spans import DRAFT_FORWARD, PROPOSE, Key


@dataclass(slots=True)
class Drafting:
    """A proposal in the making: what was drawn so far. on_device: by the device; frames: the rows
    that it drew from. num_wanted: tokens to draw; one more than candidates where the row behind all
    of them, `behind`, is to tell how the round may end."""

    num_draft_tokens: int
    num_wanted: int
    on_device: bool
    cuts: list[wire.Cut] = field(default_factory=list)
    dropped_mass: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    frames: list[session_pb2.Distribution] = field(default_factory=list)
    behind: session_pb2.Distribution | None = None

    def proposal(self) -> draft_pb2.Proposal:
        """The candidates that were drawn, with their rows."""
        count = self.num_draft_tokens
        if len(self.frames) > count:
            self.behind = self.frames[count]
        return draft_pb2.Proposal(
            tokens=self.tokens[:count],
            distributions=self.frames[:count],
            dropped_mass=self.dropped_mass[:count],
        )


class Proposer:
    """The draft's role: fill K/V, then draw k candidates in k passes, batched over sessions."""

    wire = Wire(
        side="draft",
        kind="propose",
        answer="proposal",
        result_type=draft_pb2.DraftResult,
        span=PROPOSE,
        forward_span=DRAFT_FORWARD,
    )

    def __init__(
        self,
        max_num_draft_tokens: int,
        on_device: Callable[[Session, int], bool] = lambda *_: False,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        """on_device: whether the device draws for a command, given its base_len."""
        self._max_num_draft_tokens = max_num_draft_tokens
        self._max_ahead_bytes = max_message_bytes - wire.REST_BYTES
        self._on_device = on_device

    def check(self, session: Session, command: draft_pb2.Propose) -> Drafting:
        """Raise InvalidRequest or ContextTooLong for a number of candidates that cannot be."""
        num_draft_tokens = command.num_draft_tokens
        if num_draft_tokens > self._max_num_draft_tokens:
            raise InvalidRequest(
                f"at most {self._max_num_draft_tokens}, got {num_draft_tokens}",
                field="num_draft_tokens",
            )
        if command.num_ahead > MAX_AHEAD:
            raise InvalidRequest(f"at most {MAX_AHEAD}, got {command.num_ahead}", field="num_ahead")
        end = command.prefix.base_len + num_draft_tokens
        if end > session.ledger.max_len:
            raise ContextTooLong(
                f"{command.prefix.base_len} + {num_draft_tokens} candidates exceed max_len "
                f"{session.ledger.max_len}"
            )
        looks_behind = 0 < num_draft_tokens < self._max_num_draft_tokens and command.num_ahead > 0
        on_device = self._on_device(session, command.prefix.base_len)
        return Drafting(num_draft_tokens, num_draft_tokens + looks_behind, on_device)

    def begin(self, task: Task) -> None:
        """The last token is drawn and not fed, so k candidates take K/V up to base_len+k-1."""
        drafting: Drafting = task.role_state
        num_draft_tokens = drafting.num_draft_tokens
        task.num_rows = 1 if num_draft_tokens else 0
        task.reserve_len = task.base_len + max(0, drafting.num_wanted - 1)
        if num_draft_tokens:
            task.session.ledger.begin_round(num_draft_tokens)

    def advance(
        self, finished: Sequence[Finished], logits: Tensor
    ) -> list[draft_pb2.Proposal | SpecmeshError | None]:
        """Draw one candidate for every session of the pass."""
        return [isolated(self._advance, entry, logits) for entry in finished]

    def _advance(self, entry: Finished, logits: Tensor) -> draft_pb2.Proposal | None:
        drafting: Drafting = entry.task.role_state
        if entry.num_rows:
            try:
                self._draw(entry.task, drafting, logits[entry.first_row])
            except NumericFault:
                if len(drafting.tokens) < drafting.num_draft_tokens:
                    raise
                entry.task.is_tainted = True  # the row behind all candidates: nobody asked for it
                return self._proposal(drafting)
            if len(drafting.tokens) < drafting.num_wanted:
                entry.task.fed.append(drafting.tokens[-1])
                return None
        return self._proposal(drafting)

    def _draw(self, task: Task, drafting: Drafting, logits: Tensor) -> None:
        session = task.session
        weights = session.shaper.row(logits, session.ledger.tokens, drafting.tokens)
        position = task.base_len + len(drafting.tokens)
        if session.shaper.is_greedy:
            token = reference.lowest_argmax(weights)
        elif session.is_coupled:
            token = reference.race(weights, session.seed, position, 0, Purpose.COUPLED)
        else:
            policy = session.opening.row_policy or session_pb2.ROW_POLICY_AUTO
            cut = wire.cut(weights, policy)
            token = cut.row.draw(session.seed, position, task.base_len, Purpose.PROPOSE)
            drafting.cuts.append(cut)
        drafting.tokens.append(token)

    def _proposal(self, drafting: Drafting) -> draft_pb2.Proposal:
        drafting.dropped_mass = wire.dropped_masses(drafting.cuts)
        drafting.frames = [wire.encode(cut.row) for cut in drafting.cuts]
        return drafting.proposal()

    def looks_ahead(self, task: Task) -> bool:
        """Where the command says so."""
        return bool(task.request.command.propose.num_ahead)

    def outlooks(self, task: Task, answer: draft_pb2.Proposal) -> Sequence[Outlook]:
        """The likeliest outcomes of the round, each followed by a round of as many candidates."""
        command, drafting = task.request.command.propose, task.role_state
        if not is_foreseeable(answer):
            return ()
        base_len = command.prefix.base_len
        follow_ups = [
            draft_pb2.Propose(
                prefix=session_pb2.PrefixUpdate(base_len=base_len + kept + 1),
                num_draft_tokens=command.num_draft_tokens,
            )
            for kept in range(len(answer.tokens) + 1)
        ]
        noise = Noise(task.session.seed, base_len)
        return [
            Outlook((*answer.tokens[:kept], token), follow_ups[kept])
            for kept, token in likely_outcomes(answer, drafting.behind, noise, command.num_ahead)
        ]

    def foreseen(self, found: Sequence[tuple[Outlook, Any]], result: Any) -> None:
        """Write proposals drafted ahead into a DraftResult: the likeliest that it holds."""
        left = self._max_ahead_bytes
        for outlook, proposal in found:
            left -= proposal.ByteSize() + wire.ROW_OVERHEAD
            if left < 0:
                return
            result.ahead.continuations.add(
                num_accepted=len(outlook.tokens) - 1,
                closing_token=outlook.tokens[-1],
                proposal=proposal,
            )

    def span_attributes(
        self, task: Task, answer: draft_pb2.Proposal
    ) -> Mapping[str, AttributeValue]:
        """Number of candidates, and how their rows were sent."""
        attributes: dict[str, AttributeValue] = {Key.NUM_DRAFT_TOKENS: len(answer.tokens)}
        if answer.distributions:
            attributes[Key.DROPPED_MASS] = list(answer.dropped_mass)
            name = session_pb2.Encoding.Name(answer.distributions[0].encoding)
            attributes[Key.ENCODING] = name.removeprefix("ENCODING_").lower()
        return attributes
