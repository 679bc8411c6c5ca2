"""Free ports on loopback for servers that start later.

A port that the system chose for a probe may be chosen again, for a connection or for another
server, before the process it was meant for has bound it: that process then ends, and whoever waits
for it may be answered by the other. So these ports come from outside the range that the system
gives out by itself, and none is given twice by one process.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

from specmesh.errors import ConfigError

LOOPBACK = "127.0.0.1"
FIRST_PORT = 20_000  # below, well-known services listen, and the workers of a Ray cluster
MAX_PORT = 65_535
NUM_TRIES = 200
SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
IANA_DYNAMIC = (49_152, 65_535)  # RFC 6335 section 6; what systems without that file use

_given: set[int] = set()


def system_range() -> tuple[int, int]:
    """First and last port that the system gives out by itself."""
    try:
        first, last = map(int, SYSTEM_RANGE.read_text().split())
    except (OSError, ValueError):
        return IANA_DYNAMIC
    return first, last


def probe(port: int) -> int:
    """Bind a port (0: one that the system chooses) as gRPC does, and give it back; return it.

    Raises OSError when it is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As gRPC binds: a port in TIME_WAIT is free, one with a listener is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        return int(listener.getsockname()[1])


def unused_port() -> int:
    """A port that is free and that the system will not give to anyone who does not ask for it.

    Raises ConfigError when none is found in NUM_TRIES tries.
    """
    first, last = system_range()
    below = range(FIRST_PORT, max(FIRST_PORT, first))
    above = range(last + 1, MAX_PORT + 1)
    num_ports = len(below) + len(above)
    if num_ports < NUM_TRIES:
        return probe(0)  # the system gives out (nearly) all: its choice is as good as any
    start = secrets.randbelow(num_ports)
    for step in range(NUM_TRIES):
        index = (start + step) % num_ports
        port = below[index] if index < len(below) else above[index - len(below)]
        if port in _given:
            continue
        with contextlib.suppress(OSError):
            _given.add(probe(port))
            return port
    raise ConfigError(f"none of {NUM_TRIES} ports outside {first} to {last} is free on {LOOPBACK}")
