"""What is reported of a decided round: the figures of the reference, for judged rows alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels import row_report as row_report_module
from kernels.configs.sampling import Launch
from kernels.draft_rows import DraftKeys, draft_rows
from kernels.reference_rows import overlap as overlap_of
from kernels.row_report import RowReport, row_report
from kernels.sampling import DraftKind, DraftRows, Outcome, Round, Rule, accept, workspace
from kernels.streams import Purpose
from tests.kernels.rounds import round_of, shaped

BUCKET = 3
RULES = [Rule.RESIDUAL, Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY, Rule.RESIDUAL, Rule.RESIDUAL]
TEMPERATURES = [0.8, 1.0, 1.3, 1.0, 0.5, 1.0]
NAMES = ("max_probs", "is_argmax", "target_probs", "draft_probs", "overlaps")


@functools.cache
def decided(
    device: str, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Round, DraftRows, Outcome]:
    """A mixed batch, not to be changed: its rows are those of `draft_rows`; one slot is unused."""
    generator = torch.Generator().manual_seed(seed)
    shape = (6, BUCKET + 1, vocab_size)
    target = torch.randn(shape, generator=generator) * 2.0
    noise = torch.randn(shape, generator=generator) * 0.5
    draft = (target + noise).to(dtype).to(device)
    logits = target.view(-1, vocab_size).to(dtype).to(device)
    round_ = round_of(
        torch.zeros(6, BUCKET, dtype=torch.int64, device=device),
        num_candidates=[3, 1, 3, 2, 0, -1],
        seeds=[5 + seed, -7, 2**40, 99, 12345, 3],
        rules=RULES,
        temperatures=TEMPERATURES,
    )
    steps = []
    for i in range(BUCKET):
        keys = DraftKeys(
            round_.seeds,
            round_.base_lens + i,
            round_.base_lens,
            round_.rules,
            round_.temperatures,
        )
        steps.append(draft_rows(draft[:, i], keys, vocab_size, workspace(6, device)))
    rows = DraftRows(
        DraftKind.SPARSE,
        torch.stack([step.weights for step in steps], 1),
        ids=torch.stack([step.ids for step in steps], 1),
    )
    round_ = replace(round_, candidates=torch.stack([step.tokens for step in steps], 1).long())
    outcome = accept(logits, round_, rows, vocab_size, workspace(6, device))
    assert not bool(outcome.status.any())
    return logits, round_, rows, outcome


def assert_report(
    report: RowReport, logits: Tensor, round_: Round, rows: DraftRows, outcome: Outcome,
    vocab_size: int, bars: Tensor | None = None,
) -> None:  # fmt: skip
    """Every figure as `target_service.verifier` computes it; 0 for everything else."""
    assert rows.ids is not None
    for session in range(outcome.tokens.shape[0]):
        emitted = int(outcome.num_emitted[session])
        num_judged = min(emitted, int(round_.num_candidates[session]))
        rule = round_.rules[session]
        assert not bool(report.faults[session].any())
        assert not bool(report.max_probs[session, emitted:].any())
        assert not bool(report.is_argmax[session, emitted:].any())
        for name in NAMES[2:]:
            assert not bool(getattr(report, name)[session, num_judged:].any()), name
        for index in range(emitted):
            scores = logits[session * (BUCKET + 1) + index].cpu().float()[:vocab_size]
            if bars is not None:
                scores = scores.masked_fill(scores < bars[session, index].cpu(), -torch.inf)
            temperature = 0.0 if rule == Rule.GREEDY else float(round_.temperatures[session])
            weights = shaped(scores, temperature, vocab_size)
            law = weights.double() / float(reference.total(weights))
            token = int(outcome.tokens[session, index])
            approx = pytest.approx
            assert float(report.max_probs[session, index]) == approx(float(law.max()), rel=1e-5)
            lowest = reference.lowest_argmax(scores)
            assert int(report.is_argmax[session, index]) == int(token == lowest)
            if index >= num_judged:
                continue
            candidate = int(round_.candidates[session, index])
            assert float(report.target_probs[session, index]) == approx(
                float(law[candidate]), rel=1e-5
            )
            draft = torch.zeros(vocab_size)
            if rule == Rule.RESIDUAL:
                ids = rows.ids[session, index].cpu().long()
                own = rows.rows[session, index].cpu().float()
                draft[ids[ids >= 0]] = own[ids >= 0]
                share = float(draft[candidate]) / float(reference.total(draft))
                overlap = overlap_of(weights, draft)
            else:
                share = overlap = 0.0
            assert float(report.draft_probs[session, index]) == approx(share, rel=1e-5)
            assert float(report.overlaps[session, index]) == approx(overlap, rel=1e-5)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(900, torch.float32), (9001, torch.bfloat16)])
def test_figures_are_those_of_the_verifier(
    device: str, vocab_size: int, dtype: torch.dtype
) -> None:
    """Mixed rules, lengths and an unused slot: max p, argmax, p(x), q(x), overlap of each row."""
    logits, round_, rows, outcome = decided(device, vocab_size, dtype=dtype)
    report = row_report(logits, round_, rows, outcome, vocab_size)
    assert_report(report, logits, round_, rows, outcome, vocab_size)
    assert bool((report.overlaps > 0).any())
    assert bool((report.is_argmax == 0).any())


def test_filters_shape_the_rows_reported(device: str) -> None:
    """p is the row after its thresholds: a candidate below them has p = 0."""
    vocab_size = 3000
    logits, round_, rows, _ = decided(device, vocab_size, seed=2)
    bars = torch.full((6, BUCKET + 1), 3.0, device=device)
    round_ = replace(round_, thresholds=bars)
    outcome = accept(logits, round_, rows, vocab_size, workspace(6, device))
    report = row_report(logits, round_, rows, outcome, vocab_size)
    assert_report(report, logits, round_, rows, outcome, vocab_size, bars)


def test_the_lowest_of_equal_maxima_is_the_argmax(device: str) -> None:
    """Equal largest scores in different leaves: only the lowest id counts as the argmax."""
    vocab_size = 20_000
    logits = torch.full((2, vocab_size), -3.0, dtype=torch.float16, device=device)
    logits[:, [9_000, 12_345, 19_999]] = 40.0
    largest = torch.tensor([9_000, 12_345, 19_999])
    winners = {
        reference.race(torch.ones(3), seed, 100, 100, Purpose.BONUS, largest): seed
        for seed in range(40)
    }
    seeds = [winners[9_000], winners[19_999]]
    round_ = round_of(torch.zeros(2, 0, dtype=torch.int64, device=device), seeds=seeds)
    outcome = accept(logits, round_, None, vocab_size, workspace(2, device))
    report = row_report(logits, round_, None, outcome, vocab_size)
    assert outcome.tokens[:, 0].tolist() == [9_000, 19_999]
    assert report.is_argmax[:, 0].tolist() == [1, 0]
    torch.testing.assert_close(report.max_probs.cpu(), torch.full((2, 1), 1 / 3))


def test_a_round_without_draft_rows_reports_no_overlap(device: str) -> None:
    """Coupled sessions alone: p(x) is reported, q(x) and overlap are 0."""
    vocab_size = 900
    logits, round_, _, _ = decided(device, vocab_size)
    round_ = replace(round_, rules=torch.full_like(round_.rules, Rule.COUPLED))
    outcome = accept(logits, round_, None, vocab_size, workspace(6, device))
    report = row_report(logits, round_, None, outcome, vocab_size)
    assert bool((report.target_probs > 0).any())
    assert not bool(report.draft_probs.any())
    assert not bool(report.overlaps.any())


def test_faulty_sessions_report_nothing(device: str) -> None:
    """A session that emits nothing has zeros everywhere; its neighbours keep their figures."""
    vocab_size = 900
    logits, round_, rows, outcome = decided(device, vocab_size)
    expected = row_report(logits, round_, rows, outcome, vocab_size)
    unjudged = (outcome.num_emitted <= round_.num_candidates).nonzero()[-1, 0]
    last = int(round_.num_candidates[unjudged])
    assert int(unjudged) > 0
    logits = logits.clone()
    logits[0, 5] = torch.nan
    logits[unjudged * (BUCKET + 1) + last, 7] = torch.inf
    with np.errstate(invalid="ignore"):
        outcome = accept(logits, round_, rows, vocab_size, workspace(6, device))
        report = row_report(logits, round_, rows, outcome, vocab_size)
    assert int(report.faults.sum()) == 2
    assert report.faults[0, 0] == 1
    assert report.faults[unjudged, last] == 1
    for name in NAMES:
        assert not bool(getattr(report, name)[0].any())
        assert torch.equal(getattr(report, name)[1:], getattr(expected, name)[1:])


def test_figures_are_written_where_the_caller_wants(device: str) -> None:
    """Slices of wider buffers take the figures and nothing around them changes."""
    vocab_size = 900
    logits, round_, rows, outcome = decided(device, vocab_size)
    expected = row_report(logits, round_, rows, outcome, vocab_size)
    wide = [
        torch.full((6, *(size + 2 for size in part.shape[1:2]), *part.shape[2:]), 7.0).to(part)
        for part in (expected.max_probs, expected.is_argmax, expected.faults, expected.judged)
    ]
    out = RowReport(*(part[:, 1:-1] for part in wide))
    assert row_report(logits, round_, rows, outcome, vocab_size, out) is out
    for name in NAMES:
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    assert all(bool((part[:, [0, -1]] == 7).all()) for part in wide)
    with pytest.raises(ValueError, match="out"):
        row_report(logits, round_, rows, outcome, vocab_size, RowReport.empty(6, 1, device))


def test_rows_may_lie_anywhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """first_rows, strides and the launch change no bit."""
    vocab_size = 900
    logits, round_, rows, outcome = decided(device, vocab_size)
    expected = row_report(logits, round_, rows, outcome, vocab_size)
    order = torch.tensor([20, 4, 16, 0, 12, 8], dtype=torch.int32, device=device)
    moved = torch.empty(24, vocab_size + 3, device=device)
    for session, first in enumerate(order.tolist()):
        own = logits[session * (BUCKET + 1) : (session + 1) * (BUCKET + 1)]
        moved[first : first + BUCKET + 1, 1 : vocab_size + 1] = own
    moved_round = replace(round_, first_rows=order)
    monkeypatch.setattr(row_report_module, "draft_launch", lambda _: Launch(4))
    view = moved[:, 1 : vocab_size + 1]
    outcome = accept(view, moved_round, rows, vocab_size, workspace(6, device))
    report = row_report(view, moved_round, rows, outcome, vocab_size)
    for name in NAMES:
        assert torch.equal(getattr(report, name), getattr(expected, name)), name


def test_only_sparse_rows_are_reported(device: str) -> None:
    """Other draft rows are refused by name."""
    logits, round_, rows, outcome = decided(device, 64)
    dense = DraftRows(DraftKind.WEIGHTS, rows.rows)
    with pytest.raises(ValueError, match="WEIGHTS"):
        row_report(logits, round_, dense, outcome, 64)


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema and fake of specmesh::row_report agree with what it does."""
    logits, round_, rows, outcome = decided(device, 64)
    out = RowReport.empty(6, BUCKET, device)
    arguments = (
        logits, round_.candidates, round_.num_candidates, round_.rules, round_.temperatures, None,
        None, rows.rows, rows.ids, outcome.tokens, outcome.counts, outcome.leaf_exponents,
        outcome.leaf_masses, 64, out.max_probs, out.is_argmax, out.faults, out.judged,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.specmesh.row_report.default, arguments,
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
