"""How a command ends: exit codes, and one clear line for every error.

Owns the table of exit codes (README and `specmesh --help` show it). Knows error classes, no
command.
"""

from __future__ import annotations

from enum import IntEnum

from specmesh import errors


class ExitCode(IntEnum):
    """What a script can tell apart. Codes above 128 are 128 + the signal that ended the command."""

    OK = 0
    BUG = 1
    USAGE = 2
    UNAVAILABLE = 3
    BUSY = 4
    SETUP = 5
    FAILED = 6
    DEADLINE = 7
    DENIED = 8
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.BUG: "an error of specmesh itself",
    ExitCode.USAGE: "wrong flags, or a request that is out of range",
    ExitCode.UNAVAILABLE: "nothing answers, or it is not ready",
    ExitCode.BUSY: "queues are full, or the request can never fit",
    ExitCode.SETUP: "settings, models or ports that cannot work",
    ExitCode.FAILED: "the request failed at the server",
    ExitCode.DEADLINE: "the time given was not enough",
    ExitCode.DENIED: "missing or wrong credentials",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); 143 after SIGTERM",
}

_BY_CLASS: dict[type[errors.SpecmeshError], ExitCode] = {
    errors.InvalidRequest: ExitCode.USAGE,
    errors.ContextTooLong: ExitCode.USAGE,
    errors.NotReady: ExitCode.UNAVAILABLE,
    errors.TooBusy: ExitCode.BUSY,
    errors.OutOfPages: ExitCode.BUSY,
    errors.ConfigError: ExitCode.SETUP,
    errors.ModelMismatch: ExitCode.SETUP,
    errors.DeadlineExceeded: ExitCode.DEADLINE,
    errors.Unauthenticated: ExitCode.DENIED,
    errors.PermissionDenied: ExitCode.DENIED,
}


def exit_code(error: errors.SpecmeshError) -> ExitCode:
    """The code for an error; FAILED for every class without one of its own."""
    for cls in type(error).__mro__:
        if cls in _BY_CLASS:
            return _BY_CLASS[cls]
    return ExitCode.FAILED


def help_text() -> str:
    """The table of exit codes, for `--help`."""
    return "Exit codes: " + "; ".join(f"{code.value} {MEANINGS[code]}" for code in ExitCode) + "."
