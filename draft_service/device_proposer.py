"""Drafting on the device: a chain of passes draws all candidates, the host sends what was drawn.

Owns the draft's part of a captured step and the way back from its outputs to a Proposal. The rows
sent are the rows the device drew from (exactness rule 1). What the device does not know (bias,
penalties, suppressed stop ids, dense row policies) is left to `proposer.py`. Must not know links
or programs' layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.proposer import Drafting, cut
from kernels.draft_rows import DraftedRows, DraftKeys, Truncation, draft_rows
from kernels.sampling import Status, workspace
from kernels.shaping import thresholds
from protos.specmesh.v1 import draft_pb2, session_pb2
from specmesh import wire
from specmesh.engine.device_side import (
    clear_parameters,
    filters_of,
    pack_parameters,
    parameter_fields,
)
from specmesh.engine.scheduler import Segment, Task
from specmesh.engine.sessions import Session
from specmesh.engine.step_buffers import FLOAT32, Field, HostArrays
from specmesh.engine.step_programs import ProgramBuffers, StepShape
from specmesh.errors import NumericFault

TRUNCATION = Truncation(wire.MAX_SPARSE_IDS, wire.DROPPED_MASS)
MAX_CATCH_UP = 2  # tokens fed before the first draw: one, or two after full acceptance


class DraftSampler:
    """One draw a sequence and pass; see `step_programs.Sampler`."""

    def __init__(self, vocab_size: int, max_seqs: int, device: torch.device) -> None:
        self.vocab_size, self.max_seqs = vocab_size, max_seqs
        self._scratch = workspace(max_seqs, device)

    def input_fields(self, shape: StepShape) -> Sequence[Field]:
        """Sampling parameters."""
        return parameter_fields(shape.num_slots)

    def output_fields(self, shape: StepShape) -> Sequence[Field]:
        """Per pass and sequence: the token, its row and what the row lost."""
        passes, slots = shape.num_passes, shape.num_slots
        return [
            Field("tokens", (passes, slots)),
            Field("reports", (passes, slots, 3)),  # num_ids, truncated, status
            Field("dropped_mass", (passes, slots), FLOAT32),
            Field("ids", (passes, slots, wire.MAX_SPARSE_IDS)),
            Field("weights", (passes, slots, wire.MAX_SPARSE_IDS), FLOAT32),
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
        """See `step_programs.Sampler`."""
        del is_fed_by_host  # the token drawn sits behind what was fed, by whomever
        inputs, outputs = buffers.inputs.device, buffers.outputs.device
        limits = None
        if shape.is_filtered:
            limits = thresholds(logits, filters_of(inputs), 1, self.vocab_size)[:, 0]
        keys = DraftKeys(
            inputs["seeds"],
            inputs["context_lens"],  # the token drawn sits behind what was fed
            inputs["base_lens"],
            inputs["rules"],
            inputs["temperatures"],
        )
        out = DraftedRows(
            outputs["tokens"][pass_index],
            outputs["ids"][pass_index],
            outputs["weights"][pass_index],
            outputs["reports"][pass_index],
            outputs["dropped_mass"][pass_index],
        )
        draft_rows(
            logits, keys, self.vocab_size, self._scratch, limits, truncation=TRUNCATION, out=out
        )
        return out.tokens


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """What a step drew. tokens and dropped_mass: [slot][pass]; reports: [pass][slot] of (num_ids,
    truncated, status); ids and weights: [pass, slot, id], views of memory that the next step
    overwrites."""

    tokens: list[list[int]]
    reports: list[list[list[int]]]
    dropped_mass: list[list[float]]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


class DeviceProposer:
    """The draft's device side; see `specmesh.engine.device_side.DeviceSide`."""

    def __init__(
        self, vocab_size: int, max_seqs: int, max_num_draft_tokens: int, device: torch.device
    ) -> None:
        """max_seqs: sequences of the largest program."""
        self.sampler = DraftSampler(vocab_size, max_seqs, device)
        # A draft that is further behind catches up in a chunk, then draws in a shorter chain.
        self.max_query_len = MAX_CATCH_UP
        self._pass_counts = tuple(range(1, max_num_draft_tokens + 1))

    def make_sampler(self) -> Callable[[torch.device], DraftSampler]:
        """Makes such samplers in other processes."""
        return partial(DraftSampler, self.sampler.vocab_size, self.sampler.max_seqs)

    def takes(self, task: Task) -> bool:
        """Whether the session's rows follow from logits and filters alone, and are sent sparse."""
        drafting: Drafting = task.role_state
        return drafting.on_device

    def can_draw(self, session: Session, base_len: int) -> bool:
        """The same, worked out when a command is checked."""
        if session.shaper.depends_on_ids(base_len - session.shaper.prompt_len):
            return False
        policy = session.opening.row_policy or session_pb2.ROW_POLICY_AUTO
        sends_rows = not (session.is_coupled or session.shaper.is_greedy)
        return not sends_rows or policy == session_pb2.ROW_POLICY_AUTO

    def num_wanted(self, task: Task) -> int:
        """Rows still to draw from."""
        drafting: Drafting = task.role_state
        return max(1, drafting.num_wanted - drafting.num_rows)

    def chain_len(self, wanted: Sequence[int], num_holders: int) -> int:
        """All candidates of the largest proposal: a round waits for all of them."""
        return max(wanted)

    def shape(self, segments: Sequence[Segment]) -> tuple[int, int, bool]:
        """One row a sequence; filters where any session has them."""
        filtered = any(segment.task.session.shaper.is_filtered() for segment in segments)
        return 1, 0, filtered

    def round_up(self, rows_per_seq: int, num_ids: int) -> tuple[int, int]:
        """Nothing to round: one row a sequence, no received rows."""
        return rows_per_seq, num_ids

    def base_shapes(self, num_seqs: Sequence[int], contexts: Sequence[int]) -> list[StepShape]:
        """Every chain length at every batch, from one or two tokens fed."""
        return [
            StepShape(count, MAX_CATCH_UP, 0, passes, 1, context)
            for count in num_seqs
            for passes in self._pass_counts
            for context in contexts
        ]

    def clear(self, host: HostArrays) -> None:
        """Make every sequence padding."""
        clear_parameters(host)

    def pack(self, task: Task, slot: int, host: HostArrays) -> None:
        """Write a session's parameters; the round's base_len keys its noise."""
        pack_parameters(task.session, task.base_len, slot, host)

    def read(self, outputs: HostArrays) -> DrawnStep:
        """The outputs of a step, once for all its sessions."""
        return DrawnStep(
            tokens=outputs["tokens"].T.tolist(),
            reports=outputs["reports"].tolist(),
            dropped_mass=outputs["dropped_mass"].T.tolist(),
            ids=outputs["ids"],
            weights=outputs["weights"],
        )

    def commit(
        self, task: Task, slot: int, num_passes: int, step: DrawnStep
    ) -> draft_pb2.Proposal | None:
        """Take the candidates drawn; the proposal when its passes are done. Raises NumericFault."""
        drafting: Drafting = task.role_state
        session, ledger = task.session, task.session.ledger
        reports = [step.reports[index][slot] for index in range(num_passes)]
        num_sound = _num_sound(reports) if task.fault is None else 0
        frames = []
        if not (session.is_coupled or session.shaper.is_greedy):
            frames = [
                wire.sparse_frame(
                    step.ids[index, slot, :num_ids],
                    step.weights[index, slot, :num_ids],
                    self.sampler.vocab_size,
                    is_half=bool(is_truncated),
                )
                for index, (num_ids, is_truncated, _) in enumerate(reports[:num_sound])
            ]
            drafting.dropped_mass += step.dropped_mass[slot][:num_sound]
        drafting.frames += frames
        drafting.tokens += step.tokens[slot][:num_sound]
        if num_sound < num_passes and task.fault is None:
            position = task.base_len + len(drafting.tokens)
            cut(task, NumericFault(f"the row of position {position} holds no law"))
        if num_passes > 1:
            ledger.wrote(ledger.written_len + num_passes - 1)
        drafting.num_rows += num_passes
        task.fed += drafting.tokens[len(drafting.tokens) - num_sound :]
        task.fed += [drafting.tokens[-1]] * (num_passes - num_sound)
        if drafting.num_rows < drafting.num_wanted:
            return None
        task.fed.pop()  # the last token is drawn and not fed
        return drafting.proposal()


def _num_sound(reports: Sequence[Sequence[int]]) -> int:
    """Rows before the first that holds no law."""
    unsound = (index for index, report in enumerate(reports) if report[2] != Status.OK)
    return next(unsound, len(reports))
