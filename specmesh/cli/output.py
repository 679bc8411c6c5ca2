"""Where commands write: results to standard output, progress and errors to standard error.

Colour, live displays and markup appear on a terminal only (rich decides; NO_COLOR is honoured).
Text of the model never passes through markup.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

# Tables in files and pipes are not squeezed into 80 columns.
PIPE_WIDTH = 160


def stdout() -> Console:
    """Console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Console for progress, statistics and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    # Without emoji: `cuda:x:` is text, and so is what a caller or a model wrote.
    return Console(
        stderr=stderr, highlight=False, emoji=False, soft_wrap=width is not None, width=width
    )


def writable_streams() -> None:
    """Let writing never fail on a character or on a stream that the caller closed.

    What a terminal's encoding cannot show appears as `?`; text of the model may hold anything.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the process's life
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write_text(text: str) -> None:
    """Write text of the model as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def table(title: str, *columns: str, right: frozenset[str] = frozenset()) -> Table:
    """A plain table; the columns named in `right` are right-aligned."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


@contextmanager
def progress(text: str) -> Iterator[Status | None]:
    """A spinner with `text` on a terminal, one line elsewhere; yields the spinner, if any."""
    console = stderr()
    if console.is_terminal:
        with console.status(text) as status:
            yield status
    else:
        console.print(text, markup=False)
        yield None
