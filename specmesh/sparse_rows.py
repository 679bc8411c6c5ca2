"""The sparse rows of one command, parsed and checked together.

Owns the quick way in for what a draft usually sends: a few sparse frames. It accepts exactly what
`wire.decode` accepts; where it does not, `wire.decode` says what is wrong, frame by frame. Knows no
sockets, sessions or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from protos.specmesh.v1 import session_pb2
from specmesh import wire

_ID_TYPE = np.dtype("<u4")
_VALUE_TYPES: dict[int, np.dtype[Any]] = {
    wire.SPARSE_F32: np.dtype("<f4"),
    wire.SPARSE_F16: np.dtype("<f2"),
}


class SparseRows(Sequence[wire.Row]):
    """Sparse rows side by side in memory; a `wire.Row` is made when one is asked for. Immutable.

    ids: int32 [total], strictly ascending within each row. weights: float32 [total]. starts: int64
    [num_rows], where each row begins; sizes: int64 [num_rows], at least 1.
    """

    def __init__(
        self,
        vocab_size: int,
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        sizes: npt.NDArray[np.int64],
        encodings: Sequence[session_pb2.Encoding],
    ) -> None:
        self.vocab_size = vocab_size
        self.ids, self.weights, self.sizes = ids, weights, sizes
        self.starts = np.cumsum(sizes) - sizes
        self._encodings = encodings
        self._rows: tuple[wire.Row, ...] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> wire.Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[wire.Row, ...]: ...

    def __getitem__(self, index: int | slice) -> wire.Row | tuple[wire.Row, ...]:
        if self._rows is None:
            self._rows = tuple(map(self._row, range(len(self))))
        return self._rows[index]

    @property
    def max_size(self) -> int:
        """Ids of the widest row."""
        return int(self.sizes.max())

    def part(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and weights of one row: views."""
        start = self.starts[index]
        own = slice(start, start + self.sizes[index])
        return self.ids[own], self.weights[own]

    def hold(self, tokens: Sequence[int]) -> bool:
        """Whether every row gives its token some weight. tokens: one a row."""
        is_own = np.repeat(np.asarray(tokens, dtype=np.int32), self.sizes) == self.ids
        own = np.add.reduceat(np.where(is_own, self.weights, 0.0), self.starts)
        return bool((own > 0.0).all())

    def _row(self, index: int) -> wire.Row:
        ids, weights = self.part(index)
        return wire.Row(
            self.vocab_size,
            torch.from_numpy(weights),
            torch.from_numpy(ids.astype(np.int64)),
            self._encodings[index],
        )


def decode_sparse(
    messages: Sequence[session_pb2.Distribution], vocab_size: int
) -> SparseRows | None:
    """Parse and check frames from a peer that is not trusted.

    None where `wire.decode` would refuse one of them, where one is dense, or where there is none.
    """
    sizes = [_size_of(message, vocab_size) for message in messages]
    if not sizes or 0 in sizes:
        return None
    ids = np.frombuffer(b"".join([message.ids for message in messages]), _ID_TYPE)
    encodings = [message.encoding for message in messages]
    weights = _weights_of(messages, encodings)
    rows = SparseRows(vocab_size, ids.astype(np.int32), weights, np.array(sizes), encodings)
    ascends = ids[1:] > ids[:-1]
    ascends[rows.starts[1:] - 1] = True  # from one row to the next
    highest = np.maximum.reduceat(weights, rows.starts)  # NaN fails every comparison
    is_law = weights.min() >= 0.0 and ((highest > 0.0) & (highest < np.inf)).all()
    return rows if ids.max() < vocab_size and ascends.all() and is_law else None


def _size_of(message: session_pb2.Distribution, vocab_size: int) -> int:
    """Ids of a sparse frame; 0 where it is none, or its lengths contradict each other."""
    value_type = _VALUE_TYPES.get(message.encoding)
    if value_type is None or message.vocab_size != vocab_size:
        return 0
    size = len(message.ids) // _ID_TYPE.itemsize
    fits = len(message.ids) == size * _ID_TYPE.itemsize
    return size if fits and len(message.values) == size * value_type.itemsize else 0


def _weights_of(
    messages: Sequence[session_pb2.Distribution], encodings: Sequence[session_pb2.Encoding]
) -> npt.NDArray[np.float32]:
    if len(set(encodings)) == 1:
        joined = b"".join([message.values for message in messages])
        return np.frombuffer(joined, _VALUE_TYPES[encodings[0]]).astype(np.float32)
    parts = [np.frombuffer(each.values, _VALUE_TYPES[each.encoding]) for each in messages]
    return np.concatenate(parts, dtype=np.float32)
