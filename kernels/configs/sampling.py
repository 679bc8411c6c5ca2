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
    """num_warps, and for the closing draw: rows runs of ids a tile, per_program tiles in turn.

    rows: a multiple of four, as four runs are bounded at a time. min_programs: programs take fewer
    tiles each rather than be fewer than this and leave multiprocessors idle. stages: four runs of a
    program copied ahead, itself among them. max_registers: a cap a thread, so that more warps fit;
    None leaves it to the compiler. sum_registers: see `sum_cap`. early: the closing draw starts
    while rows are still being judged (from sm_90 on).

    Few warps a program: one needs no barrier, and a reduction is a few shuffles.
    """

    num_warps: int
    rows: int = 4
    per_program: int = 1
    min_programs: int = 0
    max_registers: int | None = None
    sum_registers: int | None = None
    stages: int = 1
    early: bool = False

    def __post_init__(self) -> None:
        if self.rows < 4 or self.rows % 4:
            raise ValueError(f"rows {self.rows} is not a multiple of four")

    @property
    def run(self) -> int:
        """Ids raced side by side: four a thread, so that each uses its own random words."""
        return 128 * self.num_warps

    @property
    def size(self) -> int:
        """Ids of a tile."""
        return self.rows * self.run

    def sum_cap(self, score_bytes: int) -> int | None:
        """Registers a thread where leaves are mostly summed, not raced.

        sum_registers for scores of two bytes, half as many again where they take four.
        """
        if self.sum_registers is None or score_bytes <= 2:
            return self.sum_registers
        return self.sum_registers * 3 // 2

    def tiles_a_program(self, num_tiles: int) -> int:
        """Tiles that one program of the closing draw takes in turn, of num_tiles in the batch.

        A power of two up to per_program, where it varies: each value is a kernel to compile.
        """
        if not self.min_programs:
            return self.per_program
        share = max(1, num_tiles // self.min_programs)
        return min(self.per_program, 1 << (share.bit_length() - 1))


@dataclass(frozen=True, slots=True)
class Search:
    """tile: groups read at a time. capacity: scores searched in registers."""

    tile: int
    capacity: int
    num_warps: int


_JUDGE = {"sm_90": Launch(1, max_registers=96, sum_registers=80), "cpu": Launch(16)}
_JUDGE_FALLBACK = Launch(1)
_CLOSE = {
    "sm_90": Launch(1, per_program=4, min_programs=512, max_registers=64, stages=4, early=True),
    "cpu": Launch(16),
}
_CLOSE_FALLBACK = Launch(1, per_program=8)
_SEARCH = {"sm_90": Search(32, 1024, 4), "cpu": Search(32, 1024, 8)}
_SEARCH_FALLBACK = Search(16, 1024, 4)
_DRAFT = {"sm_90": Launch(8), "cpu": Launch(16)}
_DRAFT_FALLBACK = Launch(8)


def judge_launch(device: torch.device) -> Launch:
    """Launch of the kernels that read rows by leaves."""
    return _JUDGE.get(architecture(device), _JUDGE_FALLBACK)


def close_launch(device: torch.device) -> Launch:
    """Launch of the closing draw."""
    return _CLOSE.get(architecture(device), _CLOSE_FALLBACK)


def threshold_launch(device: torch.device) -> Search:
    """Launch of the threshold search."""
    return _SEARCH.get(architecture(device), _SEARCH_FALLBACK)


def draft_launch(device: torch.device) -> Launch:
    """Launch of the kernels that lay draft rows out: few rows, so many warps a program."""
    return _DRAFT.get(architecture(device), _DRAFT_FALLBACK)
