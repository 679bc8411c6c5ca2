"""JSON lines on standard error: a constant message plus fields, with trace and session ids.

Owns the format. Prompt and output text never reach a log: fields are ids and numbers, messages of
exceptions that may quote their input are left out, and control characters are escaped so that
nobody can forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

from opentelemetry.trace import Span

from specmesh.errors import MAX_DETAIL_BYTES, SpecmeshError

OWN_LOGGERS = ("specmesh", "coordinator", "draft_service", "target_service", "kernels")
# Exceptions whose message states facts of ours or of the system. Others (ValueError, KeyError,
# pydantic's) may quote what a caller sent, so only their type and frames are logged.
_QUOTABLE = (SpecmeshError, OSError, RuntimeError, AssertionError)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One record, one line of ASCII JSON."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._service = service
        self._instance_id = instance_id

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its newline. Never raises on odd field values."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance_id,
            "logger": record.name,
            "message": _message(record),
        }
        for key, value in vars(record).items():
            # Underscored attributes are other libraries' own (Ray stamps every record).
            if key in _STANDARD or key in fields or key.startswith("_"):
                continue
            if value not in ("", None):
                fields[key] = value if isinstance(value, bool | int | float) else _cut(str(value))
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = _exception(record.exc_info[1])
        return json.dumps(fields, ensure_ascii=True, separators=(",", ":"))


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if record.name.split(".", 1)[0] not in OWN_LOGGERS:
        # asyncio prints the repr of a failed task, exception text included, from line 2 on.
        message = message.split("\n", 1)[0]
    return _cut(message)


def _exception(error: BaseException) -> dict[str, str]:
    frames = "".join(traceback.format_tb(error.__traceback__))
    found = {"type": type(error).__name__, "frames": frames[-MAX_DETAIL_BYTES:]}
    if isinstance(error, _QUOTABLE):
        found["message"] = _cut(str(error))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= MAX_DETAIL_BYTES else text[:MAX_DETAIL_BYTES] + "…"


def configure_logging(
    service: str, instance_id: str, level: str, stream: TextIO | None = None
) -> None:
    """Send all logging of this process to `stream` (standard error) as JSON lines.

    For `__main__` modules only: it replaces the root logger's output. Our own loggers log from
    `level` on, other libraries from warnings on.
    """
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(JsonFormatter(service, instance_id))
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


class SessionLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds trace_id, span_id and session_id to every record."""

    def __init__(self, logger: logging.Logger, session_id: str, span: Span | None = None) -> None:
        """`span`: the request's span; ids of an unsampled one are logged too, where it has any."""
        fields = {"session_id": session_id}
        context = span.get_span_context() if span is not None else None
        if context is not None and context.is_valid:
            fields["trace_id"] = f"{context.trace_id:032x}"
            fields["span_id"] = f"{context.span_id:016x}"
        super().__init__(logger, fields)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Merge the call's own `extra` over the session's fields."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs
