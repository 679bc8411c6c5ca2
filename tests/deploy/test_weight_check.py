"""Weights on a volume: sealed folders pass, anything else is refused with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmesh.engine import weight_check
from specmesh.engine.weights import fingerprint
from specmesh.errors import ConfigError
from tests.e2e.tiny_pair import write_pair


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_pair(tmp_path)[0]


def run(command: str, folder: Path) -> int:
    return weight_check.main([command, str(folder)])


def test_a_sealed_folder_passes(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without checksums a folder is refused with how to make them; sealed it passes."""
    assert run("check", target) == 2
    assert f"weight_check seal {target}" in capsys.readouterr().err
    assert run("seal", target) == 0
    assert run("check", target) == 0
    recorded = json.loads((target / "checksums.json").read_text())["files"]
    assert set(recorded) == {each.name for each in target.iterdir()} - {"checksums.json"}


def test_every_damage_is_named(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped bit, a cut file, a missing and an unrecorded one: status 2, all in one line."""
    (target / "notes.txt").write_text("one")
    weight_check.seal(target)
    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (target / "config.json").write_text("{}")
    (target / "notes.txt").unlink()
    (target / "more.safetensors").write_bytes(b"")
    assert run("check", target) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "model.safetensors has sha256",
        "config.json has 2 bytes",
        "notes.txt is missing",
        "more.safetensors is not recorded",
    ):
        assert part in line
    with pytest.raises(ConfigError, match="is damaged"):
        fingerprint(target)  # the service itself would not take them either


def test_an_empty_volume_is_refused(tmp_path: Path) -> None:
    """Before anything was copied in: status 2 for both commands."""
    assert run("check", tmp_path) == 2
    assert run("seal", tmp_path) == 2
