"""Distribution frames: one row of weights, as sampled, as sent and as judged.

Owns the encodings of DESIGN section 5 and their checks. A `Row` is what the draft draws from *and*
what it serialises: truncation and rounding happen in `draft_row`, before the draw, so the bytes on
the wire are the law that was sampled (exactness rule 1). Knows no sockets, sessions or models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from protos.specmesh.v1 import session_pb2
from specmesh.errors import CorruptFrame, InvalidRequest

MAX_SPARSE_IDS = 1024  # supports up to this many ids count as small
DROPPED_MASS = 0.01  # what RowPolicy auto may drop of a full-support row before the draw

DENSE_F32 = session_pb2.ENCODING_DENSE_F32
DENSE_F16 = session_pb2.ENCODING_DENSE_F16
SPARSE_F32 = session_pb2.ENCODING_SPARSE_F32
SPARSE_F16 = session_pb2.ENCODING_SPARSE_F16

_ID_TYPE = np.dtype("<u4")
_VALUE_TYPES: dict[int, np.dtype[Any]] = {
    DENSE_F32: np.dtype("<f4"),
    DENSE_F16: np.dtype("<f2"),
    SPARSE_F32: np.dtype("<f4"),
    SPARSE_F16: np.dtype("<f2"),
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
            return float(self.weights[token_id])
        return float(reference.SparseRow(self.ids, self.weights)[token_id])

    def law(self) -> Tensor | reference.SparseRow:
        """The row as `kernels.reference.decide` reads it: by its support where it is sparse."""
        return self.weights if self.ids is None else reference.SparseRow(self.ids, self.weights)

    def draw(self, seed: int, position: int, base_len: int, purpose: int) -> int:
        """Draw a token id from exactly these weights: `kernels.reference.race`, keyed as there."""
        return reference.race(self.weights, seed, position, base_len, purpose, self.ids)


def draft_row(weights: Tensor, policy: session_pb2.RowPolicy) -> tuple[Row, float]:
    """Turn shaped draft weights into the row that is drawn from and sent.

    weights: float32 [vocab_size]. A support of at most MAX_SPARSE_IDS ids is kept as it is, in
    float32. Otherwise `policy` decides: auto keeps the smallest set of mass >= 1 - DROPPED_MASS, at
    most MAX_SPARSE_IDS ids, in float16; dense policies keep every id. Returns (row, dropped mass):
    the sum of [q - q']+ between the law before and after, which bounds the acceptance it can cost.
    Raises InvalidRequest for a policy that is not one of RowPolicy's.
    """
    vocab_size = weights.numel()
    sparse = _sparse_if_small(weights)
    if sparse is not None:
        return sparse, 0.0
    if policy == session_pb2.ROW_POLICY_DENSE_F32:
        return Row(vocab_size, weights, None, DENSE_F32), 0.0
    if policy == session_pb2.ROW_POLICY_DENSE_F16:
        rounded = _round_to_half(weights)
        return Row(vocab_size, rounded, None, DENSE_F16), _lost_mass(weights, rounded, 0.0)
    if policy != session_pb2.ROW_POLICY_AUTO:
        raise InvalidRequest(f"unknown row policy {policy}", field="row_policy")
    ids, kept, dropped_mass = reference.truncate(weights, DROPPED_MASS, MAX_SPARSE_IDS)
    rounded = _round_to_half(kept)
    row = Row(vocab_size, rounded, ids, SPARSE_F16)
    return row, dropped_mass + _lost_mass(kept, rounded, dropped_mass)


def target_row(weights: Tensor) -> Row:
    """Wrap shaped target weights, float32 [vocab_size], for the wire: never cut or rounded."""
    sparse = _sparse_if_small(weights)
    return Row(weights.numel(), weights, None, DENSE_F32) if sparse is None else sparse


def encode(row: Row) -> session_pb2.Distribution:
    """Serialise a row. `decode` gives back the same bits."""
    ids = b"" if row.ids is None else row.ids.cpu().numpy().astype(_ID_TYPE).tobytes()
    values = row.weights.cpu().numpy().astype(_VALUE_TYPES[row.encoding], copy=False).tobytes()
    return session_pb2.Distribution(
        encoding=row.encoding, vocab_size=row.vocab_size, ids=ids, values=values
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
    if not data or len(data) % _ID_TYPE.itemsize:
        raise CorruptFrame(f"{len(data)} bytes of ids, expected 4 each and some", field="ids")
    ids = np.frombuffer(data, _ID_TYPE).astype(np.int64)
    if ids[-1] >= vocab_size or not (ids[1:] > ids[:-1]).all():
        raise CorruptFrame(f"ids must ascend strictly below {vocab_size}", field="ids")
    return torch.from_numpy(ids)


def _sparse_if_small(weights: Tensor) -> Row | None:
    # Comparing first: counting truth values is far quicker than counting floats.
    if np.count_nonzero(weights.cpu().numpy() != 0) > MAX_SPARSE_IDS:
        return None
    ids = weights.nonzero()[:, 0]
    return Row(weights.numel(), weights[ids], ids, SPARSE_F32)


def _round_to_half(weights: Tensor) -> Tensor:
    """Round to float16 values, held in float32, after an exact scaling by a power of two.

    The scaling uses float16's range: what is 2**-39 of the largest weight does not vanish.
    """
    values = weights.cpu().numpy()
    _, exponent = math.frexp(values.max())
    scaled = np.ldexp(values, _HALF_EXPONENT - exponent)
    return torch.from_numpy(scaled.astype(np.float16).astype(np.float32))


def _lost_mass(before: Tensor, after: Tensor, dropped_mass: float) -> float:
    """Sum of [q - q']+ over the ids kept, q of mass 1 - dropped_mass, q' of mass 1."""
    law_before = before.cpu().numpy().astype(np.float64)
    law_before *= (1.0 - dropped_mass) / float(reference.total(before))
    law_after = after.numpy().astype(np.float64)
    law_after /= float(reference.total(after))
    law_before -= law_after
    return float(np.maximum(law_before, 0.0, out=law_before).sum())
