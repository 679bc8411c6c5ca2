"""The baseline of the step benchmarks: transformers' own step, at the right place, as one graph."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_service import bench_steps as draft_steps
from specmesh.bench import steps, transformers_steps
from target_service import bench_steps as target_steps

CONTEXT = 600
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "num_hidden_layers": 3,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' Llama of three narrow layers, float32."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(steps.CONFIGS, "small", steps.CONFIGS["8b"] | SMALL)
    return transformers_steps.load("small", CPU, torch.float32)


def reference(model: Any, step: transformers_steps.TransformersStep, rows: int) -> torch.Tensor:
    """transformers' eager forward and attention over a growing cache of the tokens before."""
    from transformers import DynamicCache

    make_cache: Any = DynamicCache
    cache, behind = make_cache(), CONTEXT - rows
    for index, layer in enumerate(step.cache.layers):
        cache.update(layer.keys[:, :, :behind].clone(), layer.values[:, :, :behind].clone(), index)
    model.set_attn_implementation("eager")
    positions = torch.arange(behind, CONTEXT)[None]
    logits = model(step.token_ids, past_key_values=cache, position_ids=positions).logits
    model.set_attn_implementation("sdpa")
    assert isinstance(logits, torch.Tensor)
    return logits


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 5), (2, 3)])
def test_a_step_feeds_the_last_tokens_of_its_context(model: Any, batch: int, rows: int) -> None:
    """Logits of every row equal those over a cache of just the tokens before, though the static
    cache is longer and full of other keys; a step again after `rewind` is the same step."""
    step = transformers_steps.TransformersStep(model, batch, rows, CONTEXT)
    assert step.cache_len == 640
    with torch.no_grad():
        expected = reference(model, step, rows)
        for _ in range(2):
            step.rewind()
            logits = step.forward()
            assert logits.shape == (batch, rows, 100)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            assert transformers_steps.relative_error(logits, expected) < 1e-4
        step.forward()  # further on
    assert {int(layer.cumulative_length) for layer in step.cache.layers} == {CONTEXT + rows}


def test_a_step_is_one_compiled_graph(model: Any) -> None:
    """Two steps are two compilations, every layer in each; a step that would have to be compiled
    again is an error."""
    compiled: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward  # type: ignore[no-any-return]  # the graph as it was traced

    for index, rows in enumerate((1, 5)):
        step = transformers_steps.TransformersStep(model, 1, rows, CONTEXT)
        with torch.no_grad(), transformers_steps.compiled(step, backend=backend) as run:
            expected = reference(model, step, rows)
            for _ in range(3):
                step.rewind()
                torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
            assert len(compiled) == index + 1
            targets = [str(each.target) for each in compiled[-1].graph.nodes]
            attentions = [each for each in targets if "scaled_dot_product" in each]
            assert len(attentions) == SMALL["num_hidden_layers"]
            step.token_ids = step.token_ids.repeat(1, 2)
            with pytest.raises(torch._dynamo.exc.RecompileError):
                run()
    torch._dynamo.reset()


def test_a_compilation_that_takes_too_long_ends(model: Any) -> None:
    """The alarm reaches through the compiler; afterwards there is none, and the old handler."""

    def backend(_graph: Any, _inputs: Any) -> Callable[..., Any]:
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("went on")

    before = signal.getsignal(signal.SIGALRM)
    step = transformers_steps.TransformersStep(model, 1, 1, CONTEXT)
    with (
        pytest.raises(Exception, match="longer than 1000 s"),
        torch.no_grad(),
        transformers_steps.limited(1000),
        transformers_steps.compiled(step, backend=backend) as run,
    ):
        run()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_replays_compute_the_models_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, captured and replayed at the same place, a step is the model's."""
    pytest.importorskip("transformers")
    wide = {"hidden_size": 256, "intermediate_size": 512}
    monkeypatch.setitem(steps.CONFIGS, "small", steps.CONFIGS["8b"] | SMALL | wide)
    device = torch.device("cuda")
    for (batch, rows), report in transformers_steps.measure(
        "small", [(1, 1), (1, 5)], CONTEXT, device
    ):
        assert report["name"] == f"baseline-transformers-small-b{batch}x{rows}"
        assert report["relative_error"] < 0.03
        assert 0 < report["p20"] <= report["value"] <= report["p80"]
    torch._dynamo.reset()


def test_the_model_is_of_the_named_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 weights, rotation in float32, the head shared where the shape says so."""
    pytest.importorskip("transformers")
    narrow = {"vocab_size": 100, "num_hidden_layers": 1}
    monkeypatch.setitem(steps.CONFIGS, "small", steps.CONFIGS["4layer"] | narrow)
    model = transformers_steps.load("small", CPU)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (192, 576)
    assert not model.training


@pytest.mark.parametrize("command", [target_steps.main, draft_steps.main])
def test_a_baseline_that_cannot_run_is_refused(
    command: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a GPU, without transformers, without a case, or with options of a baseline that was
    not asked for: status 2 and the reason, before anything is built."""

    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            command(list(arguments))
        assert ended.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "baseline are timed on a CUDA device" in refusal("--baseline")
    assert "steps are timed on a CUDA device" in refusal()
    assert "no case that is wanted" in refusal("--baseline", "--only", "b64,b64x1")
    assert "not asked for" in refusal("--baseline-mode", "max-autotune-no-cudagraphs")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers" in refusal("--baseline")


def test_batches_of_no_baseline_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`--baseline-batches` alone would measure nothing."""
    with pytest.raises(SystemExit):
        target_steps.main(["--baseline-batches", "1,8"])
    assert "not asked for" in capsys.readouterr().err


def _report(name: str, value: float) -> dict[str, Any]:
    return {
        "name": name, "value": value, "p20": value, "p80": value, "unit": "ms", "baseline": None,
        "wall": value, "floor": 1.0, "bar": None, "first_use_s": 1.0, "compile_mode": "default",
    }  # fmt: skip


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The target's command with everything that needs a GPU replaced; the baselines asked for."""
    asked: list[Any] = []

    def baselines(
        model: str, cases: list[tuple[int, int]], context: int, _device: object, mode: str
    ) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        asked.append((model, cases, context, mode))
        for batch, rows in cases:
            if batch == 8:
                raise RuntimeError("does not compile")
            name = f"baseline-transformers-{model}-b{batch}x{rows}"
            yield (batch, rows), _report(name, 5.0 + rows)

    decoder = SimpleNamespace(spec=SimpleNamespace(vocab_size=100))
    side = SimpleNamespace(sampler=None, clear=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(steps, "load", lambda *_, **__: decoder)
    monkeypatch.setattr(target_steps, "DeviceVerifier", lambda *_: side)
    monkeypatch.setattr(steps, "measure", lambda case, *_, **__: _report(case.name, 4.0))
    monkeypatch.setattr(steps, "versions", dict)
    monkeypatch.setattr(target_steps, "gc", SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr(transformers_steps, "measure", baselines)
    return asked


def test_a_baseline_is_a_result_of_its_own_and_stands_beside_ours(
    without_device: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 1 unless told otherwise; without the option there is none."""
    pytest.importorskip("transformers")
    path = tmp_path / "steps.jsonl"
    wanted = ["--only", "b1x1,b1x5,b8x1", "--output", str(path)]
    assert target_steps.main([*wanted, "--baseline"]) == 0
    assert without_device == [("8b", [(1, 1), (1, 5)], CONTEXT, "default")]
    found = {each["name"]: each for each in map(json.loads, path.read_text().splitlines())}
    for rows in (1, 5):
        baseline = found[f"baseline-transformers-8b-b1x{rows}"]
        assert baseline["value"] == 5.0 + rows
        beside = found[f"step-8b-b1x{rows}"]["baseline"]
        assert (beside["case"], beside["value"]) == (baseline["name"], baseline["value"])
    assert found["step-8b-b8x1"]["baseline"] is None
    assert len(found) == 5
    shown = capsys.readouterr().out
    assert all(name in shown for name in found)
    path.unlink()
    assert target_steps.main(wanted) == 0
    assert len(without_device) == 1
    assert len(path.read_text().splitlines()) == 3


def test_a_baseline_that_fails_leaves_what_was_measured(
    without_device: list[Any], tmp_path: Path
) -> None:
    """Minutes of other results are not lost with it."""
    pytest.importorskip("transformers")
    path = tmp_path / "steps.jsonl"
    options = ["--only", "b1x1,b8x1", "--baseline", "--baseline-batches", "1,8"]
    with pytest.raises(RuntimeError, match="does not compile"):
        target_steps.main([*options, "--output", str(path)])
    assert without_device == [("8b", [(1, 1), (8, 1)], CONTEXT, "default")]
    names = [json.loads(line)["name"] for line in path.read_text().splitlines()]
    assert names == ["step-8b-b1x1", "step-8b-b8x1", "baseline-transformers-8b-b1x1"]
