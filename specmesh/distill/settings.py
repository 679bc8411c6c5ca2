"""What `specmesh distill` is told, checked before anything is loaded."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specmesh.distill.prompts import HELD_OUT_FILE
from specmesh.errors import ConfigError, InvalidRequest

Optimizer = Literal["muon", "adamw"]
LEAST_TOKENS = 16  # of a row: what a measurement of acceptance needs


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. Rows are sampled texts of `length` tokens.

    layers, init_layers, init_from: the student (`student.py`). batch_rows: rows of one optimizer
    step over all processes, taken micro_rows at a time. sample_rows: rows that one process samples
    together. pool_rows: rows that it samples before it trains on them `reuse` times. report_steps:
    steps between evaluations, each with a checkpoint. eval_rows: held-out rows of each kind, in
    evaluations and, at most, in the card's measurement. draft_vocab: ids of the student's head.
    cache_dir: where a converted .gguf target is kept; None: ~/.cache/specmesh.
    """

    target: Path
    out: Path
    layers: int = 4
    init_layers: tuple[int, ...] | None = None
    init_from: Path | None = None
    minutes: float | None = 20.0
    max_steps: int | None = None
    prompts: Path | None = None
    held_out: Path = HELD_OUT_FILE
    draft_vocab: int | None = None
    optimizer: Optimizer = "muon"
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    batch_rows: int = 64
    micro_rows: int = 64
    length: int = 512
    sample_rows: int = 2048
    pool_rows: int = 8192
    reuse: int = 3
    report_steps: int = 300
    eval_rows: int = 128
    seed: int = 0
    device: str = "cpu"
    resume: bool = False
    cache_dir: Path | None = None

    def check(self, num_processes: int) -> None:
        """Raise InvalidRequest, naming the flag, for values that cannot work; ConfigError for a
        device that is not there."""
        for name in (
            "layers", "batch_rows", "micro_rows", "sample_rows", "pool_rows", "reuse",
            "report_steps", "eval_rows",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{getattr(self, name)} is not at least 1", field=name)
        if self.length < LEAST_TOKENS:
            raise InvalidRequest(f"{self.length} is not at least {LEAST_TOKENS}", field="length")
        if self.minutes is None and self.max_steps is None:
            raise InvalidRequest("a run needs minutes or max_steps", field="minutes")
        if self.minutes is not None and not self.minutes > 0:
            raise InvalidRequest(f"{self.minutes} is not above 0", field="minutes")
        if self.max_steps is not None and self.max_steps < 1:
            raise InvalidRequest(f"{self.max_steps} is not at least 1", field="max_steps")
        if not 0 < self.learning_rate < 1:
            raise InvalidRequest(f"{self.learning_rate} is not in (0, 1)", field="learning_rate")
        if self.batch_rows % (num_processes * self.micro_rows):
            raise InvalidRequest(
                f"{self.batch_rows} rows are no multiple of {num_processes} processes x "
                f"{self.micro_rows} micro_rows",
                field="batch_rows",
            )
        if self.pool_rows % self.sample_rows:
            raise InvalidRequest(
                f"{self.pool_rows} is no multiple of sample_rows {self.sample_rows}",
                field="pool_rows",
            )
        if self.pool_rows * num_processes < self.batch_rows:
            raise InvalidRequest(
                f"{self.pool_rows} rows a process are fewer than one batch", field="pool_rows"
            )
        if self.sample_rows < self.eval_rows:
            raise InvalidRequest(f"{self.eval_rows} exceeds sample_rows", field="eval_rows")
        self._check_device()

    def _check_device(self) -> None:
        unknown = InvalidRequest(f"{self.device!r}: expected cpu or cuda", field="device")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise unknown from error
        if device.type not in ("cpu", "cuda"):
            raise unknown
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError("this machine or torch build has no GPU", field="device")
            count = torch.cuda.device_count()
            if device.index is not None and device.index >= count:
                raise ConfigError(f"{self.device}: this machine has {count} GPUs", field="device")
            if self.length % 64:
                raise InvalidRequest(f"{self.length} is no multiple of 64", field="length")


def check_space(folder: Path, num_bytes: int) -> None:
    """Make the folder. Raises ConfigError where it cannot be written or the disk has no room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as refused:
        raise ConfigError(f"cannot write {folder}: {refused.strerror}", field="out") from refused
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {folder}", field="out")
    if free < num_bytes:
        raise ConfigError(
            f"{folder} has {free >> 20} MiB free, checkpoints and model need {num_bytes >> 20} MiB",
            field="out",
        )
