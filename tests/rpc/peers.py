"""Services in this process behind real gRPC, and a peer that speaks to them frame by frame."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from draft_service.proposer import Proposer
from draft_service.service import SERVICE_NAME as DRAFT_NAME
from draft_service.service import DraftServicer
from protos.specmesh.v1 import draft_pb2, draft_pb2_grpc, session_pb2, target_pb2, target_pb2_grpc
from specmesh import rpc
from specmesh.config import MAX_PLAIN_STEPS, TelemetrySettings
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.commands import Observers
from specmesh.engine.executor import Device
from specmesh.engine.links import LinkOptions, LinkServer
from specmesh.engine.runner import Engine, EngineOptions, system_clocks
from specmesh.engine.serving import ServiceState
from specmesh.engine.sessions import Limits
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from specmesh.service_metrics import ServiceMetrics
from specmesh.telemetry import Telemetry
from target_service.candidates import RedrawCheck
from target_service.service import SERVICE_NAME as TARGET_NAME
from target_service.service import TargetServicer
from target_service.verifier import Verifier, VerifierOptions, joined
from tests.rpc.fake_model import PrefixCache, PrefixDecoder

VOCAB_HASH = 0xC0FFEE
LIMITS = rpc.RpcLimits()
RESIDUAL = session_pb2.DECISION_RULE_RESIDUAL
COUPLED = session_pb2.DECISION_RULE_COUPLED
AT_TARGET = session_pb2.DECIDE_AT_TARGET
AT_COORDINATOR = session_pb2.DECIDE_AT_COORDINATOR
DENSE_F32 = session_pb2.ROW_POLICY_DENSE_F32
AUTO = session_pb2.ROW_POLICY_AUTO


@dataclass
class Setup:
    """What a service is built from."""

    num_pages: int = 64
    page_size: int = 4
    max_sessions: int = 64
    options: EngineOptions = field(default_factory=EngineOptions)
    max_outbound_frames: int = 256
    max_message_bytes: int = 1 << 20
    redraw_ratio: float = 1.0
    clock_ns: object = None
    cache: object = None
    telemetry: Telemetry | None = None


@dataclass
class Service:
    """A running service: its engine for looking inside, its address for calling."""

    side: str
    engine: Engine
    pool: BlockPool
    decoder: object
    links: LinkServer
    state: ServiceState
    metrics: ServiceMetrics
    address: str


# How engines are driven: 0 by a thread of their own, else by the loop, which polls for so long.
AWAKE_S = 0.0


@asynccontextmanager
async def running(side: str, decoder: PrefixDecoder, setup: Setup | None = None):
    """Serve `decoder` as "draft" or "target" on a free port of loopback."""
    setup = setup or Setup()
    pool = BlockPool(setup.num_pages, setup.page_size)
    cache = setup.cache or PrefixCache(setup.num_pages, setup.page_size)
    vocab_size = decoder.spec.vocab_size
    metrics = ServiceMetrics(side)
    telemetry = setup.telemetry or Telemetry(side, TelemetrySettings(), "test")
    clock_ns, offset_ns = system_clocks()
    limits = Limits(
        vocab_size=vocab_size,
        vocab_hash=VOCAB_HASH,
        max_context_len=decoder.spec.max_context_len,
        max_sessions=setup.max_sessions,
        total_pages=setup.num_pages,
        page_size=setup.page_size,
    )
    if side == "draft":
        role = Proposer(8, max_message_bytes=setup.max_message_bytes)
        response_type = draft_pb2.DraftServiceLinkResponse
    else:
        options = VerifierOptions(vocab_size, 8, MAX_PLAIN_STEPS, setup.max_message_bytes)
        role = Verifier(options, RedrawCheck(setup.redraw_ratio, metrics.redraw_mismatches.inc))
        response_type = target_pb2.TargetServiceLinkResponse
    engine = Engine(
        Device(decoder, cache, pool),
        role,
        limits,
        setup.options,
        Observers(telemetry, metrics, setup.clock_ns or clock_ns, offset_ns),
    )
    if AWAKE_S:
        await asyncio.to_thread(engine.start_on_loop, asyncio.get_running_loop(), AWAKE_S)
    else:
        engine.start()
    links = LinkServer(
        engine, LinkOptions(response_type, setup.max_outbound_frames, setup.max_message_bytes)
    )
    state = ServiceState()
    state.set_ready(session_pb2.ModelInfo(model=side, vocab_size=vocab_size), links)
    server = rpc.create_server(LIMITS)
    if side == "draft":
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(state), server)
        rpc.enable_reflection(server, [DRAFT_NAME])
    else:
        target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(state), server)
        rpc.enable_reflection(server, [TARGET_NAME])
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield Service(side, engine, pool, decoder, links, state, metrics, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
        await asyncio.to_thread(engine.stop)


class Peer:
    """One link to a service. Frames keep their results in order of arrival; parts those of answers
    that go on, by session."""

    def __init__(self, side: str, channel, group: str | None = None) -> None:
        self.side = side
        self.request_type = (
            draft_pb2.DraftServiceLinkRequest
            if side == "draft"
            else target_pb2.TargetServiceLinkRequest
        )
        stub = (
            draft_pb2_grpc.DraftServiceStub(channel)
            if side == "draft"
            else target_pb2_grpc.TargetServiceStub(channel)
        )
        metadata = ((rpc.LINK_GROUP_KEY, group),) if group else None
        self.stream = stub.Link(metadata=metadata)
        self.frames: list[object] = []
        self.num_deferred = 0
        self.parts: dict[str, list[object]] = {}
        self._results: list[object] = []

    async def send(self, *commands) -> None:
        """Write one frame."""
        await self.stream.write(self.request_type(commands=commands))

    async def receive(self):
        """The next result, DEFERRED included."""
        while not self._results:
            frame = await self.stream.read()
            self.frames.append(frame)
            self._results.extend(frame.results)
        return self._results.pop(0)

    async def answer(self):
        """The next whole answer, its parts joined; no DEFERRED."""
        while True:
            result = await self.receive()
            if result.WhichOneof("result") == "deferred":
                self.num_deferred += 1
            elif self.side == "target" and result.verdict.more:
                self.parts.setdefault(result.session_id, []).append(result)
            else:
                return whole(self.parts.pop(result.session_id, []), result)

    async def call(self, command):
        """Send one command alone and wait for its answer."""
        await self.send(command)
        return await self.answer()


def whole(parts, last):
    """One result that says what all parts of an answer said, times and passes added up."""
    if not parts or last.WhichOneof("result") != "verdict":
        return last
    known = 0
    for part in (*parts, last):
        assert part.verdict.offset == known
        known += len(part.verdict.tokens)
    result = type(last)()
    result.CopyFrom(last)
    result.verdict.CopyFrom(joined([part.verdict for part in (*parts, last)]))
    result.before.CopyFrom(parts[0].before)
    for part in parts:
        for name in ("queue_us", "forward_us", "total_us", "num_steps", "cached_tokens"):
            setattr(result.timing, name, getattr(result.timing, name) + getattr(part.timing, name))
    return result


@asynccontextmanager
async def linked(service: Service, group: str | None = None):
    """A link to a running service; it ends with the block."""
    channel = rpc.create_channel(service.address, LIMITS)
    peer = Peer(service.side, channel, group)
    try:
        yield peer
    finally:
        peer.stream.cancel()
        await channel.close()


def sampling(**changes) -> session_pb2.SamplingParams:
    """Sampling parameters: everything off, temperature 1, unless said otherwise."""
    fields = {"seed": 7, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, **changes}
    return session_pb2.SamplingParams(**fields)


def digest_of(tokens) -> int:
    """The ledger's digest of a whole prefix."""
    return extend_digest(EMPTY_DIGEST, tokens)


@dataclass
class Script:
    """One session as a coordinator sees it: makes commands, keeps rounds and the prefix.

    known_len: the service's confirmed length. tokens: the coordinator's confirmed prefix.
    """

    side: str
    session_id: str
    tokens: list[int]
    max_len: int = 64
    epoch: int = 1
    round: int = 0
    known_len: int = 0
    params: session_pb2.SamplingParams = field(default_factory=sampling)
    rule: int = RESIDUAL
    policy: int = DENSE_F32
    prompt_len: int | None = None

    def _command(self, **fields):
        kind = draft_pb2.DraftCommand if self.side == "draft" else target_pb2.TargetCommand
        return kind(session_id=self.session_id, epoch=self.epoch, round=self.round, **fields)

    def open(self, **changes):
        """OpenSession."""
        fields = {
            "sampling": self.params,
            "rule": self.rule,
            "prompt_len": len(self.tokens) if self.prompt_len is None else self.prompt_len,
            "max_len": self.max_len,
            "row_policy": self.policy,
            "vocab_hash": VOCAB_HASH,
            **changes,
        }
        return self._command(open=session_pb2.OpenSession(**fields))

    def close(self):
        """CloseSession."""
        return self._command(close=session_pb2.CloseSession())

    def prefix(self, num_accepted: int = 0, **changes) -> session_pb2.PrefixUpdate:
        """From what the service knows to the coordinator's prefix; a new round."""
        self.round += 1
        start = changes.pop("append_from", self.known_len)
        fields = {
            "base_len": len(self.tokens),
            "append_from": start,
            "append": self.tokens[start:],
            "num_accepted": num_accepted,
            "prefix_digest": digest_of(self.tokens),
            **changes,
        }
        self.known_len = len(self.tokens)
        return session_pb2.PrefixUpdate(**fields)

    def propose(self, k: int, num_accepted: int = 0, **changes):
        """Propose."""
        prefix = self.prefix(num_accepted, **changes)
        return self._command(propose=draft_pb2.Propose(prefix=prefix, num_draft_tokens=k))

    def verify(
        self,
        candidates=(),
        rows=(),
        *,
        num_accepted: int = 0,
        decide_at: int = AT_TARGET,
        steps: int | None = None,
        audit: bool = False,
        **changes,
    ):
        """Verify."""
        prefix = self.prefix(num_accepted, **changes)
        steps = (0 if candidates else 1) if steps is None else steps
        return self._command(
            verify=target_pb2.Verify(
                prefix=prefix,
                candidates=candidates,
                distributions=rows,
                decide_at=decide_at,
                num_steps=steps,
                audit=audit,
            )
        )

    def committed(self, tokens) -> None:
        """The service confirmed these itself (target placement)."""
        self.tokens = [*self.tokens, *tokens]
        self.known_len = len(self.tokens)


def reason(result) -> str:
    """The error's reason, or "" where there is none."""
    return result.error.reason if result.WhichOneof("result") == "error" else ""
