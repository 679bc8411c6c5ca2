"""Benchmarks of draft rows, of their check and of the report, at serving batches.

Rows resemble a language model's: frequent tokens have low ids. `draft*` is one draft step,
`redraw*` the check of 4 candidates a session, `round1`/`round64` the target's whole sampling on
sparse rows of up to 1024 ids: check, decision, report. Checks: ids of the reference's truncation
and the token its race draws from the very weights written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import reference
from kernels.bench import Case, Workload, floor_ms
from kernels.draft_rows import AS_SENT, DraftedRows, DraftKeys, draft_rows
from kernels.redraw import redraw
from kernels.row_report import row_report
from kernels.sampling import DraftKind, DraftRows, Outcome, Round, accept, workspace
from kernels.streams import Purpose

BUCKET, SMALL_VOCAB, LARGE_VOCAB = 4, 49152, 128256
FIRST_POSITION = 500
CHECKED_ROWS = 2


def _logits(rows: int, vocab_size: int, seed: int, spread: float = 1.6) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.randn(rows, vocab_size, generator=generator, device="cuda") * spread
    rank = torch.arange(vocab_size, device="cuda") + 5.0
    return (scores - 0.9 * rank.log()).to(torch.bfloat16)


def _keys(rows: int, seed: int, index: int = 0) -> DraftKeys:
    position = torch.full((rows,), FIRST_POSITION, dtype=torch.int32, device="cuda")
    return DraftKeys(
        torch.arange(rows, device="cuda") + 1000 * seed,
        position + index,
        position,
        torch.zeros_like(position),
        torch.ones(rows, device="cuda"),
    )


def _check_rows(logits: Tensor, drafted: DraftedRows, keys: DraftKeys) -> None:
    assert not bool(drafted.status.any())
    for index in range(min(CHECKED_ROWS, logits.shape[0])):
        vocab_size = logits.shape[1]
        weights = reference.shape(logits[index].float().cpu(), reference.Shaping(), vocab_size)
        ids, _, _ = reference.truncate(weights, AS_SENT.dropped_mass, AS_SENT.max_ids)
        count = int(drafted.num_ids[index])
        sent_ids = drafted.ids[index, :count].cpu().long()
        assert torch.equal(sent_ids, ids), f"row {index}: {count} ids, expected {ids.numel()}"
        sent = drafted.weights[index, :count].cpu()
        expected = reference.race(
            sent, int(keys.seeds[index]), FIRST_POSITION, FIRST_POSITION, Purpose.PROPOSE, sent_ids
        )
        assert int(drafted.tokens[index]) == expected


def _draft(rows: int, vocab_size: int, seed: int) -> Workload:
    logits, keys = _logits(rows, vocab_size, seed), _keys(rows, seed)
    scratch = workspace(rows, "cuda")
    out = DraftedRows.empty(rows, AS_SENT.max_ids, "cuda")

    def run() -> None:
        draft_rows(logits, keys, vocab_size, scratch, out=out)

    def eager() -> Tensor:
        probs = logits.float().softmax(-1)
        top = probs.topk(AS_SENT.max_ids, -1)
        return (top.values / torch.empty_like(top.values).exponential_()).argmax(-1)

    outputs = (out.tokens, out.ids, out.weights, out.reports, out.dropped_mass)
    return Workload(
        run, {"eager top-k": eager}, outputs, check=lambda: _check_rows(logits, out, keys)
    )


def _proposed(batch: int, seed: int) -> tuple[Tensor, Round, DraftRows]:
    """(target logits, round, sparse rows) whose candidates the draft op drew."""
    target = _logits(batch * (BUCKET + 1), LARGE_VOCAB, seed)
    by_session = target.view(batch, BUCKET + 1, LARGE_VOCAB)
    scratch = workspace(batch, "cuda")
    steps = []
    for index in range(BUCKET):
        noise = torch.randn(batch, LARGE_VOCAB, device="cuda") * 0.5
        row = (by_session[:, index].float() + noise).to(torch.bfloat16)
        steps.append(draft_rows(row, _keys(batch, seed, index), LARGE_VOCAB, scratch))
    keys = _keys(batch, seed)
    round_ = Round(
        candidates=torch.stack([step.tokens for step in steps], 1),
        num_candidates=torch.full_like(keys.rules, BUCKET),
        seeds=keys.seeds,
        base_lens=keys.base_lens,
        rules=keys.rules,
        temperatures=keys.temperatures,
        stop_ids=torch.full((batch, 2), -1, dtype=torch.int32, device="cuda"),
    )
    weights = torch.stack([step.weights for step in steps], 1)
    ids = torch.stack([step.ids for step in steps], 1)
    return target, round_, DraftRows(DraftKind.SPARSE, weights, ids=ids)


def _redraw(batch: int, seed: int) -> Workload:
    _, round_, rows = _proposed(batch, seed)
    scratch = workspace(batch, "cuda")
    last: list[Tensor] = []

    def run() -> None:
        assert rows.ids is not None
        last[:] = redraw(
            rows.ids, rows.rows, round_.candidates, round_.num_candidates, round_.seeds,
            round_.base_lens, round_.rules, LARGE_VOCAB, scratch,
        )  # fmt: skip

    def check() -> None:
        assert bool((last[0] == -1).all()), "the draft's own candidates must be drawn again"
        assert bool((last[1] == BUCKET).all())

    return Workload(run, check=check)


def _accept(batch: int, seed: int, reports: bool) -> Workload:
    target, round_, rows = _proposed(batch, seed)
    scratch = workspace(batch, "cuda")
    last: list[Outcome] = []

    def run() -> None:
        assert rows.ids is not None
        if reports:
            redraw(
                rows.ids, rows.rows, round_.candidates, round_.num_candidates, round_.seeds,
                round_.base_lens, round_.rules, LARGE_VOCAB, scratch,
            )  # fmt: skip
        last[:] = [accept(target, round_, rows, LARGE_VOCAB, scratch)]
        if reports:
            row_report(target, round_, rows, last[0], LARGE_VOCAB)

    return Workload(run, check=lambda: _check_accepted(last[0]))


def _check_accepted(outcome: Outcome) -> None:
    assert not bool(outcome.status.any())
    assert bool((outcome.num_emitted == outcome.num_accepted + 1).all())


def _case(
    name: str, make: Callable[[int], Workload], num_bytes: float, target_ms: float | None = None
) -> Case:
    return Case(name, make, floor_ms(num_bytes), target_ms, graph=True, num_sets=6)


def _row_bytes(rows: int, vocab_size: int) -> float:
    return rows * (2.0 * vocab_size + 8.0 * AS_SENT.max_ids)


CASES = [
    _case("draft1", lambda seed: _draft(1, SMALL_VOCAB, seed), _row_bytes(1, SMALL_VOCAB), 0.025),
    _case("draft4", lambda seed: _draft(4, SMALL_VOCAB, seed), _row_bytes(4, SMALL_VOCAB)),
    _case(
        "draft1-128k", lambda seed: _draft(1, LARGE_VOCAB, seed), _row_bytes(1, LARGE_VOCAB), 0.040
    ),
    _case(
        "draft64-128k", lambda seed: _draft(64, LARGE_VOCAB, seed), _row_bytes(64, LARGE_VOCAB),
        0.150,
    ),
    _case("redraw1", lambda seed: _redraw(1, seed), 8.0 * BUCKET * AS_SENT.max_ids),
    _case("redraw64", lambda seed: _redraw(64, seed), 64 * 8.0 * BUCKET * AS_SENT.max_ids),
    _case(
        "accept1-sparse", lambda seed: _accept(1, seed, False),
        _row_bytes(BUCKET + 1, LARGE_VOCAB),
    ),
    _case("round1", lambda seed: _accept(1, seed, True), _row_bytes(BUCKET + 1, LARGE_VOCAB)),
    _case(
        "round64", lambda seed: _accept(64, seed, True), 64 * _row_bytes(BUCKET + 1, LARGE_VOCAB)
    ),
]  # fmt: skip
