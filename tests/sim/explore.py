"""Every order of events of a small run, with one fault at every step: depth-first, by replay.

A run is a script of choices. At each step the choices are: which of the messages that could reach
the coordinator next does, or the one fault: a process dies, or a deadline passes before anything
else happens. Events at services and callers are independent of each other and of what happens at
the coordinator, so one order of them stands for all; what they send back is what is permuted. A
state that was met before is not explored again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.messages import TimerFired
from protos.specmesh.v1 import generation_pb2 as pb
from tests.sim import checkers
from tests.sim.caller import PLACEMENTS, RULES
from tests.sim.loop import SimLoop
from tests.sim.options import Faults, Setup
from tests.sim.world import World

STEP_S = 1e-5  # what an event takes: far below every deadline
RESTART_S = 0.05


@dataclass(eq=False)
class _Event:
    work: Callable[[], Any]
    host: str
    channel: object
    told: object


class ExploringLoop(SimLoop):
    """Takes its choices from a script, then the first of each.

    after_fault: whether the order of events after the last fault is a choice too. seen: states
    whose choices were all made before, in any run; from one of those on the first choice will do.
    """

    def __init__(
        self,
        script: Sequence[int],
        num_faults: int,
        seen: set[tuple[int, int]],
        *,
        after_fault: bool,
    ) -> None:
        super().__init__()
        self._script = script
        self._num_faults = num_faults
        self._after_fault = after_fault
        self._seen = seen
        self._is_known = False
        self._events: list[_Event] = []
        self._world: World | None = None
        self.taken: list[tuple[int, int]] = []
        self.named: list[str] = []  # the faults that were chosen

    def event(
        self, when: float, work: Callable[[], Any], host: str, channel: object, told: object
    ) -> None:
        self._events.append(_Event(work, host, channel, told))

    def begin(self, world: World) -> None:
        self._world = world

    def on_idle(self, timeout: float | None) -> None:
        if not self._events:
            super().on_idle(timeout)
            return
        self.now += STEP_S
        ordinary = self._next_events()
        faults = self._faults() if self._world is not None else []
        if self._world is None:
            ordinary = self._events[:1]
        else:
            checkers.check_agreement(self._world)
        choice = self._choose(len(ordinary) + len(faults))
        if choice < len(ordinary):
            self._events.remove(ordinary[choice])
            self.call_soon(ordinary[choice].work)
            return
        name, inject = faults[choice - len(ordinary)]
        self._num_faults -= 1
        self.named.append(name)
        inject()

    def _choose(self, count: int) -> int:
        if count == 1 or self._is_known or not (self._num_faults or self._after_fault):
            return 0
        step = len(self.taken)
        if step >= len(self._script) and self._world is not None:
            state = hash(fingerprint(self._world, [(e.host, e.told) for e in self._events]))
            self._is_known = (state, self._num_faults) in self._seen
            if self._is_known:
                return 0
            self._seen.add((state, self._num_faults))
        index = self._script[step] if step < len(self._script) else 0
        self.taken.append((index, count))
        return index

    def _next_events(self) -> list[_Event]:
        """What may happen next: one event elsewhere, or any of those at the coordinator."""
        heads: dict[object, _Event] = {}
        for event in self._events:
            heads.setdefault(event if event.channel is None else event.channel, event)
        elsewhere = [e for e in heads.values() if not e.host.startswith("coordinator")]
        return elsewhere[:1] or list(heads.values())

    def _faults(self) -> list[tuple[str, Callable[[], None]]]:
        world = self._world
        if not self._num_faults or world is None or world.callers[0].received.finished:
            return []
        hosts = (*world.services, *world.coordinators)
        found: list[tuple[str, Callable[[], None]]] = [
            (host.address, lambda host=host: self._crash(host))
            for host in hosts
            if host.is_up and not host.address.endswith("1")  # the spare ones are alike
        ]
        found.append(("caller", lambda: world.callers[0].interrupt()))
        for handle in sorted(self._scheduled, key=lambda each: each.when()):  # type: ignore[attr-defined]
            fired = handle._args[0] if handle._args else None
            if isinstance(fired, TimerFired) and not handle.cancelled():
                found.append((f"deadline {fired.side.value}", lambda h=handle: self._fire(h)))
        return found

    def _crash(self, host: Any) -> None:
        host.crash()
        self.call_later(RESTART_S, lambda: host.is_up or host.start())

    def _fire(self, handle: Any) -> None:
        callback, arguments, context = handle._callback, handle._args, handle._context
        handle.cancel()
        self.call_soon(callback, *arguments, context=context)


def fingerprint(world: World, events: Sequence[object]) -> str:
    """Everything that what happens next depends on, but for how long timers still run."""
    parts: list[object] = [events]
    for coordinator in world.coordinators:
        fleet = coordinator.fleet
        parts.append((coordinator.is_up, coordinator.group, sorted(fleet._seekers)))
        parts += [(link.is_up, link.num_sessions) for link in fleet._links.values()]
        for call in coordinator.servicer._calls.values():
            for driver in call.drivers:
                session = driver._session
                draft = {k: v for k, v in vars(session.draft).items() if k[1:] not in _SHARED}
                parts += [driver.session_id, session.stage, session.ledger.tokens, session.target]
                parts += [draft, session._round, driver._inbox, sorted(map(str, driver._timers))]
    for host in world.services:
        parts.append((host.is_up, host.pool.num_free, host.engine._is_busy))
        for session in host.engine._table:
            answered = session.answer[0] if session.answer else None
            at_work = session.task is not None
            parts.append((session.session_id, session.epoch, session.ledger, answered, at_work))
    for caller in world.callers:
        received = caller.received
        parts.append((received.tokens, received.num_attempts, received.finished is None))
    return repr(parts)


_SHARED = {"plan", "ledger", "actions"}  # of the draft's machine: told elsewhere


@dataclass
class Exploration:
    """What an exploration came to. faults: number of runs by fault."""

    num_runs: int
    faults: dict[str, int]
    failures: list[str]


def explore(
    setup: Setup, request: pb.GenerateRequest, *, num_faults: int = 1, after_fault: bool = True
) -> Exploration:
    """Run every script."""
    found = Exploration(0, {}, [])
    script: list[int] | None = []
    seen: set[tuple[int, int]] = set()
    while script is not None:
        loop = ExploringLoop(script, num_faults, seen, after_fault=after_fault)
        report = World(setup, [request], loop=loop).run()
        found.num_runs += 1
        for name in loop.named or ["none"]:
            found.faults[name] = found.faults.get(name, 0) + 1
        found.failures += [f"{script} {loop.named}: {each}" for each in report.failures[:1]]
        script = following(loop.taken)
    return found


def small_run(
    rule: str, k: int, place: str, num_targets: int = 1
) -> tuple[Setup, pb.GenerateRequest]:
    """A request of four tokens: the prompt's round, then two or three more."""
    setup = Setup(
        seed=1,
        vocab_size=3,
        num_targets=num_targets,
        num_drafts=1,
        num_coordinators=1,
        num_requests=1,
        num_draft_tokens=k,
        steady=True,
        pass_s=0.001,
        faults=Faults(latency_s=0.001, window_s=0.1),
    )
    request = pb.GenerateRequest(max_tokens=4, ignore_eos=True, decide_at=PLACEMENTS[place])
    request.tokens.token_ids.extend([0, 1])
    if rule == "greedy":
        request.temperature = 0.0
    else:
        request.seed, request.rule = 11, RULES[rule]
    return setup, request


def following(taken: Sequence[tuple[int, int]]) -> list[int] | None:
    """The script after the one that took these (choice, number of choices), depth first."""
    left = list(taken)
    while left:
        index, count = left.pop()
        if index + 1 < count:
            return [*(each for each, _ in left), index + 1]
    return None
