"""`specmesh config show`: the settings a service would start with, and where they may come from."""

from __future__ import annotations

from typing import Literal

import typer

from specmesh.config import CoordinatorSettings, DraftSettings, TargetSettings, load_settings
from specmesh.errors import InvalidRequest

app = typer.Typer(help="Settings of the services.", no_args_is_help=True)

_Settings = DraftSettings | TargetSettings | CoordinatorSettings
_CLASSES: dict[str, type[_Settings]] = {
    "draft": DraftSettings,
    "target": TargetSettings,
    "coordinator": CoordinatorSettings,
}


@app.callback()
def _group() -> None:
    """Settings of the services: file < environment < flags."""


@app.command("show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(
    context: typer.Context,
    service: Literal["draft", "target", "coordinator"] = typer.Argument(
        ..., help="Whose settings. Further flags are the service's own."
    ),
) -> None:
    """Print the resolved settings of a service as JSON; same flags as `python -m SERVICE`."""
    try:
        settings = load_settings(_CLASSES[service], context.args)
    except SystemExit as error:  # argparse has said on standard error what it does not know
        if error.code in (0, None):
            return
        raise InvalidRequest(
            f"python -m {service}{'' if service == 'coordinator' else '_service'} --help lists "
            "the flags"
        ) from None
    typer.echo(settings.model_dump_json(indent=2))
