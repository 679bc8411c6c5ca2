"""Starts draft service, target service and coordinator as local processes, and ends exactly those.

Owns child processes: their command lines, log files, readiness and end. Each runs in a session of
its own, so Ctrl-C at the terminal reaches only this process, which then stops the others in order:
the coordinator first (it drains), then the services. Knows the services by their command lines and
health checks only; it imports none of them and prints nothing (`specmesh/cli/up.py` does).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specmesh.config import PORTS
from specmesh.errors import ConfigError, NotReady
from specmesh.ports import LOOPBACK, probe, unused_port
from specmesh.processes import Descendants, adopt_orphans
from specmesh.rpc import READINESS, RpcLimits, channel_options

POLL_S = 0.1  # between two looks at processes that start or stop
LOG_TAIL_LINES = 20
KEPT_RUNS = 8  # logs of so many runs stay in a cache folder, and those of every run that goes on
RUN_FOLDER = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9]+")
KILL_WAIT_S = 5.0  # after SIGKILL; only a process stuck in the kernel takes longer


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the three services listen on loopback. 0: any free port."""

    coordinator: int = PORTS["coordinator"]
    draft: int = PORTS["draft"]
    target: int = PORTS["target"]


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start. draft_dir None: no draft service, plain decoding only.

    num_draft_tokens None leaves the choice per round to the policy. `extra` holds further flags per
    service ("coordinator", "draft", "target"), as `python -m SERVICE --help` lists them.
    """

    target_dir: Path
    draft_dir: Path | None
    log_dir: Path
    trace_dir: Path | None = None
    ports: Ports = field(default_factory=Ports)
    num_draft_tokens: int | None = None
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """One process to start: where it will answer health checks and where its output goes."""

    name: str
    argv: tuple[str, ...]
    port: int
    log_path: Path

    @property
    def address(self) -> str:
        """host:port on loopback."""
        return f"{LOOPBACK}:{self.port}"


def free_port(wanted: int, owner: str) -> int:
    """`wanted` if nothing listens there, any free port for 0. Raises ConfigError naming `owner`."""
    if wanted == 0:
        return unused_port()
    try:
        return probe(wanted)
    except OSError as error:
        raise ConfigError(
            f"port {wanted} of the {owner} is taken ({error.strerror}); "
            f"choose another with --{owner}-port, or 0 for any free one"
        ) from error


def free_ports(wanted: Ports, *, with_draft: bool = True) -> Ports:
    """`wanted` with every 0 replaced by a free port. Raises ConfigError when one is taken."""
    return Ports(
        coordinator=free_port(wanted.coordinator, "coordinator"),
        draft=free_port(wanted.draft, "draft") if with_draft else wanted.draft,
        target=free_port(wanted.target, "target"),
    )


def plan(options: StackOptions) -> list[ServiceCommand]:
    """The processes of a stack, in starting order. Raises ConfigError when a port is taken."""
    free = free_ports(options.ports, with_draft=options.draft_dir is not None)
    ports = {"target": free.target}
    if options.draft_dir is not None:
        ports["draft"] = free.draft
    ports["coordinator"] = free.coordinator
    flags: dict[str, list[str]] = {
        "target": ["--engine.model", str(options.target_dir)],
        "draft": ["--engine.model", str(options.draft_dir)],
        "coordinator": [
            *("--tokenizer", str(options.target_dir)),
            *("--model-name", options.target_dir.name),
            *("--targets", f"{LOOPBACK}:{ports['target']}"),
            *("--drafts", f"{LOOPBACK}:{ports['draft']}" if "draft" in ports else ""),
        ],
    }
    if options.num_draft_tokens is not None:
        flags["coordinator"] += ["--speculation.num-draft-tokens", str(options.num_draft_tokens)]
    commands = []
    for name, port in ports.items():
        module = "coordinator" if name == "coordinator" else f"{name}_service"
        argv = [sys.executable, "-m", module, *flags[name], "--server.port", str(port)]
        if options.trace_dir is not None:
            argv += ["--telemetry.trace-dir", str(options.trace_dir)]
        argv += options.extra.get(name, ())
        commands.append(ServiceCommand(name, tuple(argv), port, options.log_dir / f"{name}.log"))
    return commands


@dataclass(slots=True)
class _Running:
    command: ServiceCommand
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started_s: float
    ready_after_s: float | None = None


class Stack:
    """Running services. Use as a context manager: leaving it stops every process it started."""

    def __init__(self, commands: Sequence[ServiceCommand]) -> None:
        """Start nothing yet."""
        self.commands = tuple(commands)
        self._running: list[_Running] = []

    def __enter__(self) -> Self:
        """Start every process."""
        try:
            self.start()
        except BaseException:
            self.stop(grace_s=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every process."""
        self.stop()

    def address(self, name: str) -> str:
        """host:port of a service of this stack."""
        return next(command.address for command in self.commands if command.name == name)

    def pid(self, name: str) -> int:
        """Process id of a service that was started."""
        return next(each.process.pid for each in self._running if each.command.name == name)

    def start(self) -> None:
        """Start every process, without waiting for any. Raises ConfigError when one cannot run."""
        adopt_orphans()
        for command in self.commands:
            command.log_path.parent.mkdir(parents=True, exist_ok=True)
            log = command.log_path.open("wb")
            # The service holds the lock too, as long as it lives: `_goes_on` asks for it.
            fcntl.flock(log, fcntl.LOCK_SH)
            try:
                process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                log.close()
                raise ConfigError(f"cannot start {command.name}: {error}") from error
            self._running.append(_Running(command, process, log, time.monotonic()))

    def wait_ready(
        self, timeout_s: float, on_ready: Callable[[str, float], None] | None = None
    ) -> float:
        """Wait until every service says it is ready; return the seconds since the first start.

        `on_ready(name, seconds)` is called as each gets there. Raises NotReady, with the end of the
        log, when a process dies or the time is over.
        """
        waiting = {running.command.name: running for running in self._running}
        deadline = time.monotonic() + timeout_s
        while waiting:
            self.check()
            for name, running in list(waiting.items()):
                if is_ready(running.command.address):
                    running.ready_after_s = time.monotonic() - running.started_s
                    del waiting[name]
                    if on_ready is not None:
                        on_ready(name, running.ready_after_s)
            if waiting and time.monotonic() > deadline:
                running = next(iter(waiting.values()))
                raise NotReady(_report(running, f"not ready after {timeout_s:.0f} s"))
            if waiting:
                time.sleep(POLL_S)
        return time.monotonic() - self._running[0].started_s

    def check(self) -> None:
        """Raise NotReady, with the end of its log, when a process has ended."""
        for running in self._running:
            code = running.process.poll()
            if code is not None:
                how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise NotReady(_report(running, how))

    def run_until_interrupted(self) -> None:
        """Block while all processes live. Raises NotReady when one ends."""
        while True:
            self.check()
            time.sleep(POLL_S)

    def stop(self, grace_s: float = 30.0) -> None:
        """End every process started here and whatever they started. Idempotent.

        SIGTERM first; SIGKILL after `grace_s`, or at once when interrupted while waiting.
        """
        # The coordinator first, so that it can drain over links that still work.
        order = [running for running in self._running if running.command.name == "coordinator"]
        services = [running for running in self._running if running.command.name != "coordinator"]
        self._running = []
        for batch in (order, services):
            families = [Descendants(running.process.pid) for running in batch]
            try:
                for running in batch:
                    if running.process.poll() is None:
                        running.process.send_signal(signal.SIGTERM)
                _wait([running.process for running in batch], grace_s)
            except (KeyboardInterrupt, Interrupted):
                grace_s = 0  # asked twice: no more patience
            finally:
                for running, family in zip(batch, families, strict=True):
                    if running.process.poll() is None:
                        running.process.kill()
                    running.process.wait(KILL_WAIT_S)
                    family.kill()
                    running.log.close()


def new_log_dir(parent: Path) -> Path:
    """Make a folder in `parent` for the logs of one run, and remove those of old runs.

    The newest KEPT_RUNS stay, and every one that a running service writes to.
    """
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S")
    others = [each for each in parent.iterdir() if RUN_FOLDER.fullmatch(each.name)]
    others.sort(key=_run_order)
    # One more than the last: a number that is free again would make this run look old.
    first = 1 + max((n for when, n in map(_run_order, others) if when == stamp), default=-1)
    for number in itertools.count(first):
        folder = parent / f"{stamp}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # of a run that started in this moment
            continue
        break
    for old in others[: 1 - KEPT_RUNS]:
        logs = list(old.glob("*.log"))
        if any(_goes_on(log) for log in logs):
            continue
        for log in logs:
            log.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # holds something of another's
            old.rmdir()
    return folder


def _run_order(folder: Path) -> tuple[str, int]:
    stamp, _, number = folder.name.partition("-")
    return stamp, int(number)


def _goes_on(log_path: Path) -> bool:
    """Whether a service still writes to its log."""
    try:
        with log_path.open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # another start removes old logs too
        return False
    return False


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def is_ready(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the gRPC server at `address` answers SERVING for readiness. Never raises."""
    with grpc.insecure_channel(address, options=channel_options(RpcLimits())) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=READINESS)
        try:
            response = stub.Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _report(running: _Running, how: str) -> str:
    running.log.flush()
    tail = log_tail(running.command.log_path)
    log = f"\n--- end of {running.command.log_path} ---\n{tail}" if tail else "; its log is empty"
    return f"the {running.command.name} {how}{log}"


def log_tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-num_lines:])


class Interrupted(BaseException):
    """A signal asked this process to end. Not an Exception: only the outermost frame acts."""

    def __init__(self, signum: int) -> None:
        """`signum`: SIGINT, SIGTERM or SIGHUP."""
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGINT, SIGTERM and SIGHUP raise Interrupted in the main thread.

    SIGINT too: a shell that starts a background job sets it to ignored, and Python then leaves it.
    """

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, interrupt) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
