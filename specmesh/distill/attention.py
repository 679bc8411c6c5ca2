"""How queries meet keys in training rows and in one step of the sampler.

Training rows hold several conversations, packed: on a GPU `kernels.attention.attention_packed`,
the project's own forward and backward; on a CPU torch's attention under a mask of the same
meaning. Must not know models.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from specmesh.distill.transformer import Attend, Transformer

Backend = Literal["kernels", "torch"]


def default_backend(device: torch.device) -> Backend:
    """The project's kernels where they are compiled, torch elsewhere."""
    return "kernels" if device.type == "cuda" else "torch"


def positions_of(starts: Tensor) -> Tensor:
    """Position of each token in its own conversation, int64 [rows, length].

    starts: bool [rows, length], True at the first token of a conversation; column 0 is one.
    """
    columns = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    first = torch.where(starts, columns, 0).cummax(1).values
    return columns - first


def packed_attention(starts: Tensor, backend: Backend) -> Attend:
    """Causal attention inside each conversation of packed rows.

    starts: bool [rows, length] as in `positions_of`. The function takes flat tokens, row by row.
    """
    return _by_kernels(starts) if backend == "kernels" else _by_torch(starts)


def _by_kernels(starts: Tensor) -> Attend:
    from kernels.attention import AttentionOptions, Packing, attention_packed

    rows, length = starts.shape
    begins = starts.flatten().nonzero()[:, 0].to(torch.int32)
    ends = torch.tensor([rows * length], dtype=torch.int32, device=starts.device)
    cu_seqlens = torch.cat((begins, ends))
    packing = Packing(cu_seqlens, cu_seqlens, length, length)
    options = AttentionOptions(causal=True)

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_packed(q, k.to(q.dtype), v.to(q.dtype), packing, options)[0]

    return attend


def _by_torch(starts: Tensor) -> Attend:
    rows, length = starts.shape
    segment = starts.long().cumsum(1)
    mask = (segment[:, :, None] == segment[:, None, :]).tril()[:, None]

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def forward_rows(
    model: Transformer, tokens: Tensor, starts: Tensor, backend: Backend, *, is_mixed: bool
) -> Tensor:
    """Final hidden states [rows, length, hidden] of packed rows.

    tokens: integer [rows, length]; starts as in `positions_of`. is_mixed: products in bfloat16.
    """
    attend = packed_attention(starts, backend)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=is_mixed):
        flat = model(tokens.long().flatten(), positions_of(starts).flatten(), attend)
    hidden: Tensor = flat.view(*tokens.shape, -1)
    return hidden


class StepCache:
    """Keys and values of rows that advance together, one token a step.

    keys, values: [layers, rows, kv_heads, length, d]. `attend` writes column `step` (int64 [1] on
    the device, so that a captured graph can replay it) and reads columns [row_starts, step].
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._columns = torch.arange(shape[3], device=device)

    def attend(self, step: Tensor, row_starts: Tensor, num_columns: int) -> Attend:
        """Attention of one step over the first num_columns columns, which hold `step`."""
        columns = self._columns[:num_columns]
        visible = (columns >= row_starts[:, None]) & (columns <= step)
        mask = torch.zeros(visible.shape, dtype=self.keys.dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, float("-inf"))[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer].index_copy_(2, step, k.to(self.keys.dtype)[:, :, None])
            self.values[layer].index_copy_(2, step, v.to(self.keys.dtype)[:, :, None])
            # The heads of a group are the queries of one key/value head: nothing is repeated.
            grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
            out = F.scaled_dot_product_attention(
                grouped,
                self.keys[layer, :, :, :num_columns],
                self.values[layer, :, :, :num_columns],
                attn_mask=mask.expand(-1, 1, grouped.shape[2], -1),
            )
            return out.flatten(1, 2)

        return attend
