"""When an engine sends the parts of an answer, and what chains a device takes for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from protos.specmesh.v1 import target_pb2
from specmesh.config import TelemetrySettings
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.commands import Observers
from specmesh.engine.executor import Device, StepExecutor, StepOutcome
from specmesh.engine.role import Part
from specmesh.engine.runner import Engine, EngineOptions, system_clocks
from specmesh.engine.scheduler import Step
from specmesh.engine.sessions import Limits
from specmesh.errors import NumericFault
from specmesh.service_metrics import ServiceMetrics
from specmesh.telemetry import Telemetry
from target_service.candidates import RedrawCheck
from target_service.device_verifier import DeviceVerifier, decided_step
from target_service.verifier import Verifier, VerifierOptions
from tests.rpc.fake_model import PrefixCache, PrefixDecoder
from tests.rpc.peers import VOCAB_HASH, Script, sampling

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5]
TIMEOUT_S = 60.0


class Record:
    """A link, and the order of what happened: passes that begin, results that leave."""

    group = "test"

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def post(self, results: Sequence[Any]) -> None:
        self.events.append([_told(result) for result in results])
        for result in results:
            self.arrived.put(result)

    def post_end(self) -> None:
        self.events.append("end")
        self.arrived.put(None)

    def until(self, is_last: Callable[[Any], bool]) -> list[Any]:
        """Results up to the first that is_last."""
        found = [self.arrived.get(timeout=TIMEOUT_S)]
        while not is_last(found[-1]):
            found.append(self.arrived.get(timeout=TIMEOUT_S))
        return found


def _told(result: Any) -> str:
    if result.HasField("error"):
        return f"{result.session_id} failed"
    if not result.HasField("verdict"):
        return f"{result.session_id} {result.WhichOneof('result')}"
    return f"{result.session_id}{'+' if result.verdict.more else '.'}"


class OverlappingExecutor(StepExecutor):
    """Calls `meanwhile` when the pass has begun, as a device does. gate(number): before pass
    `number` from 1 of those after the warm-up begins."""

    log: list[Any]
    gate: Callable[[int], None] = staticmethod(lambda number: None)
    count = 0

    def run(
        self,
        step: Step,
        meanwhile: Callable[[], object] = lambda: None,
        may_run_ahead: Callable[[], bool] = lambda: False,
    ) -> StepOutcome:
        self.count += 1
        self.gate(self.count)
        self.log.append("pass")
        meanwhile()
        return super().run(step)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def engine(record: Record) -> Iterator[Engine]:
    pool = BlockPool(64, 4)
    role = Verifier(VerifierOptions(VOCAB, 8, 64), RedrawCheck(1.0))
    clock_ns, offset_ns = system_clocks()
    telemetry = Telemetry("target", TelemetrySettings(), "test")

    def make(device: Device, clock: Callable[[], int]) -> StepExecutor:
        executor = OverlappingExecutor(device, clock)
        executor.log = record.events
        return executor

    device: Any = Device(PrefixDecoder(VOCAB), PrefixCache(64, 4), pool)  # type: ignore[arg-type]  # fakes
    made = Engine(
        device,
        role,
        Limits(VOCAB, VOCAB_HASH, 4096, 16, 64, 4),
        EngineOptions(warm_up_lens=()),
        Observers(telemetry, ServiceMetrics("target"), clock_ns, offset_ns),
        make,
    )
    made.start()
    yield made
    made.stop()


def is_end(result: Any) -> bool:
    return result is None or (
        result.WhichOneof("result") in ("verdict", "error") and not result.verdict.more
    )


def started(engine: Engine, record: Record, name: str, **options: Any) -> Script:
    script = Script("target", name, list(PROMPT), **options)
    assert engine.submit(record, [script.open()])
    record.until(lambda result: result.HasField("opened"))
    return script


def test_parts_leave_before_the_next_pass_begins(engine: Engine, record: Record) -> None:
    """What a pass gave waits for nothing, parts and the last answer alike."""
    script = started(engine, record, "s")
    record.events.clear()
    engine.submit(record, [script.verify(steps=3)])
    record.until(is_end)
    assert record.events == ["pass", ["s+"], "pass", ["s+"], "pass", ["s."]]


def test_an_end_by_a_stop_leaves_with_those_that_go_on(engine: Engine, record: Record) -> None:
    """Whether steps are left, are taken, or a stop ended them: all leave at one time."""
    first = started(engine, record, "a")
    engine.submit(record, [first.verify(steps=2)])
    parts = record.until(is_end)
    stop = parts[-1].verdict.tokens[0]
    assert stop != parts[0].verdict.tokens[0]
    scripts = [
        started(engine, record, "b"),
        started(engine, record, "c", params=sampling(stop_token_ids=[stop])),
        started(engine, record, "d", params=sampling(stop_token_ids=[stop])),
    ]
    record.events.clear()
    engine.submit(
        record,
        [script.verify(steps=steps) for script, steps in zip(scripts, (3, 3, 2), strict=True)],
    )
    for _ in range(3):
        record.until(is_end)
    # The second token is the stop.
    assert record.events == [
        "pass", ["b+", "c+", "d+"], "pass", ["b+", "c.", "d."], "pass", ["b."],
    ]  # fmt: skip


def test_a_stop_with_nobody_left_to_run_is_told_at_once(engine: Engine, record: Record) -> None:
    """No pass follows, and none is waited for."""
    script = started(engine, record, "a")
    engine.submit(record, [script.verify()])
    (answer,) = record.until(is_end)
    (token,) = answer.verdict.tokens
    stopping = started(engine, record, "b", params=sampling(stop_token_ids=[token]))
    record.events.clear()
    engine.submit(record, [stopping.verify(steps=9)])
    record.until(is_end)
    assert record.events == ["pass", ["b."]]


def test_a_pass_that_fails_keeps_no_part_back(engine: Engine, record: Record) -> None:
    """What the pass before it gave is told first, though the failing one never began."""
    script = started(engine, record, "s")
    executor: Any = engine._executor

    def fail(number: int) -> None:
        if number == 3:
            raise RuntimeError("scripted")

    executor.gate = fail
    record.events.clear()
    engine.submit(record, [script.verify(steps=9)])
    record.until(is_end)
    assert record.events == ["pass", ["s+"], "pass", ["s+"], ["s failed"]]


@pytest.mark.parametrize("ending", ["close", "link", "half"])
def test_ends_that_come_between_two_passes(engine: Engine, record: Record, ending: str) -> None:
    """A session is closed, its link ends, or its peer sends no more, in the middle of a command."""
    executor: Any = engine._executor
    gate, reached = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        if number == 2:
            reached.set()
            assert gate.wait(TIMEOUT_S)

    other = Record()
    script = started(engine, record, "s")
    long = started(engine, other, "long", max_len=64)
    executor.gate = wait
    engine.submit(other, [long.verify(steps=30)])
    engine.submit(record, [script.verify(steps=4)])
    assert reached.wait(TIMEOUT_S)
    if ending == "close":
        engine.submit(record, [script.close()])
    elif ending == "link":
        engine.end_link(record)
    else:
        engine.finish_link(record)
    gate.set()
    other.until(is_end)
    told = [event for event in record.events if event != "pass"]
    if ending == "close":
        assert told[-1] == ["s closed"]
    if ending == "half":
        assert told[-2:] == [["s."], "end"]
    names = {session.session_id for session in engine._table}
    assert names <= {"long", "s"}
    assert ("s" in names) is (ending == "half") or ending == "link"


# ---------------------------------------------------------------- chains of a device


def verifier() -> DeviceVerifier:
    return DeviceVerifier(VOCAB, 4, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("wanted", "num_holders", "length"),
    [
        ([64] * 64, 64, 8),
        ([64] * 57, 64, 8),  # a few are between commands: they wait for one chain
        ([64] * 33, 64, 8),
        ([64] * 31, 64, 1),  # most are: they would come one by one
        ([64], 1, 8),
        ([64], 2, 8),
        ([64], 3, 1),
        ([64] * 48 + [1] * 16, 64, 8),  # most of the step can use it to its end
        ([64] * 47 + [1] * 17, 64, 1),
        ([7] * 4, 4, 4),
        ([3] * 4, 4, 1),
        ([1, 1, 1, 64], 4, 1),
        ([64] * 63 + [0], 64, 1),  # a round with candidates is awaited
    ],
)
def test_chains_serve_most_sessions(wanted: list[int], num_holders: int, length: int) -> None:
    """8, 4 or 1 passes: as many as most of the step's sessions want, if they are most of all."""
    assert verifier().chain_len(wanted, num_holders) == length


def outputs(tokens: Sequence[int], statuses: Sequence[int]) -> dict[str, Any]:
    """What a chain leaves in the host's buffers, for slot 1 of two."""
    passes = len(tokens)
    drawn = np.zeros((passes, 2, 1), np.int32)
    drawn[:, 1, 0] = tokens
    counts = np.zeros((passes, 2, 3), np.int32)
    counts[:, :, 1] = 1
    counts[:, 1, 2] = statuses
    return {
        "tokens": drawn,
        "counts": counts,
        "judged": np.zeros((2, 0, 3), np.float32),
        "mismatch": np.full((2,), -1, np.int32),
        "max_probs": np.arange(2 * passes, dtype=np.float32).reshape(passes, 2, 1) / 64,
        "is_argmax": (drawn % 2).astype(np.int32),
        "faults": np.zeros((passes, 2, 1), np.int32),
    }


class Chained:
    """A task at work on `steps` steps, its prompt fed, as a device's executor leaves it."""

    def __init__(self, steps: int, stop_ids: Sequence[int] = ()) -> None:
        from specmesh.engine.scheduler import Task
        from specmesh.engine.sessions import Checkpoint, Request, SessionTable

        script = Script("target", "s", list(PROMPT), params=sampling(stop_token_ids=stop_ids))
        link = Record()
        table = SessionTable(Limits(VOCAB, VOCAB_HASH, 64, 4, 64, 4), lambda: 0)
        opening = script.open()
        session = table.add(link, opening, table.check_open(link, opening))
        session.ledger.extend(PROMPT)
        session.ledger.allocated_len = 64
        session.ledger.wrote(len(PROMPT))
        role = Verifier(VerifierOptions(VOCAB, 8, 64), RedrawCheck(1.0), lambda *_: True)
        command = script.verify(steps=steps)
        state = role.check(session, command.verify)
        checkpoint = Checkpoint.take(session.ledger, len(PROMPT))
        request = Request(link, command, 0)
        boundaries = session.ledger.boundaries
        self.task = Task(session, request, checkpoint, boundaries, len(PROMPT), state)

    def commit(self, tokens: Sequence[int], statuses: Sequence[int] = ()) -> Any:
        """Commit a chain that drew these; then the buffers belong to the next one."""
        host = outputs(tokens, statuses or [0] * len(tokens))
        outcome = verifier().commit(self.task, 1, len(tokens), decided_step(host))
        for array in host.values():
            array.fill(7)
        return outcome

    @property
    def told(self) -> list[int]:
        """Output tokens so far."""
        return self.task.session.ledger.tokens[len(PROMPT) :]


def test_a_chain_is_a_part_until_the_steps_are_taken() -> None:
    """Tokens are confirmed at once; a message holds copies, for its buffers are filled anew."""
    chained = Chained(steps=9)
    part = chained.commit([2, 3, 5, 7])
    assert isinstance(part, Part)
    assert chained.told == [2, 3, 5, 7]
    assert chained.task.num_remaining == 1
    last = chained.commit([1, 1, 1, 1, 4])
    assert isinstance(last, target_pb2.Verdict)
    verdict = part.body
    assert list(verdict.tokens) == [2, 3, 5, 7]
    assert (verdict.offset, verdict.more, last.offset, last.more) == (0, True, 4, False)
    assert [each.is_argmax for each in verdict.emitted] == [False, True, True, True]
    assert [each.max_prob for each in verdict.emitted] == [1 / 64, 3 / 64, 5 / 64, 7 / 64]


def test_a_stop_in_a_chain_ends_the_command_there() -> None:
    """What a chain drew past a stop id is nobody's, faults there included."""
    chained = Chained(steps=9, stop_ids=[5, 7])
    last = chained.commit([2, 5, 7, 1], [0, 0, 1, 1])
    assert isinstance(last, target_pb2.Verdict)
    assert not last.more
    assert chained.told == list(last.tokens) == [2, 5]


def test_a_command_ends_where_its_steps_or_a_stop_end_it() -> None:
    """Whichever comes first; a stop that is its last step as well ends it no other way."""
    for steps, tokens, ends in (
        (4, [2, 3, 4, 1], True),
        (4, [2, 3, 4, 5], True),
        (5, [2, 5, 1, 1], True),
        (5, [2, 3, 4, 1], False),
    ):
        outcome = Chained(steps=steps, stop_ids=[5]).commit(tokens)
        assert isinstance(outcome, target_pb2.Verdict if ends else Part), (steps, tokens)


def test_a_long_command_has_pages_for_its_next_chain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for more when a chain would not fit into those it has, and never past its end."""
    monkeypatch.setattr("target_service.verifier.STEPS_AHEAD", 16)
    chained, start = Chained(steps=30), len(PROMPT)
    task = chained.task
    Verifier(VerifierOptions(VOCAB, 8, 64), RedrawCheck(1.0)).begin(task)
    task.is_reserved = True
    assert task.reserve_len == start + 15
    chained.commit([1] * 8)
    assert (task.reserve_len, task.is_reserved) == (start + 15, True)  # eight more fit
    chained.commit([1] * 4)
    assert (task.reserve_len, task.is_reserved) == (start + 12 + 15, False)
    task.is_reserved = True
    chained.commit([1] * 8)
    assert (task.reserve_len, task.is_reserved) == (start + 27, True)
    chained.commit([1] * 4)
    assert (task.reserve_len, task.is_reserved) == (start + 29, False)  # all that is left


def test_a_fault_before_the_stop_fails_the_chain() -> None:
    """A row without a law in any pass that counts."""
    chained = Chained(steps=9, stop_ids=[7])
    with pytest.raises(NumericFault):
        chained.commit([2, 3, 7, 1], [0, 1, 0, 0])
    assert chained.told == []
