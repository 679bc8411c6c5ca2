"""The programs of one decoder: found by shape; captured at start, when idle, or when it pays.

Owns which captured step a step runs on, what is captured when, and what that cost. Must not know
what a program computes (`step_programs.py`) nor sessions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from specmesh.engine.decoder import Decoder
from specmesh.engine.kv_cache import KVCache
from specmesh.engine.step_buffers import HostArrays
from specmesh.engine.step_programs import Running, Sampler, StepProgram, StepShape
from specmesh.engine.waits import Apart, Waiting

logger = logging.getLogger(__name__)


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
        self._ready: dict[StepShape, bool] = {}
        self._spent_s: dict[StepShape, float] = {}  # by uncaptured runs
        self._uncapturable: set[StepShape] = set()  # no memory for them, most likely
        self.programs: dict[StepShape, StepProgram] = {}
        self.cost = CaptureCost()

    def find(
        self, need: StepShape, rounded: Callable[[StepShape], StepShape]
    ) -> Waiting[StepProgram]:
        """The cheapest program that covers `need`; an uncaptured one of its `rounded` shape if
        none. Captures it first where that pays by now, which takes a part of a second."""
        program = self._found.get(need)
        if program is None:
            program = self._look_up(need) or self._add(rounded(need))
            self._found[need] = program
        if self._spent_s.get(program.shape, 0.0) > self.cost.mean_s:
            logger.info("capturing a step while serving", extra={"shape": str(program.shape)})
            shape = program.shape
            yield Apart(lambda: self._try_capture(shape))
        return program

    def is_ready(self, need: StepShape) -> bool:
        """Whether `need` runs captured. Where nothing is captured, whatever comes is as good."""
        if not self._captures:
            return True
        if need not in self._ready:
            self._ready[need] = self._look_up(need) is not None
        return self._ready[need]

    def run(
        self,
        program: StepProgram,
        meanwhile: Callable[[], object] = lambda: None,
        before_end: Callable[[], object] | None = None,
        *,
        is_behind: bool = False,
    ) -> Waiting[HostArrays]:
        """Run a program to its end. See `StepProgram.launch` and `wait`.

        One that is not captured compiles, for seconds perhaps, what no other has compiled.
        """
        if program.is_captured or not self._captures:
            launched = program.launch(is_behind=is_behind)
            return (yield from program.wait(launched, meanwhile, before_end))
        started = time.perf_counter()
        launched = yield Apart(lambda: self._launch_uncaptured(program))
        outputs = yield from program.wait(launched, meanwhile)
        if program.shape not in self._uncapturable:
            spent_s = time.perf_counter() - started
            self._spent_s[program.shape] = self._spent_s.get(program.shape, 0.0) + spent_s
        return outputs

    def enter_thread(self) -> None:
        """Let the calling thread launch: Triton launches on the thread's own device."""
        if self._captures and self._decoder.device.index is not None:
            torch.cuda.set_device(self._decoder.device)

    def _launch_uncaptured(self, program: StepProgram) -> Running:
        self.enter_thread()
        return program.launch()

    def capture(self, shapes: Iterable[StepShape]) -> None:
        """Make and, on a GPU, capture programs of these shapes, the largest first."""
        self.enter_thread()
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
        self._ready.clear()

    def capture_next(self) -> None:
        """Capture the shape whose uncaptured runs took longest, if there is one."""
        if self._spent_s:
            self._try_capture(max(self._spent_s, key=lambda shape: self._spent_s[shape]))

    def _try_capture(self, shape: StepShape) -> None:
        """Capture while serving: a shape that cannot be captured goes on as it ran so far.

        Raises what the device raises where it is lost with it.
        """
        try:
            self.capture([shape])
        except Exception:
            torch.cuda.synchronize(self._decoder.device)
            self._uncapturable.add(shape)
            self._spent_s.pop(shape, None)
            logger.warning(
                "a step cannot be captured: it runs on, launch by launch",
                extra={"shape": str(shape)},
                exc_info=True,
            )

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
