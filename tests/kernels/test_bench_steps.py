"""What the step benchmarks measure: the cases asked for, and a baseline compiled throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draft_service.bench_steps import CASES
from specmesh.bench import steps


def test_cases_are_chosen_by_the_ends_of_their_names() -> None:
    """The b64 variant of a case is another case; nothing asked for is everything."""
    names = [case.name for case in CASES if steps.is_wanted(case, "draft-4layer-k4,draft-1b-k4")]
    assert names == ["draft-4layer-k4", "draft-1b-k4"]
    assert all(steps.is_wanted(case, "") for case in CASES)
    assert not any(steps.is_wanted(case, "b65") for case in CASES)


def test_every_layer_of_the_baseline_is_compiled_at_every_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten layers at two shapes are twenty compilations, beyond the compiler's usual limit of eight;
    steps give logits of every row and fill the cache behind the context."""
    pytest.importorskip("transformers")
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 100, "num_hidden_layers": 10,
    }  # fmt: skip
    monkeypatch.setitem(steps.CONFIGS, "small", steps.CONFIGS["4layer"] | small)
    compiled: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward  # type: ignore[no-any-return]  # the graph as it was traced

    cpu = torch.device("cpu")
    model = steps.transformers_model("small", cpu)
    shapes = [(1, 1), (2, 3)]
    with steps.layers_compiled(model, len(shapes), backend), torch.inference_mode():
        for index, (batch, rows) in enumerate(shapes):
            step = steps.transformers_step(model, batch, rows, 600, cpu)
            for _ in range(2):
                logits = step()
            assert logits.shape == (batch, rows, 100)
            assert bool(torch.isfinite(logits).all())
            assert len(compiled) == 10 * (index + 1)
    torch._dynamo.reset()
