"""`specmesh window-report`: dropped mass and error bound of a window of attention, by layer.

What is measured is `specmesh/window_report.py`'s; this file reads flags and prints a table.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from specmesh.cli.flags import usable_device
from specmesh.cli.output import stdout, table, write_json
from specmesh.errors import InvalidRequest

_COLUMNS = (
    ("mean δ", "mean_delta"),
    ("max δ", "max_delta"),
    ("mean |o-o'|", "mean_error"),
    ("mean 2δM", "mean_bound"),
    ("max |o-o'|", "max_error"),
    ("max 2δM", "max_bound"),
    ("closest", "tightest"),
)


def window_report(
    model: Path = typer.Option(..., "--model", help="Folder of the model."),
    window: int = typer.Option(..., "--window", min=1, help="Keys a token would see, its own too."),
    prompt: str | None = typer.Option(None, "--prompt", help="Text; - reads standard input."),
    prompt_file: Path | None = typer.Option(None, "--prompt-file", help="Text from a file."),
    device: str = typer.Option("cpu", "--device", help="cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Show what a window of attention would drop from each layer on a prompt, and its bound."""
    from dataclasses import asdict

    from specmesh.window_report import window_report as report

    text, device = _text(prompt, prompt_file), usable_device(device)
    num_tokens, layers = report(model, text, window, device=device)
    if as_json:
        write_json(
            {"prompt_tokens": num_tokens, "window": window, "layers": [asdict(x) for x in layers]}
        )
        return
    names = [name for name, _ in _COLUMNS]
    shown = table("", "layer", "rows", *names, right=frozenset({"layer", "rows", *names}))
    for layer in layers:
        numbers = (f"{getattr(layer, attribute):.4g}" for _, attribute in _COLUMNS)
        shown.add_row(str(layer.layer), str(layer.num_rows), *numbers)
    stdout().print(shown)
    stdout().print(
        f"{num_tokens} tokens, window {window}. rows: (token, head) pairs that the window "
        "shortens; δ: probability they lose; |o-o'|: how far their output moves, at most 2δM, M "
        "the largest norm of a value; closest: the largest share of its own bound. A bound on "
        "single rows, not on the quality of a text."
    )


def _text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InvalidRequest("one of --prompt and --prompt-file is needed", field="prompt")
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read it: {error}", field="prompt_file") from error
    assert prompt is not None, "one of the two is given"
    return sys.stdin.read() if prompt == "-" else prompt
