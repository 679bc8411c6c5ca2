"""Acceptance on samples that are never trained on: answers to held-out prompts, and free text.

The samples are drawn once, before training, with the target's states; an evaluation is one pass of
the student over them. Must not know schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specmesh.distill.attention import Backend, forward_rows
from specmesh.distill.losses import LossWeights, distillation_loss
from specmesh.distill.sampling import Opening, Rows, Sampler, Turn
from specmesh.distill.transformer import Transformer

_ROWS_A_PASS = 32
_NO_LOSS = LossWeights(kl=1.0, tv=1.0)


@dataclass(frozen=True, slots=True)
class Score:
    """Means over held-out tokens: acceptance (sum of min(p, q)) at temperature 1, forward KL."""

    acceptance: float
    kl: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out rows by name ("answers", "free"), and whose tokens count in each."""

    rows: dict[str, tuple[Rows, Turn]]

    @classmethod
    def draw(
        cls,
        sampler: Sampler,
        openings: dict[str, list[Opening]],
        num_rows: int,
        generator: torch.Generator,
    ) -> HeldOut:
        """Sample num_rows rows of each name that has openings; they are copied."""
        rows = {}
        for name, each in openings.items():
            repeated = each * -(-sampler.num_rows // len(each))
            drawn = sampler.draw(repeated, generator).take(slice(0, num_rows))
            kept = Rows(*(field.clone() for field in drawn.fields()))
            rows[name] = (kept, each[0].turn)
        return cls(rows)

    @torch.no_grad()
    def scores(self, student: Transformer, backend: Backend) -> dict[str, Score]:
        """Score the student. Under a restricted head both laws are those of its ids."""
        return {
            name: _score(rows, turn, student, backend) for name, (rows, turn) in self.rows.items()
        }


def _score(rows: Rows, turn: Turn, student: Transformer, backend: Backend) -> Score:
    sums = torch.zeros(3, dtype=torch.float64, device=rows.tokens.device)
    for begin in range(0, rows.num_rows, _ROWS_A_PASS):
        part = rows.take(slice(begin, begin + _ROWS_A_PASS))
        counted = (part.turns == int(turn)).flatten()
        is_mixed = part.tokens.device.type == "cuda"
        states = forward_rows(student, part.tokens, part.starts, backend, is_mixed=is_mixed)
        hidden = states.flatten(0, 1)[counted]
        ones = torch.ones(len(hidden), device=hidden.device)
        theirs = part.hidden.flatten(0, 1)[counted]
        _, kl, overlap = distillation_loss(hidden, theirs, student.head, ones, _NO_LOSS)
        sums += torch.stack((overlap.double().sum(), kl.double().sum(), ones.double().sum()))
    overlap_sum, kl_sum, count = sums.tolist()
    return Score(overlap_sum / max(1, count), kl_sum / max(1, count), int(count))
