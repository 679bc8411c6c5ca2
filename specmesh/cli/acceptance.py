"""`specmesh acceptance`: how well a draft fits a target, as tables and a plot."""

from __future__ import annotations

from pathlib import Path

import typer

from specmesh.cli.flags import usable_device
from specmesh.cli.output import progress, write_json, write_text
from specmesh.errors import InvalidRequest


def acceptance(
    target: Path = typer.Option(..., "--target", help="Folder of the target model."),
    draft: Path = typer.Option(..., "--draft", help="Folder of the draft model."),
    prompts: Path | None = typer.Option(
        None, "--prompts", help="JSONL file with a `prompt` a line; default: the project's own."
    ),
    max_prompts: int | None = typer.Option(
        None, "--max-prompts", min=1, help="Only the first N prompts."
    ),
    temperatures: str = typer.Option("1,0.7", "--temperatures", help="Of both models."),
    num_tokens: int = typer.Option(256, "--num-tokens", help="Of each row, prompt included."),
    free_rows: int = typer.Option(
        0, "--free-rows", min=0, help="Also measure N rows of text without a prompt."
    ),
    device: str | None = typer.Option(
        None, "--device", help="cpu, cuda or cuda:N; default: a GPU."
    ),
    out: Path | None = typer.Option(
        None, "--out", help="Folder for acceptance.md, acceptance.json and acceptance.svg."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document, no tables."),
) -> None:
    """Measure acceptance by position and temperature, and what each encoding costs."""
    from specmesh.acceptance.files import write_measurement
    from specmesh.acceptance.measure import Request, measure
    from specmesh.acceptance.report import markdown
    from specmesh.distill.prompts import HELD_OUT_FILE, read_prompts

    device = usable_device(device)
    request = Request(
        target=target,
        draft=draft,
        prompts=read_prompts(prompts or HELD_OUT_FILE)[:max_prompts],
        temperatures=_numbers(temperatures),
        num_tokens=num_tokens,
        free_rows=free_rows,
        device=device,
    )
    with progress("the target writes, both models judge"):
        measurement = measure(request)
    if out is not None:
        write_measurement(out, measurement)
    if as_json:
        write_json(measurement.record())
    else:
        write_text(markdown(measurement))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"{text!r}: expected numbers like 1,0.7",
                             field="temperatures") from error  # fmt: skip
