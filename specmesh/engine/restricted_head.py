"""A draft whose head covers some of the vocabulary only: which ids, under what name on disk.

Every other id has probability zero, which the protocol allows on the draft's side: what the draft
never proposes, the target still draws. Must not know how such a draft is made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specmesh.engine.layer_ops import Linear
from specmesh.errors import ConfigError

HEAD_IDS = "draft_vocab.ids"  # int64 [num_ids], ascending


def check_head_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the ids of a checkpoint's restricted head. Raises ConfigError for anything else."""
    is_list = ids.dim() == 1 and ids.dtype == torch.int64 and ids.numel() > 0
    if not is_list or not bool((ids[1:] > ids[:-1]).all()):
        raise ConfigError(f"{HEAD_IDS} is no ascending list of int64 token ids")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ConfigError(f"{HEAD_IDS} holds ids outside a vocabulary of {vocab_size}")
    return ids


def restricted_head(
    linear: Callable[[Tensor, Tensor | None], Linear], head: Tensor, ids: Tensor
) -> Linear:
    """A head over some rows of a whole head [num_embeddings, hidden]; logits as of `spread`."""
    ids = ids.to(head.device)
    rows = linear(head[ids].contiguous(), None)

    def logits(x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None  # nothing is added to logits
        return spread(rows(x), ids, len(head))

    return logits


def spread(logits: Tensor, ids: Tensor, num_embeddings: int) -> Tensor:
    """Logits [num_rows, len(ids)] over the whole vocabulary, -inf where the head has no row."""
    whole = logits.new_full((len(logits), num_embeddings), float("-inf"))
    return whole.index_copy_(1, ids, logits)
