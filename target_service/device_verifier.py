"""Verifying on the device: accept, residual and bonus of all sessions of a step in one program.

Owns the target's part of a captured step: received rows in, verdicts out. Sparse rows are drawn
again on the device before they are believed (DESIGN section 5); a session whose draft lied is
decided as if nothing were proposed. What the device does not know (dense rows, bias, penalties,
log probabilities, audits, decisions at the coordinator) is left to `verifier.py`. Must not know
links or programs' layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.redraw import redraw
from kernels.row_report import RowReport, row_report
from kernels.sampling import DraftKind, DraftRows, Round, Status, accept, workspace
from kernels.shaping import thresholds
from protos.specmesh.v1 import target_pb2
from specmesh import wire
from specmesh.engine.device_side import (
    bucket_for,
    clear_parameters,
    filters_of,
    pack_parameters,
    parameter_fields,
    query_lens,
)
from specmesh.engine.role import Part
from specmesh.engine.scheduler import Segment, Task
from specmesh.engine.sessions import Session
from specmesh.engine.step_buffers import FLOAT32, Field, HostArrays
from specmesh.engine.step_programs import ProgramBuffers, StepShape
from specmesh.errors import NumericFault
from specmesh.sparse_rows import SparseRows
from target_service.verifier import MAX_CHAIN, Verifying, answer

MAX_STOP_IDS = 16  # a session with more is decided by the role
ID_BUCKETS = (256, wire.MAX_SPARSE_IDS)
PASS_COUNTS = (1, 4, MAX_CHAIN)  # chains of plain decoding
MOST = 0.75  # of the sessions in a step: as many can use a chain to its end
UNUSED = -1  # num_candidates of a sequence that the device does not decide


class TargetSampler:
    """The decision on every sequence; see `step_programs.Sampler`."""

    def __init__(self, vocab_size: int, max_seqs: int, device: torch.device) -> None:
        self.vocab_size, self.max_seqs = vocab_size, max_seqs
        self._scratch = workspace(max_seqs, device)

    def input_fields(self, shape: StepShape) -> Sequence[Field]:
        """Parameters, candidates and the rows they came with."""
        slots, bucket = shape.num_slots, shape.rows_per_seq - 1
        return [
            *parameter_fields(slots),
            Field("num_candidates", (slots,)),
            Field("later_candidates", (slots,)),  # the same in passes after the first
            Field("stop_ids", (slots, MAX_STOP_IDS)),
            Field("candidates", (slots, bucket)),
            Field("draft_ids", (slots, bucket, shape.num_ids)),
            Field("draft_weights", (slots, bucket, shape.num_ids), FLOAT32),
        ]

    def output_fields(self, shape: StepShape) -> Sequence[Field]:
        """Per pass and sequence: tokens and counts, what was judged, and what is reported."""
        passes, slots, rows = shape.num_passes, shape.num_slots, shape.rows_per_seq
        bucket = rows - 1
        return [
            Field("tokens", (passes, slots, rows)),
            Field("counts", (passes, slots, 3)),  # num_accepted, num_emitted, status
            Field("judged", (slots, bucket, 3), FLOAT32),  # p(x), q(x), overlap
            Field("mismatch", (slots,)),
            Field("max_probs", (passes, slots, rows), FLOAT32),
            Field("is_argmax", (passes, slots, rows)),
            Field("faults", (passes, slots, rows)),
        ]

    def sample(
        self,
        logits: Tensor,
        buffers: ProgramBuffers,
        shape: StepShape,
        pass_index: int,
        *,
        is_fed_by_host: bool,
    ) -> Tensor:
        """See `step_programs.Sampler`. Passes that the host does not feed decode a token each."""
        inputs, outputs = buffers.inputs.device, buffers.outputs.device
        rows = shape.rows_per_seq if is_fed_by_host else 1
        # A round with candidates ends with the first pass, also where others decode on.
        num_candidates = inputs["num_candidates" if is_fed_by_host else "later_candidates"]
        candidates = inputs["candidates"][:, : rows - 1]
        draft = None
        if rows > 1 and shape.num_ids:
            draft = DraftRows(DraftKind.SPARSE, inputs["draft_weights"], inputs["draft_ids"])
            mismatch, num_candidates = redraw(
                inputs["draft_ids"], inputs["draft_weights"], candidates, num_candidates,
                inputs["seeds"], inputs["base_lens"], inputs["rules"], self.vocab_size,
                self._scratch,
            )  # fmt: skip
            outputs["mismatch"].copy_(mismatch)
        limits = None
        if shape.is_filtered:
            limits = thresholds(
                logits, filters_of(inputs), rows, self.vocab_size, num_rows=num_candidates + 1
            )
        round_ = Round(
            candidates=candidates,
            num_candidates=num_candidates,
            seeds=inputs["seeds"],
            # A later pass has no candidates: its base is all that was fed.
            base_lens=inputs["base_lens" if is_fed_by_host else "context_lens"],
            rules=inputs["rules"],
            temperatures=inputs["temperatures"],
            stop_ids=inputs["stop_ids"],
            thresholds=limits,
        )
        outcome = accept(logits, round_, draft, self.vocab_size, self._scratch)
        figures = RowReport(
            max_probs=outputs["max_probs"][pass_index, :, :rows],
            is_argmax=outputs["is_argmax"][pass_index, :, :rows],
            faults=outputs["faults"][pass_index, :, :rows],
            judged=outputs["judged"][:, : rows - 1],
        )
        row_report(logits, round_, draft, outcome, self.vocab_size, figures)
        tokens = outputs["tokens"][pass_index, :, :rows]
        tokens.copy_(outcome.tokens)
        outputs["counts"][pass_index].copy_(outcome.counts)
        return tokens[:, 0]


@dataclass(frozen=True, slots=True)
class DecidedStep:
    """What a step decided; see `TargetSampler.output_fields`. All but faults is copied.

    By slot and row of the first pass: tokens, max_probs, is_argmax; counts by slot. By slot and
    pass, of its one token of plain decoding: drawn, statuses, drawn_max_probs, drawn_is_argmax.
    """

    tokens: list[list[int]]
    counts: list[list[int]]
    max_probs: list[list[float]]
    is_argmax: list[list[bool]]
    judged: list[list[list[float]]]
    mismatches: list[int]
    drawn: list[list[int]]
    statuses: list[list[int]]
    drawn_max_probs: list[list[float]]
    drawn_is_argmax: list[list[bool]]
    faults: npt.NDArray[np.int32]


class DeviceVerifier:
    """The target's device side; see `specmesh.engine.device_side.DeviceSide`."""

    def __init__(
        self,
        vocab_size: int,
        max_seqs: int,
        max_num_draft_tokens: int,
        device: torch.device,
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> None:
        """max_seqs: sequences of the largest program. on_mismatch: counts refuted proposals."""
        self._on_mismatch = on_mismatch
        self.sampler = TargetSampler(vocab_size, max_seqs, device)
        self.max_query_len = max_num_draft_tokens + 1
        self._row_buckets = query_lens(self.max_query_len)

    def make_sampler(self) -> Callable[[torch.device], TargetSampler]:
        """Makes such samplers in other processes."""
        return partial(TargetSampler, self.sampler.vocab_size, self.sampler.max_seqs)

    def takes(self, task: Task) -> bool:
        """Whether verdict and report follow from logits, filters and sparse rows alone."""
        verifying: Verifying = task.role_state
        return verifying.on_device

    def can_decide(self, session: Session, verifying: Verifying, base_len: int) -> bool:
        """The same, worked out when a command is checked."""
        if verifying.at_coordinator or verifying.audit:
            return False
        if session.opening.sampling.HasField("num_logprobs"):
            return False
        shaper = session.shaper
        output_len = base_len - shaper.prompt_len
        if len(shaper.stop_ids) > MAX_STOP_IDS or shaper.depends_on_ids(output_len):
            return False
        rows = verifying.candidates.rows
        return not rows or (isinstance(rows, SparseRows) and rows.max_size <= ID_BUCKETS[-1])

    def num_wanted(self, task: Task) -> int:
        """Tokens of plain decoding still to come; 0 for a round with candidates."""
        verifying: Verifying = task.role_state
        if verifying.candidates.tokens:
            return 0
        return max(1, verifying.num_steps - verifying.steps_done)

    def chain_len(self, wanted: Sequence[int], num_holders: int) -> int:
        """The longest chain that most of the step's sessions can use to its end.

        Sessions that have steps left come back at every chain's end; those between commands wait
        for one chain at most. One pass where that would be most of all sessions: their commands
        come one by one, and the batch would fall into parts that each read all weights. One pass
        too where a round with candidates is among them: its coordinator waits.
        """
        if 2 * len(wanted) < num_holders or not all(wanted):
            return 1
        served = sorted(wanted, reverse=True)[math.ceil(MOST * len(wanted)) - 1]
        return max(count for count in PASS_COUNTS if count <= served)

    def shape(self, segments: Sequence[Segment]) -> tuple[int, int, bool]:
        """Rows for the most candidates, ids for the widest received row, filters where any."""
        rows, ids, filtered = 1, 0, False
        for segment in segments:
            received = segment.task.role_state.candidates.rows
            rows = max(rows, segment.num_rows)
            if received and self.takes(segment.task):
                ids = max(ids, received.max_size)
            filtered = filtered or segment.task.session.shaper.is_filtered()
        return rows, ids, filtered

    def round_up(self, rows_per_seq: int, num_ids: int) -> tuple[int, int]:
        """Rows of 0, 1, 2, 4, 8 candidates, ids of two sizes: each is a kernel of its own."""
        return bucket_for(rows_per_seq, self._row_buckets), bucket_for(num_ids, (0, *ID_BUCKETS))

    def base_shapes(self, num_seqs: Sequence[int], contexts: Sequence[int]) -> list[StepShape]:
        """Plain decoding in every chain, and rounds of every k."""
        cells = [(count, context) for count in num_seqs for context in contexts]
        return [
            StepShape(count, 1, 0, passes, 1, context)
            for count, context in cells
            for passes in PASS_COUNTS
        ] + [
            StepShape(count, rows, 0, 1, rows, context, ID_BUCKETS[-1])
            for count, context in cells
            for rows in self._row_buckets[1:]
        ]

    def clear(self, host: HostArrays) -> None:
        """Make every sequence padding."""
        clear_parameters(host)
        host["num_candidates"].fill(UNUSED)
        host["later_candidates"].fill(UNUSED)
        host["stop_ids"].fill(-1)

    def pack(self, task: Task, slot: int, host: HostArrays) -> None:
        """Write a session's parameters, candidates and rows."""
        session, candidates = task.session, task.role_state.candidates
        pack_parameters(session, session.ledger.confirmed_len, slot, host)
        count = len(candidates.tokens)
        host["num_candidates"][slot] = count
        host["later_candidates"][slot] = UNUSED if count else 0
        stop_ids = sorted(session.shaper.stop_ids)
        host["stop_ids"][slot, : len(stop_ids)] = stop_ids
        host["candidates"][slot, :count] = candidates.tokens
        for index in range(len(candidates.rows)):
            ids, weights = candidates.rows.part(index)
            host["draft_ids"][slot, index, : len(ids)] = ids
            host["draft_ids"][slot, index, len(ids) :] = -1
            host["draft_weights"][slot, index, : len(ids)] = weights

    def read(self, outputs: HostArrays) -> DecidedStep:
        """The outputs of a step as Python values, once for all its sessions."""
        return decided_step(outputs)

    def commit(
        self, task: Task, slot: int, num_passes: int, step: DecidedStep
    ) -> target_pb2.Verdict | Part:
        """The verdict, or the next part of it. Raises NumericFault."""
        if task.role_state.candidates.tokens:
            return self._commit_round(task, slot, step)
        ledger, stop_ids = task.session.ledger, task.session.shaper.stop_ids
        tokens = step.drawn[slot][:num_passes]
        if not stop_ids.isdisjoint(tokens):
            tokens = tokens[: 1 + min(tokens.index(stop) for stop in stop_ids if stop in tokens)]
        count = len(tokens)
        if any(step.statuses[slot][:count]):
            raise NumericFault(f"a row after position {ledger.confirmed_len} holds no law")
        ledger.settle(0)
        ledger.extend(tokens)
        if count > 1:
            ledger.wrote(ledger.confirmed_len - 1)  # all but the last were fed in this chain
        verdict = target_pb2.Verdict(
            tokens=tokens,
            closing=target_pb2.CLOSING_BONUS,
            emitted=map(_emitted, step.drawn_is_argmax[slot], step.drawn_max_probs[slot][:count]),
        )
        return answer(task, num_passes, tokens[-1], verdict)

    def _commit_round(self, task: Task, slot: int, step: DecidedStep) -> target_pb2.Verdict | Part:
        """A round with candidates: one pass."""
        verifying: Verifying = task.role_state
        ledger, candidates = task.session.ledger, verifying.candidates
        verdict = verifying.verdict
        num_believed = len(candidates.tokens)
        if candidates.rows and step.mismatches[slot] >= 0:
            verdict.redraw_mismatch = step.mismatches[slot]
            self._on_mismatch()
            num_believed = 0
        num_accepted, num_emitted, status = step.counts[slot]
        if status != Status.OK:
            raise NumericFault(f"a row after position {ledger.confirmed_len} holds no law")
        tokens = step.tokens[slot][:num_emitted]
        verdict.num_accepted = num_accepted
        verdict.closing = _closing(num_accepted, num_emitted, num_believed)
        verdict.tokens.extend(tokens)
        verdict.emitted.extend(
            map(_emitted, step.is_argmax[slot], step.max_probs[slot][:num_emitted])
        )
        for row in range(min(num_emitted, num_believed)):
            target_prob, draft_prob, overlap = step.judged[slot][row]
            judged = verdict.judged.add(target_prob=target_prob)
            if candidates.rows:  # without a row of the draft, p(x) alone
                judged.draft_prob, judged.overlap = draft_prob, overlap
        unjudged = slice(num_emitted, len(candidates.tokens) + 1)
        task.is_tainted |= bool(step.faults[0, slot, unjudged].any())
        ledger.settle(num_accepted)
        ledger.extend(tokens)
        task.fed.clear()
        task.num_rows = 1
        return answer(task, 1, tokens[-1], verdict)


def decided_step(outputs: HostArrays) -> DecidedStep:
    """The outputs of a step, copied out of the buffers that the next one fills."""
    tokens, counts = outputs["tokens"], outputs["counts"]
    max_probs, is_argmax = outputs["max_probs"], outputs["is_argmax"] != 0
    return DecidedStep(
        tokens=tokens[0].tolist(),
        counts=counts[0].tolist(),
        max_probs=max_probs[0].tolist(),
        is_argmax=is_argmax[0].tolist(),
        judged=outputs["judged"].tolist(),
        mismatches=outputs["mismatch"].tolist(),
        drawn=tokens[:, :, 0].T.tolist(),
        statuses=counts[:, :, 2].T.tolist(),
        drawn_max_probs=max_probs[:, :, 0].T.tolist(),
        drawn_is_argmax=is_argmax[:, :, 0].T.tolist(),
        faults=outputs["faults"],
    )


def _emitted(is_argmax: bool, max_prob: float) -> target_pb2.EmittedToken:
    return target_pb2.EmittedToken(is_argmax=is_argmax, max_prob=max_prob)


def _closing(num_accepted: int, num_emitted: int, num_believed: int) -> target_pb2.Closing:
    if num_emitted == num_accepted:
        return target_pb2.CLOSING_STOPPED
    if num_accepted < num_believed:
        return target_pb2.CLOSING_RECOVERED
    return target_pb2.CLOSING_BONUS
