"""Memory that a captured step reads and writes: blocks on the host and one on the device.

Everything that varies between two runs of a captured step crosses in one copy each way. Owns the
layout of named arrays within a block, the same on both sides. Must not know what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

HostArrays = dict[str, Any]

_ALIGNMENT = 16  # bytes: vector loads of every type

_TORCH_TYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a block."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype = INT32

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class _StepArrays:
    """Named arrays in one block on the device (tensor views) and some on the host (numpy views).

    The host's blocks are page-locked where the device is a GPU, so copies are asynchronous.
    """

    def __init__(
        self, fields: Sequence[Field], device: torch.device, *, num_host_blocks: int
    ) -> None:
        """Zeroed memory for these fields."""
        places, num_bytes = _layout(fields)
        pinned = device.type == "cuda"
        self._device_block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host_blocks = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(num_host_blocks)
        ]
        self.device: dict[str, Tensor] = {}
        self._hosts: list[HostArrays] = [{} for _ in self._host_blocks]
        for field, place in places:
            own = self._device_block[place].view(_TORCH_TYPES[field.dtype])
            self.device[field.name] = own.view(field.shape)
            for views, block in zip(self._hosts, self._host_blocks, strict=True):
                views[field.name] = block.numpy()[place].view(field.dtype).reshape(field.shape)

    @property
    def num_bytes(self) -> int:
        """Size of a block."""
        return self._device_block.numel()


class StepInputs(_StepArrays):
    """What the host writes and a step reads.

    One block on the host: the caller writes it again only when the device is done with the step
    that it was sent for. A chain launched behind another is sent nothing (`run_ahead`).
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        super().__init__(fields, device, num_host_blocks=1)

    @property
    def host(self) -> HostArrays:
        """Arrays that `upload` sends."""
        return self._hosts[0]

    def upload(self) -> None:
        """Copy host to device, in the stream's order."""
        self._device_block.copy_(self._host_blocks[0], non_blocking=True)


class StepOutputs(_StepArrays):
    """What a step writes and the host reads.

    Two blocks on the host, used in turn, so that one copy can be read while the next is on its way:
    a chain's outputs are read while the chain behind it runs.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        super().__init__(fields, device, num_host_blocks=2)
        self._turn = 0

    def download(self) -> HostArrays:
        """Copy device to host, in the stream's order; wait for the device before reading.

        Returns the arrays that it goes to; the copy after the next one overwrites them.
        """
        self._turn ^= 1
        self._host_blocks[self._turn].copy_(self._device_block, non_blocking=True)
        return self._hosts[self._turn]


def _layout(fields: Sequence[Field]) -> tuple[list[tuple[Field, slice]], int]:
    """(each field's bytes within a block, the size of a block). No block is empty."""
    places, end = [], 0
    for field in fields:
        places.append((field, slice(end, end + field.num_bytes)))
        end += -(-field.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, _ALIGNMENT)
