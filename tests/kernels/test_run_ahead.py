"""Chains launched before the last one was read give what one step after another gives.

The device engine against the reference engine over the same tiny model: sessions that go on, that a
stop token ends between two chains, that come, that are closed while a chain runs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh.engine import run_ahead, step_programs
from specmesh.engine.device_executor import ProgramExecutor
from specmesh.engine.program_set import ProgramSet
from specmesh.engine.run_ahead import Chain, RunAhead
from specmesh.engine.runner import Engine
from specmesh.engine.scheduler import Segment
from specmesh.engine.step_programs import Running, StepProgram, StepShape
from target_service import device_verifier
from tests.kernels.test_device_engine import (
    ANSWER_S,
    RESIDUAL,
    AnswerQueue,
    Caller,
    make_engine,
    params,
)
from tests.unit.tiny_models import random_tokens, save, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

CHAIN = 2  # passes: interpreted ones take their time
NUM_STEPS = 9  # the prompt's, then four chains of two
PAGES = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_model("llama", seed=1), tmp_path)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Short chains of few sessions run ahead; what is launched, in order."""
    log: list[str] = []

    def logged(name: str) -> None:
        launch = getattr(StepProgram, name)

        def run(self: StepProgram, **options: Any) -> Any:
            log.append(f"{name} {self.shape.num_passes}")
            return launch(self, **options)

        monkeypatch.setattr(StepProgram, name, run)

    logged("launch")
    logged("launch_again")
    monkeypatch.setattr(run_ahead, "MIN_SEQS_TO_REPEAT", 1)
    monkeypatch.setattr(step_programs, "MIN_SEQS_TO_REPEAT", 1)
    monkeypatch.setattr(step_programs, "MIN_CHAIN_TO_REPEAT", CHAIN)
    monkeypatch.setattr(device_verifier, "PASS_COUNTS", (1, CHAIN))
    return log


class Answers:
    """Sessions of one engine: all are asked at once, and answered to their ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.link = engine, AnswerQueue()
        self.tokens: dict[str, list[int]] = {}
        self._num_open = 0

    def opened(self, index: int, prompt: list[int], **sampling: Any) -> Caller:
        caller = Caller("target", self.engine, self.link, index, prompt)
        caller.open(params(temperature=1.0, **sampling), RESIDUAL, max_len=64)
        return caller

    def ask(self, callers: Sequence[Caller], num_steps: int = NUM_STEPS) -> None:
        commands = [caller.command(num_steps=num_steps, decide_at=1) for caller in callers]
        self._num_open += len(callers)
        assert self.engine.submit(self.link, commands)

    def close(self, caller: Caller) -> None:
        closing = target_pb2.TargetCommand(
            session_id=str(caller.session_id), epoch=1, close=session_pb2.CloseSession()
        )
        self._num_open -= 1
        assert self.engine.submit(self.link, [closing])

    def wait(self) -> dict[str, list[int]]:
        """Tokens by session, once every command that was not closed is answered."""
        while self._num_open:
            result = self.link.results.get(timeout=ANSWER_S)
            assert result.WhichOneof("result") in ("verdict", "closed"), result
            if result.HasField("verdict"):
                self.tokens.setdefault(result.session_id, []).extend(result.verdict.tokens)
                if len(result.verdict.tokens) == CHAIN:  # also where sessions left the chain
                    assert result.timing.batch_size == result.timing.batch_rows
                self._num_open -= not result.verdict.more
        return self.tokens


def both(folder: Path, device: str, run: Callable[[Answers], Any]) -> list[Any]:
    """What `run` gives on the reference engine and on the one that decides on the device."""
    return [answered(folder, device, run, on_device=on_device) for on_device in (False, True)]


def answered(folder: Path, device: str, run: Callable[[Answers], Any], *, on_device: bool) -> Any:
    engine = make_engine("target", folder, device, on_device=on_device, pages=PAGES)
    engine.start()
    try:
        return run(Answers(engine))
    finally:
        engine.stop()


def prompts(count: int) -> list[list[int]]:
    return [random_tokens(9 + i, seed=40 + i) for i in range(count)]


def test_chains_that_run_ahead_draw_what_single_steps_draw(
    folder: Path, device: str, launches: list[str]
) -> None:
    """Two sessions of nine tokens: after the prompts, one chain is sent and three follow it."""

    def run(answers: Answers) -> dict[str, list[int]]:
        answers.ask([answers.opened(i, prompt) for i, prompt in enumerate(prompts(2))])
        return answers.wait()

    reference, found = both(folder, device, run)
    assert found == reference
    assert [len(tokens) for tokens in found.values()] == [NUM_STEPS] * 2
    assert launches[-4:] == [f"launch {CHAIN}"] + [f"launch_again {CHAIN}"] * 3


def test_a_stop_ends_one_session_and_the_others_go_on(
    folder: Path, device: str, launches: list[str]
) -> None:
    """A chain that ran ahead for a session that had stopped gives it nothing; its next command and
    the other session's tokens are those of an engine without chains."""

    def plain(answers: Answers) -> dict[str, list[int]]:
        answers.ask([answers.opened(i, prompt) for i, prompt in enumerate(prompts(2))])
        return answers.wait()

    undisturbed = answered(folder, device, plain, on_device=False)["0"]
    # A token of the second chain whose first place that is.
    place = next(i for i in (3, 4) if undisturbed[i] not in undisturbed[:i])
    stop = undisturbed[place]

    def stopping(answers: Answers) -> tuple[dict[str, list[int]], list[int]]:
        first, second = prompts(2)
        stopped = answers.opened(0, first, stop_token_ids=[stop])
        answers.ask([stopped, answers.opened(1, second)])
        tokens = {key: list(found) for key, found in answers.wait().items()}
        stopped.tokens += tokens["0"]
        stopped.known = len(stopped.tokens)
        answers.tokens.clear()
        answers.ask([stopped], num_steps=4)  # an engine does not mind tokens after a stop
        return tokens, answers.wait()["0"]

    launches.clear()
    reference, found = both(folder, device, stopping)
    assert found == reference
    assert found[0]["0"] == undisturbed[: place + 1]
    assert len(found[0]["1"]) == NUM_STEPS
    assert f"launch_again {CHAIN}" in launches


@pytest.mark.parametrize("closes", [False, True])
def test_who_comes_while_a_chain_runs_ahead_is_served_next(
    folder: Path, device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """A command that arrives then, and one that arrives with another session's closing, whose pages
    it may get while the chain still writes to them."""
    arriving: list[Callable[[], None]] = []
    launch_again = StepProgram.launch_again

    def disturbed(self: StepProgram) -> Running:
        running = launch_again(self)
        if arriving:
            arriving.pop()()
        return running

    monkeypatch.setattr(StepProgram, "launch_again", disturbed)

    def run(answers: Answers) -> dict[str, list[int]]:
        callers = [answers.opened(i, prompt) for i, prompt in enumerate(prompts(3))]

        def arrive() -> None:
            if closes:
                answers.close(callers[0])
            answers.ask(callers[2:])

        is_reference = answers.engine._executor.__class__.__name__ == "StepExecutor"
        if is_reference:
            answers.ask(callers)
        else:
            arriving.append(arrive)
            answers.ask(callers[:2])
        found = answers.wait()
        assert not arriving
        return found

    reference, found = both(folder, device, run)
    if closes:
        found.pop("0", None)
        reference.pop("0")
    assert found == reference
    assert f"launch_again {CHAIN}" in launches


def chain_of(end: int, pages: int, num_seqs: int, num_passes: int = 8, most: int = 1024) -> Chain:
    """A chain of equal sessions, by its numbers alone."""
    program: Any = SimpleNamespace(
        shape=StepShape(max(16, num_seqs), 1, 0, num_passes, 1, max_context_len=most)
    )
    task: Any = SimpleNamespace(session=SimpleNamespace(block_table=[0] * pages))
    segments = [Segment(task, end - 1, end, 1)] * num_seqs
    return Chain.of(program, segments, page_size=16)


@pytest.mark.parametrize(
    ("end", "pages", "num_seqs", "num_wanted", "num_taken", "follows"),
    [
        (49, 4, 16, 16, 8, True),  # the last of both chains is written at position 63
        (50, 4, 16, 16, 8, False),  # no page for position 64
        (49, 4, 15, 16, 8, False),  # too few sessions
        (49, 4, 16, 15, 8, False),  # a session ends within the second chain
        (49, 4, 16, 16, 7, False),  # or took fewer steps in the first
        (1009, 64, 16, 16, 8, True),
        (1010, 99, 16, 16, 8, False),  # past what the program reads
    ],
)
def test_a_chain_is_followed_while_steps_and_pages_last(
    end: int, pages: int, num_seqs: int, num_wanted: int, num_taken: int, follows: bool
) -> None:
    """Both chains' K/V fits the pages that the device knows, and nobody ends within them."""
    chain = chain_of(end, pages, num_seqs)
    got = chain.can_be_followed([num_taken] * num_seqs, lambda task: num_wanted)
    assert got is follows


def test_shorter_chains_and_rounds_are_not_followed() -> None:
    """Only plain decoding in long chains can be fed by the device alone."""
    assert not StepShape(16, 1, 0, 4).can_repeat
    assert not StepShape(16, 2, 0, 8).can_repeat
    assert not StepShape(16, 1, 64, 8).can_repeat
    assert not StepShape(16, 1, 0, 8, rows_per_seq=2).can_repeat
    assert not StepShape(8, 1, 0, 8).can_repeat
    assert StepShape(16, 1, 0, 8).can_repeat


def test_a_chain_counts_only_for_those_it_was_launched_for() -> None:
    """By task and place: one that was rebuilt, or is another command, is not in it."""
    program: Any = SimpleNamespace(shape=StepShape(2, 1, 0, 8))
    tasks: list[Any] = [
        SimpleNamespace(session=SimpleNamespace(block_table=[0] * 9)) for _ in range(3)
    ]
    chain = Chain.of(program, [Segment(task, 19, 20, 1) for task in tasks[:2]], 16).following()
    ahead = RunAhead(chain, Running({}, None))
    there = Segment(tasks[1], 27, 28, 1)
    strangers = [Segment(tasks[2], 27, 28, 1), Segment(tasks[0], 0, 28, 1)]
    assert ahead.own([*strangers, there]) == [(1, there)]
    assert ahead.own([Segment(tasks[0], 19, 20, 1)]) == []


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_chunk_joins_only_what_is_captured_with_it(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    """A prompt that comes beside a session's steps: one launch where such a step is captured, else
    two that are; the tokens are the same."""
    monkeypatch.setattr(ProgramSet, "is_ready", lambda self, need: is_ready)
    kinds: list[tuple[int, bool]] = []
    launch = ProgramExecutor._launch

    def logged(self: ProgramExecutor, wanted: Any, *rest: Any, **options: Any) -> Any:
        kinds.append((len(wanted.short), wanted.long is not None))
        return launch(self, wanted, *rest, **options)

    monkeypatch.setattr(ProgramExecutor, "_launch", logged)

    def run(answers: Answers) -> dict[str, list[int]]:
        long = random_tokens(30, seed=77)  # two chunks: one beside the other session's step
        answers.ask([answers.opened(0, prompts(1)[0]), answers.opened(1, long)], num_steps=3)
        return answers.wait()

    reference, found = both(folder, device, run)
    assert found == reference
    assert ((1, True) in kinds) == is_ready
    assert ((1, False) in kinds) or is_ready
