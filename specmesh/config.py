"""Settings of the three services, and the one way they are read: file < environment < flags.

Defaults live here, once. Unknown keys, in the file, the environment or the flags, are errors, and
all errors are reported together. Only this module reads `os.environ`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specmesh.addresses import check_addresses
from specmesh.errors import ConfigError

# Every port the code listens on by default; manifests and network policies are tested against it.
PORTS: Mapping[str, int] = {
    "coordinator": 50051,
    "draft": 50061,
    "target": 50071,
    # Plaintext health for kubelet probes, where it has a port of its own.
    "coordinator_health": 50052,
    "draft_health": 50062,
    "target_health": 50072,
    "coordinator_metrics": 9451,
    "draft_metrics": 9461,
    "target_metrics": 9471,
}


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


# A list of strings; in the environment and in flags comma-separated.
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Addresses = Annotated[Names, AfterValidator(check_addresses)]  # host:port each

MAX_AHEAD = 64  # continuations of a proposal: no coordinator asks for more, no draft makes more
MAX_PLAIN_STEPS = 256  # tokens per command: no coordinator asks for more, every target grants them
NESTING = "__"  # SPECMESH_TARGET_ENGINE__NUM_PAGES


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsSettings(_Section):
    """Mutual TLS. All three files or none; without them the port speaks plaintext."""

    certificate: Path | None = None
    private_key: Path | None = None
    authority: Path | None = None
    # Identities (SPIFFE ids) that may call; empty: any peer the authority signed.
    allowed_peers: Names = ()

    @model_validator(mode="after")
    def _all_or_none(self) -> TlsSettings:
        files = (self.certificate, self.private_key, self.authority)
        if any(files) and not all(files):
            raise ValueError("certificate, private_key and authority go together")
        return self

    @property
    def enabled(self) -> bool:
        """Whether the three files are given."""
        return self.certificate is not None


class ServerSettings(_Section):
    """Where a gRPC server listens and how it stops."""

    host: str = "127.0.0.1"
    # 0 takes a free port (printed at start).
    port: int = Field(default=0, ge=0, le=65535)
    # Plaintext health on a port of its own, for kubelet probes when TLS is on. None: same port.
    health_port: int | None = Field(default=None, ge=0, le=65535)
    # Memory guard in both directions; gRPC's own default of 4 MiB is too small for rows.
    max_message_bytes: int = Field(default=64 << 20, ge=1 << 16, le=1 << 30)
    # Result frames that may wait for a slow peer before the link is closed.
    max_outbound_frames: int = Field(default=256, ge=1)
    # SIGTERM to exit: what runs may finish for this long.
    drain_grace_s: float = Field(default=30.0, ge=0)
    tls: TlsSettings = TlsSettings()


class TelemetrySettings(_Section):
    """Traces, metrics and logs."""

    # OTLP/gRPC endpoint, for instance http://collector:4317. None: no export.
    otlp_endpoint: str | None = None
    # Folder for OTLP-JSON lines, one file a process. None: no files.
    trace_dir: Path | None = None
    sampling_ratio: float = Field(default=1.0, ge=0, le=1)
    # Record prompt and output token ids and text in spans. Off: never recorded.
    record_content: bool = False
    # Prometheus endpoint. None: off; 0: a free port.
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str = "127.0.0.1"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class EngineSettings(_Section):
    """The model and its K/V pool."""

    # Hugging Face folder: config.json, safetensors, tokenizer.
    model: Path
    device: str = "cpu"
    # auto: bfloat16 on a GPU, float32 on a CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # fp8: matrices of layers at one byte a weight, e4m3 with a scale a channel: another model than
    # the folder's, with a fingerprint of its own. Embedding, head, activations and K/V keep dtype.
    weight_dtype: Literal["model", "fp8"] = "model"
    # What layers and decisions run on. auto: triton on a GPU, the reference on a CPU.
    kernels: Literal["auto", "reference", "triton"] = "auto"
    # Triton kernels: a row's bits do not depend on its batch, chunking or bucket.
    invariant: bool = True
    page_size: int = Field(default=64, ge=16, le=128)
    # K/V pages. None: enough for max_sessions average contexts, within memory.
    num_pages: int | None = Field(default=None, ge=1)
    max_sessions: int = Field(default=64, ge=1, le=4096)
    # None: the model's own limit.
    max_context_len: int | None = Field(default=None, ge=2)
    # Token rows a step may compute over all sessions.
    token_budget: int = Field(default=512, ge=16)
    # Prompt tokens of one session per step.
    prefill_chunk: int = Field(default=256, ge=1)
    max_num_draft_tokens: int = Field(default=8, ge=1, le=16)
    # Commands a session-holder may have waiting before TOO_BUSY.
    max_waiting_commands: int = Field(default=1024, ge=1)
    session_idle_s: float = Field(default=60.0, gt=0)
    # Threads on the CPU; None leaves torch's choice, or takes one where a GPU computes.
    num_threads: int | None = Field(default=None, ge=1)
    # How long after its last work the service polls for the next instead of sleeping; the engine
    # then runs on the event loop. Costs a core while sessions are active. 0: never. None: 20 where
    # a GPU computes and the process has four processors or more, else 0.
    busy_poll_ms: float | None = Field(default=None, ge=0, le=1000)


class _ServiceSettings(BaseSettings):
    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_nested_delimiter=NESTING,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        env_parse_none_str="none",
        nested_model_default_partial_update=True,
    )

    telemetry: TelemetrySettings = TelemetrySettings()
    # Distinguishes replicas in traces and metrics. None: host name and process id.
    instance_id: str | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment before the file's values (passed as keywords); flags come first of all."""
        return env_settings, init_settings


class DraftSettings(_ServiceSettings):
    """`python -m draft_service`."""

    engine: EngineSettings
    server: ServerSettings = ServerSettings(port=PORTS["draft"])


class TargetSettings(_ServiceSettings):
    """`python -m target_service`."""

    engine: EngineSettings
    server: ServerSettings = ServerSettings(port=PORTS["target"])
    # Share of dense rows whose candidate is drawn again from the received row. Sparse: always.
    redraw_check_ratio: float = Field(default=0.05, ge=0, le=1)
    # Tokens a plain-decoding command may ask for; never fewer than a coordinator may be set to.
    max_plain_steps: int = Field(default=MAX_PLAIN_STEPS, ge=MAX_PLAIN_STEPS)


class RaySettings(_Section):
    """Ray is used for lifecycle only: it places, supervises and drains coordinator replicas."""

    enabled: bool = True
    # None starts a local instance; otherwise an address to join ("auto" on a cluster).
    address: str | None = None
    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.0, ge=0)
    object_store_bytes: int = Field(default=80 << 20, ge=75 << 20)
    # Containers have 64 MB of /dev/shm, so the (unused) object store spills to this folder.
    temp_dir: Path | None = None
    health_check_period_s: float = Field(default=2.0, gt=0)
    # A replica drains when this file appears: Ray's workers get no signal when their pod is to go.
    drain_file: Path | None = None


class AdmissionSettings(_Section):
    """Bounds on what a replica takes in; beyond them RESOURCE_EXHAUSTED with a retry delay."""

    max_running: int = Field(default=64, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    retry_after_s: float = Field(default=1.0, gt=0)
    # Messages of one stream that may wait for a slow reader before its rounds pause.
    max_unread_chunks: int = Field(default=64, ge=1)
    # A reader that takes nothing for this long loses its request.
    slow_reader_s: float = Field(default=60.0, gt=0)
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    max_samples: int = Field(default=16, ge=1)
    default_max_tokens: int = Field(default=256, ge=1)


class SpeculationSettings(_Section):
    """How rounds are run."""

    # Fixed number of draft tokens; None: policy.py chooses per round.
    num_draft_tokens: int | None = Field(default=None, ge=0, le=16)
    max_num_draft_tokens: int = Field(default=8, ge=0, le=16)
    decide_at: Literal["target", "coordinator"] = "target"
    row_policy: Literal["auto", "dense_f32", "dense_f16"] = "auto"
    # Tokens per command while speculation is off; they come as they are drawn.
    plain_steps: int = Field(default=MAX_PLAIN_STEPS, ge=1, le=MAX_PLAIN_STEPS)
    # Share of target-decided rounds that the coordinator decides again from the rows.
    audit_ratio: float = Field(default=0.01, ge=0, le=1)
    # Continuations that a draft drafts ahead while the target verifies, at most: the likeliest
    # outcomes of the round, so that the next one begins with its candidates there. 0: none.
    num_ahead: int = Field(default=0, ge=0, le=MAX_AHEAD)
    draft_prefill: Literal["auto", "parallel", "after_first_token"] = "auto"


class LinkSettings(_Section):
    """Waits and bounds of the links to draft and target replicas."""

    connect_timeout_s: float = Field(default=10.0, gt=0)
    # A proposal later than this costs k = 0 for its round.
    draft_deadline_s: float = Field(default=2.0, gt=0)
    # A verdict later than this is asked for once more, then the link counts as lost.
    target_deadline_s: float = Field(default=60.0, gt=0)
    max_round_retries: int = Field(default=3, ge=0)
    # Failovers a request survives before it fails with NOT_READY.
    max_failovers: int = Field(default=5, ge=0)
    reconnect_initial_s: float = Field(default=0.1, gt=0)
    reconnect_max_s: float = Field(default=2.0, gt=0)
    max_queued_commands: int = Field(default=1024, ge=1)
    # How long after a message to or from a replica the coordinator polls for the next instead of
    # sleeping. 0: never. None: 20 where the replica computes on a GPU and the process has four
    # processors or more, else 0.
    busy_poll_ms: float | None = Field(default=None, ge=0, le=1000)
    # Targets: next choice of the hash when the first holds this many times the mean load.
    load_cap: float = Field(default=1.25, ge=1)


class CoordinatorSettings(_ServiceSettings):
    """`python -m coordinator`."""

    server: ServerSettings = ServerSettings(port=PORTS["coordinator"])
    # host:port of every replica.
    targets: Addresses = Field(default=(f"127.0.0.1:{PORTS['target']}",), min_length=1)
    drafts: Addresses = (f"127.0.0.1:{PORTS['draft']}",)
    # Folder of the target model: tokenizer and chat template. The weights are not read.
    tokenizer: Path
    model_name: str = "specmesh"
    admission: AdmissionSettings = AdmissionSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    links: LinkSettings = LinkSettings()
    ray: RaySettings = RaySettings()
    # TLS material for calling draft and target replicas.
    link_tls: TlsSettings = TlsSettings()
    # File of API keys, one `tenant:key` a line, limits of the tenant after it
    # (coordinator/tenants.py). Read again when it changes. None: no keys are asked for.
    api_keys: Path | None = None


S = TypeVar("S", bound=_ServiceSettings)


def env_prefix(cls: type[_ServiceSettings]) -> str:
    """SPECMESH_DRAFT_, SPECMESH_TARGET_ or SPECMESH_COORDINATOR_."""
    return f"SPECMESH_{cls.__name__.removesuffix('Settings').upper()}_"


def load_settings(cls: type[S], argv: Sequence[str]) -> S:
    """Read settings from `--config FILE` (TOML), the environment and `--section.key value` flags.

    `--print-config` prints the resolved settings as JSON and exits with 0; `--help` lists every
    flag. Later sources win key by key; lists may be comma-separated. Raises ConfigError that lists
    every unknown key and bad value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--print-config", action="store_true")
    own, flags = parser.parse_known_args(list(argv))
    from_file = {} if own.config is None else _read_file(own.config)
    _refuse_what_is_no_text(cls, flags)
    _refuse_unknown_environment(cls)
    # The underscored keywords belong to pydantic-settings and are no part of the model's signature.
    build: Any = cls
    try:
        settings: S = build(_env_prefix=env_prefix(cls), _cli_parse_args=flags, **from_file)
    except (ValidationError, SettingsError) as error:
        raise ConfigError(_describe(error)) from error
    if own.print_config:
        sys.stdout.write(settings.model_dump_json(indent=2) + "\n")
        raise SystemExit(0)
    return settings


def settings_from_environment(cls: type[S], values: Mapping[str, Any]) -> S:
    """Settings of a process without a command line: values (as of a file) < environment.

    Raises ConfigError that lists every unknown key and bad value.
    """
    _refuse_what_is_no_text(cls, ())
    _refuse_unknown_environment(cls)
    build: Any = cls
    try:
        settings: S = build(_env_prefix=env_prefix(cls), **values)
    except (ValidationError, SettingsError) as error:
        raise ConfigError(_describe(error)) from error
    return settings


def setting_names(cls: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every leaf key as a path, for instance ("engine", "num_pages")."""
    names: list[tuple[str, ...]] = []
    for name, field in cls.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names += setting_names(section, (*path, name))
        else:
            names.append((*path, name))
    return names


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="config") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, nested without end
        raise ConfigError(f"{path}: {error}", field="config") from error


def _refuse_what_is_no_text(cls: type[_ServiceSettings], flags: Sequence[str]) -> None:
    # Bytes that are no UTF-8 arrive as half characters (PEP 383): taken for an address or a name
    # they fail wherever that is first sent, logged or printed.
    given = [
        (name, value) for name, value in os.environ.items() if name.startswith(env_prefix(cls))
    ]
    given += [(flag.partition("=")[0], flag) for flag in flags]
    wrong = [ascii(name) for name, value in given if not _is_text(name + value)]
    if wrong:
        raise ConfigError(f"not UTF-8: {', '.join(wrong)}")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unknown_environment(cls: type[_ServiceSettings]) -> None:
    # pydantic-settings reads the variables it knows and is silent about misspelt ones.
    prefix = env_prefix(cls)
    known = {prefix + NESTING.join(path).upper() for path in setting_names(cls)}
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    if unknown:
        raise ConfigError(f"unknown environment variables: {', '.join(unknown)}")


def _describe(error: ValidationError | SettingsError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problems = []
    for entry in error.errors(include_url=False):
        where = ".".join(str(part) for part in entry["loc"]) or "settings"
        what = "unknown key" if entry["type"] == "extra_forbidden" else entry["msg"]
        problems.append(f"{where}: {what}")
    return "; ".join(problems)
