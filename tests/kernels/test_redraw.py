"""The check of received rows: candidates are drawn again; what a row did not give is found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.draft_rows import DraftKeys, draft_rows
from kernels.redraw import redraw
from kernels.reference_rows import is_redrawn
from kernels.sampling import Rule, workspace
from kernels.streams import Purpose
from tests.kernels.rounds import MASK_64

BASE = 60


@dataclass
class Received:
    """Sparse rows [batch, bucket, n] with the candidates they came with."""

    ids: Tensor
    weights: Tensor
    candidates: Tensor
    num_candidates: Tensor
    seeds: Tensor
    base_lens: Tensor
    rules: Tensor

    def checked(self, vocab_size: int) -> tuple[list[int], list[int]]:
        batch = self.candidates.shape[0]
        scratch = workspace(batch, self.ids.device)
        mismatches, judged = redraw(
            self.ids, self.weights, self.candidates, self.num_candidates, self.seeds,
            self.base_lens, self.rules, vocab_size, scratch,
        )  # fmt: skip
        assert not bool(scratch.any()), "a call must leave the workspace at zero"
        return mismatches.tolist(), judged.tolist()

    def expected(self) -> list[int]:
        """The first mismatch of every session by the reference."""
        found = []
        for session in range(self.candidates.shape[0]):
            found.append(-1)
            if self.rules[session] != Rule.RESIDUAL:
                continue
            for index in range(int(self.num_candidates[session])):
                ids = self.ids[session, index].cpu().long()
                base_len = int(self.base_lens[session])
                agrees = is_redrawn(
                    self.weights[session, index].cpu().float()[ids >= 0], ids[ids >= 0],
                    int(self.candidates[session, index]), int(self.seeds[session]) & MASK_64,
                    base_len + index, base_len,
                )  # fmt: skip
                if not agrees:
                    found[-1] = index
                    break
        return found


def received(
    device: str, batch: int, bucket: int, num_ids: int, vocab_size: int, seed: int = 0
) -> Received:
    """Random rows and the candidates that the reference draws from them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((batch, bucket, num_ids), -1, dtype=torch.int32)
    weights = torch.zeros(batch, bucket, num_ids)
    candidates = torch.zeros(batch, bucket, dtype=torch.int64)
    for session in range(batch):
        for index in range(bucket):
            count = num_ids if index == 0 else 1 + (session * 7 + index * 3) % num_ids
            own = torch.randperm(vocab_size, generator=generator)[:count].sort().values
            row = torch.rand(count, generator=generator).square() * 2.0**14
            ids[session, index, :count], weights[session, index, :count] = own.int(), row
            candidates[session, index] = reference.race(
                row, session, BASE + index, BASE, Purpose.PROPOSE, own
            )
    return Received(
        ids.to(device),
        weights.to(device),
        candidates.to(device),
        torch.full((batch,), bucket, dtype=torch.int32, device=device),
        torch.arange(batch, device=device),
        torch.full((batch,), BASE, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize(("bucket", "num_ids"), [(1, 1), (4, 40), (3, 1024)])
def test_honest_candidates_agree(device: str, bucket: int, num_ids: int) -> None:
    """What the reference drew is drawn again, in rows of one id and of 1024."""
    rows = received(device, 5, bucket, num_ids, 5000)
    assert rows.checked(5000) == ([-1] * 5, [bucket] * 5)


def test_rows_of_the_draft_op_agree(device: str) -> None:
    """What `draft_rows` wrote and drew passes, all rows of a batch."""
    batch, bucket, vocab_size = 3, 2, 3000
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(bucket, batch, vocab_size, generator=generator) * 2).to(device)
    rows = received(device, batch, bucket, 1024, vocab_size)
    for index in range(bucket):
        keys = DraftKeys(
            rows.seeds,
            rows.base_lens + index,
            rows.base_lens,
            rows.rules,
            torch.ones(batch, device=device),
        )
        drafted = draft_rows(logits[index], keys, vocab_size, workspace(batch, device))
        rows.ids[:, index], rows.weights[:, index] = drafted.ids, drafted.weights
        rows.candidates[:, index] = drafted.tokens
    assert rows.checked(vocab_size) == ([-1] * batch, [bucket] * batch)


def test_the_first_candidate_not_drawn_is_reported(device: str) -> None:
    """Another id of the row, an id without weight, outside it or outside the vocabulary."""
    rows = received(device, 6, 4, 40, 5000)
    rows.num_candidates[5] = 2
    ids, candidates = rows.ids, rows.candidates
    for session, index in ((0, 2), (0, 3), (1, 0)):
        own = ids[session, index][ids[session, index] >= 0]
        others = own[own != candidates[session, index]]
        if others.numel():
            candidates[session, index] = others[0]
    candidates[2, 1] = 5001
    candidates[3, 3] = -1  # never taken for padding
    rows.weights[4, 0][ids[4, 0] == candidates[4, 0]] = 0.0
    candidates[5, 3] = 4999  # not a candidate of the round
    mismatches, judged = rows.checked(5000)
    assert mismatches == rows.expected()
    assert mismatches == [2, 0, 1, 3, 0, -1]
    assert judged == [0, 0, 0, 0, 0, 2]


def test_only_residual_sessions_are_checked(device: str) -> None:
    """Coupled and greedy sessions send no rows; unused slots stay unused."""
    rows = received(device, 4, 2, 8, 100)
    rows.candidates += 1
    rows.rules[1], rows.rules[2] = Rule.COUPLED, Rule.GREEDY
    rows.num_candidates[3] = -1
    mismatches, judged = rows.checked(101)
    assert mismatches[1:] == [-1, -1, -1]
    assert judged == [0, 2, 2, -1]
    assert mismatches[0] == rows.expected()[0] >= 0


@pytest.mark.parametrize(("gap", "agrees"), [(2.0**-20, True), (2.0**-16, False)])
def test_a_near_tie_may_be_broken_either_way(device: str, gap: float, agrees: bool) -> None:
    """A candidate that finishes within 2^-18 of the winner passes, one at 2^-16 does not."""
    rows = received(device, 1, 1, 2, 50)
    rows.ids[0, 0] = torch.tensor([20, 40], dtype=torch.int32)
    times = reference.exponentials(0, torch.tensor([20, 40]), BASE, BASE, Purpose.PROPOSE)
    rows.weights[0, 0] = torch.stack([times[0], times[1] / (1 + gap)]).float()  # 20 ends first
    for candidate, expected in ((20, -1), (40, -1 if agrees else 0)):
        rows.candidates[0, 0] = candidate
        assert rows.checked(50)[0] == rows.expected() == [expected]


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -1.0])
def test_unsound_rows_are_mismatches(device: str, fault: float) -> None:
    """A weight that is no weight, or an id past the vocabulary, refutes its candidate."""
    rows = received(device, 3, 2, 30, 500)
    rows.weights[1, 0, 7] = fault
    rows.ids[2, 0, 29] = 500
    with np.errstate(invalid="ignore"):
        assert rows.checked(500)[0] == [-1, 0, 0]


def test_memory_layout_does_not_matter(device: str) -> None:
    """Rows in a wider buffer, and candidates of 32 bits, give the same."""
    rows = received(device, 3, 2, 20, 500)
    rows.candidates[1, 1] += 1
    expected = rows.checked(500)
    wide_ids = torch.full((3, 4, 64), 7, dtype=torch.int32, device=device)
    wide_weights = torch.full((3, 4, 64), 1e9, device=device)
    wide_ids[:, ::2, 1:21], wide_weights[:, ::2, 1:21] = rows.ids, rows.weights
    rows.ids, rows.weights = wide_ids[:, ::2, 1:21], wide_weights[:, ::2, 1:21]
    rows.candidates = rows.candidates.int()
    assert rows.checked(500) == expected


def test_an_empty_bucket_judges_nothing(device: str) -> None:
    """Plain decoding: no candidates, no mismatch."""
    rows = received(device, 2, 1, 4, 50)
    rows.ids, rows.weights = rows.ids[:, :0], rows.weights[:, :0]
    rows.candidates = rows.candidates[:, :0].contiguous()
    rows.num_candidates[:] = 0
    assert rows.checked(50) == ([-1, -1], [0, 0])


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    """The error names what does not fit."""
    rows = received(device, 2, 2, 4, 50)
    arguments = (rows.num_candidates, rows.seeds, rows.base_lens, rows.rules, 50)
    scratch = workspace(2, device)
    with pytest.raises(ValueError, match="do not fit"):
        redraw(rows.ids[:, :1], rows.weights[:, :1], rows.candidates, *arguments, scratch)
    with pytest.raises(ValueError, match="scratch"):
        redraw(rows.ids, rows.weights, rows.candidates, *arguments, scratch[:1])


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema and fake of specmesh::redraw agree with what it does."""
    rows = received(device, 2, 2, 4, 50)
    arguments = (
        rows.ids, rows.weights, rows.candidates, rows.num_candidates, rows.seeds, rows.base_lens,
        rows.rules, 50, workspace(2, device),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.specmesh.redraw.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
