"""A full page pool: the newest session waits, is told so, and gives the same tokens in the end."""

from __future__ import annotations

import pytest

from specmesh.engine.runner import EngineOptions
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import (
    AT_COORDINATOR,
    COUPLED,
    Script,
    Setup,
    linked,
    reason,
    running,
    sampling,
)

VOCAB = 16


async def texts(num_pages: int, num_sessions: int, steps: int, per_command: int = 4):
    """Tokens of sessions that decode `steps` tokens each, per_command a command, all at once."""
    model = PrefixDecoder(VOCAB)
    setup = Setup(num_pages=num_pages, page_size=4, options=EngineOptions(token_budget=32))
    async with running("target", model, setup) as service, linked(service) as link:
        scripts = {
            f"s{i}": Script("target", f"s{i}", [i, 2, 3, 4, 5], max_len=32, params=sampling(seed=i))
            for i in range(num_sessions)
        }
        for script in scripts.values():
            await link.send(script.open(), script.verify())
        unfinished = set(scripts)
        deferred: dict[str, int] = {}
        while unfinished:
            result = await link.receive()
            kind = result.WhichOneof("result")
            assert kind != "error", result
            if kind == "deferred":
                deferred[result.session_id] = deferred.get(result.session_id, 0) + 1
            if kind != "verdict":
                continue
            script = scripts[result.session_id]
            assert result.timing.cached_tokens < result.before.confirmed_len
            script.committed(result.verdict.tokens)
            if result.verdict.more:
                continue
            if len(script.tokens) < 5 + steps:
                await link.send(script.verify(steps=per_command))
            else:
                unfinished.discard(result.session_id)
                await link.send(script.close())
            service.pool.check_integrity()
        while (await link.receive()).WhichOneof("result") != "closed":
            pass
        return {name: script.tokens for name, script in scripts.items()}, deferred, service


@pytest.mark.parametrize("per_command", [4, 20])
async def test_preempted_sessions_give_the_same_tokens_as_with_room(per_command: int) -> None:
    """With a pool for about two of five sessions: nobody fails, the oldest never waits."""
    roomy, none_deferred, _ = await texts(64, 5, 20, per_command)
    tight, deferred, service = await texts(14, 5, 20, per_command)
    assert {name: tokens[:25] for name, tokens in tight.items()} == {
        name: tokens[:25] for name, tokens in roomy.items()
    }
    assert not none_deferred
    assert deferred
    assert "s0" not in deferred
    counted = service.metrics.registry.get_sample_value(
        "specmesh_preemptions_total", {"side": "target"}
    )
    assert counted == service.engine._scheduler.num_preemptions > 0


@pytest.mark.parametrize("decide_at", [AT_COORDINATOR])
async def test_a_preempted_idle_draft_session_still_learns_the_outcome(decide_at) -> None:
    """K/V dropped between two rounds: num_accepted is taken, and the proposal is rebuilt."""
    model = PrefixDecoder(VOCAB)
    setup = Setup(num_pages=7, page_size=4)
    async with running("draft", model, setup) as service, linked(service) as link:
        old = Script("draft", "old", list(range(1, 11)), max_len=28, rule=COUPLED)
        new = Script("draft", "new", list(range(2, 8)), max_len=28, rule=COUPLED)
        await link.call(old.open())
        await link.call(old.propose(0))
        await link.call(new.open())
        first = await link.call(new.propose(4))
        kept = list(first.proposal.tokens[:2])
        old.tokens = [*old.tokens, *range(12)]  # takes 6 of the 7 pages
        answer = await link.call(old.propose(1))
        assert reason(answer) == ""
        (session,) = [s for s in service.engine._table if s.session_id == "new"]
        assert session.block_table == []
        assert session.ledger.kv_len == 0
        new.tokens = [*new.tokens, *kept, 9]
        await link.send(new.propose(3, num_accepted=2))
        assert (await link.receive()).WhichOneof("result") == "deferred"
        await link.send(old.close())
        answers = [await link.answer(), await link.answer()]
        (again,) = [a for a in answers if a.session_id == "new"]
    async with running("draft", model) as service, linked(service) as link:
        cold = Script("draft", "new", list(new.tokens), max_len=28, rule=COUPLED)
        await link.call(cold.open())
        expected = await link.call(cold.propose(3))
    assert list(again.proposal.tokens) == list(expected.proposal.tokens)
    assert again.after.confirmed_len == len(new.tokens)


async def test_a_closed_session_makes_room_for_the_one_that_waits() -> None:
    """A deferred command runs as soon as pages come free, and cancelling it leaves no trace."""
    setup = Setup(num_pages=8, page_size=4)
    async with running("target", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        big = Script("target", "big", list(range(16)) + [1] * 12, max_len=32)
        await link.call(big.open())
        big.committed((await link.call(big.verify())).verdict.tokens)
        for name in ("cancelled", "waiting"):
            script = Script("target", name, [1, 2, 3, 4, 5, 6], max_len=32)
            await link.send(script.open(), script.verify(steps=2))
            assert (await link.receive()).WhichOneof("result") == "opened"
            assert (await link.receive()).WhichOneof("result") == "deferred"
            if name == "cancelled":
                assert (await link.call(script.close())).WhichOneof("result") == "closed"
        await link.send(big.close())
        results = {}
        while len(results) < 2:
            result = await link.answer()
            results[result.session_id] = result
        assert len(results["waiting"].verdict.tokens) == 2
        service.pool.check_integrity()
