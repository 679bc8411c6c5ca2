"""The memory of keys and values: one paged pool per layer.

Owns tensors only. Must not know which page belongs to whom: `block_pool.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmesh.engine.families import ModelSpec

PAGE_SIZE = 64  # tokens; DESIGN section 5
MAX_SINGLE = 4  # pages copied one by one; more go together, with ids sent to the device first


class KVCache:
    """Pools of a model: per layer one tensor [2, num_pages, num_kv_heads, page_size, head_dim].

    Index 0 of the first dimension holds keys (rotated), index 1 values. Memory is zero at first
    and stays finite: a masked slot is multiplied by probability 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        *,
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (2, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        self.pools = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)
        ]

    def keys(self, layer_index: int) -> Tensor:
        """Keys of a layer, [num_pages, num_kv_heads, page_size, head_dim]; a view."""
        return self.pools[layer_index][0]

    def values(self, layer_index: int) -> Tensor:
        """Values of a layer, [num_pages, num_kv_heads, page_size, head_dim]; a view."""
        return self.pools[layer_index][1]

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, (source, copy) each, keys and values in every layer, as if all at once: no
        page is written that another pair reads, or written twice."""
        if len(pairs) <= MAX_SINGLE:  # ids as arguments of launches: nothing waits for the device
            for pool in self.pools:
                for source, copy in pairs:
                    pool[:, copy].copy_(pool[:, source])
            return
        sources, copies = torch.tensor(pairs, device=self.pools[0].device).unbind(1)
        for pool in self.pools:
            pool.index_copy_(1, copies, pool.index_select(1, sources))

    @torch.inference_mode()
    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer, so that nothing of an earlier owner (a NaN) can be read."""
        for pool in self.pools:
            for page in pages:
                pool[:, page].zero_()


def page_bytes(spec: ModelSpec, page_size: int = PAGE_SIZE, dtype_bytes: int = 4) -> int:
    """Bytes of one page across all layers, keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * page_size * spec.head_dim * dtype_bytes
