"""The student before training: some of the target's layers, or a smaller model that is given.

Owns which layers are chosen, what a student's configuration says and which token ids a restricted
head keeps. Embedding and head are the target's own tensors. Must not know training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmesh.distill.transformer import Transformer, empty_transformer, place
from specmesh.engine.families import ModelSpec, read_json, spec_from_config
from specmesh.engine.weights import Checkpoint, expected_shapes
from specmesh.errors import ConfigError, InvalidRequest

_SHARED_FIELDS = ("hidden_size", "num_embeddings", "vocab_size")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A student to be made: its configuration, its shape, and where each layer comes from.

    layers: indices of the target's layers, or None where `source` is a model of its own.
    """

    config: dict[str, Any]
    spec: ModelSpec
    source: Path
    layers: tuple[int, ...] | None


def evenly_spaced(num_layers: int, depth: int) -> tuple[int, ...]:
    """num_layers indices of a model of this depth, first and last included: 4 of 30 are 0, 10, 19,
    29. One layer is the first."""
    if num_layers == 1:
        return (0,)
    return tuple(round(i * (depth - 1) / (num_layers - 1)) for i in range(num_layers))


def plan_from_target(
    target: Path, spec: ModelSpec, num_layers: int, layers: Sequence[int] | None
) -> Plan:
    """Take layers of the target. Raises InvalidRequest for layers that it does not have."""
    if not 1 <= num_layers <= spec.num_layers:
        raise InvalidRequest(f"{num_layers} of {spec.num_layers} layers", field="layers")
    chosen = evenly_spaced(num_layers, spec.num_layers) if layers is None else tuple(layers)
    if len(chosen) != num_layers or any(not 0 <= i < spec.num_layers for i in chosen):
        raise InvalidRequest(
            f"expected {num_layers} indices in [0, {spec.num_layers}), got {list(chosen)}",
            field="init_layers",
        )
    config = {**read_json(target / "config.json"), "num_hidden_layers": num_layers}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        config["layer_types"] = [kinds[i] for i in chosen]
    return Plan(config, spec_from_config(config, spec.vocab_size), target, chosen)


def plan_from_model(folder: Path, target: Path, target_spec: ModelSpec) -> Plan:
    """Start from a smaller model of the target's width and vocabulary, with or without embedding.

    Raises ConfigError for one that does not fit.
    """
    config = {**read_json(folder / "config.json"), **_ends(target)}
    spec = spec_from_config(config, target_spec.vocab_size)
    wrong = [
        f"{field} {getattr(spec, field)}, the target {getattr(target_spec, field)}"
        for field in _SHARED_FIELDS
        if getattr(spec, field) != getattr(target_spec, field)
    ]
    if wrong:
        raise ConfigError(f"{folder} has " + "; ".join(wrong), field="init_from")
    return Plan(config, spec, folder, None)


def _ends(target: Path) -> dict[str, Any]:
    config = read_json(target / "config.json")
    return {name: config.get(name) for name in ("bos_token_id", "eos_token_id")}


def load_student(plan: Plan, target: Transformer, kept_ids: Tensor | None) -> Transformer:
    """Make the student in float32 on the target's device. Raises ConfigError.

    kept_ids: int64 [N] ascending, the ids of a restricted head, or None for all.
    """
    model = empty_transformer(plan.spec)
    names = dict(model.named_parameters())
    with Checkpoint(plan.source) as checkpoint:
        if plan.layers is None:
            checkpoint.check(plan.spec, shared_embedding=True)
        state = {name: checkpoint.tensor(_source_name(name, plan.layers)) for name in names}
    device = target.embedding.device
    place(model, state, dtype=torch.float32, device=device)
    model.embedding = target.embedding
    model.head = target.head if kept_ids is None else target.head[kept_ids.to(device)]
    model.head_ids = None if kept_ids is None else kept_ids.to(device)
    return model


def _source_name(name: str, layers: tuple[int, ...] | None) -> str:
    """Name of the tensor that a student's parameter starts as."""
    parts = name.split(".")
    if layers is not None and parts[0] == "layers":
        parts[1] = str(layers[int(parts[1])])
    return ".".join(["model", *parts])


def most_frequent(counts: Tensor, num_ids: int, always: Sequence[int]) -> Tensor:
    """The num_ids most frequent token ids, ascending; ids in `always` are among them.

    counts: [vocab_size]; equal counts are settled by the lower id.
    """
    ranked = counts.double().clone()
    ranked[list(always)] = float("inf")
    order = torch.sort(ranked, descending=True, stable=True).indices
    return order[:num_ids].sort().values


def num_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of a student's own parameters, embedding and head apart."""
    total = 0
    for name, shape in expected_shapes(spec):
        if name.startswith(("model.layers.", "model.norm.")):
            total += itemsize * int(torch.Size(shape).numel())
    return total
