"""What a step asks the programs for: few different things, however long a service runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from specmesh.engine.buckets import Buckets
from specmesh.engine.device_executor import ProgramExecutor, _Launch
from target_service.device_verifier import ID_BUCKETS, DeviceVerifier

BUCKETS = Buckets.covering(max_seqs=4, max_query_len=3, max_long_rows=256, max_context_len=2048)


def executor(widths: list[int]) -> ProgramExecutor:
    """One that lays out steps whose widest received row has the width last put there."""
    made: Any = ProgramExecutor.__new__(ProgramExecutor)
    verifier = DeviceVerifier(1024, 5, 2, torch.device("cpu"))
    made._side = SimpleNamespace(
        shape=lambda segments: (2, widths[-1], False), round_up=verifier.round_up
    )
    made._buckets = BUCKETS
    return made


def segment(num_tokens: int) -> Any:
    return SimpleNamespace(start=0, end=num_tokens, num_rows=1)


def test_needs_are_as_few_as_the_buckets_they_meet() -> None:
    """The program of each need is kept, so needs must not differ in what no program differs in: the
    ids of a received row, the rows of a chunk. Each is covered by the need it is told as."""
    widths = [0]
    laid_out = executor(widths)
    by_width, by_rows = set(), set()
    for width in range(1, ID_BUCKETS[-1] + 1):
        widths.append(width)
        need = laid_out._need(_Launch([segment(2)], None), 1)
        assert need.num_ids >= width
        by_width.add(need)
    for num_tokens in range(4, 257):
        need = laid_out._need(_Launch([], segment(num_tokens)), 1)
        assert need.long_rows >= num_tokens
        by_rows.add(need)
    assert len(by_width) == len(ID_BUCKETS)
    assert len(by_rows) == len(BUCKETS.long_rows)
