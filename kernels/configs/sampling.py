"""Launches of the sampling and shaping kernels, per architecture.

Nothing here can change a token: leaf and unit are the numeric contract of `kernels/row_state.py`,
tiles of the closing draw and programs per row are free. Made by `python -m kernels.configs.sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.configs import architecture


@dataclass(frozen=True, slots=True)
class Launch:
    """per_program: leaves or tiles a program takes in turn. rows: runs of ids in a closing tile."""

    per_program: int
    num_warps: int = 4
    num_stages: int = 2
    rows: int = 4

    @property
    def run(self) -> int:
        """Ids raced side by side: four a thread, so that each uses its own random words."""
        return 128 * self.num_warps


@dataclass(frozen=True, slots=True)
class Search:
    """tile: groups read at a time. capacity: scores searched in registers."""

    tile: int
    capacity: int
    num_warps: int


_JUDGE = {"sm_90": Launch(per_program=1), "cpu": Launch(per_program=2, num_warps=32)}
_JUDGE_FALLBACK = Launch(per_program=2, num_warps=8)
_CLOSE = {"sm_90": Launch(per_program=2), "cpu": Launch(per_program=1, num_warps=16, rows=4)}
_CLOSE_FALLBACK = Launch(per_program=2)

_SEARCH = {"sm_90": Search(16, 2048, 8), "cpu": Search(32, 1024, 8)}
_SEARCH_FALLBACK = Search(32, 2048, 8)


def judge_launch(device: torch.device) -> Launch:
    """Launch of the kernels that read rows by leaves."""
    return _JUDGE.get(architecture(device), _JUDGE_FALLBACK)


def close_launch(device: torch.device) -> Launch:
    """Launch of the closing draw."""
    return _CLOSE.get(architecture(device), _CLOSE_FALLBACK)


def threshold_launch(device: torch.device) -> Search:
    """Launch of the threshold search."""
    return _SEARCH.get(architecture(device), _SEARCH_FALLBACK)
