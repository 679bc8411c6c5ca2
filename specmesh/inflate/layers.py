"""Tensors of the large model, one layer at a time: the rules of the package's docstring.

Random numbers are drawn where the tensors are built (on the chosen device), from a generator of
their own per tensor, so that a tensor does not depend on the ones before it. Must not know files.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specmesh.inflate.layout import Layout, every_other

OUTPUT_STD = 0.02  # of added columns that multiply exact zeros
READ_STD = 0.5  # of what an added row makes of a normed stream of unit size

Read = Callable[[str], Tensor]  # a tensor of the small model by name
Named = Iterator[tuple[str, Tensor]]


class LayerInflator:
    """Builds the large model's tensors. `read` gives the small model's, of any float type."""

    def __init__(
        self, layout: Layout, read: Read, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        """seed: of the random numbers; equal seeds give equal files on equal devices."""
        self._layout, self._small, self._shape = layout, layout.small, layout.shape
        self._read, self._dtype, self._device, self._seed = read, dtype, device, seed
        self._value_zero = layout.value_is_zero().flatten().to(device)

    # ------------------------------------------------------------ embedding, norms, head

    def embedding(self, name: str) -> Tensor:
        """[vocabulary, H]: the small embedding, zeros on added channels."""
        small = self._given(name)
        wide = small.new_zeros((len(small), self._shape.hidden_size), dtype=self._dtype)
        wide[:, : small.shape[1]] = small
        return wide

    def head(self, name: str, source: str) -> Tensor:
        """[vocabulary, H]: `source` of the small model; random where the final norm is zero."""
        small = self._given(source)
        wide = self._random(name, (len(small), self._shape.hidden_size), OUTPUT_STD)
        wide[:, : small.shape[1]] = small
        return wide

    def norm(self, name: str, source: str | None) -> Tensor:
        """float32 [H]: see 2. of the package. Random about 1 where there is no source."""
        scale = self._layout.stream_ratio**0.5
        noise = self._random(name, (self._shape.hidden_size,), 0.1, torch.float32)
        wide: Tensor = (1 + noise) * scale
        if source is not None:
            small = self._given(source)
            wide[: len(small)] = small * scale
        return wide

    # ------------------------------------------------------------ layers

    def layer(self, index: int) -> Named:
        """Every tensor of layer `index`, named; those past the small model's layers are added."""
        prefix = f"model.layers.{index}"
        active = index < self._small.num_layers
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"{prefix}.{norm}.weight"
            yield name, self.norm(name, name if active else None)
        yield from self._attention(f"{prefix}.self_attn", active)
        yield from self._mlp(f"{prefix}.mlp", active)

    def _attention(self, prefix: str, active: bool) -> Named:
        layout, small = self._layout, self._small
        width, ratio = self._shape.head_dim, layout.width_ratio
        norm_factor = (layout.stream_ratio * ratio) ** 0.5 if small.qk_norm else 1.0
        query_factor = norm_factor if small.qk_norm else ratio**0.5
        heads = layout.query_heads if active else ()
        kv_heads = layout.kv_heads if active else ()
        q_rows = self._rows(heads, layout.rotary_dims)
        k_rows = self._rows(kv_heads, layout.rotary_dims)
        v_rows = self._rows(kv_heads, torch.arange(small.head_dim))
        no_query = self._rows(heads, layout.query_zero_dims)[1]
        no_key = self._rows(kv_heads, layout.key_zero_dims)[1]
        no_value = self._zero_values(active).nonzero().flatten()
        num_heads, num_kv_heads = self._shape.num_attention_heads, self._shape.num_key_value_heads
        projections = (
            ("q_proj", num_heads * width, q_rows, no_query, query_factor),
            ("k_proj", num_kv_heads * width, k_rows, no_key, norm_factor),
            ("v_proj", num_kv_heads * width, v_rows, no_value, 1.0),
        )
        for name, n_out, rows, zero_rows, factor in projections:
            yield from self._reading(f"{prefix}.{name}", n_out, rows, zero_rows, factor)
            if small.qkv_bias:
                yield self._read_bias(f"{prefix}.{name}.bias", n_out, rows, zero_rows, factor)
        if small.qk_norm:
            for name, factor in (("q_norm", 1.0), ("k_norm", ratio**-0.5)):
                yield self._head_norm(f"{prefix}.{name}.weight", active, factor)
        columns = self._rows(heads, torch.arange(small.head_dim))
        by_query = self._zero_values(active).view(num_kv_heads, 1, width)
        silent = by_query.expand(-1, layout.group_size, -1).reshape(-1)
        yield from self._writing(f"{prefix}.o_proj", columns, silent, small.out_bias, active)

    def _zero_values(self, active: bool) -> Tensor:
        """bool [kv heads * D]: value rows that are zero."""
        if active:
            return self._value_zero
        heads, width = self._shape.num_key_value_heads, self._shape.head_dim
        return every_other(heads).to(self._device).repeat_interleave(width)

    def _mlp(self, prefix: str, active: bool) -> Named:
        units, bias = self._shape.intermediate_size, self._small.mlp_bias
        kept = torch.arange(self._small.intermediate_size if active else 0, device=self._device)
        silent = every_other(units).to(self._device)
        silent[kept] = False
        none = kept.new_zeros(0)
        for name, zero_rows in (("gate_proj", none), ("up_proj", silent.nonzero().flatten())):
            yield from self._reading(f"{prefix}.{name}", units, (kept, kept), zero_rows, 1.0)
            if bias:
                yield self._read_bias(f"{prefix}.{name}.bias", units, (kept, kept), zero_rows, 1.0)
        yield from self._writing(f"{prefix}.down_proj", (kept, kept), silent, bias, active)

    # ------------------------------------------------------------ building blocks

    def _rows(self, heads: tuple[tuple[int, int], ...], dims: Tensor) -> tuple[Tensor, Tensor]:
        """(small rows, large rows) of these heads; `dims[i]`: large dimension of the small i.

        Where dims are not the small model's (added ones), only the second has a meaning.
        """
        small, large = [], []
        for ours, theirs in heads:
            small.append(torch.arange(len(dims)) + ours * self._small.head_dim)
            large.append(dims + theirs * self._shape.head_dim)
        none = [torch.zeros(0, dtype=torch.int64)]
        return torch.cat(small or none).to(self._device), torch.cat(large or none).to(self._device)

    def _reading(
        self,
        name: str,
        n_out: int,
        rows: tuple[Tensor, Tensor],
        zero_rows: Tensor,
        factor: float,
    ) -> Named:
        """A matrix [n_out, H] over the normed stream: small rows times factor, zeros, random."""
        name += ".weight"
        std = READ_STD / self._small.hidden_size**0.5
        wide = self._random(name, (n_out, self._shape.hidden_size), std)
        wide[zero_rows] = 0
        if len(rows[0]):
            small = self._given(name) * factor
            wide[rows[1], : self._small.hidden_size] = small[rows[0]].to(self._dtype)
        yield name, wide

    def _read_bias(
        self, name: str, n_out: int, rows: tuple[Tensor, Tensor], zero_rows: Tensor, factor: float
    ) -> tuple[str, Tensor]:
        wide = self._random(name, (n_out,), READ_STD)
        wide[zero_rows] = 0
        if len(rows[0]):
            wide[rows[1]] = (self._given(name) * factor)[rows[0]].to(self._dtype)
        return name, wide

    def _writing(
        self, name: str, columns: tuple[Tensor, Tensor], silent: Tensor, bias: bool, active: bool
    ) -> Named:
        """A matrix [H, n_in] onto the stream. silent: bool [n_in], inputs that are exactly zero."""
        weight, hidden = f"{name}.weight", self._shape.hidden_size
        wide = self._random(weight, (hidden, len(silent)), OUTPUT_STD)
        wide[:, ~silent] = 0
        if len(columns[0]):
            small = self._given(weight)[:, columns[0]].to(self._dtype)
            wide[: len(small), columns[1]] = small
        yield weight, wide
        if bias:
            wide_bias = torch.zeros(hidden, dtype=self._dtype, device=self._device)
            if active:
                wide_bias[: self._small.hidden_size] = self._given(f"{name}.bias")
            yield f"{name}.bias", wide_bias

    def _head_norm(self, name: str, active: bool, factor: float) -> tuple[str, Tensor]:
        """float32 [D]: a norm over the head; added dimensions meet zeros only."""
        wide: Tensor = 1 + self._random(name, (self._shape.head_dim,), 0.1, torch.float32)
        if active:
            wide[self._layout.rotary_dims.to(self._device)] = self._given(name) * factor
        return name, wide

    def _given(self, name: str) -> Tensor:
        """A tensor of the small model, float32 on the device."""
        return self._read(name).to(device=self._device, dtype=torch.float32)

    def _random(
        self, name: str, shape: tuple[int, ...], std: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Normal numbers of mean 0; the stream of each name is its own."""
        generator = torch.Generator(self._device)
        # torch's CPU generator takes 32 bits of a seed, so all that matters is mixed into 32.
        generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        drawn = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        return drawn.normal_(0.0, std, generator=generator)
