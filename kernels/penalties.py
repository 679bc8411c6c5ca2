"""Logit bias and penalties on the device, in place: `specmesh::penalize_`.

The first step of token shaping, before temperature and filters (`kernels/shaping.py`): it touches
the few ids that a prompt, an output, the candidates before a row, or a bias names. One program a
row, so that row i counts candidates 0..i-1 as output. Specification: `reference.penalize`. Must not
know sessions' requests: parameters are tensors, one entry a session.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes scores at few ids. ids: int32 [batch, n], distinct in a row, padded with -1.

    biases: float32 [batch, n], -inf forbids an id. output_counts: int32 [batch, n], occurrences in
    the confirmed output. in_prompt: int32 [batch, n], 1 where the prompt holds the id. repetition
    (1 is off), presence, frequency (0 is off): float32 [batch].
    """

    ids: Tensor
    biases: Tensor
    output_counts: Tensor
    in_prompt: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@triton.jit
def _penalized(score, bias, count, in_prompt, repetition, presence, frequency):
    score = score + bias
    repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
    score = tl.where((in_prompt != 0) | (count > 0), repeated, score)
    return tl.where(count > 0, score - (presence + frequency * count.to(tl.float32)), score)


@triton.jit
def _penalize_kernel(
    logits, first_rows, ids, biases, output_counts, in_prompt, repetitions, presences,
    frequencies, candidates, num_candidates, stride_row, stride_id, vocab_size, num_ids,
    BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (sessions x rows of a session). Row i sees candidates 0..i-1 as output."""
    session, index = tl.program_id(0) // (BUCKET + 1), tl.program_id(0) % (BUCKET + 1)
    if index > tl.load(num_candidates + session):
        return
    first_row = session * (BUCKET + 1)
    if first_rows is not None:
        first_row = tl.load(first_rows + session)
    row = logits + (first_row + index).to(tl.int64) * stride_row
    repetition = tl.load(repetitions + session)
    presence, frequency = tl.load(presences + session), tl.load(frequencies + session)
    for start in range(0, num_ids, BLOCK):
        places = start + tl.arange(0, BLOCK)
        at = session * num_ids + places
        token = tl.load(ids + at, places < num_ids, other=-1)
        known = (token >= 0) & (token < vocab_size)
        count = tl.load(output_counts + at, known, other=0)
        for earlier in range(0, index):
            candidate = tl.load(candidates + session * BUCKET + earlier).to(tl.int32)
            count += (token == candidate).to(tl.int32)
        address = row + token.to(tl.int64) * stride_id
        score = _penalized(
            tl.load(address, known, other=0.0), tl.load(biases + at, known, other=0.0), count,
            tl.load(in_prompt + at, known, other=0), repetition, presence, frequency,
        )  # fmt: skip
        tl.store(address, score, known)
    for place in range(0, index):  # candidates the list does not name, each once
        candidate = tl.load(candidates + session * BUCKET + place).to(tl.int32)
        named = 0
        for start in range(0, num_ids, BLOCK):
            places = start + tl.arange(0, BLOCK)
            token = tl.load(ids + session * num_ids + places, places < num_ids, other=-1)
            named += tl.sum((token == candidate).to(tl.int32), 0)
        count = 1
        for other in range(0, index):
            same = tl.load(candidates + session * BUCKET + other).to(tl.int32) == candidate
            named += (same & (other < place)).to(tl.int32)
            count += (same & (other > place)).to(tl.int32)
        if (named == 0) & (candidate >= 0) & (candidate < vocab_size):
            address = row + candidate.to(tl.int64) * stride_id
            score = tl.load(address)
            score = _penalized(score, 0.0, count, 0, repetition, presence, frequency)
            tl.store(address, score)


def _launch_penalize(
    logits: Tensor, ids: Tensor, biases: Tensor, output_counts: Tensor, in_prompt: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor, candidates: Tensor,
    num_candidates: Tensor, vocab_size: int, first_rows: Tensor | None,
) -> None:  # fmt: skip
    batch, bucket = candidates.shape
    _penalize_kernel[(batch * (bucket + 1),)](
        logits, first_rows, ids, biases, output_counts, in_prompt, repetition, presence, frequency,
        candidates, num_candidates, *logits.stride(), vocab_size, ids.shape[1],
        BUCKET=bucket, BLOCK=512, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


_penalize = torch.library.custom_op(
    "specmesh::penalize_", _launch_penalize, mutates_args=("logits",)
)


@_penalize.register_fake
def _penalize_fake(logits, *_others) -> None:  # mirrors _launch_penalize
    return None


def penalize_(
    logits: Tensor,
    penalties: Penalties,
    candidates: Tensor,
    num_candidates: Tensor,
    vocab_size: int,
    first_rows: Tensor | None = None,
) -> None:
    """Apply bias, then repetition, presence and frequency penalties to `logits`, in place.

    logits: float32 [rows, width] (ValueError otherwise: rounding here would make p depend on the
    dtype of the buffer). candidates, num_candidates, first_rows as in `sampling.Round`: row i of a
    session counts its candidates 0..i-1 as output.
    """
    if logits.dtype is not torch.float32:
        raise ValueError(f"penalties are applied to float32 rows, not {logits.dtype}")
    torch.ops.specmesh.penalize_(
        logits, penalties.ids, penalties.biases, penalties.output_counts, penalties.in_prompt,
        penalties.repetition, penalties.presence, penalties.frequency, candidates, num_candidates,
        vocab_size, first_rows,
    )  # fmt: skip
