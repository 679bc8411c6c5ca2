"""How a run of `specmesh distill` is refused at its start, goes on, and announces its end."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from specmesh.cli import main
from specmesh.cli.outcome import ExitCode
from specmesh.distill import run as run_module
from specmesh.distill.progress import show
from specmesh.distill.run import distill
from specmesh.errors import ConfigError, InvalidRequest
from tests.unit.distill_pair import prompt_file, run, settings, tiny_target

FLAGS = {
    "--layers": 1, "--max-steps": 2, "--length": 96, "--batch-rows": 4, "--micro-rows": 4,
    "--sample-rows": 4, "--pool-rows": 4, "--eval-rows": 2, "--device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template."""
    return tiny_target(tmp_path_factory.mktemp("target"))


def loaded(*_arguments: Any, **_options: Any) -> None:
    """Stands in place of loading a model."""
    raise AssertionError("a model was loaded")


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded ends the test."""
    monkeypatch.setattr(run_module, "load_transformer", loaded)


def command(target: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a run of seconds; flags in `more` come last and win."""
    flags = {"--target": target, "--out": out, "--held-out": prompt_file(target), **FLAGS}
    return ["distill", *(str(part) for pair in flags.items() for part in pair), *more]


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("minutes", "-1"),
        ("minutes", "nan"),
        ("max-steps", "0"),
        ("layers", "99"),
        ("init-layers", "7"),
        ("draft-vocab", "9999"),
        ("optimizer", "sgd"),
        ("learning-rate", "1"),
        ("batch-rows", "6"),
        ("eval-rows", "0"),
        ("eval-rows", "5"),
        ("device", "tpu"),
        ("device", "meta"),
        ("length", "15"),
        ("length", "24"),
        ("length", "999999"),
    ],
)
def test_bad_values_are_wrong_flags(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    """Each ends with code 2 before any model is loaded, makes no folder and names its flag."""
    out = tmp_path / "out"
    assert main(command(target, out, f"--{flag}", value)) == ExitCode.USAGE
    assert flag.replace("-", "_") in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("loads_nothing")
def test_what_is_not_there_is_no_wrong_flag(target: Path, tmp_path: Path) -> None:
    """A missing target, prompts or GPU is a matter of the machine: code 5, never a traceback."""
    missing = [("--target", str(tmp_path)), ("--prompts", str(tmp_path / "none"))]
    if not torch.cuda.is_available():
        missing += [("--device", "cuda"), ("--device", "cuda:1")]
    for flags in missing:
        assert main(command(target, tmp_path / "out", *flags)) == ExitCode.SETUP


def test_a_gpu_beyond_the_last_one(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of two GPUs is taken, the next is refused by name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings(target, tmp_path, device="cuda:1", length=64).check(1)
    with pytest.raises(ConfigError, match="device: cuda:2: this machine has 2 GPUs"):
        settings(target, tmp_path, device="cuda:2", length=64).check(1)


def test_the_module_has_the_commands_codes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """python -m specmesh.distill ends with 2 for a bad value and 5 for a folder that cannot be."""
    for flags, code in ((["--minutes", "-1"], 2), (["--resume"], 5)):
        monkeypatch.setattr("sys.argv", command(target, tmp_path / "out", *flags))
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("specmesh.distill", run_name="__main__")
        assert ended.value.code == code


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("name", ["", "model.gguf"])
def test_nothing_to_resume(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """--resume over a folder without a checkpoint, or none, is refused before the target is read,
    and nothing is written."""
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "missing"):
        flags = ["--target", str(target / name), "--resume"]
        assert main(command(target, out, *flags)) == ExitCode.SETUP
        assert f"out: {out} holds no checkpoint to resume" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("name", ["checkpoint.pt", "model.safetensors"])
def test_a_new_run_overwrites_nothing(target: Path, tmp_path: Path, name: str) -> None:
    """Without --resume a folder with a checkpoint or a model, as a target's, is left as it is."""
    (tmp_path / name).write_text("days of work")
    (tmp_path / "curve.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=rf"out: .* holds {name}.*another folder"):
        distill(settings(target, tmp_path), lambda _record: None)
    assert (tmp_path / name).read_text() == "days of work"
    assert (tmp_path / "curve.jsonl").read_text() == "{}\n"


@pytest.mark.usefixtures("loads_nothing")
def test_rows_without_room_for_held_out_answers(target: Path, tmp_path: Path) -> None:
    """Where no held-out prompt leaves room for an answer, the run is refused at once: by --length
    where a longer row helps, else by the file."""
    prompts = tmp_path / "long.jsonl"
    for size, error, field in ((80, InvalidRequest, "length"), (400, ConfigError, "held_out")):
        prompts.write_text(json.dumps({"prompt": "x" * size}) + "\n")
        with pytest.raises(error) as refused:
            run(settings(target, tmp_path / "out", held_out=prompts))
        assert refused.value.field == field


def test_the_end_is_announced_and_bounded(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card's measurement takes eval_rows rows of each kind at most, and tells of every tenth
    of it from its beginning."""
    out = tmp_path / "out"
    _, records = run(settings(target, out, max_steps=2, eval_rows=2))
    ends = [record for record in records if record["event"] == "measuring"]
    assert records[-len(ends) :] == ends
    shares = [record["progress"] for record in ends]
    assert shares == sorted(shares)
    assert {0.0, 0.5, 1.0} <= set(shares)
    assert {(record["rows"], record["tokens"]) for record in ends} == {(4, 96)}
    times = [record["time_s"] for record in records]
    assert times == sorted(times)
    tables = json.loads((out / "acceptance.json").read_text())["tables"]
    assert {table["text"] for table in tables} == {"answers", "unprompted"}
    assert all(0 < table["num_tokens"] <= 2 * 96 for table in tables)
    show(ends[-1])
    assert "card  100%  (4 rows of 96 tokens" in capsys.readouterr().err


def test_a_resumed_run_says_where_it_goes_on(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first word is the checkpoint's step, before any model is loaded; a checkpoint of another
    run is refused as early."""
    out = tmp_path / "out"
    run(settings(target, out, max_steps=3))
    monkeypatch.setattr(run_module, "load_transformer", loaded)
    with pytest.raises(AssertionError, match="loaded"):
        distill(settings(target, out, resume=True), show)
    assert "goes on from step 3" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"resume: .*seed: 0 there, 1 now"):
        distill(settings(target, out, resume=True, seed=1), show)
    assert not capsys.readouterr().err
