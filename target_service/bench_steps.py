"""`python -m target_service.bench_steps`: plain and verify steps of an 8B-shaped target."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.sampling import Rule
from specmesh.bench import steps, transformers_steps
from specmesh.engine.step_programs import StepProgram, StepShape
from specmesh.engine.weights import WeightDtype
from target_service.device_verifier import DeviceVerifier

BARS = {  # (batch, rows) -> milliseconds
    (1, 1): 4.4, (8, 1): 4.7, (32, 1): 5.3, (64, 1): 6.2,
    (1, 5): 4.5, (8, 5): 5.0, (32, 5): 6.3, (64, 5): 10.0,
}  # fmt: skip
NUM_IDS = 1024
DEVICE = torch.device("cuda")


def cases_of(model: str, weight_dtype: WeightDtype = "model") -> list[steps.StepCase]:
    """The cases of a model, `step-MODEL-bBATCHxROWS`; with fp8 weights `step-MODEL-fp8-...`."""
    form = model if weight_dtype == "model" else f"{model}-{weight_dtype}"
    return [
        steps.StepCase(
            f"step-{form}-b{batch}x{rows}",
            model,
            StepShape(batch, rows, 0, 1, rows, 1024, NUM_IDS if rows > 1 else 0),
            bar_ms=bar if form == "8b" else None,
        )
        for (batch, rows), bar in BARS.items()
    ]


def _pack(program: StepProgram) -> None:
    """Residual sessions at temperature 1, with sparse rows of 300 ids a candidate."""
    shape, host = program.shape, program.buffers.inputs.host
    bucket = shape.rows_per_seq - 1
    rng = np.random.default_rng(1)
    host["rules"][:] = int(Rule.RESIDUAL)
    host["seeds"][:] = rng.integers(0, 1 << 62, shape.num_slots)
    host["base_lens"][:] = host["context_lens"] - bucket
    host["num_candidates"][:] = bucket
    if bucket:
        ids = np.sort(rng.choice(40000, (shape.num_slots, bucket, 300)), axis=-1)
        host["draft_ids"].fill(-1)
        host["draft_ids"][..., :300] = ids + np.arange(300)
        host["draft_weights"][..., :300] = rng.random((shape.num_slots, bucket, 300)) + 0.01
        host["candidates"][:] = host["draft_ids"][..., 0]


def _measure(
    cases: Sequence[steps.StepCase], options: argparse.Namespace, reports: list[dict[str, Any]]
) -> None:
    """Append a report a case; the decoder is gone from the device afterwards."""
    decoder = steps.load(
        options.model, DEVICE, invariant=not options.library, weight_dtype=options.weight_dtype
    )
    side = DeviceVerifier(decoder.spec.vocab_size, 65, 8, DEVICE)
    for case in cases:
        report = steps.measure(case, decoder, side.sampler, side.clear, _pack, parts=options.parts)
        reports.append(report)
        steps.show(report)
        gc.collect()
        torch.cuda.empty_cache()
    del decoder, side
    gc.collect()
    torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(prog="target_service.bench_steps", description=__doc__)
    parser.add_argument("--model", choices=sorted(steps.CONFIGS), default="8b")
    parser.add_argument(
        "--weight-dtype", choices=("model", "fp8"), default="model", help="of layers' matrices"
    )
    parser.add_argument("--only", default="", help="ends of cases' names, by commas")
    parser.add_argument("--library", action="store_true", help="cuBLAS: no invariance")
    parser.add_argument("--parts", action="store_true", help="time by kind of kernel")
    transformers_steps.add_options(parser)
    parser.add_argument(
        "--baseline-batches", default="1", help="batches that --baseline covers, by commas (1)"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.library and options.weight_dtype == "fp8":
        parser.error("cuBLAS takes no fp8 weights: --library measures --weight-dtype model")
    cases = [
        case
        for case in cases_of(options.model, options.weight_dtype)
        if steps.is_wanted(case, options.only)
    ]
    batches = options.baseline_batches.split(",")
    shapes = [(case.shape.num_seqs, case.shape.max_query_len) for case in cases]
    compared = [shape for shape in shapes if options.baseline and str(shape[0]) in batches]
    if not options.baseline and batches != ["1"]:
        parser.error("--baseline-batches says what --baseline covers, which was not asked for")
    if options.baseline and not compared:
        parser.error("--baseline: no case that is wanted has one of --baseline-batches")
    transformers_steps.check_options(parser, options)
    reports: list[dict[str, Any]] = []
    try:
        _measure(cases, options, reports)
        by_shape = dict(zip(shapes, reports, strict=True))
        if compared:
            for shape, report in transformers_steps.measure(
                options.model, compared, steps.CONTEXT, DEVICE, options.baseline_mode
            ):
                by_shape[shape]["baseline"] = transformers_steps.beside(report)
                reports.append(report)
                steps.show(report)
    finally:  # what was measured stays, if a later case or the baseline fails
        command = shlex.join(["python", "-m", "target_service.bench_steps", *argv])
        steps.save(reports, options.output, command)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
