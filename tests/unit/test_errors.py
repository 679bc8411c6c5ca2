"""Errors: one class per cause, each with a gRPC status, that survive pickling."""

from __future__ import annotations

import inspect
import pickle

import grpc
import pytest

from specmesh import errors
from specmesh.errors import BY_REASON, PrefixMismatch, SpecmeshError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, SpecmeshError) and cls is not SpecmeshError
]


def test_every_error_class_is_in_the_table() -> None:
    """A class that is not in BY_REASON would come back from the wire as another one."""
    assert set(BY_REASON.values()) == set(CLASSES)
    assert all(cls.reason == reason for reason, cls in BY_REASON.items())


@pytest.mark.parametrize("cls", CLASSES)
def test_statuses_are_grpc_s(cls: type[SpecmeshError]) -> None:
    """Every class names a gRPC status code that is an error."""
    assert cls.status in grpc.StatusCode.__members__
    assert cls.status != "OK"


@pytest.mark.parametrize(
    ("reason", "status", "retryable"),
    [
        ("INVALID_REQUEST", "INVALID_ARGUMENT", False),
        ("SESSION_NOT_FOUND", "NOT_FOUND", False),
        ("SESSION_EXISTS", "ALREADY_EXISTS", False),
        ("STALE_ROUND", "ABORTED", False),
        ("PREFIX_MISMATCH", "FAILED_PRECONDITION", False),
        ("MODEL_MISMATCH", "FAILED_PRECONDITION", False),
        ("CONTEXT_TOO_LONG", "OUT_OF_RANGE", False),
        ("OUT_OF_PAGES", "RESOURCE_EXHAUSTED", False),
        ("TOO_BUSY", "RESOURCE_EXHAUSTED", True),
        ("NOT_READY", "UNAVAILABLE", True),
        ("CORRUPT_FRAME", "DATA_LOSS", False),
        ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", False),
        ("CANCELLED", "CANCELLED", False),
    ],
)
def test_the_retry_table(reason: str, status: str, retryable: bool) -> None:
    """Status and retry rule per cause are the documented ones."""
    assert BY_REASON[reason].status == status
    assert BY_REASON[reason].retryable is retryable


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_pickling(cls: type[SpecmeshError]) -> None:
    """Ray moves exceptions between processes: class, text, field and delay arrive."""
    error = cls("expected 3, got 4", field="top_k", retry_after_s=0.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.field, copy.retry_after_s) == ("expected 3, got 4", "top_k", 0.5)
    assert str(copy) == str(error) == "top_k: expected 3, got 4"


def test_prefix_mismatch_keeps_what_resync_needs() -> None:
    """Length and page digests survive pickling."""
    error = PrefixMismatch("other tokens", confirmed_len=130, page_digests=((64, 1), (128, 2)))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.confirmed_len == 130
    assert copy.page_digests == ((64, 1), (128, 2))
    assert str(copy) == "other tokens"
