"""What a user types wrong: one line that names the field, and the exit code of its kind."""

from __future__ import annotations

import pytest
import torch

from specmesh.cli import main
from specmesh.cli.outcome import ExitCode

MODEL_COMMANDS = {
    "window-report": ["--model", "none", "--window", "2", "--prompt", "hi", "--device"],
    "acceptance": ["--target", "none", "--draft", "none", "--device"],
    "bench-stack": ["--target-device"],
}


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the one line of a command that fails; line breaks of the display undone."""
    code = main(arguments)
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.startswith("error: ")
    assert shown.count("error: ") == 1
    return code, shown.removeprefix("error: ")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "cuda:999", "meta", "cpu:0"])
@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_a_flag_that_names_no_device(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that what is no device is a wrong flag, refused by its field before any model."""
    flags = MODEL_COMMANDS[command]
    code, shown = error_of([command, *flags, name], capsys)
    assert code == ExitCode.USAGE
    field = flags[-1].removeprefix("--").replace("-", "_")
    assert shown == f"{field}: unsupported device {name}: it must be cpu, cuda or cuda:N"


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_a_gpu_that_is_not_there(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that a GPU which the machine lacks is a setting that cannot work, not a bug."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, shown = error_of([command, *MODEL_COMMANDS[command], "cuda"], capsys)
    assert code == ExitCode.SETUP
    assert "device: cuda was asked for" in shown
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, shown = error_of([command, *MODEL_COMMANDS[command], "cuda:2"], capsys)
    assert code == ExitCode.SETUP
    assert "device: cuda:2 was asked for, the last one is cuda:1" in shown
