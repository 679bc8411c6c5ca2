"""`python -m draft_service.bench_outcomes`: rounds of services, and what their draft foresaw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draft_service.bench_outcomes import NUM_OUTCOMES, RANKS, Round, judged, main, mean, summary
from draft_service.bench_rounds import MAX_TOKENS, Ended, Link, Rounds, opening_of
from draft_service.outcomes import Noise, likely_outcomes
from protos.specmesh.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    session_pb2,
    target_pb2,
    target_pb2_grpc,
)
from specmesh.rpc import create_channel
from tests.e2e.tiny_pair import write_pair
from tests.rpc.fake_model import PrefixDecoder
from tests.rpc.peers import AUTO, LIMITS, VOCAB_HASH, Script, Setup, linked, running

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
K, VOCAB, STOP_ID = 3, 48, 7
ROOMY = Setup(num_pages=256)


def decoder(seed: int) -> PrefixDecoder:
    """A model whose logits are the same to the bit in every batch."""
    return PrefixDecoder(VOCAB, seed=seed)


async def rounds_of(draft_seed: int, target_seed: int, *stop_ids: int) -> list[Ended]:
    """All rounds of three answers, two side by side."""
    info = session_pb2.ModelInfo(vocab_hash=VOCAB_HASH, eos_token_ids=stop_ids)
    async with (
        running("draft", decoder(draft_seed), ROOMY) as draft,
        running("target", decoder(target_seed), ROOMY) as target,
        create_channel(draft.address, LIMITS) as to_draft,
        create_channel(target.address, LIMITS) as to_target,
    ):
        rounds = Rounds(
            Link(
                draft_pb2_grpc.DraftServiceStub(to_draft),
                draft_pb2.DraftServiceLinkRequest,
                draft_pb2.DraftCommand,
            ),
            Link(
                target_pb2_grpc.TargetServiceStub(to_target),
                target_pb2.TargetServiceLinkRequest,
                target_pb2.TargetCommand,
            ),
            opening_of(info, 1.0),
            K,
        )
        return [each async for each in rounds.run(PROMPTS, 2)]


async def test_a_draft_that_is_the_target_foresees_every_round() -> None:
    """All candidates are kept, and the bonus is always the first id of the race; by the weights of
    the row alone it is not. All answers come to their end."""
    found = [judged(each) for each in await rounds_of(0, 0)]
    assert len(found) == len(PROMPTS) * -(-(MAX_TOKENS - 1) // (K + 1))
    assert {each.answer for each in found} == {*range(len(PROMPTS))}
    for each in found:
        assert (each.num_tokens, each.is_bonus, each.rank) == (K + 1, True, 1)
        assert all(each.foreseen.values())
    assert any(each.rank_alone > 1 for each in found)
    cases = summary(found)
    assert cases["tokens a round"][1]["value"] == K + 1
    assert cases["all kept, first n"][1] == {
        "unit": "1",
        "value": 1.0,
        "standard_error": 0.0,
        "n": len(found),
    }
    assert not any(name.startswith("rejection") for name in cases)


async def test_rounds_that_end_an_answer_are_left_out() -> None:
    """No round ends with a stop id; the round before it is there."""
    found = await rounds_of(0, 1, STOP_ID)
    assert found
    assert all(STOP_ID not in each.verdict.tokens for each in found)
    assert len(found) < len(await rounds_of(0, 1))


async def test_shares_grow_with_what_is_prepared() -> None:
    """More outcomes, or ids, foresee what fewer do; every round is a rejection or keeps all."""
    found = [judged(each) for each in await rounds_of(0, 1)]
    cases = summary(found)
    names = [f"{kind}, first n{row}" for kind in ("rejection", "all kept")
             for row in ("", " of the row alone")]  # fmt: skip
    assert [*cases] == ["tokens a round", "foreseen, n outcomes", *names]
    for means in cases.values():
        values = [each["value"] for each in means.values()]
        assert values == sorted(values)
    assert 0 < cases["foreseen, n outcomes"][4]["value"] < 1
    assert cases["rejection, first n"][1]["n"] + cases["all kept, first n"][1]["n"] == len(found)
    for each in found:
        assert not each.foreseen[4] or each.foreseen[64]
        assert not each.foreseen[64] or each.rank <= 64


async def test_the_row_behind_all_candidates_is_that_of_drafting_ahead() -> None:
    """With one candidate more the draft tells what it looks at itself: the same candidates and
    rows, and the outcomes that it drafts ahead for follow from the last row."""
    async with running("draft", decoder(0), ROOMY) as service, linked(service) as peer:
        asked = []
        for name, count, num_ahead in (("ahead", K, 12), ("one more", K + 1, 0)):
            session = Script("draft", name, PROMPTS[0], policy=AUTO)
            command = session.propose(count)
            command.propose.num_ahead = num_ahead
            await peer.call(session.open())
            asked.append((await peer.call(command)).proposal)
            if num_ahead:
                ahead = (await peer.answer()).ahead.continuations
    proposal, longer = asked
    assert longer.tokens[:K] == proposal.tokens
    assert longer.distributions[:K] == proposal.distributions
    noise = Noise(session.params.seed, len(PROMPTS[0]))
    outcomes = likely_outcomes(proposal, longer.distributions[K], noise, 12)
    assert [*outcomes] == [(each.num_accepted, each.closing_token) for each in ahead]


def test_errors_take_answers_as_independent() -> None:
    """Two answers that are each of one kind err as two numbers do, however many their rounds."""
    rounds = [Round(n // 8, 1, True, 1, 1, {}) for n in range(16)]
    found = mean(rounds, [float(each.answer) for each in rounds])
    assert (found["value"], found["n"]) == (0.5, 16)
    assert found["standard_error"] == pytest.approx((2 * 0.5**2) ** 0.5 / 2)


def test_the_command_starts_services_and_writes_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pair of model folders in, a table and one JSON object a number out, with the command."""
    target, draft = write_pair(tmp_path)
    output = tmp_path / "lines.jsonl"
    flags = ["--target", str(target), "--draft", str(draft), "--rounds", "30", "-k", "2"]
    assert main([*flags, "--sessions", "4", "--output", str(output)]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    cases = list(dict.fromkeys(line["case"] for line in lines))
    assert cases[:2] == ["tokens a round", "foreseen, n outcomes"]
    assert [line["of"] for line in lines if line["case"] == cases[1]] == [*NUM_OUTCOMES]
    assert [line["of"] for line in lines if line["case"] == cases[2]] == [*RANKS]
    assert lines[0]["n"] == lines[1]["n"] == 30
    assert 1 <= lines[0]["value"] <= 3
    assert lines[0]["command"].startswith(f"python -m draft_service.bench_outcomes {flags[0]}")
    assert lines[0]["versions"]["torch"]
    assert capsys.readouterr().out.count("\n") == len(cases)


@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--rounds", "0"], ["-k", "-1"]])
def test_what_cannot_be_measured_is_refused(flags: list[str]) -> None:
    """At temperature 0 there are no rows; numbers of nothing are no numbers."""
    with pytest.raises(SystemExit):
        main(flags)
