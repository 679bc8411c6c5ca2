"""The end of the application under Ray Serve: as long as replicas drain, and no longer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from coordinator import app


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How Serve was asked to delete the application."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "delete", lambda name, **how: calls.append({"name": name, **how}))
    monkeypatch.setattr(app, "STATUS_PERIOD_S", 0.001)
    return calls


async def test_replicas_that_drain_for_long_are_waited_for(
    deleted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's own wait gives up after a minute and would cut what runs; ours asks as often as it
    takes, and ends when the application is gone."""
    looks = iter([True] * 500)
    states: list[bool] = []

    def status() -> Any:
        states.append(next(looks, False))
        return SimpleNamespace(applications={app.APP_NAME: None} if states[-1] else {})

    monkeypatch.setattr(serve, "status", status)
    async with asyncio.timeout(60):
        await app._undeploy(50.0)
    assert deleted == [{"name": app.APP_NAME, "_blocking": False}]
    assert (len(states), states[-1]) == (501, False)


async def test_a_replica_that_never_ends_is_not_waited_for_for_ever(
    deleted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its limit the wait ends without an error: Ray is ended next."""
    applications = {app.APP_NAME: None}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    async with asyncio.timeout(60):
        await app._undeploy(0.05)
    assert len(deleted) == 1
