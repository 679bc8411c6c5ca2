"""Every order of events of a small run, with one fault at every step: depth-first, by replay.

A run is a script of choices. At each step the choices are: which of the messages that could reach
the coordinator next does, or the one fault: a process dies, or a deadline passes before anything
else happens. A run ends where it meets a state that was met before (`tests/sim/states.py`): what
follows from there is or will be explored.

Orders that cannot differ in anything are taken once (partial-order reduction). Services and callers
talk to the coordinator alone. So an event at one of them reads and changes that host only, and adds
messages to channels that end elsewhere: swapped with an event of another host it gives the same
state. The events that wait at one such host are therefore a set in whose place no other event need
come first, and every order within it is run; which host is served first is fixed (the first by
name), whatever was sent first, or states would differ by it that have the same futures. What is
pending at several hosts then costs the sum of their orders and not the product. Left out by this,
and left to the seeds: a message that the coordinator sends while a host still has events waiting.
An event that does nothing, or that belongs to a link's handshake, is taken at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.messages import TimerFired
from protos.specmesh.v1 import generation_pb2 as pb
from tests.sim import checkers
from tests.sim.caller import PLACEMENTS, RULES
from tests.sim.loop import SimLoop
from tests.sim.options import Faults, Setup
from tests.sim.states import fingerprint
from tests.sim.world import World

# What these draw makes every kind of round: all candidates accepted (coupled, k = 1), some
# (coupled, k = 2), none and then all (residual). Greedy ones reject, too.
SEEDS = {"coupled": 20, "residual": 4}
STEP_S = 1e-5  # what an event takes: far below every deadline
RESTART_S = 0.05
HANDSHAKE = "handshake"  # the host that the network names for them


class Met(BaseException):
    """The run has come to a state that was met before. No Exception: nothing may swallow it."""


@dataclass(eq=False)
class _Event:
    work: Callable[[], Any]
    host: str
    channel: object
    told: object


class ExploringLoop(SimLoop):
    """Takes its choices from a script, then the first of each.

    after_fault: whether the order of events after the last fault is a choice too. seen: digests of
    the states that any run has met, with how many faults were left. Raises Met at one of those.
    """

    def __init__(
        self,
        script: Sequence[int],
        num_faults: int,
        seen: set[tuple[bytes, int]],
        *,
        after_fault: bool,
    ) -> None:
        super().__init__()
        self._script = script
        self._num_faults = num_faults
        self._after_fault = after_fault
        self._seen = seen
        self._is_over = False
        self._events: list[_Event] = []
        self._world: World | None = None
        self.taken: list[tuple[int, int]] = []
        self.named: list[str] = []  # the faults that were chosen

    def event(
        self, when: float, work: Callable[[], Any], host: str, channel: object, told: object
    ) -> None:
        # GetInfo changes nothing at its service, and its caller is gone: no choice when it stops.
        if isinstance(told, str) and told.startswith("stop ") and told.endswith("/GetInfo"):
            host = HANDSHAKE
        self._events.append(_Event(work, host, channel, told))

    def begin(self, world: World) -> None:
        self._world = world

    def end(self) -> None:
        """From now on time passes and nothing happens: tasks are cancelled."""
        self._is_over = True

    def on_idle(self, timeout: float | None) -> None:
        if not self._events or self._is_over:
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
        if count == 1 or not (self._num_faults or self._after_fault):
            return 0
        step = len(self.taken)
        if step >= len(self._script) and self._world is not None:
            waiting = self._by_channel().values()
            text = fingerprint(
                self._world, [[(event.host, event.told) for event in events] for events in waiting]
            )
            # 128 bits: two of a million states share a digest once in 10^26 explorations.
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if (digest, self._num_faults) in self._seen:
                raise Met
            self._seen.add((digest, self._num_faults))
        index = self._script[step] if step < len(self._script) else 0
        self.taken.append((index, count))
        return index

    def _next_events(self) -> list[_Event]:
        """What may happen next: any event of one other host, else any at the coordinator."""
        heads = [events[0] for events in self._by_channel().values()]
        elsewhere = [event for event in heads if not event.host.startswith("coordinator")]
        if not elsewhere:
            return heads
        # Handshakes of several links meet no state that they share.
        handshakes = [event for event in elsewhere if event.host == HANDSHAKE]
        if handshakes:
            return handshakes[:1]
        host = min(event.host for event in elsewhere)
        return [event for event in elsewhere if event.host == host]

    def _by_channel(self) -> dict[object, list[_Event]]:
        """Events that wait, in order where order is kept."""
        found: dict[object, list[_Event]] = {}
        for event in self._events:
            found.setdefault(event if event.channel is None else event.channel, []).append(event)
        return found

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


@dataclass
class Exploration:
    """What an exploration came to. faults: runs to the end by fault; num_met: those that ended at a
    state met before."""

    num_runs: int = 0
    num_met: int = 0
    num_states: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def explore(
    setup: Setup, request: pb.GenerateRequest, *, num_faults: int = 1, after_fault: bool = True
) -> Exploration:
    """Run every script."""
    found = Exploration()
    script: list[int] | None = []
    seen: set[tuple[bytes, int]] = set()
    while script is not None:
        loop = ExploringLoop(script, num_faults, seen, after_fault=after_fault)
        found.num_runs += 1
        try:
            report = World(setup, [request], loop=loop).run()
        except Met:
            found.num_met += 1
        else:
            for name in loop.named or ["none"]:
                found.faults[name] = found.faults.get(name, 0) + 1
            found.failures += [f"{script} {loop.named}: {each}" for each in report.failures[:1]]
        script = following(loop.taken)
    found.num_states = len(seen)
    return found


def small_run(
    rule: str, k: int, place: str, num_targets: int = 1, num_ahead: int = 0
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
        num_ahead=num_ahead,
        steady=True,
        pass_s=0.001,
        faults=Faults(latency_s=0.001, window_s=0.1),
    )
    request = pb.GenerateRequest(max_tokens=4, ignore_eos=True, decide_at=PLACEMENTS[place])
    request.tokens.token_ids.extend([0, 1])
    if rule == "greedy":
        request.temperature = 0.0
    else:
        request.seed, request.rule = SEEDS[rule], RULES[rule]
    return setup, request


def following(taken: Sequence[tuple[int, int]]) -> list[int] | None:
    """The script after the one that took these (choice, number of choices), depth first."""
    left = list(taken)
    while left:
        index, count = left.pop()
        if index + 1 < count:
            return [*(each for each, _ in left), index + 1]
    return None
