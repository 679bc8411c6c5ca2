"""Every error a caller or the network can cause: a class each, with gRPC status and retry rule.

Knows no gRPC: `specmesh/wire_errors.py` maps classes to statuses and back to the same class.
`assert` is for our own bugs only. All arguments go to `Exception`, so errors survive pickling.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

MAX_DETAIL_BYTES = 4096  # HTTP/2 trailers are limited; longer messages are cut


class SpecmeshError(Exception):
    """Base class. `reason` is the machine-readable name on the wire (ErrorInfo.reason)."""

    reason: ClassVar[str] = "INTERNAL"
    status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        """`field` names the offending request field; `retry_after_s` > 0 becomes RetryInfo."""
        super().__init__(message, field, retry_after_s)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from keyword arguments, which `Exception` alone would not."""
        return _rebuild, (type(self), self.message, self.field, self.retry_after_s)

    def __str__(self) -> str:
        """`field: message` where a field is to blame."""
        return f"{self.field}: {self.message}" if self.field else self.message


def _rebuild(cls: type[SpecmeshError], message: str, field: str, retry_s: float) -> SpecmeshError:
    return cls(message, field=field, retry_after_s=retry_s)


class InvalidRequest(SpecmeshError):
    """Bad shape, dtype, range, token id or missing field. Never retry."""

    reason, status = "INVALID_REQUEST", "INVALID_ARGUMENT"


class ConfigError(SpecmeshError):
    """A setting or a model folder that cannot work. Found at start; the operator fixes it."""

    reason, status = "CONFIG_ERROR", "FAILED_PRECONDITION"


class SessionNotFound(SpecmeshError):
    """Unknown, closed or expired session. Reopen it and replay the prefix."""

    reason, status = "SESSION_NOT_FOUND", "NOT_FOUND"


class SessionExists(SpecmeshError):
    """Opened twice at the same epoch."""

    reason, status = "SESSION_EXISTS", "ALREADY_EXISTS"


class StaleRound(SpecmeshError):
    """Epoch or round behind the ledger. Restart the round at a fresh epoch."""

    reason, status = "STALE_ROUND", "ABORTED"


class RoundConflict(SpecmeshError):
    """The last (epoch, round) was repeated with other content."""

    reason, status = "ROUND_CONFLICT", "ABORTED"


class PrefixMismatch(SpecmeshError):
    """Confirmed length or digest differs. Resync, then repeat.

    confirmed_len and page_digests [(prefix_len, digest)] tell where the service stands.
    """

    reason, status = "PREFIX_MISMATCH", "FAILED_PRECONDITION"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: float = 0.0,
        confirmed_len: int = 0,
        page_digests: tuple[tuple[int, int], ...] = (),
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.confirmed_len = confirmed_len
        self.page_digests = page_digests

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the resync facts through pickling."""
        named: dict[str, Any] = {
            "field": self.field,
            "retry_after_s": self.retry_after_s,
            "confirmed_len": self.confirmed_len,
            "page_digests": self.page_digests,
        }
        return partial(PrefixMismatch, **named), (self.message,)


class ModelMismatch(SpecmeshError):
    """Vocabulary, tokenizer or special ids of draft and target differ. An operator's error."""

    reason, status = "MODEL_MISMATCH", "FAILED_PRECONDITION"


class ContextTooLong(SpecmeshError):
    """The session would pass the model's context limit."""

    reason, status = "CONTEXT_TOO_LONG", "OUT_OF_RANGE"


class OutOfPages(SpecmeshError):
    """The request can never fit the K/V pool. (A pool that is merely full preempts instead.)"""

    reason, status = "OUT_OF_PAGES", "RESOURCE_EXHAUSTED"


class TooBusy(SpecmeshError):
    """A bounded queue is full. Back off for `retry_after_s`."""

    reason, status, retryable = "TOO_BUSY", "RESOURCE_EXHAUSTED", True


class NotReady(SpecmeshError):
    """Loading, draining, or the replica is gone. Retry this call elsewhere."""

    reason, status, retryable = "NOT_READY", "UNAVAILABLE", True


class Unauthenticated(SpecmeshError):
    """Missing or wrong credentials."""

    reason, status = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDenied(SpecmeshError):
    """The peer's identity may not make this call."""

    reason, status = "PERMISSION_DENIED", "PERMISSION_DENIED"


class CorruptFrame(SpecmeshError):
    """A distribution frame whose bytes are not what its header says, or a row that is no law."""

    reason, status = "CORRUPT_FRAME", "DATA_LOSS"


class NumericFault(SpecmeshError):
    """A judged row of the target holds NaN or no finite logit. That request fails."""

    reason, status = "NUMERIC_FAULT", "INTERNAL"


class DeadlineExceeded(SpecmeshError):
    """The caller's deadline passed. The outcome is unknown; repeating the same key is safe."""

    reason, status = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class Cancelled(SpecmeshError):
    """The caller went away."""

    reason, status = "CANCELLED", "CANCELLED"


class InternalError(SpecmeshError):
    """A bug. The request fails and the log has the traceback."""

    reason, status = "INTERNAL", "INTERNAL"


BY_REASON: dict[str, type[SpecmeshError]] = {
    cls.reason: cls
    for cls in (
        InvalidRequest,
        ConfigError,
        SessionNotFound,
        SessionExists,
        StaleRound,
        RoundConflict,
        PrefixMismatch,
        ModelMismatch,
        ContextTooLong,
        OutOfPages,
        TooBusy,
        NotReady,
        Unauthenticated,
        PermissionDenied,
        CorruptFrame,
        NumericFault,
        DeadlineExceeded,
        Cancelled,
        InternalError,
    )
}
