"""`specmesh trace list|show|export`: reads the trace files of this machine.

Reading and drawing are `specmesh/traces`'; this file finds the folder.
"""

from __future__ import annotations

from pathlib import Path

import typer

from specmesh.cli.output import stderr, stdout
from specmesh.cli.up import default_cache_dir
from specmesh.errors import InvalidRequest

app = typer.Typer(help="Traces written with --trace-dir.", no_args_is_help=True)

_TRACE_DIR = typer.Option(
    None,
    "--trace-dir",
    envvar="SPECMESH_TRACE_DIR",
    help="Folder of OTLP-JSON lines, or such files; default: that of `specmesh up`. Repeatable.",
)
_TRACE_ID = typer.Argument(..., help="Trace or request id, or the beginning of one.")


def _folders(given: list[Path] | None) -> list[Path]:
    return given or [default_cache_dir() / "traces"]


@app.command("list")
def list_(
    trace_dir: list[Path] | None = _TRACE_DIR,
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """List requests, newest first."""
    from specmesh.traces.terminal import list_traces

    list_traces(_folders(trace_dir), stdout(), as_json=as_json)


@app.command("show")
def show(
    trace_id: str = _TRACE_ID,
    trace_dir: list[Path] | None = _TRACE_DIR,
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Draw one request as a tree with its timings."""
    from specmesh.traces.terminal import show_trace

    show_trace(_folders(trace_dir), trace_id, stdout(), as_json=as_json)


@app.command("export")
def export(
    trace_id: str = _TRACE_ID,
    html: Path | None = typer.Option(None, "--html", help="Write one self-contained page."),
    trace_dir: list[Path] | None = _TRACE_DIR,
) -> None:
    """Write one request to a file that needs nothing else."""
    from specmesh.traces.page import export_trace

    if html is None:
        raise InvalidRequest("say where to write: --html FILE", field="html")
    export_trace(_folders(trace_dir), trace_id, html)
    stderr().print(f"wrote {html}", markup=False)
