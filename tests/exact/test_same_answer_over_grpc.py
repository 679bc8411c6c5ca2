"""Same answer through real gRPC services: what may not change a request's tokens does not.

Equality of tokens presumes the same logits up to a near-tie; these small models have none on the
fixed seeds used here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.specmesh.v1 import session_pb2
from specmesh.engine.decoder import Decoder
from tests.exact.grpc_sessions import Generation, serve
from tests.exact.tiny_llama import logits_after, tiny_llama
from tests.rpc.peers import AT_COORDINATOR, AT_TARGET, AUTO, COUPLED, DENSE_F32, RESIDUAL

VOCAB_SIZE = 1500  # above 1024: rows of full support are truncated under auto, dense under dense
MAX_TOKENS = 14
SEEDS = range(1, 9)
PROMPT = [3, 1, 4, 1, 5]
DENSE_F16 = session_pb2.ROW_POLICY_DENSE_F16
SHAPED = {"top_p": 0.95, "temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """A target, a near draft, a poor draft."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    torch.set_num_threads(1)
    size = {"vocab_size": VOCAB_SIZE}
    return {
        "target": tiny_llama(folder / "target", 7, **size),
        "near": tiny_llama(folder / "near", 7, 5, 0.15, **size),
        "poor": tiny_llama(folder / "poor", 8, **size),
    }


def answers(models: dict[str, Decoder], draft: str, *groups: dict[str, Any]) -> list[list[int]]:
    """Outputs of all SEEDS for each group of changes, every group a wave of its own."""
    waves = [wave(**changes) for changes in groups]
    asyncio.run(serve(models["target"], models[draft], waves))
    return [each.output for each in waves[0]] if len(waves) == 1 else _same(waves)


def _same(waves: list[list[Generation]]) -> list[list[int]]:
    """The outputs that all waves agree on."""
    outputs = [[each.output for each in some] for some in waves]
    for other in outputs[1:]:
        assert other == outputs[0]
    return outputs[0]


def wave(k: int = 3, seeds: Any = SEEDS, **changes: Any) -> list[Generation]:
    """One generation per seed."""
    fields = {
        "session_id": "",
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "rule": COUPLED,
        "decide_at": AT_TARGET,
        "params": SHAPED,
        **changes,
    }
    name = fields.pop("session_id")
    return [
        Generation(
            session_id=f"{name}-{seed}",
            next_k=lambda round_index: k,
            seed=seed,
            vocab_size=VOCAB_SIZE,
            **fields,
        )
        for seed in seeds
    ]


def test_coupled_answer_does_not_depend_on_k_place_or_draft(models: dict[str, Decoder]) -> None:
    """k from 0 to 8, both placements, a near and a poor draft: one answer per seed."""
    places = (AT_TARGET, AT_COORDINATOR)
    groups = [{"k": k, "decide_at": place} for k in range(9) for place in places]
    near = answers(models, "near", *groups)
    assert answers(models, "poor", {"k": 4}, {"k": 1, "decide_at": AT_COORDINATOR}) == near
    assert len({tuple(output) for output in near}) == len(SEEDS)


def test_greedy_answer_is_the_argmax_path_for_every_k(models: dict[str, Decoder]) -> None:
    """Temperature 0: every k and place gives the path that cold passes over the target give."""
    tokens = list(PROMPT)
    for _ in range(MAX_TOKENS):
        tokens.append(int(logits_after(models["target"], [tokens])[0, -1].argmax()))
    greedy = {"params": {"temperature": 0.0}, "seeds": [1]}
    groups = [
        {**greedy, "k": k, "rule": rule, "decide_at": place}
        for k in (0, 1, 4, 8)
        for rule in (COUPLED, RESIDUAL)
        for place in (AT_TARGET,)
    ]
    assert answers(models, "near", *groups) == [tokens[len(PROMPT) :]]


@pytest.mark.parametrize("rule", [COUPLED, RESIDUAL], ids=["coupled", "residual"])
def test_answer_does_not_depend_on_the_batch(models: dict[str, Decoder], rule: int) -> None:
    """Alone, in a batch of eight, in a batch of forty: the same tokens for the same seed and k."""
    alone = [answers(models, "near", {"rule": rule, "seeds": [seed]})[0] for seed in (1, 5)]
    few = answers(models, "near", {"rule": rule})
    many = answers(models, "near", {"rule": rule, "seeds": range(1, 41)})
    assert many[: len(few)] == few
    assert alone == [few[0], few[4]]


def test_residual_answer_does_not_depend_on_placement(models: dict[str, Decoder]) -> None:
    """Rows cross the wire bit for bit: the coordinator decides what the target decides."""
    places = [{"rule": RESIDUAL, "decide_at": place} for place in (AT_TARGET, AT_COORDINATOR)]
    for policy in (AUTO, DENSE_F32, DENSE_F16):
        answers(models, "near", *({**place, "row_policy": policy} for place in places))


def test_residual_answer_does_not_depend_on_the_encoding_of_the_same_rows(
    models: dict[str, Decoder],
) -> None:
    """Rows of small support are the same under every policy, and so are the tokens."""
    small = {"rule": RESIDUAL, "params": {"top_k": 40}}
    answers(models, "near", *({**small, "row_policy": p} for p in (AUTO, DENSE_F32, DENSE_F16)))


@pytest.mark.parametrize("batch", [1, 12])
def test_the_target_as_its_own_draft_is_always_accepted(
    models: dict[str, Decoder], batch: int
) -> None:
    """Draft = target on a dense float32 link: acceptance is 100 % for every k."""
    fields = {"rule": RESIDUAL, "row_policy": DENSE_F32, "seeds": range(1, 1 + batch)}
    waves = [
        wave(k=k, params=params, **fields) for k in range(1, 9) for params in ({}, {"top_p": 0.9})
    ]
    asyncio.run(serve(models["target"], models["target"], waves))
    for each in (each for some in waves for each in some):
        assert each.num_judged > 0
        assert each.num_accepted == each.num_judged


def test_stop_tokens_end_the_answer_where_they_stand(models: dict[str, Decoder]) -> None:
    """The coupled answer with a stop id is the one without it, cut after its first occurrence."""
    full = answers(models, "near", {})
    for index in (1, 4, 9):
        stop = full[0][index]
        cut = [output[: output.index(stop) + 1] if stop in output else output for output in full]
        params = {**SHAPED, "stop_token_ids": [stop]}
        groups = [
            {"k": k, "params": params, "decide_at": place}
            for k, place in ((0, AT_TARGET), (1, AT_COORDINATOR), (4, AT_TARGET), (5, AT_TARGET))
        ]
        assert answers(models, "near", *groups) == cut


def test_every_stop_and_budget_cuts_the_same_answer(models: dict[str, Decoder]) -> None:
    """Each (stop, budget) pair, with and without candidates: the full answer, cut at the first."""
    full = answers(models, "near", {"seeds": [3]})[0]
    expected, waves = [], []
    for k in (0, 3, 8):
        generations = []
        for budget in range(1, 10):
            for stop in (None, *sorted(set(full[:9]))):
                cut = full[:budget]
                if stop in cut:
                    cut = cut[: cut.index(stop) + 1]
                expected.append(cut)
                stop_ids = [] if stop is None else [stop]
                generations += wave(
                    k=k,
                    seeds=[3],
                    session_id=f"{budget}-{stop}",
                    max_tokens=budget,
                    params={**SHAPED, "stop_token_ids": stop_ids},
                )
        waves.append(generations)
    asyncio.run(serve(models["target"], models["near"], waves))
    assert [each.output for some in waves for each in some] == expected


def test_prompts_of_every_length_are_continued_alike(models: dict[str, Decoder]) -> None:
    """Prompt lengths 1..k+2: rounds with four candidates give what plain rounds give."""
    for length in range(1, 7):
        prompt = [7 * i % VOCAB_SIZE for i in range(1, length + 1)]
        fields = {"prompt": prompt, "seeds": range(1, 4)}
        answers(models, "near", {"k": 0, **fields}, {"k": 4, **fields})


def test_min_tokens_keeps_stop_tokens_away_on_both_sides(models: dict[str, Decoder]) -> None:
    """Before min_tokens no stop id is emitted, at accepted, recovered and bonus positions alike."""
    stops = list(range(0, VOCAB_SIZE, 2))
    params = {"temperature": 1.0, "stop_token_ids": stops, "min_tokens": 6}
    for rule in (COUPLED, RESIDUAL):
        waves = [wave(k=k, params=params, rule=rule, seeds=range(1, 13)) for k in (0, 3)]
        asyncio.run(serve(models["target"], models["near"], waves))
        for each in (each for some in waves for each in some):
            early = [token for token in each.output[:6] if token in stops]
            assert not early
            assert len(each.output) > 6
