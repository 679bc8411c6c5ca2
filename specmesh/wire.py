"""Distribution frames: one row of weights, as sampled, as sent and as judged.

Owns the encodings of DESIGN section 5 and their checks. A `Row` is what the draft draws from *and*
what it serialises: truncation and rounding happen in `draft_row`, before the draw, so the bytes on
the wire are the law that was sampled (exactness rule 1). Knows no sockets, sessions or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import reference
from protos.specmesh.v1 import session_pb2
from specmesh.errors import CorruptFrame, InvalidRequest

MAX_SPARSE_IDS = 1024  # supports up to this many ids count as small
REST_BYTES = 1 << 16  # of a message with rows, for all else in it
ROW_OVERHEAD = 64  # bytes of a row beside its ids and values, its token included
DROPPED_MASS = 0.01  # what RowPolicy auto may drop of a full-support row before the draw

DENSE_F32 = session_pb2.ENCODING_DENSE_F32
DENSE_F16 = session_pb2.ENCODING_DENSE_F16
SPARSE_F32 = session_pb2.ENCODING_SPARSE_F32
SPARSE_F16 = session_pb2.ENCODING_SPARSE_F16

ID_TYPE = np.dtype("<u4")
_SIGNED_ID_TYPE = np.dtype("<i4")  # the same bytes: no id has the sign bit
SPARSE_TYPES: dict[int, np.dtype[Any]] = {
    SPARSE_F32: np.dtype("<f4"),
    SPARSE_F16: np.dtype("<f2"),
}
_VALUE_TYPES: dict[int, np.dtype[Any]] = {
    DENSE_F32: np.dtype("<f4"),
    DENSE_F16: np.dtype("<f2"),
    **SPARSE_TYPES,
}
_HALF_EXPONENT = 15  # the largest weight is scaled into [2**14, 2**15), below float16's 65504


@dataclass(frozen=True, slots=True)
class Row:
    """One distribution as it is on the wire. Its law is w / sum(w), summed over ascending ids.

    weights: float32 [vocab_size] when ids is None, else [num_ids]; finite, >= 0, some positive.
    ids: int64 [num_ids], strictly ascending, or None for a dense row. encoding: an `Encoding` of
    session.proto; weights of a float16 encoding are float16 values held in float32.
    """

    vocab_size: int
    weights: Tensor
    ids: Tensor | None
    encoding: session_pb2.Encoding

    def dense(self) -> Tensor:
        """Weights over the whole vocabulary, float32 [vocab_size]; shares a dense row's memory."""
        if self.ids is None:
            return self.weights
        return torch.zeros(self.vocab_size).index_copy_(0, self.ids, self.weights)

    def weight(self, token_id: int) -> float:
        """Weight of one token id, 0 outside the support. Raises IndexError past the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside a vocabulary of {self.vocab_size}")
        if self.ids is None:
            return float(self.weights.numpy()[token_id])
        return reference.SparseRow(self.ids, self.weights)[token_id]

    def law(self) -> Tensor | reference.SparseRow:
        """The row as `kernels.reference.decide` reads it: by its support where it is sparse."""
        return self.weights if self.ids is None else reference.SparseRow(self.ids, self.weights)

    def draw(self, seed: int, position: int, base_len: int, purpose: int) -> int:
        """Draw a token id from exactly these weights: `kernels.reference.race`, keyed as there."""
        return reference.race(self.weights, seed, position, base_len, purpose, self.ids)


@dataclass(frozen=True, slots=True)
class Cut:
    """A draft's row as it is drawn from and sent, and what it was made from.

    before: float32, weights at the row's ids before rounding; None where nothing was lost.
    truncated_mass: share of the law that truncation left out.
    """

    row: Row
    before: Tensor | None = None
    truncated_mass: float = 0.0


def cut(weights: Tensor, policy: session_pb2.RowPolicy) -> Cut:
    """Turn shaped draft weights into the row that is drawn from and sent.

    weights: float32 [vocab_size]. A support of at most MAX_SPARSE_IDS ids is kept as it is, in
    float32. Otherwise `policy` decides: auto keeps the smallest set of mass >= 1 - DROPPED_MASS, at
    most MAX_SPARSE_IDS ids, in float16; dense policies keep every id.
    Raises InvalidRequest for a policy that is not one of RowPolicy's.
    """
    vocab_size = weights.numel()
    if policy == session_pb2.ROW_POLICY_AUTO:
        ids, kept, truncated_mass = reference.truncate(weights, DROPPED_MASS, MAX_SPARSE_IDS)
        # A full row that left mass out has a large support: it need not be counted.
        is_large = ids.numel() == MAX_SPARSE_IDS and truncated_mass > 0.0
        sparse = None if is_large else _sparse_if_small(weights)
        if sparse is None:
            row = Row(vocab_size, _round_to_half(kept), ids, SPARSE_F16)
            return Cut(row, kept, truncated_mass)
        return Cut(sparse)
    sparse = _sparse_if_small(weights)
    if sparse is not None:
        return Cut(sparse)
    if policy == session_pb2.ROW_POLICY_DENSE_F32:
        return Cut(Row(vocab_size, weights, None, DENSE_F32))
    if policy == session_pb2.ROW_POLICY_DENSE_F16:
        return Cut(Row(vocab_size, _round_to_half(weights), None, DENSE_F16), weights)
    raise InvalidRequest(f"unknown row policy {policy}", field="row_policy")


def dropped_masses(cuts: Sequence[Cut]) -> list[float]:
    """Per row the sum of [q - q']+ between the law before and after: what acceptance it can cost.

    All rows in one go, as it is only reported: off the path of the draws.
    """
    lossy = [(each.before, each) for each in cuts if each.before is not None]
    lost = iter(_lost_masses(lossy) if lossy else ())
    return [0.0 if each.before is None else each.truncated_mass + next(lost) for each in cuts]


def target_row(weights: Tensor) -> Row:
    """Wrap shaped target weights, float32 [vocab_size], for the wire: never cut or rounded."""
    sparse = _sparse_if_small(weights)
    return Row(weights.numel(), weights, None, DENSE_F32) if sparse is None else sparse


def max_dense_rows(message_bytes: int, vocab_size: int, copies: int = 1) -> int:
    """Rows of a target that surely fit into one message, however full they are.

    copies: 2 where the raw log-probabilities of each row come with it.
    """
    return max(0, message_bytes - REST_BYTES) // (
        _VALUE_TYPES[DENSE_F32].itemsize * vocab_size * copies
    )


def max_sparse_rows(message_bytes: int) -> int:
    """Sparse rows that surely fit into one message, of however many ids."""
    return max_draft_rows(message_bytes, session_pb2.ROW_POLICY_AUTO, 0)


def max_draft_rows(message_bytes: int, policy: session_pb2.RowPolicy, vocab_size: int) -> int:
    """Rows of a draft that surely fit into one message, whatever `cut` makes of them."""
    row_bytes = MAX_SPARSE_IDS * (ID_TYPE.itemsize + 4)
    if policy != session_pb2.ROW_POLICY_AUTO:
        row_bytes = max(row_bytes, _VALUE_TYPES[DENSE_F32].itemsize * vocab_size)
    return max(0, message_bytes - REST_BYTES) // (row_bytes + ROW_OVERHEAD)


def encode(row: Row) -> session_pb2.Distribution:
    """Serialise a row. `decode` gives back the same bits."""
    ids = b"" if row.ids is None else row.ids.numpy().astype(ID_TYPE).tobytes()
    values = row.weights.numpy().astype(_VALUE_TYPES[row.encoding], copy=False).tobytes()
    return session_pb2.Distribution(
        encoding=row.encoding, vocab_size=row.vocab_size, ids=ids, values=values
    )


def sparse_frame(
    ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32], vocab_size: int, *, is_half: bool
) -> session_pb2.Distribution:
    """Serialise a row that a device drew from: ids ascending, weights float16 values if is_half."""
    encoding = SPARSE_F16 if is_half else SPARSE_F32
    return session_pb2.Distribution(
        encoding=encoding,
        vocab_size=vocab_size,
        ids=ids.astype(_SIGNED_ID_TYPE, copy=False).tobytes(),
        values=weights.astype(_VALUE_TYPES[encoding], copy=False).tobytes(),
    )


def decode(message: session_pb2.Distribution, vocab_size: int) -> Row:
    """Parse and check one frame from a peer that is not trusted.

    Raises CorruptFrame, and nothing else, on an unknown encoding, another vocabulary, lengths that
    contradict each other, ids that do not ascend or pass the vocabulary, values that are negative,
    infinite or NaN, and a row without mass.
    """
    value_type = _VALUE_TYPES.get(message.encoding)
    if value_type is None:
        raise CorruptFrame(f"unknown encoding {message.encoding}", field="encoding")
    if message.vocab_size != vocab_size:
        raise CorruptFrame(
            f"row over {message.vocab_size} ids, the session has {vocab_size}", field="vocab_size"
        )
    ids = None
    num_values = vocab_size
    if message.encoding in (SPARSE_F32, SPARSE_F16):
        ids = _decode_ids(message.ids, vocab_size)
        num_values = ids.numel()
    elif message.ids:
        raise CorruptFrame("a dense row carries no ids", field="ids")
    if len(message.values) != num_values * value_type.itemsize:
        raise CorruptFrame(
            f"{len(message.values)} bytes of values, expected {num_values} x {value_type.itemsize}",
            field="values",
        )
    # The one copy: the message's bytes are read-only and may be unaligned.
    weights = np.frombuffer(message.values, value_type).astype(np.float32)
    lowest, highest = float(weights.min()), float(weights.max())
    if not (lowest >= 0.0 and 0.0 < highest < float("inf")):  # NaN fails every comparison
        raise CorruptFrame(
            f"weights in [{lowest}, {highest}] are no law: need finite, >= 0 and some > 0",
            field="values",
        )
    return Row(vocab_size, torch.from_numpy(weights), ids, message.encoding)


def _decode_ids(data: bytes, vocab_size: int) -> Tensor:
    if not data or len(data) % ID_TYPE.itemsize:
        raise CorruptFrame(f"{len(data)} bytes of ids, expected 4 each and some", field="ids")
    ids = np.frombuffer(data, ID_TYPE).astype(np.int64)
    if ids[-1] >= vocab_size or not (ids[1:] > ids[:-1]).all():
        raise CorruptFrame(f"ids must ascend strictly below {vocab_size}", field="ids")
    return torch.from_numpy(ids)


def _sparse_if_small(weights: Tensor) -> Row | None:
    # Comparing first: counting truth values is far quicker than counting floats. A part that has
    # too many ids alone spares the rest.
    values = weights.numpy()
    if np.count_nonzero(values[: 2 * MAX_SPARSE_IDS] != 0) > MAX_SPARSE_IDS:
        return None
    if np.count_nonzero(values != 0) > MAX_SPARSE_IDS:
        return None
    ids = weights.nonzero()[:, 0]
    return Row(weights.numel(), weights[ids], ids, SPARSE_F32)


def _round_to_half(weights: Tensor) -> Tensor:
    """Round to float16 values, held in float32, after an exact scaling by a power of two.

    The scaling uses float16's range: what is 2**-39 of the largest weight does not vanish.
    """
    values = weights.numpy()
    power = _HALF_EXPONENT - math.frexp(values.max())[1]
    is_normal = -126 <= power <= 127  # as a float32 factor; else a subnormal largest weight
    scaled = values * np.float32(2.0**power) if is_normal else np.ldexp(values, power)
    return torch.from_numpy(scaled.astype(np.float16).astype(np.float32))


def _lost_masses(lossy: Sequence[tuple[Tensor, Cut]]) -> list[float]:
    """Sum of [q - q']+ over the ids kept, q of mass 1 - truncated_mass, q' of mass 1."""
    sizes = [before.numel() for before, _ in lossy]
    starts = np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.int64)
    before = np.concatenate([each.numpy() for each, _ in lossy], dtype=np.float64)
    after = np.concatenate([each.row.weights.numpy() for _, each in lossy], dtype=np.float64)
    kept_mass = np.array([1.0 - each.truncated_mass for _, each in lossy])
    before *= np.repeat(kept_mass / np.add.reduceat(before, starts), sizes)
    after *= np.repeat(1.0 / np.add.reduceat(after, starts), sizes)
    before -= after
    lost: list[float] = np.add.reduceat(np.maximum(before, 0.0, out=before), starts).tolist()
    return lost
