"""Benchmarks of draw, accept and shaping: the named shapes S64, S64-sparse, S64-f and kin.

64 sessions of 4 candidates over 128256 ids, bfloat16 logits whose draft resembles the target.
Anchors: the same decision written in torch, eager and compiled, with an exponential race for the
draw, and with sorted filters for S64-f. Checks: whole outcomes of two sessions against
`kernels/reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels import reference
from kernels.bench import Case, Workload, floor_ms
from kernels.reference import Shaping
from kernels.sampling import (
    DraftKind,
    DraftRows,
    Outcome,
    Round,
    Rule,
    accept,
    draw,
    workspace,
)
from kernels.shaping import Filters, thresholds

BATCH, BUCKET, VOCAB = 64, 4, 128256
SPARSE_IDS = 256
TARGET_BYTES = BATCH * (BUCKET + 1) * VOCAB * 2
DRAFT_BYTES = BATCH * BUCKET * VOCAB * 2
CLOSING_BYTES = BATCH * VOCAB * 2
CHECKED_SESSIONS = 2
FILTERS = Shaping(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02)


def _logits(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (BATCH, BUCKET + 1, VOCAB)
    target = torch.randn(shape, generator=generator, device="cuda") * 2.5
    noise = torch.randn(shape, generator=generator, device="cuda") * 0.5
    draft = (target + noise)[:, :BUCKET].to(torch.bfloat16).contiguous()
    return target.to(torch.bfloat16).view(-1, VOCAB), draft


def _round(seed: int, temperature: float) -> Round:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((BATCH,), value, dtype=dtype, device="cuda")

    return Round(
        candidates=torch.zeros(BATCH, BUCKET, dtype=torch.int64, device="cuda"),
        num_candidates=full(BUCKET, torch.int32),
        seeds=torch.arange(BATCH, device="cuda") + 1000 * seed,
        base_lens=full(500, torch.int32),
        rules=full(Rule.RESIDUAL, torch.int32),
        temperatures=full(temperature, torch.float32),
        stop_ids=torch.full((BATCH, 2), -1, dtype=torch.int32, device="cuda"),
    )


def _propose(draft: Tensor, round_: Round, bars: Tensor | None) -> tuple[Round, Tensor, Tensor]:
    """(round with candidates drawn from draft, exponents, masses)."""
    scratch = workspace(BATCH, "cuda")
    columns = [
        draw(
            draft[:, i], round_.seeds, round_.base_lens + i, round_.base_lens, round_.rules,
            round_.temperatures, VOCAB, scratch, None if bars is None else bars[:, i].contiguous(),
        )
        for i in range(BUCKET)
    ]  # fmt: skip
    candidates = torch.stack([column.tokens for column in columns], 1)
    exponents = torch.stack([column.exponents for column in columns], 1)
    masses = torch.stack([column.masses for column in columns], 1)
    return replace(round_, candidates=candidates), exponents, masses


def _check(
    outcome: Outcome, target: Tensor, round_: Round, rows: Callable[[int, int], Tensor],
    shaping: Shaping,
) -> None:  # fmt: skip
    """Compare sessions with the reference; rows(session, i) is the draft's float32 row."""
    assert not bool(outcome.status.any())
    for session in range(CHECKED_SESSIONS):
        first = session * (BUCKET + 1)
        p = [
            reference.shape(target[first + i].float().cpu(), shaping, VOCAB)
            for i in range(BUCKET + 1)
        ]
        q = [rows(session, i) for i in range(BUCKET)]
        expected = reference.run(
            reference.decide(p, q, round_.candidates[session].tolist()),
            reference.philox_answer(int(round_.seeds[session]), int(round_.base_lens[session])),
        )
        count = int(outcome.num_emitted[session])
        got = tuple(outcome.tokens[session, :count].tolist())
        assert got == expected.tokens, f"session {session}: {got}, expected {expected.tokens}"


def _torch_accept(p: Tensor, q: Tensor, candidates: Tensor) -> Tensor:
    """The decision in plain torch, from probability rows [batch, bucket(+1), vocab]."""
    picked = candidates.long()[..., None]
    held = q.gather(2, picked)[..., 0]
    offered = p[:, :BUCKET].gather(2, picked)[..., 0]
    kept = torch.rand_like(held) * held < offered
    num = kept.long().cumprod(1).sum(1)
    row = p.gather(1, num[:, None, None].expand(-1, 1, VOCAB))[:, 0]
    draft_row = q.gather(1, num.clamp(max=BUCKET - 1)[:, None, None].expand(-1, 1, VOCAB))[:, 0]
    surplus = (row - torch.where((num < BUCKET)[:, None], draft_row, 0.0)).clamp_min(0.0)
    surplus = torch.where(surplus.sum(1, keepdim=True) > 0, surplus, row)
    return (surplus / torch.empty_like(surplus).exponential_()).argmax(1)


def _torch_plain(target: Tensor, draft: Tensor, candidates: Tensor) -> Tensor:
    p = target.float().softmax(-1).view(BATCH, BUCKET + 1, VOCAB)
    return _torch_accept(p, draft.float().softmax(-1), candidates)


def _torch_filtered(target: Tensor, draft: Tensor, candidates: Tensor) -> Tensor:
    """Filters by one sort a row, as usually written; ties are split by sort order."""
    scores = target.float() / FILTERS.temperature
    ordered, order = scores.sort(-1, descending=True)
    ordered[:, FILTERS.top_k :] = -torch.inf
    probs = ordered.softmax(-1)
    outside = (probs.cumsum(-1) - probs >= FILTERS.top_p) | (probs < FILTERS.min_p * probs[:, :1])
    kept = torch.empty_like(scores).scatter_(1, order, ordered.masked_fill(outside, -torch.inf))
    p = kept.softmax(-1).view(BATCH, BUCKET + 1, VOCAB)
    return _torch_accept(p, (draft.float() / FILTERS.temperature).softmax(-1), candidates)


_compiled = torch.compile(_torch_plain, dynamic=False)


def _workload(
    target: Tensor, round_: Round, draft: DraftRows, check_rows: Callable[[int, int], Tensor],
    anchors: dict[str, Callable[[], object]],
) -> Workload:  # fmt: skip
    scratch = workspace(BATCH, "cuda")
    last: list[Outcome] = []

    def run() -> None:
        last[:] = [accept(target, round_, draft, VOCAB, scratch)]

    return Workload(
        run, anchors, check=lambda: _check(last[0], target, round_, check_rows, Shaping())
    )


def _dense(seed: int, carried: bool) -> Workload:
    target, draft = _logits(seed)
    round_, exponents, masses = _propose(draft, _round(seed, 1.0), None)
    rows = DraftRows(DraftKind.LOGITS, draft, temperatures=round_.temperatures)
    if carried:
        rows = replace(rows, exponents=exponents, masses=masses)
    return _workload(
        target, round_, rows,
        lambda session, i: reference.shape(draft[session, i].float().cpu(), Shaping(), VOCAB),
        {
            "eager": lambda: _torch_plain(target, draft, round_.candidates),
            "compiled": lambda: _compiled(target, draft, round_.candidates),
        },
    )  # fmt: skip


def _sparse(seed: int) -> Workload:
    target, draft = _logits(seed)
    top = draft.float().topk(SPARSE_IDS, -1)
    ids, order = top.indices.sort(-1)
    weights = (top.values - top.values[..., :1]).exp().gather(2, order)
    noise = torch.empty_like(weights).exponential_()
    candidates = ids.gather(2, (weights / noise).argmax(-1, keepdim=True))[..., 0]
    round_ = replace(_round(seed, 1.0), candidates=candidates)
    rows = DraftRows(DraftKind.SPARSE, weights, ids=ids.to(torch.int32))

    def dense_row(session: int, i: int) -> Tensor:
        row = torch.zeros(VOCAB)
        row[ids[session, i].cpu()] = weights[session, i].cpu()
        return row

    return _workload(target, round_, rows, dense_row, {})


def _filtered(seed: int) -> Workload:
    target, draft = _logits(seed)
    round_ = _round(seed, FILTERS.temperature)

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((BATCH,), value, dtype=dtype, device="cuda")

    filters = Filters(
        round_.temperatures, full(FILTERS.top_k, torch.int32), full(FILTERS.top_p),
        full(FILTERS.min_p),
    )  # fmt: skip
    bars = thresholds(draft.view(-1, VOCAB), filters, BUCKET, VOCAB)
    round_, _, _ = _propose(draft, round_, bars)
    rows = DraftRows(DraftKind.LOGITS, draft, temperatures=round_.temperatures, thresholds=bars)
    scratch = workspace(BATCH, "cuda")
    last: list[Outcome] = []

    def run() -> None:
        shaped = replace(round_, thresholds=thresholds(target, filters, BUCKET + 1, VOCAB))
        last[:] = [accept(target, shaped, rows, VOCAB, scratch)]

    def row(session: int, i: int) -> Tensor:
        return reference.shape(draft[session, i].float().cpu(), FILTERS, VOCAB)

    return Workload(
        run,
        {"eager, sorted": lambda: _torch_filtered(target, draft, round_.candidates)},
        check=lambda: _check(last[0], target, round_, row, FILTERS),
    )


def _nucleus(seed: int) -> Workload:
    """Thresholds alone, top-p 0.9 without top-k on a flat row: the hard case of the search."""
    target, _ = _logits(seed)
    ones = torch.ones(BATCH, device="cuda")
    filters = Filters(ones, torch.zeros_like(ones, dtype=torch.int32), 0.9 * ones, 0 * ones)
    last: list[Tensor] = []

    def run() -> None:
        last[:] = [thresholds(target, filters, BUCKET + 1, VOCAB)]

    def check() -> None:
        for row in (0, 77):
            expected = reference.shape(target[row].float().cpu(), Shaping(top_p=0.9), VOCAB) > 0
            kept = target[row].float().cpu() >= last[0].view(-1)[row].cpu()
            assert int((kept != expected).sum()) == 0

    return Workload(run, check=check)


def _draws(seed: int) -> Workload:
    _, draft = _logits(seed)
    round_ = _round(seed, 1.0)
    rows = draft.view(-1, VOCAB)[:BATCH]
    scratch = workspace(BATCH, "cuda")
    last: list[Tensor] = []

    def run() -> None:
        last[:] = [
            draw(
                rows, round_.seeds, round_.base_lens, round_.base_lens, round_.rules,
                round_.temperatures, VOCAB, scratch,
            ).tokens
        ]  # fmt: skip

    def check() -> None:
        for row in range(CHECKED_SESSIONS):
            weights = reference.shape(rows[row].float().cpu(), Shaping(), VOCAB)
            expected = reference.race(weights, int(round_.seeds[row]), 500, 500, 1)
            assert int(last[0][row]) == expected

    def eager() -> Tensor:
        probs = rows.float().softmax(-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    return Workload(run, {"eager": eager}, check=check)


CASES = [
    Case(
        "S64", lambda seed: _dense(seed, False), floor_ms(TARGET_BYTES + DRAFT_BYTES), 0.045,
        graph=True,
    ),
    Case(
        "S64-lse", lambda seed: _dense(seed, True), floor_ms(TARGET_BYTES + CLOSING_BYTES),
        graph=True,
    ),
    Case(
        "S64-sparse", _sparse, floor_ms(TARGET_BYTES + BATCH * BUCKET * SPARSE_IDS * 8), 0.032,
        graph=True,
    ),
    Case("S64-f", _filtered, floor_ms(TARGET_BYTES + DRAFT_BYTES), 0.150, graph=True),
    Case("nucleus320", _nucleus, floor_ms(TARGET_BYTES), graph=True),
    Case("draw64", _draws, floor_ms(CLOSING_BYTES), graph=True, num_sets=6),
]  # fmt: skip
