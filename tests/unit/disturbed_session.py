"""One session against fake services that a test disturbs, and what it must end as all the same."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.commands import Propose, Verify
from coordinator.messages import Action, Event, Finish, Send, Side
from coordinator.session_plan import SessionPlan
from tests.sim.fakes import FakeDraft, FakeTarget, Loopback, make_session
from tests.unit.session_plan import WANTED, plan_of


def loopback_of(
    plan: SessionPlan | None = None,
    draft: FakeDraft | None = None,
    target: FakeTarget | None = None,
) -> Loopback:
    plan = plan or plan_of(num_draft_tokens=3)
    target = target or FakeTarget(decide_here=plan.decide_here)
    draft = draft or FakeDraft()
    return Loopback(
        make_session(plan),
        {target.name: target, "spare": FakeTarget("spare")},
        {draft.name: draft},
    )


def finish(loopback: Loopback) -> Finish:
    """Run to the end, which must be the undisturbed one."""
    ended = loopback.run()
    assert isinstance(ended, Finish), ended
    assert loopback.tokens == WANTED
    for service in (*loopback.targets.values(), *loopback.drafts.values()):
        assert not service.sessions, f"{service.name} holds a session"
    return ended


def once(
    when: Callable[[Action], bool], events: Callable[[Action], list[Event]]
) -> Callable[[Action], list[Event] | None]:
    """Tamper with the first action that matches."""
    done = False

    def tamper(action: Action) -> list[Event] | None:
        nonlocal done
        if done or not when(action):
            return None
        done = True
        return events(action)

    return tamper


def is_working(action: Action, side: Side, nth: int = 1) -> bool:
    """Whether the action sends a working command numbered >= nth to this side."""
    return (
        isinstance(action, Send)
        and action.side is side
        and any(isinstance(c, Verify | Propose) and c.round >= nth for c in action.commands)
    )
