"""Oracles over a run, from outside: outputs, agreement of both sides, pages, queues.

They look into production objects and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coordinator.drafting import DraftState
from coordinator.messages import Side
from coordinator.stages import Stage
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from tests.sim.caller import Caller
from tests.sim.hosts import LINKS
from tests.sim.oracle import Oracle

if TYPE_CHECKING:
    from tests.sim.world import World

# Events a session may wait on: one reply and one timer per side, losses; parts of an answer.
MAX_INBOX = 8


def check_output(oracle: Oracle, caller: Caller) -> None:
    """Tokens, text, log-probabilities and end of one request."""
    request, received = caller.request, caller.received
    tokens = received.tokens
    is_greedy = request.HasField("temperature") and request.temperature == 0.0
    is_residual = request.rule == session_pb2.DECISION_RULE_RESIDUAL and not is_greedy
    if is_residual:
        oracle.check_possible(request, tokens)
    else:
        wanted = oracle.undisturbed(request)
        if received.finished is None:
            wanted = wanted[: len(tokens)]
        assert tokens == wanted, f"{caller.node.name}: {tokens} instead of {wanted}"
    _check_text(oracle, caller)
    if request.HasField("logprobs"):
        assert len(received.logprobs) == len(tokens), "a token has no log-probability"
        for index, logprob in enumerate(received.logprobs):
            known = oracle.logprob(request, tokens, index)
            assert math.isclose(logprob, known, abs_tol=1e-4), (index, logprob, known)


def _check_text(oracle: Oracle, caller: Caller) -> None:
    received = caller.received
    end = oracle.end(caller.request, received.tokens)
    if received.finished is None:
        assert received.gave_up, "a request ended without an end"
        assert end.text.startswith(received.text), (end.text, received.text)
        return
    reason = pb.FinishReason.Name(received.finished.reason).removeprefix("FINISH_REASON_").lower()
    assert (reason, received.text) == (end.reason, end.text), (reason, received.text, end)
    assert end.num_tokens == len(received.tokens)


def check_agreement(world: World) -> None:
    """Where a side owes no answer it stands where the coordinator believes; queues are bounded."""
    for coordinator in world.coordinators:
        if not coordinator.is_up:
            continue
        for link in coordinator.fleet._links.values():
            for stream in link._streams:
                assert len(stream._queue) <= LINKS.max_queued_commands
        for call in coordinator.servicer._calls.values():
            assert len(call.stream._messages) <= world.setup.max_unread_chunks + 3
            for driver in call.drivers:
                most = MAX_INBOX + world.setup.plain_steps
                assert len(driver._inbox) <= most, "a session's inbox grew past its bound"
                _check_sides(world, coordinator.group, driver)


def _check_sides(world: World, group: str, driver: Any) -> None:
    session = driver._session
    if session.stage is Stage.DONE:
        return
    tokens, target, draft = session.ledger.tokens, session.target, session.draft
    if target.in_flight is None and target.opened and session.stage is not Stage.DECIDING:
        _check_side(
            world, (Side.TARGET, target.replica), (group, driver.session_id), target, tokens
        )
    if draft.state is DraftState.READY:
        _check_side(world, (Side.DRAFT, draft.replica), (group, driver.session_id), draft, tokens)


def _check_side(
    world: World, where: tuple[Side, Any], key: tuple[str, str], side: Any, tokens: Sequence[int]
) -> None:
    host = next(each for each in world.services if each.address == where[1])
    session = host.engine._table._sessions.get(key) if host.is_up else None
    if session is None or session.epoch != side.epoch:
        return  # lost; the coordinator hears of it later
    if world.setup.faults.forget or world.setup.faults.garble:
        return  # it disagrees because it was made to
    confirmed = side.confirmed_len if where[0] is Side.TARGET else side._confirmed_len
    assert session.ledger.tokens == list(tokens[:confirmed]), (
        f"{where[1]} holds {session.ledger.tokens}, the coordinator {tokens[:confirmed]}"
    )


def check_quiet(world: World, *, may_hold_sessions: bool) -> None:
    """Nothing runs: no session, no page, no place, no waiter is held anywhere."""
    for host in world.services:
        if not may_hold_sessions:
            assert not len(host.engine._table), f"{host.address} holds a session of nobody"
            assert not host.pool.num_used, f"{host.address} holds {host.pool.num_used} pages"
            assert not host.engine._scheduler.has_work, f"{host.address} works for nobody"
        host.pool.check_integrity()
    for coordinator in world.coordinators:
        fleet, servicer = coordinator.fleet, coordinator.servicer
        assert not servicer._calls, "a call is still open"
        assert not coordinator.admission.num_running, "a place is still taken"
        assert not coordinator.admission.num_waiting, "somebody still waits for a place"
        assert not fleet._subscribers, "a session still listens"
        assert not fleet._seekers, "a session still seeks a draft"
        for link in fleet._links.values():
            assert not link.num_sessions, f"{link.address} counts {link.num_sessions} sessions"
            assert link.is_up, f"the link to {link.address} did not come back"
