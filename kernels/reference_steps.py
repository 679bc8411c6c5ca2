"""The specification of what moves a chain of decode steps on: `next_step`."""

from __future__ import annotations

import torch
from torch import Tensor


def next_step(
    tokens: Tensor, steps_left: Tensor, context_lens: Tensor, block_tables: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(steps_left, context_lens, token_ids, positions, slots) after `tokens` were drawn.

    All int32 [num_seqs], new tensors. A session goes on while steps remain, it has a context and a
    token was drawn: its token sits at position context_len, in page context_len // page_size of its
    table. Others get token 0, position 0 and slot -1, and keep their length.
    """
    left = steps_left - 1
    live = (left > 0) & (context_lens > 0) & (tokens >= 0)
    nothing = torch.zeros_like(tokens)
    index = torch.where(live, context_lens // page_size, nothing)
    page = block_tables.gather(1, index[:, None].long())[:, 0]
    slots = page * page_size + context_lens % page_size
    return (
        left,
        torch.where(live, context_lens + 1, context_lens),
        torch.where(live, tokens, nothing),
        torch.where(live, context_lens, nothing),
        torch.where(live, slots, nothing - 1),
    )
