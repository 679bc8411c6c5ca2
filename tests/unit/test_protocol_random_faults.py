"""The session protocol under faults drawn at random, many to a request: the same tokens."""

from __future__ import annotations

import random

import pytest

from coordinator.commands import Deferred, Failed, Opened
from coordinator.messages import (
    Action,
    DraftReply,
    DraftSwitchedOff,
    Event,
    Finish,
    Lost,
    Send,
    Side,
    StartTimer,
    TargetReply,
    TimerFired,
)
from coordinator.session_plan import Rule
from tests.sim.fakes import FakeDraft, FakeTarget, Loopback, make_session
from tests.unit.session_plan import WANTED, plan_of


class Chaos:
    """Injects faults at random, from one seed: only such as the network or a peer can cause."""

    def __init__(self, loopback: Loopback, seed: int, num_faults: int) -> None:
        self.loopback = loopback
        self.rng = random.Random(seed)
        self.left = num_faults
        self.kinds: list[str] = []

    def __call__(self, action: Action) -> list[Event] | None:
        if self.left == 0 or self.rng.random() > 0.2:
            return None
        fault = self.rng.choice(
            ["lose", "timer", "duplicate", "delay", "drop", "fail", "fail_later", "expire", "defer"]
        )
        acted = getattr(self, "_" + fault)(action)
        if acted is not None:
            self.left -= 1
            self.kinds.append(fault)
        return None if acted is None or acted is True else acted  # type: ignore[no-any-return]  # fault methods return events or True

    def _lose(self, action: Action) -> object:
        if not isinstance(action, Send):
            return None
        services = self.loopback.targets if action.side is Side.TARGET else self.loopback.drafts
        services[action.replica].lose_sessions()
        return [Lost(action.side, action.replica)]

    def _timer(self, action: Action) -> object:
        if isinstance(action, StartTimer):
            self.loopback.inbox.appendleft(TimerFired(action.side, action.epoch, action.round))
            return True
        return None

    def _duplicate(self, action: Action) -> object:
        replies = [e for e in self.loopback.inbox if isinstance(e, TargetReply | DraftReply)]
        if replies:
            self.loopback.inbox.append(self.rng.choice(replies))
            return True
        return None

    def _delay(self, action: Action) -> object:
        inbox = self.loopback.inbox
        drafts = [e for e in inbox if isinstance(e, DraftReply)]
        if drafts and any(isinstance(e, TimerFired | TargetReply) for e in inbox):
            inbox.remove(drafts[0])
            inbox.append(drafts[0])
            return True
        return None

    def _drop(self, action: Action) -> object:
        parts = [
            e for e in self.loopback.inbox if isinstance(e, TargetReply) and e.body != Opened()
        ]
        if parts:
            self.loopback.inbox.remove(self.rng.choice(parts))
            return True
        return None

    def _fail_later(self, action: Action) -> object:
        target = self.rng.choice(list(self.loopback.targets.values()))
        reasons = ["NOT_READY", "INTERNAL", "SESSION_NOT_FOUND"]
        failure = Failed(self.rng.choice(reasons), "scripted")
        target.part_failures.extend([None] * self.rng.randrange(3) + [failure])
        return True

    def _fail(self, action: Action) -> object:
        if not isinstance(action, Send):
            return None
        reasons = ["NOT_READY", "TOO_BUSY", "SESSION_NOT_FOUND", "STALE_ROUND"]
        service = (self.loopback.targets if action.side is Side.TARGET else self.loopback.drafts)[
            action.replica
        ]
        service.failures.append(Failed(self.rng.choice(reasons), "scripted"))
        return True

    def _expire(self, action: Action) -> object:
        service = self.rng.choice([*self.loopback.targets.values(), *self.loopback.drafts.values()])
        service.lose_sessions()
        return True

    def _defer(self, action: Action) -> object:
        if isinstance(action, StartTimer):
            kind = TargetReply if action.side is Side.TARGET else DraftReply
            self.loopback.inbox.appendleft(kind(action.epoch, action.round, Deferred()))
            return True
        return None


@pytest.mark.parametrize("num_ahead", [0, 16])
@pytest.mark.parametrize("block", range(20))
def test_random_faults_never_change_the_output(block: int, num_ahead: int) -> None:
    """20 seeds a block: whatever is lost, late, doubled or refused, the tokens are the same."""
    kinds: set[str] = set()
    num_ahead_rounds = 0
    for seed in range(20 * block, 20 * block + 20):
        decide_here = seed % 3 == 0
        k = (None, 0, 1, 3, 6)[seed % 5]
        plan = plan_of(
            decide_here=decide_here,
            num_draft_tokens=k,
            max_failovers=100,
            max_round_retries=3,
            rule=Rule.RESIDUAL if num_ahead else Rule.COUPLED,
            num_ahead=num_ahead,
        )
        loopback = Loopback(
            make_session(plan),
            {
                name: FakeTarget(name, decide_here=decide_here, chains=chains)
                for name, chains in (("t0", (1, 8)), ("t1", (4, 2, 1)))
            },
            {name: FakeDraft(name) for name in ("d0", "d1")},
            violations=[],
        )
        chaos = Chaos(loopback, seed, num_faults=12)
        loopback.tamper = chaos
        ended = loopback.run()
        assert isinstance(ended, Finish), (seed, chaos.kinds, ended)
        assert loopback.tokens == WANTED, (seed, chaos.kinds)
        off = [action for action in loopback.others if isinstance(action, DraftSwitchedOff)]
        assert not off, (seed, chaos.kinds, "no fault here is one of content")
        kinds.update(chaos.kinds)
        num_ahead_rounds += sum(record.was_ahead for record in loopback.records)
    assert len(kinds) >= 6
    assert (num_ahead_rounds > 20) == (num_ahead > 0)
