"""`specmesh window-report`: what a window of attention would cost a model on a prompt, by layer.

Runs the prompt through the model as it is and, beside each layer's attention, the same queries with
a window. Measured: the probability mass delta that the window drops from each row of each head, the
bound 2 delta M on how far the output can move (M the largest norm of a value; THEORY.md section 3),
and how far it does move. It bounds single rows, not the quality of a text: later layers are given
the full attention's output. A model with a window of its own is measured against that window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kernels.reference_attention import AttentionOptions, attention, window_error_bound
from specmesh.engine.decoder import Decoder, load_decoder
from specmesh.engine.layer_ops import Linear
from specmesh.engine.step_attention import HeadNorms, layer_input
from specmesh.errors import ConfigError, InvalidRequest
from specmesh.tokenizer import load_tokenizer

# Scores of all heads are held at once, in float32: 9 heads of 8192 tokens are 2.4 GB.
MAX_PROMPT_LEN = 8192


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer over the rows (token, head) that the window shortens; zeros where there is none.

    delta: dropped probability mass. bound: 2 delta M. error: ||o - o'||. tightest: the largest
    error over its own bound, at most 1 up to rounding.
    """

    layer: int
    own_window: int | None
    num_rows: int
    mean_delta: float
    max_delta: float
    mean_bound: float
    max_bound: float
    mean_error: float
    max_error: float
    tightest: float


@dataclass(slots=True)
class _Measuring:
    """Attention of one prompt from its first token, over K/V that no page holds."""

    decoder: Decoder
    window: int
    rotation: tuple[Tensor, Tensor]
    layers: list[LayerError] = field(default_factory=list)

    def __call__(
        self, project: Linear, x: Tensor, layer_index: int, norms: HeadNorms | None
    ) -> Tensor:
        """See `StepAttention`; measures the layer too."""
        spec, qkv = self.decoder.spec, project(x)
        inputs = layer_input(spec, qkv, self.rotation, norms)
        q, k, v = (
            part.transpose(0, 1)[None].float()
            for part in (inputs.queries, inputs.keys, inputs.values)
        )
        own = spec.windows[layer_index]
        full = AttentionOptions(causal=True, window=own)
        near = AttentionOptions(causal=True, window=min(self.window, own or self.window))
        out, _ = attention(q, k, v, full)
        moved, _ = attention(q, k, v, near)
        delta, bound = window_error_bound(q, k, v, self.window, full)
        error = (out - moved).norm(dim=-1)
        # Only rows that see more than the window lose anything.
        first = len(qkv) if own is not None and own <= self.window else self.window
        self.layers.append(
            _summary(layer_index, own, *(each[0, :, first:] for each in (delta, bound, error)))
        )
        return out[0].transpose(0, 1).reshape(len(qkv), -1).to(qkv.dtype)


def _summary(
    layer: int, own_window: int | None, delta: Tensor, bound: Tensor, error: Tensor
) -> LayerError:
    if not delta.numel():
        return LayerError(layer, own_window, 0, *[0.0] * 7)
    smallest = torch.finfo(bound.dtype).tiny
    return LayerError(
        layer=layer,
        own_window=own_window,
        num_rows=delta.numel(),
        mean_delta=float(delta.mean()),
        max_delta=float(delta.max()),
        mean_bound=float(bound.mean()),
        max_bound=float(bound.max()),
        mean_error=float(error.mean()),
        max_error=float(error.max()),
        tightest=float((error / bound.clamp_min(smallest)).max()),
    )


@torch.inference_mode()
def measure(decoder: Decoder, token_ids: Sequence[int], window: int) -> list[LayerError]:
    """Every layer's error for a window of `window` keys, the token itself included.

    Raises InvalidRequest for a window below 1 and for a prompt that is empty or too long.
    """
    longest = min(MAX_PROMPT_LEN, decoder.spec.max_context_len)
    if window < 1:
        raise InvalidRequest(f"{window} is below 1", field="window")
    if not 0 < len(token_ids) <= longest:
        raise InvalidRequest(f"{len(token_ids)} tokens, expected 1 to {longest}", field="prompt")
    cos, sin = (table[: len(token_ids)] for table in decoder.rope_tables())
    measuring = _Measuring(decoder, window, (cos, sin))
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=decoder.device)
    decoder.run(ids, measuring, ids.new_zeros(1))
    return measuring.layers


def window_report(
    model: Path, prompt: str, window: int, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[int, list[LayerError]]:
    """(tokens of the prompt, errors by layer) for a model folder and a text.

    dtype None: float32 on a CPU, bfloat16 elsewhere; attention is measured in float32. Raises
    ConfigError for a model that cannot be used, InvalidRequest as of `measure`.
    """
    if not model.is_dir():
        raise ConfigError(f"{model} is no model folder", field="model")
    token_ids = load_tokenizer(model).encode(prompt)
    if dtype is None:
        dtype = torch.float32 if device.startswith("cpu") else torch.bfloat16
    return len(token_ids), measure(load_decoder(model, dtype, device), token_ids, window)
