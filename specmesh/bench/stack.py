"""The end-to-end benchmark: draft, target and coordinator as processes, measured by their clients.

Starts the stack on the devices asked for, holds a constant number of live streams for a window a
case, and gives every number with what it is held against, in the same run. Owns the order of things
and the records; cases are `stack_cases.py`'s, load is `steady_load.py`'s. Prints nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmesh.bench import windows
from specmesh.bench.measure import versions
from specmesh.bench.round_split import PARTS, SplitRound, TraceFolder, values
from specmesh.bench.stack_cases import FIXED_TOKENS, Case
from specmesh.bench.steady_load import Load, LoadProcesses, Observed, StreamsNotLive
from specmesh.bench.windows import Measured, of_values
from specmesh.client import Client, GenerateOptions
from specmesh.errors import NotReady
from specmesh.launcher import Ports, ServiceCommand, Stack, StackOptions, plan
from specmesh.ports import LOOPBACK

DRAFT_POLL_S = 0.2
FIRST_REQUEST_TIMEOUT_S = 300.0
FIRST_TOKENS = 8
HELD_TOKENS = 4096  # of a stream that is not to end within its window
LONGER_WARM_UP = 4.0  # times the warm-up, where streams were not live after it
TRACED_STREAMS = 4  # of those that are live, about how many are traced
TRACE_EVERY = 4  # with few streams: one request in so many


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is started. drafts: (label, folder), the first one labelled as it is to be named.

    extra: further flags by service; by service-label of one further draft's process alone, where
    they come after those of its service. devices and dtype as of the engine's settings.
    """

    target_dir: Path
    drafts: Sequence[tuple[str, Path]]
    log_dir: Path
    target_device: str = "cpu"
    draft_device: str = "cpu"
    dtype: str = "auto"
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)
    start_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Running:
    """A started stack: coordinator addresses by label of the draft, "" for the first."""

    stack: Stack
    addresses: Mapping[str, str]
    trace_dir: Path
    start_s: float


def commands(
    deployment: Deployment, trace_dir: Path
) -> tuple[list[ServiceCommand], dict[str, str]]:
    """Processes to start, and coordinators' addresses by label: one coordinator a draft, all of
    them on one target."""
    all_commands: list[ServiceCommand] = []
    addresses: dict[str, str] = {}
    for index, (label, folder) in enumerate(deployment.drafts):
        options = StackOptions(
            target_dir=deployment.target_dir,
            draft_dir=folder,
            log_dir=deployment.log_dir,
            trace_dir=trace_dir,
            ports=Ports(0, 0, 0),
            extra=_flags(deployment),
        )
        planned = {command.name: command for command in plan(options)}
        if index == 0:
            target = planned["target"]
            all_commands += planned.values()
            addresses[""] = planned["coordinator"].address
            continue
        draft, coordinator = planned["draft"], planned["coordinator"]
        argv = list(coordinator.argv)
        argv[argv.index("--targets") + 1] = f"{LOOPBACK}:{target.port}"
        all_commands.append(_labelled(deployment, draft, label, draft.argv))
        all_commands.append(_labelled(deployment, coordinator, label, argv))
        addresses[label] = coordinator.address
    return all_commands, addresses


def _labelled(
    deployment: Deployment, command: ServiceCommand, label: str, argv: Sequence[str]
) -> ServiceCommand:
    name = f"{command.name}-{label}"
    argv = (*argv, *deployment.extra.get(name, ()))
    return ServiceCommand(name, argv, command.port, command.log_path.with_name(f"{name}.log"))


def _flags(deployment: Deployment) -> dict[str, list[str]]:
    placed = {"target": deployment.target_device, "draft": deployment.draft_device}
    flags = {
        name: ["--engine.device", device, "--engine.dtype", deployment.dtype]
        for name, device in placed.items()
    }
    # The load says which requests are traced.
    flags["coordinator"] = ["--telemetry.sampling-ratio", "0"]
    for name, own in flags.items():
        own += deployment.extra.get(name, ())
    return flags


@contextmanager
def running(deployment: Deployment, trace_dir: Path) -> Iterator[Running]:
    """Start the stack, wait until every draft is linked; leaving stops it. Raises NotReady.

    trace_dir: where the processes write their spans.
    """
    planned, addresses = commands(deployment, trace_dir)
    with Stack(planned) as stack:
        began = time.monotonic()
        stack.wait_ready(deployment.start_timeout_s)
        for address in addresses.values():
            _wait_for_draft(stack, address, began + deployment.start_timeout_s)
        yield Running(stack, addresses, trace_dir, time.monotonic() - began)


def _wait_for_draft(stack: Stack, address: str, deadline: float) -> None:
    with Client(address) as client:
        while not client.info().HasField("draft"):
            stack.check()
            if time.monotonic() > deadline:
                raise NotReady(f"the coordinator at {address} has no draft")
            time.sleep(DRAFT_POLL_S)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things take. Seconds, but for max_tokens: of one answer at most."""

    window_s: float = 10.0
    warm_up_s: float = 2.0
    max_tokens: int = 256


Record = dict[str, Any]
Emit = Callable[[list[Record]], None]


class StackBench:
    """Measures cases one after another. Keeps plain cases, for the ratios of the others."""

    def __init__(
        self,
        running: Running,
        processes: LoadProcesses,
        prompts: Mapping[bool, Sequence[Sequence[int]]],
        limits: Limits,
        command: str,
    ) -> None:
        """prompts: ids by `Case.is_long`. command: as records hold it."""
        self._running, self._processes = running, processes
        self._prompts, self._limits = prompts, limits
        self._traces = TraceFolder(running.trace_dir)
        self._plain: dict[Case, Measured] = {}
        self._common = {"versions": self._versions(), "command": command}
        self._key = time.time_ns() & 0xFFFF_FFFF
        self._next_prompt = 0

    def warm_up(self, concurrency: int) -> None:
        """First requests, one at a time and together: compilation and capture are not measured."""
        options = GenerateOptions(max_tokens=FIRST_TOKENS, temperature=1.0, ignore_eos=True)
        for address in self._running.addresses.values():
            with Client(address) as client:
                prompt = list(self._prompts[False][0])
                client.generate(prompt, options, timeout_s=FIRST_REQUEST_TIMEOUT_S)
            together = Load(
                address=address,
                prompts=self._prompts[False],
                options=GenerateOptions(max_tokens=self._limits.max_tokens, temperature=1.0),
                num_streams=concurrency,
                warm_up_s=max(self._limits.warm_up_s, self._limits.window_s),
                window_s=0.0,
                trace_every=1 << 30,
            )
            with contextlib.suppress(StreamsNotLive):  # a first time may take long
                self._processes.run(together)

    def measure(self, case: Case) -> list[Record]:
        """Run one case; return its records. Raises SpecmeshError when a request failed.

        Where prompts took longer than the warm-up, once more with a longer one.
        """
        self._running.stack.check()
        try:
            return self._measure(case, self._limits.warm_up_s)
        except StreamsNotLive:
            return self._measure(case, LONGER_WARM_UP * self._limits.warm_up_s)

    def _measure(self, case: Case, warm_up_s: float) -> list[Record]:
        self._key += 1
        prompts = self._prompts[case.is_long]
        # Every case goes on where the last one ended, so that prefix caches hold little of it.
        first_prompt = self._next_prompt
        observed = self._processes.run(
            Load(
                address=self._running.addresses[case.draft],
                prompts=prompts,
                first_prompt=first_prompt,
                options=GenerateOptions(
                    temperature=case.temperature,
                    max_tokens=HELD_TOKENS if case.is_long else self._limits.max_tokens,
                    num_draft_tokens=case.num_draft_tokens,
                    ignore_eos=case.is_long,
                ),
                holds=case.is_long,
                num_streams=case.concurrency,
                warm_up_s=warm_up_s,
                window_s=self._limits.window_s,
                trace_every=max(TRACE_EVERY, case.concurrency // TRACED_STREAMS),
                key=self._key,
            )
        )
        self._next_prompt = (first_prompt + len(observed.streams)) % len(prompts)
        return self._records(case, observed)

    def _records(self, case: Case, observed: Observed) -> list[Record]:
        per_token = windows.ms_per_token(observed)
        if per_token is None:
            raise NotReady(f"{case.name}: no stream had two messages in the window")
        plain = self._plain.get(case.plain)
        baseline = None if plain is None else _baseline(case.plain.name, plain.value)
        records = [self._record(case.name, per_token, baseline)]
        if case.num_draft_tokens == 0:
            self._plain[case] = per_token
        elif plain is not None:
            records.append(self._record(case.speedup_name, per_token.under(plain), baseline))
        found = {
            "tokens-per-s": windows.tokens_per_s(observed),
            **_latencies("ttft", windows.first_token_ms(observed)),
            **_latencies("itl", windows.token_gaps_ms(observed)),
            **_latencies("message-gap", windows.message_gaps_ms(observed)),
        }
        rounds = self._traces.rounds(observed)
        found |= _speculation(windows.speculation(observed))
        found |= {
            f"round-{part}" if part != "total" else "round": of_values(values(rounds, part), "ms")
            for part in ("total", *PARTS, "overhead")
        }
        records += [
            self._record(f"{case.name}-{what}", measured)
            for what, measured in found.items()
            if measured is not None
        ]
        return records + self._named(case, rounds)

    def _named(self, case: Case, rounds: Sequence[SplitRound]) -> list[Record]:
        """Results that have a name of their own, of rounds with all their candidates."""
        if case.num_draft_tokens != FIXED_TOKENS:
            return []
        full = [each for each in rounds if each.num_draft_tokens == FIXED_TOKENS]
        whole, overhead = (of_values(values(full, part), "ms") for part in ("total", "overhead"))
        if whole is None or overhead is None:
            return []
        label = f"{case.draft}-" if case.draft else ""
        named = [self._record(f"round-{label}k{FIXED_TOKENS}-c{case.concurrency}", whole)]
        if not case.draft:
            named.append(self._record(f"overhead-c{case.concurrency}", overhead))
        return named

    def baseline_record(self, name: str, measured: Measured) -> Record:
        """A measurement of another system, beside the stack's plain decoding where it has one."""
        plain = self._plain.get(Case(1, 0))
        against = None if plain is None else _baseline(Case(1, 0).name, plain.value)
        return self._record(name, measured, against)

    def start_record(self) -> Record:
        """Seconds from starting the processes to every draft being linked."""
        seconds = self._running.start_s
        return self._record("stack-start", Measured(seconds, "s", seconds, seconds))

    def _record(self, name: str, measured: Measured, baseline: Record | None = None) -> Record:
        return {
            "name": name,
            "value": measured.value,
            "unit": measured.unit,
            "p20": measured.p20,
            "p80": measured.p80,
            "baseline": baseline,
            **self._common,
        }

    def _versions(self) -> dict[str, str]:
        found = versions()
        for label, address in self._running.addresses.items():
            with Client(address) as client:
                info = client.info()
            found["target"] = f"{info.target.model} {info.target.dtype} on {info.target.device}"
            name = f"draft {label}".strip()
            found[name] = f"{info.draft.model} {info.draft.dtype} on {info.draft.device}"
        return found


def _baseline(name: str, value: float) -> Record:
    return {"name": name, "value": value}


def _latencies(name: str, gaps_ms: Sequence[float]) -> dict[str, Measured | None]:
    return {
        f"{name}-p50": of_values(gaps_ms, "ms", 0.5),
        f"{name}-p99": of_values(gaps_ms, "ms", 0.99),
    }


def _speculation(counted: windows.Speculation) -> dict[str, Measured]:
    """Acceptance per position, tokens of a drafted round and the candidates that were drafted."""

    def exact(value: float, unit: str = "1") -> Measured:
        return Measured(value, unit, value, value)

    if not counted.judged:
        return {}
    found = {f"acceptance-{i}": exact(rate) for i, rate in enumerate(counted.rates, 1)}
    found["tokens-per-drafted-round"] = exact(counted.tokens_per_drafted_round, "{token}")
    found["tokens-predicted"] = exact(counted.predicted_tokens, "{token}")
    found["candidates-per-round"] = exact(counted.num_draft_tokens / counted.num_rounds, "{token}")
    for reason, count in counted.fallbacks.items():
        found[f"rounds-without-candidates-{reason}"] = exact(count, "{round}")
    return found
