"""`specmesh window-report`: dropped mass, bound and error by layer, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specmesh.cli import main
from specmesh.engine.decoder import StepBatch, load_decoder
from specmesh.engine.layer_ops import Linear
from specmesh.engine.step_attention import HeadNorms, StepAttention
from specmesh.errors import InvalidRequest
from specmesh.window_report import LayerError, measure
from tests.e2e.tiny_pair import write_pair
from tests.unit.tiny_models import random_tokens, save, tiny_model

TOKENS = random_tokens(40, seed=3)


def measured(tmp_path: Path, family: str, window: int, **changes: Any) -> list[LayerError]:
    """A tiny model's report."""
    folder = save(tiny_model(family, **changes), tmp_path / family)
    return measure(load_decoder(folder), TOKENS, window)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dropped_mass_is_that_of_transformers_attention(tmp_path: Path, family: str) -> None:
    """delta by layer is summed from the probabilities that another implementation returns."""
    window, model = 9, tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        probabilities = model(torch.tensor([TOKENS]), output_attentions=True).attentions
    position = torch.arange(len(TOKENS))
    far = position[None, :] <= position[:, None] - window
    for report, layer in zip(measured(tmp_path, family, window), probabilities, strict=True):
        delta = torch.where(far, layer[0], 0.0).sum(-1)[:, window:]
        assert report.num_rows == delta.numel() == 4 * (len(TOKENS) - window)
        assert report.mean_delta == pytest.approx(float(delta.mean()), rel=1e-4)
        assert report.max_delta == pytest.approx(float(delta.max()), rel=1e-4)


def test_outputs_move_and_stay_within_the_bound(tmp_path: Path) -> None:
    """0 < ||o - o'|| <= 2 delta M in every layer, and a wider window costs less."""
    narrow, wide = (measured(tmp_path, "llama", window) for window in (4, 30))
    for report in (*narrow, *wide):
        assert 0 < report.mean_error <= report.mean_bound
        assert 0 < report.max_error <= report.max_bound
        assert 0 < report.tightest <= 1 + 1e-5
        assert 0 < report.max_delta < 1
    for near, far in zip(narrow, wide, strict=True):
        assert far.mean_delta < near.mean_delta
        assert far.mean_error < near.mean_error


class _Spy:
    """An attention that keeps what the first layer's made."""

    def __init__(self, attention: StepAttention, seen: list[torch.Tensor]) -> None:
        self._attention, self._seen = attention, seen

    def __call__(
        self, project: Linear, x: torch.Tensor, index: int, norms: HeadNorms | None
    ) -> torch.Tensor:
        found = self._attention(project, x, index, norms)
        if index == 0:
            self._seen.append(found)
        return found


def first_layer(folder: Path) -> torch.Tensor:
    """What serving computes in the first layer's attention, [num_tokens, heads, head_dim]."""
    decoder, seen = load_decoder(folder), []
    batch = StepBatch.pack([TOKENS], [0], [[0]], range(len(TOKENS)), page_size=64)
    run: Any = decoder.run
    spied: Any = decoder
    spied.run = lambda ids, attention, rows: run(ids, _Spy(attention, seen), rows)
    decoder.forward(batch, decoder.new_cache(1))
    return seen[0].view(len(TOKENS), 4, -1)


def test_error_is_the_served_outputs_under_a_window(tmp_path: Path) -> None:
    """In the first layer, whose input is the same, the output moves as a windowed model's does."""
    window = 6
    full = save(tiny_model("mistral", sliding_window=None), tmp_path / "full")
    near = save(tiny_model("mistral", sliding_window=window), tmp_path / "near")
    (report, *_) = measure(load_decoder(full), TOKENS, window)
    moved = (first_layer(full) - first_layer(near)).norm(dim=-1)[window:]
    assert report.mean_error == pytest.approx(float(moved.mean()), rel=1e-4)
    assert report.max_error == pytest.approx(float(moved.max()), rel=1e-4)


def test_a_window_that_holds_the_prompt_costs_nothing(tmp_path: Path) -> None:
    """No row is shortened, and everything is 0."""
    for report in measured(tmp_path, "llama", len(TOKENS)):
        assert report == LayerError(report.layer, None, 0, *[0.0] * 7)


def test_a_window_of_its_own_is_what_a_model_is_held_against(tmp_path: Path) -> None:
    """Within its own window nothing is lost; a narrower one loses what the own one had."""
    own = 12
    for report in measured(tmp_path, "mistral", own, sliding_window=own):
        assert (report.own_window, report.num_rows, report.max_error) == (own, 0, 0.0)
    (tmp_path / "again").mkdir()
    narrower = measured(tmp_path / "again", "mistral", 5, sliding_window=own)
    assert all(0 < report.max_error <= report.max_bound for report in narrower)


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    """Empty and overlong prompts and a window of 0 are refused by name."""
    decoder = load_decoder(save(tiny_model("llama"), tmp_path / "llama"))
    for tokens, window, message in (
        ([], 4, "prompt: 0 tokens, expected 1 to 512"),
        ([1] * 513, 4, "prompt: 513 tokens"),
        ([1], 0, "window: 0 is below 1"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            measure(decoder, tokens, window)


def test_command_prints_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a layer, as a table and as JSON; prompts from a file too; errors end with code 2."""
    folder, _ = write_pair(tmp_path)
    flags = ["window-report", "--model", str(folder), "--window", "5"]
    assert main([*flags, "--prompt", "Once upon a time", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["prompt_tokens"], document["window"]) == (16, 5)
    assert [layer["layer"] for layer in document["layers"]] == [0, 1]
    assert document["layers"][0]["num_rows"] == 4 * 11
    text = tmp_path / "prompt.txt"
    text.write_text("Once upon a time")
    assert main([*flags, "--prompt-file", str(text)]) == 0
    printed = capsys.readouterr().out
    assert "16 tokens, window 5" in printed
    assert f"{document['layers'][1]['max_error']:.4g}" in printed
    assert main(flags) == 2
    assert "one of --prompt and --prompt-file" in capsys.readouterr().err
