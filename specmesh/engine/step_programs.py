"""Captured steps: one program per shape, from token ids through layers to drawn tokens.

A program is a forward pass (or a chain of them) over buffers of fixed shape, captured as a CUDA
graph on a GPU: the host sends one block, replays, reads one block. Owns shapes, buffers and
capture. Where the device is no GPU the same code runs uncaptured, which is how it is tested. Must
not know commands or sessions; what is drawn and how is the role's sampler.

Layout of a step of num_seqs short segments and at most one long one (a chunk of a prompt): the
short segments' tokens are packed from row 0 on; the long segment's begin at row num_seqs *
max_query_len. Sequence num_seqs is the long one. Rows and sequences not in use are padding: slot
-1, context length 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.next_step import next_step
from kernels.reference_attention import PagedBatch
from specmesh.engine.decoder import Decoder
from specmesh.engine.fused import PagedAttention, PagedGroup
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.step_buffers import Field, StepBuffer

logger = logging.getLogger(__name__)

MARGIN_S = 0.0003  # how long before the usual end of a step the host looks for work once more
USUAL_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What a program is specialised to; a step runs on any program that covers it.

    num_seqs: short segments, of at most max_query_len tokens each. long_rows: tokens of the long
    segment, 0 for none. num_passes: forward passes of the chain. rows_per_seq: rows of logits of a
    sequence. max_context_len: tokens with K/V after the step. num_ids: ids of a received row, 0 for
    none. is_filtered: whether top-k, top-p or min-p apply.
    """

    num_seqs: int
    max_query_len: int
    long_rows: int = 0
    num_passes: int = 1
    rows_per_seq: int = 1
    max_context_len: int = 1024
    num_ids: int = 0
    is_filtered: bool = False

    @property
    def num_slots(self) -> int:
        """Sequences of the program, the long one included."""
        return self.num_seqs + (self.long_rows > 0)

    @property
    def num_rows(self) -> int:
        """Token rows of the first pass."""
        return self.num_seqs * self.max_query_len + self.long_rows

    @property
    def cost_order(self) -> tuple[int, int, bool, int]:
        """Sorts programs that cover the same step, the cheapest first."""
        return self.num_rows, self.max_context_len, self.is_filtered, self.num_ids

    def covers(self, need: StepShape) -> bool:
        """Whether a step of shape `need` fits a program of this shape."""
        return (
            self.num_seqs >= need.num_seqs
            and self.max_query_len >= need.max_query_len
            and (self.long_rows >= need.long_rows)
            and self.num_passes == need.num_passes
            and self.rows_per_seq >= need.rows_per_seq
            and self.max_context_len >= need.max_context_len
            and self.num_ids >= need.num_ids
            and self.is_filtered >= need.is_filtered
        )


class Sampler(Protocol):
    """The role's part of a program: from logits to tokens, on the device."""

    def input_fields(self, shape: StepShape) -> Sequence[Field]:
        """Arrays that it reads, besides those of the forward pass."""

    def output_fields(self, shape: StepShape) -> Sequence[Field]:
        """Arrays that it writes."""

    def sample(
        self, logits: Tensor, buffers: ProgramBuffers, shape: StepShape, pass_index: int
    ) -> Tensor:
        """Draw from logits [num_slots * rows_per_seq, width] (later passes: [num_slots, width]).

        Writes its outputs; returns the last token of every sequence, int32 [num_slots], -1 for
        none. Must be capturable: no host reads, no shapes from data.
        """


@dataclass(frozen=True, slots=True)
class ProgramBuffers:
    """Inputs and outputs of a program."""

    inputs: StepBuffer
    outputs: StepBuffer

    @property
    def num_bytes(self) -> int:
        """Bytes of both, on one side."""
        return self.inputs.num_bytes + self.outputs.num_bytes


def _forward_fields(shape: StepShape, page_size: int) -> list[Field]:
    pages = -(-shape.max_context_len // page_size)
    return [
        Field("token_ids", (shape.num_rows,)),
        Field("positions", (shape.num_rows,)),
        Field("slots", (shape.num_rows,)),
        Field("cu_seqlens", (shape.num_seqs + 1,)),
        Field("long_cu_seqlens", (2,)),
        Field("context_lens", (shape.num_slots,)),
        Field("steps_left", (shape.num_slots,)),
        Field("block_tables", (shape.num_slots, pages)),
        Field("logit_rows", (shape.num_slots * shape.rows_per_seq,)),
    ]


class StepProgram:
    """One shape's buffers and, on a GPU, its captured graph. Used by one thread."""

    def __init__(
        self,
        shape: StepShape,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        logits_buffer: Tensor,
    ) -> None:
        """logits_buffer: [>= num_slots * rows_per_seq, width], receives the first pass's logits."""
        self.shape = shape
        device = decoder.device
        fields = _forward_fields(shape, cache.page_size)
        self.buffers = ProgramBuffers(
            StepBuffer([*fields, *sampler.input_fields(shape)], device),
            StepBuffer(sampler.output_fields(shape), device),
        )
        self._decoder, self._cache, self._sampler = decoder, cache, sampler
        num_logits = shape.num_slots * shape.rows_per_seq
        self.logits = logits_buffer[:num_logits]
        nothing = torch.zeros(shape.num_slots, dtype=torch.int32, device=device)
        self._next = nothing, nothing.clone(), nothing.clone()
        num_counters = shape.num_slots * decoder.spec.num_kv_heads
        self._arrivals = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self._each_one = torch.arange(shape.num_slots + 1, dtype=torch.int32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        make_event: Any = torch.cuda.Event  # untyped in torch
        self._done = make_event() if device.type == "cuda" else None
        self._usual_s = 0.0  # how long the device takes: an exponential average
        self.reset()

    @property
    def is_captured(self) -> bool:
        """Whether `run` replays a graph."""
        return self._graph is not None

    def reset(self) -> None:
        """Make every sequence and row padding on the host."""
        host = self.buffers.inputs.host
        for name in ("token_ids", "positions", "context_lens", "steps_left", "logit_rows"):
            host[name].fill(0)
        host["slots"].fill(-1)
        host["cu_seqlens"].fill(0)
        host["long_cu_seqlens"].fill(0)

    @torch.inference_mode()
    def run(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Send the inputs, compute, fetch the outputs; blocks until the device is done.

        meanwhile is called when the device has work, and again shortly before it should be done:
        what the host does there overlaps.
        """
        self.buffers.inputs.upload()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        self.buffers.outputs.download()
        if self._done is None:
            meanwhile()
            return
        started = time.perf_counter()
        self._done.record()
        meanwhile()
        ahead_s = self._usual_s - MARGIN_S - (time.perf_counter() - started)
        if ahead_s > MARGIN_S:
            time.sleep(ahead_s)  # other threads have the interpreter: frames arrive meanwhile
            meanwhile()
        self._done.synchronize()
        spent_s = time.perf_counter() - started
        self._usual_s += USUAL_WEIGHT * (spent_s - self._usual_s)

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Record the graph; the first, uncaptured run compiles what is not compiled yet.

        On inputs that are all padding: writes no K/V.
        """
        self.reset()
        self.buffers.inputs.upload()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._compute()
        self._graph = graph

    def _compute(self) -> None:
        shape, inputs = self.shape, self.buffers.inputs.device
        attention = self._attention(inputs["positions"], inputs["slots"], self._first_groups())
        first = self._decoder.run(inputs["token_ids"], attention, inputs["logit_rows"])
        tokens = self._sampler.sample(first, self.buffers, shape, 0)
        for pass_index in range(1, shape.num_passes):
            next_step(
                tokens,
                inputs["steps_left"],
                inputs["context_lens"],
                inputs["block_tables"],
                self._next,
                self._cache.page_size,
            )
            token_ids, positions, slots = self._next
            attention = self._attention(positions, slots, (self._decode_group(),))
            logits = self._decoder.run(token_ids, attention, None)
            tokens = self._sampler.sample(logits, self.buffers, shape, pass_index)
        # Last of all: a kernel behind a copy cannot start before the copy has ended.
        self.logits.copy_(first)

    def _attention(
        self, positions: Tensor, slots: Tensor, groups: tuple[PagedGroup, ...]
    ) -> PagedAttention:
        decoder = self._decoder
        tables = decoder.rope_tables()
        return PagedAttention(
            decoder.spec, self._cache, tables, positions, slots, groups, self._arrivals
        )

    def _batch(self, cu_seqlens: Tensor, first: int, count: int, max_query_len: int) -> PagedBatch:
        inputs = self.buffers.inputs.device
        own = slice(first, first + count)
        return PagedBatch(
            cu_seqlens,
            inputs["context_lens"][own],
            inputs["block_tables"][own],
            max_query_len,
            self.shape.max_context_len,
        )

    def _first_groups(self) -> tuple[PagedGroup, ...]:
        shape, inputs = self.shape, self.buffers.inputs.device
        short_rows = shape.num_seqs * shape.max_query_len
        groups = []
        if shape.num_seqs:
            batch = self._batch(inputs["cu_seqlens"], 0, shape.num_seqs, shape.max_query_len)
            groups.append(PagedGroup(0, short_rows, batch))
        if shape.long_rows:
            batch = self._batch(inputs["long_cu_seqlens"], shape.num_seqs, 1, shape.long_rows)
            groups.append(PagedGroup(short_rows, shape.long_rows, batch))
        return tuple(groups)

    def _decode_group(self) -> PagedGroup:
        count = self.shape.num_slots
        return PagedGroup(0, count, self._batch(self._each_one, 0, count, 1))


@dataclass(slots=True)
class CaptureCost:
    """What capturing took: seconds, programs, bytes of their buffers."""

    seconds: float = 0.0
    num_programs: int = 0
    num_bytes: int = 0

    @property
    def mean_s(self) -> float:
        """Seconds a program."""
        return self.seconds / self.num_programs if self.num_programs else 0.0


class ProgramSet:
    """The programs of one decoder: found by shape; captured at start, when idle, or when it pays.

    A step that no captured program covers runs uncaptured, at the cost of its launches. Its shape,
    rounded up to the buckets, is captured once such runs have cost as much as a capture does
    (`Bucket` of specmesh.planning with a saving that is not known yet: never more than twice the
    best choice in hindsight), or before that when the device is idle.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, sampler: Sampler, max_logit_rows: int
    ) -> None:
        """max_logit_rows: rows of logits of the largest program; memory for them is shared."""
        self._decoder, self._cache, self._sampler = decoder, cache, sampler
        self._captures = decoder.device.type == "cuda"
        self._logits = torch.zeros(
            (max_logit_rows, decoder.spec.num_embeddings),
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._pool: Any = None
        self._found: dict[StepShape, StepProgram] = {}
        self._spent_s: dict[StepShape, float] = {}  # by uncaptured runs
        self.programs: dict[StepShape, StepProgram] = {}
        self.cost = CaptureCost()

    def find(self, need: StepShape, rounded: StepShape) -> StepProgram:
        """The cheapest program that covers `need`; an uncaptured one of shape `rounded` if none."""
        program = self._found.get(need)
        if program is None:
            program = self._look_up(need) or self._add(rounded)
            self._found[need] = program
        if self._spent_s.get(program.shape, 0.0) > self.cost.mean_s:
            logger.info("capturing a step while serving", extra={"shape": str(program.shape)})
            self.capture([program.shape])
        return program

    def run(self, program: StepProgram, meanwhile: Callable[[], object]) -> None:
        """Run a program; blocks until the device is done. See `StepProgram.run`."""
        if program.is_captured or not self._captures:
            program.run(meanwhile)
            return
        started = time.perf_counter()
        program.run(meanwhile)
        spent_s = time.perf_counter() - started
        self._spent_s[program.shape] = self._spent_s.get(program.shape, 0.0) + spent_s

    def capture(self, shapes: Iterable[StepShape]) -> None:
        """Make and, on a GPU, capture programs of these shapes, the largest first."""
        for shape in sorted(shapes, key=lambda s: -s.num_rows * s.num_passes):
            program = self.programs.get(shape) or self._add(shape)
            if self._captures and not program.is_captured:
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                started = time.perf_counter()
                program.capture(self._pool)
                self.cost.seconds += time.perf_counter() - started
                self.cost.num_programs += 1
                self.cost.num_bytes += program.buffers.num_bytes
            self._spent_s.pop(shape, None)
        self._found.clear()

    def capture_next(self) -> bool:
        """Capture the shape whose uncaptured runs took longest. False when none waits."""
        if not self._spent_s:
            return False
        self.capture([max(self._spent_s, key=lambda shape: self._spent_s[shape])])
        return True

    def _look_up(self, need: StepShape) -> StepProgram | None:
        covering = [
            program
            for shape, program in self.programs.items()
            if shape.covers(need) and (program.is_captured or not self._captures)
        ]
        return min(covering, key=lambda program: program.shape.cost_order, default=None)

    def _add(self, shape: StepShape) -> StepProgram:
        if shape not in self.programs:
            self.programs[shape] = StepProgram(
                shape, self._decoder, self._cache, self._sampler, self._logits
            )
        return self.programs[shape]
