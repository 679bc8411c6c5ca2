"""Offline sweep that fills `configs/attention.py`: `python -m kernels.configs.sweep_attention`.

Compiles every candidate in parallel processes (the disk cache carries the binaries over), times
each on the named shape of its kernel, and prints the table sorted by time; `--json FILE` keeps it.
A person copies the winners into the table: nothing here runs while serving.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels import bench_attention as cases
from kernels.attention_backward import Saved, _launch_key_value, _launch_query, _row_values
from kernels.attention_forward import Inputs, launch_forward
from kernels.bench import time_calls
from kernels.configs.attention import PagedTiles, Tiles
from kernels.paged_attention import Split, launch
from kernels.reference_attention import AttentionOptions

CAUSAL = AttentionOptions(causal=True)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of one kernel on one named shape."""

    shape: str
    tiles: Tiles | PagedTiles
    split: Split | None = None


def _dense(shape: str) -> list[Candidate]:
    blocks = [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4),
              (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4)]  # fmt: skip
    specialised = Candidate(shape, Tiles(64, 64, specialised=True))
    return [specialised] + [
        Candidate(shape, Tiles(*block, descriptors=descriptors, ahead=ahead))
        for ahead in (True, False)
        for descriptors in (True, False)
        for block in blocks
    ]


def _backward(shape: str) -> list[Candidate]:
    key_value = [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3)]
    query = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4), (64, 64, 4, 2)]
    blocks = key_value if shape == "P8k-dkv" else query
    return [Candidate(shape, Tiles(*block, descriptors=True)) for block in blocks]


def _paged(shape: str, splits: tuple[Split, ...]) -> list[Candidate]:
    folds = ((1, 1), (4, 1), (4, 4))
    tiles = [
        PagedTiles(tile, 64, 4, stages, *fold, 128, descriptors)
        for tile, stages, descriptors in ((64, 3, True), (32, 4, True), (64, 3, False))
        for fold in folds
    ]  # fmt: skip
    if shape == "P-off-paged":
        blocks = ((64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3))
        tiles = [PagedTiles(64, *block, descriptors=True) for block in blocks]
    return [Candidate(shape, t, split) for split in splits for t in tiles]


def candidates(names: list[str]) -> list[Candidate]:
    """Every configuration to try for these shapes; of all shapes where none is named."""
    everything = {
        "P8k": _dense("P8k"),
        "P8k-d64": _dense("P8k-d64"),
        "P-off": _dense("P-off"),
        "P8k-dkv": _backward("P8k-dkv"),
        "P8k-dq": _backward("P8k-dq"),
        "V64": _paged("V64", (Split.CHUNK,)),
        "D64": _paged("D64", (Split.CHUNK,)),
        "V1": _paged("V1", (Split.CHUNK,)),
        "P-off-paged": _paged("P-off-paged", (Split.SEQUENCE,)),
    }
    return [candidate for name in names or everything for candidate in everything[name]]


SHAPES = {
    "P8k": cases.PREFILL,
    "P8k-d64": cases.PREFILL_64,
    "P8k-dkv": cases.PREFILL,
    "P8k-dq": cases.PREFILL,
    "P-off": cases.OFFSET,
    "P-off-paged": cases.OFFSET,
    "V64": cases.VERIFY,
    "V1": cases.VERIFY_ALONE,
    "D64": cases.DECODE,
}


def calls_for(candidate: Candidate, tensors: list[Any]) -> list[Callable[[], object]]:
    """The candidate's launch on each set of tensors."""
    return [_call_for(candidate, own) for own in tensors]


def _call_for(candidate: Candidate, tensors: tuple[Any, ...]) -> Callable[[], object]:
    tiles = candidate.tiles
    if isinstance(tiles, PagedTiles):
        q, k_pool, v_pool, batch = tensors
        split = candidate.split or Split.SEQUENCE
        return lambda: launch(q, k_pool, v_pool, batch, CAUSAL, split, tiles)
    q, k, v = tensors
    inputs = Inputs(q, k, v)
    if candidate.shape not in ("P8k-dkv", "P8k-dq"):
        return lambda: launch_forward(inputs, CAUSAL, tiles)
    rows = _row_values(q, inputs, Saved(*launch_forward(inputs, CAUSAL)))
    if candidate.shape == "P8k-dkv":
        grads = torch.empty_like(k), torch.empty_like(v)
        return lambda: _launch_key_value(inputs, rows, grads, CAUSAL, tiles)
    grad_q = torch.empty_like(q)
    return lambda: _launch_query(inputs, rows, (grad_q, None), CAUSAL, tiles)


def tensors_for(name: str, num_sets: int) -> list[Any]:
    """Sets of inputs for a shape; several, so that a call does not find its own in the cache."""
    shape = SHAPES[name]
    if name in ("V64", "V1", "D64", "P-off-paged"):
        return [cases.paged_tensors(shape, seed) for seed in range(num_sets)]
    return [shape.tensors(seed) for seed in range(num_sets)]


def _compile(candidate: Candidate) -> None:
    try:
        calls_for(candidate, tensors_for(candidate.shape, 1))[0]()
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - the timing process reports it
        return


def time_candidates(chosen: list[Candidate]) -> list[dict[str, Any]]:
    """Compile in parallel, then time one by one. A candidate that fails carries its error."""
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=16) as pool:
        pool.map(_compile, chosen, chunksize=1)
    results: list[dict[str, Any]] = []
    loaded: tuple[str, list[Any]] = ("", [])
    for candidate in chosen:
        if loaded[0] != candidate.shape:
            loaded = ("", [])
            loaded = (
                candidate.shape,
                tensors_for(candidate.shape, 3 if candidate.shape == "V1" else 2),
            )
        result: dict[str, Any] = {"shape": candidate.shape, "tiles": asdict(candidate.tiles)}
        if candidate.split is not None:
            result["split"] = candidate.split.name
        try:
            calls = calls_for(candidate, loaded[1])
            graph = isinstance(candidate.tiles, PagedTiles)
            timing = time_calls(calls, graph=graph, num_samples=9)
            result["median_ms"] = round(timing.median_ms, 5)
        except Exception as error:  # noqa: BLE001 - one bad candidate must not end the sweep
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        results.append(result)
    return results


def main() -> int:
    """Time the candidates and print the best of each shape; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.configs.sweep_attention")
    parser.add_argument("--only", default="", help="shapes, separated by commas; all by default")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--top", type=int, default=5, help="lines printed for each shape")
    chosen = parser.parse_args()
    names = [name for name in chosen.only.split(",") if name]
    results = time_candidates(candidates(names))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    for name in dict.fromkeys(result["shape"] for result in results):
        own = [result for result in results if result["shape"] == name]
        own.sort(key=lambda result: result.get("median_ms", float("inf")))
        for result in own[: chosen.top]:
            tiles = " ".join(f"{key}={value}" for key, value in result["tiles"].items())
            shown = result.get("median_ms", result.get("error"))
            sys.stdout.write(f"{name:<12} {shown} {result.get('split', '')} {tiles}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
