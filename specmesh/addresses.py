"""Addresses of services, as settings and flags give them: `host:port`.

gRPC takes nearly any text for an address: without a port it dials 443 and retries for ever. So what
people write is checked where it is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from specmesh.ports import MAX_PORT

S = TypeVar("S", bound=Sequence[str])

# A name or an IPv4 address, or an IPv6 address in brackets; no scheme, no path.
_FORM = re.compile(r"(?:[^\s:/@\[\]]+|\[[0-9A-Fa-f:.]+(?:%[^\s/@\[\]]+)?\]):([0-9]{1,5})")


def check_addresses(addresses: S) -> S:
    """Return the addresses. Raises ValueError that shows the first that is not host:port."""
    for address in addresses:
        match = _FORM.fullmatch(address)
        if match is None or not 1 <= int(match[1]) <= MAX_PORT:
            raise ValueError(f"{address!r} is not host:port with a port from 1 to {MAX_PORT}")
    return addresses
