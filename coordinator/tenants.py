"""API keys: which tenant a call belongs to, and how much a tenant may run and queue.

Owns the key file and the check of a call's `authorization` metadata. A line of the file is
`tenant:key`, then, optionally, `max_running=N` and `max_waiting=N` for the tenant on this replica;
`#` begins a comment line. A tenant may have several keys. Without a key file every call belongs to
the tenant "default". Keys are kept as digests, compared in constant time and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specmesh.errors import ConfigError, Unauthenticated

DEFAULT_TENANT = "default"
MIN_KEY_LENGTH = 16
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bounds of one tenant on one replica, in samples and requests; None: the replica's own."""

    max_running: int | None = None
    max_waiting: int | None = None


NO_LIMITS = TenantLimits()
_LIMIT_NAMES = ("max_running", "max_waiting")


class Tenants:
    """Who may call."""

    def __init__(self, keys: Iterable[tuple[str, str]] | None, path: Path | None = None) -> None:
        """keys: (tenant, key) pairs; None asks for no key. path: where `refresh` reads them."""
        self._path = path
        self._read = ""  # digest of the file as it was last read
        self._limits: dict[str, TenantLimits] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[tuple[str, str]] | None) -> None:
        """From now on these keys count."""
        self._digests = None if keys is None else [(name, _digest(key)) for name, key in keys]

    @classmethod
    def load(cls, path: Path | None) -> Tenants:
        """Read a key file. Raises ConfigError naming the line, never the key."""
        tenants = cls(None, path)
        tenants.refresh()
        return tenants

    def refresh(self) -> bool:
        """Read the file again; whether it had changed.

        Raises ConfigError for a file that cannot be used: once per change, and the keys stay.
        """
        if self._path is None:
            return False
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read {self._path}: {error.strerror}", field="api_keys"
            ) from error
        read = hashlib.sha256(content).hexdigest()
        if read == self._read:
            return False
        self._read = read
        keys, limits = _parse(self._path, content)
        self.replace(keys)
        self._limits = limits
        return True

    def limits_of(self, tenant: str) -> TenantLimits:
        """The tenant's bounds."""
        return self._limits.get(tenant, NO_LIMITS)

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


def _parse(path: Path, content: bytes) -> tuple[list[tuple[str, str]], dict[str, TenantLimits]]:
    """Keys and limits of a key file. Raises ConfigError naming the line, never its content."""
    keys: list[tuple[str, str]] = []
    limits: dict[str, TenantLimits] = {}
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", field="api_keys") from None
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        tenant, separator, rest = (part.strip() for part in text.partition(":"))
        key, *options = rest.split() or [""]
        if not separator or not tenant or len(key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"{path} line {number}: expected tenant:key with a key of at least "
                f"{MIN_KEY_LENGTH} characters",
                field="api_keys",
            )
        keys.append((tenant, key))
        if options:
            found = _limits(options)
            if found is None or limits.setdefault(tenant, found) != found:
                raise ConfigError(
                    f"{path} line {number}: expected max_running=N (at least 1) or max_waiting=N "
                    f"after the key, the same ones for all keys of a tenant",
                    field="api_keys",
                )
    if not keys:
        raise ConfigError(f"{path} holds no key", field="api_keys")
    return keys, limits


def _limits(options: Iterable[str]) -> TenantLimits | None:
    """Limits as written; None when they cannot be read."""
    values: dict[str, int] = {}
    for option in options:
        name, _, number = option.partition("=")
        if name not in _LIMIT_NAMES or name in values or not number.isascii():
            return None
        if not number.isdecimal() or (name == "max_running" and int(number) < 1):
            return None
        values[name] = int(number)
    return TenantLimits(**values)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
