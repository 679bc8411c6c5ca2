"""The sparse rows of one command, parsed and checked together.

Owns the quick way in for what a draft usually sends: a few sparse frames. It accepts exactly what
`wire.decode` accepts; where it does not, `wire.decode` says what is wrong, frame by frame. Knows no
sockets, sessions or models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from protos.specmesh.v1 import session_pb2
from specmesh import wire


class SparseRows(Sequence[wire.Row]):
    """Sparse rows side by side in memory; a `wire.Row` is made when one is asked for. Immutable.

    ids: int32 [total], strictly ascending within each row. weights: float32 [total]. ends: where
    each row ends, ascending; no row is empty.
    """

    def __init__(
        self,
        vocab_size: int,
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        ends: Sequence[int],
        encodings: Sequence[session_pb2.Encoding],
    ) -> None:
        self.vocab_size = vocab_size
        self._ids, self._weights = ids, weights
        self._bounds = (0, *ends)
        self._encodings = encodings
        self._rows: tuple[wire.Row, ...] | None = None

    def __len__(self) -> int:
        return len(self._encodings)

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
        return max(end - start for start, end in pairwise(self._bounds))

    def part(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and weights of one row: views."""
        own = slice(self._bounds[index], self._bounds[index + 1])
        return self._ids[own], self._weights[own]

    def hold(self, tokens: Sequence[int]) -> bool:
        """Whether every row gives its token some weight. tokens: one a row."""
        return all(self._weight(index, token) > 0.0 for index, token in enumerate(tokens))

    def _weight(self, index: int, token: int) -> float:
        start, end = self._bounds[index], self._bounds[index + 1]
        place = bisect_left(self._ids, token, start, end)
        return float(self._weights[place]) if place < end and self._ids[place] == token else 0.0

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
    Numpy is asked little: after a pass of the model each of its functions is cold.
    """
    sizes = [_size_of(message, vocab_size) for message in messages]
    if not sizes or 0 in sizes:
        return None
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    ids = np.frombuffer(b"".join([message.ids for message in messages]), wire.ID_TYPE)
    ascends = ids[1:] > ids[:-1]
    for start in starts[1:]:
        ascends[start - 1] = True  # from one row to the next
    if not ascends.all() or any(int(ids[end - 1]) >= vocab_size for end in ends):
        return None
    encodings = [message.encoding for message in messages]
    weights = _weights_of(messages, encodings)
    if not weights.min() >= 0.0:  # NaN fails every comparison
        return None
    # A row has mass, and its sum in float64 is finite, exactly when its largest weight says so.
    if not all(0.0 < top < math.inf for top in np.maximum.reduceat(weights, starts).tolist()):
        return None
    return SparseRows(vocab_size, ids.astype(np.int32), weights, ends, encodings)


def _size_of(message: session_pb2.Distribution, vocab_size: int) -> int:
    """Ids of a sparse frame; 0 where it is none, or its lengths contradict each other."""
    value_type = wire.SPARSE_TYPES.get(message.encoding)
    if value_type is None or message.vocab_size != vocab_size:
        return 0
    size = len(message.ids) // wire.ID_TYPE.itemsize
    fits = len(message.ids) == size * wire.ID_TYPE.itemsize
    return size if fits and len(message.values) == size * value_type.itemsize else 0


def _weights_of(
    messages: Sequence[session_pb2.Distribution], encodings: Sequence[session_pb2.Encoding]
) -> npt.NDArray[np.float32]:
    if len(set(encodings)) == 1:
        joined = b"".join([message.values for message in messages])
        return np.frombuffer(joined, wire.SPARSE_TYPES[encodings[0]]).astype(np.float32)
    parts = [np.frombuffer(each.values, wire.SPARSE_TYPES[each.encoding]) for each in messages]
    return np.concatenate(parts, dtype=np.float32)
