"""Flags that several commands share: how to reach a coordinator, and every option of a request.

Typer reads a command's flags from its signature. The decorators here replace one parameter of a
command (`connection` or `options`) by the flags of a table, so that each flag is declared once.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from specmesh.addresses import check_addresses
from specmesh.config import PORTS
from specmesh.errors import ConfigError, DeadlineExceeded, InternalError, InvalidRequest
from specmesh.request import GenerateOptions

if TYPE_CHECKING:
    from specmesh.client import Client

DEFAULT_ADDRESS = f"127.0.0.1:{PORTS['coordinator']}"

Flag = tuple[Any, Any]  # annotation, typer option


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach the coordinator."""

    address: str
    api_key: str | None
    timeout: float
    retries: int
    tls_authority: Path | None
    tls_certificate: Path | None
    tls_key: Path | None

    @contextmanager
    def open(self, most_s: float = math.inf) -> Iterator[Client]:
        """A client for it, closed at the end of the block; calls take `most_s` at most.

        Raises ConfigError when TLS files cannot be read, InvalidRequest for what is no address or
        no coordinator.
        """
        from specmesh.cli.peers import is_unimplemented
        from specmesh.client import Client, RetryPolicy

        addresses = [part.strip() for part in self.address.split(",") if part.strip()]
        refuse_wrong_addresses(addresses, "address")
        credentials = self._credentials()
        with Client(
            addresses,
            api_key=self.api_key,
            credentials=credentials,
            retry=RetryPolicy(max_attempts=self.retries + 1),
        ) as client:
            try:
                yield client
            except DeadlineExceeded as error:
                seconds = min(self.timeout, most_s)
                raise DeadlineExceeded(
                    f"the request took longer than {seconds:g} s", field="timeout"
                ) from error
            except InternalError as error:
                if not is_unimplemented(error):
                    raise
                raise _no_coordinator(addresses, credentials) from error

    def _credentials(self) -> Any:
        if self.tls_authority is None:
            if self.tls_certificate or self.tls_key:
                raise ConfigError("--tls-certificate and --tls-key need --tls-authority")
            return None
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("--tls-certificate and --tls-key go together")
        import grpc

        from specmesh.tls import read_authority, read_identity

        identity: tuple[bytes | None, bytes | None] = (None, None)
        if self.tls_certificate and self.tls_key:
            identity = read_identity(self.tls_certificate, self.tls_key)
        return grpc.ssl_channel_credentials(read_authority(self.tls_authority), *identity)


def refuse_wrong_addresses(addresses: Sequence[str], field: str) -> None:
    """Raise InvalidRequest that names the flag when one of its addresses is not host:port."""
    try:
        check_addresses(addresses)
    except ValueError as error:
        raise InvalidRequest(str(error), field=field) from None


def _no_coordinator(addresses: Sequence[str], credentials: Any) -> InvalidRequest:
    """What to say when the peer does not know a coordinator's methods."""
    from specmesh.cli.peers import kind_at

    for address in addresses:
        kind = kind_at(address, credentials)
        if kind is not None:
            return InvalidRequest(f"{address} is no coordinator but {kind}", field="address")
    return InvalidRequest(f"{' or '.join(addresses)} is no coordinator", field="address")


_GROUP = "Connection"

CONNECTION_FLAGS: dict[str, Flag] = {
    "address": (
        str,
        typer.Option(
            DEFAULT_ADDRESS,
            envvar="SPECMESH_ADDRESS",
            help="host:port of the coordinator; several, comma-separated, are tried in turn.",
            rich_help_panel=_GROUP,
        ),
    ),
    "api_key": (
        str | None,
        typer.Option(
            None,
            envvar="SPECMESH_API_KEY",
            help="Sent as bearer token.",
            rich_help_panel=_GROUP,
            show_envvar=True,
        ),
    ),
    "timeout": (
        float,
        typer.Option(600.0, min=0.001, help="Seconds for the whole call.", rich_help_panel=_GROUP),
    ),
    "retries": (
        int,
        typer.Option(
            4,
            min=0,
            help="Attempts in a row without progress, beyond the first.",
            rich_help_panel=_GROUP,
        ),
    ),
    "tls_authority": (
        Path | None,
        typer.Option(None, help="PEM file; turns TLS on.", rich_help_panel=_GROUP),
    ),
    "tls_certificate": (
        Path | None,
        typer.Option(None, help="PEM file, for mutual TLS.", rich_help_panel=_GROUP),
    ),
    "tls_key": (
        Path | None,
        typer.Option(None, help="PEM file, for mutual TLS.", rich_help_panel=_GROUP),
    ),
}


def _sampling(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(None, *names, help=help, rich_help_panel="Request", **more)


# One entry per field of GenerateOptions, in its order; a test holds them to the public message.
OPTION_FLAGS: dict[str, Flag] = {
    "n": (int | None, _sampling("-n", "--n", help="Samples to draw.")),
    "temperature": (
        float | None,
        _sampling("-t", "--temperature", help="0: greedy; 1: the model's own distribution."),
    ),
    "top_k": (int | None, _sampling("--top-k", help="Keep the k likeliest tokens; 0: off.")),
    "top_p": (float | None, _sampling("--top-p", help="Keep the smallest set of this mass.")),
    "min_p": (float | None, _sampling("--min-p", help="Drop what is below this share of the top.")),
    "repetition_penalty": (
        float | None,
        _sampling("--repetition-penalty", help="Divides logits of tokens seen; 1: off."),
    ),
    "presence_penalty": (
        float | None,
        _sampling("--presence-penalty", help="Subtracted once per token in the output."),
    ),
    "frequency_penalty": (
        float | None,
        _sampling("--frequency-penalty", help="Subtracted per occurrence in the output."),
    ),
    "logit_bias": (
        list[str] | None,
        _sampling("--logit-bias", help="ID=VALUE, added to that logit. Repeatable."),
    ),
    "seed": (int | None, _sampling("--seed", help="Makes the answer repeatable.")),
    "max_tokens": (int | None, _sampling("--max-tokens", help="Tokens of output at most.")),
    "min_tokens": (int | None, _sampling("--min-tokens", help="No stop before this many.")),
    "stop": (list[str] | None, _sampling("--stop", help="Stop string. Repeatable.")),
    "stop_token_ids": (
        list[int] | None,
        _sampling("--stop-token-id", help="Stop token. Repeatable."),
    ),
    "ignore_eos": (
        bool | None,
        _sampling("--ignore-eos/--no-ignore-eos", help="Go on past the end-of-sequence token."),
    ),
    "logprobs": (
        int | None,
        _sampling("--logprobs", help="Log-probabilities, with this many alternatives (0-20)."),
    ),
    "rule": (
        Literal["residual", "coupled"] | None,
        _sampling("--rule", help="Decision rule; default: coupled with a seed, else residual."),
    ),
    "num_draft_tokens": (
        int | None,
        _sampling("-k", "--num-draft-tokens", help="Candidates a round; 0: plain decoding."),
    ),
    "row_policy": (
        Literal["auto", "dense_f32", "dense_f16"] | None,
        _sampling("--row-policy", help="How draft rows travel."),
    ),
    "decide_at": (
        Literal["target", "coordinator"] | None,
        _sampling("--decide-at", help="Where candidates are accepted or rejected."),
    ),
}


def usable_device(name: str | None, field: str = "device") -> str:
    """The device that a flag names; None: a GPU if there is any.

    Raises InvalidRequest for what is no device's name, ConfigError for a GPU that is not there.
    """
    import torch

    from specmesh.engine.decoder import check_present, read_device

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = read_device(name, field)
    except ConfigError as error:
        raise InvalidRequest(error.message, field=field) from error
    check_present(device, field)
    return name


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the connection flags in place of its parameter `connection`."""
    return _expand(command, "connection", CONNECTION_FLAGS, lambda values: Connection(**values))


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the request flags in place of its parameter `options`."""
    return _expand(command, "options", OPTION_FLAGS, options_from)


def options_from(values: Mapping[str, Any]) -> GenerateOptions:
    """Options from parsed flags. Raises InvalidRequest for a malformed --logit-bias."""
    given = {name: value for name, value in values.items() if value not in (None, [])}
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    return GenerateOptions(**given)


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(token_id), float(value)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not ID=VALUE", field="logit_bias") from None


def _expand(
    command: Callable[..., None],
    name: str,
    flags: Mapping[str, Flag],
    build: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != name]
    added = [
        inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
        for flag, (kind, option) in flags.items()
    ]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        shared = {flag: values.pop(flag) for flag in flags}
        command(**values, **{name: build(shared)})

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by inspect.signature
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded
