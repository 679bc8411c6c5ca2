"""`python -m draft_service.bench_steps`: chains of four candidates, drawn on the device."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_service.device_proposer import MAX_CATCH_UP, DeviceProposer
from kernels.sampling import Rule
from specmesh.bench import steps, transformers_steps
from specmesh.engine.step_programs import StepProgram, StepShape

NUM_CANDIDATES = 4


def _case(name: str, model: str, batch: int, bar_ms: float | None = None) -> steps.StepCase:
    shape = StepShape(batch, MAX_CATCH_UP, 0, NUM_CANDIDATES, 1, 1024)
    return steps.StepCase(name, model, shape, bar_ms=bar_ms)


CASES = [
    _case("draft-4layer-k4", "4layer", 1, 0.6),
    _case("draft-4layer-k4-b64", "4layer", 64),
    _case("draft-1b-k4", "1b", 1, 3.6),
    _case("draft-1b-k4-b64", "1b", 64),
]


def _pack(program: StepProgram) -> None:
    """Residual sessions at temperature 1."""
    host = program.buffers.inputs.host
    host["rules"][:] = int(Rule.RESIDUAL)
    host["seeds"][:] = np.random.default_rng(1).integers(0, 1 << 62, program.shape.num_slots)
    host["base_lens"][:] = host["context_lens"]


def _measure(
    case: steps.StepCase, options: argparse.Namespace, reports: list[dict[str, Any]]
) -> None:
    """Append a case's report and, at batch 1, its baseline's."""
    device = torch.device("cuda")
    decoder = steps.load(case.model, device)
    side = DeviceProposer(decoder.spec.vocab_size, 65, 8, device)
    ours = steps.measure(case, decoder, side.sampler, side.clear, _pack, parts=options.parts)
    reports.append(ours)
    steps.show(ours)
    del decoder, side
    gc.collect()
    torch.cuda.empty_cache()
    if options.baseline and case.shape.num_seqs == 1:
        for _, report in transformers_steps.measure(
            case.model, [(1, 1)], case.context, device, options.baseline_mode
        ):
            # Steps of one row: what its generate does for as many candidates, without sampling.
            ours["baseline"] = transformers_steps.beside(report, NUM_CANDIDATES)
            reports.append(report)
            steps.show(report)


def main(argv: list[str]) -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(prog="draft_service.bench_steps", description=__doc__)
    parser.add_argument("--only", default="", help="ends of cases' names, by commas")
    parser.add_argument("--parts", action="store_true", help="time by kind of kernel")
    transformers_steps.add_options(parser)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    cases = [case for case in CASES if steps.is_wanted(case, options.only)]
    if options.baseline and not any(case.shape.num_seqs == 1 for case in cases):
        parser.error("--baseline: no case that is wanted has a batch of 1")
    transformers_steps.check_options(parser, options)
    reports: list[dict[str, Any]] = []
    try:
        for case in cases:
            _measure(case, options, reports)
    finally:  # what was measured stays, if a later case or a baseline fails
        command = shlex.join(["python", "-m", "draft_service.bench_steps", *argv])
        steps.save(reports, options.output, command)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
