"""Whose child is whose: finds and ends what a started process left behind.

Ray starts processes of its own (raylet, control store, agents); when their parent is killed they
become orphans. This process adopts such orphans and recognises them, by process id and start time
or by session, so that only what it started is ever signalled. Linux reads /proc; elsewhere only the
process group of the child is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KILL_WAIT_S = 5.0  # after SIGKILL; only a process stuck in the kernel takes longer
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of the process table. (pid, start_ticks) never names two processes."""

    pid: int
    parent: int
    session: int
    start_ticks: int


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def process_table() -> dict[int, ProcessEntry]:
    """Every process of this machine by id; empty where there is no /proc."""
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command, in parentheses, may hold spaces and parentheses itself.
            rest = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            table[pid] = ProcessEntry(pid, int(rest[1]), int(rest[3]), int(rest[19]))
    return table


class Descendants:
    """What a process started in a session of its own has started, as far as was seen."""

    def __init__(self, leader: int) -> None:
        """`leader` leads its own session. Looks at the process table once."""
        self._leader = leader
        entry = process_table().get(leader)
        self._seen = {(leader, entry.start_ticks)} if entry is not None else set()
        self.look()

    def look(self) -> list[ProcessEntry]:
        """Look again; return those seen now or earlier that still run, the leader apart."""
        table = process_table()
        alive = {(entry.pid, entry.start_ticks) for entry in table.values()}
        known = {pid for pid, ticks in self._seen if (pid, ticks) in alive}
        grew = True
        while grew:
            found = {
                pid
                for pid, entry in table.items()
                if entry.parent in known or entry.session == self._leader
            }
            grew = not found <= known
            known |= found
        self._seen |= {(pid, table[pid].start_ticks) for pid in known if pid in table}
        return [
            entry
            for entry in table.values()
            if (entry.pid, entry.start_ticks) in self._seen and entry.pid != self._leader
        ]

    def kill(self, timeout_s: float = KILL_WAIT_S) -> int:
        """SIGKILL every descendant that still runs; return how many there were."""
        if not process_table():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._leader, signal.SIGKILL)
            return 0
        killed: set[tuple[int, int]] = set()
        deadline = time.monotonic() + timeout_s
        while (left := self.look()) and time.monotonic() < deadline:
            for entry in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry.pid, signal.SIGKILL)
                # Adopted orphans are this process's to reap.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)
                killed.add((entry.pid, entry.start_ticks))
            time.sleep(POLL_S)
        return len(killed)
