"""Token shaping on the device: thresholds and penalties of the reference, whatever the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference, shaping
from kernels.configs.sampling import Search
from kernels.penalties import Penalties, penalize_
from kernels.reference import Shaping
from kernels.sampling import DraftKind, DraftRows, accept, draw, workspace
from kernels.shaping import Filters, thresholds
from tests.kernels.rounds import MASK_64, emitted, round_of


def filters_of(params: Sequence[Shaping], device: str) -> Filters:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

    return Filters(
        column("temperature", torch.float32), column("top_k", torch.int32),
        column("top_p", torch.float32), column("min_p", torch.float32),
    )  # fmt: skip


def random_rows(rows: int, width: int, device: str, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * scale).to(device)


def assert_supports(logits: Tensor, params: Sequence[Shaping], vocab_size: int) -> None:
    """Every row keeps exactly the ids that the reference gives weight."""
    bars = thresholds(logits, filters_of(params, str(logits.device)), 1, vocab_size)[:, 0]
    for row, own in enumerate(params):
        expected = reference.shape(logits[row].cpu().float(), own, vocab_size) > 0
        kept = logits[row].cpu().float() >= bars[row].cpu()
        kept[vocab_size:] = False
        assert torch.equal(kept, expected), f"{own}: {int(kept.sum())}, not {int(expected.sum())}"


MANY = [
    Shaping(top_k=50),
    Shaping(temperature=0.7, top_k=50, top_p=0.9),
    Shaping(top_p=0.9),
    Shaping(temperature=1.3, top_p=0.99),
    Shaping(min_p=0.05),
    Shaping(top_k=700, top_p=0.95, min_p=0.01),
    Shaping(top_k=1),
    Shaping(),
]


@pytest.mark.parametrize("vocab_size", [37, 1023, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_thresholds_keep_the_references_support(
    device: str, vocab_size: int, dtype: torch.dtype
) -> None:
    """Top-k, top-p, min-p and their sequence keep the same ids, with huge scores past the end."""
    logits = random_rows(len(MANY), vocab_size + 7, device).to(dtype)
    logits[:, vocab_size:] = 100.0
    assert_supports(logits, MANY, vocab_size)


def test_ties_at_a_threshold_are_all_kept(device: str) -> None:
    """Equal scores stay together: a uniform row keeps everything under any filter, and a tie at
    the k-th place or at the nucleus border is kept whole."""
    vocab_size = 5000
    uniform = torch.zeros(4, vocab_size, device=device)
    few = [Shaping(top_k=50), Shaping(top_p=0.5), Shaping(top_k=3, top_p=0.1, min_p=1.0)]
    assert_supports(uniform[:3], few, vocab_size)
    stepped = (torch.arange(vocab_size, device=device) // 10 % 40).float()[None].repeat(3, 1)
    assert_supports(stepped, [Shaping(top_k=7), Shaping(top_p=0.4), Shaping(top_k=131)], vocab_size)


@pytest.mark.parametrize("search", [Search(8, 64, 4), Search(32, 512, 4)])
def test_thresholds_do_not_depend_on_the_launch(
    device: str, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few scores fit, and so however often a row is bracketed, the threshold keeps the
    same ids."""
    logits = random_rows(4, 3000, device, seed=2, scale=1.0)
    monkeypatch.setattr(shaping, "threshold_launch", lambda _: search)
    some = [
        Shaping(top_k=900),
        Shaping(top_p=0.9),
        Shaping(top_k=2999, top_p=0.6),
        Shaping(top_k=9),
    ]
    assert_supports(logits, some, 3000)


def test_greedy_unlooked_and_faulty_rows_have_no_threshold(device: str) -> None:
    """-inf for greedy sessions, rows past num_rows, NaN, +inf and rows without finite score."""
    logits = random_rows(8, 200, device, seed=3)
    logits[2, 7] = torch.nan
    logits[4] = -torch.inf
    logits[6, 0] = torch.inf
    params = [Shaping(temperature=0.0, top_k=5), *[Shaping(top_k=5)] * 3]
    num_rows = torch.tensor([2, 2, 1, 2], dtype=torch.int32, device=device)
    with np.errstate(invalid="ignore"):
        bars = thresholds(logits, filters_of(params, device), 2, 200, num_rows=num_rows)
    assert torch.isinf(bars).tolist() == [
        [True, True], [True, False], [True, True], [True, False],
    ]  # fmt: skip
    assert not bool(bars.isnan().any())


def test_rows_found_by_first_row_are_the_same(device: str) -> None:
    """Packed rows in any order, strided, give each session the thresholds of its own rows."""
    logits = random_rows(4, 500, device, seed=4)
    params = [Shaping(top_k=9), Shaping(top_p=0.7)]
    expected = thresholds(logits, filters_of(params, device), 2, 500)
    first_rows = torch.tensor([2, 0], dtype=torch.int32, device=device)
    swapped = logits[[2, 3, 0, 1]].T.contiguous().T
    got = thresholds(swapped, filters_of(params, device), 2, 500, first_rows=first_rows)
    assert torch.equal(got, expected)


def test_shaped_rounds_equal_the_reference(device: str) -> None:
    """Draw and accept with thresholds on both sides decide like the reference on shaped rows."""
    vocab_size, batch, bucket = 2003, 4, 2
    own = Shaping(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    target = random_rows(batch * (bucket + 1), vocab_size, device, seed=5)
    draft = target.view(batch, bucket + 1, -1)[:, :bucket] + random_rows(
        batch * bucket, vocab_size, device, seed=6, scale=0.5
    ).view(batch, bucket, -1)
    filters = filters_of([own] * batch, device)
    bars = thresholds(target, filters, bucket + 1, vocab_size)
    draft_bars = thresholds(draft.reshape(-1, vocab_size), filters, bucket, vocab_size)
    zeros = torch.zeros(batch, bucket, dtype=torch.int64, device=device)
    round_ = round_of(zeros, temperatures=[0.8] * batch, thresholds=bars)
    scratch = workspace(batch, device)
    columns = [
        draw(
            draft[:, i], round_.seeds, round_.base_lens + i, round_.base_lens, round_.rules,
            round_.temperatures, vocab_size, scratch, draft_bars[:, i].contiguous(),
        ).tokens
        for i in range(bucket)
    ]  # fmt: skip
    round_ = replace(round_, candidates=torch.stack(columns, 1))
    rows = DraftRows(
        DraftKind.LOGITS, draft, temperatures=round_.temperatures, thresholds=draft_bars
    )
    outcome = accept(target, round_, rows, vocab_size, scratch)
    for session in range(batch):
        p = [
            reference.shape(target[session * (bucket + 1) + i].cpu(), own, vocab_size)
            for i in range(bucket + 1)
        ]
        q = [reference.shape(draft[session, i].cpu(), own, vocab_size) for i in range(bucket)]
        expected = reference.run(
            reference.decide(p, q, round_.candidates[session].tolist()),
            reference.philox_answer(int(round_.seeds[session]) & MASK_64, 100),
        )
        assert emitted(outcome, session) == expected.tokens


def test_penalties_equal_the_reference(device: str) -> None:
    """Bias, repetition, presence and frequency at prompt, output and preceding candidates: the
    reference's row to the bit; rows past num_candidates stay untouched."""
    vocab_size, bucket = 300, 3
    logits = random_rows(2 * (bucket + 1), vocab_size + 4, device, seed=7)
    before = logits.clone()
    candidates = torch.tensor([[5, 9, 5], [40, 41, 42]], device=device)
    num_candidates = torch.tensor([3, 1], dtype=torch.int32, device=device)
    ids = torch.tensor([[5, 17, 250, -1], [40, 3, 299, 8]], dtype=torch.int32, device=device)
    biases = torch.tensor([[0.5, -1.0, -torch.inf, 9.0], [0.0, 2.0, 0.0, 0.0]], device=device)
    counts = torch.tensor([[0, 2, 1, 7], [0, 0, 3, 1]], dtype=torch.int32, device=device)
    prompt = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.int32, device=device)
    params = [Shaping(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)] * 2

    def column(value: float) -> Tensor:
        return torch.full((2,), value, device=device)

    penalties = Penalties(ids, biases, counts, prompt, column(1.3), column(0.4), column(0.25))
    penalize_(logits, penalties, candidates, num_candidates, vocab_size)
    for session in range(2):
        live = ids[session] >= 0
        names, values = ids[session][live].long().cpu(), biases[session][live].cpu()
        for i in range(bucket + 1):
            row = session * (bucket + 1) + i
            if i > num_candidates[session]:
                assert torch.equal(logits[row], before[row])
                continue
            occurrences = dict(zip(names.tolist(), counts[session][live].tolist(), strict=True))
            for token in candidates[session, :i].tolist():
                occurrences[token] = occurrences.get(token, 0) + 1
            output = sorted(token for token, count in occurrences.items() if count)
            expected = reference.penalize(
                before[row].cpu(),
                params[session],
                (names, values),
                names[prompt[session][live].cpu() == 1],
                torch.tensor(output),
                torch.tensor([occurrences[token] for token in output]),
            )
            assert torch.equal(logits[row].cpu(), expected)


def test_penalties_need_float32(device: str) -> None:
    """float16 rows raise ValueError: rounding in place would make p depend on the buffer."""
    logits = torch.zeros(1, 8, dtype=torch.float16, device=device)
    none = torch.zeros(1, 0, dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    penalties = Penalties(none, none.float(), none, none, one, one, one)
    with pytest.raises(ValueError, match="float32"):
        penalize_(logits, penalties, none, none[:, 0:0].sum(1).int(), 8)


def test_ops_describe_themselves_to_the_compiler(device: str) -> None:
    """Schema and fake of both ops agree with what they do."""
    utils = ("test_schema", "test_faketensor")
    logits = random_rows(2, 64, device)
    own = filters_of([Shaping(top_k=3)], device)
    arguments = (logits, own.temperatures, own.top_ks, own.top_ps, own.min_ps, 2, 64, None, None)
    torch.library.opcheck(torch.ops.specmesh.thresholds.default, arguments, test_utils=utils)
    ids = torch.tensor([[1, 5]], dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    candidates = torch.tensor([[4]], device=device)
    penalized = (
        logits, ids, ids.float(), ids, ids, one, one, one, candidates,
        torch.ones(1, dtype=torch.int32, device=device), 64, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.specmesh.penalize_.default, penalized, test_utils=utils)
