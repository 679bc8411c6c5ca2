"""One draft step: rows as `wire.cut` makes them, tokens drawn from exactly what is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels import draft_rows as draft_rows_module
from kernels import reference
from kernels.configs.sampling import Launch
from kernels.draft_rows import (
    DROPPED_MASS,
    MAX_SPARSE_IDS,
    DraftedRows,
    DraftKeys,
    Truncation,
    draft_rows,
)
from kernels.reference import Shaping
from kernels.reference_rows import overlap as overlap_of
from kernels.sampling import Rule, Status, draw, workspace
from kernels.shaping import Filters, thresholds
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2
from specmesh import wire
from tests.kernels.rounds import MASK_64

FIRST_SEED, FIRST_POSITION, FIRST_BASE = -5, 40, 33


def ints(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def drafted(
    logits: Tensor,
    vocab_size: int,
    *,
    rules: Sequence[Rule] | None = None,
    temperature: float = 1.0,
    bars: Tensor | None = None,
    first_seed: int = FIRST_SEED,
    max_ids: int = MAX_SPARSE_IDS,
    dropped_mass: float = DROPPED_MASS,
) -> DraftedRows:
    """Row i: seed first_seed + 7 i, position 40 + i, base_len 33 + i."""
    rows, device = logits.shape[0], str(logits.device)
    scratch = workspace(rows, device)
    keys = DraftKeys(
        torch.arange(first_seed, first_seed + 7 * rows, 7, device=device),
        ints(range(FIRST_POSITION, FIRST_POSITION + rows), device),
        ints(range(FIRST_BASE, FIRST_BASE + rows), device),
        ints([int(rule) for rule in rules or [Rule.RESIDUAL] * rows], device),
        torch.full((rows,), temperature, device=device),
    )
    truncation = Truncation(max_ids, dropped_mass)
    result = draft_rows(logits, keys, vocab_size, scratch, bars, truncation=truncation)
    assert not bool(scratch.any()), "a call must leave the workspace at zero"
    return result


def keys_of(rows: int, device: str) -> DraftKeys:
    one = ints(range(1, rows + 1), device)
    ones = torch.ones(rows, device=device)
    return DraftKeys(one.long(), one, one.clone(), torch.zeros_like(one), ones)


def random_rows(rows: int, width: int, device: str, seed: int = 0, scale: float = 2.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * scale).to(device)


def row_of(result: DraftedRows, index: int, vocab_size: int) -> wire.Row:
    """Row `index` as the wire sends it, after a round trip through its bytes."""
    count = int(result.num_ids[index])
    assert (result.ids[index, count:] == -1).all()
    assert (result.weights[index, count:] == 0).all()
    encoding = wire.SPARSE_F16 if result.truncated[index] else wire.SPARSE_F32
    row = wire.Row(
        vocab_size,
        result.weights[index, :count].cpu(),
        result.ids[index, :count].cpu().long(),
        encoding,
    )
    received = wire.decode(wire.encode(row), vocab_size)
    assert torch.equal(received.weights, row.weights), "float16 must hold truncated weights exactly"
    return received


def shaped(row: Tensor, vocab_size: int, shaping: Shaping) -> Tensor:
    return reference.shape(row.cpu().float(), shaping, vocab_size)[:vocab_size]


def redrawn(row: wire.Row, index: int, first_seed: int = FIRST_SEED) -> int:
    return row.draw(
        (first_seed + 7 * index) & MASK_64, FIRST_POSITION + index, FIRST_BASE + index,
        Purpose.PROPOSE,
    )  # fmt: skip


def assert_rows(
    result: DraftedRows, logits: Tensor, vocab_size: int, shaping: Sequence[Shaping]
) -> None:
    """Ids, law, dropped mass and token of every row equal those of `wire.cut`."""
    for index, own in enumerate(shaping):
        weights = shaped(logits[index], vocab_size, own)
        cut = wire.cut(weights, session_pb2.ROW_POLICY_AUTO)
        expected, (dropped_mass,) = cut.row, wire.dropped_masses([cut])
        row = row_of(result, index, vocab_size)
        assert expected.ids is not None
        assert row.ids is not None
        assert torch.equal(row.ids, expected.ids), (index, row.ids.numel(), expected.ids.numel())
        assert row.encoding == expected.encoding
        laws = [
            one.weights.double() / float(reference.total(one.weights)) for one in (row, expected)
        ]
        tolerance = 2e-3 if result.truncated[index] else 2e-5
        torch.testing.assert_close(laws[0], laws[1], rtol=tolerance, atol=1e-7)
        assert float(result.dropped_mass[index]) == pytest.approx(dropped_mass, abs=1e-6)
        assert int(result.tokens[index]) == redrawn(row, index)
        assert result.status[index] == Status.OK


@pytest.mark.parametrize("vocab_size", [1, 37, 1024, 1025, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_equal_those_of_the_cpu(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    """Peaked, spread and flat rows, at any size and with huge padding past the vocabulary."""
    scales = (1.6, 1.0, 0.4)
    logits = random_rows(3, vocab_size + 7, device, seed=vocab_size)
    logits *= torch.tensor(scales, device=device)[:, None]
    logits[:, vocab_size:] = 1e4
    logits = logits.to(dtype)
    result = drafted(logits, vocab_size, temperature=0.9)
    assert_rows(result, logits, vocab_size, [Shaping(temperature=0.9)] * 3)
    assert bool((result.truncated == int(vocab_size > MAX_SPARSE_IDS)).all())


def test_hundreds_of_tokens_are_those_of_a_redraw(device: str) -> None:
    """The target's re-draw from the bytes sent gives every token, for all rows of one batch."""
    rows, vocab_size = (1000, 2500) if device == "cuda" else (60, 1500)
    logits = random_rows(rows, vocab_size, device, seed=3)
    result = drafted(logits, vocab_size, first_seed=11)
    for index in range(rows):
        row = row_of(result, index, vocab_size)
        assert redrawn(row, index, 11) == int(result.tokens[index]), index
    assert len(set(result.tokens.tolist())) > rows / 4


def test_ties_at_the_edge_keep_the_lowest_ids(device: str) -> None:
    """Where equal scores straddle the mass or the cap, the lowest ids stay, across spans."""
    vocab_size = 9001
    ids = torch.arange(vocab_size, device=device)
    stepped = -(ids * 37 % 40).float()  # 225 ids a score, scattered
    coarse = -(ids * 37 % 4).float() * 0.01  # thousands tied at the cap: searched by passes
    rare = torch.full((vocab_size,), -9.0, device=device)
    rare[[5000, 4000, 8999, 17]] = 4.0
    logits = torch.stack([stepped, coarse, rare, torch.zeros_like(rare)])
    result = drafted(logits, vocab_size)
    assert_rows(result, logits, vocab_size, [Shaping()] * 4)
    assert result.ids[3, [0, -1]].tolist() == [0, MAX_SPARSE_IDS - 1]


@pytest.mark.parametrize("max_ids", [1, 5, 64])
def test_rows_whose_candidates_do_not_fit_are_searched_by_passes(device: str, max_ids: int) -> None:
    """Nearly equal scores of either sign: the ids kept are those of the reference."""
    vocab_size = 9001
    logits = random_rows(2, vocab_size, device, seed=8, scale=0.01)
    logits[1] -= 20.0
    result = drafted(logits, vocab_size, max_ids=max_ids, dropped_mass=0.3)
    for index in range(2):
        weights = shaped(logits[index], vocab_size, Shaping())
        ids, _, dropped_mass = reference.truncate(weights, 0.3, max_ids)
        assert torch.equal(row_of(result, index, vocab_size).ids, ids)
        assert float(result.dropped_mass[index]) == pytest.approx(dropped_mass, abs=1e-6)


@pytest.mark.parametrize("dropped_mass", [0.0, 0.05, 0.5])
def test_the_share_dropped_is_the_callers(device: str, dropped_mass: float) -> None:
    """The smallest set of mass >= 1 - dropped_mass, whatever the share."""
    vocab_size = 5000
    logits = random_rows(2, vocab_size, device, seed=9, scale=4.0)
    result = drafted(logits, vocab_size, dropped_mass=dropped_mass)
    for index in range(2):
        weights = shaped(logits[index], vocab_size, Shaping())
        ids, _, _ = reference.truncate(weights, dropped_mass, MAX_SPARSE_IDS)
        assert torch.equal(row_of(result, index, vocab_size).ids, ids)


def test_session_filters_come_before_truncation(device: str) -> None:
    """Rows filtered by thresholds: few survivors are kept whole, many are truncated."""
    vocab_size = 9001
    params = [
        Shaping(temperature=0.8, top_k=50, top_p=0.9),
        Shaping(temperature=0.8, top_p=0.995),
        Shaping(temperature=0.8, min_p=0.2),
        Shaping(temperature=0.8, top_k=1),
        Shaping(temperature=0.8, top_k=3000),
    ]
    logits = random_rows(len(params), vocab_size, device, seed=10)
    columns = [
        torch.tensor([getattr(one, name) for one in params], dtype=dtype, device=device)
        for name, dtype in (
            ("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
            ("min_p", torch.float32),
        )
    ]  # fmt: skip
    bars = thresholds(logits, Filters(*columns), 1, vocab_size)[:, 0].contiguous()
    result = drafted(logits, vocab_size, temperature=0.8, bars=bars)
    assert_rows(result, logits, vocab_size, params)
    assert result.truncated.tolist() == [0, 1, 0, 0, 1]


def test_other_rules_draw_the_bits_of_draw_and_send_no_row(device: str) -> None:
    """Coupled and greedy rows in a mixed batch: the tokens of `draw`, ties included; no ids."""
    vocab_size = 20_000
    logits = random_rows(6, vocab_size, device, seed=12)
    logits[2, [700, 15_000]] = 30.0
    rules = [Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY] * 2
    result = drafted(logits, vocab_size, rules=rules)
    expected = draw(
        logits,
        torch.arange(FIRST_SEED, FIRST_SEED + 42, 7, device=device),
        ints(range(40, 46), device),
        ints(range(33, 39), device),
        ints([int(rule) for rule in rules], device),
        torch.ones(6, device=device),
        vocab_size,
        workspace(6, device),
    )
    for index, rule in enumerate(rules):
        if rule is Rule.RESIDUAL:
            assert int(result.tokens[index]) == redrawn(row_of(result, index, vocab_size), index)
            continue
        assert result.tokens[index] == expected.tokens[index]
        assert int(result.num_ids[index]) == 0
        assert (result.ids[index] == -1).all()
        assert float(result.dropped_mass[index]) == 0.0
    assert int(result.tokens[2]) == 700


def test_faulty_rows_are_flagged_and_the_others_kept(device: str) -> None:
    """NaN, +inf or no finite score: token -1, no ids, ROW_FAULT; padding is not looked at."""
    vocab_size = 5000
    logits = random_rows(7, vocab_size + 24, device)
    logits[:, vocab_size:] = torch.nan
    expected = drafted(logits, vocab_size)
    assert not bool(expected.status.any())
    logits[1, 4999] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, :vocab_size] = -torch.inf
    logits[4, 7] = torch.nan
    logits[5, 9] = torch.inf
    rules = [Rule.RESIDUAL] * 4 + [Rule.GREEDY, Rule.COUPLED, Rule.RESIDUAL]
    with np.errstate(invalid="ignore"):
        result = drafted(logits, vocab_size, rules=rules)
    assert result.status.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert result.tokens[1:6].tolist() == [-1] * 5
    assert result.num_ids[1:6].tolist() == [0] * 5
    assert (result.ids[1:6] == -1).all()
    for index in (0, 6):
        assert result.tokens[index] == expected.tokens[index]
        assert torch.equal(result.weights[index], expected.weights[index])


def test_masked_ids_are_never_kept(device: str) -> None:
    """Scores of -inf (suppressed ids) are no support: a row with two left is those two."""
    vocab_size = 5000
    logits = torch.full((1, vocab_size), -torch.inf, device=device)
    logits[0, 4500], logits[0, 12] = 0.5, -0.5
    result = drafted(logits, vocab_size)
    assert result.ids[0, :3].tolist() == [12, 4500, -1]
    assert_rows(result, logits, vocab_size, [Shaping()])


def test_ids_of_no_mass_are_kept_only_where_all_are_few(device: str) -> None:
    """50 octaves below the largest: thousands of ids do not count, a few are kept; none at 150."""
    vocab_size = 5000
    logits = torch.full((2, vocab_size), -40.0, device=device)
    logits[1] = -torch.inf
    logits[1, 4000:4500] = -40.0
    logits[1, 4500:4600] = -110.0
    logits[:, 100:130] = torch.linspace(-3.0, 2.0, 30, device=device)
    result = drafted(logits, vocab_size)
    assert result.ids[0, :31].tolist() == [*range(100, 130), -1]
    assert result.ids[1, :531].tolist() == [*range(100, 130), *range(4000, 4500), -1]
    assert result.truncated.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1.0, 2.5, 5.0])
def test_truncation_costs_at_most_the_mass_it_reports(device: str, scale: float) -> None:
    """A - A' <= dropped mass, for acceptance A = sum of min(p, q) against a related target."""
    vocab_size = 4000
    target = random_rows(3, vocab_size, device, seed=20, scale=scale)
    logits = target + random_rows(3, vocab_size, device, seed=21, scale=0.7)
    result = drafted(logits, vocab_size)
    for index in range(3):
        p = shaped(target[index], vocab_size, Shaping())
        q = shaped(logits[index], vocab_size, Shaping())
        sent = row_of(result, index, vocab_size).dense()
        cost = overlap_of(p, q) - overlap_of(p, sent)
        assert cost <= float(result.dropped_mass[index]) + 1e-6


def bits(result: DraftedRows, rows: slice | list[int] = slice(None)) -> list[Tensor]:
    names = ("tokens", "ids", "weights", "num_ids", "truncated", "status", "dropped_mass")
    return [getattr(result, name)[rows] for name in names]


@pytest.mark.parametrize("launch", [Launch(4), Launch(32)])
def test_rows_do_not_depend_on_the_launch(
    device: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps a program change no bit of any output, whichever search runs."""
    logits = random_rows(4, 9001, device, seed=5)
    logits[3] *= 0.01
    rules = [Rule.RESIDUAL, Rule.COUPLED, Rule.GREEDY, Rule.RESIDUAL]
    expected = drafted(logits, 9001, rules=rules)
    monkeypatch.setattr(draft_rows_module, "draft_launch", lambda _: launch)
    changed = drafted(logits, 9001, rules=rules)
    assert all(torch.equal(a, b) for a, b in zip(bits(expected), bits(changed), strict=True))


def test_rows_do_not_depend_on_batch_place_or_memory(device: str) -> None:
    """A row alone, in a batch, in a wider buffer off 16 bytes, or strided: the same bits."""
    vocab_size = 5000
    rows = random_rows(3, vocab_size, device, seed=6)
    # Row 0 of a batch has the same keys as a row alone.
    expected = drafted(rows[:1].clone(), vocab_size)
    padded = torch.full((1, vocab_size + 4), 1e4, device=device)
    padded[:, 1 : vocab_size + 1] = rows[0]
    strided = torch.full((vocab_size, 8), 1e4, device=device)
    strided[:, 3] = rows[0]
    for other in (rows, padded[:, 1:], strided.T[3:4]):
        got = drafted(other, vocab_size)
        for a, b in zip(bits(expected), bits(got, [0]), strict=True):
            assert torch.equal(a, b)


def test_the_draw_is_from_the_rounded_weights(device: str) -> None:
    """Seeds at which rounding to float16 decides the race: the rounded row's winner is drawn."""
    vocab_size, seeds = 2000, [10899, 39121, 128166]
    exact = torch.tensor([1.0, 1.0 - 2.0**-12 * 0.97])
    ids = torch.tensor([10, 1500])
    logits = torch.full((3, vocab_size), -20.0, device=device)
    logits[:, ids.to(device)] = exact.log().to(device)
    keys = keys_of(3, device)
    keys.seeds.copy_(torch.tensor(seeds))
    keys.positions.fill_(FIRST_POSITION)
    keys.base_lens.fill_(FIRST_BASE)
    result = draft_rows(logits, keys, vocab_size, workspace(3, device))
    assert result.num_ids.tolist() == [2, 2, 2]
    for index, seed in enumerate(seeds):
        key = (seed, FIRST_POSITION, FIRST_BASE, Purpose.PROPOSE)
        sent = row_of(result, index, vocab_size)
        assert int(result.tokens[index]) == sent.draw(*key)
        assert int(result.tokens[index]) != reference.race(exact, *key, ids)


def test_draws_follow_the_law_that_is_sent(device: str) -> None:
    """Chi-square of tokens over seeds against the row written out, not the one before the cut."""
    num, vocab_size = (200_000, 2000) if device == "cuda" else (80, 1200)
    row = random_rows(1, vocab_size, device, seed=30, scale=0.3)
    row[0, 50:60] += 7.0
    result = drafted(row.expand(num, -1), vocab_size, max_ids=4, first_seed=1)
    sent = row_of(result, 0, vocab_size)
    law = sent.dense().double() / float(reference.total(sent.weights))
    counts = torch.bincount(result.tokens.cpu().long(), minlength=vocab_size)
    assert int(counts[law == 0].sum()) == 0
    seen = law > 0
    assert int(seen.sum()) == 4
    expected = law[seen] * num
    pooled = stats.chisquare(
        counts[seen].numpy(), (expected * (num / float(expected.sum()))).numpy()
    )
    assert pooled.pvalue > 1e-4


def test_rows_are_written_where_the_caller_wants(device: str) -> None:
    """Slices of a larger buffer take the outputs and nothing around them changes."""
    logits = random_rows(2, 1500, device)
    keys, scratch = keys_of(2, device), workspace(2, device)
    expected = draft_rows(logits, keys, 1500, scratch)
    wide = DraftedRows(
        *(
            torch.full((4, *part.shape[1:]), 77, dtype=part.dtype, device=device)
            for part in (
                expected.tokens, expected.ids, expected.weights, expected.reports,
                expected.dropped_mass,
            )
        )
    )  # fmt: skip
    parts = (wide.tokens, wide.ids, wide.weights, wide.reports, wide.dropped_mass)
    middle = DraftedRows(*(part[1:3] for part in parts))
    assert draft_rows(logits, keys, 1500, scratch, out=middle) is middle
    assert all(torch.equal(a, b) for a, b in zip(bits(expected), bits(middle), strict=True))
    assert all(bool((part[::3] == 77).all()) for part in parts)


def test_sizes_that_do_not_fit_are_refused(device: str) -> None:
    """The error names what does not fit."""
    logits, keys = random_rows(2, 64, device), keys_of(2, device)
    with pytest.raises(ValueError, match="scratch"):
        draft_rows(logits, keys, 64, workspace(1, device))
    narrow = DraftedRows.empty(2, 8, device)
    with pytest.raises(ValueError, match="out holds"):
        draft_rows(logits, keys, 64, workspace(2, device), out=narrow)
    for options, name in (({"max_ids": 0}, "max_ids"), ({"dropped_mass": 1.0}, "dropped_mass")):
        with pytest.raises(ValueError, match=name):
            Truncation(**options)


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema and fake of specmesh::draft_rows agree with what it does."""
    keys, out = keys_of(2, device), DraftedRows.empty(2, 32, device)
    arguments = (
        random_rows(2, 64, device), keys.seeds, keys.positions, keys.base_lens, keys.rules,
        keys.temperatures, None, 64, 0.01, out.tokens, out.ids, out.weights, out.reports,
        out.dropped_mass, workspace(2, device),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.specmesh.draft_rows.default, arguments,
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
