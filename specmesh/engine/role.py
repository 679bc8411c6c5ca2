"""What draft and target service add to the engine: the meaning of their one working command.

Owns the interface between the engine, which moves tokens through the model, and the roles
(draft_service/proposer.py, target_service/verifier.py), which turn logits into tokens. A role gets
the rows of *all* sessions that a forward pass finished at once, so that it may decide them in one
batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from opentelemetry.util.types import AttributeValue
from torch import Tensor

from specmesh.engine.scheduler import Task
from specmesh.engine.sessions import Session
from specmesh.errors import InternalError, SpecmeshError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finished:
    """A task whose tokens are fed. Its logits are rows [first_row, first_row + num_rows).

    decided: where the device decided already, a tuple of that one outcome; see `Role.advance`.
    """

    task: Task
    first_row: int
    num_rows: int
    decided: tuple[Any] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """An answer's message after which the command stays at work; any other message ends it."""

    body: Any


@dataclass(frozen=True, slots=True)
class Outlook:
    """What may be asked next: `command`, after these tokens behind the prefix of the last one.

    K/V of all tokens but the last was written for that one, where it was not dropped since.
    """

    tokens: tuple[int, ...]
    command: Any


@dataclass(frozen=True, slots=True)
class Wire:
    """Names of a role's messages and spans.

    result_type: DraftResult or TargetResult. kind: the command's field; answer: the result's. join:
    makes one answer of all that a command got, where a role answers in parts.
    """

    side: str
    kind: str
    answer: str
    result_type: type[Any]
    span: str
    forward_span: str
    join: Callable[[Sequence[Any]], Any] | None = None


def isolated(decide: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | SpecmeshError:
    """Decide on one session; what goes wrong is that session's outcome and nobody else's."""
    try:
        return decide(*args, **kwargs)
    except SpecmeshError as error:
        return error
    except Exception as error:
        logger.exception("deciding failed on a bug")
        return InternalError(f"unexpected {type(error).__name__}; see the service's log")


class Role(Protocol):
    """One side of speculative decoding. Called on the engine's worker only."""

    wire: Wire

    def check(self, session: Session, command: Any) -> Any:
        """Parse and check a command; return the task's role_state. Changes nothing.

        Runs before the prefix update. Raises SpecmeshError: that command fails alone.
        """

    def begin(self, task: Task) -> None:
        """Set fed, num_rows and reserve_len, and open the round in the ledger. Cannot fail."""

    def advance(
        self, finished: Sequence[Finished], logits: Tensor
    ) -> list[Any | SpecmeshError | None]:
        """Turn logits, float32 [num_rows, width], into one outcome per finished task.

        An outcome is the answer's message or a Part (the ledger is committed then), None when the
        task wants more tokens fed (`fed` or the confirmed prefix grew), or an error: the engine
        then undoes the command back to its last answer, but for what `salvage` makes of it.
        """

    def salvage(self, task: Task) -> Any | None:
        """The answer to a task that cannot go on, where it can have one all the same."""

    def looks_ahead(self, task: Task) -> bool:
        """Whether an answered task wants to know what may follow it."""

    def outlooks(self, task: Task, answer: Any) -> Sequence[Outlook]:
        """What is worth working ahead for, the best first, once the task was answered so."""

    def foreseen(self, found: Sequence[tuple[Outlook, Any]], result: Any) -> None:
        """Write the answers to outlooks into a result for the peer."""

    def span_attributes(self, task: Task, answer: Any) -> Mapping[str, AttributeValue]:
        """What the role adds to the span of a recorded command."""
