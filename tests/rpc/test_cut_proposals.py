"""Drafts whose rows cannot be used: the proposal ends before the first of them, and says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from protos.specmesh.v1 import draft_pb2
from specmesh import wire
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import AUTO, COUPLED, Script, Service, Setup, linked, reason, running, sampling

PROMPT = [3, 1, 4, 1, 5]
K, NUM_AHEAD = 4, 12
WAYS: dict[str, dict[str, Any]] = {
    "residual": {"policy": AUTO},
    "dense rows": {},
    "coupled": {"rule": COUPLED},
    "greedy": {"params": sampling(temperature=0.0)},
}


def script(name: str = "a", tokens: list[int] | None = None, **changes: Any) -> Script:
    """A session of the draft."""
    return Script("draft", name, list(tokens or PROMPT), **changes)


async def proposed(peer: Any, session: Script, num_ahead: int = 0) -> Any:
    """Open the session and take the answer to its first Propose."""
    command = session.propose(K)
    command.propose.num_ahead = num_ahead
    await peer.send(session.open(), command)
    assert (await peer.answer()).WhichOneof("result") == "opened"
    return await peer.answer()


async def whole(**changes: Any) -> draft_pb2.Proposal:
    """What is proposed where every row can be used."""
    async with running("draft", PrefixDecoder()) as service, linked(service) as peer:
        return (await proposed(peer, script(**changes))).proposal


def holds(service: Service, token: int) -> bool:
    """Whether any page holds K/V of a token."""
    return bool((service.engine._executor._device.cache.slots == token).any())


def answered(service: Service, outcome: str) -> float:
    """How many proposals ended so."""
    labels = {"side": "draft", "command": "propose", "outcome": outcome}
    return service.metrics.registry.get_sample_value("specmesh_commands_total", labels) or 0.0


@pytest.mark.parametrize("way", WAYS)
async def test_a_proposal_ends_before_a_row_that_holds_no_law(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN behind a candidate: those up to it come with their rows, after as many passes as ever; it
    is logged and counted, no page keeps anything of it, and the session goes on."""
    fine = await whole(**WAYS[way])
    bad = fine.tokens[1]
    count = list(fine.tokens).index(bad) + 1
    assert bad not in PROMPT
    decoder = PrefixDecoder(nan_token=bad)
    async with running("draft", decoder) as service, linked(service) as peer:
        session = script(**WAYS[way])
        decoder.calls.clear()
        result = await proposed(peer, session)
        assert len(decoder.calls) == K
        assert result.proposal.is_cut
        assert result.proposal.tokens == fine.tokens[:count]
        assert result.proposal.distributions == fine.distributions[:count]
        assert result.proposal.dropped_mass == fine.dropped_mass[:count]
        assert (result.after.confirmed_len, result.after.kv_len) == (len(PROMPT), 0)
        assert not holds(service, bad)
        assert answered(service, "NUMERIC_FAULT") == 1
        assert [r.reason for r in caplog.records if hasattr(r, "reason")] == ["NUMERIC_FAULT"]
        # The candidate was rejected: the next round is that of a session that never drew it.
        session.tokens.append((bad + 1) % 16)
        path = list(session.tokens)
        again = await peer.call(session.propose(1))
        async with running("draft", PrefixDecoder()) as sound, linked(sound) as other:
            cold = script(tokens=path, prompt_len=len(PROMPT), **WAYS[way])
            await other.call(cold.open())
            assert (await other.call(cold.propose(1))).proposal == again.proposal
        # It was kept: the first row depends on nothing drawn, and the proposal fails.
        session.tokens.append(bad)
        assert reason(await peer.call(session.propose(K, 0))) == "NUMERIC_FAULT"
        await peer.call(session.close())
        service.pool.check_integrity()
        assert service.pool.num_used == 0


async def test_others_of_the_pass_are_whole() -> None:
    """Two sessions share passes: one is cut, the other has all its candidates."""
    bad = (await whole()).tokens[0]
    decoder = PrefixDecoder(nan_token=bad)
    other = script("b", [7, 7, 2], params=sampling(seed=11))
    async with running("draft", PrefixDecoder()) as service, linked(service) as peer:
        wanted = (await proposed(peer, other)).proposal
    assert bad not in wanted.tokens
    async with running("draft", decoder) as service, linked(service) as peer:
        first, second = script("a"), script("b", [7, 7, 2], params=sampling(seed=11))
        await peer.call(first.open())
        await peer.call(second.open())
        await peer.send(first.propose(K), second.propose(K))
        results = {result.session_id: result for result in [await peer.answer() for _ in range(2)]}
    assert results["a"].proposal.is_cut
    assert results["b"].proposal == wanted
    assert (2, 2) in decoder.calls


async def test_a_session_closed_between_its_passes_leaves_no_nan_behind() -> None:
    """Passes go on behind a row that holds no law: pages given up before they end are zeroed."""
    bad = (await whole()).tokens[0]
    decoder = PrefixDecoder(nan_token=bad)
    async with running("draft", decoder) as service, linked(service) as peer:
        session = script()
        await peer.call(session.open())
        entered, arrived = threading.Event(), threading.Event()

        def hold() -> None:
            if decoder.calls[-1:] == [(1, 1)]:  # the candidate was fed, and its row is known
                entered.set()
                assert arrived.wait(10)

        decoder.calls.clear()
        decoder.before_pass = hold
        await peer.send(session.propose(K))
        while not entered.is_set():
            await peer.send()
        assert holds(service, bad)
        await peer.send(session.close())
        while service.engine._inbox.empty() and not service.engine._held:
            await peer.send()
        decoder.before_pass = lambda: None
        arrived.set()
        assert (await peer.answer()).WhichOneof("result") == "closed"
        assert not holds(service, bad)
        assert service.pool.num_used == 0


async def test_a_cut_proposal_leaves_the_prefix_where_a_whole_one_does() -> None:
    """The same base asked for again feeds as many tokens, whatever followed what was drawn."""
    prompt = [(3 * index + 1) % 16 for index in range(41)]
    fed = []
    for nan_token in (None, (await whole(tokens=prompt)).tokens[0]):
        decoder = PrefixDecoder()
        rows = decoder.logits

        def logits(prefix: Sequence[int], bad: int | None = nan_token, rows: Any = rows) -> Tensor:
            is_behind = len(prefix) == len(prompt) + 1 and prefix[-1] == bad
            return torch.full_like(rows(prefix), torch.nan) if is_behind else rows(prefix)

        decoder.logits = logits
        async with running("draft", decoder) as service, linked(service) as peer:
            session = script(tokens=prompt)
            assert (await proposed(peer, session)).proposal.is_cut is (nan_token is not None)
            await peer.call(session.close())
            again = await proposed(peer, script("again", prompt))
            fed.append(again.timing.cached_tokens)
    assert fed[0] == fed[1] > 0


async def test_forks_given_up_between_their_passes_leave_no_nan_behind() -> None:
    """A command comes while forks go on behind a row that holds no law."""
    setup = Setup(num_pages=256)
    async with running("draft", PrefixDecoder(), setup) as service, linked(service) as peer:
        drafted = (await proposed(peer, script(policy=AUTO), NUM_AHEAD)).proposal.tokens
        firsts = [each.proposal.tokens[0] for each in (await peer.answer()).ahead.continuations]
    bad = next(token for token in firsts if token not in (*drafted, *PROMPT))
    decoder = PrefixDecoder(nan_token=bad)
    async with running("draft", decoder, setup) as service, linked(service) as peer:
        session = script(policy=AUTO)
        entered, arrived = threading.Event(), threading.Event()

        def hold() -> None:
            if len(decoder.calls) == K + 3 and not entered.is_set():  # the forks' third pass
                entered.set()
                assert arrived.wait(10)

        decoder.calls.clear()
        decoder.before_pass = hold
        proposal = (await proposed(peer, session, NUM_AHEAD)).proposal
        assert not proposal.is_cut
        while not entered.is_set():
            await peer.send()
        assert holds(service, bad)
        session.tokens += [proposal.tokens[0], (proposal.tokens[1] + 1) % 16]
        await peer.send(session.propose(1, 1))
        while service.engine.num_waiting == 0:
            await peer.send()
        arrived.set()
        assert (await peer.answer()).WhichOneof("result") == "proposal"
        await peer.call(session.close())
        assert service.pool.num_used == 0
        assert not holds(service, bad)


@pytest.mark.parametrize("num_passes", range(K))
async def test_what_was_drawn_before_a_pass_failed_is_proposed(num_passes: int) -> None:
    """A device may fail on the candidate that it is fed; in the first pass nothing is drawn."""
    fine = await whole()
    decoder = PrefixDecoder()

    def fail() -> None:
        if len(decoder.calls) == num_passes:
            decoder.before_pass = lambda: None
            raise RuntimeError("the device failed")

    async with running("draft", decoder) as service, linked(service) as peer:
        decoder.calls.clear()
        decoder.before_pass = fail
        session = script()
        result = await proposed(peer, session)
        assert answered(service, "INTERNAL") == 1
        if num_passes == 0:
            assert reason(result) == "INTERNAL"
            return
        assert result.proposal.is_cut
        assert result.proposal.tokens == fine.tokens[:num_passes]
        session.tokens += [*fine.tokens[:num_passes], 9]
        again = await peer.call(session.propose(2, num_passes))
        cold = script("cold", session.tokens, prompt_len=len(PROMPT))
        await peer.call(cold.open())
        assert (await peer.call(cold.propose(2))).proposal == again.proposal


async def test_continuations_end_where_their_proposals_would() -> None:
    """NaN behind a candidate that was drafted ahead: to the bit what the draft answers when that
    outcome is confirmed, cut as well, and no page keeps anything of it."""
    setup = Setup(num_pages=256)
    async with running("draft", PrefixDecoder(), setup) as service, linked(service) as peer:
        drafted = (await proposed(peer, script(policy=AUTO), NUM_AHEAD)).proposal.tokens
        continuations = (await peer.answer()).ahead.continuations
    seconds = [each.proposal.tokens[1] for each in continuations]
    bad = next(token for token in seconds if token not in (*drafted, *PROMPT))
    decoder, num_cut = PrefixDecoder(nan_token=bad), 0
    async with running("draft", decoder, setup) as service, linked(service) as peer:
        session = script(policy=AUTO)
        proposal = (await proposed(peer, session, NUM_AHEAD)).proposal
        assert not proposal.is_cut
        ahead = (await peer.answer()).ahead
        assert not holds(service, bad)
        for index, each in enumerate(ahead.continuations):
            path = [*proposal.tokens[: each.num_accepted], each.closing_token]
            cold = script(f"cold {index}", [*PROMPT, *path], policy=AUTO)
            assert (await proposed(peer, cold)).proposal == each.proposal, path
            num_cut += each.proposal.is_cut
            await peer.call(cold.close())
    assert 0 < num_cut < len(ahead.continuations)


@pytest.mark.parametrize("room", [0, 1, 5])
async def test_how_many_continuations_fit_follows_from_no_row(room: int) -> None:
    """As many as fit if every row held all that one may hold, whatever these hold."""
    row_bytes = 8 * wire.MAX_SPARSE_IDS + wire.ROW_OVERHEAD
    setup = Setup(num_pages=256, max_message_bytes=wire.REST_BYTES + (room * K + 1) * row_bytes)
    async with running("draft", PrefixDecoder(), setup) as service, linked(service) as peer:
        session = script(policy=AUTO)
        await proposed(peer, session, NUM_AHEAD)
        if room:
            assert len((await peer.answer()).ahead.continuations) == room
        assert (await peer.call(session.close())).WhichOneof("result") == "closed"
