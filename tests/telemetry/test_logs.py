"""JSON lines: one record a line, ids beside the message, nothing that quotes a prompt."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specmesh.config import TelemetrySettings
from specmesh.errors import NotReady
from specmesh.logs import OWN_LOGGERS, SessionLogger, configure_logging
from specmesh.spans import GENERATE
from specmesh.telemetry import Telemetry


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Logging of this process as `__main__` sets it up, put back afterwards."""
    root = logging.getLogger()
    loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
    before = (root.handlers[:], root.level, [logger.level for logger in loggers])
    output = io.StringIO()
    configure_logging("target", "target-0", "info", output)
    yield output
    root.handlers[:], level, levels = before
    root.setLevel(level)
    for logger, own in zip(loggers, levels, strict=True):
        logger.setLevel(own)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """Every line, parsed."""
    return [json.loads(text) for text in stream.getvalue().splitlines()]


def test_a_record_is_one_line_with_its_fields(stream: io.StringIO) -> None:
    """Constant message, numbers as numbers, service and instance; debug is off at info."""
    log = logging.getLogger("specmesh.engine")
    log.info("pages ran out", extra={"num_free": 0, "ratio": 0.5, "nothing": None})
    log.debug("unseen")
    (record,) = lines(stream)
    assert record.pop("time")
    assert record == {
        "level": "info", "service": "target", "instance": "target-0", "logger": "specmesh.engine",
        "message": "pages ran out", "num_free": 0, "ratio": 0.5,
    }  # fmt: skip


def test_private_attributes_of_other_libraries_are_no_fields(stream: io.StringIO) -> None:
    """Other libraries stamp records privately, as Ray does; lines stay as they are."""
    logging.getLogger("specmesh.engine").info("ran", extra={"_stamp": 1, "num_free": 2})
    (record,) = lines(stream)
    assert "num_free" in record
    assert not [key for key in record if key.startswith("_")]


def test_session_and_trace_ids_are_on_every_line(stream: io.StringIO) -> None:
    """A session's logger adds session_id, and trace_id and span_id of the request's span."""
    exporter = SimpleSpanProcessor(InMemorySpanExporter())
    tel = Telemetry("coordinator", TelemetrySettings(), "c-0", [exporter])
    span = tel.start(GENERATE, None)
    log = SessionLogger(logging.getLogger("coordinator.driver"), "session-9", span)
    log.warning("draft lost", extra={"round_index": 4})
    span.end()
    tel.shutdown()
    (record,) = lines(stream)
    assert record["session_id"] == "session-9"
    assert record["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert record["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert record["round_index"] == 4


def test_nobody_can_forge_a_line(stream: io.StringIO) -> None:
    """Line breaks, terminal escapes, DEL, C1 controls and line separators are escaped."""
    evil = 'x\n{"level":"error"}\r\x1b[2J\x7f\x9b\u2028'
    logging.getLogger("coordinator").info("odd name", extra={"peer": evil})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.isascii()
    assert all(character.isprintable() for character in text.rstrip("\n"))
    assert lines(stream)[0]["peer"] == evil


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret")])
def test_messages_of_errors_that_may_quote_input_are_left_out(
    stream: io.StringIO, error: Exception
) -> None:
    """Type and frames are logged, the message is not; our own and the system's messages are."""
    log = logging.getLogger("coordinator")
    for raised in (error, NotReady("replica gone")):
        try:
            raise raised
        except type(raised):
            log.exception("request failed")
    hidden, shown = (record["exception"] for record in lines(stream))
    assert isinstance(hidden, dict)
    assert isinstance(shown, dict)
    assert hidden["type"] == type(error).__name__
    assert "message" not in hidden
    assert "test_logs.py" in hidden["frames"]
    assert shown["message"] == "replica gone"
    assert "secret" not in stream.getvalue()


def test_other_libraries_log_warnings_and_only_their_first_line(stream: io.StringIO) -> None:
    """asyncio prints a failed task's exception text from the second line on."""
    foreign = logging.getLogger("asyncio")
    foreign.info("unseen")
    foreign.error("Task exception was never retrieved\nfuture: <Task ValueError('secret')>")
    (record,) = lines(stream)
    assert record["message"] == "Task exception was never retrieved"
    assert "secret" not in stream.getvalue()


def test_long_values_are_cut(stream: io.StringIO) -> None:
    """No field makes a line of megabytes."""
    logging.getLogger("coordinator").info("long", extra={"peer": "x" * 10**6})
    assert len(stream.getvalue()) < 10_000
