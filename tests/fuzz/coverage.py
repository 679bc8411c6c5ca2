"""Which branches of the product a call takes: pairs of lines, by `sys.settrace`.

Only files of the product are followed, so that what libraries do costs next to nothing. Works on
the calling thread, on every supported Python, without another package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specmesh", "coordinator", "draft_service", "target_service", "kernels")
_FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)

Edge = tuple[CodeType, int, int]


@contextmanager
def following(edges: set[Edge]) -> Iterator[None]:
    """Within it every pair (line before, line) of a product function is added to `edges`."""
    known: dict[CodeType, bool] = {}

    def called(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in known:
            known[code] = code.co_filename.startswith(_FOLDERS)
        if not known[code]:
            return None
        before = 0

        def stepped(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal before
            if event == "line":
                edges.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return stepped

        return stepped

    former = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(former)
