"""Steps on a device that decides by itself: segments onto captured programs, outputs to outcomes.

Owns how a scheduler's step is laid out in a program's buffers and which programs it takes: all
short segments and one chunk of a prompt together where such a step is captured, further chunks one
by one. Must not know what is drawn; the role's device side does. Runs on the engine's worker
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from specmesh.engine.buckets import Buckets, start_shapes
from specmesh.engine.device_side import DeviceSide, bucket_for
from specmesh.engine.executor import Device, StepOutcome
from specmesh.engine.program_set import ProgramSet
from specmesh.engine.role import Finished, isolated
from specmesh.engine.run_ahead import Chain, RunAhead
from specmesh.engine.scheduler import Segment, Step, Task
from specmesh.engine.step_buffers import HostArrays
from specmesh.engine.step_programs import StepProgram, StepShape
from specmesh.engine.waits import Waiting

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launch:
    """Segments of one program: short ones, then at most one long."""

    short: list[Segment]
    long: Segment | None

    @property
    def segments(self) -> list[Segment]:
        return [*self.short, self.long] if self.long is not None else self.short


@dataclass(slots=True)
class _Gathered:
    """What the launches of a step have given so far; rows: logits for roles that decide."""

    start_ns: int
    batch_size: int
    finished: list[Finished] = field(default_factory=list)
    unfinished: list[Task] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    num_tokens: int = 0

    def outcome(self, end_ns: int, width: int) -> StepOutcome:
        """All of it; width: of a row."""
        logits = torch.cat(self.rows) if self.rows else torch.empty(0, width)
        return StepOutcome(
            logits,
            self.finished,
            self.unfinished,
            self.start_ns,
            end_ns,
            self.num_tokens,
            self.left,
        )


class ProgramExecutor:
    """Runs steps as programs. Same interface as `executor.StepExecutor`."""

    def __init__(
        self,
        device: Device,
        side: DeviceSide,
        buckets: Buckets,
        clock_ns: Callable[[], int],
    ) -> None:
        self._device = device
        self._side = side
        self._buckets = buckets
        self._clock_ns = clock_ns
        self._page_size = device.pool.page_size
        self._positions = np.arange(buckets.contexts[-1], dtype=np.int32)
        most_seqs = buckets.num_seqs[-1] + 1
        rows = most_seqs * side.round_up(buckets.max_query_lens[-1], 0)[0]
        self.programs = ProgramSet(device.decoder, device.cache, side.sampler, rows)
        self._ahead: RunAhead | None = None

    def perform(
        self,
        step: Step,
        meanwhile: Callable[[], object],
        may_run_ahead: Callable[[], bool],
    ) -> Waiting[StepOutcome]:
        """Perform the copies and the passes; K/V is written and the ledgers say so.

        Returns when the device is done. Raises whatever the device raises; ledgers are untouched
        by the launch that failed and by those after it.
        """
        gathered = _Gathered(self._clock_ns(), len(step.segments))
        self._device.cache.copy_pages(step.copies)
        ahead, self._ahead = self._ahead, None
        own = ahead.own(step.segments) if ahead is not None else []
        if ahead is not None and own:
            taken = {id(segment) for _, segment in own}
            gathered.left += [s.task for s in step.segments if id(s) not in taken]
            yield from self._land(ahead, own, gathered, meanwhile, may_run_ahead)
        else:
            launches = self._launches(step.segments)
            for launch in launches:
                may = may_run_ahead if len(launches) == 1 else None
                yield from self._launch(
                    launch, step.num_holders, gathered, meanwhile, may, is_behind=ahead is not None
                )
        width = self._device.decoder.spec.num_embeddings
        return gathered.outcome(self._clock_ns(), width)

    def _launch(
        self,
        launch: _Launch,
        num_holders: int,
        gathered: _Gathered,
        meanwhile: Callable[[], object],
        may_run_ahead: Callable[[], bool] | None,
        *,
        is_behind: bool,
    ) -> Waiting[None]:
        """Run one program. may_run_ahead: None where others follow in the same step. is_behind: a
        chain that counts for nobody is still at work."""
        wanted = self._num_wanted(launch, num_holders)
        program = yield from self._program(launch, max(wanted))
        num_rows = self._pack(program, launch, wanted)
        follow = None
        if may_run_ahead is not None and launch.long is None and program.shape.can_repeat:
            chain = Chain.of(program, launch.short, self._page_size)
            follow = self._follow(chain, wanted, may_run_ahead)
        outputs = yield from self.programs.run(program, meanwhile, follow, is_behind=is_behind)
        slots = [*range(len(launch.short)), program.shape.num_seqs]
        self._take(
            program, list(zip(slots, launch.segments, wanted, strict=False)), num_rows, outputs,
            gathered,
        )  # fmt: skip

    def _land(
        self,
        ahead: RunAhead,
        own: Sequence[tuple[int, Segment]],
        gathered: _Gathered,
        meanwhile: Callable[[], object],
        may_run_ahead: Callable[[], bool],
    ) -> Waiting[None]:
        """Wait for a chain that runs already, and take it for those it counts for."""
        chain, program = ahead.chain, ahead.chain.program
        num_passes = program.shape.num_passes
        gathered.batch_size = len(chain.tasks)  # also those that it ran for nothing
        follow = None
        if len(own) == len(chain.tasks) and not gathered.left:
            follow = self._follow(chain, [num_passes] * len(own), may_run_ahead)
        outputs = yield from program.wait(ahead.running, meanwhile, follow)
        taken = [(slot, segment, num_passes) for slot, segment in own]
        self._take(program, taken, len(chain.tasks), outputs, gathered)

    def _follow(
        self, chain: Chain, num_taken: Sequence[int], may_run_ahead: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """Launches the next chain behind this one; None where this one cannot be followed."""
        if not all(map(self._side.takes, chain.tasks)):
            return None
        if not chain.can_be_followed(num_taken, self._side.num_wanted):
            return None

        def launch() -> None:
            if may_run_ahead():
                self._ahead = RunAhead(chain.following(), chain.program.launch_again())

        return launch

    def _take(
        self,
        program: StepProgram,
        taken: Sequence[tuple[int, Segment, int]],
        num_rows: int,
        outputs: HostArrays,
        gathered: _Gathered,
    ) -> None:
        """Turn outputs into outcomes. taken: (slot, segment, tokens drawn for it); num_rows: token
        rows of the launch."""
        end_ns, decided = self._clock_ns(), self._side.read(outputs)
        gathered.num_tokens += num_rows
        num_slow = sum(len(rows) for rows in gathered.rows)
        for slot, segment, count in taken:
            task = segment.task
            task.batch_rows = max(task.batch_rows, num_rows)
            self._account(task, segment, gathered.batch_size, gathered.start_ns, end_ns)
            if not segment.is_last:
                gathered.unfinished.append(task)
            elif self._side.takes(task) and segment.num_rows:
                outcome = self._commit(task, slot, count, decided)
                gathered.finished.append(Finished(task, 0, 0, outcome))
            else:
                first = slot * program.shape.rows_per_seq
                rows = program.logits[first : first + segment.num_rows]
                gathered.finished.append(Finished(task, num_slow, segment.num_rows))
                num_slow += segment.num_rows
                gathered.rows.append(rows.float().cpu())

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, so that a fault (NaN) in them is never read by their next owner."""
        self._device.cache.clear_pages(pages)

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Capture the programs that serving starts with. `lengths` are the reference path's."""
        del lengths
        self.programs.capture(start_shapes(self._side, self._buckets))
        cost = self.programs.cost
        logger.info(
            "captured the steps",
            extra={
                "programs": cost.num_programs,
                "seconds": round(cost.seconds, 1),
                "buffer_bytes": cost.num_bytes,
            },
        )

    def enter_thread(self) -> None:
        """The calling thread will run steps from now on."""
        self.programs.enter_thread()

    def use_idle(self) -> None:
        """Capture one shape that ran uncaptured, if any did."""
        self.programs.capture_next()

    # ------------------------------------------------------------ layout

    def _launches(self, segments: Sequence[Segment]) -> list[_Launch]:
        most_queries, most_seqs = self._buckets.max_query_lens[-1], self._buckets.num_seqs[-1]
        short = [s for s in segments if s.end - s.start <= most_queries]
        long = [s for s in segments if s.end - s.start > most_queries]
        launches = [
            _Launch(short[first : first + most_seqs], None)
            for first in range(0, len(short), most_seqs)
        ]
        if long and launches:
            mixed = _Launch(launches[0].short, long[0])
            # The weights are read once more rather than every kernel launched by the host.
            if self.programs.is_ready(self._need(mixed, 1)):
                launches[0] = mixed
                del long[0]
        return launches + [_Launch([], segment) for segment in long]

    def _num_wanted(self, launch: _Launch, num_holders: int) -> list[int]:
        """Tokens to draw for each segment in one chain; 1 each unless all can go on."""
        side, segments = self._side, launch.segments
        if launch.long is not None or not all(
            s.is_last and s.num_rows and side.takes(s.task) for s in segments
        ):
            return [1] * len(segments)
        wanted = [side.num_wanted(segment.task) for segment in segments]
        chain = side.chain_len(wanted, num_holders)
        return [max(1, min(count, chain)) for count in wanted]

    def _need(self, launch: _Launch, num_passes: int) -> StepShape:
        """What a launch takes. To the token, but for what programs come in few sizes of and steps
        in many, rows of a chunk and ids of a received row: the program of each need is kept."""
        side, segments = self._side, launch.segments
        rows_per_seq, num_ids, is_filtered = side.shape(segments)
        rows_per_seq = max(rows_per_seq, *(segment.num_rows for segment in segments))
        long_rows = 0 if launch.long is None else launch.long.end - launch.long.start
        context = max(segment.end for segment in segments) + num_passes - 1
        return StepShape(
            num_seqs=len(launch.short),
            max_query_len=max((s.end - s.start for s in launch.short), default=1),
            long_rows=bucket_for(long_rows, (0, *self._buckets.long_rows)),
            num_passes=num_passes,
            rows_per_seq=rows_per_seq,
            max_context_len=bucket_for(context, self._buckets.contexts),
            num_ids=side.round_up(rows_per_seq, num_ids)[1],
            is_filtered=is_filtered,
        )

    def _program(self, launch: _Launch, num_passes: int) -> Waiting[StepProgram]:
        return self.programs.find(self._need(launch, num_passes), self._rounded)

    def _rounded(self, need: StepShape) -> StepShape:
        """The smallest shape of the buckets that covers `need`."""
        buckets = self._buckets
        rows, ids = self._side.round_up(need.rows_per_seq, need.num_ids)
        return replace(
            need,
            num_seqs=bucket_for(max(1, need.num_seqs), buckets.num_seqs),
            max_query_len=bucket_for(need.max_query_len, buckets.max_query_lens),
            long_rows=bucket_for(need.long_rows, (0, *buckets.long_rows)),
            rows_per_seq=rows,
            num_ids=ids,
        )

    def _pack(self, program: StepProgram, launch: _Launch, wanted: Sequence[int]) -> int:
        """Write the host's inputs; returns the number of token rows in use."""
        shape, host = program.shape, program.buffers.inputs.host
        program.reset()
        self._side.clear(host)
        num_tokens = self._pack_short(host, launch.short, shape.rows_per_seq)
        for slot, segment in enumerate(launch.short):
            self._pack_task(host, segment, slot, wanted[slot])
        if launch.long is not None:
            first = shape.num_seqs * shape.max_query_len
            num_tokens += self._pack_long(host, launch.long, shape, first)
            self._pack_task(host, launch.long, shape.num_seqs, wanted[-1])
        return num_tokens

    def _pack_short(
        self, host: dict[str, Any], segments: Sequence[Segment], rows_per_seq: int
    ) -> int:
        """Tokens, positions, slots, pages and wanted rows from row 0 on; returns the rows used.

        A step has few tokens of many sessions: they are gathered, then written field by field.
        """
        size = self._page_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        ends = [0]
        for slot, segment in enumerate(segments):
            own, table = range(segment.start, segment.end), segment.task.session.block_table
            token_ids += segment.task.tokens(segment.start, segment.end)
            positions += own
            slots += [table[at // size] * size + at % size for at in own]
            after = len(token_ids)
            logit_rows += range(after - segment.num_rows, after)
            logit_rows += [0] * (rows_per_seq - segment.num_rows)
            ends.append(after)
            self._pack_pages(host, table, slot)
        host["token_ids"][: ends[-1]] = token_ids
        host["positions"][: ends[-1]] = positions
        host["slots"][: ends[-1]] = slots
        host["logit_rows"][: len(logit_rows)] = logit_rows
        host["cu_seqlens"][: len(ends)] = ends
        host["cu_seqlens"][len(ends) :] = ends[-1]
        host["context_lens"][: len(segments)] = [segment.end for segment in segments]
        return ends[-1]

    def _pack_long(self, host: dict[str, Any], segment: Segment, shape: StepShape, row: int) -> int:
        """The same of the long segment, from `row` on."""
        slot, size, num_tokens = shape.num_seqs, self._page_size, segment.end - segment.start
        after = row + num_tokens
        pages = self._pack_pages(host, segment.task.session.block_table, slot)
        positions = self._positions[segment.start : segment.end]
        host["token_ids"][row:after] = segment.task.tokens(segment.start, segment.end)
        host["positions"][row:after] = positions
        host["slots"][row:after] = pages[positions // size] * size + positions % size
        host["context_lens"][slot] = segment.end
        host["long_cu_seqlens"][1] = num_tokens
        first = slot * shape.rows_per_seq
        host["logit_rows"][first : first + segment.num_rows] = range(
            after - segment.num_rows, after
        )
        return num_tokens

    def _pack_pages(self, host: dict[str, Any], table: Sequence[int], slot: int) -> Any:
        """Write as many pages of a sequence as the program reads; returns its row of pages."""
        pages = host["block_tables"][slot]
        used = min(len(table), len(pages))
        pages[:used] = table[:used]
        return pages

    def _pack_task(self, host: dict[str, Any], segment: Segment, slot: int, wanted: int) -> None:
        task = segment.task
        if segment.is_last and segment.num_rows and self._side.takes(task):
            host["steps_left"][slot] = wanted
            self._side.pack(task, slot, host)

    def _account(
        self, task: Task, segment: Segment, batch_size: int, start_ns: int, end_ns: int
    ) -> None:
        task.session.ledger.wrote(segment.end)
        task.queue_ns += start_ns - task.ready_ns
        task.forward_ns += end_ns - start_ns
        task.batch_size = max(task.batch_size, batch_size)
        task.num_steps += 1
        task.ready_ns = end_ns

    def _commit(self, task: Task, slot: int, count: int, decided: Any) -> tuple[Any]:
        return (isolated(self._side.commit, task, slot, count, decided),)
