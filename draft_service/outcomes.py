"""How a round may end, as its draft sees it: what is worth drafting ahead for.

A round keeps j of k candidates and closes with a token: from [p - q]+ where the next candidate was
rejected, from p behind all of them. The target knows p, the draft q, and both the noise that the
target will draw with: the ids that finish its race first under q are those that most likely win it
under p, the rejected candidate aside. Nothing is drawn here: what is foreseen decides when
candidates are there, and never which (THEORY section 6), so that the target's noise may be looked
at. Measured on the shipped pair, answers at temperature 1 (RESULTS.md, `bench_outcomes.py`), the
first n ids of the race hold the token with probability

    n                      1     2     4     8    16    32
    behind a rejection   .20   .32   .46   .61   .72   .79
    behind all           .60   .74   .82   .88   .92   .93

so the n-th adds about RECOVERED / n, or BONUS / n**1.8. .60 / n**2.2 would fit better behind all,
and choose the same 4, 8, 16 or 32 outcomes of four candidates. A candidate is kept with probability
KEPT. Outcomes are ranked by the product. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import draft_pb2, session_pb2
from specmesh import wire
from specmesh.config import MAX_AHEAD

KEPT = 0.6
RECOVERED = 0.21
BONUS = 0.51


def is_foreseeable(proposal: draft_pb2.Proposal) -> bool:
    """Whether it is a whole proposal of sparse rows: dense ones are too many bytes to go with each
    outcome."""
    rows = proposal.distributions
    return len(rows) == len(proposal.tokens) > 0 and all(
        row.encoding in wire.SPARSE_TYPES for row in rows
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """What the target's draws of a round are keyed by."""

    seed: int
    base_len: int


def likely_outcomes(
    proposal: draft_pb2.Proposal,
    behind: session_pb2.Distribution | None,
    noise: Noise,
    num_outcomes: int,
) -> list[tuple[int, int]]:
    """(candidates kept, closing token) of at most num_outcomes outcomes, the likeliest first.

    proposal: of sparse rows. behind: the row behind all candidates, None where it is not known.
    """
    ids = closing_ids(proposal, behind, noise)
    return [
        (kept, ids[kept][place])
        for kept, place in ranked(len(proposal.tokens), num_outcomes)
        if kept < len(ids) and place < len(ids[kept])
    ]


def closing_ids(
    proposal: draft_pb2.Proposal, behind: session_pb2.Distribution | None, noise: Noise
) -> list[list[int]]:
    """For each number of candidates kept, MAX_AHEAD ids that may close the round, the likeliest
    first; for all of them only where `behind` is known."""
    tokens = list(proposal.tokens)
    races = _races(proposal.distributions, noise, 0, Purpose.RESIDUAL)
    found = [
        [token for token in ids if token != drawn] for ids, drawn in zip(races, tokens, strict=True)
    ]
    if behind is not None:
        found += _races([behind], noise, len(tokens), Purpose.BONUS)
    return [ids[:MAX_AHEAD] for ids in found]


@cache
def ranked(num_candidates: int, num_outcomes: int) -> tuple[tuple[int, int], ...]:
    """The num_outcomes likeliest outcomes as (candidates kept, place in the race), in order."""
    ranks = range(1, num_outcomes + 1)
    chances = [
        (-(KEPT**kept) * (1 - KEPT) * RECOVERED / rank, kept, rank - 1)
        for kept in range(num_candidates)
        for rank in ranks
    ]
    chances += [
        (-(KEPT**num_candidates) * BONUS / rank**1.8, num_candidates, rank - 1) for rank in ranks
    ]
    return tuple((kept, place) for _, kept, place in sorted(chances)[:num_outcomes])


def _races(
    rows: Sequence[session_pb2.Distribution], noise: Noise, first: int, purpose: Purpose
) -> list[list[int]]:
    """Ids of each sparse row, the first to finish the target's race first; row i races at position
    first + i of the round."""
    ids = [np.frombuffer(row.ids, wire.ID_TYPE).astype(np.int64) for row in rows]
    sizes = [len(each) for each in ids]
    positions = np.repeat(np.arange(len(rows)) + noise.base_len + first, sizes)
    weights = [np.frombuffer(row.values, wire.SPARSE_TYPES[row.encoding]) for row in rows]
    times = reference.exponentials(
        noise.seed, torch.from_numpy(np.concatenate(ids)), positions, noise.base_len, purpose
    )
    rates = np.concatenate(weights).astype(np.float64) / times.numpy()
    ends = np.cumsum(sizes)[:-1]
    return [
        own[np.argsort(-rate, kind="stable")[: MAX_AHEAD + 1]].tolist()
        for own, rate in zip(ids, np.split(rates, ends), strict=True)
    ]
