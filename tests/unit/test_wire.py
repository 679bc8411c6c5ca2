"""Distribution frames: the same bits on both sides, exact truncation, no corrupt frame passes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2
from specmesh.errors import CorruptFrame, InvalidRequest
from specmesh.wire import (
    DENSE_F16,
    DENSE_F32,
    DROPPED_MASS,
    MAX_SPARSE_IDS,
    SPARSE_F16,
    SPARSE_F32,
    Row,
    cut,
    decode,
    dropped_masses,
    encode,
    target_row,
)

AUTO = session_pb2.ROW_POLICY_AUTO
POLICIES = [AUTO, session_pb2.ROW_POLICY_DENSE_F32, session_pb2.ROW_POLICY_DENSE_F16]
VOCAB_SIZE = 5000


def weights_of(seed: int, scale: float, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """A shaped row with full support: exp of normal logits, the largest weight 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(vocab_size, generator=generator)
    return torch.exp(logits - logits.max())


def draft_row(weights: Tensor, policy: int) -> tuple[Row, float]:
    """A draft's row and the mass it dropped."""
    made = cut(weights, policy)
    return made.row, dropped_masses([made])[0]


def law(weights: Tensor) -> Tensor:
    return weights.double() / weights.double().sum()


def assert_same_bits(found: Row, row: Row) -> None:
    assert (found.vocab_size, found.encoding) == (row.vocab_size, row.encoding)
    assert torch.equal(found.weights.view(torch.int32), row.weights.view(torch.int32))
    assert (found.ids is None) == (row.ids is None)
    if row.ids is not None:
        assert found.ids is not None
        assert torch.equal(found.ids, row.ids)


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_decode_gives_the_bits_that_were_drawn_from(policy: int, scale: float) -> None:
    """encode then decode is the identity, and both sides draw the same tokens."""
    row, _ = draft_row(weights_of(1, scale), policy)
    found = decode(session_pb2.Distribution.FromString(encode(row).SerializeToString()), VOCAB_SIZE)
    assert_same_bits(found, row)
    for position in range(20):
        key = (3, position, 1, Purpose.PROPOSE)
        assert row.draw(*key) == found.draw(*key) == reference.race(found.dense(), *key)
    assert float(reference.total(found.dense())) == float(reference.total(row.weights))


@pytest.mark.parametrize("policy", POLICIES)
def test_small_supports_are_sent_sparse_and_untouched(policy: int) -> None:
    """Up to 1024 ids: sparse float32, every bit kept, nothing dropped, under any policy."""
    weights = torch.zeros(VOCAB_SIZE)
    weights[::5] = weights_of(2, 3.0)[::5]
    assert int((weights > 0).sum()) <= MAX_SPARSE_IDS
    row, dropped = draft_row(weights, policy)
    assert row.encoding == SPARSE_F32
    assert dropped == 0.0
    assert torch.equal(row.dense(), weights)
    assert_same_bits(decode(encode(row), VOCAB_SIZE), row)


def test_encodings_follow_the_policy() -> None:
    """Full-support rows: auto truncates to float16, dense policies keep every id."""
    weights = weights_of(3, 2.0)
    encodings = [draft_row(weights, policy)[0].encoding for policy in POLICIES]
    assert encodings == [SPARSE_F16, DENSE_F32, DENSE_F16]
    dense, dropped = draft_row(weights, session_pb2.ROW_POLICY_DENSE_F32)
    assert torch.equal(dense.dense(), weights)
    assert dropped == 0.0
    with pytest.raises(InvalidRequest, match="row_policy"):
        draft_row(weights, 9)


def test_target_rows_are_never_cut_or_rounded() -> None:
    """Dense or sparse float32, whichever the support asks for, with the same bits and total."""
    full = weights_of(4, 2.0)
    few = torch.where(full >= full.topk(50).values[-1], full, 0.0)
    for weights, encoding in ((full, DENSE_F32), (few, SPARSE_F32)):
        found = decode(encode(target_row(weights)), VOCAB_SIZE)
        assert found.encoding == encoding
        assert torch.equal(found.dense(), weights)
        assert float(reference.total(found.weights)) == float(reference.total(weights))


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0, 4.0, 8.0])
def test_truncation_keeps_the_smallest_set_of_enough_mass(scale: float) -> None:
    """Kept mass >= 1 - eps with no spare id, or exactly the cap; kept ids are the heaviest."""
    weights = weights_of(5, scale)
    ids, kept, dropped = reference.truncate(weights, DROPPED_MASS, MAX_SPARSE_IDS)
    probs = law(weights)
    mass = float(probs[ids].sum())
    assert dropped == pytest.approx(1 - mass, abs=1e-12)
    assert float(kept.min()) >= float(weights[~torch.isin(torch.arange(VOCAB_SIZE), ids)].max())
    if ids.numel() < MAX_SPARSE_IDS:
        assert mass >= 1 - DROPPED_MASS
    else:
        assert ids.numel() == MAX_SPARSE_IDS
    assert mass - float(probs[ids].min()) < 1 - DROPPED_MASS


def test_truncation_breaks_ties_by_lowest_id() -> None:
    """Equal weights at the cut: the set is a function of the row, not of a sort."""
    weights = torch.ones(3000)
    weights[2500] = 2.0
    ids, _, _ = reference.truncate(weights, DROPPED_MASS, MAX_SPARSE_IDS)
    assert ids.tolist() == [*range(MAX_SPARSE_IDS - 1), 2500]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    draft_scale=st.floats(0.1, 9.0),
    target_scale=st.floats(0.1, 9.0),
    mix=st.floats(0.0, 1.0),
    policy=st.sampled_from(POLICIES),
)
def test_rounding_and_truncation_cost_at_most_the_dropped_mass(
    seed: int, draft_scale: float, target_scale: float, mix: float, policy: int
) -> None:
    """A - A' <= delta: acceptance lost by any policy is bounded by what the row reports."""
    draft = weights_of(seed, draft_scale, 2000)
    target = law(weights_of(seed + 1, target_scale, 2000)) * mix + law(draft) * (1 - mix)
    row, dropped = draft_row(draft, policy)
    before = float(torch.minimum(target, law(draft)).sum())
    after = float(torch.minimum(target, law(row.dense())).sum())
    assert before - after <= dropped + 1e-12
    variation = float((law(draft) - law(row.dense())).clamp(min=0).sum())
    assert dropped == pytest.approx(variation, abs=1e-12)


def test_rounding_counts_where_truncation_drops_next_to_nothing() -> None:
    """Two ids hold nearly all mass: float16 rounding moves more of it than truncation drops."""
    weights = torch.full((2000,), 1e-8)
    weights[:3] = torch.tensor([1.0, 0.5001, 0.2503])
    row, dropped = draft_row(weights, AUTO)
    assert row.ids is not None
    assert row.ids.tolist() == [0, 1, 2]
    variation = float((law(weights) - law(row.dense())).clamp(min=0).sum())
    assert dropped == pytest.approx(variation, rel=1e-6)
    assert variation > 2 * (1.0 - float(law(weights)[:3].sum()))


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30])
def test_float16_rounding_does_not_depend_on_the_scale_of_a_row(factor: float) -> None:
    """Rows are scaled into float16's range by a power of two: no overflow, little underflow."""
    weights = weights_of(6, 2.0) * factor
    row, dropped = draft_row(weights, session_pb2.ROW_POLICY_DENSE_F16)
    assert bool((row.weights > 0).all())
    assert dropped < 2.0**-11
    relative = law(row.weights) / law(weights) - 1
    assert float(relative.abs().max()) < 2.0**-9


def test_weight_looks_ids_up() -> None:
    """In and outside the support, at both ends, sparse and dense; past the vocabulary it raises."""
    weights = torch.zeros(VOCAB_SIZE)
    weights[[0, 7, VOCAB_SIZE - 1]] = torch.tensor([0.5, 1.0, 0.25])
    for row in (target_row(weights), Row(VOCAB_SIZE, weights, None, DENSE_F32)):
        assert [row.weight(i) for i in (0, 6, 7, 8, VOCAB_SIZE - 1)] == [0.5, 0.0, 1.0, 0.0, 0.25]
        for outside in (-1, VOCAB_SIZE):
            with pytest.raises(IndexError):
                row.weight(outside)


def frame(**changes: object) -> session_pb2.Distribution:
    """A good sparse frame over 10 ids with some fields replaced."""
    fields: dict[str, object] = {
        "encoding": SPARSE_F32,
        "vocab_size": 10,
        "ids": np.array([1, 4, 9], "<u4").tobytes(),
        "values": np.array([1.0, 0.5, 0.25], "<f4").tobytes(),
    }
    return session_pb2.Distribution(**(fields | changes))  # type: ignore[arg-type]  # fields by name


def floats(*values: float, count: int | None = None) -> bytes:
    return np.array(values * (count or 1), "<f4").tobytes()


def ids(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def test_the_good_frame_is_good() -> None:
    """The frame that the corrupt ones below are made from decodes."""
    assert decode(frame(), 10).dense().tolist() == [0, 1.0, 0, 0, 0.5, 0, 0, 0, 0, 0.25]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"encoding": 0}, "encoding"),
        ({"encoding": 77}, "encoding"),
        ({"vocab_size": 11}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 2**32 - 1}, "vocab_size"),
        ({"ids": b""}, "ids"),
        ({"ids": ids(1, 4, 9)[:-1]}, "ids"),
        ({"ids": ids(1, 4, 4)}, "ids"),
        ({"ids": ids(4, 1, 9)}, "ids"),
        ({"ids": ids(1, 4, 10)}, "ids"),
        ({"ids": ids(1, 2**32 - 1, 9)}, "ids"),
        ({"ids": ids(1, 4)}, "values"),
        ({"values": b""}, "values"),
        ({"values": floats(1.0, 0.5)}, "values"),
        ({"values": floats(1.0, 0.5, 0.25)[:-1]}, "values"),
        ({"values": floats(1.0, -0.5, 0.25)}, "values"),
        ({"values": floats(1.0, float("nan"), 0.25)}, "values"),
        ({"values": floats(1.0, float("inf"), 0.25)}, "values"),
        ({"values": floats(0.0, 0.0, 0.0)}, "values"),
        ({"encoding": SPARSE_F16}, "values"),
        ({"encoding": DENSE_F32, "values": floats(1.0, count=10)}, "ids"),
        ({"encoding": DENSE_F32, "ids": b"", "values": floats(1.0, count=9)}, "values"),
        ({"encoding": DENSE_F16, "ids": b"", "values": floats(1.0, count=10)}, "values"),
        ({"encoding": DENSE_F32, "ids": b"", "values": floats(0.0, count=10)}, "values"),
    ],
)
def test_corrupt_frames_are_refused_and_named(changes: dict[str, object], field: str) -> None:
    """Each way to lie in a frame raises CorruptFrame with the field to blame."""
    with pytest.raises(CorruptFrame) as caught:
        decode(frame(**changes), 10)
    assert caught.value.field == field


@settings(deadline=None, max_examples=400)
@given(
    encoding=st.integers(-1, 6),
    vocab_size=st.integers(0, 12),
    id_bytes=st.binary(max_size=24),
    value_bytes=st.one_of(
        st.binary(max_size=48),
        st.lists(st.floats(0, 1, width=16), max_size=12).map(
            lambda values: struct.pack(f"<{len(values)}e", *values)
        ),
        st.lists(st.floats(0, 1, width=32), max_size=12).map(
            lambda values: struct.pack(f"<{len(values)}f", *values)
        ),
    ),
    expected=st.integers(1, 12),
)
def test_decode_never_fails_otherwise(
    encoding: int, vocab_size: int, id_bytes: bytes, value_bytes: bytes, expected: int
) -> None:
    """Any bytes: CorruptFrame or a row that is a law and re-encodes to the same bytes."""
    message = session_pb2.Distribution(
        encoding=encoding,  # type: ignore[arg-type]  # proto3 enums are open: any int travels
        vocab_size=vocab_size,
        ids=id_bytes,
        values=value_bytes,
    )
    try:
        row = decode(message, expected)
    except CorruptFrame:
        return
    dense = row.dense()
    assert dense.shape == (expected,)
    assert bool((dense >= 0).all())
    assert 0 < float(dense.sum()) < float("inf")
    assert 0 <= row.draw(1, 2, 1, Purpose.PROPOSE) < expected
    assert encode(row) == message


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_flipped_bit_never_escapes(data: st.DataObject) -> None:
    """A valid frame with one bit flipped decodes to a law or raises CorruptFrame, nothing else."""
    row, _ = draft_row(weights_of(7, 2.0, 1500), AUTO)
    message = encode(row)
    field = data.draw(st.sampled_from(["ids", "values"]))
    raw = bytearray(getattr(message, field))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    setattr(message, field, bytes(raw))
    try:
        found = decode(message, 1500)
    except CorruptFrame:
        return
    assert bool(torch.isfinite(found.dense()).all())
    assert 0 <= found.draw(1, 2, 1, Purpose.PROPOSE) < 1500


def test_dropped_masses_of_a_round_are_those_of_its_rows() -> None:
    """Rows of different supports and encodings in one go; what lost nothing says 0."""
    full, peaked = weights_of(8, 1.0), weights_of(9, 9.0)
    few = torch.where(full >= full.topk(50).values[-1], full, 0.0)
    dense = session_pb2.ROW_POLICY_DENSE_F16
    made = [cut(full, AUTO), cut(few, AUTO), cut(peaked, AUTO), cut(full, dense)]
    found = dropped_masses(made)
    assert found == pytest.approx([dropped_masses([each])[0] for each in made], rel=1e-12)
    assert found[0] > DROPPED_MASS  # the cap binds
    assert found[1] == 0.0
    assert 0.0 < found[3] < 2.0**-10
    assert dropped_masses([]) == []


def test_a_full_row_whose_support_just_fits_is_kept_as_it_is() -> None:
    """MAX_SPARSE_IDS ids of any weight are a small support: float32, nothing dropped."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.zeros(VOCAB_SIZE)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:MAX_SPARSE_IDS]
    weights[ids] = torch.rand(MAX_SPARSE_IDS, generator=generator) + 0.1
    made = cut(weights, AUTO)
    assert (made.row.encoding, made.before) == (SPARSE_F32, None)
    assert torch.equal(made.row.dense(), weights)
    weights[int((weights == 0).nonzero()[0, 0])] = 1e-6
    assert cut(weights, AUTO).row.encoding == SPARSE_F16


@pytest.mark.parametrize("first", [0, MAX_SPARSE_IDS, VOCAB_SIZE - MAX_SPARSE_IDS - 1])
def test_a_support_is_counted_wherever_it_lies(first: int) -> None:
    """MAX_SPARSE_IDS ids side by side are a small support, one more is not."""
    weights = torch.zeros(VOCAB_SIZE)
    weights[first : first + MAX_SPARSE_IDS] = 0.5
    assert target_row(weights).encoding == SPARSE_F32
    weights[first + MAX_SPARSE_IDS] = 0.5
    assert target_row(weights).encoding == DENSE_F32
