"""The coordinator's end of a stream: bounds, and ends that are no bugs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator import links
from coordinator.links import FRAME_BYTES, ReplicaLink, _Stream
from coordinator.messages import Side
from protos.specmesh.v1 import target_pb2
from specmesh.config import LinkSettings
from specmesh.event_loop import StayAwake
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import running

Command = target_pb2.TargetCommand


class Call:
    """A call that ends, in good order, after it took `num_frames`."""

    def __init__(self, num_frames: int) -> None:
        self.frames: list[Any] = []
        self._num_frames = num_frames

    async def write(self, frame: Any) -> None:
        if len(self.frames) == self._num_frames:
            raise asyncio.InvalidStateError("RPC already finished.")  # as grpc.aio does
        self.frames.append(frame)


async def test_a_call_that_ended_while_it_was_written_to_is_no_bug() -> None:
    """The writer returns, as at any other end of the stream: sessions move, nothing is logged as a
    bug of ours."""
    call = Call(num_frames=1)
    stream = _Stream(call, target_pb2.TargetServiceLinkRequest, max_queued=8)
    assert stream.put(Command(session_id="a"))
    writer = asyncio.create_task(stream.write_all())
    await asyncio.sleep(0)
    assert stream.put(Command(session_id="b"))
    await asyncio.wait_for(writer, 5)
    assert [command.session_id for command in call.frames[0].commands] == ["a"]


async def test_commands_gather_into_frames_of_bounded_size_and_number() -> None:
    """What waits goes out together, cut at FRAME_BYTES; a full queue takes no more."""
    call = Call(num_frames=3)
    stream = _Stream(call, target_pb2.TargetServiceLinkRequest, max_queued=6)
    big = "x" * (FRAME_BYTES // 3)
    taken = [stream.put(Command(session_id=f"{i}{big}")) for i in range(7)]
    assert taken == [True] * 6 + [False]
    writer = asyncio.create_task(stream.write_all())
    while len(call.frames) < 3:
        await asyncio.sleep(0)
    writer.cancel()
    assert [len(frame.commands) for frame in call.frames] == [2, 2, 2]


class Owner:
    """Takes what a link reports."""

    def __init__(self) -> None:
        self.ups: asyncio.Queue[ReplicaLink] = asyncio.Queue()
        self.num_downs = 0

    def check(self, link: ReplicaLink, info: Any) -> None:
        """Every replica will do."""

    def link_up(self, link: ReplicaLink) -> None:
        self.ups.put_nowait(link)

    def link_down(self, link: ReplicaLink) -> None:
        self.num_downs += 1

    def result(self, link: ReplicaLink, result: Any) -> None:
        """None is asked for."""


async def test_a_link_that_this_side_reset_connects_again() -> None:
    """What a full queue does to a target's link: its sessions are told, and it comes back. The
    reader of a call that was cancelled here ends as a cancelled task, not with an error."""
    async with running("target", PrefixDecoder()) as service:
        owner = Owner()
        settings = LinkSettings(reconnect_initial_s=0.01)
        link = ReplicaLink(Side.TARGET, service.address, settings, owner, "group")
        link.start()
        try:
            await asyncio.wait_for(owner.ups.get(), 10)
            link.reset()
            await asyncio.wait_for(owner.ups.get(), 10)
            assert owner.num_downs == 1
        finally:
            await link.close()


@pytest.mark.parametrize("busy_poll_ms", [0.0, 3.0])
async def test_commands_and_results_keep_the_loop_awake_where_that_is_set(
    busy_poll_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One touch a command and one a frame of results; none where the setting says never."""
    touched: list[float] = []

    class Counted(StayAwake):
        def touch(self) -> None:
            touched.append(self._awake_s)
            super().touch()

    monkeypatch.setattr(links, "StayAwake", Counted)
    got = asyncio.Event()

    class Hearing(Owner):
        def result(self, link: ReplicaLink, result: Any) -> None:
            got.set()

    async with running("target", PrefixDecoder()) as service:
        owner = Hearing()
        settings = LinkSettings(busy_poll_ms=busy_poll_ms)
        link = ReplicaLink(Side.TARGET, service.address, settings, owner, "group")
        link.start()
        try:
            await asyncio.wait_for(owner.ups.get(), 10)
            close = target_pb2.TargetCommand(session_id="unknown", epoch=1, round=0)
            close.close.SetInParent()
            assert link.send(close)
            await asyncio.wait_for(got.wait(), 10)
        finally:
            await link.close()
    assert touched == ([busy_poll_ms * 1e-3] * 2 if busy_poll_ms else [])
