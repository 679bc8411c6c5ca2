"""The coordinator's fleet: who is placed where when many wait at once."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.fleet import Fleet
from coordinator.links import ReplicaLink
from coordinator.messages import (
    DraftPlaced,
    Event,
    PlaceDraft,
    PlaceTarget,
    Side,
    TargetPlaced,
    TargetUnplaced,
)
from coordinator.placement import prefix_key
from protos.specmesh.v1 import session_pb2
from specmesh.config import LinkSettings
from specmesh.coordinator_metrics import CoordinatorMetrics

FULL, OTHER = "full:1", "other:1"


class Vocabulary:
    """A tokenizer's."""

    vocab_hash = 0


class Seeker:
    """A session; the queue to one of the drafts is full, so it leaves that one at once."""

    def __init__(self, session_id: str, fleet: Fleet) -> None:
        self.session_id = session_id
        self.placed: list[str] = []
        self._fleet = fleet
        fleet.subscribe(self)
        fleet.place_draft(session_id, PlaceDraft(0))

    def handle(self, event: Event) -> None:
        """Do what `Drafting` and `Driver` do about a full queue."""
        assert isinstance(event, DraftPlaced)
        assert event.epoch == len(self.placed)
        self.placed.append(event.replica)
        if event.replica == FULL:
            self._fleet.place_draft(self.session_id, PlaceDraft(len(self.placed), FULL))

    def receive(self, link: ReplicaLink, result: Any) -> None:
        """None is asked for."""


async def test_sessions_that_seek_again_while_others_are_served() -> None:
    """One that leaves a draft in the moment it gets it has the others served before their turn:
    each gets a draft once, and the link that came up does not end on a bug."""
    fleet = Fleet(
        ["target:1"], [FULL, OTHER], LinkSettings(), "group", Vocabulary(), CoordinatorMetrics()
    )
    seekers = [Seeker(name, fleet) for name in "abc"]
    drafts = [fleet.link(Side.DRAFT, address) for address in (FULL, OTHER)]
    for link in drafts:
        link.info, link.is_up = session_pb2.ModelInfo(max_context_len=64), True
    fleet.link_up(drafts[0])
    assert [seeker.placed for seeker in seekers] == [[FULL, OTHER], [OTHER], [OTHER]]
    assert [link.num_sessions for link in drafts] == [0, 3]
    await fleet.close()


class Placing:
    """A session that asks for a target."""

    session_id = "s"

    def __init__(self, fleet: Fleet) -> None:
        self.answers: asyncio.Queue[Event] = asyncio.Queue()
        self._fleet = fleet
        fleet.subscribe(self)

    async def ask(self, key: int, **request: Any) -> Event:
        """What the fleet answers."""
        self._fleet.place_target("s", prefix_key([key]), PlaceTarget(0, **request))
        return await asyncio.wait_for(self.answers.get(), 10)

    def handle(self, event: Event) -> None:
        self.answers.put_nowait(event)

    def receive(self, link: ReplicaLink, result: Any) -> None:
        """None is asked for."""


async def test_sessions_are_placed_where_they_fit() -> None:
    """Replicas that hold less, in their context or their pages, as while their settings are rolled:
    they get what fits, and what does not waits for one that holds it, also when it must move. What
    nobody holds is for the replicas to refuse."""
    settings = LinkSettings(reconnect_initial_s=0.001, reconnect_max_s=0.01, connect_timeout_s=0.05)
    addresses = ("short:1", "few-pages:1", "long:1")
    fleet = Fleet(addresses, [], settings, "group", Vocabulary(), CoordinatorMetrics())
    links = {address: fleet.link(Side.TARGET, address) for address in addresses}
    for link, context_len, pages in zip(links.values(), (64, 256, 256), (0, 4, 16), strict=True):
        link.info = session_pb2.ModelInfo(
            max_context_len=context_len, total_pages=pages, page_size=16
        )
        link.is_up = True
    assert fleet.max_context_len == 256
    session = Placing(fleet)

    async def found(max_len: int, **request: Any) -> set[str]:
        answers = [await session.ask(key, max_len=max_len, **request) for key in range(16)]
        return {each.replica for each in answers if isinstance(each, TargetPlaced)}

    assert await found(64) == set(addresses)
    assert await found(65) == {"long:1"}
    assert await found(65, num_moves=1, prefer="short:1") == {"long:1"}
    assert await found(257) == set(addresses)
    links["long:1"].is_up = False
    assert isinstance(await session.ask(0, max_len=65), TargetUnplaced)
    assert await found(64) == {"short:1", "few-pages:1"}
    await fleet.close()
