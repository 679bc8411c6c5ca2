"""The launcher starts processes, tells how they fare, and ends exactly those it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from specmesh.errors import ConfigError, NotReady
from specmesh.launcher import (
    KEPT_RUNS,
    Interrupted,
    Ports,
    ServiceCommand,
    Stack,
    StackOptions,
    free_port,
    interruptible,
    is_ready,
    new_log_dir,
    plan,
)
from specmesh.processes import process_table

# A service as the launcher sees one: argv is port, then what it does.
SERVICE = """
import signal, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
port, deeds = int(sys.argv[1]), sys.argv[2:]
print("hello from the log", flush=True)
if "die" in deeds:
    print("weights not found", flush=True)
    sys.exit(3)
if "orphan" in deeds:
    # What Ray does: a child in a session of its own, which outlives its parent.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("child", child.pid, flush=True)
if "stubborn" in deeds:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
serving = health_pb2.HealthCheckResponse
status = serving.NOT_SERVING if "loading" in deeds else serving.SERVING
servicer.set("readiness", status)
server.add_insecure_port(f"127.0.0.1:{port}")
server.start()
signal.pause()
"""


def command(folder: Path, name: str, *deeds: str) -> ServiceCommand:
    """A service that does `deeds`, on a free port."""
    script = folder / "service.py"
    script.write_text(SERVICE)
    port = free_port(0, name)
    argv = (sys.executable, str(script), str(port), *deeds)
    return ServiceCommand(name, argv, port, folder / "logs" / f"{name}.log")


def pids_of(commands: Sequence[ServiceCommand]) -> list[int]:
    """Processes whose command line is one of the commands'."""
    wanted = {command.argv for command in commands}
    found = []
    for pid in process_table():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if tuple(word.decode() for word in words) in wanted:
            found.append(pid)
    return found


def test_a_stack_becomes_ready_and_ends_with_the_block(tmp_path: Path) -> None:
    """Proves readiness by health checks, logs in files, and no process left afterwards."""
    commands = [command(tmp_path, "target"), command(tmp_path, "coordinator")]
    ready: list[str] = []
    with Stack(commands) as stack:
        stack.wait_ready(60, lambda name, _seconds: ready.append(name))
        assert sorted(ready) == ["coordinator", "target"]
        assert is_ready(stack.address("target"))
        assert len(pids_of(commands)) == 2
    assert pids_of(commands) == []
    assert "hello" in (tmp_path / "logs" / "target.log").read_text()


def test_each_run_has_logs_of_its_own(tmp_path: Path) -> None:
    """Proves that runs in one cache folder share no log, and that old runs' logs are bounded."""
    (tmp_path / "notes").mkdir()
    folders = [new_log_dir(tmp_path) for _ in range(KEPT_RUNS + 3)]
    assert len(set(folders)) == len(folders)
    assert sorted(path for path in tmp_path.iterdir()) == sorted(
        [tmp_path / "notes", *folders[-KEPT_RUNS:]]
    )


def test_later_runs_leave_the_logs_of_a_running_stack_alone(tmp_path: Path) -> None:
    """Proves that a running service's log outlives any number of later runs, and goes after it."""
    here = command(tmp_path, "target")
    log_path = new_log_dir(tmp_path / "logs") / "target.log"
    ended = new_log_dir(tmp_path / "logs") / "target.log"
    ended.write_text("of a run that ended")
    running = ServiceCommand(here.name, here.argv, here.port, log_path)
    with Stack([running]) as stack:
        stack.wait_ready(60)
        for _ in range(KEPT_RUNS + 3):
            new_log_dir(tmp_path / "logs")
        assert "hello" in log_path.read_text()
        assert not ended.exists()
    new_log_dir(tmp_path / "logs")
    assert not log_path.parent.exists()


def test_loopback_ignores_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that health checks of local services do not go through http_proxy."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Stack([command(tmp_path, "target")]) as stack:
        stack.wait_ready(60)


def test_a_service_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    """Proves name, exit code and log tail in the error, and that the others are ended."""
    commands = [command(tmp_path, "draft"), command(tmp_path, "target", "die")]
    with pytest.raises(NotReady) as caught, Stack(commands) as stack:
        stack.wait_ready(60)
    assert "the target ended with exit code 3" in caught.value.message
    assert caught.value.message.endswith("weights not found")
    assert pids_of(commands) == []


def test_a_service_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    """Proves that waiting is bounded and that NOT_SERVING does not count as ready."""
    commands = [command(tmp_path, "draft", "loading")]
    with pytest.raises(NotReady, match="the draft not ready after 1 s"), Stack(commands) as stack:
        stack.wait_ready(1)
    assert pids_of(commands) == []


def test_a_death_later_on_is_noticed(tmp_path: Path) -> None:
    """Proves that a running stack reports a killed service by its signal."""
    commands = [command(tmp_path, "target")]
    with Stack(commands) as stack:
        stack.wait_ready(60)
        (pid,) = pids_of(commands)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NotReady, match="the target killed by signal 9"):
            stack.run_until_interrupted()


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_stopping_ends_what_services_left_behind_and_nothing_else(tmp_path: Path) -> None:
    """Proves that orphans in sessions of their own end too, and that a bystander lives on."""
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    commands = [command(tmp_path, "coordinator", "orphan")]
    try:
        with Stack(commands) as stack:
            stack.wait_ready(60)
            words = (tmp_path / "logs" / "coordinator.log").read_text().split()
            orphan = int(words[words.index("child") + 1])
            assert orphan in process_table()
        assert orphan not in process_table()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_service_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    """Proves that stopping is bounded."""
    commands = [command(tmp_path, "target", "stubborn")]
    stack = Stack(commands)
    stack.start()
    stack.wait_ready(60)
    stack.stop(grace_s=0.1)
    assert pids_of(commands) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_waiting_stack(tmp_path: Path, signum: signal.Signals) -> None:
    """Proves that each signal leaves the block with its number and stops the processes."""
    commands = [command(tmp_path, "target")]
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    with (  # noqa: PT012 - the signal may come while any line of the block runs
        pytest.raises(Interrupted) as caught,
        interruptible(),
        Stack(commands) as stack,
    ):
        stack.wait_ready(60)
        threading.Timer(0.05, signal.pthread_kill, (main_thread, signum)).start()
        stack.run_until_interrupted()
    assert caught.value.signum == signum
    assert pids_of(commands) == []
    assert signal.getsignal(signum) is not None


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Proves that the error says which port of which service, and how to choose another."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        options = StackOptions(tmp_path, tmp_path, tmp_path, ports=Ports(0, port, 0))
        with pytest.raises(ConfigError, match=rf"port {port} of the draft is taken.*--draft-port"):
            plan(options)


def test_the_plan_wires_the_services_together(tmp_path: Path) -> None:
    """Proves addresses, models, traces and further flags of the three command lines."""
    options = StackOptions(
        target_dir=tmp_path / "t",
        draft_dir=tmp_path / "d",
        log_dir=tmp_path,
        trace_dir=tmp_path / "traces",
        ports=Ports(0, 0, 0),
        num_draft_tokens=3,
        extra={"target": ["--engine.num-pages", "9"]},
    )
    by_name = {command.name: command for command in plan(options)}
    target, draft, coordinator = (by_name[name] for name in ("target", "draft", "coordinator"))

    def value(service: ServiceCommand, flag: str) -> str:
        return service.argv[service.argv.index(flag) + 1]

    assert value(target, "-m") == "target_service"
    assert value(draft, "--engine.model") == str(tmp_path / "d")
    assert value(target, "--engine.num-pages") == "9"
    assert value(coordinator, "--targets") == target.address
    assert value(coordinator, "--drafts") == draft.address
    assert value(coordinator, "--speculation.num-draft-tokens") == "3"
    assert all(value(c, "--telemetry.trace-dir").endswith("traces") for c in by_name.values())
    assert len({command.port for command in by_name.values()}) == 3
    alone = plan(StackOptions(tmp_path, None, tmp_path, ports=Ports(0, 0, 0)))
    assert [command.name for command in alone] == ["target", "coordinator"]
    assert value(alone[1], "--drafts") == ""
