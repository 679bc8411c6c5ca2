"""Where every head, dimension and unit of the small model stands in the large one.

Owns shapes, presets and what cannot be inflated. Must not know tensors' values or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from specmesh.engine.families import ModelSpec
from specmesh.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the cost of one step. Field names are those of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


# Llama-3.1-8B and Llama-3.2-1B, but for the vocabulary (128,256 there), which stays the model's.
PRESETS: Mapping[str, Shape] = {
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64),
}


def requested_shape(preset: str | None, numbers: Mapping[str, int | None]) -> Shape:
    """The preset's shape with the given numbers in place of its own.

    numbers: by field name of `Shape`, None where not given; all of them without a preset. Raises
    ConfigError.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigError(f"{preset!r} is not one of {', '.join(PRESETS)}", field="shape")
        return replace(PRESETS[preset], **given)
    missing = [each.name for each in fields(Shape) if each.name not in given]
    if missing:
        raise ConfigError(f"without a preset, give {', '.join(missing)} too", field="shape")
    return Shape(**given)


@dataclass(frozen=True, slots=True)
class Layout:
    """Index maps from small to large; dimensions and heads as in `ModelSpec`.

    query_heads: (small, large) of every query head. kv_heads: (small, large), a small one several
    times where it is copied. rotary_dims[i]: the large head dimension of the small dimension i, for
    queries and keys. Values, MLP units and stream channels keep their index.
    query_zero_dims, key_zero_dims: added head dimensions of active heads on which the query's, the
    key's row is zero; under a norm over the head, both are all of them.
    """

    small: ModelSpec
    shape: Shape
    query_heads: tuple[tuple[int, int], ...]
    kv_heads: tuple[tuple[int, int], ...]
    rotary_dims: Tensor
    query_zero_dims: Tensor
    key_zero_dims: Tensor

    @property
    def stream_ratio(self) -> float:
        """h / H: active channels over all."""
        return self.small.hidden_size / self.shape.hidden_size

    @property
    def width_ratio(self) -> int:
        """D / d: large over small head width."""
        return self.shape.head_dim // self.small.head_dim

    @property
    def group_size(self) -> int:
        """Query heads of a large key/value head."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    def value_is_zero(self) -> Tensor:
        """bool [large kv heads, D]: value rows of active layers that are exactly zero."""
        heads, width = self.shape.num_key_value_heads, self.shape.head_dim
        zero = every_other(heads)[:, None].expand(heads, width).clone()
        for _, large in self.kv_heads:
            zero[large] = every_other(width)
            zero[large, : self.small.head_dim] = False
        return zero


def every_other(count: int) -> Tensor:
    """bool [count]: True at even indices."""
    return torch.arange(count) % 2 == 0


def make_layout(small: ModelSpec, shape: Shape) -> Layout:
    """Place the small model in the large shape. Raises ConfigError naming what does not fit."""
    _check(small, shape)
    group = shape.num_attention_heads // shape.num_key_value_heads
    copies = -(-small.group_size // group)
    if small.num_kv_heads * copies > shape.num_key_value_heads:
        raise ConfigError(
            f"{small.num_kv_heads} key/value heads of {small.group_size} query heads each need "
            f"{small.num_kv_heads * copies} heads of {group}, got {shape.num_key_value_heads}",
            field="num_key_value_heads",
        )
    kv_heads = [(j, j * copies + c) for j in range(small.num_kv_heads) for c in range(copies)]
    query_heads = [
        (head, (j * copies + t // group) * group + t % group)
        for head in range(small.num_heads)
        for j, t in [divmod(head, small.group_size)]
    ]
    dims = _rotary_dims(small, shape)
    query_zero, key_zero = _zero_dims(small, shape, dims)
    return Layout(small, shape, tuple(query_heads), tuple(kv_heads), dims, query_zero, key_zero)


def _check(small: ModelSpec, shape: Shape) -> None:
    least = {
        "hidden_size": small.hidden_size,
        "intermediate_size": small.intermediate_size,
        "num_hidden_layers": small.num_layers,
        "num_attention_heads": small.num_heads,
        "num_key_value_heads": small.num_kv_heads,
        "head_dim": small.head_dim,
    }
    for name, least_value in least.items():
        value = getattr(shape, name)
        if value < least_value:
            raise ConfigError(f"{value} is below the small model's {least_value}", field=name)
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ConfigError(
            f"{shape.num_attention_heads} is no multiple of the {shape.num_key_value_heads} "
            "key/value heads",
            field="num_attention_heads",
        )
    if shape.head_dim % small.head_dim:
        raise ConfigError(
            f"{shape.head_dim} is no multiple of the small model's {small.head_dim}: rotary "
            "angles of other widths differ",
            field="head_dim",
        )
    if shape.head_dim != small.head_dim and small.rope.kind == "yarn":
        raise ConfigError(
            f"rotary scaling yarn needs the small model's width {small.head_dim}", field="head_dim"
        )


def _rotary_dims(small: ModelSpec, shape: Shape) -> Tensor:
    """int64 [d]: pair i of r/2 becomes pair i * ratio of R/2; what does not rotate follows R."""
    ratio, rotary = shape.head_dim // small.head_dim, small.rope.rotary_dim
    first = torch.arange(rotary // 2) * ratio
    rest = torch.arange(small.head_dim - rotary) + rotary * ratio
    return torch.cat((first, first + rotary * ratio // 2, rest))


def _zero_dims(small: ModelSpec, shape: Shape, dims: Tensor) -> tuple[Tensor, Tensor]:
    """Added dimensions with a zero query row, and with a zero key row; both halves of a pair."""
    added = torch.ones(shape.head_dim, dtype=torch.bool)
    added[dims] = False
    indices = added.nonzero().flatten()
    if small.qk_norm:
        return indices, indices
    # A dimension's number within its half of the rotation is its pair's.
    rotary = small.rope.rotary_dim * shape.head_dim // small.head_dim
    pairs = torch.where(indices < rotary, indices % max(rotary // 2, 1), indices)
    added_pairs = sorted({int(pair) for pair in pairs})
    in_turn = torch.tensor([added_pairs.index(int(pair)) % 2 == 0 for pair in pairs]).bool()
    return indices[in_turn], indices[~in_turn]
