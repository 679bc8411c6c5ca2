"""Commands and rows that are wrong fail alone: their session's state stays, the link goes on."""

from __future__ import annotations

import pytest
import torch

from kernels.streams import Purpose
from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh import wire
from specmesh.config import MAX_PLAIN_STEPS
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
PROMPT = [3, 1, 4, 1, 5]


def drawn_row(seed: int, position: int, base_len: int, *, dense: bool = True):
    """A row and the token that PROPOSE noise draws from it."""
    ids = torch.arange(VOCAB) if dense else torch.tensor([2, 3, 5, 7, 11, 13])
    weights = torch.linspace(1.0, 2.0, len(ids))
    encoding = wire.DENSE_F32 if dense else wire.SPARSE_F32
    row = wire.Row(VOCAB, weights, None if dense else ids, encoding)
    return row, row.draw(seed, position, base_len, Purpose.PROPOSE)


def frames() -> dict[str, session_pb2.Distribution]:
    """Rows that are no law over this vocabulary, by what is wrong with them."""
    good = wire.encode(drawn_row(7, 6, 6)[0])

    def changed(**changes) -> session_pb2.Distribution:
        row = session_pb2.Distribution()
        row.CopyFrom(good)
        for name, value in changes.items():
            setattr(row, name, value)
        return row

    floats = torch.full((VOCAB,), 1.0)
    negative, infinite, nan = (floats.clone() for _ in range(3))
    negative[3], infinite[3], nan[3] = -1.0, torch.inf, torch.nan
    return {
        "short": changed(values=good.values[:-4]),
        "vocabulary": changed(vocab_size=VOCAB + 1),
        "encoding": changed(encoding=session_pb2.ENCODING_UNSPECIFIED),
        "negative": changed(values=negative.numpy().tobytes()),
        "infinite": changed(values=infinite.numpy().tobytes()),
        "nan": changed(values=nan.numpy().tobytes()),
        "zero": changed(values=bytes(4 * VOCAB)),
        "ids": changed(ids=bytes(4)),
    }


@pytest.fixture
async def target():
    async with running("target", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT))
        await link.call(script.open())
        script.committed((await link.call(script.verify())).verdict.tokens)
        yield service, link, script


async def assert_unchanged(link, script: Script) -> None:
    """The session answers its next command from where it stood before."""
    answer = await link.call(script.verify(steps=2))
    assert reason(answer) == "", answer
    assert answer.before.confirmed_len == len(script.tokens)
    assert answer.before.kv_len == len(script.tokens) - 1
    script.committed(answer.verdict.tokens)


@pytest.mark.parametrize("fault", sorted(frames()))
async def test_a_corrupt_row_fails_its_command_alone(target, fault) -> None:
    """CORRUPT_FRAME naming the row, the session unchanged, its batch mate answered."""
    _, link, script = target
    other = Script("target", "other", [1, 2, 3])
    await link.call(other.open())
    good, token = drawn_row(7, 6, 6)
    command = script.verify([token, 1], [wire.encode(good), frames()[fault]])
    await link.send(command, other.verify(steps=3))
    answers = {}
    while len(answers) < 2:
        answer = await link.answer()
        answers[answer.session_id] = answer
    assert reason(answers["s"]) == "CORRUPT_FRAME"
    assert answers["s"].error.field == "distributions[1]"
    assert len(answers["other"].verdict.tokens) == 3
    await assert_unchanged(link, script)


async def test_a_candidate_without_mass_in_its_row_is_corrupt(target) -> None:
    """q(x) = 0 for a candidate: it cannot have been drawn."""
    _, link, script = target
    row, _ = drawn_row(7, 6, 6, dense=False)
    answer = await link.call(script.verify([4], [wire.encode(row)]))
    assert reason(answer) == "CORRUPT_FRAME"
    await assert_unchanged(link, script)


BAD_VERIFY = {
    "candidate": ({"candidates": [VOCAB]}, "candidates"),
    "no rows": ({"candidates": [1]}, "distributions"),
    "placement": ({"decide_at": 9}, "decide_at"),
    "no steps": ({"num_steps": 0}, "num_steps"),
    "many steps": ({"num_steps": MAX_PLAIN_STEPS + 1}, "num_steps"),
    "steps of rows": ({"num_steps": 2, "decide_at": AT_COORDINATOR}, "num_steps"),
    "many candidates": ({"candidates": [1] * 9}, "candidates"),
}


@pytest.mark.parametrize("case", sorted(BAD_VERIFY))
async def test_an_impossible_verify_is_refused_with_its_field(target, case) -> None:
    """INVALID_REQUEST naming the field; nothing changed."""
    _, link, script = target
    changes, field = BAD_VERIFY[case]
    command = script.verify()
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(command.verify, name)[:] = value
        else:
            setattr(command.verify, name, value)
    answer = await link.call(command)
    assert (reason(answer), answer.error.field) == ("INVALID_REQUEST", field)
    await assert_unchanged(link, script)


BAD_PREFIX = {
    "base": ({"base_len": 9}, "INVALID_REQUEST"),
    "digest": ({"prefix_digest": 1}, "PREFIX_MISMATCH"),
    "gap": ({"append_from": 20, "base_len": 20}, "PREFIX_MISMATCH"),
    "accepted": ({"num_accepted": 1}, "INVALID_REQUEST"),
    "empty": ({"base_len": 0, "append_from": 0}, "INVALID_REQUEST"),
}


@pytest.mark.parametrize("case", sorted(BAD_PREFIX))
async def test_an_impossible_prefix_update_is_refused(target, case) -> None:
    """Lengths, digests and counts that contradict the ledger change nothing."""
    _, link, script = target
    changes, expected = BAD_PREFIX[case]
    command = script.verify()
    for name, value in changes.items():
        setattr(command.verify.prefix, name, value)
    assert reason(await link.call(command)) == expected
    await assert_unchanged(link, script)


async def test_appended_ids_outside_the_vocabulary_are_refused(target) -> None:
    """Padding ids are no tokens."""
    _, link, script = target
    tokens = list(script.tokens)
    script.tokens = [*tokens, VOCAB]
    answer = await link.call(script.verify())
    assert (reason(answer), answer.error.field) == ("INVALID_REQUEST", "prefix.append")
    script.tokens, script.known_len = tokens, len(tokens)
    await assert_unchanged(link, script)


async def test_a_session_never_passes_its_max_len(target) -> None:
    """CONTEXT_TOO_LONG when candidates or steps could exceed max_len."""
    _, link, script = target
    assert reason(await link.call(script.verify(steps=64 - len(script.tokens) + 1))) == (
        "CONTEXT_TOO_LONG"
    )
    await assert_unchanged(link, script)


async def test_commands_without_a_meaning_are_refused(target) -> None:
    """An unset command and one for an unknown session are answered, not dropped."""
    _, link, script = target
    empty = await link.call(target_pb2.TargetCommand(session_id="s", epoch=1, round=50))
    assert (reason(empty), empty.round) == ("INVALID_REQUEST", 50)
    stranger = Script("target", "nobody", list(PROMPT))
    assert reason(await link.call(stranger.verify())) == "SESSION_NOT_FOUND"
    await assert_unchanged(link, script)


async def test_rows_that_no_message_can_hold_are_refused() -> None:
    """Coordinator placement whose rows exceed the message limit: INVALID_REQUEST, link intact."""
    setup = Setup(max_message_bytes=(1 << 16) + 4 * VOCAB * 3)
    async with running("target", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), rule=COUPLED)
        await link.call(script.open())
        fits = await link.call(script.verify([1, 2], decide_at=AT_COORDINATOR))
        assert len(fits.verdict.distributions) == 3
        answer = await link.call(script.verify([1, 2, 3], decide_at=AT_COORDINATOR))
        assert reason(answer) == "INVALID_REQUEST"


async def test_the_draft_refuses_too_many_candidates_and_goes_on() -> None:
    """num_draft_tokens above the limit or past max_len: refused, the session unchanged."""
    async with running("draft", PrefixDecoder(VOCAB)) as service, linked(service) as link:
        script = Script("draft", "s", list(PROMPT), max_len=12)
        await link.call(script.open())
        assert reason(await link.call(script.propose(9))) == "INVALID_REQUEST"
        script.known_len = 0
        assert reason(await link.call(script.propose(8))) == "CONTEXT_TOO_LONG"
        script.known_len = 0
        answer = await link.call(script.propose(7))
        assert len(answer.proposal.tokens) == 7
        verify_kind = draft_pb2.DraftCommand(session_id="s", epoch=1, round=9)
        assert reason(await link.call(verify_kind)) == "INVALID_REQUEST"


@pytest.mark.parametrize("dense", [True, False])
async def test_a_draft_that_samples_from_another_row_is_found_at_once(dense) -> None:
    """The re-draw check refutes the first false candidate; the round is one without candidates."""
    model = PrefixDecoder(VOCAB)
    async with running("target", model) as service, linked(service) as link:
        liar = Script("target", "liar", list(PROMPT))
        plain = Script("target", "plain", list(PROMPT))
        for script in (liar, plain):
            await link.call(script.open())
            script.committed((await link.call(script.verify())).verdict.tokens)
        base = len(liar.tokens)
        rows, tokens = zip(
            *(drawn_row(7, base + i, base, dense=dense) for i in range(3)), strict=True
        )
        false = list(tokens)
        false[1] = next(t for t in (2, 3, 5) if t != tokens[1])
        answer = await link.call(liar.verify(false, [wire.encode(row) for row in rows]))
        expected = await link.call(plain.verify())
        assert answer.verdict.HasField("redraw_mismatch")
        assert answer.verdict.redraw_mismatch == 1
        assert not answer.verdict.judged
        assert list(answer.verdict.tokens) == list(expected.verdict.tokens)
        liar.committed(answer.verdict.tokens)
        base = len(liar.tokens)
        rows, tokens = zip(
            *(drawn_row(7, base + i, base, dense=dense) for i in range(3)), strict=True
        )
        honest = await link.call(liar.verify(tokens, [wire.encode(row) for row in rows]))
        assert not honest.verdict.HasField("redraw_mismatch")


async def test_dense_rows_are_checked_at_the_ratio() -> None:
    """Of forty false dense candidates, one in four is looked at when the ratio is 0.25."""
    found = 0
    setup = Setup(redraw_ratio=0.25)
    async with running("target", PrefixDecoder(VOCAB), setup) as service, linked(service) as link:
        script = Script("target", "s", list(PROMPT), max_len=256, params=sampling(seed=7))
        await link.call(script.open())
        script.committed((await link.call(script.verify())).verdict.tokens)
        for _ in range(40):
            base = len(script.tokens)
            row, token = drawn_row(7, base, base)
            false = (token + 1) % VOCAB
            answer = await link.call(script.verify([false], [wire.encode(row)]))
            found += answer.verdict.HasField("redraw_mismatch")
            script.committed(answer.verdict.tokens)
    assert found == 10
