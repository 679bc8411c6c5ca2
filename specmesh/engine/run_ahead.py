"""Chains of plain decoding that follow each other on the device without waiting for the host.

Near the end of a chain the same sessions' next chain is launched behind it, from the tokens that
the device has just drawn; what the first chain gave is read and answered while the second runs.
Owns when that may be, and which sessions the second chain counts for: those that still are where it
took them to. For the others (a stop token ended them, a fault, a closing) it ran for nothing: what
it wrote lies past what is confirmed, in pages whose next owner writes later in the stream's order.
Must not know programs' layout, roles or links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specmesh.engine.scheduler import Segment, Task
from specmesh.engine.step_programs import MIN_SEQS_TO_REPEAT, Running, StepProgram


@dataclass(frozen=True, slots=True)
class Chain:
    """Plain decoding of some sessions in one launch, by slot of the program.

    ends: length of each sequence with the first token that the chain feeds. room: positions that
    the pages sent to the device cover.
    """

    program: StepProgram
    tasks: Sequence[Task]
    ends: Sequence[int]
    room: Sequence[int]

    @classmethod
    def of(cls, program: StepProgram, segments: Sequence[Segment], page_size: int) -> Chain:
        """The chain that a launch of these segments is."""
        return cls(
            program,
            [segment.task for segment in segments],
            [segment.end for segment in segments],
            [page_size * len(segment.task.session.block_table) for segment in segments],
        )

    def following(self) -> Chain:
        """The same sessions one chain later, if none ends before."""
        num_passes = self.program.shape.num_passes
        return Chain(self.program, self.tasks, [end + num_passes for end in self.ends], self.room)

    def can_be_followed(self, num_taken: Sequence[int], num_wanted: Callable[[Task], int]) -> bool:
        """Whether all sessions have steps and pages for as many tokens again.

        num_taken: tokens that each draws in this chain. num_wanted: that a task wants from here on,
        those included.
        """
        shape = self.program.shape
        twice = 2 * shape.num_passes
        if not shape.can_repeat or len(self.tasks) < MIN_SEQS_TO_REPEAT:
            return False
        if any(count != shape.num_passes for count in num_taken):
            return False
        return all(
            end + twice - 1 <= min(room, shape.max_context_len) and num_wanted(task) >= twice
            for task, end, room in zip(self.tasks, self.ends, self.room, strict=True)
        )


@dataclass(frozen=True, slots=True)
class RunAhead:
    """A chain launched before the one in front of it was read."""

    chain: Chain
    running: Running

    def own(self, segments: Sequence[Segment]) -> list[tuple[int, Segment]]:
        """(slot, segment) of those that this chain computes."""
        slots = {id(task): slot for slot, task in enumerate(self.chain.tasks)}
        found = []
        for segment in segments:
            slot = slots.get(id(segment.task))
            if slot is None:
                continue
            end = self.chain.ends[slot]
            if (segment.start, segment.end, segment.num_rows) == (end - 1, end, 1):
                found.append((slot, segment))
        return found
