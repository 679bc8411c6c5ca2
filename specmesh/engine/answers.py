"""Answers to working commands, whole or in parts.

Owns what an answer says beside the role's own message: key, boundaries, times. A part says what
happened since the part before it; a repeat of the command gets all of them joined. Must not know
sessions' rules or links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos.specmesh.v1 import session_pb2
from specmesh.engine.role import Wire
from specmesh.engine.scheduler import Spent
from specmesh.ledger import Boundaries


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One result of a command: its message (DraftResult or TargetResult), and what that says."""

    wire: Wire
    before: Boundaries
    after: Boundaries
    spent: Spent
    result: Any

    @classmethod
    def to(
        cls,
        command: Any,
        wire: Wire,
        before: Boundaries,
        after: Boundaries,
        spent: Spent,
        body: Any,
    ) -> Answer:
        """Answer a command with the role's message."""
        result = wire.result_type(
            session_id=command.session_id,
            epoch=command.epoch,
            round=command.round,
            before=boundaries_message(before),
            after=boundaries_message(after),
            timing=session_pb2.StepTiming(
                queue_us=spent.queue_ns // 1000,
                forward_us=spent.forward_ns // 1000,
                total_us=spent.total_ns // 1000,
                batch_size=spent.batch_size,
                batch_rows=spent.batch_rows,
                cached_tokens=spent.cached_tokens,
                num_steps=spent.num_steps,
            ),
            **{wire.answer: body},
        )
        return cls(wire, before, after, spent, result)


@dataclass(frozen=True, slots=True)
class Answered:
    """A command and everything it was answered with, at least once."""

    command: Any
    answers: Sequence[Answer]

    def result(self) -> Any:
        """The answer to a repeat: the last one, with what the ones before it said."""
        last = self.answers[-1]
        if len(self.answers) == 1:
            return last.result
        wire = last.wire
        assert wire.join is not None, f"{wire.kind} is answered at once"
        whole = wire.result_type()
        whole.CopyFrom(last.result)
        bodies = [getattr(answer.result, wire.answer) for answer in self.answers]
        getattr(whole, wire.answer).CopyFrom(wire.join(bodies))
        return whole

    def __repr__(self) -> str:
        return repr((self.command, self.result()))


def boundaries_message(boundaries: Boundaries) -> session_pb2.Boundaries:
    """A ledger's boundaries as they travel."""
    return session_pb2.Boundaries(
        confirmed_len=boundaries.confirmed_len,
        kv_len=boundaries.kv_len,
        allocated_len=boundaries.allocated_len,
    )
