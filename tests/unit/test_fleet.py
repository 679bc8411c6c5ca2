"""The coordinator's fleet: who is placed where when many wait at once."""

from __future__ import annotations

from typing import Any

from coordinator.fleet import Fleet
from coordinator.links import ReplicaLink
from coordinator.messages import DraftPlaced, Event, PlaceDraft, Side
from protos.specmesh.v1 import session_pb2
from specmesh.config import LinkSettings
from specmesh.metrics import CoordinatorMetrics

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
