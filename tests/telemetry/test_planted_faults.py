"""Which detector finds which planted fault, and after how many rounds, through real services.

The numbers are those of the table "Detectors" in coordinator/README.md. Seeds are fixed, requests
are counted in one order, so each number is reproducible; bounds leave room for other rounding.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.reference_rows import NEAR_TIE
from specmesh.client import GenerateOptions
from specmesh.config import LinkSettings, SpeculationSettings
from specmesh.round_record import RoundRecord
from target_service.candidates import RedrawCheck
from tests.e2e.stack import Stack, recorded_rounds, running_stack
from tests.exact.grpc_sessions import Generation, serve
from tests.exact.tiny_llama import tiny_llama
from tests.telemetry.planted import (
    BONUS_FROM_PREVIOUS_ROW,
    COLD_OWN_NOISE,
    COLD_SHARED_NOISE,
    RESIDUAL_FROM_P,
    REUSED_NOISE,
    plant,
)
from tests.telemetry.rounds import first_alarms

PROMPT = [1, 2, 3, 4, 5]
# A deadline must not decide how many candidates a round has, however loaded the machine is.
PATIENT = LinkSettings(draft_deadline_s=60.0)


async def served(stack: Stack, seed: int, num_draft_tokens: int, max_tokens: int) -> Any:
    """The statistics of one request under the residual rule."""
    options = GenerateOptions(
        seed=seed, rule="residual", num_draft_tokens=num_draft_tokens, max_tokens=max_tokens,
        ignore_eos=True,
    )  # fmt: skip
    return (await stack.client.generate(PROMPT, options)).finished[0].speculation


# ---------------------------------------------------------------- re-draw check

NUM_REQUESTS = 24
BLOCK = 4


async def refuted_in(fault: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafted round in which each request's draft was refuted and switched off."""
    differs = plant(fault, monkeypatch)
    found = []
    async with running_stack(links=PATIENT) as stack:
        for seed in range(NUM_REQUESTS):
            stats = await served(stack, seed, BLOCK, max_tokens=60)
            assert set(stats.fallback_rounds) <= {"draft_redraw_mismatch", "budget"}
            assert stats.fallback_rounds["draft_redraw_mismatch"] > 0
            blocks = [differs[key] for key in sorted(differs) if key[0] == seed]
            assert blocks == [False] * (len(blocks) - 1) + [True]
            assert len(blocks) == stats.num_draft_tokens / BLOCK
            found.append(len(blocks))
        counter = "specmesh_redraw_mismatches_total"
        assert stack.replica.metrics.registry.get_sample_value(counter) == NUM_REQUESTS
        await stack.all_pages_free()
    return found


async def test_a_cold_draft_is_refuted_in_its_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled at 0.7, sent at 1, sparse rows: off after the first round of each of 24 requests."""
    assert await refuted_in(COLD_OWN_NOISE, monkeypatch) == [1] * NUM_REQUESTS


async def test_a_cold_draft_on_the_right_noise_is_refuted_at_its_first_other_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the product's own noise most tokens are an honest draft's, which harms nothing; the
    first block with another one is the last, and is never judged (here: the first block in 13 of
    24 requests, the eighth at most)."""
    rounds = await refuted_in(COLD_SHARED_NOISE, monkeypatch)
    assert rounds.count(1) >= 6
    assert max(rounds) <= 12


# ---------------------------------------------------------------- audit


async def audited(
    fault: str, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> list[RoundRecord]:
    """Records of all rounds, every one audited, of requests served one after another."""
    plant(fault, monkeypatch)
    records = recorded_rounds(monkeypatch)
    speculation = SpeculationSettings(audit_ratio=1.0)
    async with running_stack(links=PATIENT, speculation=speculation) as stack:
        stats = [await served(stack, seed, 2, max_tokens=60) for seed in range(num_requests)]
        # A round is recorded when it is audited, which may be after its request has ended.
        num_records = sum(1 + one.num_rounds for one in stats)
        async with asyncio.timeout(10):
            while len(records) < num_records:
                await asyncio.sleep(0.01)
    sessions = list(dict.fromkeys(record.session_id for record in records))
    records.sort(key=lambda record: (sessions.index(record.session_id), record.round_index))
    drafted = [record for record in records if record.num_draft_tokens]
    assert all(record.audited for record in drafted)
    return drafted


@pytest.mark.parametrize(
    ("fault", "first", "share"),
    [
        pytest.param(RESIDUAL_FROM_P, 20, 0.1, id=RESIDUAL_FROM_P),
        pytest.param(BONUS_FROM_PREVIOUS_ROW, 20, 0.2, id=BONUS_FROM_PREVIOUS_ROW),
        pytest.param(REUSED_NOISE, 20, 0.2, id=REUSED_NOISE),
    ],
)
async def test_an_audit_finds_a_wrong_decision(
    fault: str, first: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that draws wrongly differs from the audit within `first` rounds, by a margin that
    no rounding explains, and in at least `share` of all."""
    records = await audited(fault, 4, monkeypatch)
    wrong = [number for number, one in enumerate(records, start=1) if one.audit_mismatch]
    assert wrong[0] <= first
    assert len(wrong) / len(records) > share
    margins = [one.audit_margin for one in records if one.audit_mismatch]
    assert all(margin is None or margin > NEAR_TIE for margin in margins)


async def test_an_audit_of_a_correct_target_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rounds than any fault above was given, and no mismatch."""
    records = await audited("none", 8, monkeypatch)
    assert len(records) > 200
    assert not any(record.audit_mismatch for record in records)
    assert not any(record.redraw_mismatch is not None for record in records)


# ---------------------------------------------------------------- z-scores

VOCAB_SIZE = 16
NUM_SEQUENCES, SEQUENCE_LEN = 40, 60


class Uncertain:
    """A decoder with half the logits of another: what a smaller model is beside a larger one."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Any, cache: Any) -> torch.Tensor:
        """Logits of the pass, halved."""
        logits: torch.Tensor = self._decoder.forward(batch, cache)
        return 0.5 * logits


async def run_unchecked(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, int], int]:
    """Alarms of a tiny decoder pair over gRPC with the re-draw check off."""
    plant(fault, monkeypatch)
    monkeypatch.setattr(RedrawCheck, "find_mismatch", lambda *_: None)
    torch.set_num_threads(1)
    target = tiny_llama(folder / "target", seed=7, vocab_size=VOCAB_SIZE)
    noisy = tiny_llama(folder / "draft", seed=7, noise_seed=5, noise=0.1, vocab_size=VOCAB_SIZE)
    generations = [
        Generation(
            session_id=str(seed), prompt=[1, 3], max_tokens=SEQUENCE_LEN, next_k=lambda _: 2,
            seed=seed, vocab_size=VOCAB_SIZE,
        )
        for seed in range(NUM_SEQUENCES)
    ]  # fmt: skip
    draft: Any = Uncertain(noisy)
    await serve(target, draft, [generations], page_size=64)
    rounds = [one for each in generations for one in each.reports if one.overlaps]
    return first_alarms(rounds), len(rounds)


@pytest.mark.parametrize(
    ("fault", "score"),
    [
        (COLD_OWN_NOISE, "acceptance"),
        (COLD_SHARED_NOISE, "acceptance"),
        (RESIDUAL_FROM_P, "argmax"),
        (BONUS_FROM_PREVIOUS_ROW, "argmax"),
    ],
)
async def test_a_score_finds_a_fault_with_the_check_off(
    fault: str, score: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes alone give each fault away within 1,000 rounds, a fifth of what is asked for."""
    alarms, _ = await run_unchecked(fault, tmp_path, monkeypatch)
    assert alarms[score] <= 1_000


async def test_a_request_repeated_with_its_seed_says_nothing_more() -> None:
    """The same tokens again are no new evidence, under either rule; a request without a seed is,
    each token of it."""
    async with running_stack(links=PATIENT) as stack:
        law = stack.replica.metrics.law
        for rule in ("coupled", "residual"):
            options = GenerateOptions(
                seed=3, rule=rule, num_draft_tokens=2, max_tokens=20, ignore_eos=True
            )
            answers = [await stack.client.generate(PROMPT, options) for _ in range(2)]
            assert answers[0].text == answers[1].text
        assert law.acceptance.num_observed == law.argmax.num_observed == 0
        await stack.client.generate(PROMPT, replace(options, seed=None))
        assert law.acceptance.num_observed > 0
        assert law.argmax.num_observed >= options.max_tokens


async def test_no_score_moves_without_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, nothing planted: silence."""
    alarms, num_rounds = await run_unchecked("none", tmp_path, monkeypatch)
    assert num_rounds > 1_000
    assert alarms == {}
