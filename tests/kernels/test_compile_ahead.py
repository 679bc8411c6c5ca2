"""Compiling ahead runs the steps that serving starts with, in processes of its own, once."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from draft_service.device_proposer import DraftSampler
from specmesh.engine.compile_ahead import Job, compile_ahead, compile_shapes
from specmesh.engine.families import spec_from_config
from specmesh.engine.step_programs import StepShape

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def job(device: str, shapes: list[StepShape]) -> Job:
    return Job(
        spec=spec_from_config(CONFIG),
        dtype=torch.float32,
        device=device,
        page_size=16,
        invariant=True,
        make_sampler=partial(DraftSampler, 64, 4),
        shapes=shapes,
    )


def test_every_shape_of_a_job_is_met(device: str, tmp_path: Path) -> None:
    """A chain of two passes and one of a single pass, over one layer in place of seven."""
    shapes = [StepShape(1, 2, 0, 2, 1, 64), StepShape(2, 1, 16, 1, 1, 64)]
    assert compile_shapes(job(device, shapes), tmp_path) == 2


def test_each_kernel_is_compiled_by_one_worker(tmp_path: Path) -> None:
    """Two workers share what one alone compiles, each kernel once, whatever process names it; none
    is launched."""
    environment = {key: own for key, own in os.environ.items() if key != "TRITON_INTERPRET"}
    started = []
    for name in ("alone", "shared", "shared"):
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.kernels.claimed", str(tmp_path / name)]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    alone, first, second = (each.communicate(timeout=120)[0].splitlines() for each in started)
    assert [each.returncode for each in started] == [0, 0, 0]
    assert len(set(alone)) == len(alone) > 20
    assert sorted(first + second) == sorted(alone)


def test_it_is_done_once(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second time the mark is found; another set of shapes has another mark."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    caplog.set_level("INFO")
    first, other = [StepShape(1, 1, 0, 1, 1, 64)], [StepShape(2, 1, 0, 1, 1, 64)]
    compile_ahead(job(device, first), max_workers=1)
    assert len(list(tmp_path.glob("specmesh-*"))) == 1, caplog.text
    spawned = caplog.text.count("compiled the kernels")
    compile_ahead(job(device, first), max_workers=1)
    assert caplog.text.count("compiled the kernels") == spawned == 1
    compile_ahead(job(device, other), max_workers=1)
    assert len(list(tmp_path.glob("specmesh-*"))) == 2
