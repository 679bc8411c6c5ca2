"""Sparse rows parsed together are what each is alone; what is refused alone is refused there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.specmesh.v1 import session_pb2
from specmesh import wire
from specmesh.errors import CorruptFrame
from specmesh.sparse_rows import decode_sparse

VOCAB = 50

Frame = session_pb2.Distribution


def frame(
    ids: list[int], weights: list[float], encoding: session_pb2.Encoding = wire.SPARSE_F16
) -> Frame:
    """A frame of these numbers, sound or not."""
    value_type = "<f2" if encoding == wire.SPARSE_F16 else "<f4"
    return Frame(
        encoding=encoding,
        vocab_size=VOCAB,
        ids=np.array(ids, dtype="<u4").tobytes(),
        values=np.array(weights, dtype=value_type).tobytes(),
    )


SOUND = [
    frame([3, 7, 49], [0.5, 0.0, 2.0]),
    frame([0], [1.0]),
    frame([2, 3], [0.25, 0.75], wire.SPARSE_F32),
]

UNSOUND = {
    "ids descend": frame([7, 3], [1.0, 1.0]),
    "an id twice": frame([3, 3], [1.0, 1.0]),
    "an id past the vocabulary": frame([3, VOCAB], [1.0, 1.0]),
    "an id far past it": frame([3, 2**31 + 5], [1.0, 1.0]),
    "a negative weight": frame([3, 7], [1.0, -0.5]),
    "a NaN": frame([3, 7], [1.0, float("nan")]),
    "an infinite weight": frame([3, 7], [1.0, float("inf")]),
    "no mass": frame([3, 7], [0.0, 0.0]),
    "no ids": frame([], []),
    "fewer values than ids": frame([3, 7], [1.0]),
    "more values than ids": frame([3], [1.0, 1.0]),
    "half an id": Frame(
        encoding=wire.SPARSE_F16, vocab_size=VOCAB, ids=b"\1\0\0\0\2\0", values=b"\0\x3c"
    ),
    "another vocabulary": Frame(
        encoding=wire.SPARSE_F16, vocab_size=VOCAB + 1, ids=b"\1\0\0\0", values=b"\0\x3c"
    ),
    "an unknown encoding": Frame(
        encoding=99,  # type: ignore[arg-type]  # what a peer of a later version may send
        vocab_size=VOCAB,
        ids=b"\1\0\0\0",
        values=b"\0\x3c",
    ),
}


def assert_same(one: wire.Row, other: wire.Row) -> None:
    """Bit for bit."""
    assert (one.vocab_size, one.encoding) == (other.vocab_size, other.encoding)
    assert one.ids is not None
    assert other.ids is not None
    assert one.ids.dtype == other.ids.dtype
    assert torch.equal(one.ids, other.ids)
    assert one.weights.dtype == other.weights.dtype
    assert torch.equal(one.weights, other.weights)


def test_rows_are_those_of_each_frame_alone() -> None:
    """Parsing together changes no row, whatever mix of encodings comes."""
    for frames in (SOUND, SOUND[:2], SOUND[2:], SOUND[::-1]):
        rows = decode_sparse(frames, VOCAB)
        assert rows is not None
        assert len(rows) == len(frames)
        assert rows.max_size == max(len(each.ids) // 4 for each in frames)
        for index, (row, message) in enumerate(zip(rows, frames, strict=True)):
            alone = wire.decode(message, VOCAB)
            assert_same(row, alone)
            ids, weights = rows.part(index)
            assert ids.tolist() == alone.ids.tolist()  # type: ignore[union-attr]  # sparse
            assert weights.tolist() == alone.weights.tolist()
        assert_same(rows[-1], rows[len(rows) - 1])
        assert len(rows[1:]) == len(frames) - 1


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("what", UNSOUND)
def test_what_is_refused_alone_is_refused_among_others(what: str, place: int) -> None:
    """A faulty frame anywhere: nothing is taken, and `wire.decode` names the fault."""
    with pytest.raises(CorruptFrame):
        wire.decode(UNSOUND[what], VOCAB)
    frames = [*SOUND]
    frames[place] = UNSOUND[what]
    assert decode_sparse(frames, VOCAB) is None


def test_weights_may_add_up_to_more_than_float32_holds() -> None:
    """Each is finite: the row is sound."""
    huge = frame([3, 7], [3e38, 3e38], wire.SPARSE_F32)
    rows = decode_sparse([*SOUND, huge], VOCAB)
    assert rows is not None
    assert_same(rows[-1], wire.decode(huge, VOCAB))


def test_dense_rows_and_none_are_not_taken() -> None:
    """They go the other way in."""
    dense = wire.encode(wire.Row(VOCAB, torch.ones(VOCAB), None, wire.DENSE_F32))
    assert decode_sparse([*SOUND, dense], VOCAB) is None
    assert decode_sparse([], VOCAB) is None


@pytest.mark.parametrize(
    ("tokens", "holds"),
    [
        ((3, 0, 2), True),
        ((49, 0, 3), True),
        ((7, 0, 2), False),  # weight 0 in its row
        ((2, 0, 2), False),  # an id of another row
        ((3, 0, 48), False),  # in no row
    ],
)
def test_a_candidate_needs_mass_in_its_own_row(tokens: tuple[int, ...], holds: bool) -> None:
    """Neither another row's mass nor a weight of zero counts."""
    rows = decode_sparse(SOUND, VOCAB)
    assert rows is not None
    assert rows.hold(tokens) is holds
    assert holds is all(row.weight(token) > 0.0 for row, token in zip(rows, tokens, strict=True))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB + 2), max_size=5),
            st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, float("nan")]), max_size=5),
            st.sampled_from([wire.SPARSE_F16, wire.SPARSE_F32]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_together_and_alone_agree_on_what_is_sound(
    numbers: list[tuple[list[int], list[float], session_pb2.Encoding]],
) -> None:
    """Any frames: taken together exactly if each is taken alone."""
    frames = [frame(*each) for each in numbers]
    alone = []
    for message in frames:
        try:
            alone.append(wire.decode(message, VOCAB))
        except CorruptFrame:
            alone.clear()
            break
    rows = decode_sparse(frames, VOCAB)
    assert (rows is not None) == bool(alone)
    for row, other in zip(rows or (), alone, strict=True):
        assert_same(row, other)
