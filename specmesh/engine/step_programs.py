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

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.next_step import next_step
from kernels.reference_attention import PagedBatch
from specmesh.engine.decoder import Decoder
from specmesh.engine.fused import PagedAttention, PagedGroup
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.step_buffers import Field, HostArrays, StepInputs, StepOutputs
from specmesh.engine.waits import Done, Until, Waiting, block_on

MARGIN_S = 0.0003  # how long before the usual end of a step the host looks for work once more
LAUNCH_S = 0.003  # how long before it a chain that follows is launched: more than launching takes
USUAL_WEIGHT = 0.1
MIN_CHAIN_TO_REPEAT = 8  # passes of chains that can be launched behind themselves
# Sequences from which on a gap between chains costs more than a chain that nobody wants any more:
# a request that comes next would wait for it.
MIN_SEQS_TO_REPEAT = 16


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
    def can_repeat(self) -> bool:
        """Whether a chain of this shape can follow itself without the host: plain decoding."""
        is_plain = self.max_query_len == 1 and self.rows_per_seq == 1 and not self.long_rows
        is_long = self.num_passes >= MIN_CHAIN_TO_REPEAT
        return is_plain and is_long and self.num_seqs >= MIN_SEQS_TO_REPEAT

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
        self,
        logits: Tensor,
        buffers: ProgramBuffers,
        shape: StepShape,
        pass_index: int,
        *,
        is_fed_by_host: bool,
    ) -> Tensor:
        """Draw from logits [num_slots * rows_per_seq, width], where the host fed the pass; else it
        was fed the tokens drawn before: [num_slots, width].

        Writes its outputs; returns the last token of every sequence, int32 [num_slots], -1 for
        none. Must be capturable: no host reads, no shapes from data.
        """


@dataclass(frozen=True, slots=True)
class ProgramBuffers:
    """Inputs and outputs of a program."""

    inputs: StepInputs
    outputs: StepOutputs

    @property
    def num_bytes(self) -> int:
        """Bytes of both on the device."""
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


@dataclass(frozen=True, slots=True)
class Running:
    """A launched program. outputs: where its results lie once the device is done.

    is_behind: launched behind other work, so that its time tells nothing of its own.
    """

    outputs: HostArrays
    done: Any  # the event behind it; None where the device is no GPU, which computes at once
    is_behind: bool = False


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
            StepInputs([*fields, *sampler.input_fields(shape)], device),
            StepOutputs(sampler.output_fields(shape), device),
        )
        self._decoder, self._cache, self._sampler = decoder, cache, sampler
        num_logits = shape.num_slots * shape.rows_per_seq
        self.logits = logits_buffer[:num_logits]
        nothing = torch.zeros(shape.num_slots, dtype=torch.int32, device=device)
        self._next = nothing, nothing.clone(), nothing.clone()
        num_counters = shape.num_slots * decoder.spec.num_kv_heads
        self._arrivals = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self._each_one = torch.arange(shape.num_slots + 1, dtype=torch.int32, device=device)
        self._drawn = nothing.clone()  # the last tokens of a chain: where the sampler left them
        self._graph: torch.cuda.CUDAGraph | None = None
        self._repeat: torch.cuda.CUDAGraph | None = None
        self._on_gpu = device.type == "cuda"
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
    def launch(self, *, is_behind: bool = False) -> Running:
        """Send the inputs, compute, fetch the outputs: all in the stream's order.

        is_behind: a chain that nobody waits for is still at work.
        """
        self.buffers.inputs.upload()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        return self._fetch(is_behind=is_behind)

    @torch.inference_mode()
    def launch_again(self) -> Running:
        """Let every sequence take as many steps once more, behind the chain at work.

        Nothing is sent: tokens, lengths and pages are those that the chain leaves. The caller knows
        that all sequences have steps and pages left. Only where `shape.can_repeat`.
        """
        assert self.shape.can_repeat
        if self._repeat is not None:
            self._repeat.replay()
        else:
            self._compute_again()
        return self._fetch(is_behind=True)

    def run(self) -> HostArrays:
        """Launch and block until the device is done; returns the outputs."""
        return block_on(self.wait(self.launch()))

    def _fetch(self, *, is_behind: bool) -> Running:
        outputs = self.buffers.outputs.download()
        if not self._on_gpu:
            return Running(outputs, None)
        make_event: Any = torch.cuda.Event  # untyped in torch
        done = make_event()
        done.record()
        return Running(outputs, done, is_behind)

    def wait(
        self,
        running: Running,
        meanwhile: Callable[[], object] = lambda: None,
        before_end: Callable[[], object] | None = None,
    ) -> Waiting[HostArrays]:
        """Wait until the device is done with what runs now; returns its outputs.

        meanwhile is called when the device has work, and again shortly before it should be done:
        what the host does there overlaps. before_end: called once, so long before that end that a
        chain launched in it follows without a gap.
        """
        if running.done is None:
            meanwhile()
            if before_end is not None:
                before_end()
            return running.outputs
        started = time.perf_counter()
        try:
            yield from self._overlap(started + self._usual_s, meanwhile, before_end)
        except BaseException:  # the host fails: buffers will be written anew
            running.done.synchronize()
            raise
        yield Done(running.done)
        if not running.is_behind:
            spent_s = time.perf_counter() - started
            self._usual_s += USUAL_WEIGHT * (spent_s - self._usual_s)
        return running.outputs

    def _overlap(
        self, end: float, meanwhile: Callable[[], object], before_end: Callable[[], object] | None
    ) -> Waiting[None]:
        """What the host does until the usual end: other threads, or whoever polls, have the
        interpreter in between, so frames arrive."""
        meanwhile()
        if before_end is not None:
            if _is_ahead(end - LAUNCH_S):
                yield Until(end - LAUNCH_S)
                meanwhile()
            before_end()
        if _is_ahead(end - MARGIN_S):
            yield Until(end - MARGIN_S)
            meanwhile()

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Record the graphs; the first, uncaptured run compiles what is not compiled yet.

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
        if self.shape.can_repeat:
            repeat = torch.cuda.CUDAGraph()
            with torch.cuda.graph(repeat, pool=pool):
                self._compute_again()
            self._repeat = repeat
        self._graph = graph

    def _compute(self) -> None:
        shape, inputs = self.shape, self.buffers.inputs.device
        attention = self._attention(inputs["positions"], inputs["slots"], self._first_groups())
        first = self._decoder.run(inputs["token_ids"], attention, inputs["logit_rows"])
        tokens = self._sampler.sample(first, self.buffers, shape, 0, is_fed_by_host=True)
        for pass_index in range(1, shape.num_passes):
            tokens = self._decode(tokens, pass_index)
        self._drawn = tokens
        # Last of all: a kernel behind a copy cannot start before the copy has ended.
        self.logits.copy_(first)

    def _compute_again(self) -> None:
        """From the tokens that the last chain drew. A chain leaves each sequence one step."""
        self.buffers.inputs.device["steps_left"].add_(self.shape.num_passes)
        tokens = self._drawn
        for pass_index in range(self.shape.num_passes):
            tokens = self._decode(tokens, pass_index)

    def _decode(self, tokens: Tensor, pass_index: int) -> Tensor:
        """One pass over the tokens just drawn; returns those that it draws."""
        inputs = self.buffers.inputs.device
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
        return self._sampler.sample(
            logits, self.buffers, self.shape, pass_index, is_fed_by_host=False
        )

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


def _is_ahead(instant: float) -> bool:
    """Whether it is far enough ahead for a sleep."""
    return instant - time.perf_counter() > MARGIN_S
