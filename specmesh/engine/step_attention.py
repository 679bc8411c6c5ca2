"""What a layer's attention is in one step: rotation, K/V write and the reading of pages.

Owns the interface between the decoder, which owns weights and order, and the ways of attending:
by gathered pages (here, for a CPU) and by the paged kernels (`fused.py`). Must not know weights
other than the norms of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import reference_layers
from specmesh.engine.attention import LayerInput, StepLayout, Workspace, attend, write_kv
from specmesh.engine.families import ModelSpec
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.layer_ops import Linear


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of queries and keys, for families that have them."""

    queries: Tensor
    keys: Tensor


class StepAttention(Protocol):
    """Attention of one step over all its sequences."""

    def __call__(
        self, project: Linear, x: Tensor, layer_index: int, norms: HeadNorms | None
    ) -> Tensor:
        """Project, rotate queries and keys, store keys and values, attend.

        x [num_tokens, hidden]; project gives the merged queries, keys and values, [num_tokens,
        (num_heads + 2 num_kv_heads) * head_dim]. Returns [num_tokens, num_heads * head_dim]. Writes
        the layer's pool at the step's slots.
        """
        ...


def layer_input(
    spec: ModelSpec, qkv: Tensor, rotation: tuple[Tensor, Tensor], norms: HeadNorms | None
) -> LayerInput:
    """Queries and keys normalised and rotated, values as they are: views of and beside qkv.

    qkv: the merged projection; rotation: (cos, sin) of its tokens, [num_tokens, rotary_dim / 2].
    """
    heads = qkv.view(len(qkv), -1, spec.head_dim)
    num_rotated = spec.num_heads + spec.num_kv_heads
    rotated = heads[:, :num_rotated]
    if norms is not None:
        queries, keys = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        rotated = torch.cat(
            (
                reference_layers.rmsnorm(queries, norms.queries, spec.rms_eps),
                reference_layers.rmsnorm(keys, norms.keys, spec.rms_eps),
            ),
            1,
        )
    rotated = reference_layers.rope(rotated, *rotation)
    return LayerInput(
        rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], heads[:, num_rotated:]
    )


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """By gathering the pages a group of sequences reads; see `attention.py`.

    rotation: (cos, sin) of the step's positions, [num_tokens, rotary_dim / 2] each.
    """

    spec: ModelSpec
    cache: KVCache
    layout: StepLayout
    rotation: tuple[Tensor, Tensor]
    workspace: Workspace

    def __call__(
        self, project: Linear, x: Tensor, layer_index: int, norms: HeadNorms | None
    ) -> Tensor:
        """See `StepAttention`."""
        spec, pool = self.spec, self.cache.pools[layer_index]
        inputs = layer_input(spec, project(x), self.rotation, norms)
        write_kv(pool, self.layout, inputs.keys, inputs.values)
        return attend(inputs, pool, self.layout, spec.windows[layer_index], self.workspace)
