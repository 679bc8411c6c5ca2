"""Plain decoding over real gRPC: answers in parts, and what stays when one of them is the last."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest

from specmesh.engine.runner import EngineOptions
from specmesh.errors import NumericFault
from target_service.verifier import Verifier
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import RESIDUAL, Script, Setup, linked, reason, running, sampling

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5]


async def parts_of(link: Any) -> list[Any]:
    """Results up to the one that ends an answer."""
    results = [await link.receive()]
    while results[-1].verdict.more:
        results.append(await link.receive())
    return results


async def undisturbed(num_tokens: int) -> list[int]:
    """The tokens of one session, one command a token."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        for _ in range(num_tokens):
            script.committed((await link.call(script.verify())).verdict.tokens)
    return script.tokens[len(PROMPT) :]


async def test_a_part_is_sent_at_every_pass_and_says_what_it_took() -> None:
    """One token, one pass and the boundaries from part to part; times add up to the command's."""
    now = [0]

    def clock() -> int:
        now[0] += 1000
        return now[0]

    async with (
        running("target", PrefixDecoder(VOCAB), Setup(clock_ns=clock)) as service,
        linked(service) as link,
    ):
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        await link.send(script.verify(steps=6))
        parts = await parts_of(link)
        counted = service.metrics.registry.get_sample_value(
            "specmesh_commands_total", {"side": "target", "command": "verify", "outcome": "ok"}
        )
        waited = service.metrics.registry.get_sample_value(
            "specmesh_command_queue_seconds_sum", {"side": "target"}
        )
    assert [part.verdict.offset for part in parts] == list(range(6))
    assert [part.verdict.more for part in parts] == [True] * 5 + [False]
    assert [len(part.verdict.emitted) for part in parts] == [1] * 6
    for index, part in enumerate(parts):
        assert part.timing.num_steps == 1
        assert part.timing.total_us >= part.timing.queue_us + part.timing.forward_us
        assert part.timing.batch_rows == (1 if index else len(PROMPT))
        assert part.after.confirmed_len == len(PROMPT) + 1 + index
    for part, following in pairwise(parts):
        assert following.before == part.after
    assert counted == 1
    assert waited == pytest.approx(sum(part.timing.queue_us for part in parts) * 1e-6)


async def test_a_long_command_takes_its_pages_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than pages are reserved for at once: all tokens come, and pages with them."""
    monkeypatch.setattr("target_service.verifier.STEPS_AHEAD", 12)
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), max_len=128)
        await link.call(script.open())
        await link.send(script.verify(steps=60))
        parts = await parts_of(link)
    allocated = [part.after.allocated_len for part in parts]
    assert sum(len(part.verdict.tokens) for part in parts) == 60
    assert allocated[0] < len(PROMPT) + 20 < len(PROMPT) + 59 <= allocated[-1]


@pytest.mark.parametrize("steps", [1, 8, 64])
async def test_seeded_tokens_do_not_depend_on_the_steps_of_a_command(steps: int) -> None:
    """Draws are keyed by position: cut into commands of any size, the text is one."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), max_len=128, rule=RESIDUAL)
        await link.call(script.open())
        while len(script.tokens) < len(PROMPT) + 24:
            script.committed((await link.call(script.verify(steps=steps))).verdict.tokens)
    assert script.tokens[len(PROMPT) :][:24] == await undisturbed(24)


async def test_a_part_has_left_before_the_next_pass_begins(driven_by: str) -> None:
    """On a polling loop: whether more is to be computed changes nothing in when a part leaves. An
    engine with a thread of its own goes on while the loop sends, so nothing is said of it here."""
    left: list[bool] = []
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        links = service.links._links
        service.decoder.before_pass = lambda: left.append(all(each.has_sent for each in links))
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        await link.send(script.verify(steps=12))
        await parts_of(link)
    assert len(left) == 12
    assert driven_by == "thread" or all(left)


async def test_a_stop_is_told_when_a_token_without_one_is_told() -> None:
    """Parts of one pass leave in one frame, whether a stop id ended the command or not."""
    stop = (await undisturbed(4))[3]
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        going = Script("target", "a", list(PROMPT))
        ending = Script("target", "b", list(PROMPT), params=sampling(stop_token_ids=[stop]))
        await link.send(going.open(), ending.open())
        await link.receive()
        await link.receive()
        link.frames.clear()
        await link.send(going.verify(steps=12), ending.verify(steps=12))
        await link.answer()
        await link.answer()
        script_frames = [
            {result.session_id: result.verdict for result in frame.results} for frame in link.frames
        ]
    shared = [frame for frame in script_frames if "b" in frame]
    assert not shared[-1]["b"].more, "the stop ends it"
    assert all(set(frame) == {"a", "b"} for frame in shared)
    assert all(frame["a"].tokens == frame["b"].tokens for frame in shared)


async def test_a_repeat_while_at_work_lets_the_parts_go_on() -> None:
    """The same command again from another link of the same coordinator: parts go there."""
    model = PrefixDecoder(VOCAB)
    gate, reached = threading.Event(), threading.Event()

    def wait() -> None:
        if len(model.calls) == 4:  # the first one warmed up
            reached.set()
            assert gate.wait(20)

    model.before_pass = wait
    async with (
        running("target", model) as service,
        linked(service, "one") as link,
        linked(service, "one") as other,
    ):
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        command = script.verify(steps=9)
        await link.send(command)
        first = [await link.receive() for _ in range(3)]
        await other.send(command)
        await other.send(Script("target", "t", [1]).open())  # read behind the repeat
        gate.set()
        rest: list[Any] = []
        while not rest or rest[-1].verdict.more or rest[-1].WhichOneof("result") == "opened":
            rest.append(await other.receive())
        parts = [*first, *(result for result in rest if result.WhichOneof("result") == "verdict")]
        offsets = [part.verdict.offset for part in parts]
        tokens = [token for part in parts for token in part.verdict.tokens]
    assert reached.is_set()
    assert offsets == sorted(offsets)
    assert offsets[-1] == 8
    assert tokens[: len(first)] == (await undisturbed(9))[: len(first)]


async def test_a_fault_after_parts_undoes_nothing_that_was_told() -> None:
    """NaN in a row in the middle: the error comes, the session stands at the last part and goes on
    from there."""
    model = PrefixDecoder(VOCAB)
    wanted = await undisturbed(8)
    decide = Verifier._decide

    def failing(self: Verifier, task: Any, logits: Any) -> Any:
        if len(task.session.ledger.tokens) == len(PROMPT) + 3 and not failed:
            failed.append(True)
            raise NumericFault("scripted")
        return decide(self, task, logits)

    failed: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "_decide", failing)
        async with running("target", model) as service, linked(service) as link:
            script = Script("target", "s", list(PROMPT))
            await link.call(script.open())
            command = script.verify(steps=8)
            await link.send(command)
            results = await parts_of(link)
            assert [part.verdict.offset for part in results[:-1]] == [0, 1, 2]
            assert reason(results[-1]) == "NUMERIC_FAULT"
            assert reason(await link.call(command)) == "PREFIX_MISMATCH", "it says where it stands"
            script.committed(wanted[:3])
            answer = await link.call(script.verify(steps=5))
            assert answer.before.confirmed_len == len(PROMPT) + 3
            assert list(answer.verdict.tokens) == wanted[3:]


async def test_a_failed_pass_after_parts_undoes_nothing_that_was_told() -> None:
    """The pass that fails writes K/V or not: what was told stays, and so does its K/V."""
    model = PrefixDecoder(VOCAB)
    wanted = await undisturbed(8)

    def fail() -> None:
        if len(model.calls) == 4:  # the first one warmed up
            model.before_pass = lambda: None
            raise RuntimeError("scripted")

    model.before_pass = fail
    async with running("target", model) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        await link.send(script.verify(steps=8))
        results = await parts_of(link)
        assert [list(part.verdict.tokens) for part in results[:-1]] == [[t] for t in wanted[:3]]
        assert reason(results[-1]) == "INTERNAL"
        script.committed(wanted[:3])
        model.calls.clear()
        answer = await link.call(script.verify(steps=5))
        assert list(answer.verdict.tokens) == wanted[3:]
        assert model.calls[0] == (1, 1), "nothing is computed again"


async def test_closing_while_parts_come_frees_everything() -> None:
    """Close in the middle of an answer: its parts end, the close is answered, no page is held."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), max_len=128)
        await link.call(script.open())
        await link.send(script.verify(steps=64))
        results = [await link.receive()]
        await link.send(script.close())
        while results[-1].WhichOneof("result") != "closed":
            results.append(await link.receive())
        offsets = [result.verdict.offset for result in results[:-1]]
        assert offsets == list(range(len(offsets)))
        assert service.pool.num_used == 0
        service.pool.check_integrity()


async def test_a_prompt_never_waits_for_the_steps_of_others() -> None:
    """A session that comes while another decodes 64 tokens joins the next pass."""
    options = EngineOptions(token_budget=32)
    async with (
        running("target", PrefixDecoder(VOCAB), Setup(options=options)) as service,
        linked(service) as link,
    ):
        long = Script("target", "long", list(PROMPT), max_len=128)
        await link.call(long.open())
        await link.send(long.verify(steps=64))
        await link.receive()
        short = Script("target", "short", [1, 2, 3])
        await link.send(short.open(), short.verify())
        answer = await link.answer()
        while answer.WhichOneof("result") != "verdict":
            answer = await link.answer()
        assert answer.session_id == "short"
        assert len(link.parts["long"]) < 63
