"""Everything here is served twice: by an engine with a thread of its own, and on a polling loop."""

from __future__ import annotations

import pytest

from tests.rpc import peers

BY_LOOP = ("test_links", "test_parts", "test_preemption", "test_rounds", "test_spans")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in BY_LOOP:
        metafunc.parametrize("driven_by", ["thread", "loop"], indirect=True)


@pytest.fixture(autouse=True)
def driven_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who drives the engines of this test."""
    driver: str = getattr(request, "param", "thread")
    monkeypatch.setattr(peers, "AWAKE_S", 0.005 if driver == "loop" else 0.0)
    return driver
