"""The `specmesh` command.

Owns the list of commands and how every one of them ends: exit codes, one line per error, no
traceback unless `--debug` asks for it. Each command lives in the file of its name; modules that
load gRPC or torch are imported when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

import typer

from specmesh.cli import (
    acceptance,
    bench,
    bench_stack,
    demo,
    distill,
    generate,
    health,
    inflate,
    plan,
    settings,
    trace,
    up,
    window_report,
)
from specmesh.cli.outcome import ExitCode, exit_code, help_text
from specmesh.cli.output import stderr, writable_streams
from specmesh.errors import SpecmeshError

DEBUG_FLAG = "--debug"

app = typer.Typer(
    name="specmesh",
    help="Exact, disaggregated speculative decoding as a service.",
    epilog=help_text(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("chat")(generate.chat)
app.command("health")(health.health)
app.command("bench")(bench.bench)
app.command("bench-stack")(bench_stack.bench_stack)
app.command("plan")(plan.plan)
app.command("inflate")(inflate.inflate)
app.command("window-report")(window_report.window_report)
app.command("demo")(demo.demo)
app.command("distill")(distill.distill)
app.command("acceptance")(acceptance.acceptance)
app.add_typer(trace.app, name="trace")
app.add_typer(settings.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specmesh {metadata.version('specmesh')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, DEBUG_FLAG, help="Show tracebacks."),
) -> None:
    """Exact, disaggregated speculative decoding as a service."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (`specmesh/cli/outcome.py`). Never raises."""
    args = list(sys.argv[1:] if argv is None else argv)
    writable_streams()
    try:
        return _run(args)
    except BrokenPipeError:
        # The reader (head, less) went away: nobody is left to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _run(args: list[str]) -> int:
    debug = DEBUG_FLAG in args
    try:
        code = app(args=args, prog_name="specmesh", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except SpecmeshError as error:
        _explain(str(error), debug)
        return exit_code(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's way to report it
            raise BrokenPipeError from ended
        return ended.code if isinstance(ended.code, int) else ExitCode.BUG
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the outermost frame: everything ends in one line
        if hasattr(error, "format_message"):  # typer's and click's usage errors
            _explain(f"{error.format_message()} (specmesh --help lists commands and flags)", debug)
            return ExitCode.USAGE
        if isinstance(error, OSError) and error.strerror:  # a full disk, a folder not to be written
            _explain(f"{error.filename or 'output'}: {error.strerror}", debug)
            return ExitCode.SETUP
        again = "" if debug else f" (specmesh {DEBUG_FLAG} ... shows where)"
        _explain(f"unexpected {type(error).__name__}: {error}{again}", debug)
        return ExitCode.BUG


def _explain(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    console = stderr()
    console.print("error:", style="bold red", end=" ")
    console.print(text, markup=False)
