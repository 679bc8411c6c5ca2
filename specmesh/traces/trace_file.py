"""OTLP-JSON lines on disk: one file a process, one export request a line.

Owns the file format in the writing direction (OpenTelemetry protocol, file exporter specification:
the JSON encoding of ExportTraceServiceRequest, ids as lower-case hex). Reading is in `reader.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status
from opentelemetry.util.types import AnyValue

from specmesh.errors import ConfigError

SUFFIX = ".otlp.jsonl"
MAX_FILE_BYTES = 256 << 20  # about half a million spans; past it spans are dropped and counted

_log = logging.getLogger("specmesh.traces")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class TraceFileExporter(SpanExporter):
    """Appends each batch as one line, written with a single call so that readers see whole lines.

    A file that reached `max_bytes` takes no more: further spans are dropped, with one warning.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises OSError when the file cannot be opened for appending."""
        self.path = path
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        self._num_bytes = os.fstat(self._file).st_size

    @classmethod
    def open(cls, folder: Path, service: str, instance_id: str) -> TraceFileExporter:
        """Open `folder/SERVICE-INSTANCE-PID.otlp.jsonl`, making the folder. Raises ConfigError."""
        name = _UNSAFE.sub("_", f"{service}-{instance_id}-{os.getpid()}")[:200] + SUFFIX
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder / name)
        except OSError as error:
            raise ConfigError(
                f"cannot write {folder}: {error.strerror}", field="telemetry.trace_dir"
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append one line. FAILURE when the file is full, closed or the disk refuses it."""
        line = encode_line(spans)
        with self._lock:
            if self._file is None:
                return SpanExportResult.FAILURE
            if self._num_bytes + len(line) > self._max_bytes:
                if not self.num_dropped:
                    _log.warning("trace file is full", extra={"path": str(self.path)})
                self.num_dropped += len(spans)
                return SpanExportResult.FAILURE
            try:
                written = os.write(self._file, line)
            except OSError as error:
                _log.warning("trace file cannot be written", extra={"error": error.strerror})
                self.num_dropped += len(spans)
                return SpanExportResult.FAILURE
            self._num_bytes += written
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file. Later spans are refused."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is buffered here."""
        return True


def encode_line(spans: Sequence[ReadableSpan]) -> bytes:
    """One line of UTF-8 JSON with its newline: an ExportTraceServiceRequest in OTLP/JSON.

    Written directly: going through the protobuf message costs seven times the interpreter time,
    which the threads that serve would wait for. A test holds the two to the same message.
    """
    groups: dict[tuple[Resource, InstrumentationScope | None], list[dict[str, Any]]] = {}
    for span in spans:
        groups.setdefault((span.resource, span.instrumentation_scope), []).append(_span(span))
    request = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource.attributes)},
                "scopeSpans": [{"scope": _scope(scope), "spans": encoded}],
            }
            for (resource, scope), encoded in groups.items()
        ]
    }
    return json.dumps(request, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _scope(scope: InstrumentationScope | None) -> dict[str, Any]:
    return {} if scope is None else {"name": scope.name, "version": scope.version or ""}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    fields: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP keeps 0 for "unspecified"
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "status": _status(span.status),
        "flags": _flags(span.parent),
    }
    if span.parent is not None:
        fields["parentSpanId"] = f"{span.parent.span_id:016x}"
    if context.trace_state:
        pairs = context.trace_state.items()
        fields["traceState"] = ",".join(f"{key}={item}" for key, item in pairs)
    if span.links:
        fields["links"] = [
            {
                "traceId": f"{link.context.trace_id:032x}",
                "spanId": f"{link.context.span_id:016x}",
                "flags": _flags(link.context),
            }
            for link in span.links
        ]
    if span.dropped_attributes:
        fields["droppedAttributesCount"] = span.dropped_attributes
    if span.dropped_links:
        fields["droppedLinksCount"] = span.dropped_links
    return fields


def _flags(context: SpanContext | None) -> int:
    """Bit 8: whether a parent is remote is known; bit 9: it is (trace.proto, SpanFlags)."""
    return 0x300 if context is not None and context.is_remote else 0x100


def _status(status: Status) -> dict[str, Any]:
    fields: dict[str, Any] = {"code": status.status_code.value} if status.status_code.value else {}
    if status.description:
        fields["message"] = status.description
    return fields


def _attributes(attributes: Mapping[str, AnyValue] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: AnyValue) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _NOT_FINITE[str(value)]}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    raise TypeError(f"spans of the table hold no {type(value).__name__}")
