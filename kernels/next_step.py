"""From drawn tokens to the inputs of the next decode step, on the device: `specmesh::next_step`.

A chain of decode steps (a draft's k candidates, plain decoding of m tokens) runs without the host:
each session's token, position, slot and length for the next step follow from the token just drawn.
Owns that arithmetic alone; one launch of one program. Must not know how tokens are drawn.

Specification: `reference_steps.next_step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs.layers import launches_early
from kernels.early_launch import begin


@triton.jit
def _next_step_kernel(
    tokens, steps_left, context_lens, block_tables, token_ids, positions, slots,
    num_seqs, stride_token, stride_table, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (1)."""
    begin(EARLY)
    seqs = tl.arange(0, BLOCK)
    inside = seqs < num_seqs
    token = tl.load(tokens + seqs * stride_token, inside, other=-1)
    left = tl.load(steps_left + seqs, inside, other=0) - 1
    length = tl.load(context_lens + seqs, inside, other=0)
    live = inside & (left > 0) & (length > 0) & (token >= 0)
    page = tl.load(block_tables + seqs * stride_table + length // PAGE, live, other=0)
    tl.store(steps_left + seqs, left, inside)
    tl.store(context_lens + seqs, tl.where(live, length + 1, length), inside)
    tl.store(token_ids + seqs, tl.where(live, token, 0), inside)
    tl.store(positions + seqs, tl.where(live, length, 0), inside)
    tl.store(slots + seqs, tl.where(live, page * PAGE + length % PAGE, -1), inside)


def _launch_next_step(
    tokens: Tensor, steps_left: Tensor, context_lens: Tensor, block_tables: Tensor,
    token_ids: Tensor, positions: Tensor, slots: Tensor, page_size: int,
) -> None:  # fmt: skip
    num_seqs, early = tokens.shape[0], launches_early(tokens.device)
    _next_step_kernel[(1,)](
        tokens, steps_left, context_lens, block_tables, token_ids, positions, slots,
        num_seqs, tokens.stride(0), block_tables.stride(0),
        PAGE=page_size, BLOCK=max(16, triton.next_power_of_2(num_seqs)), EARLY=early, num_warps=1,
        launch_pdl=early,
    )  # fmt: skip


_next_step = torch.library.custom_op(
    "specmesh::next_step",
    _launch_next_step,
    mutates_args=("steps_left", "context_lens", "token_ids", "positions", "slots"),
)


@_next_step.register_fake
def _next_step_fake(*_arguments) -> None:  # mirrors _launch_next_step
    return None


def next_step(
    tokens: Tensor,
    steps_left: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    step: tuple[Tensor, Tensor, Tensor],
    page_size: int,
) -> None:
    """Write the next decode step of every session: the token just drawn, fed at the end.

    tokens: int32 [num_seqs], any stride, -1 where nothing was drawn. steps_left: int32 [num_seqs],
    the steps a session takes in all, this one included; counted down here. context_lens: int32
    [num_seqs], grows by one for sessions that go on. block_tables: int32 [num_seqs, max_pages].
    step: (token_ids, positions, slots), int32 [num_seqs] each, written; a session that ends gets
    slot -1 and is padding from then on. Raises ValueError on shapes that do not fit.
    """
    shape = tokens.shape
    if any(each.shape != shape for each in (steps_left, context_lens, *step)):
        raise ValueError("every argument has one entry a session")
    if block_tables.shape[0] != shape[0] or block_tables.stride(1) != 1:
        raise ValueError(f"block tables {tuple(block_tables.shape)} do not fit {tuple(shape)}")
    torch.ops.specmesh.next_step(tokens, steps_left, context_lens, block_tables, *step, page_size)
