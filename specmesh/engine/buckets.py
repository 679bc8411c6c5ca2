"""Sizes that captured steps come in, and the steps that a service starts with.

Owns what is compiled and captured before serving. What a role's rounds and chains look like is its
device side's; must not know sessions or buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specmesh.engine.device_side import DeviceSide, powers, query_lens
from specmesh.engine.executor import MAX_SEQS
from specmesh.engine.step_programs import StepShape


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that programs come in, ascending; a step takes the smallest that cover it."""

    num_seqs: tuple[int, ...]
    max_query_lens: tuple[int, ...]
    long_rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def covering(
        cls, *, max_seqs: int, max_query_len: int, max_long_rows: int, max_context_len: int
    ) -> Buckets:
        """Powers of two of sequences, and from 64 of rows of a long segment; query lengths of 1, 2,
        3, 5, 9; contexts of 1024 (one chunk of attention: no partial sums) and of all allowed."""
        return cls(
            num_seqs=powers(1, min(max_seqs, MAX_SEQS), 2),
            max_query_lens=query_lens(max_query_len),
            long_rows=powers(64, max_long_rows, 2),
            contexts=powers(1024, max_context_len, max(2, max_context_len)),
        )


def start_shapes(side: DeviceSide, buckets: Buckets) -> list[StepShape]:
    """What serving starts with: the role's steps, and chunks of a prompt beside few or many."""
    return side.base_shapes(buckets.num_seqs, buckets.contexts) + [
        StepShape(num_seqs, queries, long_rows, 1, 1, context)
        for num_seqs in dict.fromkeys((buckets.num_seqs[0], buckets.num_seqs[-1]))
        for queries in buckets.max_query_lens[:2]
        for long_rows in buckets.long_rows
        for context in buckets.contexts
    ]


def filtered_shapes(side: DeviceSide, buckets: Buckets) -> list[StepShape]:
    """Steps with top-k, top-p or min-p whose kernels are compiled before serving. They are captured
    when the first of them have come: few deployments see any."""
    some = sorted({buckets.num_seqs[0], *buckets.num_seqs[1:2], buckets.num_seqs[-1]})
    base = side.base_shapes(some, buckets.contexts)
    # Later passes of a chain take the same kernels.
    return [replace(each, is_filtered=True) for each in base if each.num_passes == 1]
