"""What one column of sampled text says about a pair: acceptance, survival, agreement, encodings.

    acceptance  sum_x min(p(x), q(x)), the chance that a candidate drawn from q is kept
    kept        min(1, q(x) / p(x)) of the token x that the target drew: the chance, given that x
                was emitted, that it came as an accepted candidate

The product of `kept` over the candidates before a position weighs text that the target drew as
text that a round has accepted so far, so that conditional rates need no second sample (the
accepted token's law is min(p, q) / acceptance). Pure tensor functions; must not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ID_BYTES, HALF_BYTES, SINGLE_BYTES = 4, 2, 4
# The services' own `auto` rows (specmesh/wire.py): mass kept, and ids at most.
AUTO_MASS, AUTO_IDS = 0.99, 1024
TOP_SIZES = (256, 64)


@dataclass(frozen=True, slots=True)
class Columns:
    """Per-column figures, float32 [num_columns] each; encodings: (acceptance, bytes) by name."""

    acceptance: Tensor
    kept: Tensor
    agrees: Tensor
    encodings: Mapping[str, tuple[Tensor, Tensor]]


def judge(target: Tensor, draft: Tensor, next_ids: Tensor, temperature: float) -> Columns:
    """Compare rows of logits float [num_columns, vocab_size] at one temperature.

    next_ids: int64 [num_columns], what the target drew. Draft logits may be -inf.
    """
    p = (target.float() / temperature).softmax(-1)
    q = (draft.float() / temperature).softmax(-1)
    drawn = next_ids[:, None]
    kept = (q.gather(1, drawn) / p.gather(1, drawn).clamp(min=1e-30)).clamp(max=1.0)[:, 0]
    agrees = (target.argmax(-1) == draft.argmax(-1)).float()
    return Columns(_overlap(p, q), kept, agrees, dict(_encodings(p, q)))


def _overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def _encodings(p: Tensor, q: Tensor) -> list[tuple[str, tuple[Tensor, Tensor]]]:
    """Acceptance and bytes of a row when the draft draws from what the encoding keeps of it."""
    num_ids = q.shape[1]
    made: list[tuple[str, tuple[Tensor, Tensor]]] = []

    def add(name: str, law: Tensor, num_bytes: Tensor | float) -> None:
        size = num_bytes if isinstance(num_bytes, Tensor) else torch.full_like(law[:, 0], num_bytes)
        made.append((name, (_overlap(p, law / law.sum(-1, keepdim=True)), size)))

    add("float32", q, float(num_ids * SINGLE_BYTES))
    add("float16", round_to_half(q), float(num_ids * HALF_BYTES))
    order = q.topk(min(AUTO_IDS, num_ids), dim=-1)
    for size in TOP_SIZES:
        if size < num_ids:
            add(f"top-{size}", _only(q, order.indices[:, :size]),
                float(size * (ID_BYTES + HALF_BYTES)))  # fmt: skip
    before = order.values.cumsum(-1) - order.values
    is_needed = before < AUTO_MASS
    auto = torch.zeros_like(q).scatter_(1, order.indices, order.values * is_needed)
    add("auto", round_to_half(auto), is_needed.sum(-1).float() * (ID_BYTES + HALF_BYTES))
    return made


def _only(q: Tensor, ids: Tensor) -> Tensor:
    return round_to_half(torch.zeros_like(q).scatter_(1, ids, q.gather(1, ids)))


def round_to_half(weights: Tensor) -> Tensor:
    """float16 values of rows, scaled by a power of two into the type's range as on the wire."""
    exponent = torch.frexp(weights.amax(-1, keepdim=True)).exponent
    return torch.ldexp(weights, 15 - exponent).half().float()


def survival(acceptance: Tensor, kept: Tensor, run_left: Tensor, num_positions: int) -> Tensor:
    """Chance that candidates 1..i of a round are all accepted, float64 [num_positions].

    acceptance, kept: [rows, length]; run_left: int64 [rows, length], columns from here to the end
    of the same answer, this one included, 0 where no answer is written. Rounds may start at any
    column of an answer that has i columns left. Zero where no answer is that long.
    """
    alive = torch.ones_like(acceptance, dtype=torch.float64)
    chances = []
    length = acceptance.shape[1]
    for i in range(num_positions):
        if i >= length:
            chances.append(alive.new_zeros(()))
            continue
        starts = run_left[:, : length - i] > i
        here = alive[:, : length - i] * acceptance[:, i:].double()
        chances.append((here * starts).sum() / starts.sum().clamp(min=1))
        alive = alive[:, : length - i] * kept[:, i:].double()
    return torch.stack(chances)


def run_lengths(counted: Tensor, starts: Tensor) -> Tensor:
    """Columns left in each answer, int64 [rows, length], as `survival` takes them.

    counted: bool [rows, length], columns whose next token is counted; starts: bool, first columns
    of conversations.
    """
    left = torch.zeros_like(counted, dtype=torch.int64)
    following = left[:, 0]
    for column in range(counted.shape[1] - 1, -1, -1):
        following = torch.where(counted[:, column], following + 1, 0)
        left[:, column] = following
        # What precedes the first column of a conversation belongs to another one.
        following = torch.where(starts[:, column], 0, following)
    return left
