"""Drafting: candidates and the rows they were drawn from.

Owns what Propose means. The row that is sent is the row that was drawn from: truncation and
rounding come before the draw (exactness rule 1). Each candidate's noise is keyed by its position
and the round's base_len, or by the position alone under the coupled rule. How many candidates are
drawn is the coordinator's choice and never depends on their values (rule 7). Where nothing can be
drawn from a row, the proposal ends before it: the row depends on the candidates in front of it,
and to fail would leave those out by their values. Nor does that proposal come earlier than another.
Must not know links, batches or the target. Where it runs: specmesh/engine/runner.py.
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
from specmesh.errors import ContextTooLong, InvalidRequest, SpecmeshError
from specmesh.spans import DRAFT_FORWARD, PROPOSE, Key


@dataclass(slots=True)
class Drafting:
    """A proposal in the making: what was drawn so far. on_device: by the device; frames: the rows
    that it drew from. num_wanted: rows to draw from; one more than candidates where the row behind
    all of them, `behind`, is to tell how the round may end. num_rows: had so far, those included
    from which nothing was drawn."""

    num_draft_tokens: int
    num_wanted: int
    on_device: bool
    num_rows: int = 0
    cuts: list[wire.Cut] = field(default_factory=list)
    dropped_mass: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    frames: list[session_pb2.Distribution] = field(default_factory=list)
    behind: session_pb2.Distribution | None = None

    def proposal(self) -> draft_pb2.Proposal:
        """The candidates that were drawn, with their rows."""
        count = min(self.num_draft_tokens, len(self.tokens))
        if len(self.frames) > count:
            self.behind = self.frames[count]
        return draft_pb2.Proposal(
            tokens=self.tokens[:count],
            distributions=self.frames[:count],
            dropped_mass=self.dropped_mass[:count],
            is_cut=count < self.num_draft_tokens,
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
        self._max_message_bytes = max_message_bytes
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
        task, drafting = entry.task, entry.task.role_state
        if entry.num_rows:
            if task.fault is None:
                fault = isolated(self._draw, task, drafting, logits[entry.first_row])
                if fault is not None:
                    cut(task, fault)
            drafting.num_rows += 1
            if drafting.num_rows < drafting.num_wanted:
                task.fed.append(drafting.tokens[-1])
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

    def salvage(self, task: Task) -> draft_pb2.Proposal | None:
        """What was drawn before a pass failed: it may have failed on the last candidate."""
        drafting: Drafting = task.role_state
        if not drafting.tokens:
            return None
        return drafting.proposal() if drafting.on_device else self._proposal(drafting)

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
        # By the most that rows may hold: what they do hold tells of the candidates before them, and
        # all continuations are drawn on one noise.
        policy = task.session.opening.row_policy or session_pb2.ROW_POLICY_AUTO
        num_rows = wire.max_draft_rows(
            self._max_message_bytes, policy, answer.distributions[0].vocab_size
        )
        num_outcomes = min(command.num_ahead, num_rows // command.num_draft_tokens)
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
            for kept, token in likely_outcomes(answer, drafting.behind, noise, num_outcomes)
        ]

    def foreseen(self, found: Sequence[tuple[Outlook, Any]], result: Any) -> None:
        """Write proposals drafted ahead into a DraftResult."""
        for outlook, proposal in found:
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


def cut(task: Task, fault: SpecmeshError) -> None:
    """End a proposal before a row that nothing can be drawn from; the passes that are still to come
    are for nothing. Raises the fault where nothing was drawn: it then depends on nothing drawn."""
    drafting: Drafting = task.role_state
    if not drafting.tokens:
        raise fault
    task.fault, task.is_tainted = fault, True
