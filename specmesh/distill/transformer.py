"""A decoder for training and sampling: differentiable, batched, without pages.

The engine's decoder serves; this one learns. Same family, same names, same `ModelSpec`. How
queries meet keys is a function that the caller gives, so that one forward pass serves packed
training rows and one step of a batched sampler. Must not know text, losses or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.reference_layers import inverse_frequencies, rope, rope_amplitude, rope_table
from specmesh.engine.families import ModelSpec
from specmesh.engine.restricted_head import HEAD_IDS, check_head_ids, spread
from specmesh.engine.weights import EMBEDDING, HEAD, Checkpoint

# Queries [n, heads, d], keys and values [n, kv_heads, d] of one layer -> [n, heads, d].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class _Norm(nn.Module):
    """RMSNorm with a weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [.., width] to the same shape and type."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self._eps)


class _Attention(nn.Module):
    """Projections, optional per-head norms and rotation around the caller's attention."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._head_dim = spec.head_dim
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(q_width, spec.hidden_size, bias=spec.out_bias)
        self.q_norm = _Norm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None
        self.k_norm = _Norm(spec.head_dim, spec.rms_eps) if spec.qk_norm else None

    def forward(
        self, x: Tensor, index: int, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """x [n, hidden] to [n, hidden]."""
        q, k, v = (
            projection(x).view(len(x), -1, self._head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(index, rope(q, *rotation), rope(k, *rotation), v)
        projected: Tensor = self.o_proj(out.reshape(len(x), -1))
        return projected


class _Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, hidden] to [n, hidden]."""
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class _Layer(nn.Module):
    """One decoder layer around a residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = _Norm(spec.hidden_size, spec.rms_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = _Norm(spec.hidden_size, spec.rms_eps)
        self.mlp = _Mlp(spec)

    def forward(
        self, x: Tensor, index: int, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """x [n, hidden] to [n, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), index, rotation, attend)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Transformer(nn.Module):
    """Layers and final norm of a model; embedding and head are buffers, never trained.

    Parameters carry Hugging Face's names without the leading "model.". `head` holds the rows of
    the output vocabulary, float [num_rows, hidden]; head_ids the token ids that they stand for,
    int64 [num_rows] ascending, or None where row i is id i.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.num_layers))
        self.norm = _Norm(spec.hidden_size, spec.rms_eps)
        self.embedding: Tensor
        self.head: Tensor
        self.head_ids: Tensor | None = None
        self._frequencies: Tensor
        for name in ("embedding", "head"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.register_buffer("_frequencies", inverse_frequencies(spec.rope), persistent=False)
        self._amplitude = rope_amplitude(spec.rope)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final normalised hidden states [n, hidden] of int64 token_ids and positions [n]."""
        cos, sin = rope_table(positions, self._frequencies.float(), self._amplitude)
        # In the layers' own type: a student in mixed precision keeps its residual stream wide.
        x = F.embedding(token_ids, self.embedding).to(self.norm.weight.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, (cos, sin), attend)
        normed: Tensor = self.norm(x)
        return normed

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size], -inf for ids that a restricted head does not cover."""
        logits = self.logits(hidden)
        if self.head_ids is None:
            return logits
        return spread(logits, self.head_ids, self.spec.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, num_rows] of hidden states, in the head's type."""
        return F.linear(hidden.to(self.head.dtype), self.head)


def load_transformer(
    folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """Load a checked Hugging Face folder, without gradients. Raises ConfigError.

    Rows of ids that the tokenizer does not have are cut off the head: they have probability zero.
    """
    model = empty_transformer(spec)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(spec)
        state = {
            name: checkpoint.tensor(f"model.{name}") for name in dict(model.named_parameters())
        }
        embedding = checkpoint.tensor(EMBEDDING)
        head = embedding if spec.tie_embeddings else checkpoint.tensor(HEAD)
        ids = checkpoint.tensor(HEAD_IDS) if HEAD_IDS in checkpoint else None
    place(model, state, dtype=dtype, device=device)
    model.embedding = embedding.to(device, dtype)
    tied = spec.tie_embeddings
    model.head = (model.embedding if tied else head.to(device, dtype))[: spec.vocab_size]
    if ids is not None:
        model.head_ids = check_head_ids(ids, spec.vocab_size).to(device)
        model.head = model.head[model.head_ids]
    return model.requires_grad_(False)


def empty_transformer(spec: ModelSpec) -> Transformer:
    """A model whose parameters wait for `place`; nothing is initialised at random."""
    with torch.device("meta"):
        return Transformer(spec)


def place(
    model: Transformer, state: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a model its parameters, copied in this type to this device."""
    placed = {name: tensor.to(device, dtype, copy=True) for name, tensor in state.items()}
    model.load_state_dict(placed, assign=True)
    model._frequencies = inverse_frequencies(model.spec.rope).to(device)
