"""What a draft sent: parsed, checked, and drawn again.

Owns the target's distrust of the draft (DESIGN section 5): signs, finiteness, ids, positive
probability of each candidate, and the re-draw of every candidate from the very row received with
it. A draft that samples from something other than what it sends is found here. Must not know the
target's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.reference_rows import NEAR_TIE
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh import wire
from specmesh.engine.sessions import Session
from specmesh.errors import CorruptFrame, InvalidRequest, SpecmeshError
from specmesh.sparse_rows import decode_sparse


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates with the rows they were drawn from; no rows under the coupled rule and greedy.

    rows: a `SparseRows` where all are sparse.
    """

    tokens: tuple[int, ...]
    rows: Sequence[wire.Row]

    @classmethod
    def none(cls) -> Candidates:
        """No candidates."""
        return cls((), ())

    @classmethod
    def parse(cls, session: Session, command: target_pb2.Verify, vocab_size: int) -> Candidates:
        """Check a command's candidates and rows. Raises InvalidRequest or CorruptFrame."""
        tokens = tuple(command.candidates)
        for token in tokens:
            if token >= vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside a vocabulary of {vocab_size}", field="candidates"
                )
        takes_rows = not (session.is_coupled or session.shaper.is_greedy)
        expected = len(tokens) if takes_rows else 0
        if len(command.distributions) != expected:
            raise InvalidRequest(
                f"expected {expected} rows for {len(tokens)} candidates, got "
                f"{len(command.distributions)}",
                field="distributions",
            )
        if not expected:
            return cls(tokens, ())
        rows = decode_sparse(command.distributions, vocab_size)
        if rows is not None and rows.hold(tokens):
            return cls(tokens, rows)
        return cls(tokens, _decode_each(command.distributions, tokens, vocab_size))

    def laws(self) -> list[Tensor | reference.SparseRow]:
        """The rows as they are judged."""
        return [row.law() for row in self.rows]


def _decode_each(
    messages: Sequence[session_pb2.Distribution], tokens: Sequence[int], vocab_size: int
) -> tuple[wire.Row, ...]:
    """Rows of any encoding. Raises CorruptFrame, which names the row that is wrong."""
    rows = []
    for index, (message, token) in enumerate(zip(messages, tokens, strict=True)):
        try:
            row = wire.decode(message, vocab_size)
        except SpecmeshError as error:
            raise CorruptFrame(error.message, field=f"distributions[{index}]") from error
        if row.weight(token) <= 0.0:
            raise CorruptFrame(
                f"candidate {token} has no mass in its row", field=f"distributions[{index}]"
            )
        rows.append(row)
    return tuple(rows)


class RedrawCheck:
    """Draws candidates again from the rows they came with: always sparse rows, some dense ones.

    Not thread-safe: the engine's worker owns it.
    """

    def __init__(self, dense_ratio: float, on_mismatch: Callable[[], None] = lambda: None) -> None:
        """dense_ratio: share of dense rows to check, evenly spread. on_mismatch: counts them."""
        self._dense_ratio = dense_ratio
        self._on_mismatch = on_mismatch
        self._dense_due = 0.0

    def find_mismatch(self, session: Session, candidates: Candidates, base_len: int) -> int | None:
        """Index of the first candidate that its row and noise do not give; None when all agree."""
        rows = candidates.rows
        due = [i for i, row in enumerate(rows) if row.ids is not None or self._is_due()]
        key = (session.seed, base_len, Purpose.PROPOSE)
        for index, drawn in zip(due, _draw_again(rows, due, *key), strict=True):
            token, position = candidates.tokens[index], base_len + index
            if drawn != token and not _are_tied(rows[index], (drawn, token), position, *key):
                self._on_mismatch()
                return index
        return None

    def _is_due(self) -> bool:
        self._dense_due += self._dense_ratio
        if self._dense_due < 1.0:
            return False
        self._dense_due -= 1.0
        return True


def _draw_again(
    rows: Sequence[wire.Row], indices: Sequence[int], seed: int, base_len: int, purpose: Purpose
) -> list[int]:
    """What the noise draws from the rows at these indices; sparse ones in one batch."""
    sparse = [(i, row.weights, row.ids) for i in indices if (row := rows[i]).ids is not None]
    drawn = dict.fromkeys(indices, 0)
    supports = [(weights, ids) for _, weights, ids in sparse]
    positions = [base_len + i for i, _, _ in sparse]
    tokens = reference.races(supports, seed, positions, base_len, purpose)
    drawn.update(zip((i for i, _, _ in sparse), tokens, strict=True))
    for i in indices:
        if rows[i].ids is None:
            drawn[i] = rows[i].draw(seed, base_len + i, base_len, purpose)
    return list(drawn.values())


def _are_tied(
    row: wire.Row,
    tokens: tuple[int, int],
    position: int,
    seed: int,
    base_len: int,
    purpose: Purpose,
) -> bool:
    """Whether two ids finish so close together that rounding may have chosen between them."""
    ids = torch.tensor(sorted(tokens))
    weights = torch.tensor([row.weight(int(each)) for each in ids], dtype=torch.float64)
    times = reference.exponentials(seed, ids, position, base_len, purpose) / weights
    fastest, slowest = float(times.min()), float(times.max())
    return slowest - fastest < NEAR_TIE * slowest
