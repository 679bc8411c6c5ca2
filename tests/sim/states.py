"""What a run of the simulation can still do, as one text: equal texts have equal futures.

Owns which parts of the hosts, of the network and of the event loop decide what happens next. Left
out is what cannot: counters and measured times (a fixed number of draft tokens makes the policy
blind to them), and when timers are due, for what is explored happens far below every deadline; in
which order they are due is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coordinator.messages import TimerFired
from protos.specmesh.v1 import draft_pb2, target_pb2

if TYPE_CHECKING:
    from tests.sim.world import World

_SHARED = {"plan", "ledger", "actions", "foresight"}  # of the draft's machine: told elsewhere
_RESPONSES = {
    "target": target_pb2.TargetServiceLinkResponse,
    "draft": draft_pb2.DraftServiceLinkResponse,
}


def fingerprint(world: World, channels: Sequence[Sequence[tuple[str, object]]]) -> str:
    """Everything that what happens next depends on.

    channels: host and content of each event on its way, those of one channel in order. Between
    channels nothing keeps an order, so none is told.
    """
    parts: list[object] = [_channels(channels)]
    for coordinator in world.coordinators:
        parts += _coordinator(coordinator)
    for host in world.services:
        parts += _service(host)
    for caller in world.callers:
        received = caller.received
        parts.append((received.tokens, received.num_attempts, received.finished is None))
    parts += [_tasks(world.loop), _timers(world.loop)]
    return repr(parts)


def _channels(channels: Sequence[Sequence[tuple[str, object]]]) -> list[str]:
    return sorted(repr([(host, _told(told)) for host, told in channel]) for channel in channels)


def _told(told: Any) -> object:
    """The content of an event; times that a service measured decide nothing."""
    if isinstance(told, tuple) and len(told) == 2 and isinstance(told[1], bytes):
        (source, target), content = told
        kind = source.rstrip("0123456789")
        if kind in _RESPONSES and target.startswith("coordinator"):
            return told[0], _without_times(kind, content)
    return told


@lru_cache(maxsize=1 << 16)
def _without_times(kind: str, content: bytes) -> bytes:
    message: Any = _RESPONSES[kind].FromString(content)
    for result in message.results:
        result.ClearField("timing")
    stripped: bytes = message.SerializeToString(deterministic=True)
    return stripped


def _coordinator(coordinator: Any) -> list[object]:
    fleet = coordinator.fleet
    parts: list[object] = [
        (coordinator.is_up, coordinator.group, sorted(fleet._seekers), sorted(fleet._cooling))
    ]
    for link in fleet._links.values():
        queued = [len(stream._queue) for stream in link._streams]
        parts.append((link.is_up, link.takes_sessions, link.num_sessions, queued))
    for call in coordinator.servicer._calls.values():
        parts.append(len(call.stream._messages))
        for driver in call.drivers:
            session = driver._session
            draft = {k: v for k, v in vars(session.draft).items() if k[1:] not in _SHARED}
            parts += [driver.session_id, session.stage, session.ledger.tokens, session.target]
            parts.append(sorted(vars(session.draft._foresight).items()))
            parts += [draft, session._round, session.round_index, session._first_round]
            parts += [session._plain_steps, driver._opened_on_rows, driver._inbox]
            parts.append(len(driver._output))
            parts.append(sorted(map(str, driver._timers)))
    return parts


def _service(host: Any) -> list[object]:
    engine = host.engine
    parts: list[object] = [(host.is_up, host.pool.num_free, engine._is_busy)]
    parts.append((engine._inbox.empty(), engine._scheduler.num_waiting))
    parts.append([wish.task.request.command.round for wish in engine._ahead._wishes.values()])
    for session in engine._table:
        at_work = session.task is not None
        parts.append((session.session_id, session.epoch, session.ledger, session.answered, at_work))
        parts.append(len(session.queued))
    return parts


def _tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Where every task stands: function and line of each frame that waits."""
    return sorted(repr(_frames(task.get_coro())) for task in asyncio.all_tasks(loop))


def _frames(waiting: Any) -> list[tuple[str, int]]:
    frames = []
    while waiting is not None:
        for kind, inner in (("cr", "cr_await"), ("ag", "ag_await"), ("gi", "gi_yieldfrom")):
            if hasattr(waiting, f"{kind}_code"):
                frame = getattr(waiting, f"{kind}_frame")
                name = getattr(waiting, f"{kind}_code").co_name
                frames.append((name, frame.f_lineno if frame is not None else -1))
                waiting = getattr(waiting, inner)
                break
        else:
            return [*frames, (type(waiting).__name__, 0)]
    return frames


def _timers(loop: Any) -> list[object]:
    """What is due, in that order; of tasks that sleep, how many."""
    due: list[object] = []
    num_sleeping = 0
    for handle in sorted(loop._scheduled, key=lambda each: each.when()):
        if handle.cancelled():
            continue
        fired = handle._args[0] if handle._args else None
        name = getattr(handle._callback, "__qualname__", type(handle._callback).__name__)
        if isinstance(fired, TimerFired):
            due.append(fired)
        elif "set_result_unless_cancelled" in name:
            num_sleeping += 1
        else:
            due.append(name)
    return [*due, num_sleeping]
