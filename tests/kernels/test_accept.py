"""Accept, residual and bonus in two launches: the decisions of the reference, and every trap."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference, sampling
from kernels.configs.sampling import Launch
from kernels.sampling import (
    DraftKind,
    DraftRows,
    Outcome,
    Rule,
    Status,
    accept,
    draw,
    workspace,
)
from kernels.streams import Purpose
from tests.kernels.rounds import (
    assert_same,
    decision,
    emitted,
    logits_draft,
    proposed,
    round_of,
    shaped,
)

BUCKET = 3
MIXED = [Rule.RESIDUAL, Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY, Rule.RESIDUAL, Rule.RESIDUAL]


def batch_of(
    device: str, vocab_size: int, seed: int = 0, spread: float = 0.6, batch: int = 6
) -> tuple[Tensor, Tensor]:
    """Target logits [batch * 4, vocab] and draft logits [batch, 3, vocab] that resemble them."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, BUCKET + 1, vocab_size, generator=generator) * 2.0
    noise = torch.randn(batch, BUCKET, vocab_size, generator=generator) * spread
    draft = target[:, :BUCKET] + noise
    return target.view(-1, vocab_size).to(device), draft.to(device)


def run(logits: Tensor, round_: sampling.Round, draft: DraftRows | None, vocab: int) -> Outcome:
    scratch = workspace(round_.candidates.shape[0], logits.device)
    outcome = accept(logits, round_, draft, vocab, scratch)
    assert not bool(scratch.any()), "a call must leave the workspace at zero"
    return outcome


@pytest.mark.parametrize("vocab_size", [1023, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batch_equals_the_reference(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    """Residual, coupled and greedy sessions of different k, and an unused slot, in one batch."""
    closings = set()
    for seed in range(2 if vocab_size < 2000 else 1):
        target, draft = (t.to(dtype) for t in batch_of(device, vocab_size, seed))
        round_ = round_of(
            torch.zeros(6, BUCKET, dtype=torch.int64, device=device),
            num_candidates=[3, 1, 3, 2, 0, -1],
            seeds=[5 + seed, -7, 2**40, 99, 12345, 3],
            base_lens=[17, 400, 3, 8, 9, 9],
            rules=MIXED,
            temperatures=[0.8, 1.0, 1.3, 1.0, 0.5, 1.0],
        )
        round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
        outcome = run(target, round_, logits_draft(draft, round_), vocab_size)
        assert not bool(outcome.status.any())
        for session in range(5):
            expected = decision(target, draft, round_, session, vocab_size)
            assert emitted(outcome, session) == expected.tokens
            assert outcome.num_accepted[session] == expected.num_accepted
            closings.add(expected.closing)
        assert emitted(outcome, 5) == ()
    assert closings >= {Purpose.RESIDUAL, Purpose.COUPLED, Purpose.BONUS}


@pytest.mark.parametrize(
    ("target", "draft", "temperatures", "accepts", "only_residual"),
    [
        ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3), (1.0, 1.0), (1.0, 0.6, 2 / 3), 0),
        ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), (1.0, 1.0), (0.2, 1.0, 1.0), 1),
        ((4.0, 1.0), (4.0, 1.0), (1.0, 2.0), (1.0, 0.6), 0),  # same logits, two temperatures
    ],
)
def test_theory_numbers_come_out_of_the_kernels(
    device: str,
    target: tuple[float, ...],
    draft: tuple[float, ...],
    temperatures: tuple[float, float],
    accepts: tuple[float, ...],
    only_residual: int,
) -> None:
    """Each candidate is kept iff its coin is below p/q, and every rejection gives the one token
    that holds residual mass."""
    size, num = len(target), 300 if device == "cuda" else 18
    candidates = torch.arange(num, device=device)[:, None] % size
    logits = torch.tensor(target, device=device).log().expand(2 * num, size)
    draft_logits = torch.tensor(draft, device=device).log().expand(num, 1, size)
    round_ = round_of(candidates, temperatures=[temperatures[0]] * num)
    rows = DraftRows(
        DraftKind.LOGITS,
        draft_logits,
        temperatures=torch.full((num,), temperatures[1], device=device),
    )
    outcome = run(logits, round_, rows, size)
    for session in range(num):
        candidate = session % size
        kept = reference.coin(session, 100, 100) < accepts[candidate]
        assert outcome.num_accepted[session] == int(kept)
        if not kept:
            assert emitted(outcome, session) == (only_residual,)
    assert 0 < int(outcome.num_accepted.sum()) < num


@pytest.mark.parametrize(
    ("judge", "close"),
    [
        (Launch(2), Launch(16, rows=4, per_program=2)),
        (Launch(8), Launch(4, rows=8, per_program=3)),
    ],
)
def test_outcome_does_not_depend_on_the_launch(
    device: str, judge: Launch, close: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves and tiles a program, and ids side by side, change no bit of the outcome."""
    vocab_size = 9001
    target, draft = batch_of(device, vocab_size, seed=4)
    round_ = round_of(
        torch.zeros(6, BUCKET, dtype=torch.int64, device=device), rules=MIXED, seeds=range(40, 46)
    )
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    rows = logits_draft(draft, round_)
    expected = run(target, round_, rows, vocab_size)
    monkeypatch.setattr(sampling, "judge_launch", lambda _: judge)
    monkeypatch.setattr(sampling, "close_launch", lambda *_: close)
    assert_same(run(target, round_, rows, vocab_size), expected)


def test_outcome_does_not_depend_on_batch_or_place(device: str) -> None:
    """A session alone, permuted in a batch, with other rows between, or in a longer bucket."""
    vocab_size = 2003
    target, draft = batch_of(device, vocab_size, seed=5)
    round_ = round_of(
        torch.zeros(6, BUCKET, dtype=torch.int64, device=device), rules=MIXED,
        num_candidates=[3, 2, 3, 3, 1, 3],
    )  # fmt: skip
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    expected = run(target, round_, logits_draft(draft, round_), vocab_size)
    order = torch.tensor([4, 0, 5, 2, 1, 3], device=device)
    columns = ("candidates", "num_candidates", "seeds", "base_lens", "rules", "temperatures")
    picked = {name: getattr(round_, name)[order] for name in (*columns, "stop_ids")}
    padded = torch.zeros(6, 5, dtype=torch.int64, device=device)
    padded[:, :BUCKET] = picked["candidates"]
    longer = torch.zeros(6, 5, vocab_size, device=device)
    longer[:, :BUCKET] = draft[order]
    shuffled = replace(round_, **picked)
    shuffled = replace(shuffled, candidates=padded, first_rows=(order * 4).to(torch.int32))
    moved = run(target, shuffled, logits_draft(longer, shuffled), vocab_size)
    for place, session in enumerate(order.tolist()):
        assert emitted(moved, place) == emitted(expected, session)
        assert torch.equal(moved.log_probs[place, :BUCKET], expected.log_probs[session])
    single = {name: getattr(round_, name)[1:2] for name in (*columns, "stop_ids")}
    alone = replace(round_, **single)
    result = run(target[4:8], alone, logits_draft(draft[1:2], alone), vocab_size)
    assert emitted(result, 0) == emitted(expected, 1)


def test_rows_of_any_strides_and_padded_width(device: str) -> None:
    """Non-contiguous rows off 16 bytes, with huge scores past the vocabulary, change nothing."""
    vocab_size = 1023
    target, draft = batch_of(device, vocab_size, seed=6)
    round_ = round_of(torch.zeros(6, BUCKET, dtype=torch.int64, device=device), rules=MIXED)
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    expected = run(target, round_, logits_draft(draft, round_), vocab_size)
    wide = torch.full((24, vocab_size + 130), 100.0, device=device)
    wide[:, 1 : vocab_size + 1] = target
    strided = torch.full((6, vocab_size + 10, BUCKET), 100.0, device=device)
    strided[:, :vocab_size] = draft.transpose(1, 2)
    rows = logits_draft(strided.transpose(1, 2), round_)
    assert_same(run(wide[:, 1:], round_, rows, vocab_size), expected)


def test_draft_weights_and_sparse_rows_decide_like_logits(device: str) -> None:
    """Dense float32 weights at any scale, and sparse rows, give the tokens of the reference."""
    vocab_size = 2003
    target, draft = batch_of(device, vocab_size, seed=7)
    round_ = round_of(
        torch.zeros(6, BUCKET, dtype=torch.int64, device=device), num_candidates=[3, 3, 2, 3, 1, 3]
    )
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    expected = run(target, round_, logits_draft(draft, round_), vocab_size)
    weights = torch.stack([shaped(row, 1.0, vocab_size) for row in draft.view(18, -1)])
    weights = weights.view(6, BUCKET, -1).to(device) * 37.5
    dense = run(target, round_, DraftRows(DraftKind.WEIGHTS, weights), vocab_size)
    assert torch.equal(dense.tokens, expected.tokens)
    torch.testing.assert_close(dense.log_probs, expected.log_probs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_rows_equal_the_reference(device: str, dtype: torch.dtype) -> None:
    """Draft rows of few ids: tokens of the reference, and of the same rows sent dense."""
    vocab_size, support = 2003, 40
    target, draft = batch_of(device, vocab_size, seed=8, batch=8)
    ids, values = [], []
    for row in draft.view(24, -1):
        keep, kept, _ = reference.truncate(shaped(row, 1.0, vocab_size), 0.0, support - 3)
        ids.append(torch.cat((keep, torch.full((3,), -1))))
        values.append(torch.cat((kept, torch.ones(3))))  # what padding holds must not matter
    sparse_ids = torch.stack(ids).view(8, BUCKET, support).to(torch.int32)
    sparse = torch.stack(values).view(8, BUCKET, support).to(dtype)
    dense = torch.zeros(8, BUCKET, vocab_size)
    inside = sparse_ids[..., :-3].long()
    dense.scatter_(2, inside, sparse[..., :-3].float())
    seeds, base_len = range(70, 78), 100
    candidates = torch.tensor(
        [
            [
                reference.race(dense[b, i], seeds[b], base_len + i, base_len, Purpose.PROPOSE)
                for i in range(BUCKET)
            ]
            for b in range(8)
        ]
    )
    round_ = round_of(candidates.to(device), seeds=seeds)
    sparse_rows = DraftRows(DraftKind.SPARSE, sparse.to(device), ids=sparse_ids.to(device))
    outcome = run(target, round_, sparse_rows, vocab_size)
    same = run(target, round_, DraftRows(DraftKind.WEIGHTS, dense.to(device)), vocab_size)
    assert torch.equal(outcome.tokens, same.tokens)
    rejections = 0
    for session in range(8):
        rows = [shaped(row, 1.0, vocab_size) for row in target[4 * session : 4 * session + 4]]
        expected = reference.run(
            reference.decide(rows, list(dense[session]), candidates[session].tolist()),
            reference.philox_answer(seeds[session], base_len),
        )
        assert emitted(outcome, session) == expected.tokens
        rejections += expected.closing is Purpose.RESIDUAL
    assert rejections


def test_masses_carried_from_the_draw_change_nothing(device: str) -> None:
    """Rows of logits whose exponent and mass came with the draw are not summed again."""
    vocab_size = 2003
    target, draft = batch_of(device, vocab_size, seed=9)
    round_ = round_of(torch.zeros(6, BUCKET, dtype=torch.int64, device=device))
    scratch = workspace(6, device)
    drawn = [
        draw(
            draft[:, i], round_.seeds, round_.base_lens + i, round_.base_lens, round_.rules,
            round_.temperatures, vocab_size, scratch,
        )
        for i in range(BUCKET)
    ]  # fmt: skip
    candidates = torch.stack([d.tokens for d in drawn], 1)
    round_ = replace(round_, candidates=candidates)
    rows = logits_draft(draft, round_)
    expected = run(target, round_, rows, vocab_size)
    carried = replace(
        rows,
        exponents=torch.stack([d.exponents for d in drawn], 1),
        masses=torch.stack([d.masses for d in drawn], 1),
    )
    assert_same(run(target, round_, carried, vocab_size), expected)
    own = torch.stack([d.log_probs for d in drawn], 1)
    judged = expected.log_probs[..., 1] != 0
    torch.testing.assert_close(expected.log_probs[..., 1][judged], own[judged])


def test_equal_draft_and_target_accept_everything(device: str) -> None:
    """p computed like q is q to the bit: no candidate of an equal draft is ever rejected."""
    vocab_size = 2003
    target, _ = batch_of(device, vocab_size, seed=10, batch=8)
    draft = target.view(8, BUCKET + 1, -1)[:, :BUCKET].clone()
    round_ = round_of(torch.zeros(8, BUCKET, dtype=torch.int64, device=device))
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    outcome = run(target, round_, logits_draft(draft, round_), vocab_size)
    assert (outcome.num_accepted == BUCKET).all()
    assert (outcome.num_emitted == BUCKET + 1).all()


def test_stop_tokens_end_the_round_where_they_stand(device: str) -> None:
    """An accepted stop token closes without bonus; one behind a rejection does not count."""
    vocab_size, num = 50, 6
    target, _ = batch_of(device, vocab_size, seed=11, batch=num)
    draft = target.view(num, BUCKET + 1, -1)[:, :BUCKET].clone()
    round_ = round_of(torch.zeros(num, BUCKET, dtype=torch.int64, device=device))
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    stops = torch.full((num, 3), -1, dtype=torch.int32, device=device)
    stops[0, 1] = round_.candidates[0, 1]
    stops[1, 0] = round_.candidates[1, 0]
    stops[2, 2] = round_.candidates[2, 2]
    round_ = replace(round_, stop_ids=stops)
    outcome = run(target, round_, logits_draft(draft, round_), vocab_size)
    assert outcome.num_emitted.tolist() == [2, 1, 3, 4, 4, 4]
    assert outcome.num_accepted.tolist() == [2, 1, 3, 3, 3, 3]
    refused = target.clone().view(num, BUCKET + 1, -1)
    refused[0, 0, round_.candidates[0, 0]] = -torch.inf  # p = 0 before the stop token
    outcome = run(refused.view(-1, vocab_size), round_, logits_draft(draft, round_), vocab_size)
    assert outcome.num_accepted[0] == 0
    assert outcome.num_emitted[0] == 1
    assert outcome.tokens[0, 0] != round_.candidates[0, 0]


def test_nan_counts_in_judged_rows_only(device: str) -> None:
    """A NaN past the first rejection changes nothing; in a judged row its session alone fails."""
    vocab_size = 500
    target, draft = batch_of(device, vocab_size, seed=12)
    round_ = round_of(torch.zeros(6, BUCKET, dtype=torch.int64, device=device))
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    rows = target.view(6, BUCKET + 1, -1)
    rows[0, 0, round_.candidates[0, 0]] = -torch.inf  # rejected at once: later rows not judged
    expected = run(target, round_, logits_draft(draft, round_), vocab_size)
    assert expected.num_accepted[0] == 0
    rows[0, 2, 3] = torch.nan
    rows[0, 3, 7] = torch.inf
    with np.errstate(invalid="ignore"):
        outcome = run(target, round_, logits_draft(draft, round_), vocab_size)
        assert_same(outcome, expected)
        rows[0, 0, 20] = torch.nan
        rows[1, 0, 499] = torch.inf
        rows[2, 0] = -torch.inf
        outcome = run(target, round_, logits_draft(draft, round_), vocab_size)
    assert outcome.status.tolist() == [Status.ROW_FAULT] * 3 + [Status.OK] * 3
    assert outcome.num_emitted[:3].tolist() == [0, 0, 0]
    assert (outcome.tokens[:3] == -1).all()
    assert torch.equal(outcome.tokens[3:], expected.tokens[3:])


def test_bad_drafts_fail_their_own_session(device: str) -> None:
    """A candidate outside the vocabulary, of no weight, or from a NaN row is a DRAFT_FAULT."""
    vocab_size = 500
    target, draft = batch_of(device, vocab_size, seed=13)
    round_ = round_of(torch.zeros(6, BUCKET, dtype=torch.int64, device=device))
    candidates = proposed(draft, round_, vocab_size)
    expected = run(
        target, replace(round_, candidates=candidates), logits_draft(draft, round_), vocab_size
    )
    bad = candidates.clone()
    bad[0, 0] = vocab_size
    bad[1, 0] = -5
    draft[2, 0, bad[2, 0]] = -torch.inf
    draft[3, 0, 17] = torch.nan
    with np.errstate(invalid="ignore"):
        outcome = run(
            target, replace(round_, candidates=bad), logits_draft(draft, round_), vocab_size
        )
    assert outcome.status.tolist() == [Status.DRAFT_FAULT] * 4 + [Status.OK] * 2
    assert torch.equal(outcome.tokens[4:], expected.tokens[4:])
    missing = run(target, replace(round_, candidates=candidates), None, vocab_size)
    assert (missing.status == Status.DRAFT_FAULT).all()


def test_residual_that_rounds_to_nothing_draws_from_the_target(device: str) -> None:
    """p = {a: 1}, q = {a: 1, b: 2^-30}: b is rejected, [p - q]+ is zero in float32, a is drawn."""
    logits = torch.full((2, 300), -torch.inf, device=device)
    logits[:, 250] = 0.0
    ids = torch.tensor([[[7, 250]]], dtype=torch.int32, device=device)
    weights = torch.tensor([[[2.0**-30, 1.0]]], device=device)
    round_ = round_of(torch.tensor([[7]], device=device))
    outcome = run(logits, round_, DraftRows(DraftKind.SPARSE, weights, ids=ids), 300)
    assert emitted(outcome, 0) == (250,)
    assert outcome.num_accepted[0] == 0


def test_far_down_scores_decide_like_scores_near_zero(device: str) -> None:
    """Rows shifted by -200 nats, whose probabilities underflow unnormalised, decide the same."""
    vocab_size = 500
    target, draft = batch_of(device, vocab_size, seed=14)
    target, draft = ((t * 8).round() / 8 for t in (target, draft))  # so that the shift is exact
    round_ = round_of(torch.zeros(6, BUCKET, dtype=torch.int64, device=device))
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    expected = run(target, round_, logits_draft(draft, round_), vocab_size)
    down = run(target - 200.0, round_, logits_draft(draft - 201.0, round_), vocab_size)
    assert torch.equal(down.tokens, expected.tokens)
    torch.testing.assert_close(down.log_probs, expected.log_probs, rtol=0, atol=2e-4)


def test_log_probs_of_judged_candidates(device: str) -> None:
    """ln p(x_i) and ln q(x_i) agree with float64 log-softmax; unjudged candidates show 0."""
    vocab_size = 1023
    target, draft = batch_of(device, vocab_size, seed=15)
    round_ = round_of(torch.zeros(6, BUCKET, dtype=torch.int64, device=device))
    round_ = replace(round_, candidates=proposed(draft, round_, vocab_size))
    outcome = run(target, round_, logits_draft(draft, round_), vocab_size)
    rows = target.view(6, BUCKET + 1, -1)[:, :BUCKET]
    for which, logits in enumerate((rows, draft)):
        exact = logits.cpu().double().log_softmax(-1)
        exact = exact.gather(2, round_.candidates.cpu()[..., None])[..., 0]
        for session in range(6):
            num = min(int(outcome.num_accepted[session]) + 1, BUCKET)
            ours = outcome.log_probs[session, :, which].cpu().double()
            torch.testing.assert_close(ours[:num], exact[session, :num], rtol=0, atol=3e-6)
            assert (ours[num:] == 0).all()


def test_plain_decoding_draws_one_token(device: str) -> None:
    """A bucket of no candidates draws one bonus, coupled or greedy token a session."""
    vocab_size = 700
    target, _ = batch_of(device, vocab_size, seed=16, batch=1)
    round_ = round_of(
        torch.zeros(3, 0, dtype=torch.int64, device=device),
        rules=[Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY],
    )
    outcome = run(target[:3], round_, None, vocab_size)
    empty = torch.zeros(3, 0, vocab_size)
    for session in range(3):
        expected = decision(target, empty, round_, session, vocab_size)
        assert emitted(outcome, session) == expected.tokens
    assert outcome.log_probs.shape == (3, 0, 2)


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema and fake of specmesh::accept agree with what it does."""
    vocab_size = 64
    target, draft = batch_of(device, vocab_size, batch=2)
    round_ = round_of(torch.zeros(2, BUCKET, dtype=torch.int64, device=device))
    arguments = (
        target, round_.candidates, round_.num_candidates, round_.seeds, round_.base_lens,
        round_.rules, round_.temperatures, round_.stop_ids, None, None, int(DraftKind.LOGITS),
        draft, None, round_.temperatures, None, None, None, vocab_size, workspace(2, device),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.specmesh.accept.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    """Draft rows of another shape, ids missing or a short workspace raise ValueError."""
    target, draft = batch_of(device, 64, batch=2)
    round_ = round_of(torch.zeros(2, BUCKET, dtype=torch.int64, device=device))
    rows = logits_draft(draft, round_)
    for wrong in (
        replace(rows, rows=draft[:, :2]),
        replace(rows, temperatures=None),
        replace(rows, masses=torch.zeros(2, BUCKET, dtype=torch.int64)),
        replace(rows, kind=DraftKind.SPARSE),
    ):
        with pytest.raises(ValueError, match=r"draft|sparse|exponents"):
            accept(target, round_, wrong, 64, workspace(2, device))
    with pytest.raises(ValueError, match="scratch"):
        accept(target, round_, rows, 64, workspace(1, device))


def test_output_law_is_the_targets(device: str) -> None:
    """Draft, accept and residual over many seeds: the first token follows p, not q. A round holds
    as many sessions as a launch may have on a device."""
    probs = torch.tensor([0.5, 0.3, 0.2])
    draft_probs = torch.tensor([0.2, 0.5, 0.3])
    batch, num_rounds = (sampling.MOST_SESSIONS, 6) if device == "cuda" else (25, 2)
    logits = probs.log().to(device).expand(2 * batch, 3)
    draft = draft_probs.log().to(device).expand(batch, 1, 3)
    tokens, num_accepted = [], []
    for first in range(0, num_rounds * batch, batch):
        none_yet = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        round_ = round_of(none_yet, seeds=list(range(first, first + batch)))
        round_ = replace(round_, candidates=proposed(draft, round_, 3))
        outcome = run(logits, round_, logits_draft(draft, round_), 3)
        tokens.append(outcome.tokens[:, 0].cpu())
        num_accepted.append(outcome.num_accepted.double().cpu())
    num = num_rounds * batch
    counts = torch.cat(tokens).bincount(minlength=3).double()
    deviations = (counts - num * probs) / (num * probs * (1 - probs)).sqrt()
    assert float(deviations.abs().max()) < 5.0
    if device == "cuda":  # redrawing from p would give (.35, .39, .26)
        assert abs(float(counts[0]) / num - 0.35) > 0.1
    accepted = float(torch.cat(num_accepted).mean())
    assert abs(accepted - 0.7) < 5.0 * math.sqrt(0.21 / num)


@pytest.mark.parametrize("kind", [None, DraftKind.SPARSE])
@pytest.mark.parametrize("filtered", [False, True])
def test_an_empty_bucket_draws_one_token_a_session(
    device: str, kind: DraftKind | None, filtered: bool
) -> None:
    """Plain decoding: candidates [batch, 0] give a bonus keyed by base_len, whatever the rule."""
    vocab_size, bar = 1500, 0.5
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(4, vocab_size, generator=generator) * 2).to(device)
    round_ = round_of(
        torch.zeros(4, 0, dtype=torch.int64, device=device),
        num_candidates=[0, 0, 0, -1],
        seeds=[3, 4, 5, 6],
        rules=[Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY, Rule.RESIDUAL],
        thresholds=torch.full((4, 1), bar, device=device) if filtered else None,
    )
    empty = torch.zeros(4, 0, 1024, device=device)
    draft = None if kind is None else DraftRows(kind, empty, ids=empty.int())
    outcome = run(logits, round_, draft, vocab_size)
    assert outcome.counts.tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]]
    scores = logits.cpu().masked_fill(logits.cpu() < bar, -torch.inf) if filtered else logits.cpu()
    weights = [shaped(row, 1.0, vocab_size) for row in scores]
    expected = [
        reference.race(weights[0], 3, 100, 100, Purpose.BONUS),
        reference.race(weights[1], 4, 100, 0, Purpose.COUPLED),
        reference.lowest_argmax(scores[2]),
        -1,
    ]
    assert outcome.tokens[:, 0].tolist() == expected


def test_sparse_rows_with_padding_are_those_without(device: str) -> None:
    """Rows of few ids padded to 1024 decide as the same rows padded to 64, bit for bit."""
    vocab_size = 80
    target, _ = batch_of(device, vocab_size, seed=6)
    generator = torch.Generator().manual_seed(7)
    ids = torch.full((6, BUCKET, 64), -1, dtype=torch.int32)
    weights = torch.zeros(6, BUCKET, 64)
    for session in range(6):
        for index in range(BUCKET):
            count = 1 + (session * 11 + index * 5) % 64
            own = torch.randperm(vocab_size, generator=generator)[:count].sort().values
            ids[session, index, :count] = own.int()
            weights[session, index, :count] = torch.rand(count, generator=generator) * 2.0**14
    round_ = round_of(ids[:, :, 0].long().to(device))
    outcomes = []
    for width in (64, 1024):
        wide_ids = torch.full((6, BUCKET, width), -1, dtype=torch.int32)
        wide_weights = torch.zeros(6, BUCKET, width)
        wide_ids[..., :64], wide_weights[..., :64] = ids, weights
        rows = DraftRows(DraftKind.SPARSE, wide_weights.to(device), ids=wide_ids.to(device))
        outcomes.append(run(target, round_, rows, vocab_size))
    assert_same(*outcomes)
    assert 0 < int(outcomes[0].num_accepted.sum()) < 6 * BUCKET
