"""One forward pass: from segments to tensors, through the decoder, to logits.

Owns the layout of a packed batch and the device's timings. Must not know commands' meaning,
sessions' rules or transports. Runs on the engine's worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specmesh.engine.block_pool import BlockPool
from specmesh.engine.decoder import Decoder, StepBatch
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.role import Finished
from specmesh.engine.scheduler import Segment, Step, Task
from specmesh.engine.waits import Apart, Waiting

MAX_SEQS = 64  # short segments of one captured step; a pass of more takes several
MAX_SLOTS = MAX_SEQS + 1  # and one chunk of a prompt


@dataclass(frozen=True, slots=True)
class Device:
    """A model with its K/V: what a forward pass needs."""

    decoder: Decoder
    cache: KVCache
    pool: BlockPool


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a pass gave: logits float32 [num_rows, width], whose they are, and who goes on.

    left: tasks of the step that were not in the pass; they come again.
    """

    logits: Tensor
    finished: list[Finished]
    unfinished: list[Task]
    start_ns: int
    end_ns: int
    num_tokens: int
    left: Sequence[Task] = ()


class Executor(Protocol):
    """What runs the scheduler's steps."""

    def perform(
        self,
        step: Step,
        meanwhile: Callable[[], object],
        may_run_ahead: Callable[[], bool],
    ) -> Waiting[StepOutcome]:
        """Perform the copies and the passes of a step; returns when the device is done.

        meanwhile is called once or more: while a device works that is not this thread, or before
        a pass on this thread. may_run_ahead: asked shortly before the end, whether the device may
        go on with the same sessions before it is known what comes next; the following step finds
        that work done or under way.
        """
        ...

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, so that a fault (NaN) in them is never read by their next owner."""
        ...

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Do what would slow the first requests down."""
        ...

    def enter_thread(self) -> None:
        """The calling thread will run steps from now on."""
        ...

    def use_idle(self) -> None:
        """Do some preparation, if there is any, while nothing waits."""
        ...


class StepExecutor:
    """Runs passes through the decoder's reference path; the role decides from the rows."""

    def __init__(self, device: Device, clock_ns: Callable[[], int]) -> None:
        self._device = device
        self._clock_ns = clock_ns

    def perform(
        self,
        step: Step,
        meanwhile: Callable[[], object],
        may_run_ahead: Callable[[], bool],
    ) -> Waiting[StepOutcome]:
        """`run`, which takes a thread for as long as the pass takes."""
        outcome: StepOutcome = yield Apart(lambda: self.run(step, meanwhile, may_run_ahead))
        return outcome

    def run(
        self,
        step: Step,
        meanwhile: Callable[[], object] = lambda: None,
        may_run_ahead: Callable[[], bool] = lambda: False,
    ) -> StepOutcome:
        """Perform the copies and the pass; K/V is written and the ledgers say so.

        Blocks until the device is done. Raises whatever the device raises; ledgers are untouched
        then.
        """
        del may_run_ahead  # the device is this thread
        meanwhile()  # the pass takes this thread: what can be done beside it comes first
        start_ns = self._clock_ns()
        self._device.cache.copy_pages(step.copies)
        batch = build_batch(step.segments, self._device.pool.page_size, self._device.decoder.device)
        with torch.inference_mode():
            # Rows are decided by the reference functions, which run on the CPU.
            logits = self._device.decoder.forward(batch, self._device.cache).cpu()
        end_ns = self._clock_ns()
        finished, unfinished = [], []
        num_tokens = batch.cu_seqlens_q[-1]
        first_row = 0
        for segment in step.segments:
            task = segment.task
            task.session.ledger.wrote(segment.end)
            task.queue_ns += start_ns - task.ready_ns
            task.forward_ns += end_ns - start_ns
            task.batch_size = max(task.batch_size, len(step.segments))
            task.batch_rows = max(task.batch_rows, num_tokens)
            task.num_steps += 1
            task.ready_ns = end_ns
            if segment.is_last:
                finished.append(Finished(task, first_row, segment.num_rows))
            else:
                unfinished.append(task)
            first_row += segment.num_rows
        return StepOutcome(logits, finished, unfinished, start_ns, end_ns, num_tokens)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, so that a fault (NaN) in them is never read by their next owner."""
        self._device.cache.clear_pages(pages)

    def enter_thread(self) -> None:
        """Nothing belongs to a thread."""

    def use_idle(self) -> None:
        """Nothing to prepare."""

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Run one pass of each length (tokens), so that no request pays for a first time.

        Lengths beyond the pool are cut to it. The pages used are free again afterwards.
        """
        pool, decoder = self._device.pool, self._device.decoder
        for length in lengths:
            num_tokens = min(length, pool.num_free * pool.page_size)
            pages = pool.allocate(pool.pages_for(num_tokens))
            batch = StepBatch.pack(
                [[0] * num_tokens],
                [0],
                [pages],
                [num_tokens - 1],
                page_size=pool.page_size,
                device=decoder.device,
            )
            with torch.inference_mode():
                decoder.forward(batch, self._device.cache).cpu()
            pool.release_all(pages)


def build_batch(segments: Sequence[Segment], page_size: int, on: torch.device) -> StepBatch:
    """Pack segments, in order, into one batch of tensors on a device."""
    token_ids: list[int] = []
    positions, slots, rows = [], [], []
    cu_seqlens_q = [0]
    block_tables = []
    for segment in segments:
        token_ids += segment.task.tokens(segment.start, segment.end)
        table = segment.task.session.block_table[: -(-segment.end // page_size)]
        block_tables.append(table)
        own = np.arange(segment.start, segment.end)
        first_page = segment.start // page_size
        pages = np.asarray(table[first_page:])
        positions.append(own)
        slots.append(pages[own // page_size - first_page] * page_size + own % page_size)
        cu_seqlens_q.append(len(token_ids))
        rows.append(np.arange(len(token_ids) - segment.num_rows, len(token_ids)))
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=on),
        positions=torch.from_numpy(np.concatenate(positions)).to(on),
        cu_seqlens_q=cu_seqlens_q,
        context_lens=[segment.end for segment in segments],
        block_tables=block_tables,
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(on),
        logit_rows=torch.from_numpy(np.concatenate(rows)).to(on),
    )
