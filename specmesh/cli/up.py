"""`specmesh up`: all three services on this machine, until interrupted.

Owns what the user sees of a start: the folder for models, logs and traces, the progress display,
the endpoints. Processes are `specmesh/launcher.py`'s; models are set up by
`specmesh/engine/model_folder.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specmesh.cli.output import progress, stderr, stdout, write_json
from specmesh.config import PORTS
from specmesh.errors import ConfigError, InvalidRequest
from specmesh.ports import MAX_PORT

if TYPE_CHECKING:
    from specmesh.launcher import Ports, Stack

LOCAL_CACHE = Path(".specmesh")
SERVICES = ("coordinator", "draft", "target")


def default_cache_dir() -> Path:
    """`.specmesh` of the current folder where there is one, else `specmesh` in the user's cache."""
    if LOCAL_CACHE.is_dir():
        return LOCAL_CACHE
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "specmesh"
    try:
        return Path.home() / ".cache" / "specmesh"
    except RuntimeError as error:  # no HOME, and a user that the system does not know
        raise ConfigError("there is no home folder: choose one with --cache-dir") from error


def resolve_models(
    target: Path | None, draft: Path | None, cache_dir: Path, *, no_draft: bool = False
) -> tuple[Path, Path | None]:
    """Folders of target and draft model: the given ones, checked against each other, or defaults.

    The default pair is converted once into `cache_dir`. Raises ConfigError or ModelMismatch with
    what is wrong and what is supported.
    """
    if (target is None) != (draft is None) and not no_draft:
        raise ConfigError(
            "--target and --draft go together (they must share a tokenizer); "
            "--no-draft serves a target alone"
        )
    with progress("setting up the models") as status:
        from specmesh.engine.model_folder import prepare_default_models, resolve_model
        from specmesh.engine.model_pair import check_pair

        def report(what: str) -> None:
            if status is not None:
                status.update(what)
            else:
                stderr().print(f"  {what}", markup=False)

        folder = cache_dir / "models"
        if target is None:
            target, default_draft = prepare_default_models(folder, report)
            return target, None if no_draft else default_draft
        target = resolve_model(target, folder, report)
        if draft is None or no_draft:
            return target, None
        draft = resolve_model(draft, folder, report)
        check_pair(target, draft)
        return target, draft


@contextmanager
def running_stack(
    models: tuple[Path, Path | None],
    *,
    cache_dir: Path,
    ports: Ports,
    trace_dir: Path | None,
    num_draft_tokens: int | None = None,
    extra: dict[str, list[str]] | None = None,
    start_timeout_s: float = 120.0,
) -> Iterator[tuple[Stack, float]]:
    """Start the three services and wait until they are ready, showing progress.

    Yields the stack and the seconds it took; leaving stops every process. Raises ConfigError for a
    taken port, NotReady (with the end of the log) when a service dies.
    """
    from specmesh.launcher import Stack, StackOptions, new_log_dir, plan

    options = StackOptions(
        target_dir=models[0],
        draft_dir=models[1],
        log_dir=new_log_dir(cache_dir / "logs"),
        trace_dir=trace_dir,
        ports=ports,
        num_draft_tokens=num_draft_tokens,
        extra=extra or {},
    )
    with Stack(plan(options)) as stack:
        waiting = [command.name for command in stack.commands]
        with progress(f"starting {', '.join(waiting)}") as status:

            def on_ready(name: str, seconds: float) -> None:
                waiting.remove(name)
                stderr().print(f"  {name} ready after {seconds:.1f} s", markup=False)
                if status is not None and waiting:
                    status.update(f"waiting for {', '.join(waiting)}")

            seconds = stack.wait_ready(start_timeout_s, on_ready)
        yield stack, seconds


def up(
    target: Path | None = typer.Option(
        None,
        "--target",
        help="Target model: a Hugging Face folder or .gguf; default: SmolLM2-135M.",
    ),
    draft: Path | None = typer.Option(None, "--draft", help="Draft model, likewise."),
    no_draft: bool = typer.Option(False, "--no-draft", help="Serve the target alone."),
    port: int = typer.Option(
        PORTS["coordinator"],
        *("--port", "--coordinator-port"),
        min=0,
        max=MAX_PORT,
        help="Public port; 0: any free one.",
    ),
    draft_port: int = typer.Option(
        PORTS["draft"], "--draft-port", min=0, max=MAX_PORT, help="0: any free one."
    ),
    target_port: int = typer.Option(
        PORTS["target"], "--target-port", min=0, max=MAX_PORT, help="0: any free one."
    ),
    num_draft_tokens: int | None = typer.Option(
        None, "-k", "--num-draft-tokens", help="Candidates a round; default: the policy chooses."
    ),
    cache_dir: Path | None = typer.Option(
        None,
        "--cache-dir",
        envvar="SPECMESH_CACHE_DIR",
        help="Models, logs, traces; default: ./.specmesh where it exists, else the user's cache.",
    ),
    trace_dir: Path | None = typer.Option(
        None, "--trace-dir", help="Traces; default: traces in the cache folder."
    ),
    set_: list[str] = typer.Option(
        [], "--set", help="SERVICE.section.key=value, a setting of one service. Repeatable."
    ),
    start_timeout: float = typer.Option(120.0, "--start-timeout", min=1, help="Seconds."),
    as_json: bool = typer.Option(False, "--json", help="Print the endpoints as JSON when ready."),
) -> None:
    """Start draft, target and coordinator here; stay up until Ctrl-C or SIGTERM."""
    from specmesh.launcher import Interrupted, Ports, free_ports, interruptible

    cache_dir = cache_dir or default_cache_dir()
    extra = settings_flags(set_)
    wanted = Ports(coordinator=port, draft=draft_port, target=target_port)
    ports = free_ports(wanted, with_draft=not no_draft)  # before anything that takes time
    traces = trace_dir or cache_dir / "traces"
    try:
        with interruptible():
            models = resolve_models(target, draft, cache_dir, no_draft=no_draft)
            with running_stack(
                models,
                cache_dir=cache_dir,
                ports=ports,
                trace_dir=traces,
                num_draft_tokens=num_draft_tokens,
                extra=extra,
                start_timeout_s=start_timeout,
            ) as (stack, seconds):
                _announce(stack, seconds, traces, as_json=as_json)
                stack.run_until_interrupted()
    except Interrupted as interrupted:
        stderr().print("stopped")
        raise typer.Exit(128 + interrupted.signum) from None


def settings_flags(
    assignments: Sequence[str], services: Sequence[str] = SERVICES
) -> dict[str, list[str]]:
    """`target.engine.num_pages=64` as flags per service. Raises InvalidRequest on another form.

    services: names that may stand before the first dot.
    """
    flags: dict[str, list[str]] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        service, dot, key = name.partition(".")
        if not equals or not dot or service not in services:
            raise InvalidRequest(
                f"{assignment!r} is not SERVICE.section.key=value with SERVICE one of "
                f"{', '.join(services)}",
                field="set",
            )
        flags.setdefault(service, []).extend([f"--{key.replace('_', '-')}", value])
    return flags


def _announce(stack: Stack, seconds: float, trace_dir: Path, *, as_json: bool) -> None:
    if as_json:
        endpoints = {command.name: command.address for command in stack.commands}
        folders = {"trace_dir": str(trace_dir), "log_dir": str(stack.commands[0].log_path.parent)}
        write_json({"endpoints": endpoints, "start_s": seconds, **folders})
        return
    console = stdout()
    console.print(f"ready after {seconds:.1f} s")
    for command in stack.commands:
        console.print(f"  {command.name:<12} {command.address}   log {command.log_path}")
    console.print(f"  {'traces':<12} {trace_dir}")
    address = stack.address("coordinator")
    flag = "" if address.endswith(f":{PORTS['coordinator']}") else f" --address {address}"
    console.print(f'try: specmesh generate{flag} "Why is the sky blue?"   (Ctrl-C stops all)')
