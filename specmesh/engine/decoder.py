"""The forward pass of the Llama family over packed sequences and paged keys and values.

Owns the weights and the order of operations. Must not know sessions, rounds or sampling: it is
given a `StepBatch` and returns logits. How an operation runs on a device is `layer_ops.py`'s and
`attention.py`'s concern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_weight import join, quantise
from kernels.reference_layers import inverse_frequencies, rope_amplitude, rope_table
from specmesh.engine.attention import PoolShape, Workspace, lay_out
from specmesh.engine.families import ModelSpec, read_spec
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.layer_ops import LayerOps, Linear, Weight, layer_ops
from specmesh.engine.restricted_head import HEAD_IDS, check_head_ids, restricted_head
from specmesh.engine.step_attention import GatheredAttention, HeadNorms, StepAttention
from specmesh.engine.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Checkpoint,
    WeightDtype,
    fingerprint,
)
from specmesh.errors import ConfigError
from specmesh.tokenizer import TOKENIZER_FILE, load_tokenizer

CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEVICE_NAME = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert e4m3


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over packed sequences; sequence i owns tokens
    [cu_seqlens_q[i], cu_seqlens_q[i + 1]), the last of its context_lens[i] tokens.

    token_ids, positions, slot_mapping: int64 [num_tokens] on the decoder's device; a slot is
    page * page_size + offset. context_lens counts tokens with K/V after this step, its own
    included. block_tables[i]: pages of sequence i, in order. logit_rows: int64 [num_rows], the
    tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens_q: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    slot_mapping: Tensor
    logit_rows: Tensor

    @classmethod
    def pack(
        cls,
        token_ids: Sequence[Sequence[int]],
        kv_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        *,
        page_size: int,
        device: str | torch.device = "cpu",
    ) -> StepBatch:
        """Pack sequences: token_ids[i] follow the kv_lens[i] tokens of sequence i already written.

        logit_rows index the packed tokens.
        """
        cu_seqlens_q, context_lens = [0], []
        positions: list[int] = []
        slots: list[int] = []
        for tokens, kv_len, table in zip(token_ids, kv_lens, block_tables, strict=True):
            own = range(kv_len, kv_len + len(tokens))
            positions.extend(own)
            slots.extend(table[i // page_size] * page_size + i % page_size for i in own)
            cu_seqlens_q.append(cu_seqlens_q[-1] + len(tokens))
            context_lens.append(own.stop)
        flat = [token for tokens in token_ids for token in tokens]
        as_tensor = torch.tensor([flat, positions, slots], dtype=torch.int64, device=device)
        return cls(
            token_ids=as_tensor[0],
            positions=as_tensor[1],
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=[list(table) for table in block_tables],
            slot_mapping=as_tensor[2],
            logit_rows=torch.tensor(list(logit_rows), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer: merged query/key/value and gate/up."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gated: Callable[[Tensor], Tensor]
    down: Linear
    head_norms: HeadNorms | None


class Decoder:
    """A loaded model. `forward` may be called from one thread at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        fingerprint: str = "",
        embedding_from: Decoder | None = None,
        fused: bool = False,
        invariant: bool = True,
    ) -> None:
        """Place the weights. fused: run the project's kernels, which `paged` steps need; invariant:
        a row's bits then do not depend on its batch. The checkpoint's weight_dtype says what
        matrices of layers are kept in. Raises ConfigError."""
        self.spec, self.dtype, self.device = spec, dtype, read_device(str(device))
        self.fingerprint, self.weight_dtype = fingerprint, checkpoint.weight_dtype
        check_placement(self.device, dtype)
        if self.weight_dtype == "fp8":
            check_fp8(self.device, dtype, fused=fused, invariant=invariant)
        if embedding_from is not None:
            _check_shared_embedding(spec, embedding_from, dtype, self.device)
        checkpoint.check(spec, shared_embedding=embedding_from is not None)
        self.is_fused, self.is_invariant = fused, fused and invariant
        self._ops = _choose_ops(self.device, dtype, fused=fused, invariant=invariant)
        self._workspace = Workspace(dtype, self.device)
        self._frequencies = inverse_frequencies(spec.rope).to(self.device)
        self._amplitude = rope_amplitude(spec.rope)
        self._rope_tables: tuple[Tensor, Tensor] | None = None
        if embedding_from is not None:
            self._embedding: Tensor = embedding_from._embedding
            self._head: Linear = embedding_from._head
        else:
            self._embedding = self._place(checkpoint.tensor(EMBEDDING))
            tied = spec.tie_embeddings
            head = self._embedding if tied else self._place(checkpoint.tensor(HEAD))
            self._head = self._ops.linear(head, None)
            if HEAD_IDS in checkpoint:
                ids = check_head_ids(checkpoint.tensor(HEAD_IDS), spec.vocab_size)
                self._head = restricted_head(self._ops.linear, head, ids)
        self._final_norm = self._place(checkpoint.tensor(FINAL_NORM))
        self._layers = [self._load_layer(checkpoint, i) for i in range(spec.num_layers)]

    @property
    def ops(self) -> LayerOps:
        """Operations that this decoder runs on."""
        return self._ops

    def new_cache(self, num_pages: int, page_size: int = 64) -> KVCache:
        """Make a K/V cache of this decoder's shape, type and device."""
        return KVCache(
            self.spec, num_pages, page_size=page_size, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Run one step; return logits float32 [num_rows, num_embeddings]. Writes K/V at its slots.

        Does not wait for the device. Logits of padded ids are whatever the head says.
        """
        spec = self.spec
        layout = lay_out(
            batch.cu_seqlens_q,
            batch.context_lens,
            batch.block_tables,
            batch.slot_mapping,
            PoolShape(
                cache.num_pages, cache.page_size, spec.num_kv_heads, spec.head_dim, spec.group_size
            ),
            spec.windows,
            self.dtype,
        )
        rotation = rope_table(batch.positions, self._frequencies, self._amplitude)
        attention = GatheredAttention(spec, cache, layout, rotation, self._workspace)
        all_rows = batch.logit_rows.numel() == len(batch.positions)
        logits = self.run(batch.token_ids, attention, None if all_rows else batch.logit_rows)
        return (logits[batch.logit_rows] if all_rows else logits).float()

    def run(self, token_ids: Tensor, attention: StepAttention, logit_rows: Tensor | None) -> Tensor:
        """All layers over packed tokens: logits [num_rows, num_embeddings] in the decoder's type.

        token_ids: int [num_tokens]. logit_rows: int [num_rows], the tokens whose logits are wanted;
        None means all, in order. Writes K/V through `attention`. Does not wait for the device.
        """
        eps, linear_norm = self.spec.rms_eps, self._ops.linear_norm
        stream = F.embedding(token_ids, self._embedding)
        normed = self._ops.rmsnorm(stream, self._layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        last = len(self._layers) - 1
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = attention(layer.qkv, normed, i, layer.head_norms)
            if i == last and logit_rows is not None:
                # Past the last keys and values only the wanted rows matter.
                attended, stream = attended[logit_rows], stream[logit_rows]
                if not stream.shape[0]:
                    return stream.new_zeros((0, self.spec.num_embeddings))
            stream, normed = linear_norm(layer.out, attended, stream, layer.mlp_norm, eps)
            stream, normed = linear_norm(layer.down, layer.gated(normed), stream, next_norm, eps)
        return self._head(normed)

    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) float32 [max_context_len, rotary_dim / 2] of every position, made once."""
        if self._rope_tables is None:
            positions = torch.arange(self.spec.max_context_len, device=self.device)
            cos, sin = rope_table(positions, self._frequencies, self._amplitude)
            self._rope_tables = cos.float().contiguous(), sin.float().contiguous()
        return self._rope_tables

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)

    def _place_matrix(self, checkpoint: Checkpoint, names: list[str]) -> Weight:
        """Matrices over the same input as one, in the type that they are kept in."""
        if self.weight_dtype == "model":
            return torch.cat([self._place(checkpoint.tensor(name)) for name in names])
        parts = []
        for name in names:
            # From what the file holds, not from its rounding to dtype: one model on all devices.
            try:
                parts.append(quantise(checkpoint.tensor(name).to(self.device)))
            except ValueError as error:
                raise ConfigError(f"{name}: {error}", field="engine.weight_dtype") from error
        return join(parts)

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> _Layer:
        layer, spec = f"model.layers.{index}", self.spec

        def merged(names: tuple[str, ...], bias: bool) -> tuple[Weight, Tensor | None]:
            weight = self._place_matrix(checkpoint, [f"{layer}.{n}.weight" for n in names])
            biases = [self._place(checkpoint.tensor(f"{layer}.{n}.bias")) for n in names if bias]
            return weight, torch.cat(biases) if bias else None

        def vector(name: str) -> Tensor:
            return self._place(checkpoint.tensor(f"{layer}.{name}.weight"))

        projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        linear = self._ops.linear
        return _Layer(
            attention_norm=vector("input_layernorm"),
            qkv=linear(*merged(projections, spec.qkv_bias)),
            out=linear(*merged(("self_attn.o_proj",), spec.out_bias)),
            mlp_norm=vector("post_attention_layernorm"),
            gated=self._ops.gate(*merged(("mlp.gate_proj", "mlp.up_proj"), spec.mlp_bias)),
            down=linear(*merged(("mlp.down_proj",), spec.mlp_bias)),
            head_norms=HeadNorms(vector("self_attn.q_norm"), vector("self_attn.k_norm"))
            if spec.qk_norm
            else None,
        )


def _choose_ops(
    device: torch.device, dtype: torch.dtype, *, fused: bool, invariant: bool
) -> LayerOps:
    if not fused:
        return layer_ops(device, dtype)
    from specmesh.engine.fused import fused_ops  # Triton: only where it is wanted

    return fused_ops(invariant=invariant)


def read_device(name: str, field: str = "device") -> torch.device:
    """The device that a user names. Raises ConfigError, which blames `field`."""
    if _DEVICE_NAME.fullmatch(name) is None:
        raise ConfigError(f"unsupported device {name}: it must be cpu, cuda or cuda:N", field=field)
    return torch.device(name)


def check_present(device: torch.device, field: str = "device") -> None:
    """Raise ConfigError for a GPU that this machine or torch build does not have."""
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "cuda was asked for, and this machine or torch build has none", field=field
        )
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"{device} was asked for, the last one is cuda:{count - 1}", field=field)


def check_placement(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for a device that is not there or a type that it does not run."""
    check_present(device)
    allowed = CUDA_DTYPES if device.type == "cuda" else CPU_DTYPES
    if dtype not in allowed:
        names = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        raise ConfigError(f"unsupported dtype {dtype} on {device.type}: expected one of {names}")


def check_fp8(device: torch.device, dtype: torch.dtype, *, fused: bool, invariant: bool) -> None:
    """Raise ConfigError where layers cannot run on fp8 weights."""
    if not fused and dtype is not torch.float32:
        # What values and scales stand for is exact enough in float32 alone.
        wrong = f"the reference layers take fp8 weights in float32, not in {dtype}"
    elif fused and not invariant:
        wrong = "the vendor's matrix products take no fp8 weights: engine.invariant must be true"
    elif fused and device.type == "cuda" and _capability(device) < FP8_CAPABILITY:
        needed = ".".join(map(str, FP8_CAPABILITY))
        wrong = f"fp8 weights need a GPU of compute capability {needed}"
    else:
        return
    raise ConfigError(wrong, field="engine.weight_dtype")


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _check_shared_embedding(
    spec: ModelSpec, owner: Decoder, dtype: torch.dtype, device: torch.device
) -> None:
    ours = (spec.num_embeddings, spec.hidden_size, dtype, device)
    theirs = (owner.spec.num_embeddings, owner.spec.hidden_size, owner.dtype, owner.device)
    if ours != theirs or spec.tie_embeddings != owner.spec.tie_embeddings:
        raise ConfigError(
            f"cannot share an embedding of (rows, width, dtype, device) {theirs} with a model "
            f"that needs {ours}"
        )


def load_decoder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    embedding_from: Decoder | None = None,
    *,
    weight_dtype: WeightDtype = "model",
    fused: bool = False,
    invariant: bool = True,
) -> Decoder:
    """Load a Hugging Face folder. Raises ConfigError saying what is wrong and what is supported.

    The real vocabulary is the tokenizer's where the folder has one, else the configuration's.
    embedding_from shares embedding and head with another decoder of the same process. weight_dtype:
    as of `EngineSettings`. fused and invariant: see `Decoder`.
    """
    tokenizer = folder / TOKENIZER_FILE
    vocab_size = load_tokenizer(folder).vocab_size if tokenizer.is_file() else None
    spec = read_spec(folder, vocab_size)
    with Checkpoint(folder, weight_dtype) as checkpoint:
        return Decoder(
            spec,
            checkpoint,
            dtype=dtype,
            device=device,
            fingerprint=fingerprint(folder, weight_dtype),
            embedding_from=embedding_from,
            fused=fused,
            invariant=invariant,
        )
