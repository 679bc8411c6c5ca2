"""The processes of a simulated system: production services and coordinators, and how they crash.

Owns what a host is built from and its incarnations. The engine is the production one without its
thread: its loop's body runs as timers of the simulated clock, a pass takes simulated time, and
nothing of it is seen before that time is over, so a crash in the middle of a pass is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.admission import Admission
from coordinator.fleet import Fleet
from coordinator.policy import SharedPolicy
from coordinator.service import GenerationServicer, Parts
from coordinator.tenants import Tenants
from draft_service.proposer import Proposer
from draft_service.service import DraftServicer
from protos.specmesh.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2_grpc,
    session_pb2,
    target_pb2,
    target_pb2_grpc,
)
from specmesh.config import (
    AdmissionSettings,
    CoordinatorSettings,
    LinkSettings,
    SpeculationSettings,
    TelemetrySettings,
)
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.commands import Observers
from specmesh.engine.executor import Device
from specmesh.engine.links import LinkOptions, LinkServer
from specmesh.engine.runner import Engine, EngineOptions
from specmesh.engine.serving import ServiceState
from specmesh.engine.sessions import Limits
from specmesh.engine.waits import block_on
from specmesh.errors import NotReady
from specmesh.service_metrics import ServiceMetrics
from specmesh.telemetry import Telemetry
from target_service.candidates import RedrawCheck
from target_service.service import TargetServicer
from target_service.verifier import Verifier, VerifierOptions
from tests.sim.loop import InlineExecutor, SimLoop
from tests.sim.model import CheckedExecutor, TinyCache, TinyModel
from tests.sim.options import Setup
from tests.sim.transport import Network, Node, Server, run_on

VOCAB_HASH = 0xC0FFEE
EXPIRY_S = 1.0
IDLE_S = 60.0
MAX_DRAFT_TOKENS = 4
LINKS = LinkSettings(
    connect_timeout_s=1.0,
    draft_deadline_s=0.1,
    target_deadline_s=0.4,
    reconnect_initial_s=0.02,
    reconnect_max_s=0.2,
    max_queued_commands=16,
)
# Counters and exporters say nothing about a run's correctness: one of each for all runs.
_METRICS = {side: ServiceMetrics(side) for side in ("draft", "target")}
_COORDINATOR_METRICS = CoordinatorMetrics()
_TELEMETRY = {
    name: Telemetry(name, TelemetrySettings(), "sim") for name in ("draft", "target", "coordinator")
}
TOKEN_BYTES = (b"a", b"b", b"\xc3", b"\xa9", b"ab", b"")


class Letters:
    """A tokenizer over ids: letters, halves of a character, a pair, and one that prints nothing."""

    vocab_hash = VOCAB_HASH

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Bytes of one id."""
        return TOKEN_BYTES[token_id]


class SimEngine(Engine):
    """The production engine, its loop driven by the simulated clock."""

    def begin(
        self,
        loop: SimLoop,
        node: Node,
        pass_s: Callable[[], float],
        next_chain: Callable[[], int],
    ) -> None:
        """Serve from now on; called in place of `start`."""
        self._loop, self._node, self._pass_s = loop, node, pass_s
        self._executor = CheckedExecutor(self._executor._device, self._observers.clock_ns)
        self._executor.role, self._executor.next_chain = self._role, next_chain
        self._ahead._executor = self._executor
        self._is_busy = False
        self.after_turn: Callable[[], None] = lambda: None
        put = self._inbox.put

        def put_and_wake(item: Any) -> None:
            put(item)
            self._wake()

        self._inbox = _Inbox(self._inbox, put_and_wake)  # type: ignore[assignment]  # same interface
        self._tick()

    def _tick(self) -> None:
        """Idle sessions are looked for now and then, as by the thread's timeout."""
        if self._node.alive:
            self._wake()
            self._loop.call_later(EXPIRY_S, self._tick)

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        if not self._node.alive:
            return
        self._read_inbox()
        ran = block_on(self._turn())
        end = self._loop.now + (self._pass_s() if ran else 0.0)
        self._loop.event(end, lambda: self._end_turn(ran), self._node.name, self, "turn")

    def _end_turn(self, ran: bool) -> None:
        if not self._node.alive:
            return
        self._flush()
        if ran:
            self.after_turn()
        self._is_busy = False
        if self._can_run(after=ran) or not self._inbox.empty():
            self._wake()


class _Inbox:
    """The engine's queue, which wakes the simulated worker."""

    def __init__(self, queue: Any, put: Callable[[Any], None]) -> None:
        self.put = put
        self.get_nowait = queue.get_nowait
        self.empty = queue.empty


class LyingProposer(Proposer):
    """A draft whose content is wrong now and then. `lies` says when, and counts them."""

    def __init__(self, max_num_draft_tokens: int, rng: random.Random, lies: Any) -> None:
        super().__init__(max_num_draft_tokens)
        self._rng, self._lies = rng, lies
        self._has_lied = False  # since it was asked last: it knows better than to believe itself

    def _proposal(self, drafting: Any) -> draft_pb2.Proposal:
        proposal = super()._proposal(drafting)
        if proposal.tokens and self._lies():
            self._spoil(proposal)
            self._has_lied = True
        return proposal

    def outlooks(self, task: Any, answer: Any) -> Any:
        """Nothing follows from a lie."""
        has_lied, self._has_lied = self._has_lied, False
        return () if has_lied else super().outlooks(task, answer)

    def _spoil(self, proposal: draft_pb2.Proposal) -> None:
        kind = self._rng.choice(("other", "outside", "more", "fewer", "row", "rows", "nan"))
        index = self._rng.randrange(len(proposal.tokens))
        if kind == "other":
            proposal.tokens[index] = (proposal.tokens[index] + 1) % 3
        elif kind == "outside":
            proposal.tokens[index] = 1 << 20
        elif kind == "more":
            proposal.tokens.append(0)
        elif kind == "fewer":
            del proposal.tokens[-1]
        elif proposal.distributions and kind == "row":
            proposal.distributions[index].values = proposal.distributions[index].values[:-1]
        elif proposal.distributions and kind == "rows":
            del proposal.distributions[-1]
        elif proposal.distributions:
            values = proposal.distributions[index].values
            proposal.distributions[index].values = b"\x00\x00\xc0\x7f" * (len(values) // 4)


class ServiceHost:
    """A draft or target replica."""

    def __init__(
        self, side: str, address: str, setup: Setup, loop: SimLoop, network: Network, seed: str
    ) -> None:
        self.side, self.address = side, address
        self._setup, self._loop, self._network = setup, loop, network
        self._rng = random.Random(seed)
        self._is_honest = side == "target" or not setup.faults.lie
        self.slow_until = 0.0
        self.node: Node | None = None
        self.engine: SimEngine
        self.pool: BlockPool
        self.cache: TinyCache

    @property
    def is_up(self) -> bool:
        """Whether an incarnation runs."""
        return self.node is not None and self.node.alive

    def start(self) -> None:
        """A new incarnation, with nothing of the last one."""
        setup, side = self._setup, self.side
        self._network.draining.discard(self.address)
        node = self.node = Node(self.address)
        num_pages = setup.target_pages if side == "target" else setup.draft_pages
        self.pool = BlockPool(num_pages, setup.page_size)
        self.cache = TinyCache(self.pool)
        salt = 0 if side == "target" else 1
        model = TinyModel(
            setup.vocab_size,
            salt=salt,
            own_weight=setup.own_weight,
            is_honest=self._is_honest,
            nan_after=setup.nan_after if side == "draft" else (),
            nan_share=setup.nan_share if side == "draft" else 0.0,
        )
        limits = Limits(setup.vocab_size, VOCAB_HASH, 4096, 64, num_pages, setup.page_size)
        observers = Observers(
            _TELEMETRY[side], _METRICS[side], lambda: int(self._loop.now * 1e9), 0
        )
        device: Any = Device(model, self.cache, self.pool)  # type: ignore[arg-type]  # tiny ones
        self.engine = SimEngine(
            device,
            self._role(),
            limits,
            EngineOptions(setup.token_budget, setup.prefill_chunk, session_idle_s=IDLE_S),
            observers,
        )
        run_on(node, lambda: self.engine.begin(self._loop, node, self._pass_s, self._next_chain))
        self.engine.after_turn = self._check
        response = (
            target_pb2.TargetServiceLinkResponse
            if side == "target"
            else draft_pb2.DraftServiceLinkResponse
        )
        state = ServiceState()
        self.links = LinkServer(self.engine, LinkOptions(response))
        state.set_ready(self._info(), self.links)
        server: Any = Server(node)
        if side == "target":
            target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(state), server)
        else:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(state), server)
        self._network.servers[self.address] = server

    def crash(self) -> None:
        """Kill it."""
        assert self.node is not None
        self._network.kill(self.node)

    def drain(self, then: Callable[[], None]) -> None:
        """End as asked: no new sessions, links end after a while, then the process."""
        node, links = self.node, self.links
        assert node is not None
        self._network.draining.add(self.address)
        self.engine.drain()
        links.announce_drain()

        def end() -> None:
            if node.alive:
                links.end_all()
                self._network.later(0.01, lambda: node.alive and self.crash())
            self._network.later(0.03, then)

        self._network.later(self._rng.choice((0.01, 0.1)), end)

    def _role(self) -> Any:
        if self.side == "target":
            options = VerifierOptions(self._setup.vocab_size, MAX_DRAFT_TOKENS)
            return Verifier(options, RedrawCheck(1.0))
        if self._setup.faults.lie:
            return LyingProposer(MAX_DRAFT_TOKENS, self._rng, lambda: self._network.happens("lie"))
        return Proposer(MAX_DRAFT_TOKENS)

    def _info(self) -> session_pb2.ModelInfo:
        setup = self._setup
        return session_pb2.ModelInfo(
            model=self.side,
            fingerprint=self.side,
            vocab_size=setup.vocab_size,
            vocab_hash=VOCAB_HASH,
            eos_token_ids=[setup.vocab_size - 1],
            max_context_len=4096,
            max_num_draft_tokens=MAX_DRAFT_TOKENS,
            device_id="one" if setup.one_device else self.address,
        )

    def _next_chain(self) -> int:
        lengths = self._setup.chain_lens
        return lengths[0] if len(lengths) == 1 else self._rng.choice(lengths)

    def _pass_s(self) -> float:
        if self._setup.steady:
            return self._setup.pass_s
        pass_s = self._setup.pass_s * (0.5 + self._rng.random())
        return max(pass_s, self.slow_until - self._loop.now)

    def _check(self) -> None:
        """After each turn: pages and published content are whole, ledgers sound, queues bounded."""
        self.pool.check_integrity()
        for entry in self.pool._by_page.values() if self._is_honest else ():
            held = [each and each[0] for each in self.cache.page(entry.page)]
            assert held == list(entry.tokens), "a published page was rewritten"
        for session in self.engine._table:
            session.ledger.check()
            assert len(session.queued) <= 8, "a session's queue grew past its bound"


class CoordinatorHost:
    """A coordinator replica: the production servicer over the production fleet and links."""

    def __init__(
        self,
        address: str,
        setup: Setup,
        loop: SimLoop,
        network: Network,
        peers: tuple[list[str], list[str]],
    ) -> None:
        self.address = address
        self._setup, self._loop, self._network = setup, loop, network
        self._targets, self._drafts = peers
        self._num_starts = 0
        self.node: Node | None = None
        self.fleet: Fleet
        self.servicer: GenerationServicer
        self.admission: Admission

    @property
    def is_up(self) -> bool:
        """Whether an incarnation runs."""
        return self.node is not None and self.node.alive

    @property
    def group(self) -> str:
        """The name under which services know this incarnation."""
        return f"{self.address}/{self._num_starts}"

    def start(self) -> None:
        """A new incarnation."""
        node = self.node = Node(self.address)
        self._num_starts += 1
        run_on(node, self._start)

    def _start(self) -> None:
        setup = self._setup
        settings = coordinator_settings(
            (
                setup.num_draft_tokens,
                setup.audit_ratio,
                setup.draft_prefill,
                setup.max_running,
                setup.max_unread_chunks,
                setup.plain_steps,
                setup.num_ahead,
            )
        )
        letters: Any = Letters()
        self.fleet = Fleet(
            self._targets, self._drafts, LINKS, self.group, letters, _COORDINATOR_METRICS
        )
        self.admission = Admission(settings.admission)
        self.servicer = GenerationServicer(
            Parts(
                settings,
                letters,
                self.fleet,
                self.admission,
                SharedPolicy(),
                _TELEMETRY["coordinator"],
                _COORDINATOR_METRICS,
                Tenants(None),
                InlineExecutor(),
            )
        )
        assert self.node is not None
        server: Any = Server(self.node)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.servicer, server)
        self._network.servers[self.address] = server
        self._loop.create_task(self.fleet.start())

    def crash(self) -> None:
        """Kill it."""
        assert self.node is not None
        self._network.kill(self.node)

    def drain(self, then: Callable[[], None]) -> None:
        """End as asked: admit nobody, tell whoever still runs to resume elsewhere, then end."""
        node, servicer = self.node, self.servicer
        assert node is not None
        self.admission.close()

        def end() -> None:
            if node.alive:
                servicer.cancel_all(NotReady("going away; resume elsewhere", retry_after_s=0.1))
                self._network.later(0.05, lambda: node.alive and self.crash())
            self._network.later(0.1, then)

        self._network.later(0.02, end)


_SETTINGS: dict[tuple[Any, ...], CoordinatorSettings] = {}


def coordinator_settings(key: tuple[Any, ...]) -> CoordinatorSettings:
    """Settings of a run; building them takes longer than a request."""
    if key not in _SETTINGS:
        num_draft_tokens, audit_ratio, draft_prefill, max_running, max_unread, steps, ahead = key
        _SETTINGS[key] = CoordinatorSettings(
            tokenizer=Path("."),
            links=LINKS,
            admission=AdmissionSettings(
                max_running=max_running, max_unread_chunks=max_unread, slow_reader_s=3.0
            ),
            speculation=SpeculationSettings(
                num_draft_tokens=num_draft_tokens,
                audit_ratio=audit_ratio,
                draft_prefill=draft_prefill,
                plain_steps=steps,
                num_ahead=ahead,
            ),
        )
    return _SETTINGS[key]
