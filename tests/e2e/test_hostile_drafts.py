"""Drafts that are wrong, broken, slow, gone or replaced, and full page pools, through the real
coordinator and services: no request fails, and no token is another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draft_service.proposer import Proposer
from protos.specmesh.v1 import draft_pb2, session_pb2
from specmesh.client import Chunk, GenerateOptions
from specmesh.config import LinkSettings
from tests.e2e.stack import VOCAB_SIZE, Stack, running_stack
from tests.rpc import peers
from tests.rpc.fake_model import PrefixDecoder

PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 24
Proposal = draft_pb2.Proposal
LINKS = {"reconnect_initial_s": 0.02, "reconnect_max_s": 0.1, "connect_timeout_s": 5.0}
# Where a deadline must not decide how many candidates a round has, however loaded the machine is.
PATIENT = LinkSettings(**LINKS, draft_deadline_s=60.0)


def options(**changes: Any) -> GenerateOptions:
    return GenerateOptions(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **changes})


async def tokens_of(stack: Stack, **changes: Any) -> list[int]:
    generation = await stack.client.generate(PROMPT, options(**changes))
    return generation.token_ids[0]


# ---------------------------------------------------------------- broken content


def _row(proposal: Proposal, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(proposal.distributions[0], name, value)


def _without_its_mass(proposal: Proposal) -> None:
    weights = torch.ones(VOCAB_SIZE)
    weights[proposal.tokens[0]] = 0.0
    _row(
        proposal,
        encoding=session_pb2.ENCODING_DENSE_F32,
        ids=b"",
        values=weights.numpy().tobytes(),
    )


def _of_another_row(proposal: Proposal) -> None:
    """Under the noise of these rounds the flat row gives another token somewhere in the block."""
    for row in proposal.distributions:
        row.encoding, row.ids = session_pb2.ENCODING_SPARSE_F32, _ids(VOCAB_SIZE)
        row.values = torch.ones(VOCAB_SIZE).numpy().tobytes()


def _ids(count: int) -> bytes:
    return torch.arange(count, dtype=torch.int32).numpy().tobytes()


BROKEN: dict[str, Callable[[Proposal], None]] = {
    "no rows": lambda p: p.ClearField("distributions"),
    "a row too many": lambda p: p.distributions.append(p.distributions[0]),
    "a token too few": lambda p: p.tokens.pop(),
    "a token too many": lambda p: p.tokens.append(1),
    "no tokens": lambda p: p.Clear(),
    "a token outside": lambda p: p.tokens.__setitem__(0, VOCAB_SIZE),
    "cut values": lambda p: _row(p, values=p.distributions[0].values[:-1]),
    "NaN": lambda p: _row(p, values=b"\xff" * len(p.distributions[0].values)),
    "no mass at all": lambda p: _row(p, values=bytes(len(p.distributions[0].values))),
    "another vocabulary": lambda p: _row(p, vocab_size=VOCAB_SIZE + 1),
    "no encoding": lambda p: _row(p, encoding=session_pb2.ENCODING_UNSPECIFIED),
    "no mass at its token": _without_its_mass,
    "another row": _of_another_row,
    "a negative share": lambda p: p.dropped_mass.__setitem__(0, -1e-9),
    "a share that is no number": lambda p: p.dropped_mass.__setitem__(0, float("nan")),
    "a share of no row": lambda p: p.dropped_mass.append(0.0),
}


@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_broken_proposals_cost_the_draft_and_nothing_else(
    decide_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of bad content ends drafting with its first block, and every position is drawn as
    if nobody had proposed: token for token the answer of k = 0, under the residual rule."""
    build, spoil = Proposer._proposal, [lambda proposal: None]

    def spoiled(proposer: Proposer, drafting: Any) -> Proposal:
        proposal = build(proposer, drafting)
        if proposal.tokens:
            spoil[0](proposal)
        return proposal

    monkeypatch.setattr(Proposer, "_proposal", spoiled)
    async with running_stack(links=PATIENT) as stack:
        fields = {"seed": 5, "rule": "residual", "decide_at": decide_at}
        wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
        honest = await tokens_of(stack, **fields, num_draft_tokens=3)
        assert honest != wanted, "with candidates this seed's sample is another one"
        for name, spoil[0] in BROKEN.items():
            generation = await stack.client.generate(PROMPT, options(**fields, num_draft_tokens=3))
            assert generation.token_ids[0] == wanted, name
            stats = generation.finished[0].speculation
            assert stats.num_accepted == 0, name
            reasons = set(stats.fallback_rounds) - {"budget"}
            assert reasons <= {"draft_bad_proposal", "draft_redraw_mismatch"}, name
            assert len(reasons) == 1, name
        await stack.all_pages_free()


# ---------------------------------------------------------------- wrong, but honest


class Stubborn(PrefixDecoder):
    """Always the same token, whatever the prefix."""

    def logits(self, prefix: Any) -> torch.Tensor:
        row = torch.full((self.spec.num_embeddings,), -50.0)
        row[7] = 50.0
        return row


class Contrary(PrefixDecoder):
    """Never a token that the target likes: its logits negated."""

    def logits(self, prefix: Any) -> torch.Tensor:
        return -20.0 * super().logits(prefix)


@pytest.mark.parametrize("model", [Stubborn, Contrary, PrefixDecoder])
async def test_wrong_drafts_change_no_token(model: type[PrefixDecoder]) -> None:
    """A constant, a contrary and a noise draft: coupled and greedy answers are the target's own;
    under the residual rule no token outside the target's support is emitted."""
    wrong = Contrary(VOCAB_SIZE) if model is Contrary else model(VOCAB_SIZE, own_weight=1.0, seed=9)
    async with running_stack(links=PATIENT) as stack:
        device = stack.drafts[0].engine._executor._device
        object.__setattr__(device, "decoder", wrong)  # frozen; nothing has run on it yet
        for fields in ({"seed": 3}, {"temperature": 0.0}, {"seed": 3, "top_p": 0.6}):
            wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
            for decide_at in ("target", "coordinator"):
                found = await tokens_of(stack, **fields, num_draft_tokens=4, decide_at=decide_at)
                assert found == wanted, (fields, decide_at)
        target = PrefixDecoder(VOCAB_SIZE, seed=0)
        for seed in range(6):
            found = await tokens_of(stack, seed=seed, rule="residual", top_k=2, num_draft_tokens=3)
            assert len(found) == NUM_TOKENS
            for index, token in enumerate(found):
                row = target.logits([*PROMPT, *found[:index]])[:VOCAB_SIZE]
                assert token in row.topk(2).indices.tolist()
        await stack.all_pages_free()


# ---------------------------------------------------------------- slow, gone, replaced


@pytest.mark.parametrize("k", [3, None])
async def test_a_draft_that_hangs_changes_no_token(k: int | None) -> None:
    """Its passes do not end: one deadline, then rounds without candidates, the same answer."""
    links = LinkSettings(**LINKS, draft_deadline_s=0.05)
    async with running_stack(links=links) as stack:
        fields = {"seed": 8, "max_tokens": 60}
        wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
        release = threading.Event()
        stack.drafts[0].decoder.before_pass = release.wait  # type: ignore[attr-defined]  # a fake
        try:
            generation = await stack.client.generate(PROMPT, options(**fields, num_draft_tokens=k))
        finally:
            release.set()
        assert generation.token_ids[0] == wanted
        assert "draft_deadline" in generation.finished[0].speculation.fallback_rounds
        await stack.all_pages_free()


async def test_a_draft_replaced_by_another_model_changes_no_token() -> None:
    """The draft's service goes in the middle; another one, with another model, takes over."""
    async with running_stack(num_drafts=2) as stack:
        stack.drafts[1].decoder._seed = 41  # type: ignore[attr-defined]  # a fake, not used yet
        fields = {"seed": 8, "max_tokens": 100}
        wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
        found: list[int] = []
        request = options(**fields, num_draft_tokens=3).request(PROMPT)
        num_passes = [0, 0]
        async for event in stack.client.stream_request(request):
            if isinstance(event, Chunk):
                found.extend(event.token_ids)
                if event.round == 5:
                    num_passes = [len(d.decoder.calls) for d in stack.drafts]  # type: ignore[attr-defined]  # a fake
                    used = int(num_passes[1] > num_passes[0])
                    stack.drafts[used].engine._desk.draining = True
                    stack.drafts[used].links.announce_drain()
                    stack.drafts[used].links.end_all()
        assert found == wanted
        other = stack.drafts[1 - used].decoder
        assert len(other.calls) > num_passes[1 - used] + 5  # type: ignore[attr-defined]  # a fake


@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_a_target_restarted_with_nothing_cached_changes_no_token(decide_at: str) -> None:
    """Links cut and the prefix cache gone, at several rounds: rebuilt from the tokens alone."""
    async with running_stack() as stack:
        fields = {"seed": 8, "max_tokens": 60, "decide_at": decide_at}
        wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
        found: list[int] = []
        (target,) = stack.targets
        request = options(**fields, num_draft_tokens=3).request(PROMPT)
        async for event in stack.client.stream_request(request):
            if isinstance(event, Chunk):
                found.extend(event.token_ids)
                if event.round in (2, 7, 11):
                    target.links.end_all()
                    target.engine._inbox.put(lambda: target.pool.forget_cached() and None)
        assert found == wanted
        await stack.all_pages_free()


@pytest.mark.parametrize("rule", ["coupled", "residual"])
@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_preempted_requests_give_the_tokens_they_give_with_room(
    decide_at: str, rule: str
) -> None:
    """Six requests in a target pool for about two: every one ends with the tokens it has alone."""
    fields = {"decide_at": decide_at, "rule": rule, "num_draft_tokens": 3, "max_tokens": 40}
    tight = peers.Setup(num_pages=26, page_size=4)
    roomy = peers.Setup(page_size=4)
    async with running_stack(setup=tight, draft_setup=roomy, links=PATIENT) as stack:
        alone = [await tokens_of(stack, seed=seed, **fields) for seed in range(6)]
        assert stack.targets[0].engine._scheduler.num_preemptions == 0
        together = await asyncio.gather(
            *(tokens_of(stack, seed=seed, **fields) for seed in range(6))
        )
        assert together == alone
        assert stack.targets[0].engine._scheduler.num_preemptions > 0
        await stack.all_pages_free()
        stack.targets[0].pool.check_integrity()
