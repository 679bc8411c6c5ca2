"""What `accept` and `draw` count through without strides is checked before a kernel reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.sampling import (
    MOST_SESSIONS,
    DraftKind,
    DraftRows,
    Round,
    accept,
    draw,
    workspace,
)
from tests.kernels.rounds import round_of

BATCH, BUCKET, VOCAB = 2, 3, 64


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, another one behind each."""
    return torch.stack((tensor, torch.ones_like(tensor)), -1)[..., 0]


def too_short(tensor: Tensor) -> Tensor:
    """Without its last session."""
    return tensor[:-1]


CHANGES = (with_gaps, too_short)
Call = tuple[Tensor, Round, DraftRows, Tensor]


def packed_accept(device: str) -> Call:
    """Logits, round, rows and scratch of a call of `accept` that is fine."""
    full = {"device": device, "dtype": torch.float32}
    round_ = round_of(
        torch.zeros(BATCH, BUCKET, dtype=torch.int64, device=device),
        thresholds=torch.full((BATCH, BUCKET + 1), -100.0, **full),
        first_rows=torch.tensor([0, BUCKET + 1], dtype=torch.int32, device=device),
    )
    draft = DraftRows(
        DraftKind.LOGITS,
        torch.zeros(BATCH, BUCKET, VOCAB, **full),
        temperatures=torch.ones(BATCH, **full),
        thresholds=torch.full((BATCH, BUCKET), -100.0, **full),
        exponents=torch.full((BATCH, BUCKET), 7.0, **full),
        masses=torch.ones(BATCH, BUCKET, dtype=torch.int64, device=device),
    )
    logits = torch.zeros(BATCH * (BUCKET + 1), VOCAB, **full)
    return logits, round_, draft, workspace(BATCH, device)


def packed_draw(device: str) -> dict[str, Tensor]:
    """The columns of a call of `draw` that is fine."""
    return {
        "seeds": torch.arange(BATCH, device=device),
        "positions": torch.full((BATCH,), 40, dtype=torch.int32, device=device),
        "base_lens": torch.full((BATCH,), 33, dtype=torch.int32, device=device),
        "rules": torch.zeros(BATCH, dtype=torch.int32, device=device),
        "temperatures": torch.ones(BATCH, device=device),
        "thresholds": torch.full((BATCH,), -100.0, device=device),
        "scratch": workspace(BATCH, device),
    }


def test_what_is_packed_is_taken(device: str) -> None:
    """The calls that the tests below spoil, one field at a time, are fine as they are."""
    logits, round_, draft, scratch = packed_accept(device)
    accept(logits, round_, draft, VOCAB, scratch)
    draw(torch.zeros(BATCH, VOCAB, device=device), vocab_size=VOCAB, **packed_draw(device))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name",
    [
        "candidates", "num_candidates", "seeds", "base_lens", "rules", "temperatures", "stop_ids",
        "thresholds", "first_rows", "draft.temperatures", "draft.thresholds", "draft.exponents",
        "draft.masses", "scratch",
    ],
)  # fmt: skip
def test_accept_refuses_what_is_not_packed(
    device: str, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """A tensor with gaps or too few elements is refused by name: a kernel would read what lies
    there in place of it."""
    logits, round_, draft, scratch = packed_accept(device)
    owner, _, field = name.rpartition(".")
    if name == "scratch":
        scratch = change(scratch)
    elif owner:
        draft = replace(draft, **{field: change(getattr(draft, field))})
    else:
        round_ = replace(round_, **{field: change(getattr(round_, field))})
    # All else is measured against the candidates: with a session less of them, others are too long.
    blamed = "num_candidates" if (name, change) == ("candidates", too_short) else name
    with pytest.raises(ValueError, match=rf"^{blamed} (has|holds)"):
        accept(logits, round_, draft, VOCAB, scratch)


def test_accept_refuses_more_sessions_than_a_grid_has_places() -> None:
    """Refused by name before anything is launched, and not by the driver."""
    round_ = round_of(torch.zeros(MOST_SESSIONS + 1, 1, dtype=torch.int64))
    logits = torch.zeros(1, VOCAB).expand(2 * (MOST_SESSIONS + 1), VOCAB)
    with pytest.raises(ValueError, match="65536 sessions"):
        accept(logits, round_, None, VOCAB, workspace(1, "cpu"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name", ["seeds", "positions", "base_lens", "rules", "temperatures", "thresholds", "scratch"]
)
def test_draw_refuses_what_is_not_packed(
    device: str, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """The same of the draft's draw."""
    columns, logits = packed_draw(device), torch.zeros(BATCH, VOCAB, device=device)
    with pytest.raises(ValueError, match=rf"^{name} (has|holds)"):
        draw(logits, vocab_size=VOCAB, **{**columns, name: change(columns[name])})
