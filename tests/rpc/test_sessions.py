"""Sessions through real gRPC: repeats, conflicts, resync, reuse, ends; failures change nothing."""

from __future__ import annotations

import asyncio

import pytest
import torch

from protos.specmesh.v1 import session_pb2
from specmesh import wire, wire_errors
from specmesh.engine.runner import EngineOptions
from specmesh.errors import PrefixMismatch
from specmesh.shaping import TokenShaper
from tests.rpc.fake_model import EMPTY, PrefixDecoder
from tests.rpc.peers import (
    AT_COORDINATOR,
    AT_TARGET,
    COUPLED,
    VOCAB_HASH,
    Script,
    Setup,
    digest_of,
    linked,
    reason,
    running,
    sampling,
)

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


async def opened(link, script: Script):
    """Open, and at the target take the first token."""
    await link.call(script.open())
    if script.side == "target":
        script.committed((await link.call(script.verify())).verdict.tokens)


async def settled(service) -> None:
    """Wait until the engine has worked off everything that was handed in before."""
    done = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    service.engine._inbox.put(lambda: loop.call_soon_threadsafe(done.set_result, None))
    await done


def assert_cold_rows(model, script: Script, answer, candidates) -> None:
    """The answer's rows are those of one cold pass over the script's prefix and the candidates."""
    assert reason(answer) == ""
    rows = answer.verdict.distributions
    assert len(rows) == len(candidates) + 1
    prompt_len = script.prompt_len or len(PROMPT)
    shaper = TokenShaper(script.params, VOCAB, prompt_len)
    for index, message in enumerate(rows):
        seen = [*script.tokens, *candidates[:index]]
        expected = shaper.row(model.logits(seen), seen)
        assert torch.equal(wire.decode(message, VOCAB).dense(), expected)


async def test_a_repeat_gets_the_stored_answer_without_work() -> None:
    """The same (epoch, round) with the same content: the same result, no pass, no change. Parts
    come joined, with where the last of them began and what it took."""
    for side in ("target", "draft"):
        model = PrefixDecoder(VOCAB)
        async with running(side, model) as service, linked(service) as link:
            script = Script(side, "s", list(PROMPT))
            await opened(link, script)
            command = script.propose(3) if side == "draft" else script.verify(steps=3)
            first = await link.call(command)
            num_passes = len(model.calls)
            again = await link.call(command)
            kind = "proposal" if side == "draft" else "verdict"
            assert getattr(again, kind) == getattr(first, kind)
            assert (again.after, again.round) == (first.after, first.round)
            assert len(model.calls) == num_passes


async def test_other_content_under_the_same_round_is_a_conflict() -> None:
    """ROUND_CONFLICT for the last round with other content, STALE_ROUND for older ones."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await opened(link, script)
        old = script.verify(steps=2)
        script.committed((await link.call(old)).verdict.tokens)
        last = script.verify(steps=2)
        answer = await link.call(last)
        last.verify.num_steps = 3
        assert reason(await link.call(last)) == "ROUND_CONFLICT"
        assert reason(await link.call(old)) == "STALE_ROUND"
        script.committed(answer.verdict.tokens)
        assert reason(await link.call(script.verify())) == ""


async def test_a_repeat_while_the_original_waits_is_answered_once() -> None:
    """A command sent twice in one frame, before any answer, runs once and is answered once."""
    model = PrefixDecoder(VOCAB)
    async with running("draft", model) as service, linked(service) as link:
        script = Script("draft", "s", list(PROMPT))
        await opened(link, script)
        twice = script.propose(4)
        script.tokens = [*script.tokens, 7]
        after = script.propose(2)
        await link.send(twice, twice, after)
        first, second = await link.answer(), await link.answer()
    assert (first.round, second.round) == (twice.round, after.round)
    assert len(first.proposal.tokens) == 4


async def test_epochs_supersede_and_old_ones_are_stale() -> None:
    """A higher epoch's Open replaces the session; commands and closes of the lower are refused."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        old = Script("target", "s", list(PROMPT))
        await opened(link, old)
        new = Script("target", "s", list(PROMPT), epoch=2)
        assert reason(await link.call(new.verify())) == "SESSION_NOT_FOUND"
        new.known_len = 0
        await opened(link, new)
        assert reason(await link.call(old.verify())) == "STALE_ROUND"
        assert reason(await link.call(old.open())) == "STALE_ROUND"
        assert reason(await link.call(old.close())) == "STALE_ROUND"
        assert reason(await link.call(new.verify())) == ""
        assert len(service.engine._table) == 1


async def test_open_repeats_harmlessly_until_the_session_is_used() -> None:
    """The same Open again: opened. Other content, or after work: SESSION_EXISTS."""
    async with running("draft", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("draft", "s", list(PROMPT))
        for _ in range(2):
            assert (await link.call(script.open())).WhichOneof("result") == "opened"
        assert reason(await link.call(script.open(max_len=60))) == "SESSION_EXISTS"
        await link.call(script.propose(1))
        assert reason(await link.call(script.open())) == "SESSION_EXISTS"


async def test_a_mismatch_changes_nothing_and_tells_how_to_resync() -> None:
    """PREFIX_MISMATCH carries length and page digests; a resync from the last equal page works."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model, Setup(page_size=4)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), rule=COUPLED, max_len=64)
        await opened(link, script)
        served = list(script.tokens)
        truth = [*PROMPT[:6], 11, 12, 13, 14]  # differs from index 6 on: one page of 4 is common
        script.tokens, script.known_len = truth, len(served)
        mismatch = await link.call(script.verify([1, 2]))
        error = wire_errors.error_from_message(mismatch.error)
        assert type(error) is PrefixMismatch
        assert error.confirmed_len == len(served)
        assert error.page_digests == (
            (4, digest_of(served[:4])),
            (8, digest_of(served[:8])),
            (10, digest_of(served)),
        )
        common = max(end for end, digest in error.page_digests if digest == digest_of(truth[:end]))
        assert common == 4
        resync = script.verify([1, 2], append_from=common, resync=True, decide_at=AT_COORDINATOR)
        answer = await link.call(resync)
        assert answer.before.confirmed_len == len(truth)
        assert answer.before.kv_len == common
        assert_cold_rows(model, script, answer, [1, 2])


async def test_a_failed_command_is_undone_whole() -> None:
    """NaN in a judged row: NUMERIC_FAULT, ledger as before, the same session then goes on right."""
    model = PrefixDecoder(VOCAB, nan_token=13)
    async with running("target", model) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), rule=COUPLED)
        await opened(link, script)
        (session,) = service.engine._table
        before = (list(session.ledger.tokens), session.ledger.num_pending)
        known = script.known_len
        script.tokens = [*script.tokens, 13]
        pages = list(session.block_table)
        assert reason(await link.call(script.verify([1]))) == "NUMERIC_FAULT"
        # What may hold NaN is wiped before anyone can read it again.
        assert session.block_table == []
        assert (service.engine._executor._device.cache.slots[pages[-1]] == EMPTY).all()
        assert (session.ledger.tokens, session.ledger.num_pending) == before
        script.tokens, script.known_len = script.tokens[:-1], known
        answer = await link.call(script.verify([1, 2], decide_at=AT_COORDINATOR))
        assert_cold_rows(model, script, answer, [1, 2])
        service.pool.check_integrity()


async def test_nan_counts_in_judged_rows_only() -> None:
    """A faulty row past the first rejection fails nobody, and nobody else in the batch suffers."""
    model = PrefixDecoder(VOCAB, nan_token=13)
    async with running("target", model) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), rule=COUPLED)
        never_13 = sampling(logit_bias=[session_pb2.LogitBias(token_id=13, bias=-100.0)])
        other = Script("target", "other", [1, 2, 3], params=never_13)
        await opened(link, script)
        await opened(link, other)
        probe = await link.call(script.verify(steps=1))
        (winner,) = probe.verdict.tokens
        script.committed([winner])
        rejected = Script("target", "r", list(script.tokens[:-1]), rule=COUPLED)
        await link.call(rejected.open())
        wrong = (winner + 1) % VOCAB if (winner + 1) % VOCAB != 13 else (winner + 2) % VOCAB
        fine = await link.call(rejected.verify([wrong, 13, 1]))
        assert fine.verdict.num_accepted == 0
        assert list(fine.verdict.tokens) == [winner]
        faulty = Script("target", "f", [*PROMPT, 13], rule=COUPLED)
        await link.call(faulty.open())
        await link.send(faulty.verify(), other.verify(steps=4))
        answers = {}
        while len(answers) < 2:
            answer = await link.answer()
            answers[answer.session_id] = answer
        assert reason(answers["f"]) == "NUMERIC_FAULT"
        assert len(answers["other"].verdict.tokens) == 4
        rows = await link.call(script.verify([13, 1], decide_at=AT_COORDINATOR))
        encodings = [row.encoding for row in rows.verdict.distributions]
        assert encodings[1] == session_pb2.ENCODING_UNSPECIFIED  # told, for whoever judges it
        assert encodings[0] != session_pb2.ENCODING_UNSPECIFIED


@pytest.mark.parametrize("decide_at", [AT_TARGET, AT_COORDINATOR])
async def test_kv_of_a_faulty_candidate_is_wiped(decide_at) -> None:
    """A rejected candidate with NaN logits left NaN in K/V past the boundary. Masking does not
    silence it (0 * NaN), and a longer batch mate makes the pass read there: it is wiped."""
    model = PrefixDecoder(VOCAB, nan_token=13)
    async with running("target", model) as service, linked(service) as link:
        probe = Script("target", "probe", list(PROMPT), rule=COUPLED)
        await opened(link, probe)
        winner = probe.tokens[-1]
        script = Script("target", "s", list(PROMPT), rule=COUPLED)
        await link.call(script.open())
        wrong = (winner + 1) % 13
        answer = await link.call(script.verify([wrong, 13, 1], decide_at=decide_at))
        assert reason(answer) == ""
        session = next(s for s in service.engine._table if s.session_id == "s")
        assert session.block_table == []
        assert (service.engine._executor._device.cache.slots != 13).all()
        script.committed([winner])
        if decide_at == AT_COORDINATOR:
            script.known_len -= 1
        again = await link.call(script.verify([2, 3], decide_at=AT_COORDINATOR))
        assert_cold_rows(model, script, again, [2, 3])
        service.pool.check_integrity()


async def test_prefixes_are_reused_and_shared_pages_never_written() -> None:
    """A second session finds the first one's confirmed pages; neither disturbs the other."""
    model = PrefixDecoder(VOCAB)
    prompt = [word % VOCAB for word in range(3, 24)]
    async with running("target", model, Setup(page_size=4)) as service, linked(service) as link:
        shared = {"max_len": 64, "rule": COUPLED, "prompt_len": len(prompt)}
        first = Script("target", "a", list(prompt), **shared)
        await opened(link, first)
        second = Script("target", "b", list(prompt), **shared)
        await link.call(second.open())
        model.calls.clear()
        answer = await link.call(second.verify())
        assert answer.timing.cached_tokens == 20
        assert model.calls == [(1, 1)]
        second.committed(answer.verdict.tokens)
        for script in (first, second, first, second):
            rows = await link.call(script.verify([2, 3, 4, 5, 6], decide_at=AT_COORDINATOR))
            assert_cold_rows(model, script, rows, [2, 3, 4, 5, 6])
        # A resync truncates the second into a shared page: copied, not overwritten.
        second.tokens = [*prompt[:10], 1, 1, 1, 1]
        resync = second.verify([7], append_from=10, resync=True, decide_at=AT_COORDINATOR)
        answer = await link.call(resync)
        assert answer.before.kv_len == 10
        assert_cold_rows(model, second, answer, [7])
        third = Script("target", "c", list(prompt), max_len=64)
        await link.call(third.open())
        answer = await link.call(third.verify(decide_at=AT_COORDINATOR))
        assert answer.timing.cached_tokens == 20
        row = wire.decode(answer.verdict.distributions[0], VOCAB).dense()
        shaper = TokenShaper(third.params, VOCAB, len(prompt))
        assert torch.equal(row, shaper.row(model.logits(prompt), prompt))
        service.pool.check_integrity()


async def test_candidates_are_never_published() -> None:
    """Of four confirmed and seven pending tokens a later equal prompt finds the first four."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model, Setup(page_size=4)) as service, linked(service) as link:
        script = Script("target", "a", [1, 2, 3], rule=COUPLED)
        await opened(link, script)
        await link.call(script.verify([5, 5, 5, 5, 5, 5, 5], decide_at=AT_COORDINATOR))
        other = Script("target", "b", [*script.tokens, 5, 5, 5, 5, 5], rule=COUPLED)
        await link.call(other.open())
        answer = await link.call(other.verify())
        assert answer.timing.cached_tokens == 4


async def test_pages_are_free_after_every_kind_of_end() -> None:
    """Close, close during work, link loss, cancellation: the pool ends up with no used page."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model, Setup(num_pages=256)) as service:
        async with linked(service) as link:
            scripts = [Script("target", f"s{i}", [i, *PROMPT], max_len=64) for i in range(4)]
            for script in scripts:
                await opened(link, script)
            assert service.pool.num_used > 0
            await link.call(scripts[0].close())
            assert (await link.call(scripts[0].close())).WhichOneof("result") == "closed"
            await link.send(scripts[1].verify(steps=40), scripts[1].close())
            closed = await link.answer()
            while closed.WhichOneof("result") != "closed":
                closed = await link.answer()
            await link.send(scripts[2].verify(steps=40))  # the link is lost while this runs
        while len(service.engine._table):
            await settled(service)
        assert service.pool.num_used == 0
        service.pool.check_integrity()
        async with linked(service) as link:  # and the service goes on
            script = Script("target", "s2", list(PROMPT))
            await opened(link, script)


async def test_half_closing_a_link_still_delivers_what_was_asked() -> None:
    """A peer that sends its last frame gets every answer, then the end of the stream."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.send(script.open(), script.verify(steps=20))
        await link.stream.done_writing()
        results = [result async for frame in link.stream for result in frame.results]
        assert results.pop(0).WhichOneof("result") == "opened"
        assert [result.verdict.offset for result in results] == list(range(20))
        assert [result.verdict.more for result in results] == [True] * 19 + [False]
        while len(service.engine._table):
            await settled(service)


async def test_idle_sessions_expire_and_busy_ones_do_not() -> None:
    """After session_idle_s without a command the session is gone and its pages are free."""
    now = [1_000_000_000]
    setup = Setup(options=EngineOptions(session_idle_s=60.0), clock_ns=lambda: now[0])
    async with running("draft", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        old, kept = Script("draft", "old", list(PROMPT)), Script("draft", "kept", list(PROMPT))
        for script in (old, kept):
            await opened(link, script)
            await link.call(script.propose(2))
        now[0] += int(50e9)
        await link.call(kept.propose(2))
        now[0] += int(20e9)
        while len(service.engine._table) == 2:
            await settled(service)
        assert reason(await link.call(old.propose(2))) == "SESSION_NOT_FOUND"
        assert reason(await link.call(kept.propose(2))) == ""


async def test_what_can_never_fit_is_refused_at_admission() -> None:
    """OUT_OF_PAGES, CONTEXT_TOO_LONG, MODEL_MISMATCH, TOO_BUSY: before any state is made."""
    setup = Setup(num_pages=8, page_size=4, max_sessions=2)
    async with running("target", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        expected = {
            "OUT_OF_PAGES": {"max_len": 33},
            "CONTEXT_TOO_LONG": {"max_len": 5000},
            "MODEL_MISMATCH": {"vocab_hash": VOCAB_HASH + 1, "max_len": 32},
        }
        for name, changes in expected.items():
            assert reason(await link.call(script.open(**changes))) == name
        assert len(service.engine._table) == 0
        for index in range(3):
            script.session_id = f"s{index}"
            answer = await link.call(script.open(max_len=32))
        assert reason(answer) == "TOO_BUSY"
        assert answer.error.retry_after_us > 0


async def test_two_links_of_one_coordinator_share_sessions() -> None:
    """With the same link group a second stream carries rows; without it sessions are apart."""
    async with (
        running("target", PrefixDecoder(VOCAB)) as service,
        linked(service, "coordinator-a") as main,
        linked(service, "coordinator-a") as rows,
        linked(service) as stranger,
    ):
        script = Script("target", "s", list(PROMPT))
        await opened(main, script)
        answer = await rows.call(script.verify([], audit=True))
        assert len(answer.verdict.distributions) == 1
        script.committed(answer.verdict.tokens)
        assert reason(await main.call(script.verify())) == ""
        theirs = Script("target", "s", list(PROMPT))
        assert reason(await stranger.call(theirs.verify())) == "SESSION_NOT_FOUND"
        theirs.known_len = 0
        await opened(stranger, theirs)
        assert len(service.engine._table) == 2


async def test_parameters_out_of_range_fail_the_open_with_the_field() -> None:
    """Sampling parameters are checked by the service as well, naming the field."""
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), params=sampling(top_p=0.0))
        answer = await link.call(script.open())
        assert (reason(answer), answer.error.field) == ("INVALID_REQUEST", "top_p")
        assert len(service.engine._table) == 0
