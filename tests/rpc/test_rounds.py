"""Rounds through real gRPC services: boundaries, decisions and rows are those of one cold pass."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.streams import Purpose, philox
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh import wire
from specmesh.engine.runner import EngineOptions
from specmesh.shaping import TokenShaper
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import (
    AT_COORDINATOR,
    AT_TARGET,
    AUTO,
    COUPLED,
    DENSE_F32,
    RESIDUAL,
    Script,
    Setup,
    linked,
    reason,
    running,
    sampling,
)

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5]


def words(seed: int, count: int) -> list[int]:
    """Reproducible small integers."""
    return [philox(seed, (index, 0, 0, 99))[0] for index in range(count)]


def cold_row(decoder, script: Script, prefix) -> torch.Tensor:
    """The shaped row after `prefix`, from the model itself, without services."""
    prompt_len = script.prompt_len or len(PROMPT)
    shaper = TokenShaper(script.params, decoder.spec.vocab_size, prompt_len)
    return shaper.row(decoder.logits(list(prefix)), list(prefix))


def boundaries(message) -> tuple[int, int]:
    return message.confirmed_len, message.kv_len


async def started(peer, script: Script):
    """Open a session; at the target, with the first token."""
    await peer.send(script.open(), script.verify())
    assert (await peer.answer()).WhichOneof("result") == "opened"
    result = await peer.answer()
    script.committed(result.verdict.tokens)
    return result


@pytest.mark.parametrize("rule", [RESIDUAL, COUPLED])
@pytest.mark.parametrize("decide_at", [AT_TARGET, AT_COORDINATOR])
async def test_boundaries_of_both_sides_over_random_rounds(rule, decide_at) -> None:
    """The boundary table of the ledger holds on both sides over 60 rounds of random k."""
    target_model = PrefixDecoder(VOCAB)
    draft_model = PrefixDecoder(VOCAB, seed=1)
    ks = [word % 6 for word in words(1, 60)]
    seen = set()
    async with (
        running("target", target_model, Setup(num_pages=160)) as target,
        running("draft", draft_model, Setup(num_pages=160)) as draft,
        linked(target) as target_link,
        linked(draft) as draft_link,
    ):
        common = {"rule": rule, "max_len": 512, "prompt_len": len(PROMPT)}
        verifying = Script("target", "s", list(PROMPT), **common)
        drafting = Script("draft", "s", list(PROMPT), **common)
        await draft_link.call(drafting.open())
        result = await draft_link.call(drafting.propose(0))
        assert boundaries(result.after) == (len(PROMPT), len(PROMPT))
        result = await started(target_link, verifying)
        assert boundaries(result.after) == (len(PROMPT) + 1, len(PROMPT))
        drafting.tokens = list(verifying.tokens)
        last_k = last_j = last_base = target_j = 0
        for k in ks:
            c = len(verifying.tokens)
            proposal = None
            if k:
                answer = await draft_link.call(drafting.propose(k, last_j))
                proposal = answer.proposal
                assert len(proposal.tokens) == k
                assert answer.after.confirmed_len == answer.before.confirmed_len == c
                if last_k:  # what became of the round before
                    valid_len = last_base + min(last_j, last_k - 1)
                    assert answer.before.kv_len == valid_len, (last_k, last_j)
                    if last_base + last_j + 1 == c:  # no round without candidates in between
                        assert valid_len == (c - 2 if last_j == last_k else c - 1)
                assert answer.after.allocated_len >= c + k - 1
            candidates = list(proposal.tokens) if proposal else []
            rows = list(proposal.distributions) if proposal else []
            command = verifying.verify(candidates, rows, decide_at=decide_at, num_accepted=target_j)
            answer = await target_link.call(command)
            assert reason(answer) == ""
            assert boundaries(answer.before) == (c, c - 1)
            if decide_at == AT_TARGET:
                verdict = answer.verdict
                j, tokens = verdict.num_accepted, list(verdict.tokens)
                assert boundaries(answer.after) == (c + j + 1, c + j)
                verifying.committed(tokens)
            else:
                j, tokens = decide_here(answer.verdict, verifying, candidates, rows, c)
                assert boundaries(answer.after) == (c, c)
                target_j = j
                verifying.tokens = [*verifying.tokens, *tokens]
            assert tokens[:j] == candidates[:j]
            seen.add((k, j))
            if k:
                last_k, last_j, last_base = k, j, c
            drafting.tokens = list(verifying.tokens)
        assert len(seen) > 12  # many different (k, j), rejections and full acceptance among them
        await target_link.call(verifying.close())
        await draft_link.call(drafting.close())
        for service in (target, draft):
            assert service.pool.num_used == 0
            service.pool.check_integrity()


def decide_here(verdict, script: Script, candidates, rows, base_len: int):
    """What a coordinator does with rows: the same function over the same bits."""
    assert not verdict.tokens
    target_rows = [wire.decode(row, VOCAB).dense() for row in verdict.distributions]
    assert len(target_rows) == len(candidates) + 1
    if script.rule == COUPLED:
        deciding = reference.decide_coupled(target_rows, candidates)
    else:
        draft_rows = [wire.decode(row, VOCAB).dense() for row in rows]
        deciding = reference.decide(target_rows, draft_rows, candidates)
    decision = reference.run(deciding, reference.philox_answer(script.params.seed, base_len))
    return decision.num_accepted, list(decision.tokens)


async def generate(rule, decide_at, k, num_rounds=12, policy=DENSE_F32, params=None):
    """Tokens of one request over both services, and how many candidates each round kept."""
    target_model = PrefixDecoder(VOCAB)
    draft_model = PrefixDecoder(VOCAB, seed=1)
    kept = []
    async with (
        running("target", target_model, Setup(num_pages=160)) as target,
        running("draft", draft_model, Setup(num_pages=160)) as draft,
        linked(target) as target_link,
        linked(draft) as draft_link,
    ):
        common = {
            "rule": rule,
            "max_len": 512,
            "prompt_len": len(PROMPT),
            "policy": policy,
            "params": params or sampling(),
        }
        verifying = Script("target", "s", list(PROMPT), **common)
        drafting = Script("draft", "s", list(PROMPT), **common)
        await draft_link.call(drafting.open())
        await started(target_link, verifying)
        j = pending = 0
        for _ in range(num_rounds):
            c = len(verifying.tokens)
            candidates, rows = [], []
            if k:
                drafting.tokens = list(verifying.tokens)
                proposal = (await draft_link.call(drafting.propose(k, j))).proposal
                candidates, rows = list(proposal.tokens), list(proposal.distributions)
            command = verifying.verify(candidates, rows, decide_at=decide_at, num_accepted=pending)
            answer = await target_link.call(command)
            assert reason(answer) == "", answer
            verdict = answer.verdict
            assert not verdict.HasField("redraw_mismatch")
            if decide_at == AT_TARGET:
                j, tokens = verdict.num_accepted, list(verdict.tokens)
                verifying.committed(tokens)
            else:
                j, tokens = decide_here(verdict, verifying, candidates, rows, c)
                pending = j
                verifying.tokens = [*verifying.tokens, *tokens]
            kept.append(j)
    return verifying.tokens, kept


@pytest.mark.parametrize("rule", [RESIDUAL, COUPLED])
@pytest.mark.parametrize("policy", [DENSE_F32, AUTO])
async def test_both_placements_give_equal_tokens(rule, policy) -> None:
    """decide_at target and coordinator: the same bits, hence the same tokens, at k = 4."""
    params = sampling(top_k=9, top_p=0.95, min_p=0.01, frequency_penalty=0.3)
    ours, kept = await generate(rule, AT_TARGET, 4, policy=policy, params=params)
    theirs, kept_too = await generate(rule, AT_COORDINATOR, 4, policy=policy, params=params)
    assert ours == theirs
    assert kept == kept_too
    assert 0 < sum(kept) < 4 * len(kept)


async def test_coupled_tokens_do_not_depend_on_k() -> None:
    """The coupled rule gives one text for every k, plain decoding included."""
    texts = []
    for k in (0, 1, 3, 8):
        tokens, _ = await generate(COUPLED, AT_TARGET, k, num_rounds=16)
        texts.append(tokens[: len(PROMPT) + 16])
    assert texts == [texts[0]] * 4


@pytest.mark.parametrize("k", range(1, 9))
async def test_a_draft_equal_to_the_target_is_always_accepted(k) -> None:
    """Draft = target on dense float32 rows: p = q bit for bit, every candidate kept."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model) as verifier, running("draft", model) as proposer:
        kept = await _rounds_of_one_model(verifier, proposer, k)
    assert kept == [k] * 6


async def _rounds_of_one_model(verifier, proposer, k: int) -> list[int]:
    kept = []
    async with linked(verifier) as target_link, linked(proposer) as draft_link:
        verifying = Script("target", "s", list(PROMPT), max_len=128)
        drafting = Script("draft", "s", list(PROMPT), max_len=128)
        await draft_link.call(drafting.open())
        await started(target_link, verifying)
        j = 0
        for _ in range(6):
            drafting.tokens = list(verifying.tokens)
            proposal = (await draft_link.call(drafting.propose(k, j))).proposal
            answer = await target_link.call(
                verifying.verify(proposal.tokens, proposal.distributions)
            )
            j = answer.verdict.num_accepted
            verifying.committed(answer.verdict.tokens)
            kept.append(j)
    return kept


@pytest.mark.parametrize("num_kept", range(5))
async def test_after_a_forced_rejection_the_next_rows_are_a_cold_prefill_s(num_kept) -> None:
    """Rejected K/V is never read again: rows after a rejection at each index equal a cold pass."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model) as target, linked(target) as link:
        script = Script("target", "s", list(PROMPT), rule=COUPLED)
        await link.send(script.open(), script.verify())
        await link.answer()
        script.committed((await link.answer()).verdict.tokens)
        # The coupled winner is known in advance: keep it num_kept times, then offer another.
        candidates, prefix = [], list(script.tokens)
        for index in range(4):
            row = cold_row(model, script, prefix)
            winner = reference.race(row, script.params.seed, len(prefix), 0, Purpose.COUPLED)
            candidates.append(winner if index < num_kept else (winner + 1) % VOCAB)
            prefix.append(candidates[-1])
        verdict = (await link.call(script.verify(candidates))).verdict
        assert verdict.num_accepted == num_kept
        script.committed(verdict.tokens)
        rows = (await link.call(script.verify([1, 2], decide_at=AT_COORDINATOR))).verdict
        for index, message in enumerate(rows.distributions):
            expected = cold_row(model, script, [*script.tokens, *[1, 2][:index]])
            assert torch.equal(wire.decode(message, VOCAB).dense(), expected)


@pytest.mark.parametrize("rule", [RESIDUAL, COUPLED])
async def test_steps_equal_rounds_without_candidates(rule) -> None:
    """Plain decoding of m tokens in one command is m rounds of k = 0, token by token."""
    texts = []
    for steps in (1, 3, 6):
        async with running("target", PrefixDecoder(VOCAB)) as target, linked(target) as link:
            script = Script("target", "s", list(PROMPT), rule=rule)
            await started(link, script)
            while len(script.tokens) < len(PROMPT) + 13:
                answer = await link.call(script.verify(steps=steps))
                assert len(answer.verdict.tokens) == len(answer.verdict.emitted) == steps
                assert answer.after.kv_len == answer.after.confirmed_len - 1
                assert answer.timing.num_steps == steps
                script.committed(answer.verdict.tokens)
            texts.append(script.tokens)
    assert texts[0] == texts[1] == texts[2]


async def test_plain_decoding_ends_early_at_a_stop_token() -> None:
    """Nothing follows a stop token within one command of many steps."""
    model = PrefixDecoder(VOCAB)
    params = sampling(stop_token_ids=[2, 9], temperature=1.0)
    async with running("target", model) as target, linked(target) as link:
        script = Script("target", "s", list(PROMPT), params=params, max_len=128)
        await started(link, script)
        verdict = (await link.call(script.verify(steps=60))).verdict
    assert len(verdict.tokens) < 60
    assert verdict.tokens[-1] in (2, 9)
    assert not {2, 9} & set(verdict.tokens[:-1])


async def test_an_accepted_stop_token_closes_the_round_without_a_draw() -> None:
    """A kept candidate that is a stop id ends the verdict: no bonus, nothing after it."""
    model = PrefixDecoder(VOCAB)
    script = Script("target", "s", list(PROMPT), rule=COUPLED)
    first = reference.race(
        cold_row(model, script, PROMPT), script.params.seed, len(PROMPT), 0, Purpose.COUPLED
    )
    row = cold_row(model, script, [*PROMPT, first])
    winner = reference.race(row, script.params.seed, len(PROMPT) + 1, 0, Purpose.COUPLED)
    assert winner != first
    script.params = sampling(stop_token_ids=[winner])
    async with running("target", model) as target, linked(target) as link:
        await started(link, script)
        answer = await link.call(script.verify([winner, 0, 0]))
    assert list(answer.verdict.tokens) == [winner]
    assert answer.verdict.num_accepted == 1
    assert answer.verdict.closing == target_pb2.CLOSING_STOPPED
    assert len(answer.verdict.judged) == len(answer.verdict.emitted) == 1
    assert boundaries(answer.after) == (len(PROMPT) + 2, len(PROMPT) + 2)


async def test_greedy_keeps_the_argmax_and_sends_no_rows() -> None:
    """Temperature 0: the draft's greedy path is kept while it is the target's; no rows travel."""
    model = PrefixDecoder(VOCAB)
    params = sampling(temperature=0.0)
    async with (
        running("target", model) as target,
        running("draft", model) as draft,
        linked(target) as target_link,
        linked(draft) as draft_link,
    ):
        verifying = Script("target", "s", list(PROMPT), params=params)
        drafting = Script("draft", "s", list(PROMPT), params=params)
        await started(target_link, verifying)
        await draft_link.call(drafting.open())
        drafting.tokens = list(verifying.tokens)
        proposal = (await draft_link.call(drafting.propose(5))).proposal
        assert not proposal.distributions
        verdict = (await target_link.call(verifying.verify(proposal.tokens))).verdict
    prefix = list(PROMPT)
    for _ in range(7):
        prefix.append(int(model.logits(prefix)[:VOCAB].argmax()))
    assert verdict.num_accepted == 5
    assert [*verifying.tokens, *verdict.tokens] == prefix
    assert all(entry.is_argmax and entry.max_prob == 1.0 for entry in verdict.emitted)


async def test_long_prompts_are_fed_in_chunks_among_other_sessions() -> None:
    """Chunked prefill gives the cold row, and a decoding session goes on between the chunks."""
    model = PrefixDecoder(VOCAB)
    options = EngineOptions(token_budget=16, prefill_chunk=8)
    prompt = [word % VOCAB for word in words(5, 100)]
    async with running("target", model, Setup(options=options)) as target, linked(target) as link:
        short = Script("target", "short", list(PROMPT), max_len=60)
        long = Script("target", "long", prompt, max_len=128)
        await started(link, short)
        model.calls.clear()
        await link.send(long.open(), long.verify(decide_at=AT_COORDINATOR), short.verify(steps=12))
        results = {}
        while len(results) < 2:
            result = await link.answer()
            if result.WhichOneof("result") == "verdict":
                results[result.session_id] = result
    assert max(tokens for _, tokens in model.calls) <= 16
    assert results["long"].timing.num_steps >= 100 // 9
    mixed = [tokens for sequences, tokens in model.calls if sequences == 2]
    assert len(mixed) >= 10
    row = wire.decode(results["long"].verdict.distributions[0], VOCAB).dense()
    shaper = TokenShaper(long.params, VOCAB, len(prompt))
    assert torch.equal(row, shaper.row(model.logits(prompt), prompt))


async def test_one_pass_serves_every_session_and_one_frame_answers_them() -> None:
    """Sixteen verifies in a frame run as one batch and come back as one frame."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model, Setup(num_pages=256)) as target, linked(target) as link:
        scripts = [Script("target", f"s{index}", [index + 1, 2, 3]) for index in range(12)]
        await link.send(*(script.open() for script in scripts))
        for _ in scripts:
            await link.answer()
        link.frames.clear()
        model.calls.clear()
        await link.send(*(script.verify() for script in scripts))
        answers = [await link.answer() for _ in scripts]
    assert model.calls == [(12, 36)]
    assert len(link.frames) == 1
    assert {answer.timing.batch_size for answer in answers} == {12}


async def test_the_seed_of_a_batch_mate_changes_nothing() -> None:
    """A session's tokens alone equal its tokens among others."""

    async def run(num_others: int) -> list[int]:
        async with running("target", PrefixDecoder(VOCAB)) as target, linked(target) as link:
            scripts = [
                Script("target", f"s{index}", [5, 6, 7 + index], params=sampling(seed=index))
                for index in range(1 + num_others)
            ]
            for script in scripts:
                await link.send(script.open(), script.verify(steps=8))
            answers = {}
            while len(answers) < len(scripts):
                result = await link.answer()
                if result.WhichOneof("result") == "verdict":
                    answers[result.session_id] = list(result.verdict.tokens)
        return answers["s0"]

    assert await run(0) == await run(5)


async def test_logprobs_are_the_unshaped_target_s() -> None:
    """Per emitted token: log-softmax of raw logits, best alternatives first; rows when asked."""
    model = PrefixDecoder(VOCAB)
    params = sampling(temperature=0.7, top_k=5, num_logprobs=3)
    async with running("target", model) as target, linked(target) as link:
        script = Script("target", "s", list(PROMPT), params=params)
        result = await started(link, script)
        (entry,) = result.verdict.logprobs
        expected = torch.log_softmax(model.logits(PROMPT)[:VOCAB].double(), 0).float()
        assert entry.logprob == expected[result.verdict.tokens[0]]
        best = expected.sort(descending=True)
        assert [top.token_id for top in entry.top] == best.indices[:3].tolist()
        assert [top.logprob for top in entry.top] == best.values[:3].tolist()
        answer = await link.call(script.verify([1], [_one_hot(1)], decide_at=AT_COORDINATOR))
        rows = [
            torch.frombuffer(bytearray(e.row), dtype=torch.float32) for e in answer.verdict.logprobs
        ]
        again = torch.log_softmax(model.logits([*script.tokens, 1])[:VOCAB].double(), 0).float()
        assert torch.equal(rows[1], again)


def _one_hot(token: int) -> session_pb2.Distribution:
    row = wire.Row(VOCAB, torch.tensor([1.0]), torch.tensor([token]), wire.SPARSE_F32)
    return wire.encode(row)


async def test_judged_and_emitted_report_the_rows_that_were_judged() -> None:
    """p(x), q(x), overlap, argmax flag and largest probability equal those of the rows."""
    target_model, draft_model = PrefixDecoder(VOCAB), PrefixDecoder(VOCAB, seed=1)
    async with (
        running("target", target_model) as target,
        running("draft", draft_model) as draft,
        linked(target) as target_link,
        linked(draft) as draft_link,
    ):
        verifying = Script("target", "s", list(PROMPT))
        drafting = Script("draft", "s", list(PROMPT))
        await started(target_link, verifying)
        await draft_link.call(drafting.open())
        base = drafting.tokens = list(verifying.tokens)
        proposal = (await draft_link.call(drafting.propose(4))).proposal
        verdict = (
            await target_link.call(
                verifying.verify(proposal.tokens, proposal.distributions, audit=True)
            )
        ).verdict
    assert len(verdict.distributions) == 5
    assert len(verdict.judged) == min(verdict.num_accepted + 1, 4)
    for index, judged in enumerate(verdict.judged):
        seen = [*base, *proposal.tokens[:index]]
        p = cold_row(target_model, verifying, seen).double()
        q = cold_row(draft_model, verifying, seen).double()
        p, q = p / p.sum(), q / q.sum()
        token = proposal.tokens[index]
        assert judged.target_prob == pytest.approx(float(p[token]), rel=1e-6)
        assert judged.draft_prob == pytest.approx(float(q[token]), rel=1e-6)
        assert judged.overlap == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-6)
    for index, emitted in enumerate(verdict.emitted):
        p = cold_row(target_model, verifying, [*base, *verdict.tokens[:index]]).double()
        assert emitted.max_prob == pytest.approx(float(p.max() / p.sum()), rel=1e-6)
        assert emitted.is_argmax == (verdict.tokens[index] == int(p.argmax()))
