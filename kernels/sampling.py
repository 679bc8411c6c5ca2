"""Speculative sampling on the device: `draw` for the draft side, `accept` for the target side.

Owns the public functions, what each argument means, and the ops `specmesh::draw` and
`specmesh::accept` that torch.compile and CUDA graphs see. The kernels are in `kernels/judging.py`,
`kernels/accept.py` and `kernels/draw.py`; the specification is `kernels/reference.py` (`race`,
`decide`, `decide_coupled`). Must not know requests, services or how rows were made. Nothing here
reads a device value on the host: all that varies lies in device tensors, and grids depend on shapes
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
from torch import Tensor

from kernels.accept import _close_kernel
from kernels.configs.sampling import Launch, close_launch, judge_launch
from kernels.draw import _draw_kernel
from kernels.judging import _judge_kernel
from kernels.row_state import LEAF, RACE_ROWS, TILE

MOST_SESSIONS = 65535  # of a round: places of a grid along its last axes


class Rule(IntEnum):
    """How a session decides: `reference.decide`, `decide_coupled`, or coupled with argmax."""

    RESIDUAL = 0
    COUPLED = 1
    GREEDY = 2


class Status(IntEnum):
    """Why a session emitted nothing. Only judged rows count."""

    OK = 0
    ROW_FAULT = 1  # NaN or +inf in a target row, or no finite score in it
    DRAFT_FAULT = 2  # candidate outside the vocabulary or of no weight, or an unsound draft row


class DraftKind(IntEnum):
    """What `DraftRows.rows` holds. Values are those of `kernels/closing_race.py`."""

    LOGITS = 1
    WEIGHTS = 2
    SPARSE = 3


@dataclass(frozen=True, slots=True)
class Round:
    """One round of `batch` sessions, on the device; bucket is the largest k of the batch.

    candidates: int [batch, bucket]. num_candidates: int32 [batch]; -1 marks an unused slot.
    seeds: int64 [batch], the bits of the unsigned 64-bit seed. base_lens: int32 [batch]. rules:
    int32 [batch] of `Rule`. temperatures: float32 [batch], > 0; not read for greedy sessions.
    stop_ids: int32 [batch, n], padded with -1. thresholds: float32 [batch, bucket + 1], the scores
    below which row i keeps nothing (`shaping.thresholds`), or None. first_rows: int32 [batch], the
    row of `logits` that judges candidate 0; None means batch-major rows, bucket + 1 a session.
    """

    candidates: Tensor
    num_candidates: Tensor
    seeds: Tensor
    base_lens: Tensor
    rules: Tensor
    temperatures: Tensor
    stop_ids: Tensor
    thresholds: Tensor | None = None
    first_rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows the candidates were drawn from; read for sessions under the residual rule only.

    LOGITS: rows [batch, bucket, width], with temperatures float32 [batch] and optional thresholds
    float32 [batch, bucket]. WEIGHTS: rows [batch, bucket, width], the law is w / sum(w). SPARSE:
    ids int32 [batch, bucket, n] ascending, padding -1 at the end, and rows [batch, bucket, n]
    their weights. exponents float32, masses int64 [batch, bucket]: what `draw` returned for LOGITS
    rows, so that these need not be summed again.
    """

    kind: DraftKind
    rows: Tensor
    ids: Tensor | None = None
    temperatures: Tensor | None = None
    thresholds: Tensor | None = None
    exponents: Tensor | None = None
    masses: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round emitted, on the device.

    tokens: int32 [batch, bucket + 1], -1 past the end. counts: int32 [batch, 3], the columns
    num_accepted, num_emitted, status; a session with a status other than OK emits nothing.
    log_probs: float32 [batch, bucket, 2], ln p(x_i) and ln q(x_i) of judged candidates (q is 0
    where it was not read). leaf_exponents float32, leaf_masses int64 [batch, slots, leaves]: what
    was summed of each row (`row_state`), target rows 0..num_candidates first; for `row_report`.
    """

    tokens: Tensor
    counts: Tensor
    log_probs: Tensor
    leaf_exponents: Tensor
    leaf_masses: Tensor

    @property
    def num_accepted(self) -> Tensor:
        return self.counts[:, 0]

    @property
    def num_emitted(self) -> Tensor:
        return self.counts[:, 1]

    @property
    def status(self) -> Tensor:
        return self.counts[:, 2]


@dataclass(frozen=True, slots=True)
class Draws:
    """One token a row: tokens int32, ln q(token) float32, the row's exponent and mass, status."""

    tokens: Tensor
    log_probs: Tensor
    exponents: Tensor
    masses: Tensor
    status: Tensor


def workspace(batch: int, device: torch.device | str) -> Tensor:
    """Scratch for `accept` and `draw` calls of up to `batch` sessions: int64 [batch, 3], zero.

    Arrival counters and best rates, returned to zero by every call. Calls that may run at the same
    time (two streams) need one each.
    """
    return torch.zeros(batch, 3, dtype=torch.int64, device=device)


def accept(
    logits: Tensor, round_: Round, draft: DraftRows | None, vocab_size: int, scratch: Tensor
) -> Outcome:
    """Decide one round of a batch in two launches, without touching the host.

    logits: bfloat16, float16 or float32 [rows, width], any strides; ids >= vocab_size never win.
    Draft rows and their ids may have any strides too; all other tensors must be contiguous.
    scratch: from `workspace`. Residual sessions with candidates need `draft`; without it they get
    DRAFT_FAULT. Raises ValueError on shapes, strides or kinds that do not fit, and on more than
    MOST_SESSIONS.
    """
    _require_round(round_)
    num_rows = round_.candidates.shape[0] * (round_.candidates.shape[1] + 1)
    if round_.first_rows is None and logits.shape[0] < num_rows:  # all are read ahead, used or not
        raise ValueError(f"the round needs {num_rows} rows of logits, there are {logits.shape[0]}")
    if draft is None:
        kind, draft = 0, DraftRows(DraftKind.LOGITS, logits.new_empty(0, 0, 0))
    else:
        kind = int(draft.kind)
        _require_draft(draft, round_)
    _require_scratch(scratch, round_.candidates.shape[0])
    return Outcome(
        *torch.ops.specmesh.accept(
            logits, round_.candidates, round_.num_candidates, round_.seeds, round_.base_lens,
            round_.rules, round_.temperatures, round_.stop_ids, round_.thresholds,
            round_.first_rows, kind, draft.rows, draft.ids, draft.temperatures, draft.thresholds,
            draft.exponents, draft.masses, vocab_size, scratch,
        )
    )  # fmt: skip


def _require_packed(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Kernels count to an element from the tensor's first: nothing may be missing or between."""
    if tensor is None:
        return
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, it must be contiguous")


def _require_scratch(scratch: Tensor, num_sessions: int) -> None:
    if scratch.shape[0] < num_sessions:
        raise ValueError(f"scratch holds {scratch.shape[0]} sessions, the call has {num_sessions}")
    _require_packed("scratch", scratch, (scratch.shape[0], 3))


def _require_round(round_: Round) -> None:
    if round_.candidates.ndim != 2:
        raise ValueError(f"candidates has shape {tuple(round_.candidates.shape)}, expected 2 axes")
    batch, bucket = round_.candidates.shape
    if batch > MOST_SESSIONS:
        raise ValueError(f"the round has {batch} sessions, at most {MOST_SESSIONS} fit a launch")
    _require_packed("candidates", round_.candidates, (batch, bucket))
    for name in ("num_candidates", "seeds", "base_lens", "rules", "temperatures", "first_rows"):
        _require_packed(name, getattr(round_, name), (batch,))
    _require_packed("stop_ids", round_.stop_ids, (batch, round_.stop_ids.shape[-1]))
    _require_packed("thresholds", round_.thresholds, (batch, bucket + 1))


def _require_draft(draft: DraftRows, round_: Round) -> None:
    if draft.rows.ndim != 3 or draft.rows.shape[:2] != round_.candidates.shape:
        raise ValueError(f"draft rows {tuple(draft.rows.shape)} do not fit the candidates")
    if draft.kind is DraftKind.SPARSE and (
        draft.ids is None or draft.ids.shape != draft.rows.shape
    ):
        raise ValueError("sparse draft rows need ids of the same shape")
    if draft.kind is DraftKind.LOGITS and draft.temperatures is None:
        raise ValueError("draft logits need temperatures")
    if (draft.masses is None) != (draft.exponents is None):
        raise ValueError("exponents and masses come together")
    if draft.masses is not None and draft.kind is not DraftKind.LOGITS:
        raise ValueError("only rows of logits may carry their masses")
    batch, bucket = round_.candidates.shape
    _require_packed("draft.temperatures", draft.temperatures, (batch,))
    for name in ("thresholds", "exponents", "masses"):
        _require_packed(f"draft.{name}", getattr(draft, name), (batch, bucket))


def _launch_accept(
    logits: Tensor, candidates: Tensor, num_candidates: Tensor, seeds: Tensor, base_lens: Tensor,
    rules: Tensor, temperatures: Tensor, stop_ids: Tensor, thresholds: Tensor | None,
    first_rows: Tensor | None, kind: int, draft: Tensor, draft_ids: Tensor | None,
    draft_temperatures: Tensor | None, draft_thresholds: Tensor | None,
    draft_exponents: Tensor | None, draft_masses: Tensor | None, vocab_size: int, scratch: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, bucket = candidates.shape
    outputs = _accept_outputs(candidates)
    num_leaves = triton.cdiv(vocab_size, LEAF)
    sparse = kind == DraftKind.SPARSE
    num_slots = _num_slots(bucket, kind, draft_masses)
    num_parts = (bucket + 1) * num_leaves
    if num_slots > bucket + 1:
        num_parts += bucket if sparse else bucket * num_leaves
    arrivals, best_rates, leaves_done = scratch.view(3, -1)
    partials = _leaf_outputs((batch, num_slots, num_leaves), logits.device)
    leaf_weights = torch.empty_like(partials[0]) if sparse else None
    ids_strides = draft_ids.stride() if sparse and draft_ids is not None else (0, 0, 0)
    strides = (*logits.stride(), *draft.stride(), *ids_strides)
    num_sparse = draft.shape[-1] if sparse else 0
    sparse_pad = max(32, triton.next_power_of_2(num_sparse))
    judge, close = judge_launch(logits.device), close_launch(logits.device)
    rows = (
        logits, first_rows, candidates, num_candidates, seeds, base_lens, rules, temperatures,
        thresholds,
    )  # fmt: skip
    drafts = (draft, draft_ids, draft_temperatures, draft_thresholds)
    _judge_kernel[(num_parts, batch) if sparse else (num_leaves, num_parts // num_leaves, batch)](
        *rows, *drafts, *partials, leaf_weights, leaves_done, *strides,
        vocab_size, num_leaves, num_sparse, num_slots,
        BUCKET=bucket, KIND=kind, SPARSE_PAD=sparse_pad, TILE=TILE.value, RUN=_race_run(judge),
        EARLY=close.early, num_warps=judge.num_warps,
        maxnreg=judge.sum_cap(logits.element_size()),
    )  # fmt: skip
    num_tiles = triton.cdiv(vocab_size, close.size)
    per_program = close.tiles_a_program(batch * num_tiles)
    num_groups = triton.cdiv(num_tiles, per_program)
    leftovers = logits.new_empty(batch, num_groups, dtype=torch.float32)
    _close_kernel[(num_groups, batch)](
        *rows, stop_ids, *drafts, draft_exponents, draft_masses, *partials, leaf_weights,
        leaves_done, arrivals, best_rates, leftovers, *outputs, *strides,
        vocab_size, num_leaves, stop_ids.shape[1], num_sparse, num_slots, num_parts, num_groups,
        BUCKET=bucket, BUCKET_PAD=max(2, triton.next_power_of_2(bucket + 1)),
        LEAVES_PAD=max(2, triton.next_power_of_2(num_leaves)), KIND=kind,
        STOPS_PAD=max(2, triton.next_power_of_2(stop_ids.shape[1])), SPARSE_PAD=sparse_pad,
        GROUPS_PAD=max(2, triton.next_power_of_2(num_groups)), RUN=close.run,
        TILES=per_program * (close.rows // 4), STAGES=close.stages,
        num_warps=close.num_warps, maxnreg=close.max_registers, launch_pdl=close.early,
    )  # fmt: skip
    return (*outputs, *partials[:2])


def _num_slots(bucket: int, kind: int, draft_masses: Tensor | None) -> int:
    """Rows of a session whose leaves are summed: the target's, then the draft's if need be."""
    return 2 * bucket + 1 if kind and draft_masses is None else bucket + 1


def _race_run(launch: Launch) -> int:
    """Ids raced side by side in a leaf: `RACE_ROWS` runs must not exceed a tile."""
    return min(launch.run, int(TILE.value) // int(RACE_ROWS.value))


def _leaf_outputs(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents, masses and packed winners of leaves."""
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )


def _accept_outputs(candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, bucket = candidates.shape
    return (
        candidates.new_empty(batch, bucket + 1, dtype=torch.int32),
        candidates.new_empty(batch, 3, dtype=torch.int32),
        candidates.new_empty(batch, bucket, 2, dtype=torch.float32),
    )


_accept = torch.library.custom_op("specmesh::accept", _launch_accept, mutates_args=("scratch",))


@_accept.register_fake
def _accept_fake(
    logits, candidates, _num, _seeds, _base_lens, _rules, _temperatures, _stop_ids, _thresholds,
    _first_rows, kind, _draft, _draft_ids, _draft_temperatures, _draft_thresholds,
    _draft_exponents, draft_masses, vocab_size, _scratch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip  # mirrors _launch_accept
    batch, bucket = candidates.shape
    slots = _num_slots(bucket, kind, draft_masses)
    leaves = _leaf_outputs((batch, slots, triton.cdiv(vocab_size, LEAF)), logits.device)
    return (*_accept_outputs(candidates), *leaves[:2])


def draw(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    base_lens: Tensor,
    rules: Tensor,
    temperatures: Tensor,
    vocab_size: int,
    scratch: Tensor,
    thresholds: Tensor | None = None,
) -> Draws:
    """Draw one token from every row in one launch: the draft's proposals.

    logits [rows, width], any strides; seeds int64, positions, base_lens, rules int32, temperatures
    float32 (> 0 unless greedy), thresholds float32 or None: [rows] each, contiguous. Residual rows
    race with PROPOSE noise keyed by base_len, coupled rows with COUPLED noise, greedy rows take the
    argmax (their log_prob is 0). A row with NaN, +inf or no finite score gets token -1 and
    ROW_FAULT. scratch: from `workspace`, for at least as many sessions as rows. Raises ValueError
    on shapes or strides that do not fit.
    """
    rows = (logits.shape[0],)
    for name, column in (
        ("seeds", seeds), ("positions", positions), ("base_lens", base_lens), ("rules", rules),
        ("temperatures", temperatures), ("thresholds", thresholds),
    ):  # fmt: skip
        _require_packed(name, column, rows)
    _require_scratch(scratch, logits.shape[0])
    return Draws(
        *torch.ops.specmesh.draw(
            logits, seeds, positions, base_lens, rules, temperatures, thresholds, vocab_size,
            scratch,
        )
    )  # fmt: skip


def _launch_draw(
    logits: Tensor, seeds: Tensor, positions: Tensor, base_lens: Tensor, rules: Tensor,
    temperatures: Tensor, thresholds: Tensor | None, vocab_size: int, scratch: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    outputs = _draw_outputs(logits)
    num_rows = logits.shape[0]
    num_leaves = triton.cdiv(vocab_size, LEAF)
    judge = judge_launch(logits.device)
    _draw_kernel[(num_rows * num_leaves,)](
        logits, seeds, positions, base_lens, rules, temperatures, thresholds,
        *_leaf_outputs((num_rows, num_leaves), logits.device), scratch, *outputs,
        *logits.stride(), vocab_size, num_leaves,
        LEAVES_PAD=max(2, triton.next_power_of_2(num_leaves)), TILE=TILE.value,
        RUN=_race_run(judge), num_warps=judge.num_warps, maxnreg=judge.max_registers,
    )  # fmt: skip
    return outputs


def _draw_outputs(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.int32),
    )


_draw = torch.library.custom_op("specmesh::draw", _launch_draw, mutates_args=("scratch",))


@_draw.register_fake
def _draw_fake(
    logits, *_others
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # mirrors _launch_draw
    return _draw_outputs(logits)
