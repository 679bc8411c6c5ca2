"""`specmesh distill` on a tiny pair: it learns, resumes, loads, and stops with reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from specmesh.engine.model_pair import check_pair
from tests.unit.distill_pair import run, settings, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template."""
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_acceptance_rises(target: Path, tmp_path: Path) -> None:
    """Training on the target's text brings a one-layer student closer to it, on held-out text."""
    given = settings(
        target, tmp_path / "out", max_steps=30, report_steps=30, reuse=15, learning_rate=0.01
    )
    result, records = run(given)
    first, last = (records[i]["scores"]["answers"]["acceptance"] for i in (0, -1))
    assert last == result.scores["answers"].acceptance
    assert last > first + 0.05


def test_the_folder_loads_everywhere(target: Path, tmp_path: Path) -> None:
    """transformers and the engine read the folder, with the same logits, and it fits its target."""
    out = tmp_path / "out"
    run(settings(target, out))
    check_pair(target, out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert model.config.num_hidden_layers == 1
    whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ours, theirs = (m.get_input_embeddings().weight for m in (model, whole))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_resumed_run_gives_the_same_bits(target: Path, tmp_path: Path, optimizer: str) -> None:
    """Six steps in one go and three and three: equal weights, in the middle of a pool's epochs."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(settings(target, whole, optimizer=optimizer))
    stopped = settings(target, parts, optimizer=optimizer)

    class Stop(Exception):
        pass

    def stop_at_three(record: dict[str, object]) -> None:
        if record.get("step") == 3:
            raise Stop

    from specmesh.distill.run import distill

    with pytest.raises(Stop):
        distill(stopped, stop_at_three)
    _, records = run(settings(target, parts, optimizer=optimizer, resume=True))
    steps = [record["step"] for record in records if record["event"] == "evaluated"]
    assert steps == [6]
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
