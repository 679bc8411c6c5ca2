"""Time of one captured step on a GPU, by parts.

`python -m target_service.bench_steps` and `python -m draft_service.bench_steps` run it with the
sampler of their role. Weights are random and made on the device; contexts are filled pages. Owns
shapes and timing; knows roles only as samplers. The baseline is `transformers_steps.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.bench import versions
from specmesh.engine.compile_ahead import RandomWeights
from specmesh.engine.decoder import Decoder
from specmesh.engine.families import ModelSpec, spec_from_config
from specmesh.engine.kv_cache import PAGE_SIZE
from specmesh.engine.program_set import ProgramSet
from specmesh.engine.step_programs import Sampler, StepProgram, StepShape
from specmesh.engine.weights import WeightDtype, weight_bytes

BANDWIDTH = 4.3e12  # bytes a second, a device copy on an H200, read and written
CONTEXT = 600  # tokens of every sequence
NUM_SAMPLES = 30
WARM_UP = 5

_LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "4layer": {
        **_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Measured:
        """From samples in any order."""
        cuts = statistics.quantiles(samples, n=5)
        return cls(statistics.median(samples), cuts[0], cuts[3])


@dataclass(frozen=True, slots=True)
class StepCase:
    """One named step: model, program shape, tokens of context, and its bar in milliseconds."""

    name: str
    model: str
    shape: StepShape
    context: int = CONTEXT
    bar_ms: float | None = None


def is_wanted(case: StepCase, only: str) -> bool:
    """Whether a case's name ends in one of the ends that `only` lists; an empty list wants all."""
    return any(case.name.endswith(end) for end in only.split(","))


def _nothing() -> None:
    pass


def device_times(
    run: Callable[[], object],
    num_samples: int = NUM_SAMPLES,
    *,
    before: Callable[[], object] = _nothing,
) -> Measured:
    """Time on the device between events around `run`; that of `before` is not counted."""
    for _ in range(WARM_UP):
        before()
        run()
    samples = []
    for _ in range(num_samples):
        before()
        make: Any = torch.cuda.Event  # untyped in torch
        begin, end = make(enable_timing=True), make(enable_timing=True)
        lead: Any = torch.cuda._sleep
        lead(1_000_000)  # half a millisecond: the host is ahead, launches cost nothing
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return Measured.of(samples)


def wall_times(
    run: Callable[[], object],
    num_samples: int = NUM_SAMPLES,
    *,
    before: Callable[[], object] = _nothing,
) -> Measured:
    """Wall time of `run`, which waits for the device itself; that of `before` is not counted."""
    samples = []
    for _ in range(num_samples):
        before()
        started = time.perf_counter()
        run()
        samples.append((time.perf_counter() - started) * 1e3)
    return Measured.of(samples)


def load(
    model: str,
    device: torch.device,
    *,
    invariant: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: WeightDtype = "model",
) -> Decoder:
    """A decoder of a named shape with random weights."""
    spec = spec_from_config(CONFIGS[model])
    checkpoint: Any = RandomWeights(spec, dtype, device, weight_dtype)
    return Decoder(spec, checkpoint, dtype=dtype, device=device, fused=True, invariant=invariant)


def fill(program: StepProgram, context: int, clear: Callable[[dict[str, Any]], None]) -> None:
    """Live inputs: every sequence of `context` tokens, its last max_query_len fed now."""
    shape, host = program.shape, program.buffers.inputs.host
    program.reset()
    clear(host)
    rng = np.random.default_rng(0)
    per_seq = host["block_tables"].shape[1]
    queries = shape.max_query_len
    for slot in range(shape.num_seqs):
        rows = slice(slot * queries, (slot + 1) * queries)
        positions = np.arange(context - queries, context)
        table = np.arange(per_seq) * shape.num_seqs + slot  # pages of sequences interleave
        host["block_tables"][slot] = table
        host["token_ids"][rows] = rng.integers(0, 1000, queries)
        host["positions"][rows] = positions
        host["slots"][rows] = table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        host["context_lens"][slot] = context
        host["steps_left"][slot] = shape.num_passes
        first = slot * shape.rows_per_seq
        host["logit_rows"][first : first + shape.rows_per_seq] = range(
            rows.stop - shape.rows_per_seq, rows.stop
        )
    host["cu_seqlens"][:] = np.arange(shape.num_seqs + 1) * queries


def pass_floor_ms(
    spec: ModelSpec, dtype: torch.dtype, weight_dtype: WeightDtype, num_tokens: int
) -> float:
    """Of one pass: weights once and K/V of num_tokens tokens, at the bandwidth of a copy."""
    num_bytes = weight_bytes(spec, dtype, weight_dtype)
    if not spec.tie_embeddings:  # a few rows of it are read
        num_bytes -= dtype.itemsize * spec.num_embeddings * spec.hidden_size
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_tokens
    return (num_bytes + dtype.itemsize * kv) / BANDWIDTH * 1e3


def floor_ms(decoder: Decoder, case: StepCase) -> float:
    """Weights once a pass and the K/V of every context, at the bandwidth of a copy."""
    num_tokens = case.context * case.shape.num_seqs
    one = pass_floor_ms(decoder.spec, decoder.dtype, decoder.weight_dtype, num_tokens)
    return case.shape.num_passes * one


def by_parts(program: StepProgram) -> dict[str, float]:
    """Microseconds on the device by kind of kernel, of one uncaptured run."""
    from torch.profiler import ProfilerActivity, profile

    kinds = {
        "_linear_kernel": "linear", "_finish_kernel": "linear",
        "_finish_norm_kernel": "linear end with norm", "_paged_kernel": "attention",
        "_fold_kernel": "attention", "_rmsnorm_kernel": "norm", "_rope_kv_kernel": "rotary",
        "_judge_kernel": "sampling", "_close_kernel": "sampling", "_redraw_kernel": "sampling",
        "_row_report_kernel": "sampling", "_survey_kernel": "sampling", "_keep_kernel": "sampling",
        "_next_step_kernel": "next step",
    }  # fmt: skip
    graph, program._graph = program._graph, None
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            program.run()
    finally:
        program._graph = graph
    parts: dict[str, float] = {}
    for event in profiled.key_averages():
        kind = next((kind for name, kind in kinds.items() if name in event.key), "other")
        parts[kind] = parts.get(kind, 0.0) + event.self_device_time_total
    return {kind: round(spent, 1) for kind, spent in sorted(parts.items(), key=lambda p: -p[1])}


def measure(
    case: StepCase,
    decoder: Decoder,
    sampler: Sampler,
    clear: Callable[[dict[str, Any]], None],
    pack: Callable[[StepProgram], None],
    *,
    parts: bool = False,
) -> dict[str, Any]:
    """One case as a JSON object."""
    shape = case.shape
    pages = shape.num_seqs * -(-shape.max_context_len // PAGE_SIZE)
    cache = decoder.new_cache(pages)
    for pool in cache.pools:
        pool.normal_()
    programs = ProgramSet(decoder, cache, sampler, shape.num_slots * shape.rows_per_seq)
    began = time.perf_counter()
    programs.capture([shape])
    first_use_s = time.perf_counter() - began
    program = programs.programs[shape]
    fill(program, case.context, clear)
    pack(program)
    program.run()
    graph = program._graph
    assert graph is not None

    def replay() -> None:
        program.buffers.inputs.upload()  # chains move the lengths on
        graph.replay()

    on_device, wall = device_times(replay), wall_times(program.run)
    report = {
        "name": case.name,
        "value": on_device.median,
        "unit": "ms",
        "p20": on_device.p20,
        "p80": on_device.p80,
        "baseline": None,
        "wall": wall.median,
        "floor": floor_ms(decoder, case),
        "bar": case.bar_ms,
        "first_use_s": first_use_s,
        "context": case.context,
        "invariant": decoder.is_invariant,
        "weight_dtype": decoder.weight_dtype,
    }
    if parts:
        report["parts_us"] = by_parts(program)
    return report


def show(report: dict[str, Any]) -> None:
    """Print a report's line at once."""
    bar = "" if report["bar"] is None else f" bar {report['bar']:.2f}"
    error = report.get("relative_error")
    beside = "" if error is None else f" relative error {error:.1e}"
    sys.stdout.write(
        f"{report['name']:24s} {report['value']:.3f} [{report['p20']:.3f} {report['p80']:.3f}] "
        f"ms, wall {report['wall']:.3f}, floor {report['floor']:.3f}{bar}{beside} "
        f"first {report['first_use_s']:.1f}s {report.get('parts_us', '')}\n"
    )
    sys.stdout.flush()


def save(reports: Sequence[dict[str, Any]], path: Path | None, command: str) -> None:
    """Append JSON lines to `path`."""
    if path is None or not reports:
        return
    common = {"versions": versions(), "command": command}
    with path.open("a") as lines:
        for report in reports:
            lines.write(json.dumps(report | common) + "\n")
