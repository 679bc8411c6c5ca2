"""Rows without a law between the candidates of a device's chain: cut as the reference engine cuts.

Whatever contains a certain token has no law behind it: that token's embedding is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from protos.specmesh.v1 import draft_pb2
from specmesh.engine.runner import Engine
from tests.kernels.test_device_engine import (
    ANSWER_S,
    COUPLED,
    RESIDUAL,
    AnswerQueue,
    Caller,
    make_engine,
    params,
    same_proposal,
)
from tests.unit.tiny_models import VOCAB, random_tokens, save, tiny_model

# Rows of padding hold anything, infinities too; numpy, which interprets, warns of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

K = 3
PROMPT = random_tokens(9, seed=5)
Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, device: str) -> Iterator[Make]:
    """Makes drafts that run, on a device or on the CPU, of a token that spoils what follows it."""
    made: list[Engine] = []

    def make(*, on_device: bool, spoilt: int | None = None) -> Engine:
        model = tiny_model("llama", seed=0)
        if spoilt is not None:
            with torch.no_grad():
                model.model.embed_tokens.weight[spoilt] = torch.nan
        folder = save(model, tmp_path / f"draft-{spoilt}")
        made.append(make_engine("draft", folder, device, on_device=on_device, pages=24))
        made[-1].start()
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def opened(engine: Engine, session_id: int, rule: int = RESIDUAL) -> Caller:
    """A session of its own link."""
    caller = Caller("draft", engine, AnswerQueue(), session_id, list(PROMPT))
    caller.open(params(temperature=1.0), rule)
    return caller


def holds_nan(engine: Engine) -> bool:
    """Whether any page of K/V does."""
    return any(bool(pool.isnan().any()) for pool in engine._executor._device.cache.pools)


def outcomes(engine: Engine) -> dict[str, float]:
    """How many proposals ended with which outcome."""
    family = engine._observers.metrics.commands.collect()[0]
    return {
        sample.labels["outcome"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["command"] == "propose"
    }


@pytest.mark.parametrize("rule", [RESIDUAL, COUPLED])
@pytest.mark.parametrize("num_sound", [1, 2])
def test_a_chain_is_cut_where_the_reference_engine_cuts(
    make: Make, num_sound: int, rule: int
) -> None:
    """The same candidates with their rows, boundaries and counts; no page keeps NaN; rounds go on,
    and one whose first row has no law fails."""
    fine = opened(make(on_device=False), 0, rule).work(num_draft_tokens=K).proposal
    spoilt = fine.tokens[num_sound - 1]
    assert spoilt not in (*PROMPT, *fine.tokens[: num_sound - 1])
    engines = [make(on_device=on_device, spoilt=spoilt) for on_device in (False, True)]
    callers = [opened(engine, 1, rule) for engine in engines]
    for num_rounds, closing in enumerate(((spoilt + 1) % VOCAB, spoilt), start=1):
        results = [caller.work(num_draft_tokens=K) for caller in callers]
        same_proposal(results[1], results[0])
        assert results[0].proposal.is_cut == results[1].proposal.is_cut
        if num_rounds == 1:
            assert results[1].proposal.is_cut
            assert list(results[1].proposal.tokens) == list(fine.tokens[:num_sound])
            assert results[1].after.kv_len == 0
        assert not any(map(holds_nan, engines))
        for caller in callers:
            caller.known = len(caller.tokens)
            caller.tokens.append(closing)
    for caller, engine in zip(callers, engines, strict=True):
        assert caller.work(num_draft_tokens=K).error.reason == "NUMERIC_FAULT"
        assert not holds_nan(engine)
    assert outcomes(engines[0]) == outcomes(engines[1])
    assert outcomes(engines[1])["NUMERIC_FAULT"] >= 2.0


def test_continuations_are_cut_where_their_proposals_would_be(make: Make) -> None:
    """A fork of a captured chain ends before the row that its session would end before."""
    first = opened(make(on_device=True), 0)
    first.work(num_draft_tokens=2, num_ahead=4)
    continuations = first.link.results.get(timeout=ANSWER_S).ahead.continuations
    spoilt = continuations[0].proposal.tokens[0]
    engine = make(on_device=True, spoilt=spoilt)
    session = opened(engine, 0)
    proposal = session.work(num_draft_tokens=2, num_ahead=4).proposal
    assert not proposal.is_cut
    ahead = session.link.results.get(timeout=ANSWER_S).ahead
    assert not holds_nan(engine)
    cut: draft_pb2.Continuation = ahead.continuations[0]
    assert cut.proposal.is_cut
    assert cut.proposal.tokens == [spoilt]
    assert len(cut.proposal.distributions) == 1
    other = opened(engine, 1)
    other.tokens += [*proposal.tokens[: cut.num_accepted], cut.closing_token]
    assert other.work(num_draft_tokens=2).proposal.tokens == cut.proposal.tokens
