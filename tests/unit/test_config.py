"""Settings: precedence, and that nothing unknown is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmesh.config import (
    CoordinatorSettings,
    DraftSettings,
    SpeculationSettings,
    TargetSettings,
    env_prefix,
    load_settings,
    setting_names,
    settings_from_environment,
)
from specmesh.errors import ConfigError

SERVICES = (DraftSettings, TargetSettings, CoordinatorSettings)
TOKENIZER = ("--tokenizer", "/t")
NO_ADDRESSES = (
    *("x", "127.0.0.1", "::1", "[::1]", "x:", ":1", "x:0", "x:65536", "x:-1", "x:http", "x:\u0661"),
    *("x:1:2", "::1:5", "[x]:1", "x y:1", "x:1\ny", "x:1/path", "http://x:1", "dns:///x:1"),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "draft.toml"
    path.write_text('[engine]\nmodel = "/models/a"\nnum_pages = 3\ntoken_budget = 77\n')
    return path


def test_flags_beat_environment_beats_file_beats_default(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source wins over the one before it, key by key."""
    monkeypatch.setenv("SPECMESH_DRAFT_ENGINE__NUM_PAGES", "12")
    monkeypatch.setenv("SPECMESH_DRAFT_ENGINE__PREFILL_CHUNK", "5")
    argv = ["--config", str(config), "--engine.prefill-chunk", "6", "--server.port", "0"]
    settings = load_settings(DraftSettings, argv)
    assert settings.engine.model == Path("/models/a")
    assert settings.engine.token_budget == 77
    assert settings.engine.num_pages == 12
    assert settings.engine.prefill_chunk == 6
    assert settings.server.port == 0
    assert (
        settings.engine.page_size
        == DraftSettings.model_fields["engine"].annotation(model=Path("x")).page_size
    )


def test_lists_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica lists read the same from the environment and from flags."""
    monkeypatch.setenv("SPECMESH_COORDINATOR_TARGETS", "a:1, b:2")
    settings = load_settings(CoordinatorSettings, ["--tokenizer", "/t", "--drafts", "c:3,d:4"])
    assert settings.targets == ("a:1", "b:2")
    assert settings.drafts == ("c:3", "d:4")


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets and drafts without a port that can be are named; gRPC would dial 443 for ever."""
    for field in ("targets", "drafts"):
        with pytest.raises(ConfigError, match=f"^{field}: .* is not host:port"):
            load_settings(CoordinatorSettings, [*TOKENIZER, f"--{field}", f"a:1,{address}"])
    monkeypatch.setenv("SPECMESH_COORDINATOR_DRAFTS", address)
    with pytest.raises(ConfigError, match=r"^drafts: "):
        settings_from_environment(CoordinatorSettings, {"tokenizer": "/t"})


def test_addresses_of_every_kind_are_taken() -> None:
    """Names, both kinds of numbers and the first and last port pass as they are; none is a list."""
    given = ("a:1", "draft-0.draft.specmesh.svc:50061", "10.0.0.1:65535", "[fe80::1%eth0]:7")
    flags = ["--tokenizer", "/t", "--targets", ",".join(given), "--drafts", ""]
    settings = load_settings(CoordinatorSettings, flags)
    assert settings.targets == given
    assert settings.drafts == ()


def test_every_bad_key_and_value_is_named_at_once(tmp_path: Path) -> None:
    """Unknown keys and bad values of the file are errors, all of them in one message."""
    path = tmp_path / "bad.toml"
    path.write_text('tokenizr = "/t"\n[admission]\nmax_running = -1\nmax_runing = 2\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(CoordinatorSettings, ["--config", str(path)])
    message = str(caught.value)
    for part in ("tokenizr: unknown key", "admission.max_runing: unknown key", "tokenizer: Field"):
        assert part in message
    assert "admission.max_running" in message


def test_misspelt_environment_variables_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with a service's prefix that names no setting is refused."""
    monkeypatch.setenv("SPECMESH_TARGET_ENGINE__NUM_PAGE", "1")
    with pytest.raises(ConfigError, match="SPECMESH_TARGET_ENGINE__NUM_PAGE"):
        load_settings(TargetSettings, ["--engine.model", "/m"])


def test_bytes_that_are_no_text_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no UTF-8 reaches Python as half characters, which nobody can send, log or print."""
    half = b"a\x9f:1".decode("utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match="not UTF-8: '--targets'"):
        load_settings(CoordinatorSettings, ["--tokenizer", "x", f"--targets={half}"])
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_settings(CoordinatorSettings, ["--tokenizer", half])
    monkeypatch.setenv("OTHER", half)
    assert load_settings(CoordinatorSettings, ["--tokenizer", "\u00e9"]).tokenizer == Path("\u00e9")
    monkeypatch.setenv("SPECMESH_COORDINATOR_TARGETS", half)
    with pytest.raises(ConfigError, match="not UTF-8: 'SPECMESH_COORDINATOR_TARGETS'"):
        load_settings(CoordinatorSettings, ["--tokenizer", "x"])
    with pytest.raises(ConfigError, match="not UTF-8"):
        settings_from_environment(CoordinatorSettings, {"tokenizer": "x"})


def test_unknown_flags_exit_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that names no setting ends the program with status 2 and the flag's name."""
    with pytest.raises(SystemExit) as caught:
        load_settings(CoordinatorSettings, ["--tokenizer", "/t", "--bogus", "1"])
    assert caught.value.code == 2
    assert "--bogus" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"[engine", b"a = ", b"\xff", b"a = " + b"[" * 100_000])
def test_unreadable_files_are_config_errors(tmp_path: Path, content: bytes) -> None:
    """Broken TOML, other bytes and missing files are one-line errors that name the file."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_settings(DraftSettings, ["--config", str(path)])
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_settings(DraftSettings, ["--config", str(tmp_path / "missing.toml")])


def test_print_config_shows_what_was_resolved(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--print-config prints the merged settings as JSON and exits with 0."""
    with pytest.raises(SystemExit) as caught:
        load_settings(DraftSettings, ["--config", str(config), "--print-config"])
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out)["engine"]["num_pages"] == 3


@pytest.mark.parametrize("cls", SERVICES)
def test_every_setting_has_an_environment_name(cls: type) -> None:
    """Manifests address settings by variable: the names are unique and reach nested sections."""
    names = ["__".join(path) for path in setting_names(cls)]
    assert len(names) == len(set(names)) > 10
    assert "telemetry__sampling_ratio" in names
    assert env_prefix(cls).startswith("SPECMESH_")


def test_tls_files_go_together() -> None:
    """Half a TLS identity is refused instead of silently speaking plaintext."""
    with pytest.raises(ConfigError, match="go together"):
        load_settings(DraftSettings, ["--engine.model", "/m", "--server.tls.certificate", "/c.pem"])


def test_no_target_can_be_set_to_refuse_what_a_coordinator_can_be_set_to_ask() -> None:
    """Tokens a plain-decoding command asks for and grants: a target that grants fewer would fail
    every request without a draft, in the caller's name."""
    with pytest.raises(ConfigError, match="max_plain_steps"):
        load_settings(TargetSettings, ["--engine.model", "/m", "--max-plain-steps", "255"])
    with pytest.raises(ValueError, match="plain_steps"):
        SpeculationSettings(plain_steps=257)
    assert SpeculationSettings(plain_steps=256).plain_steps == 256
