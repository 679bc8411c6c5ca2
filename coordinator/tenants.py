"""API keys: which tenant a call belongs to.

Owns the key file (`tenant:key` a line, # comments) and the check of a call's `authorization`
metadata. Without a key file every call belongs to the tenant "default".
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from specmesh.errors import ConfigError, Unauthenticated

DEFAULT_TENANT = "default"
MIN_KEY_LENGTH = 16
_SCHEME = "bearer "


class Tenants:
    """Keys are kept as digests only."""

    def __init__(self, keys: Iterable[tuple[str, str]] | None) -> None:
        """keys: (tenant, key) pairs; None asks for no key."""
        self.replace(keys)

    def replace(self, keys: Iterable[tuple[str, str]] | None) -> None:
        """From now on these keys count."""
        self._digests = None if keys is None else [(name, _digest(key)) for name, key in keys]

    @classmethod
    def load(cls, path: Path | None) -> Tenants:
        """Read a key file. Raises ConfigError naming the line, never the key."""
        if path is None:
            return cls(None)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="api_keys") from error
        pairs = []
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            tenant, separator, key = text.partition(":")
            if not separator or not tenant.strip() or len(key.strip()) < MIN_KEY_LENGTH:
                raise ConfigError(
                    f"{path} line {number}: expected tenant:key with a key of at least "
                    f"{MIN_KEY_LENGTH} characters",
                    field="api_keys",
                )
            pairs.append((tenant.strip(), key.strip()))
        if not pairs:
            raise ConfigError(f"{path} holds no key", field="api_keys")
        return cls(pairs)

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The tenant of a call. Raises Unauthenticated."""
        if self._digests is None:
            return DEFAULT_TENANT
        given = next((value for key, value in metadata if key == "authorization"), None)
        if not isinstance(given, str) or not given.lower().startswith(_SCHEME):
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
        digest = _digest(given[len(_SCHEME) :].strip())
        found = None
        for tenant, known in self._digests:  # no early end: time must not tell which key is near
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
