"""`python -m coordinator.drain`: asks the replica of its pod to end, and waits for exactly that."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from coordinator import drain
from specmesh.config import CoordinatorSettings, settings_from_environment
from specmesh.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drain file in the environment of a coordinator that nobody has started."""
    file = tmp_path / "drain"
    monkeypatch.setenv("SPECMESH_COORDINATOR_TOKENIZER", "/t")
    monkeypatch.setenv("SPECMESH_COORDINATOR_SERVER__HEALTH_PORT", "1")
    monkeypatch.setenv("SPECMESH_COORDINATOR_RAY__DRAIN_FILE", str(file))
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    return file


def test_it_waits_until_the_file_is_gone(file: Path) -> None:
    """The file is made, and its removal is what ends the wait well."""

    def replica() -> None:
        while not file.exists():
            time.sleep(0.01)
        file.unlink()

    thread = threading.Thread(target=replica)
    thread.start()
    assert drain.main([]) == 0
    thread.join()


def test_it_does_not_wait_for_nobody(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no replica listens the wait is short and its failure is told."""
    monkeypatch.setattr(drain, "MARGIN_S", 0.05)
    assert drain.main([]) == 1
    assert file.exists()


def test_without_a_file_there_is_nothing_to_do(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No drain file in the settings, or one that cannot be made: status 2 and why."""
    monkeypatch.setenv("SPECMESH_COORDINATOR_RAY__DRAIN_FILE", str(file / "in" / "nothing"))
    assert drain.main([]) == 2
    assert "cannot create" in capsys.readouterr().err
    monkeypatch.delenv("SPECMESH_COORDINATOR_RAY__DRAIN_FILE")
    assert drain.main([]) == 2
    assert "ray.drain_file" in capsys.readouterr().err


def test_settings_of_a_process_without_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given values count like a file's: below the environment, above the defaults; what is unknown
    in either is an error."""
    monkeypatch.setenv("SPECMESH_COORDINATOR_MODEL_NAME", "from-the-environment")
    given = {"tokenizer": "/t", "model_name": "given", "admission": {"max_running": 3}}
    settings = settings_from_environment(CoordinatorSettings, given)
    assert settings.model_name == "from-the-environment"
    assert settings.admission.max_running == 3
    assert settings.tokenizer == Path("/t")
    with pytest.raises(ConfigError, match="tokenizr: unknown key"):
        settings_from_environment(CoordinatorSettings, {**given, "tokenizr": "/u"})
    monkeypatch.setenv("SPECMESH_COORDINATOR_TARGTS", "a:1")
    with pytest.raises(ConfigError, match="SPECMESH_COORDINATOR_TARGTS"):
        settings_from_environment(CoordinatorSettings, given)
