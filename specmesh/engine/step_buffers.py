"""Memory that a captured step reads and writes: one block on the host, one on the device.

Everything that varies between two runs of a captured step crosses in one copy each way. Owns the
layout of named arrays within a block. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
        """Bytes it takes, up to the alignment."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class StepBuffer:
    """Named arrays in one block, mirrored on host (numpy views) and device (tensor views).

    The host's blocks are page-locked where the device is a GPU, so copies are asynchronous: the
    caller waits for the device before it writes or reads them again. There are two, used in turn by
    `download`, so that one copy can be read while the next is on its way; `host` is the first.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        """Zeroed memory for these fields."""
        num_bytes = sum(field.num_bytes for field in fields) or _ALIGNMENT
        pinned = device.type == "cuda"
        self._host_blocks = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        ]
        self._device_block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [_views(block.numpy(), fields) for block in self._host_blocks]
        self._turn = 0
        self.device: dict[str, Tensor] = {}
        start = 0
        for field in fields:
            end = start + int(np.prod(field.shape)) * field.dtype.itemsize
            view = self._device_block[start:end].view(_TORCH_TYPES[field.dtype])
            self.device[field.name] = view.view(field.shape)
            start += field.num_bytes

    @property
    def host(self) -> HostArrays:
        """Arrays that `upload` sends."""
        return self._hosts[0]

    @property
    def num_bytes(self) -> int:
        """Size of a block."""
        return self._device_block.numel()

    def upload(self) -> None:
        """Copy host to device, in the stream's order."""
        self._device_block.copy_(self._host_blocks[0], non_blocking=True)

    def download(self) -> HostArrays:
        """Copy device to host, in the stream's order; wait for the device before reading.

        Returns the arrays that it goes to; the copy after the next one overwrites them.
        """
        self._turn ^= 1
        self._host_blocks[self._turn].copy_(self._device_block, non_blocking=True)
        return self._hosts[self._turn]


def _views(block: npt.NDArray[np.uint8], fields: Sequence[Field]) -> HostArrays:
    views, start = {}, 0
    for field in fields:
        end = start + int(np.prod(field.shape)) * field.dtype.itemsize
        views[field.name] = block[start:end].view(field.dtype).reshape(field.shape)
        start += field.num_bytes
    return views
