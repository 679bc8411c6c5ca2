"""The decoder's operations by the project's kernels: on a GPU, or in Triton's interpreter.

Owns how a layer maps onto `kernels/`: linear layers with fused ends, rotation, K/V write and
attention over pages in one launch for short segments, in two with norms of heads or long ones.
Everything here works on tensors of fixed shape whose contents alone vary, so a CUDA graph can hold
it. Must not know sessions or buckets. Importing this module imports Triton; `decoder.py` does so
only where the kernels are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels import linear as linear_kernel
from kernels import linear_norm as linear_norm_kernel
from kernels import norm as norm_kernel
from kernels import rope_kv as rope_kernel
from kernels.attention_inputs import FreshRows
from kernels.paged_attention import call_op
from kernels.reference_attention import AttentionOptions, PagedBatch
from kernels.rotary_attention import fits, rotary_attention
from specmesh.engine.families import ModelSpec
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.layer_ops import LayerOps, Linear, Weight
from specmesh.engine.step_attention import HeadNorms

FEW_SEQUENCES = 8  # below them, a verify step rotates and attends in launches of their own


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """The project's product over a weight [n_out, n_in]; see `kernels.linear` for its contract.

    invariant: a row's bits do not depend on who shares the call.
    """

    weight: Weight
    bias: Tensor | None
    invariant: bool

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `layer_ops.Linear`."""
        return linear_kernel.linear(
            x, self.weight, self.bias, residual=residual, invariant=self.invariant
        )


@dataclass(frozen=True, slots=True)
class FusedGate:
    """silu(x Wg^T + bg) * (x Wu^T + bu) in one launch; weight [2 width, depth], gate first."""

    weight: Weight
    bias: Tensor | None
    invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return a new tensor [num_rows, width] of x's type."""
        return linear_kernel.linear(
            x, self.weight, self.bias, activation="swiglu", invariant=self.invariant
        )


def _linear_norm(
    linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    assert isinstance(linear, FusedLinear)  # this table made it
    return linear_norm_kernel.linear_norm(
        x, linear.weight, linear.bias, residual, weight, eps, invariant=linear.invariant
    )


def fused_ops(*, invariant: bool) -> LayerOps:
    """The kernels as the decoder's table of operations."""
    return LayerOps(
        linear=partial(FusedLinear, invariant=invariant),
        gate=partial(FusedGate, invariant=invariant),
        rmsnorm=norm_kernel.rmsnorm,
        linear_norm=_linear_norm,
    )


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Packed tokens [first_row, first_row + num_rows) of a step and the sequences they belong to.

    batch.cu_seqlens_q counts from the group's first row.
    """

    first_row: int
    num_rows: int
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention by the paged kernels: verify, decode and prefill with the same bits.

    tables: (cos, sin) float32 [max positions, rotary_dim / 2]. positions, slots: int [num_tokens];
    a token at slot -1 is padding: it writes nothing and its row holds anything. groups cover the
    tokens in order; one launch each, since a launch is shaped by its longest sequence. arrivals: as
    of `attention_inputs.FreshRows`, made for every layer where None.
    """

    spec: ModelSpec
    cache: KVCache
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    groups: tuple[PagedGroup, ...]
    arrivals: Tensor | None = None

    def _pays_in_one_launch(self, longest: int) -> bool:
        """Whether rotation, store and attention belong in one launch, where they fit.

        Not where few sequences verify: their leaves spread over more programs than have rows to
        rotate, and each would rotate all of them (five rows of one sequence: 4.48 ms a step, not
        4.35).
        """
        if len(self.groups) != 1:
            return False
        return longest <= 2 or self.groups[0].batch.context_lens.numel() >= FEW_SEQUENCES

    def __call__(
        self, project: Linear, x: Tensor, layer_index: int, norms: HeadNorms | None
    ) -> Tensor:
        """See `step_attention.StepAttention`."""
        spec, pool = self.spec, self.cache.pools[layer_index]
        longest = max(group.batch.max_query_len for group in self.groups)
        is_one_launch = norms is None and self._pays_in_one_launch(longest)
        if is_one_launch and fits(spec.num_heads, pool[0], longest):
            return self._attend_fresh(project, x, layer_index)
        qkv = project(x)
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        queries = rope_kernel.rope_kv(
            heads[:, : spec.num_heads],
            heads[:, spec.num_heads : num_rotated],
            heads[:, num_rotated:],
            self.tables,
            self.positions,
            self.slots,
            (pool[0], pool[1]),
            norm=None if norms is None else (norms.queries, norms.keys, spec.rms_eps),
        )
        options = AttentionOptions(causal=True, window=spec.windows[layer_index])
        parts = []
        for group in self.groups:
            own = queries[group.first_row : group.first_row + group.num_rows]
            parts.append(call_op(own, pool[0], pool[1], group.batch, options)[0])
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.view(len(qkv), -1)

    def _attend_fresh(self, project: Linear, x: Tensor, layer_index: int) -> Tensor:
        """One launch behind the product: the bits of the others in turn."""
        assert isinstance(project, FusedLinear)  # this module's table made it
        spec, pool, batch = self.spec, self.cache.pools[layer_index], self.groups[0].batch
        heads, bias = linear_kernel.linear_chunks(
            x, project.weight, project.bias, invariant=project.invariant
        )
        arrivals = self.arrivals
        if arrivals is None:
            num_counters = batch.context_lens.numel() * spec.num_kv_heads
            arrivals = torch.zeros(num_counters, dtype=torch.int32, device=x.device)
        fresh = FreshRows(heads, bias, self.tables, self.slots, arrivals, spec.num_heads)
        options = AttentionOptions(causal=True, window=spec.windows[layer_index])
        return rotary_attention(fresh, (pool[0], pool[1]), batch, options).view(len(x), -1)
