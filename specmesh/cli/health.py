"""`specmesh health`: whether a deployment answers, and what it runs."""

from __future__ import annotations

from typing import Any

import typer

from specmesh.cli.flags import Connection, refuse_wrong_addresses, with_connection
from specmesh.cli.output import stdout, table, write_json
from specmesh.errors import NotReady

MOST_S = 10.0  # for an answer


@with_connection
def health(
    connection: Connection,
    service: list[str] = typer.Option(
        [], "--service", help="host:port of a draft or target service to ask as well. Repeatable."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Ask the coordinator (and services) for readiness; exit code 3 unless all are ready."""
    from specmesh.launcher import is_ready

    refuse_wrong_addresses(service, "service")
    with connection.open(MOST_S) as client:
        info = client.info(timeout_s=min(connection.timeout, MOST_S))
    others = {address: is_ready(address) for address in service}
    if as_json:
        write_json(_document(connection.address, info, others))
    else:
        _print(connection.address, info, others)
    unready = [address for address, ready in others.items() if not ready]
    if unready:
        raise NotReady(f"not ready: {', '.join(unready)}")


def _document(address: str, info: Any, others: dict[str, bool]) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    coordinator = MessageToDict(
        info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {"address": address, "coordinator": coordinator, "services": others}


def _print(address: str, info: Any, others: dict[str, bool]) -> None:
    console = stdout()
    running = f"{info.num_running}/{info.max_running} running"
    waiting = f"{info.num_waiting}/{info.max_waiting} waiting"
    console.print(f"coordinator {address}: ready, version {info.version}, {running}, {waiting}")
    rows = table("", "role", "model", "architecture", "vocabulary", "context", "device", "dtype")
    for role in ("target", "draft"):
        if not info.HasField(role):
            rows.add_row(role, "not connected", *[""] * 5)
            continue
        model = getattr(info, role)
        rows.add_row(
            role,
            model.model,
            model.architecture,
            str(model.vocab_size),
            str(model.max_context_len),
            model.device,
            model.dtype,
        )
    console.print(rows)
    for other, ready in others.items():
        console.print(f"service {other}: {'ready' if ready else 'not ready'}")
