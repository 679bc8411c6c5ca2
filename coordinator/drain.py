"""`python -m coordinator.drain [--notice-s SECONDS]`: what a Ray worker pod runs before it ends.

Ends the replica of this pod as SIGTERM ends one without Ray: creates the file that its actor looks
for (`ray.drain_file`) and waits until the actor has drained and removed it, until the grace is over
or until it is clear that no replica runs here. Settings come from the environment, as the replica's
do.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

from specmesh.config import CoordinatorSettings, settings_from_environment
from specmesh.errors import ConfigError

POLL_S = 0.25
MARGIN_S = 10.0  # beyond the grace, for streams and exporters to close


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=POLL_S):
            return True
    except OSError:
        return False


def main(argv: list[str]) -> int:
    """Drain and wait; return the exit status: 0 drained, 1 not in time, 2 bad settings."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.drain", description=__doc__)
    parser.add_argument(
        "--notice-s", type=float, default=0.0, help="wait before, for endpoints to be removed"
    )
    notice_s: float = parser.parse_args(argv).notice_s
    try:
        settings = settings_from_environment(CoordinatorSettings, {})
        file = settings.ray.drain_file
        if file is None:
            raise ConfigError("not set", field="ray.drain_file")
        time.sleep(notice_s)
        try:
            file.touch()
        except OSError as error:
            raise ConfigError(f"cannot create {file}: {error.strerror}") from error
    except ConfigError as error:
        sys.stderr.write(f"coordinator drain: {error}\n")
        return 2
    return 0 if _wait(settings, file) else 1


def _wait(settings: CoordinatorSettings, file: Path) -> bool:
    """Whether the file was removed in time."""
    port = settings.server.health_port or settings.server.port
    deadline = time.monotonic() + settings.server.drain_grace_s + MARGIN_S
    last_heard_s = time.monotonic()
    while file.exists():
        now = time.monotonic()
        if _listens(port):
            last_heard_s = now
        if now > deadline or now - last_heard_s > MARGIN_S:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
