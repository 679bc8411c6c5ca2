"""Which replica serves a session: pure choices over what is known of each replica.

Targets by rendezvous hash of the prompt's prefix (Thaler and Ravishankar, 1998), so that requests
which share a prefix meet its pages in one replica's cache, with a cap on load (Mirrokni et al.,
arXiv 1608.01350): beyond it the next choice of the hash. Drafts by least load.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX_TOKENS = 64  # one page: shorter shared prefixes are not cached anyway


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that takes sessions. num_sessions: placed by this coordinator or reported."""

    address: str
    num_sessions: int


def prefix_key(prompt: Sequence[int]) -> bytes:
    """What the hash of a prompt is taken of."""
    return b"".join(token.to_bytes(4, "little") for token in prompt[:PREFIX_TOKENS])


def choose_target(
    key: bytes, replicas: Sequence[Candidate], load_cap: float, avoid: str | None = None
) -> str | None:
    """Address of the best-ranked replica below the cap; `avoid` only where nothing else is left.

    load_cap: multiple of the mean number of sessions, the new one counted, rounded up.
    """
    usable = [replica for replica in replicas if replica.address != avoid] or list(replicas)
    if not usable:
        return None
    cap = math.ceil(load_cap * (sum(r.num_sessions for r in usable) + 1) / len(usable))
    ranked = sorted(usable, key=lambda replica: _score(key, replica.address), reverse=True)
    fitting = (replica for replica in ranked if replica.num_sessions < cap)
    return next(fitting, ranked[0]).address


def choose_draft(replicas: Sequence[Candidate], avoid: str | None = None) -> str | None:
    """Address of the least loaded replica other than `avoid`, the first named on ties."""
    usable = [replica for replica in replicas if replica.address != avoid]
    if not usable:
        return None
    return min(usable, key=lambda replica: replica.num_sessions).address


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=address.encode()[:64]).digest()
