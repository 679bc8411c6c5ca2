"""What a role adds to captured steps: parameters in, decisions out, all on the device.

Owns the interface between the program executor and the roles' device sides
(draft_service/device_proposer.py, target_service/device_verifier.py), and the parameters that both
share. A session whose parameters the device does not know is decided by the role itself, from its
rows: nothing is approximated. Must not know programs' buffers beyond their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.sampling import Rule
from kernels.shaping import Filters
from specmesh.engine.scheduler import Segment, Task
from specmesh.engine.sessions import Session
from specmesh.engine.step_buffers import FLOAT32, INT64, Field, HostArrays
from specmesh.engine.step_programs import Sampler, StepShape


class DeviceSide(Protocol):
    """A role's decisions on the device. Called on the engine's worker only.

    max_query_len: most tokens of a segment that chains and rounds begin with; more are a chunk.
    """

    sampler: Sampler
    max_query_len: int

    def make_sampler(self) -> Callable[[torch.device], Sampler]:
        """Makes such samplers in other processes: picklable."""

    def takes(self, task: Task) -> bool:
        """Whether the device decides this task; the role does otherwise."""

    def num_wanted(self, task: Task) -> int:
        """Passes that the task can use in a row; 0: one, whose answer should not wait for more."""

    def chain_len(self, wanted: Sequence[int], num_holders: int) -> int:
        """Passes of a step whose sessions can use `wanted` each; one of the captured lengths.

        num_holders: sessions with K/V, also those whose next command has not come yet.
        """

    def shape(self, segments: Sequence[Segment]) -> tuple[int, int, bool]:
        """(rows_per_seq, num_ids, is_filtered) that a step of these segments needs."""

    def round_up(self, rows_per_seq: int, num_ids: int) -> tuple[int, int]:
        """The buckets of rows_per_seq and num_ids that cover these."""

    def base_shapes(self, num_seqs: Sequence[int], contexts: Sequence[int]) -> list[StepShape]:
        """Shapes to capture before serving."""

    def clear(self, host: HostArrays) -> None:
        """Make every sequence of the inputs padding."""

    def pack(self, task: Task, slot: int, host: HostArrays) -> None:
        """Write a task's parameters."""

    def read(self, outputs: HostArrays) -> Any:
        """The outputs of a step, once for all its sessions; used before the next step is read."""

    def commit(self, task: Task, slot: int, num_passes: int, step: Any) -> Any | None:
        """Turn outputs into the task's outcome, as `Role.advance` does, and move its ledger.

        num_passes: how many tokens were drawn for it. step: from `read`. Raises SpecmeshError.
        """


def parameter_fields(num_slots: int) -> list[Field]:
    """Arrays of sampling parameters, one entry a sequence."""
    return [
        Field("seeds", (num_slots,), INT64),
        Field("base_lens", (num_slots,)),
        Field("rules", (num_slots,)),
        Field("temperatures", (num_slots,), FLOAT32),
        Field("top_ks", (num_slots,)),
        Field("top_ps", (num_slots,), FLOAT32),
        Field("min_ps", (num_slots,), FLOAT32),
    ]


def filters_of(inputs: Mapping[str, Tensor]) -> Filters:
    """The filters among the parameters on the device, as the kernels take them."""
    return Filters(inputs["temperatures"], inputs["top_ks"], inputs["top_ps"], inputs["min_ps"])


def powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Bucket sizes first, first * factor, ... and `last`, which ends the row."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def query_lens(max_query_len: int) -> tuple[int, ...]:
    """Rows of a short segment that programs come for: those of 0, 1, 2, 4, ... candidates."""
    return (1, *(1 + size for size in powers(1, max_query_len - 1, 2)))


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds size; the size itself beyond the largest."""
    return next((bucket for bucket in buckets if bucket >= size), size)


def clear_parameters(host: HostArrays) -> None:
    """Parameters that any padding can be run with."""
    host["seeds"].fill(0)
    host["base_lens"].fill(0)
    host["rules"].fill(int(Rule.GREEDY))
    host["temperatures"].fill(1.0)
    host["top_ks"].fill(0)
    host["top_ps"].fill(1.0)
    host["min_ps"].fill(0.0)


def pack_parameters(session: Session, base_len: int, slot: int, host: HostArrays) -> None:
    """Write a session's sampling parameters."""
    shaper = session.shaper
    seed = session.seed
    host["seeds"][slot] = seed - (1 << 64) if seed >> 63 else seed  # the same 64 bits, signed
    host["base_lens"][slot] = base_len
    host["rules"][slot] = int(rule_of(session))
    if shaper.is_greedy:
        host["temperatures"][slot] = 1.0
        host["top_ks"][slot], host["top_ps"][slot], host["min_ps"][slot] = 0, 1.0, 0.0
        return
    filters = shaper.filters
    host["temperatures"][slot] = filters.temperature
    host["top_ks"][slot] = filters.top_k
    host["top_ps"][slot] = filters.top_p
    host["min_ps"][slot] = filters.min_p


def rule_of(session: Session) -> Rule:
    """How a session decides."""
    if session.shaper.is_greedy:
        return Rule.GREEDY
    return Rule.COUPLED if session.is_coupled else Rule.RESIDUAL
