"""One draft step of a batch of rows: `specmesh::draft_rows`.

    ids and weights of each residual row = what `specmesh.wire` cuts under RowPolicy auto; the token
    is drawn from exactly these weights (exactness rule 1)

Owns the public function and the operator; the kernels are in `kernels/truncation.py`. The
specification is `reference.truncate`, float16 after a scaling by a power of two, and
`reference.race`. Must not know sessions or encodings. Nothing here reads a device value on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.configs.layers import launches_early
from kernels.configs.sampling import draft_launch
from kernels.row_state import RACE_ROWS, TILE
from kernels.truncation import BINS, SPAN, _keep_kernel, _survey_kernel

DROPPED_MASS = 0.01  # what may be left out of a row of more than MAX_SPARSE_IDS ids
MAX_SPARSE_IDS = 1024


@dataclass(frozen=True, slots=True)
class Truncation:
    """How much of a row that has more than max_ids ids stays: mass >= 1 - dropped_mass."""

    max_ids: int = MAX_SPARSE_IDS
    dropped_mass: float = DROPPED_MASS

    def __post_init__(self) -> None:
        """Raises ValueError when a value is out of range."""
        if not 1 <= self.max_ids <= MAX_SPARSE_IDS:
            raise ValueError(f"max_ids {self.max_ids} is not in [1, {MAX_SPARSE_IDS}]")
        if not 0.0 <= self.dropped_mass < 1.0:
            raise ValueError(f"dropped_mass {self.dropped_mass} is not in [0, 1)")


AS_SENT = Truncation()


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """What the draws of rows depend on beside their scores: [rows] each, on the device.

    seeds: int64, the bits of the unsigned 64-bit seed. positions, base_lens: int32. rules: int32 of
    `sampling.Rule`. temperatures: float32, > 0; not read for greedy rows.
    """

    seeds: Tensor
    positions: Tensor
    base_lens: Tensor
    rules: Tensor
    temperatures: Tensor


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """One token a row and the row it was drawn from, on the device; contiguous.

    tokens: int32 [rows]. ids: int32 [rows, max_ids], strictly ascending, then -1. weights: float32
    [rows, max_ids], the law is w / sum(w); where truncated is 1 they are float16 values, the
    largest in [2^14, 2^15). reports: int32 [rows, 3], the columns num_ids, truncated, status.
    dropped_mass: float32 [rows], the sum of [q - q']+ between the row before and after truncation
    and rounding, up to 2^-40 an id. Rows under other rules than residual have a token and no ids.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor
    reports: Tensor
    dropped_mass: Tensor

    @classmethod
    def empty(cls, rows: int, max_ids: int, device: torch.device | str) -> DraftedRows:
        """Memory for `rows` rows of up to max_ids ids."""
        return cls(
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, max_ids, dtype=torch.int32, device=device),
            torch.empty(rows, max_ids, dtype=torch.float32, device=device),
            torch.empty(rows, 3, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @property
    def num_ids(self) -> Tensor:
        return self.reports[:, 0]

    @property
    def truncated(self) -> Tensor:
        return self.reports[:, 1]

    @property
    def status(self) -> Tensor:
        return self.reports[:, 2]


_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def _launch_draft_rows(
    logits: Tensor, seeds: Tensor, positions: Tensor, base_lens: Tensor, rules: Tensor,
    temperatures: Tensor, thresholds: Tensor | None, vocab_size: int, dropped_mass: float,
    tokens: Tensor, ids: Tensor, weights: Tensor, reports: Tensor, dropped: Tensor,
    scratch: Tensor,
) -> None:  # fmt: skip
    rows, max_ids = ids.shape
    num_spans = triton.cdiv(vocab_size, SPAN)
    ids_pad = triton.next_power_of_2(max_ids)
    capacity = 2 * max(16, ids_pad)
    outputs = (tokens, ids, weights, reports, dropped)

    def partials(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    offsets = partials(rows, num_spans, dtype=torch.int32)
    plans = partials(rows, 6, dtype=torch.int64)
    launch, early = draft_launch(logits.device), launches_early(logits.device)
    _survey_kernel[(rows * num_spans,)](
        logits, seeds, positions, rules, temperatures, thresholds,
        partials(rows, num_spans, dtype=torch.float32),
        partials(rows, num_spans, dtype=torch.int64), partials(rows, num_spans, dtype=torch.int64),
        partials(rows, num_spans, BINS.value, dtype=torch.int16), offsets, plans, scratch,
        *outputs, *logits.stride(), vocab_size, num_spans, max_ids, dropped_mass,
        SPAN=SPAN, SPANS_PAD=max(2, triton.next_power_of_2(num_spans)), IDS_PAD=ids_pad,
        TILE=TILE.value, RUN=min(launch.run, TILE.value // RACE_ROWS.value), EARLY=early,
        num_warps=launch.num_warps, launch_pdl=early,
    )  # fmt: skip
    _keep_kernel[(rows * num_spans,)](
        logits, seeds, positions, base_lens, rules, temperatures, thresholds, offsets, plans,
        partials(rows, capacity, dtype=torch.int32), partials(rows, capacity, dtype=torch.float32),
        scratch, *outputs, *logits.stride(), vocab_size, num_spans, max_ids, dropped_mass,
        SPAN=SPAN, CAPACITY=capacity, IDS_PAD=ids_pad, SHIFT=_KEY_SHIFT[logits.dtype],
        EARLY=early, num_warps=launch.num_warps, launch_pdl=early,
    )  # fmt: skip


_draft_rows = torch.library.custom_op(
    "specmesh::draft_rows",
    _launch_draft_rows,
    mutates_args=("tokens", "ids", "weights", "reports", "dropped", "scratch"),
)


@_draft_rows.register_fake
def _draft_rows_fake(*_arguments) -> None:  # writes its outputs in place
    return None


def draft_rows(
    logits: Tensor,
    keys: DraftKeys,
    vocab_size: int,
    scratch: Tensor,
    thresholds: Tensor | None = None,
    *,
    truncation: Truncation = AS_SENT,
    out: DraftedRows | None = None,
) -> DraftedRows:
    """Draw one token from every row and give the rows as they are sent: two launches, no host.

    logits: bfloat16, float16 or float32 [rows, width], any strides. thresholds: float32 [rows], the
    score below which a row keeps nothing (`shaping.thresholds`), or None. scratch: from
    `sampling.workspace`, for at least as many sessions as rows. out: memory to write to
    (`DraftedRows.empty`, or slices of a buffer), returned.

    A residual row of at most max_ids ids is kept whole. Of a larger one the smallest set of mass
    >= 1 - dropped_mass stays, at most max_ids ids; of ids with equal scores at its edge, the lowest
    stay. Where no more than max_ids ids lie within 49 octaves of the largest weight, these are
    kept: the others hold less than vocab_size 2^-49 together. The token is drawn from exactly the
    weights returned, with PROPOSE noise keyed by base_len. Coupled rows race whole with COUPLED
    noise and greedy rows take the lowest argmax, with the bits of `sampling.draw`. A row with NaN,
    +inf or no finite score gets token -1, no ids and ROW_FAULT. Raises ValueError on a scratch that
    is too small and on memory that does not fit.
    """
    rows = logits.shape[0]
    if scratch.shape[0] < rows:
        raise ValueError(f"scratch holds {scratch.shape[0]} rows, the call has {rows}")
    if out is None:
        out = DraftedRows.empty(rows, truncation.max_ids, logits.device)
    elif out.ids.shape != (rows, truncation.max_ids) or out.weights.shape != out.ids.shape:
        raise ValueError(
            f"out holds {tuple(out.ids.shape)} ids, needed are {(rows, truncation.max_ids)}"
        )
    outputs = (out.tokens, out.ids, out.weights, out.reports, out.dropped_mass)
    if not all(output.is_contiguous() for output in outputs):
        raise ValueError("out must be contiguous")
    torch.ops.specmesh.draft_rows(
        logits, keys.seeds, keys.positions, keys.base_lens, keys.rules, keys.temperatures,
        thresholds, vocab_size, truncation.dropped_mass, *outputs, scratch,
    )  # fmt: skip
    return out
