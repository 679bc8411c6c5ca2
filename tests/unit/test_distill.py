"""`specmesh distill` on a tiny pair: it learns, resumes, loads, and stops with reasons."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from specmesh.distill import folder, trainer
from specmesh.distill.card import _data
from specmesh.distill.losses import LossWeights
from specmesh.distill.run import distill
from specmesh.distill.sampling import Rows, Turn
from specmesh.distill.trainer import Trainer
from specmesh.engine import weight_check
from specmesh.engine.decoder import StepBatch, load_decoder
from specmesh.engine.model_pair import check_pair
from specmesh.engine.weights import CHECKSUMS_FILE, recorded_files
from specmesh.errors import ConfigError
from tests.exact.grpc_sessions import Generation, serve
from tests.unit.distill_pair import prompt_file, run, settings, tiny_target

ROOT = Path(__file__).resolve().parents[2]


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
    scores = [record["scores"] for record in records if record["event"] == "evaluated"]
    first, last = (scores[i]["answers"]["acceptance"] for i in (0, -1))
    assert last == result.scores["answers"].acceptance
    assert last > first + 0.05


def test_what_a_step_is_trained_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given tokens count nothing, requests less than answers; a step's weights add up to one; the
    loss is KL alone at first and mostly total variation at the end."""
    parts: list[tuple[Rows, Tensor, Tensor, LossWeights]] = []
    whole = trainer.distillation_loss
    accumulate = Trainer._accumulate

    def watched(self: Trainer, rows: Rows, *arguments: Any) -> None:
        def loss(
            student: Tensor, states: Tensor, head: Tensor, weights: Tensor, mix: LossWeights
        ) -> Any:
            parts.append((rows, states, weights, mix))
            return whole(student, states, head, weights, mix)

        monkeypatch.setattr(trainer, "distillation_loss", loss)
        accumulate(self, rows, *arguments)

    monkeypatch.setattr(Trainer, "_accumulate", watched)
    run(settings(target, tmp_path / "out", max_steps=10, micro_rows=2))
    steps = list(zip(parts[::2], parts[1::2], strict=True))
    assert len(steps) == 10
    counts = {Turn.PROMPT: 0.0, Turn.ANSWER: 1.0, Turn.USER: 0.4, Turn.FREE: 1.0}
    seen = set()
    for number, step in enumerate(steps):
        shares = [
            torch.tensor([counts[Turn(turn)] for turn in rows.turns.flatten().tolist()])
            for rows, *_ in step
        ]
        total = sum(float(share.sum()) for share in shares)
        for (rows, states, weights, mix), share in zip(step, shares, strict=True):
            seen |= set(rows.turns.flatten().tolist())
            torch.testing.assert_close(weights, share[share > 0] / total)
            assert torch.equal(states, rows.hidden.flatten(0, 1)[share > 0])
            grown = min(1.0, max(0.0, (number / 10 - 0.3) / 0.3))
            expected = (1 - 0.8 * grown, 3 * grown)
            assert (mix.kl, mix.tv) == pytest.approx(expected)
    assert seen == {int(turn) for turn in Turn}


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


def test_the_folder_is_sealed(target: Path, tmp_path: Path) -> None:
    """Its checksums.json records the model's files and no others: it fits them while a run goes on
    and once that has written them anew. A byte of the weights that changes later is noticed by
    `weight_check` and when a service loads them."""
    out = tmp_path / "out"
    run(settings(target, out, max_steps=3))
    first = recorded_files(out)
    shared = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert set(first) == {"config.json", "model.safetensors", *shared}
    distill(settings(target, out, resume=True), lambda _record: weight_check.check(out))
    weight_check.check(out)
    load_decoder(out)
    second = recorded_files(out)
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors"]
    weights = out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for read in (weight_check.check, load_decoder):
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            read(out)


def test_a_draft_that_cannot_be_written_leaves_no_wrong_checksums(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves the older draft whole; where renaming fails midway, no file is vouched
    for. Either is an error that names --out, and leaves nothing else behind."""
    out = tmp_path / "out"
    run(settings(target, out, max_steps=3))
    names = {path.name for path in out.iterdir()}
    resumed = settings(target, out, resume=True)

    def full(*_args: object, **_options: object) -> None:
        raise RuntimeError("No space left on device")

    def refuse(source: Path, place: Path) -> None:
        if place.name == "model.safetensors":
            raise OSError("refused")
        replace_file(source, place)

    replace_file = os.replace
    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(ConfigError, match=r"out: .*No space left"):
        run(resumed)
    monkeypatch.undo()
    weight_check.check(out)
    assert {path.name for path in out.iterdir()} == names
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConfigError, match=r"out: .*refused"):
        run(resumed)
    assert {path.name for path in out.iterdir()} == names - {CHECKSUMS_FILE}


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

    with pytest.raises(Stop):
        distill(stopped, stop_at_three)
    _, records = run(settings(target, parts, optimizer=optimizer, resume=True))
    steps = [record["step"] for record in records if record["event"] == "evaluated"]
    assert steps == [6]
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_restricted_head_is_served(target: Path, tmp_path: Path) -> None:
    """--draft-vocab: the engine's logits are the student's on the kept ids and -inf elsewhere, and
    rounds with such a draft run through the services."""
    out = tmp_path / "out"
    run(settings(target, out, draft_vocab=40, max_steps=2))
    ids = load_file(out / "model.safetensors")["draft_vocab.ids"]
    assert ids.shape == (40,)
    assert 257 in ids  # whatever else is dropped, the end of an answer is not
    decoder = load_decoder(out)
    spec = decoder.spec
    batch = StepBatch.pack([[256, 5, 6]], [0], [[0]], range(3), page_size=16)
    logits = decoder.forward(batch, decoder.new_cache(1, 16))
    others = torch.ones(spec.vocab_size, dtype=torch.bool)
    others[ids] = False
    assert bool((logits[:, others] == float("-inf")).all())
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(torch.tensor([[256, 5, 6]])).logits[0]
    torch.testing.assert_close(logits[:, ids], plain[:, ids], rtol=1e-4, atol=1e-4)
    generations = [
        Generation(str(i), [256, 5, 6], 12, lambda _round: 3, seed=i, vocab_size=spec.vocab_size)
        for i in range(4)
    ]
    asyncio.run(serve(load_decoder(target), decoder, [generations]))
    assert all(len(each.output) == 12 for each in generations)
    assert sum(each.num_accepted for each in generations) > 0


def test_a_loss_that_is_not_finite_stops_the_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN is an error that names the flag; the last good checkpoint stays and resumes."""
    out = tmp_path / "out"
    given = settings(target, out, max_steps=9)
    whole = trainer.distillation_loss

    def poisoned(*arguments: Any) -> Any:
        loss, kl, overlap = whole(*arguments)
        return loss * float("nan"), kl * float("nan"), overlap

    def poison_after_three(record: dict[str, Any]) -> None:
        if record.get("step") == 3:
            monkeypatch.setattr(trainer, "distillation_loss", poisoned)

    with pytest.raises(ConfigError, match=r"learning_rate: the loss is not finite at step 6"):
        distill(given, poison_after_three)
    monkeypatch.undo()
    _, records = run(settings(target, out, max_steps=9, resume=True))
    steps = [record["step"] for record in records if record["event"] == "evaluated"]
    assert steps == [6, 9]
    lines = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "scores" in line] == [0, 3, 6, 9]


def test_the_card_tells_what_was_done(target: Path, tmp_path: Path) -> None:
    """Recipe, data and the measurement's own tables; every number comes from the run."""
    out = tmp_path / "out"
    result, _ = run(settings(target, out, max_steps=4, draft_vocab=50, seed=3))
    text = (out / "README.md").read_text()
    assert "Initialised from target layers 0; Muon" in text
    assert f"{result.place.step} steps of 4 rows x 96 tokens" in text
    assert "50 most frequent" in text
    assert "Seed 3" in text
    assert (out / "acceptance.md").read_text().rstrip() in text
    assert "or begun with a few words that the target completed" in text
    given = replace(settings(target, out), prompts=Path("asked.jsonl"))
    described = _data(given, result.place)
    assert "given in `asked.jsonl`" in described
    assert "begun" not in described


def test_two_processes_train_one_model(target: Path, tmp_path: Path) -> None:
    """Under torchrun every process samples its own rows and all end with the same weights."""
    out, held_out = tmp_path / "out", prompt_file(tmp_path)
    flags = {
        "target": target, "out": out, "layers": 1, "max-steps": 3, "held-out": held_out,
        "batch-rows": 4, "micro-rows": 1, "length": 96, "sample-rows": 4, "pool-rows": 4,
        "report-steps": 3, "eval-rows": 2, "device": "cpu",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--standalone", "-m", "specmesh.distill"]  # fmt: skip
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    last = json.loads((out / "curve.jsonl").read_text().splitlines()[-1])
    assert last["tokens_sampled"] == 2 * 4 * 96 * (last["pool"] + 1)
    assert last["tokens_trained"] == 3 * 4 * 96
    assert done.stderr.count("draft written") == 1
