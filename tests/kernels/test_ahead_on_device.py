"""Drafting ahead on captured steps: forks draw what their session would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protos.specmesh.v1 import draft_pb2, session_pb2
from specmesh.engine.runner import Engine
from specmesh.wire import decode
from tests.kernels.test_device_engine import ANSWER_S, AnswerQueue, Caller, make_engine
from tests.rpc.peers import sampling
from tests.unit.tiny_models import VOCAB, save, tiny_model

# Rows of padding hold anything, infinities too; numpy, which interprets, warns of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

PROMPT = [5, 3, 8, 1, 7, 2]
K, NUM_AHEAD = 2, 4
RESIDUAL = session_pb2.DECISION_RULE_RESIDUAL


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Engine]:
    """A draft whose device draws."""
    folder: Path = save(tiny_model("llama", seed=0), tmp_path_factory.mktemp("draft"))
    made = make_engine("draft", folder, device, on_device=True, pages=24)
    made.start()
    yield made
    made.stop()


def opened(engine: Engine, session_id: int, tokens: list[int]) -> Caller:
    """A session of its own link."""
    caller = Caller("draft", engine, AnswerQueue(), session_id, tokens)
    caller.open(sampling(seed=3), RESIDUAL)
    return caller


def same_law(got: draft_pb2.Proposal, wanted: draft_pb2.Proposal) -> None:
    """Equal candidates, from rows that differ by rounding at most."""
    assert got.tokens == wanted.tokens
    for mine, his in zip(got.distributions, wanted.distributions, strict=True):
        rows = [decode(each, VOCAB).dense() for each in (mine, his)]
        torch.testing.assert_close(*(row / row.sum() for row in rows), rtol=1e-4, atol=1e-6)


def test_continuations_are_the_proposals_that_follow(engine: Engine) -> None:
    """What a session proposes that was told of the outcome, whether another one that computes all
    of it, or the one whose pages the forks shared. (Interpreted kernels add up in numpy's order,
    which depends on the number of rows: no bits are compared.)"""
    session = opened(engine, 0, list(PROMPT))
    proposal = session.work(num_draft_tokens=K, num_ahead=NUM_AHEAD).proposal
    result = session.link.results.get(timeout=ANSWER_S)
    assert result.WhichOneof("result") == "ahead"
    continuations = sorted(result.ahead.continuations, key=lambda each: each.num_accepted)
    assert [each.num_accepted for each in continuations] == [0, 1, K, K]
    for index, each in enumerate((continuations[0], continuations[-1])):
        path = [*proposal.tokens[: each.num_accepted], each.closing_token]
        other = opened(engine, 1 + index, [*PROMPT, *path])
        same_law(other.work(num_draft_tokens=K).proposal, each.proposal)
    session.known, session.accepted = len(PROMPT), K
    session.tokens += [*proposal.tokens, continuations[-1].closing_token]
    same_law(session.work(num_draft_tokens=K).proposal, continuations[-1].proposal)
