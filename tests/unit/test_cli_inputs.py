"""What a user types wrong: one line that names the field, and the exit code of its kind."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from specmesh import launcher
from specmesh.cli import main
from specmesh.cli.outcome import ExitCode
from specmesh.cli.up import running_stack, settings_flags
from specmesh.errors import ConfigError, InvalidRequest
from specmesh.request import GenerateOptions
from specmesh.rpc import Health, RpcLimits, bind, create_server
from tests.rpc.test_credentials import Authority
from tests.unit.scripted_coordinator import Script, serving

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


def test_a_label_names_one_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that two further drafts of one name are refused before anything starts."""
    flags = ["bench-stack", "--list", "--other-draft", "b=/x", "--other-draft", "b=/y"]
    code, shown = error_of(flags, capsys)
    assert (code, shown) == (ExitCode.USAGE, "other_draft: a label twice among b, b")


@pytest.mark.parametrize("service", ["coordinator-b", "draft-", "target-ahead", "coordinater"])
def test_a_setting_of_a_process_that_bench_stack_has_not(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that --set of no known label or service is refused before models are looked at."""
    flags = ["bench-stack", "--target", "none", "--draft", "none", "--other-draft", "ahead=none"]
    flags += ["--set", f"{service}.speculation.num-ahead=16"]
    code, shown = error_of(flags, capsys)
    assert code == ExitCode.USAGE
    assert shown == (
        f"set: '{service}.speculation.num-ahead=16' is not SERVICE.section.key=value with SERVICE "
        "one of coordinator, draft, target, coordinator-ahead, draft-ahead"
    )


def test_labels_are_names_for_bench_stack_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that --set takes both processes of a label there, and that up knows no labels."""
    flags = ["bench-stack", "--other-draft", "ahead=none", "--list"]
    for service in ("coordinator-ahead", "draft-ahead", "draft"):
        flags += ["--set", f"{service}.telemetry.log_level=debug"]
    assert main(flags) == ExitCode.OK
    capsys.readouterr()
    with pytest.raises(InvalidRequest, match=r"SERVICE one of coordinator, draft, target$"):
        settings_flags(["draft-ahead.telemetry.log_level=debug"])


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


def test_a_start_in_the_cache_folder_of_another_run_keeps_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that `up` and its like write to a log folder of this run alone."""
    monkeypatch.setattr(launcher.sys, "executable", str(tmp_path / "no python"))
    seen = []
    plan = launcher.plan

    def planned(options: launcher.StackOptions) -> list[launcher.ServiceCommand]:
        seen.append(plan(options))
        return seen[-1]

    monkeypatch.setattr(launcher, "plan", planned)
    for _ in range(2):
        with (
            pytest.raises(ConfigError, match="cannot start target"),
            running_stack(
                (tmp_path, None), cache_dir=tmp_path, ports=launcher.Ports(0, 0, 0), trace_dir=None
            ),
        ):
            pass
    capsys.readouterr()
    first, second = ({command.log_path for command in commands} for commands in seen)
    assert not first & second
    assert {path.parents[1] for path in first | second} == {tmp_path / "logs"}


@contextmanager
def health_only(*services: str) -> Iterator[str]:
    """The address of a server that answers health checks under these names, and nothing else."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def started() -> tuple[str, object]:
        server = create_server(RpcLimits())
        await Health(services).attach(server)
        port = bind(server, "127.0.0.1:0")
        await server.start()
        return f"127.0.0.1:{port}", server

    address, server = asyncio.run_coroutine_threadsafe(started(), loop).result()
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("command", [["health"], ["generate", "hi"]])
@pytest.mark.parametrize(
    ("service", "told"),
    [
        ("specmesh.v1.TargetService", " but a target service"),
        ("specmesh.v1.DraftService", " but a draft service"),
        ("elsewhere.v1.Service", ""),
    ],
)
def test_an_address_of_something_else(
    service: str, told: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that a port which is no coordinator's is said to be none, and what it is if known."""
    with health_only(service) as address:
        code, shown = error_of([*command, "--address", address], capsys)
    assert code == ExitCode.USAGE
    assert shown == f"address: {address} is no coordinator{told}"


@pytest.mark.parametrize("stdin", ["", " \n"])
@pytest.mark.parametrize(
    "prompt",
    [[""], [" \t"], ["-"], ["", "--raw"], ["", "--system", "s"], ["--token-ids", ""], ["--file"]],
)
def test_a_prompt_of_nothing(
    prompt: list[str],
    stdin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Proves that every way to give no text is refused, and that nothing is sent."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    if prompt == ["--file"]:
        (tmp_path / "prompt.txt").write_text(stdin)
        prompt = ["--file", str(tmp_path / "prompt.txt")]
    script = Script()
    with serving(script) as address:
        code, shown = error_of(["generate", *prompt, "--address", address], capsys)
    assert (code, shown) == (ExitCode.USAGE, "prompt: is empty")
    assert script.requests == []


def test_white_space_can_be_continued(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that a raw text of white space is sent: it is one."""
    script = Script()
    with serving(script) as address:
        assert main(["generate", "\n", "--raw", "--address", address]) == ExitCode.OK
    capsys.readouterr()
    assert [request.text for request in script.requests] == ["\n"]


def test_the_demo_needs_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that nothing is started for a prompt of nothing."""
    assert error_of(["demo", ""], capsys) == (ExitCode.USAGE, "prompt: is empty")


@pytest.mark.parametrize("command", [["health"], ["generate", "hi"]])
def test_a_file_that_holds_no_certificate(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that TLS files are read before anybody is called, and blamed by their path."""
    bad = tmp_path / "bad.txt"
    bad.write_text("hello")
    code, shown = error_of([*command, "--tls-authority", str(bad)], capsys)
    assert (code, shown) == (ExitCode.SETUP, f"tls: {bad} holds no certificate in PEM")
    good = Authority(tmp_path, "ours").issue("client")
    flags = ["--tls-authority", str(good.authority), "--tls-certificate", str(good.certificate)]
    code, shown = error_of([*command, *flags, "--tls-key", str(bad)], capsys)
    assert code == ExitCode.SETUP
    assert shown == f"tls: {bad} holds no private key in PEM that fits {good.certificate}"
    code, shown = error_of([*command, *flags], capsys)
    assert (code, shown) == (ExitCode.SETUP, "--tls-certificate and --tls-key go together")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--top-k", "-3"], "top_k: -3 is not in 0 to 4294967295"),
        (["--seed", "-1"], "seed: -1 is not in 0 to 18446744073709551615"),
        (["--stop-token-id", "4294967296"], "stop_token_ids: 4294967296 is not in 0 to 4294967295"),
        (["--logit-bias=-1=2"], "logit_bias: -1 is not in 0 to 4294967295"),
        (["--resume-token-ids", "5 -6"], "resume_token_ids: -6 is not in 0 to 4294967295"),
    ],
)
def test_a_number_that_no_request_holds(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that the error names the field and what it may hold."""
    assert error_of(["generate", "hi", *flags], capsys) == (ExitCode.USAGE, expected)


def test_prompt_ids_that_no_request_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves the same of token ids as a prompt, at the command and in Python."""
    expected = "prompt: -2 is not in 0 to 4294967295"
    assert error_of(["generate", "--token-ids", "1,-2"], capsys) == (ExitCode.USAGE, expected)
    with pytest.raises(InvalidRequest, match=r"^prompt: token id -2 is not in 0 to 4294967295$"):
        GenerateOptions().request([1, -2])


@pytest.mark.parametrize("command", [["health"], ["generate", "hi"]])
def test_a_timeout_says_how_long_was_waited(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that a call which ran out of time is one line with the time it had."""
    with socket.socket() as silent:  # takes the connection and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code, shown = error_of([*command, "--timeout", "0.05", "--address", address], capsys)
    assert code == ExitCode.DEADLINE
    assert shown == "timeout: the request took longer than 0.05 s"


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize("name", ["decode", "draft", "verify", "verify-per-token", "overhead"])
def test_a_time_that_plan_cannot_take(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that each time is refused by its field outside its range, and 0 only where it cannot
    be."""
    times = {"decode": "10", "draft": "1", "verify": "12"} | {name: value}
    flags = [f"--{flag}={time}" for flag, time in times.items()]
    above_0 = name in ("decode", "verify")
    if value == "0" and not above_0:
        assert main(["plan", "--rates", ".8", *flags]) == ExitCode.OK
        return
    wanted = "above 0" if above_0 else "of 0 or more"
    expected = f"{name.replace('-', '_')}: {value} is no finite number {wanted}"
    assert error_of(["plan", "--rates", ".8", *flags], capsys) == (ExitCode.USAGE, expected)
