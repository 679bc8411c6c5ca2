"""The replicas behind a coordinator: membership, handshake, placement, who hears of what.

Owns the links, the one model identity that all targets and drafts must share, and the sessions'
subscriptions. Placement itself is pure (`coordinator/placement.py`); this file knows which replicas
are up and how long to wait for one. Must not know rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from coordinator.links import Credentials, ReplicaLink
from coordinator.messages import (
    DraftPlaced,
    Event,
    Lost,
    PlaceDraft,
    PlaceTarget,
    Side,
    TargetPlaced,
    TargetUnplaced,
)
from coordinator.placement import Candidate, choose_draft, choose_target
from protos.specmesh.v1 import session_pb2
from specmesh.config import LinkSettings
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.errors import ModelMismatch, NotReady
from specmesh.rpc import RpcLimits

logger = logging.getLogger(__name__)

# How long a moved session waits for the replica whose link just ended, in reconnect steps: long
# enough for a reset connection, far shorter than rebuilding a prefix elsewhere.
PREFER_STEPS = 3


class Subscriber(Protocol):
    """A session's driver."""

    session_id: str

    def handle(self, event: Event) -> None:
        """Take an event."""

    def receive(self, link: ReplicaLink, result: Any) -> None:
        """Take a result."""


class Vocabulary(Protocol):
    """What the coordinator's own tokenizer says of its vocabulary."""

    @property
    def vocab_hash(self) -> int:
        """64-bit hash of every id's bytes."""


class Fleet:
    """Targets and drafts of one coordinator replica. Lives on one event loop."""

    def __init__(
        self,
        targets: Iterable[str],
        drafts: Iterable[str],
        settings: LinkSettings,
        group: str,
        vocabulary: Vocabulary,
        metrics: CoordinatorMetrics,
        *,
        limits: RpcLimits | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """targets, drafts: host:port of each replica. Nothing connects before `start`."""
        self._settings = settings
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._links = {
            (side, address): ReplicaLink(
                side, address, settings, self, group, limits=limits, credentials=credentials
            )
            for side, addresses in ((Side.TARGET, targets), (Side.DRAFT, drafts))
            for address in dict.fromkeys(addresses)
        }
        self._subscribers: dict[str, Subscriber] = {}
        self._on_link: dict[tuple[Side, str], set[str]] = {key: set() for key in self._links}
        self._seekers: dict[str, PlaceDraft] = {}
        self._cooling: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # The first replica of each side that shook hands; all others must fit it.
        self._identity: dict[Side, tuple[str, session_pb2.ModelInfo]] = {}

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Connect; return when a target is up and the drafts had a fair chance.

        Raises ModelMismatch when a configured replica runs another model or vocabulary.
        """
        for link in self._links.values():
            link.start()
        await self._wait_until(lambda: any(link.is_up for link in self._of(Side.TARGET)), None)
        await self._wait_until(
            lambda: all(link.is_up for link in self._of(Side.DRAFT)),
            self._settings.connect_timeout_s,
        )

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not condition():
            for link in self._links.values():
                if link.mismatch is not None:
                    raise link.mismatch
            # A refused replica does not signal: look again from time to time.
            step = self._settings.reconnect_initial_s
            if deadline is not None:
                step = min(step, deadline - loop.time())
                if step <= 0:
                    return False
            self._changed.clear()
            try:
                async with asyncio.timeout(step):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return True

    async def close(self) -> None:
        """End every link and wait."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _of(self, side: Side) -> list[ReplicaLink]:
        return [link for (of_side, _), link in self._links.items() if of_side is side]

    def link(self, side: Side, address: str) -> ReplicaLink:
        """The link to a configured replica."""
        return self._links[side, address]

    # ------------------------------------------------------------ what links report

    def check(self, link: ReplicaLink, info: session_pb2.ModelInfo) -> None:
        """Refuse a replica whose vocabulary, special ids or (for targets) weights differ."""
        if info.vocab_hash != self._vocabulary.vocab_hash:
            raise ModelMismatch(
                f"{link.side.value} {link.address} has another tokenizer: vocabulary hash "
                f"{info.vocab_hash:#018x}, the coordinator's is {self._vocabulary.vocab_hash:#018x}"
            )
        for side, (address, known) in self._identity.items():
            _check_ids(link, info, address, known)
            both_targets = side is Side.TARGET and link.side is Side.TARGET
            if both_targets and known.fingerprint != info.fingerprint:
                raise ModelMismatch(
                    f"target {link.address} runs other weights than {address}: fingerprint "
                    f"{info.fingerprint} against {known.fingerprint}"
                )
        self._identity.setdefault(link.side, (link.address, info))

    def link_up(self, link: ReplicaLink) -> None:
        """A replica is there: sessions that wait for one are served."""
        logger.info("link up", extra={"side": link.side.value, "replica": link.address})
        self._metrics.link_up.labels(link.side.value, link.address).set(1)
        if link.side is Side.DRAFT:
            self._cooling.discard(link.address)
            self._serve_seekers()
        self._changed.set()

    def link_down(self, link: ReplicaLink) -> None:
        """A replica is gone: its sessions are told."""
        self._metrics.link_up.labels(link.side.value, link.address).set(0)
        key = (link.side, link.address)
        lost, self._on_link[key] = self._on_link[key], set()
        link.num_sessions = 0
        for session_id in lost:
            subscriber = self._subscribers.get(session_id)
            if subscriber is not None:
                subscriber.handle(Lost(link.side, link.address))
        self._changed.set()

    def result(self, link: ReplicaLink, result: Any) -> None:
        """Pass a result to its session; results of sessions that ended are late."""
        subscriber = self._subscribers.get(result.session_id)
        if subscriber is not None:
            subscriber.receive(link, result)

    # ------------------------------------------------------------ sessions

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on the session hears of its results and links."""
        self._subscribers[subscriber.session_id] = subscriber

    def unsubscribe(self, session_id: str) -> None:
        """The session has ended."""
        self._subscribers.pop(session_id, None)
        self._seekers.pop(session_id, None)
        for side in Side:
            self.leave(side, session_id)

    def enter(self, side: Side, address: str, session_id: str) -> None:
        """The session is on this replica now (and on no other of its side)."""
        self.leave(side, session_id)
        self._on_link[side, address].add(session_id)
        self._links[side, address].num_sessions += 1

    def leave(self, side: Side, session_id: str) -> None:
        """The session is on no replica of this side any more."""
        for (of_side, address), sessions in self._on_link.items():
            if of_side is side and session_id in sessions:
                sessions.remove(session_id)
                self._links[side, address].num_sessions -= 1

    # ------------------------------------------------------------ placement

    def place_target(self, session_id: str, key: bytes, request: PlaceTarget) -> None:
        """Answer with TargetPlaced now, or later with it or TargetUnplaced."""
        if not request.num_moves:
            address = self._choose_target(key, None, request.max_len)
            if address is not None:
                self._placed(session_id, request, address)
                return
        self._spawn(self._place_target_later(session_id, key, request))

    async def _place_target_later(self, session_id: str, key: bytes, request: PlaceTarget) -> None:
        settings = self._settings
        prefer = request.prefer
        if prefer is not None and request.num_moves == 1:
            link = self._links[Side.TARGET, prefer]
            wait_s = PREFER_STEPS * settings.reconnect_initial_s
            if await self._wait_until_quiet(
                lambda: link in self._able_targets(request.max_len), wait_s
            ):
                self._placed(session_id, request, prefer)
                return

        def choose() -> str | None:
            return self._choose_target(key, request.avoid, request.max_len)

        if choose() in (None, request.avoid):
            backoff_s = settings.reconnect_initial_s * 2 ** min(request.num_moves, 16)
            await asyncio.sleep(
                min(settings.reconnect_max_s, max(backoff_s, request.retry_after_s))
            )
        found = await self._wait_until_quiet(
            lambda: choose() is not None,
            settings.connect_timeout_s,
        )
        address = choose() if found else None
        if address is not None:
            self._placed(session_id, request, address)
            return
        self._tell(
            session_id,
            TargetUnplaced(
                request.epoch, "no target replica is connected", settings.reconnect_max_s
            ),
        )

    async def _wait_until_quiet(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Like `_wait_until`, for sessions: another replica's mismatch is not their error."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            await asyncio.sleep(min(left, self._settings.reconnect_initial_s / 4))
        return True

    def _choose_target(self, key: bytes, avoid: str | None, max_len: int) -> str | None:
        candidates = _candidates(self._able_targets(max_len))
        return choose_target(key, candidates, self._settings.load_cap, avoid)

    def _able_targets(self, max_len: int) -> list[ReplicaLink]:
        """Targets that may be given a session of so many tokens: those that can hold it. All, where
        none is known that can: they say what is wrong with it."""
        targets = self._of(Side.TARGET)
        able = [link for link in targets if link.info and _holds(link.info, max_len)]
        return [link for link in able or targets if link.takes_sessions]

    def _placed(self, session_id: str, request: PlaceTarget, address: str) -> None:
        info = self._links[Side.TARGET, address].info
        assert info is not None
        if session_id in self._subscribers:
            self.enter(Side.TARGET, address, session_id)
            most = info.max_num_draft_tokens
            self._tell(session_id, TargetPlaced(request.epoch, address, info.device_id, most))

    def place_draft(self, session_id: str, request: PlaceDraft) -> None:
        """Answer with DraftPlaced now, or when a draft is there and healthy, or never."""
        self.leave(Side.DRAFT, session_id)
        self._seekers[session_id] = request
        if request.avoid is not None:
            self._cool(request.avoid)
        self._serve_seekers()

    def _cool(self, address: str) -> None:
        """A draft that failed a session is offered again after a pause and a probe."""
        if address not in self._cooling:
            self._cooling.add(address)
            self._spawn(self._probe_until_healthy(address))

    async def _probe_until_healthy(self, address: str) -> None:
        link = self._links[Side.DRAFT, address]
        while address in self._cooling:
            await asyncio.sleep(self._settings.reconnect_max_s)
            if link.is_up and await link.probe():
                self._cooling.discard(address)
        self._serve_seekers()

    def _serve_seekers(self) -> None:
        for session_id in list(self._seekers):
            request = self._seekers.get(session_id)
            if request is None:  # one told before it seeks again already, and served this one
                continue
            address = choose_draft(
                _candidates(
                    link
                    for link in self._of(Side.DRAFT)
                    if link.takes_sessions and link.address not in self._cooling
                )
            )
            if address is None:
                return
            del self._seekers[session_id]
            info = self._links[Side.DRAFT, address].info
            assert info is not None
            if session_id in self._subscribers:
                self.enter(Side.DRAFT, address, session_id)
                placed = DraftPlaced(
                    request.epoch,
                    address,
                    info.max_context_len,
                    info.device_id,
                    info.max_num_draft_tokens,
                )
                self._tell(session_id, placed)

    def _tell(self, session_id: str, event: Event) -> None:
        subscriber = self._subscribers.get(session_id)
        if subscriber is not None:
            subscriber.handle(event)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        return any(link.takes_sessions for link in self._of(Side.TARGET))

    def require_target(self) -> session_pb2.ModelInfo:
        """The targets' model. Raises NotReady before the first handshake."""
        found = next((link.info for link in self._of(Side.TARGET) if link.info), None)
        if found is None:
            raise NotReady("no target replica is connected", retry_after_s=1.0)
        return found

    @property
    def max_context_len(self) -> int:
        """The longest context that a target holds: of those connected now, or else of any."""
        known = [(link.is_up, link.info) for link in self._of(Side.TARGET) if link.info]
        up = [info for is_up, info in known if is_up] or [info for _, info in known]
        return max((info.max_context_len for info in up), default=0)

    @property
    def max_message_bytes(self) -> int:
        """What every target that says so sends in one message, in bytes."""
        known = [link.info.max_message_bytes for link in self._of(Side.TARGET) if link.info]
        return min(filter(None, known), default=RpcLimits().max_message_bytes)

    @property
    def draft_info(self) -> session_pb2.ModelInfo | None:
        """The model of a draft that is connected now."""
        return next((link.info for link in self._of(Side.DRAFT) if link.is_up), None)


def _candidates(links: Iterable[ReplicaLink]) -> list[Candidate]:
    return [
        Candidate(link.address, max(link.num_sessions, link.load.num_sessions)) for link in links
    ]


def _holds(info: session_pb2.ModelInfo, max_len: int) -> bool:
    """Whether a session of so many tokens fits a replica's context and its pool of pages."""
    pool_len = info.total_pages * info.page_size
    return max_len <= info.max_context_len and (not pool_len or max_len <= pool_len)


def _check_ids(
    link: ReplicaLink, info: session_pb2.ModelInfo, address: str, other: session_pb2.ModelInfo
) -> None:
    def special(of: session_pb2.ModelInfo) -> tuple[object, ...]:
        return (of.vocab_size, of.vocab_hash, of.bos_token_id, sorted(of.eos_token_ids))

    if special(info) != special(other):
        names = ("vocab_size", "vocab_hash", "bos_token_id", "eos_token_ids")
        differing = [
            f"{name} {mine} against {theirs}"
            for name, mine, theirs in zip(names, special(info), special(other), strict=True)
            if mine != theirs
        ]
        raise ModelMismatch(
            f"{link.side.value} {link.address} does not fit {address}: {'; '.join(differing)}"
        )
