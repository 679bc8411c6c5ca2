"""A model whose logits depend on every token that its K/V cache really holds.

The "K/V" of a position is its token id. Logits are a hash of the ids read back through the block
table, so a stale, misplaced or missing entry gives other logits, which tests compare bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from specmesh.engine.decoder import StepBatch
from specmesh.ledger import EMPTY_DIGEST, extend_digest

EMPTY = -1


class PrefixCache:
    """Token ids by page and offset."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.slots = np.full((num_pages, page_size), EMPTY, dtype=np.int64)

    def copy_pages(self, pairs) -> None:
        for source, target in pairs:
            self.slots[target] = self.slots[source]

    def clear_pages(self, pages) -> None:
        self.slots[list(pages)] = EMPTY


@dataclass(frozen=True)
class PrefixSpec:
    """The part of ModelSpec that services read."""

    vocab_size: int
    num_embeddings: int
    architecture: str = "PrefixHash"
    max_context_len: int = 4096
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


class PrefixDecoder:
    """Implements Decoder's interface. own_weight 0 gives every seed the same logits.

    order: how many last tokens the logits depend on (None: all). nan_token: logits of a position
    whose own token is this are NaN. calls: (number of sequences, number of tokens) of every pass.
    """

    def __init__(
        self,
        vocab_size: int = 16,
        *,
        seed: int = 0,
        own_weight: float = 0.4,
        order=None,
        nan_token: int | None = None,
    ) -> None:
        self.spec = PrefixSpec(vocab_size, vocab_size + 3)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.fingerprint = f"prefix-hash-{seed}"
        self.calls: list[tuple[int, int]] = []
        self.before_pass = lambda: None
        self._seed = seed
        self._own_weight = own_weight
        self._order = order
        self._nan_token = nan_token
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix) -> Tensor:
        """float32 [num_embeddings] after these tokens; padding ids would win if they counted."""
        key = tuple(prefix if self._order is None else prefix[-self._order :])
        if key not in self._known:
            digest = extend_digest(EMPTY_DIGEST, key)
            shared = self._noise(digest, 0)
            own = self._noise(digest, 1 + self._seed)
            row = 4.0 * ((1 - self._own_weight) * shared + self._own_weight * own)
            row[self.spec.vocab_size :] = 50.0
            self._known[key] = row
        if prefix[-1] == self._nan_token:
            return torch.full_like(self._known[key], torch.nan)
        return self._known[key].clone()

    def _noise(self, digest: int, stream: int) -> Tensor:
        calls = torch.arange((self.spec.num_embeddings + 3) // 4)
        words = reference.philox_words(digest, calls, stream, 0, 0).view(-1)
        return reference.uniform(words)[: self.spec.num_embeddings]

    def forward(self, batch: StepBatch, cache: PrefixCache) -> Tensor:
        self.before_pass()
        self.calls.append((len(batch.context_lens), batch.cu_seqlens_q[-1]))
        flat = cache.slots.reshape(-1)
        flat[batch.slot_mapping.numpy()] = batch.token_ids.numpy()
        wanted = set(batch.logit_rows.tolist())
        rows = []
        for index, context_len in enumerate(batch.context_lens):
            start, end = batch.cu_seqlens_q[index : index + 2]
            known = cache.slots[batch.block_tables[index]].reshape(-1)[:context_len].tolist()
            assert EMPTY not in known, "attention reads a position that was never written"
            first = context_len - (end - start)
            assert batch.positions[start:end].tolist() == list(range(first, context_len))
            rows += [
                self.logits(known[: first + row - start + 1])
                for row in range(start, end)
                if row in wanted
            ]
        assert len(rows) == len(batch.logit_rows)
        return torch.stack(rows) if rows else torch.empty(0, self.spec.num_embeddings)
