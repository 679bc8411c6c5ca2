"""Buffers of captured steps: one layout on both sides, and what may be read while copies run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specmesh.engine.step_buffers import FLOAT32, INT64, Field, StepInputs, StepOutputs

CPU = torch.device("cpu")
FIELDS = [
    Field("tokens", (3, 5)),
    Field("none", (2, 0, 4)),
    Field("seeds", (3,), INT64),
    Field("weights", (7,), FLOAT32),
]
VALUES = {
    "tokens": np.arange(15, dtype=np.int32).reshape(3, 5) + 1,
    "none": np.zeros((2, 0, 4), np.int32),
    "seeds": np.array([-1, 2**62, 5], np.int64),
    "weights": np.linspace(0.5, 1.0, 7, dtype=np.float32),
}


def test_inputs_arrive_under_their_names() -> None:
    """Fields of every type, an empty one among them, lie apart and aligned; nothing is sent before
    `upload`."""
    inputs = StepInputs(FIELDS, CPU)
    for name, value in VALUES.items():
        inputs.host[name][...] = value
    assert not any(bool(array.any()) for array in inputs.device.values())
    inputs.upload()
    for name, value in VALUES.items():
        array = inputs.device[name]
        np.testing.assert_array_equal(array.numpy(), value)
        assert array.data_ptr() % 16 == 0 or not array.numel()
    assert inputs.num_bytes == 64 + 0 + 32 + 32


def test_outputs_of_a_step_outlast_the_next_download() -> None:
    """A chain's outputs are read while those of the chain behind it arrive; the one after that
    overwrites them."""
    outputs = StepOutputs(FIELDS, CPU)
    outputs.device["tokens"].fill_(1)
    first = outputs.download()
    outputs.device["tokens"].fill_(2)
    second = outputs.download()
    assert (first["tokens"] == 1).all()
    assert (second["tokens"] == 2).all()
    outputs.device["tokens"].fill_(3)
    outputs.download()
    assert (first["tokens"] == 3).all()
    assert (second["tokens"] == 2).all()


@pytest.mark.parametrize(("kind", "num_blocks"), [(StepInputs, 1), (StepOutputs, 2)])
def test_no_host_memory_is_held_in_vain(
    kind: type[StepInputs] | type[StepOutputs], num_blocks: int
) -> None:
    """Page-locked memory is scarce: one block of inputs, and the two that outputs use in turn."""
    assert len(kind(FIELDS, CPU)._host_blocks) == num_blocks


def test_a_step_without_fields_has_a_block_all_the_same() -> None:
    """Copies of nothing are none that every device takes."""
    inputs, outputs = StepInputs([], CPU), StepOutputs([], CPU)
    inputs.upload()
    assert outputs.download() == {}
    assert inputs.num_bytes == outputs.num_bytes == 16
