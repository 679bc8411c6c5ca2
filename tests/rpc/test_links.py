"""Links: bounded both ways, alive while the device works, drained in order."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from protos.specmesh.v1 import target_pb2, target_pb2_grpc
from specmesh import rpc, wire_errors
from specmesh.engine.links import LinkOptions, ServiceLink, split_by_bytes
from specmesh.engine.runner import FLOOD_FACTOR, EngineOptions
from specmesh.engine.serving import ServiceState
from specmesh.errors import NotReady, TooBusy
from target_service.service import TargetServicer
from target_service.verifier import Verifier
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import LIMITS, Script, Setup, linked, reason, running

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5]


async def read_to_end(stream) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def submitted(service, count: int) -> None:
    """Wait until the engine was handed this many commands."""
    while service.engine._num_submitted < count:
        await asyncio.sleep(0)


async def test_calls_are_answered_while_a_pass_runs() -> None:
    """GetInfo returns, and a close is taken, while the device is held in a pass."""
    model = PrefixDecoder(VOCAB)
    entered, release = threading.Event(), threading.Event()
    async with running("target", model) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())

        def hold() -> None:
            entered.set()
            assert release.wait(30)

        model.before_pass = hold
        await link.send(script.verify(steps=4))
        await asyncio.to_thread(entered.wait)
        async with rpc.create_channel(service.address, LIMITS) as channel:
            info = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(
                target_pb2.TargetServiceGetInfoRequest()
            )
        assert info.info.vocab_size == VOCAB
        await link.send(script.close())
        await submitted(service, 3)
        assert service.pool.num_used > 0  # not before the pass in flight has ended
        model.before_pass = lambda: None
        release.set()
        assert (await link.answer()).WhichOneof("result") == "closed"
        assert service.pool.num_used == 0


async def test_calls_are_answered_while_rows_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the host shapes and judges take long in a large vocabulary: no loop waits there."""
    entered, release = threading.Event(), threading.Event()
    advance = Verifier.advance

    def hold(self: Verifier, *arguments: Any) -> Any:
        entered.set()
        assert release.wait(20)
        return advance(self, *arguments)

    monkeypatch.setattr(Verifier, "advance", hold)
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        await link.send(script.verify())
        await asyncio.to_thread(entered.wait)
        async with rpc.create_channel(service.address, LIMITS) as channel:
            await target_pb2_grpc.TargetServiceStub(channel).GetInfo(
                target_pb2.TargetServiceGetInfoRequest()
            )
        assert not release.is_set()
        release.set()
        assert (await link.answer()).HasField("verdict")


async def test_an_engine_is_not_stopped_on_the_loop_that_it_runs_on(driven_by: str) -> None:
    """It would wait for itself for ever."""
    async with running("target", PrefixDecoder(VOCAB)) as service:
        if driven_by == "loop":
            with pytest.raises(RuntimeError, match="not on the loop"):
                service.engine.stop()


async def test_what_is_posted_has_left_when_it_was_read_to_be_sent() -> None:
    """An end that stands behind it changes nothing; where nobody reads on, nothing is left."""
    async with running("target", PrefixDecoder(VOCAB)) as service:
        options = LinkOptions(target_pb2.TargetServiceLinkResponse)
        link = ServiceLink(service.engine, "group", options)
        assert link.has_sent
        link.post([target_pb2.TargetResult()])
        link.post_end()
        assert not link.has_sent
        assert len((await link.next_frame()).results) == 1
        assert await link.next_frame() is None
        assert link.has_sent
        other = ServiceLink(service.engine, "group", options)
        other.post([target_pb2.TargetResult()])
        other.detach()
        assert other.has_sent


async def test_a_peer_that_does_not_read_loses_its_link() -> None:
    """Outbound frames are bounded: past the bound the stream ends and its sessions with it."""
    setup = Setup(max_outbound_frames=4)
    async with running("target", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        (server_link,) = service.links._links
        result = target_pb2.TargetResult(session_id="x" * 60_000)
        for _ in range(60):
            server_link.post([result])
        while len(service.engine._table):  # its sessions end at once, read or not
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(link.stream)
        assert type(wire_errors.error_from_rpc(caught.value)) is TooBusy


async def test_too_many_commands_are_told_to_come_back() -> None:
    """Beyond max_waiting_commands: TOO_BUSY with a delay, at once; closes are always taken."""
    model = PrefixDecoder(VOCAB)
    entered, release = threading.Event(), threading.Event()
    setup = Setup(options=EngineOptions(max_waiting_commands=3))
    async with running("target", model, setup) as service, linked(service) as link:
        scripts = [Script("target", f"s{index}", [index, *PROMPT]) for index in range(5)]
        for script in scripts:
            await link.call(script.open())

        def hold() -> None:
            entered.set()
            assert release.wait(30)

        model.before_pass = hold
        await link.send(scripts[0].verify())
        await asyncio.to_thread(entered.wait)
        await link.send(*(script.verify() for script in scripts[1:]), scripts[4].close())
        await submitted(service, 11)
        model.before_pass = lambda: None
        release.set()
        answers = [await link.answer() for _ in range(6)]
        busy = [answer for answer in answers if reason(answer) == "TOO_BUSY"]
        assert {answer.session_id for answer in busy} == {"s4"}
        assert all(answer.error.retry_after_us > 0 for answer in busy)
        assert "closed" in {answer.WhichOneof("result") for answer in answers}


async def test_a_peer_that_writes_without_end_loses_its_link() -> None:
    """While the device works, commands that nobody has read are bounded, closes included; another
    link's are not taken for its."""
    model = PrefixDecoder(VOCAB)
    entered, release = threading.Event(), threading.Event()
    setup = Setup(options=EngineOptions(max_waiting_commands=3))
    async with running("target", model, setup) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())

        def hold() -> None:
            entered.set()
            assert release.wait(30)

        model.before_pass = hold
        await link.send(script.verify())
        await asyncio.to_thread(entered.wait)
        for _ in range(FLOOD_FACTOR * 3):
            await link.send(Script("target", "x", [1]).close())
        await submitted(service, 2 + FLOOD_FACTOR * 3)
        await link.send(Script("target", "x", [1]).close())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(link.stream)
        assert type(wire_errors.error_from_rpc(caught.value)) is TooBusy
        assert service.engine._num_submitted == 2 + FLOOD_FACTOR * 3
        async with linked(service) as other:
            again = Script("target", "again", list(PROMPT))
            opening = asyncio.create_task(other.call(again.open()))  # while the flood is unread
            await submitted(service, 3 + FLOOD_FACTOR * 3)
            model.before_pass = lambda: None
            release.set()
            assert reason(await opening) in ("", "TOO_BUSY")
            again = Script("target", "once more", list(PROMPT))
            await other.call(again.open())
            assert reason(await other.call(again.verify())) == ""


async def test_one_session_cannot_queue_without_bound() -> None:
    """One command at work and eight waiting; the tenth is told to come back."""
    model = PrefixDecoder(VOCAB)
    entered, release = threading.Event(), threading.Event()
    async with running("draft", model) as service, linked(service) as link:
        script = Script("draft", "s", list(PROMPT))
        await link.call(script.open())

        def hold() -> None:
            entered.set()
            assert release.wait(30)

        model.before_pass = hold
        await link.send(script.propose(1))
        await asyncio.to_thread(entered.wait)
        await link.send(*(script.propose(1) for _ in range(10)))
        await submitted(service, 12)
        model.before_pass = lambda: None
        release.set()
        answers = [await link.answer() for _ in range(11)]
    assert [reason(answer) for answer in answers].count("TOO_BUSY") == 1


async def test_draining_refuses_new_sessions_finishes_old_ones_and_says_so() -> None:
    """After drain: NOT_READY for opens, the running session ends normally, then it is over."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        script.committed((await link.call(script.verify())).verdict.tokens)
        drained = asyncio.wrap_future(service.engine.drain())
        service.links.announce_drain()
        late = Script("target", "late", list(PROMPT))
        assert reason(await link.call(late.open())) == "NOT_READY"
        assert link.frames[-1].load.draining
        assert reason(await link.call(script.verify(steps=3))) == ""
        assert not drained.done()
        await link.call(script.close())
        await drained
        service.links.end_all()
        assert await link.stream.read() is grpc.aio.EOF


async def test_every_frame_carries_the_load() -> None:
    """Sessions, pages and capacity ride on result frames."""
    setup = Setup(num_pages=32)
    async with running("target", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        await link.call(script.verify())
    load = link.frames[-1].load
    assert (load.num_sessions, load.total_pages) == (1, 32)
    assert load.free_pages == 32 - 2


async def test_a_failing_pass_fails_its_commands_alone() -> None:
    """An exception in a pass: INTERNAL for those in it; their sessions go on."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        script.committed((await link.call(script.verify())).verdict.tokens)

        def explode() -> None:
            raise RuntimeError("device lost")

        model.before_pass = explode
        assert reason(await link.call(script.verify(steps=2))) == "INTERNAL"
        model.before_pass = lambda: None
        answer = await link.call(script.verify(steps=2))
        assert answer.before.kv_len == len(script.tokens) - 1
        assert len(answer.verdict.tokens) == 2


async def test_a_bug_in_one_session_s_decision_fails_that_session_alone() -> None:
    """An unexpected exception while deciding: INTERNAL for its session, the others are answered."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        scripts = [Script("target", name, list(PROMPT)) for name in ("broken", "fine")]
        await link.send(*(script.open() for script in scripts))
        for _ in scripts:
            await link.answer()
        (broken,) = [s for s in service.engine._table if s.session_id == "broken"]

        class BrokenShaper:
            stop_ids = frozenset()
            is_greedy = False

            def rows(self, logits, prefix, candidates):
                raise ZeroDivisionError

        shaper, broken.shaper = broken.shaper, BrokenShaper()
        await link.send(*(script.verify() for script in scripts))
        answers = {}
        while len(answers) < 2:
            answer = await link.answer()
            answers[answer.session_id] = reason(answer)
        assert answers == {"broken": "INTERNAL", "fine": ""}
        broken.shaper = shaper
        scripts[0].known_len = 0
        assert reason(await link.call(scripts[0].verify())) == ""


async def test_a_model_that_cannot_run_stops_the_start() -> None:
    """A failing warm-up reaches the caller of start; nothing is served."""
    model = PrefixDecoder(VOCAB)

    def explode() -> None:
        raise RuntimeError("no such kernel")

    model.before_pass = explode
    with pytest.raises(RuntimeError, match="no such kernel"):
        async with running("target", model):
            pytest.fail("served all the same")


async def test_before_the_model_is_loaded_calls_are_not_ready() -> None:
    """GetInfo and Link answer NOT_READY with a retry delay until loading is done."""
    server = rpc.create_server(LIMITS)
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(ServiceState()), server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.create_channel(f"127.0.0.1:{port}", LIMITS) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        assert type(wire_errors.error_from_rpc(caught.value)) is NotReady
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Link(iter(())).read()
        assert type(wire_errors.error_from_rpc(caught.value)) is NotReady
    await server.stop(None)


def test_results_are_split_by_bytes_and_none_is_lost() -> None:
    """Runs stay within the limit unless one result alone exceeds it; order is kept."""
    results = [target_pb2.TargetResult(session_id="x" * size) for size in (10, 50, 10, 200, 10)]
    batches = list(split_by_bytes(results, 90))
    assert [len(batch) for batch in batches] == [3, 1, 1]
    assert [result for batch in batches for result in batch] == results
