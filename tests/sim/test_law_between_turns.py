"""A coordinator that dies between two turns of its loop: what it has shown by then tells nothing.

Times of a simulation lie between turns of the loop, where everything that was ready has run. Here
the coordinator dies so many turns after a verdict, and what it wrote before arrives before the
reset does, as with TCP. A chunk that is shown sooner because it is the last keeps the outputs that
ended and lets others be drawn again, with other noise: the law bends.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.driver import Driver
from coordinator.messages import Finish, Side
from coordinator.stream import SampleSink
from specmesh.errors import InternalError
from tests.sim.law import law_of_system, law_of_target
from tests.sim.test_law_under_faults import stopping, tiny
from tests.sim.transport import Network
from tests.sim.world import Crash, World

RESET_S = 0.0002  # behind what was written


def kill_after_written(self: Network, node: Any) -> None:
    """`Network.kill`, but for a reset that does not overtake."""
    node.alive = False
    for call in list(self.calls):
        if call.server is not None and call.server.node is node:
            ends = (call.node.name, call.address)
            self.event(
                self.loop.now + self.delay() + RESET_S,
                lambda call=call: call.fail("connection reset"),  # type: ignore[misc]
                ends[0],
                ends,
                "reset",
            )
        elif call.node is node:
            self.soon(call.stop_server, call.address, None, "stop")
            call.fail("killed")
    for task in list(node.tasks):
        task.cancel()


def is_law_kept(monkeypatch: pytest.MonkeyPatch, verdict: int, turns: int) -> bool:
    """The law where the coordinator dies `turns` turns after verdict number `verdict`."""
    setup, request, crashes = stopping(0.02, 1)
    crashes = [crash for crash in crashes if crash.kind == "draft"]
    state: dict[str, Any] = {}
    begin, receive = World.__init__, Driver.receive

    def begun(self: World, *args: Any, **kwargs: Any) -> None:
        state.update(count=0, world=self)
        begin(self, *args, **kwargs)

    def received(self: Driver, link: Any, result: Any) -> None:
        receive(self, link, result)
        if link.side is not Side.TARGET or not result.HasField("verdict"):
            return
        state["count"] += 1
        if state["count"] == verdict:
            asyncio.get_running_loop().call_soon(later, turns)

    def later(left: int) -> None:
        if left:
            asyncio.get_running_loop().call_soon(later, left - 1)
        else:
            state["world"].kill(Crash(0.0, "coordinator", 0.03))

    monkeypatch.setattr(Network, "kill", kill_after_written)
    monkeypatch.setattr(World, "__init__", begun)
    monkeypatch.setattr(Driver, "receive", received)
    law, _ = law_of_system(setup, request, crashes)
    eos = setup.vocab_size - 1
    wanted = law_of_target(
        setup, request, lambda output: len(output) == 6 or (len(output) > 0 and output[-1] == eos)
    )
    return law == wanted


TURNS = [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1)]


@pytest.mark.parametrize(("verdict", "turns"), TURNS)
def test_what_is_shown_at_a_crash_does_not_depend_on_what_was_drawn(
    monkeypatch: pytest.MonkeyPatch, verdict: int, turns: int
) -> None:
    """Chunks that end a request and chunks that do not are shown alike."""
    assert is_law_kept(monkeypatch, verdict, turns)


def test_an_end_that_is_shown_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this file is about, planted."""

    def finish(self: Driver, action: Finish) -> None:
        self._output.append(action)
        self._show()

    monkeypatch.setitem(Driver._PERFORM, Finish, finish)
    assert not all(is_law_kept(monkeypatch, *each) for each in TURNS)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_output_that_fails_ends_its_request_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A bug in the sink: the request fails in the caller's sight; no token is left out."""
    deliver, count = SampleSink.deliver, 0

    def faulty(self: SampleSink, message: Any) -> None:
        nonlocal count
        count += 1
        if count == chunk:
            raise RuntimeError("planted")
        deliver(self, message)

    monkeypatch.setattr(SampleSink, "deliver", faulty)
    setup, request = tiny(max_tokens=6)
    world = World(setup, [request], [])
    with pytest.raises(InternalError):
        world.run()
    received = world.callers[0].received  # which checks that rounds follow each other
    assert received.finished is None
    assert (len(received.tokens) == 0) == (chunk == 1)
