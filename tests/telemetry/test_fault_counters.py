"""Counters of faults between coordinator and target: the real driver, a scripted fleet."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.commands import Deferred
from coordinator.decide import Law
from coordinator.driver import MAX_WAITING_EVENTS, Driver, SessionWire
from coordinator.fleet import Fleet
from coordinator.messages import (
    Deliver,
    Fail,
    Finish,
    Lost,
    PlaceTarget,
    Side,
    TargetPlaced,
    TargetReply,
)
from coordinator.policy import SessionPolicy, SharedPolicy
from coordinator.records import RoundRecorder, SampleFacts
from coordinator.session_plan import SessionPlan
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh.config import LinkSettings, TelemetrySettings
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.errors import Cancelled
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from specmesh.logs import SessionLogger
from specmesh.telemetry import Telemetry
from tests.sim.fakes import VOCAB_SIZE, make_session

PROMPT = (1, 2, 3)


@dataclass
class ScriptedFleet:
    """Takes commands and answers nothing by itself. side: of its only link."""

    side: Side = Side.TARGET
    is_up: bool = True
    sent: list[target_pb2.TargetCommand] = field(default_factory=list)

    def subscribe(self, driver: Driver) -> None:
        """Every link reaches the one driver anyway."""

    def unsubscribe(self, driver: Driver) -> None:
        """As above."""

    def link(self, side: Side, replica: str) -> ScriptedFleet:
        return self

    def send(self, message: target_pb2.TargetCommand, *, rows: bool = False) -> bool:
        self.sent.append(message)
        return True

    def place_target(self, session_id: str, key: int, action: PlaceTarget) -> None:
        """The test places it."""


class Output:
    """A reader that is never behind."""

    is_full = False

    def deliver(self, chunk: Deliver) -> None:
        """Taken."""

    def finish(self, end: Finish) -> None:
        """Taken."""

    def fail(self, end: Fail) -> None:
        """Taken."""


def started(metrics: CoordinatorMetrics, fleet: ScriptedFleet) -> Driver:
    """A driver whose session waits for its first verdict from a placed target."""
    plan = SessionPlan(PROMPT, max_len=12, vocab_size=VOCAB_SIZE, num_draft_tokens=0)
    telemetry = Telemetry.create("coordinator", TelemetrySettings(), "c-0")
    log = SessionLogger(logging.getLogger("coordinator"), "s")
    policy = SessionPolicy(SharedPolicy())
    recorder = RoundRecorder(telemetry, metrics, policy, log, None, SampleFacts("s", 0, True))
    law = Law(
        seed=1, vocab_size=VOCAB_SIZE, is_greedy=False, is_coupled=False,
        stop_ids=frozenset(), num_logprobs=None,
    )  # fmt: skip
    wire = SessionWire(session_pb2.OpenSession(), session_pb2.DECIDE_AT_TARGET, law)
    executor = ThreadPoolExecutor(1)
    driver = Driver(
        "s", make_session(plan), wire, cast(Fleet, fleet), LinkSettings(), recorder, Output(),
        executor,
    )  # fmt: skip
    driver.start()
    driver.handle(TargetPlaced(0, "t-0"))
    executor.shutdown()
    return driver


def value(metrics: CoordinatorMetrics, name: str, **labels: str) -> float:
    """One sample of the registry."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def answer(driver: Driver, epoch: int, round_index: int, **body: Any) -> None:
    """Hand the driver a result of the target."""
    result = target_pb2.TargetResult(session_id="s", epoch=epoch, round=round_index, **body)
    driver.receive(cast(Any, SimpleNamespace(side=Side.TARGET)), result)


async def test_a_reply_of_an_older_epoch_is_counted_and_dropped() -> None:
    """The session moved to another replica; what the first one still says changes nothing."""
    metrics, fleet = CoordinatorMetrics(), ScriptedFleet()
    driver = started(metrics, fleet)
    old = fleet.sent[-1]
    driver.handle(Lost(Side.TARGET, "t-0"))
    driver.handle(TargetPlaced(old.epoch + 1, "t-1"))
    late = target_pb2.Verdict(tokens=[5], closing=target_pb2.CLOSING_BONUS)
    answer(driver, old.epoch, old.round, verdict=late)
    assert value(metrics, "specmesh_stale_replies_total", side="target") == 1
    assert value(metrics, "specmesh_failovers_total", side="target") == 1
    assert value(metrics, "specmesh_output_tokens_total") == 0
    current = fleet.sent[-1]
    assert current.epoch == old.epoch + 1
    answer(driver, current.epoch, current.round, verdict=late)
    await asyncio.sleep(0)  # a round is written down after the next one's commands are out
    assert value(metrics, "specmesh_stale_replies_total", side="target") == 1
    assert value(metrics, "specmesh_output_tokens_total") == 1
    assert value(metrics, "specmesh_round_retries_total") == 1
    driver.cancel(Cancelled("the test is over"))


async def test_a_repaired_prefix_is_counted() -> None:
    """A target that stands elsewhere gets the rest of the prefix again, which is one resync."""
    metrics, fleet = CoordinatorMetrics(), ScriptedFleet()
    driver = started(metrics, fleet)
    first = fleet.sent[-1]
    mismatch = session_pb2.CommandError(
        reason="PREFIX_MISMATCH", message="other tokens", confirmed_len=1
    )
    mismatch.page_digests.add(prefix_len=1, digest=extend_digest(EMPTY_DIGEST, PROMPT[:1]))
    answer(driver, first.epoch, first.round, error=mismatch)
    again = fleet.sent[-1]
    assert again.verify.prefix.resync
    assert list(again.verify.prefix.append) == [2, 3]
    assert value(metrics, "specmesh_resyncs_total", side="target") == 1
    driver.cancel(Cancelled("the test is over"))


async def test_a_service_that_floods_a_paused_session_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its reader is behind a session keeps a bounded number of events, then it fails."""
    monkeypatch.setattr(Output, "is_full", True)
    failed: list[Fail] = []
    monkeypatch.setattr(Output, "fail", lambda self, end: failed.append(end))
    driver = started(CoordinatorMetrics(), fleet := ScriptedFleet())
    assert not fleet.sent  # paused: nothing was stepped
    for _ in range(2 * MAX_WAITING_EVENTS):
        driver.handle(TargetReply(0, 0, Deferred()))
        assert len(driver._inbox) <= MAX_WAITING_EVENTS
    assert driver.is_done
    assert [end.failure.reason for end in failed] == ["INTERNAL"]


async def test_a_bug_in_what_writes_rounds_down_costs_the_record_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link that brought the last verdict hears of no error, the session ends in good order: its
    reader gets the end, its fleet is told."""
    ended: list[object] = []
    monkeypatch.setattr(Output, "finish", lambda self, end: ended.append(end))
    monkeypatch.setattr(ScriptedFleet, "unsubscribe", lambda self, session_id: ended.append("left"))
    monkeypatch.setattr(CoordinatorMetrics, "observe_round", lambda self, record: 1 // 0)
    driver = started(CoordinatorMetrics(), fleet := ScriptedFleet())
    while not driver.is_done:
        command = fleet.sent[-1]
        tokens = [1] * max(1, command.verify.num_steps)
        verdict = target_pb2.Verdict(tokens=tokens, closing=target_pb2.CLOSING_BONUS)
        answer(driver, command.epoch, command.round, verdict=verdict)
    assert ended == ["left"]
    await asyncio.sleep(0)  # the end is shown like any other chunk
    assert isinstance(ended[-1], Finish)
