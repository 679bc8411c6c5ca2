"""Compiling kernels in parallel before the first start: minutes of one core become seconds of many.

A service's steps need a few hundred compiled kernels, one by one minutes of work. Worker processes
go through every step once over a model of the same shape with one layer of random weights, and
compile what no other has claimed before; nothing is launched, so that no kernel waits for one that
is another's. That fills Triton's cache on disk, from which the service then loads. Owns the workers
and the mark that says it has been done. Must not know roles; how tokens are drawn comes as a
factory.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from specmesh.engine.decoder import Decoder
from specmesh.engine.families import ModelSpec
from specmesh.engine.step_programs import Sampler, StepProgram, StepShape
from specmesh.engine.weights import WeightDtype, expected_shapes

logger = logging.getLogger(__name__)

MAX_WORKERS = 24
WORKER_PAGES = 64  # of the workers' K/V; a multiple of 16, as kernels are specialised to that
TIMEOUT_S = 900.0


class RandomWeights:
    """Stands in for a checkpoint: normal weights of scale 0.02, made where they are used."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: WeightDtype = "model",
    ) -> None:
        self._shapes = dict(expected_shapes(spec))
        self._dtype, self._device, self.weight_dtype = dtype, device, weight_dtype

    def check(self, _spec: ModelSpec, *, shared_embedding: bool = False) -> None:
        """Fits by construction."""

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> Tensor:
        """A new tensor; norms are ones."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        weights = torch.empty(shape, dtype=self._dtype, device=self._device)
        return weights.normal_(0.0, 0.02)


@dataclass(frozen=True, slots=True)
class Job:
    """What is compiled: steps of `shapes` over models of this kind. make_sampler: picklable."""

    spec: ModelSpec
    dtype: torch.dtype
    device: str
    page_size: int
    invariant: bool
    make_sampler: Callable[[torch.device], Sampler]
    shapes: Sequence[StepShape]
    weight_dtype: WeightDtype = "model"


@contextmanager
def compiling_only(claims: Path) -> Iterator[None]:
    """Kernels are compiled, each by who first claims it in that folder, and none is launched: what
    they would write keeps what memory held. For this whole process; on a CPU, where kernels are
    interpreted, they run as ever."""
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def run_nothing(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    def compile_claimed(self: Any, key: str, *rest: Any) -> Any:
        name = f"{self.fn.__module__}.{self.fn.__qualname__} {key}"
        try:
            (claims / hashlib.sha256(name.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return None
        kernel = do_compile(self, key, *rest)
        if kernel is not None:
            _ = kernel.run  # builds what launches it, and loads it
        return kernel

    JITFunction.run, JITFunction._do_compile = run_nothing, compile_claimed
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile


def compile_shapes(job: Job, claims: Path) -> int:
    """Go through every step of a job once, on padding. Returns how many. Called in a worker."""
    device = torch.device(job.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton compiles for the current device
    windows = tuple(dict.fromkeys(job.spec.windows))
    spec = replace(job.spec, num_layers=len(windows), windows=windows)
    weights: Any = RandomWeights(spec, job.dtype, device, job.weight_dtype)
    decoder = Decoder(
        spec, weights, dtype=job.dtype, device=device, fused=True, invariant=job.invariant
    )
    cache = decoder.new_cache(WORKER_PAGES, job.page_size)
    sampler = job.make_sampler(device)
    rows = max(shape.num_slots * shape.rows_per_seq for shape in job.shapes)
    logits = torch.zeros((rows, spec.num_embeddings), dtype=job.dtype, device=device)
    with compiling_only(claims):
        for shape in job.shapes:
            StepProgram(shape, decoder, cache, sampler, logits).run()
    return len(job.shapes)


def compile_ahead(job: Job, max_workers: int = MAX_WORKERS) -> None:
    """Compile a job's kernels by as many processes as cores allow, unless it was done before.

    A worker that fails only leaves what it failed on to be compiled later: that is logged. The mark
    is a file in Triton's cache folder, named by everything that the kernels depend on.
    """
    mark = _cache_folder() / f"specmesh-{_digest(job)}"
    if mark.exists():
        return
    num_workers = max(1, min(max_workers, (os.cpu_count() or 2) - 2, len(job.shapes)))
    # The largest first: what takes longest is not what is left at the end.
    ordered = replace(job, shapes=sorted(job.shapes, key=lambda s: -s.num_rows * s.num_passes))
    started = time.monotonic()
    # gRPC and CUDA run in this process: new ones are spawned, never forked.
    context = multiprocessing.get_context("spawn")
    with (
        TemporaryDirectory(prefix="specmesh-claims-") as claims,
        ProcessPoolExecutor(num_workers, mp_context=context) as workers,
    ):
        futures = [
            workers.submit(compile_shapes, ordered, Path(claims)) for _ in range(num_workers)
        ]
        failed = [error for future in futures if (error := future.exception(TIMEOUT_S))]
    for error in failed:
        logger.warning("compiling ahead failed in a worker", extra={"error": repr(error)[:500]})
    logger.info(
        "compiled the kernels",
        extra={"seconds": round(time.monotonic() - started, 1), "workers": num_workers},
    )
    if not failed:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _cache_folder() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _digest(job: Job) -> str:
    digest = hashlib.sha256()
    sources = sorted((Path(__file__).parents[2] / "kernels").rglob("*.py"))
    for part in (
        triton.__version__,
        torch.__version__,
        torch.cuda.get_device_name(job.device) if torch.cuda.is_available() else "cpu",
        repr((job.spec, job.dtype, job.weight_dtype, job.page_size, job.invariant)),
        repr(list(job.shapes)),
        repr(job.make_sampler).split(" at 0x")[0],
        *(source.read_text() for source in sources),
    ):
        digest.update(part.encode())
    return digest.hexdigest()[:24]
