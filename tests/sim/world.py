"""One run: hosts, callers and faults from one seed, then the oracles over what came out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from protos.specmesh.v1 import generation_pb2 as pb
from tests.sim import checkers
from tests.sim.caller import Caller, drawn_request
from tests.sim.hosts import IDLE_S, TOKEN_BYTES, CoordinatorHost, ServiceHost
from tests.sim.loop import SimLoop, SimSecrets, SimTime
from tests.sim.model import DeviceFailure, TinyModel
from tests.sim.options import Setup
from tests.sim.oracle import Oracle
from tests.sim.transport import NODE, Channel, Network, node_task_factory, run_on

ENOUGH_S = 120.0  # every request must have ended this long after the last fault
LOOK_S = 0.01  # between two looks at whether both sides agree

_LAW = "output law in doubt"  # its counts run on over all runs of a process
_CONTRADICTS = "a service contradicts its command"
_GAP = "a part from token"
_DRAFT_OFF = "draft switched off for a request"


@dataclass
class Report:
    """What a run came to. digest: of everything callers saw, and when."""

    seed: int
    injected: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    digest: str = ""
    sim_s: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True)
class Crash:
    """Every process of a kind dies at_s after the links came up, and comes back away_s later."""

    at_s: float
    kind: str
    away_s: float = 0.05


class _Errors(logging.Handler):
    """Production code logs an error where it caught a bug of its own.

    An honest draft must never be taken for a liar, nor be given up where no device failed.
    """

    def __init__(self, failures: list[str], setup: Setup) -> None:
        super().__init__(logging.WARNING)
        self._failures = failures
        self._faults, self._has_nan = setup.faults, bool(setup.nan_after or setup.nan_share)

    @property
    def _may_lose_parts(self) -> bool:
        """Whether messages of a stream get lost or overtake each other, as TCP never lets them."""
        faults = self._faults
        return bool(faults.drop or faults.delay or faults.replay)

    def _may_be_off(self, reason: str) -> bool:
        if reason == "draft_error" and (self._faults.pass_failures or self._has_nan):
            return True
        return bool(self._faults.lie)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info and isinstance(record.exc_info[1], DeviceFailure):
            return
        is_error = record.levelno >= logging.ERROR and message != _LAW
        reason = getattr(record, "reason", "")
        if message == _CONTRADICTS and reason.startswith(_GAP) and self._may_lose_parts:
            return
        is_off = message == _DRAFT_OFF and not self._may_be_off(reason)
        if not is_error and not is_off:
            return
        details = [getattr(record, name, "") for name in ("reason", "detail")]
        found = f"logged: {message} {' '.join(details)}"
        if record.exc_info and record.exc_info[1] is not None:
            found += f": {record.exc_info[1]!r}"
        self._failures.append(found)


class World:
    """The system of one run. `run` once."""

    def __init__(
        self,
        setup: Setup,
        requests: list[pb.GenerateRequest] | None = None,
        crashes: Sequence[Crash] = (),
        loop: SimLoop | None = None,
    ) -> None:
        """requests: instead of those the seed would draw. crashes: beside the drawn faults."""
        self._crashes = crashes
        self.setup = setup
        self.report = Report(setup.seed)
        self.loop = loop or SimLoop()
        self.rng = random.Random(f"run {setup.seed}")
        self.network = Network(self.loop, self.rng, setup)
        self.report.injected = self.network.injected
        names = [f"target{i}" for i in range(setup.num_targets)]
        drafts = [f"draft{i}" for i in range(setup.num_drafts)]
        self.services = [
            ServiceHost(name[:-1], name, setup, self.loop, self.network, f"{setup.seed} {name}")
            for name in (*names, *drafts)
        ]
        self.coordinators = [
            CoordinatorHost(f"coordinator{i}", setup, self.loop, self.network, (names, drafts))
            for i in range(setup.num_coordinators)
        ]
        if requests is None:
            requests = [drawn_request(setup, self.rng) for _ in range(setup.num_requests)]
        self.callers = [
            Caller(
                request,
                setup,
                self.network,
                random.Random(f"{setup.seed} caller {i}"),
                f"caller{i}",
            )
            for i, request in enumerate(requests)
        ]
        model = TinyModel(setup.vocab_size, salt=0, own_weight=setup.own_weight)
        self.oracle = Oracle(model, TOKEN_BYTES)
        self._is_over = False
        self._away: set[str] = set()  # killed, and not back before their time

    def run(self) -> Report:
        """Run to the end. Failures are in the report."""
        loop, report = self.loop, self.report
        loop.set_task_factory(node_task_factory)
        loop.set_exception_handler(self._on_exception)
        with _simulated(self.network), _watched(report.failures, self.setup):
            try:
                loop.run_until_complete(self._main())
            except AssertionError as failure:
                report.failures.append(f"{type(failure).__name__}: {failure}")
            finally:
                self._is_over = True
                self._clean_up()
        report.sim_s = loop.now
        return report

    def _on_exception(self, _loop: Any, context: dict[str, Any]) -> None:
        if not self._is_over:
            self.report.failures.append(f"{context['message']}: {context.get('exception')!r}")

    def _clean_up(self) -> None:
        loop = self.loop
        loop.end()
        for _ in range(3):
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.call_later(1.0, lambda: None)
                loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _main(self) -> None:
        for host in (*self.services, *self.coordinators):
            host.start()
        window_s = self.setup.faults.window_s
        await asyncio.sleep(0.1)  # links come up
        callers = [
            run_on(caller.node, lambda caller=caller: self.loop.create_task(self._call(caller)))
            for caller in self.callers
        ]
        self.loop.begin(self)
        looking = self.loop.create_task(self._look())
        self._plan_faults()
        await asyncio.sleep(window_s)
        self._heal()
        _, pending = await asyncio.wait(callers, timeout=ENOUGH_S)
        assert not pending, "a request did not end after the last fault"
        for caller in callers:
            await caller
        looking.cancel()
        await asyncio.sleep(3.0)
        checkers.check_quiet(self, may_hold_sessions=self._may_hold_sessions())
        if self._may_hold_sessions():
            await asyncio.sleep(IDLE_S + 3.0)
            checkers.check_quiet(self, may_hold_sessions=False)
        self._judge()

    async def _call(self, caller: Caller) -> None:
        if not self.setup.steady:
            await asyncio.sleep(self.rng.random() * 0.05)
        await caller.run()

    def _may_hold_sessions(self) -> bool:
        """Whether a Close can have been lost, or an Open can have come twice."""
        faults = self.setup.faults
        return bool(faults.drop or faults.duplicate or faults.replay)

    async def _look(self) -> None:
        while True:
            checkers.check_agreement(self)
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------ faults

    def _plan_faults(self) -> None:
        faults = self.setup.faults
        kinds = (
            (faults.resets, self._reset),
            (faults.partitions, lambda: self._partition(both=True)),
            (faults.one_way, lambda: self._partition(both=False)),
            (faults.target_crashes, lambda: self._crash("target")),
            (faults.draft_crashes, lambda: self._crash("draft")),
            (faults.coordinator_crashes, lambda: self._crash("coordinator")),
            (faults.stalls, self._stall),
            (faults.drains, self._drain),
            (faults.pass_failures, self._fail_pass),
            (faults.replay, self._replay),
            (faults.forget, lambda: self._forget(garble=False)),
            (faults.garble, lambda: self._forget(garble=True)),
        )
        for crash in self._crashes:
            self.network.later(crash.at_s, lambda crash=crash: self.kill(crash))
        for count, inject in kinds:
            for _ in range(count):
                self.network.later(self.rng.random() * faults.window_s, inject)

    def _hosts(self, kind: str) -> list[Any]:
        return [
            host
            for host in (*self.services, *self.coordinators)
            if host.address.startswith(kind) and host.is_up
        ]

    def _edge(self) -> tuple[str, str]:
        """Two hosts that talk to each other, the client first."""
        coordinator = self.rng.choice(self.coordinators).address
        others = [host.address for host in self.services] * 2
        others += [caller.node.name for caller in self.callers]
        other = self.rng.choice(others)
        return (other, coordinator) if other.startswith("caller") else (coordinator, other)

    def _reset(self) -> None:
        if self.rng.random() < 0.2:  # what a coordinator does whose queue to a target is full
            hosts = [host for host in self.coordinators if host.is_up]
            links = [link for host in hosts for link in host.fleet._links.values() if link.is_up]
            if links:
                self.network.injected["resets"] += 1
                self.rng.choice(links).reset()
        elif self.network.cut(*self._edge()):
            self.network.injected["resets"] += 1

    def _partition(self, *, both: bool) -> None:
        self.network.injected["partitions" if both else "one_way"] += 1
        edge = self._edge()
        if not both and self.rng.random() < 0.5:
            edge = edge[::-1]
        ways = [edge, edge[::-1]] if both else [edge]
        for way in ways:
            self.network.block(*way)
            self.network.later(
                self.rng.choice((0.02, 0.2, 0.6)), lambda way=way: self.network.unblock(*way)
            )

    def _crash(self, kind: str) -> None:
        hosts = self._hosts(kind)
        if hosts:
            self.network.injected[f"{kind}_crashes"] += 1
            host = self.rng.choice(hosts)
            host.crash()
            self.network.later(self.rng.choice((0.005, 0.05, 0.3)), lambda: self._restart(host))

    def kill(self, crash: Crash) -> None:
        """Kill every process of a kind; what calls comes back at once."""
        if crash.kind == "caller":
            for caller in self.callers:
                caller.interrupt()
        for host in self._hosts(crash.kind):
            host.crash()
            self._away.add(host.address)
            self.network.later(crash.away_s, lambda host=host: self._restart(host, is_due=True))

    def _restart(self, host: Any, *, is_due: bool = False) -> None:
        if is_due:
            self._away.discard(host.address)
        if not host.is_up and host.address not in self._away:
            host.start()

    def _drain(self) -> None:
        hosts = self._hosts("")
        if hosts:
            self.network.injected["drains"] += 1
            host = self.rng.choice(hosts)
            run_on(host.node, lambda: host.drain(lambda: self._restart(host)))

    def _fail_pass(self) -> None:
        hosts = [host for host in self.services if host.is_up]
        if hosts:
            self.network.injected["pass_failures"] += 1
            failing = self.rng.choice(("before", "after"))
            self.rng.choice(hosts).engine._executor.failing = failing

    def _stall(self) -> None:
        hosts = [host for host in self.services if host.is_up]
        if hosts:
            self.network.injected["stalls"] += 1
            host = self.rng.choice(hosts)
            host.slow_until = self.loop.now + self.rng.choice((0.05, 0.3, 1.0))

    def _replay(self) -> None:
        if self.network.replay():
            self.network.injected["replay"] += 1

    def _forget(self, *, garble: bool) -> None:
        """An idle session of some service stands elsewhere than it was told."""
        sessions = [
            session
            for host in self.services
            if host.is_up
            for session in host.engine._table
            if session.task is None and not session.queued and session.ledger.confirmed_len > 1
        ]
        sessions = [session for session in sessions if not session.ledger.num_pending]
        if not sessions:
            return
        self.network.injected["garble" if garble else "forget"] += 1
        ledger = self.rng.choice(sessions).ledger
        confirmed_len = ledger.confirmed_len
        ledger.truncate(self.rng.randint(max(0, confirmed_len - 4), confirmed_len - 1))
        if garble:
            while ledger.confirmed_len < confirmed_len:
                ledger.extend([self.rng.randrange(3)])

    def _heal(self) -> None:
        self.network.is_healed = True
        for way in sorted(self.network.blocked):
            self.network.unblock(*way)
        for host in (*self.services, *self.coordinators):
            self._restart(host)

    # ------------------------------------------------------------ what came out

    def _judge(self) -> None:
        seen = []
        for caller in self.callers:
            checkers.check_output(self.oracle, caller)
            received = caller.received
            self.report.num_tokens += len(received.tokens)
            seen.append((received.tokens, received.text, received.gave_up, received.num_attempts))
        told = f"{seen} {self.loop.now} {sorted(self.network.injected.items())}"
        self.report.digest = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


@contextmanager
def _simulated(network: Network) -> Iterator[None]:
    """Put clock, entropy and network in the places where production code looks for them."""
    clock, secrets = SimTime(network.loop), SimSecrets()

    def channel(address: str, *_: Any) -> Channel:
        return Channel(network, NODE.get(), address)

    with ExitStack() as stack:
        for place, stand_in in (
            ("coordinator.links.create_channel", channel),
            ("specmesh.client.create_channel", channel),
            ("specmesh.client.time", clock),
            ("specmesh.client.secrets", secrets),
            ("coordinator.service.secrets", secrets),
            ("coordinator.driver.time", clock),
            ("coordinator.records.time", clock),
        ):
            stack.enter_context(patch(place, stand_in))
        yield


@contextmanager
def _watched(failures: list[str], setup: Setup) -> Iterator[None]:
    handler = _Errors(failures, setup)
    root = logging.getLogger()
    root.addHandler(handler)
    level, propagating = root.level, logging.lastResort
    logging.lastResort = None
    try:
        yield
    finally:
        logging.lastResort = propagating
        root.setLevel(level)
        root.removeHandler(handler)
