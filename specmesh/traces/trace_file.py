"""OTLP-JSON lines on disk: one file a process, one export request a line.

Owns the file format in the writing direction (OpenTelemetry protocol, file exporter specification:
the JSON encoding of ExportTraceServiceRequest, ids as lower-case hex). Reading is in `reader.py`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from specmesh.errors import ConfigError

SUFFIX = ".otlp.jsonl"
MAX_FILE_BYTES = 256 << 20  # about half a million spans; past it spans are dropped and counted

_log = logging.getLogger("specmesh.traces")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


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
    """One line of UTF-8 JSON with its newline."""
    request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                _hex_ids(span)
                for link in span.get("links", ()):
                    _hex_ids(link)
    return json.dumps(request, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _hex_ids(message: dict[str, Any]) -> None:
    """OTLP/JSON writes ids as hex, where protobuf's own mapping would write base64."""
    for name in _ID_FIELDS:
        if name in message:
            message[name] = base64.b64decode(message[name]).hex()
