"""Prefill over pages: any number of queries a sequence, in the numeric contract of verify steps.

A chunk of a prompt and the decode that follows read the same pages, and both fold keys in the
leaf-and-chunk order with the same tiles, so a row's bits do not depend on how a prompt was cut into
chunks or on whether it was prefilled or decoded. The kernel is `paged_attention`'s. Must not know
how chunks are chosen.

Specification: `reference_attention.paged_attention`.
"""

from __future__ import annotations

from torch import Tensor

from kernels.paged_attention import call_op
from kernels.reference_attention import DEFAULT_OPTIONS, AttentionOptions, PagedBatch


def paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed queries over paged K/V, the queries' own K/V already written.

    Shapes, options, results and errors as in `paged_attention.paged_attention`, without its bound
    on queries; sequences of a step may mix long prompts, verify segments and single tokens.
    """
    return call_op(q, k_pool, v_pool, batch, options)
