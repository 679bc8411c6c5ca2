"""Drafting ahead at a draft service: what comes after a proposal, and what is left of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from draft_service.outcomes import ranked
from protos.specmesh.v1 import draft_pb2
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import (
    AUTO,
    COUPLED,
    DENSE_F32,
    Script,
    Service,
    Setup,
    linked,
    reason,
    running,
    sampling,
)

PROMPT = [3, 1, 4, 1, 5]
K, NUM_AHEAD = 3, 12
ROOMY = Setup(num_pages=256)


class Draft(Script):
    """A session that asks for candidates and for what may follow them."""

    def ask(self, num_accepted: int = 0, **changes: Any) -> Any:
        """Propose K candidates and NUM_AHEAD continuations."""
        command = self.propose(K, num_accepted)
        command.propose.num_ahead = changes.pop("num_ahead", NUM_AHEAD)
        return command


def script(name: str = "a", tokens: list[int] | None = None, **changes: Any) -> Draft:
    """A session of the draft; rows come sparse."""
    fields = {"policy": AUTO, **changes}
    return Draft("draft", name, list(tokens or PROMPT), **fields)


async def proposed(peer: Any, session: Draft, **changes: Any) -> draft_pb2.Proposal:
    """Open the session and take its first proposal."""
    await peer.send(session.open(), session.ask(**changes))
    assert (await peer.answer()).WhichOneof("result") == "opened"
    result = await peer.answer()
    assert result.WhichOneof("result") == "proposal", result
    return result.proposal


async def quiet(service: Service, num_pages: int) -> None:
    """Nothing but num_pages pages of sessions is held."""
    service.pool.check_integrity()
    assert service.pool.num_used == num_pages


async def test_what_is_drafted_ahead_is_what_would_be_proposed() -> None:
    """Every continuation, of outcomes that keep none, some and all candidates, is to the bit what
    the draft answers when that outcome is confirmed; on pages of 4, so that forks copy some."""
    decoder = PrefixDecoder()
    async with running("draft", decoder, ROOMY) as service, linked(service) as peer:
        first = script()
        proposal = await proposed(peer, first)
        result = await peer.answer()
        assert result.WhichOneof("result") == "ahead"
        assert (result.session_id, result.epoch, result.round) == ("a", 1, first.round)
        kept = [each.num_accepted for each in result.ahead.continuations]
        assert kept == [number for number, _ in ranked(K, NUM_AHEAD)]
        assert set(kept) == {*range(K + 1)}
        for index, each in enumerate(result.ahead.continuations):
            path = [*proposal.tokens[: each.num_accepted], each.closing_token]
            cold = script(f"cold {index}", [*PROMPT, *path])
            assert await proposed(peer, cold, num_ahead=0) == each.proposal, path
            await peer.call(cold.close())
        # The session itself goes on from any of them as if nothing had been drafted ahead.
        chosen = result.ahead.continuations[-1]
        first.tokens += [*proposal.tokens[: chosen.num_accepted], chosen.closing_token]
        answer = await peer.call(first.ask(chosen.num_accepted))
        assert answer.proposal == chosen.proposal
        assert (await peer.answer()).WhichOneof("result") == "ahead"
        await peer.call(first.close())
        await quiet(service, 0)


@pytest.mark.parametrize(
    ("changes", "num_ahead"),
    [
        ({"rule": COUPLED}, NUM_AHEAD),
        ({"params": sampling(temperature=0.0)}, NUM_AHEAD),
        ({"policy": DENSE_F32}, NUM_AHEAD),
        ({}, 0),
    ],
    ids=["coupled", "greedy", "dense rows", "not asked for"],
)
async def test_nothing_is_drafted_ahead(changes: dict[str, Any], num_ahead: int) -> None:
    """Where no sparse rows tell what is likely, or nobody wants it, proposals come alone."""
    async with running("draft", PrefixDecoder()) as service, linked(service) as peer:
        session = script(**changes)
        await proposed(peer, session, num_ahead=num_ahead)
        closed = await peer.call(session.close())
        assert closed.WhichOneof("result") == "closed"


async def test_a_command_overtakes_what_is_drafted_ahead() -> None:
    """A command that comes between two passes is served next, and nothing is told of the rest."""
    decoder = PrefixDecoder()
    async with running("draft", decoder, ROOMY) as service, linked(service) as peer:
        session = script()
        arrived, entered = threading.Event(), threading.Event()

        def hold() -> None:
            if len(decoder.calls) == K + 1:  # the first pass of the forks
                entered.set()
                assert arrived.wait(10)

        decoder.calls.clear()  # of the warm-up
        decoder.before_pass = hold
        proposal = await proposed(peer, session)
        assert entered.wait(10)
        session.tokens += proposal.tokens[:1]
        await peer.send(session.ask(0))
        while service.engine.num_waiting == 0:
            await peer.send()  # an empty frame: until the command is in
        arrived.set()
        answer = await peer.answer()
        assert answer.WhichOneof("result") == "proposal"
        assert answer.round == session.round
        assert (await peer.answer()).WhichOneof("result") == "ahead"
        await peer.call(session.close())
        await quiet(service, 0)


async def test_forks_take_no_pages_from_sessions() -> None:
    """With few pages free as many continuations come as fit, the likeliest; nobody is preempted."""
    async with (
        running("draft", PrefixDecoder(), Setup(num_pages=6)) as service,
        linked(service) as peer,
    ):
        session = script(max_len=24)
        await proposed(peer, session)
        result = await peer.answer()
        assert 0 < len(result.ahead.continuations) < NUM_AHEAD
        kept = [each.num_accepted for each in result.ahead.continuations]
        assert kept == [number for number, _ in ranked(K, NUM_AHEAD)][: len(kept)]
        assert service.engine._scheduler.num_preemptions == 0
        await peer.call(session.close())
        await quiet(service, 0)


async def test_forks_end_where_the_session_does() -> None:
    """Outcomes behind which no whole round fits are left out."""
    async with running("draft", PrefixDecoder(), ROOMY) as service, linked(service) as peer:
        session = script(max_len=len(PROMPT) + K + 2)
        await proposed(peer, session)
        result = await peer.answer()
        assert {each.num_accepted for each in result.ahead.continuations} == {0, 1}
        await peer.call(session.close())
        await quiet(service, 0)


async def continuations(decoder: PrefixDecoder) -> tuple[list[int], list[int]]:
    """Candidates of the first proposal, and the closing tokens of what follows it."""
    async with running("draft", decoder, ROOMY) as service, linked(service) as peer:
        session = script()
        proposal = await proposed(peer, session)
        ahead = (await peer.answer()).ahead
        await peer.call(session.close())
        await quiet(service, 0)
    return list(proposal.tokens), [each.closing_token for each in ahead.continuations]


async def test_a_fork_that_fails_is_left_out() -> None:
    """NaN behind a closing token costs the continuations that feed it, and no page keeps it."""
    drafted, closing = await continuations(PrefixDecoder())
    spoiled = next(token for token in closing if token not in drafted)
    _, left = await continuations(PrefixDecoder(nan_token=spoiled))
    assert spoiled not in left
    assert set(left) < set(closing)
    assert left


async def test_a_row_that_nobody_asked_for_costs_no_proposal() -> None:
    """NaN behind the last candidate: the candidates come all the same, without what may follow
    all of them, and the session goes on from K/V that holds none."""
    drafted, _ = await continuations(PrefixDecoder())
    decoder = PrefixDecoder(nan_token=drafted[-1])
    async with running("draft", decoder, ROOMY) as service, linked(service) as peer:
        session = script()
        proposal = await proposed(peer, session)
        assert list(proposal.tokens) == drafted
        session.tokens += [drafted[0], (drafted[1] + 1) % 16]
        result = await peer.call(session.ask(1))
        while result.WhichOneof("result") == "ahead":
            assert K not in {each.num_accepted for each in result.ahead.continuations}
            result = await peer.answer()
        assert result.WhichOneof("result") == "proposal"
        await peer.call(session.close())
        await quiet(service, 0)


async def test_commands_that_wait_are_served_before_anything_is_forked() -> None:
    """A command that is there when the work begins is not kept waiting for a pass of it."""
    decoder = PrefixDecoder()
    async with running("draft", decoder, ROOMY) as service, linked(service) as peer:
        arrived, entered = threading.Event(), threading.Event()
        outlooks = service.engine._role.outlooks

        def held(task: Any, answer: Any) -> Any:
            entered.set()
            assert arrived.wait(10)
            service.engine._role.outlooks = outlooks
            return outlooks(task, answer)

        service.engine._role.outlooks = held
        session = script()
        proposal = await proposed(peer, session)
        assert entered.wait(10)
        num_passes = len(decoder.calls)
        session.tokens += proposal.tokens[:1]
        await peer.send(session.ask(0))
        while service.engine.num_waiting == 0:
            await peer.send()
        arrived.set()
        assert (await peer.answer()).round == session.round
        assert decoder.calls[num_passes] == (1, 1)  # one sequence, and no fork before it
        assert (await peer.answer()).WhichOneof("result") == "ahead"
        await peer.call(session.close())
        await quiet(service, 0)


async def test_wishes_of_closed_sessions_are_forgotten() -> None:
    """Under load that never lets the device rest, what was wished for does not pile up."""
    async with running("draft", PrefixDecoder(), ROOMY) as service, linked(service) as peer:
        engine = service.engine
        engine._can_run = lambda *, after: after and engine._scheduler.has_work  # never idle
        engine._work_ahead = lambda: iter(())
        for index in range(20):
            session = script(f"s{index}")
            await proposed(peer, session)
            await peer.call(session.close())
        assert len(engine._ahead._wishes) <= 2


async def test_too_many_continuations_are_refused() -> None:
    """The bound is the protocol's, and the error names the field."""
    async with running("draft", PrefixDecoder()) as service, linked(service) as peer:
        session = script()
        await peer.send(session.open(), session.ask(num_ahead=65))
        assert (await peer.answer()).WhichOneof("result") == "opened"
        result = await peer.answer()
        assert reason(result) == "INVALID_REQUEST"
        assert result.error.field == "num_ahead"
