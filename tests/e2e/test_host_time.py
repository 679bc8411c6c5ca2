"""`python -m specmesh.bench.host_time`: a real coordinator and services that compute nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.bench.host_time import (
    START_TIMEOUT_S,
    commands,
    counts,
    host_time,
    main,
    measure,
    parsed,
    send,
)
from specmesh.bench.load import Timed
from specmesh.launcher import Stack
from tests.e2e.tiny_pair import write_pair

HELD = ["--draft-ms", "30", "--target-ms", "60"]
PROMPT = list(range(40))
NAMES = [f"processor time, {name}" for name in ("coordinator", "draft", "target")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, of which nothing but the tokenizer is read."""
    target, _ = write_pair(tmp_path_factory.mktemp("pair"))
    (target / "model.safetensors").unlink()
    return target


@pytest.fixture(scope="module")
def stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The three processes, ready."""
    with Stack(commands(parsed(HELD), folder, tmp_path_factory.mktemp("logs"))) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running


def test_rounds_keep_no_candidate_then_one_then_two(stack: Stack) -> None:
    """In every of four streams eight rounds of k = 3 keep 0, 1, 2, 3, 0, .. : the draft is never
    refuted, and what positions accept follows exactly."""
    asked = parsed(["--streams", "4", "-k", "3", "--max-tokens", "21"])
    timed = send(stack, PROMPT, asked)
    assert len(timed) == 4
    for each in timed:
        stats = each.finished.speculation
        assert dict(stats.fallback_rounds) == {}
        assert (stats.num_rounds, stats.num_draft_tokens, stats.num_accepted) == (8, 24, 12)
        assert list(stats.judged_per_position) == [8, 6, 4]
        assert list(stats.accepted_per_position) == [6, 4, 2]
        assert each.num_tokens == 21


@pytest.mark.parametrize("streams", [4, 20])
def test_plain_decoding_of_several_streams(stack: Stack, streams: int) -> None:
    """All tokens come in chains, of so many streams that chains run ahead too; none is drafted."""
    asked = parsed(["--streams", str(streams), "-k", "0", "--max-tokens", "26"])
    timed = send(stack, PROMPT, asked)
    assert [each.num_tokens for each in timed] == [26] * streams
    for each in timed:
        stats = each.finished.speculation
        assert stats.num_draft_tokens == 0
        assert dict(stats.fallback_rounds) == {"request": stats.num_rounds}


def test_what_devices_hold_is_taken_off() -> None:
    """Both devices' times of a round; the target's alone of a pass, of which each token is one."""
    stats = pb.SpeculationStats(num_rounds=4)
    timed = [
        Timed("t", 0.5, total_s, 12, 2, pb.Finished(speculation=stats)) for total_s in (1.5, 2.5)
    ]
    rounds = host_time(timed, parsed([*HELD, "-k", "3"]))
    assert (rounds.name, rounds.unit) == ("host time of a round", "ms")
    assert rounds.values == pytest.approx((250.0 - 90.0, 500.0 - 90.0))
    passes = host_time(timed, parsed([*HELD, "-k", "0"]))
    assert (passes.name, passes.unit) == ("host time of a pass", "ms")
    assert passes.values == pytest.approx((100.0 - 60.0, 200.0 - 60.0))


@pytest.mark.parametrize(("k", "held_ms"), [("3", 90.0), ("0", 60.0)])
def test_devices_hold_what_is_taken_off(stack: Stack, k: str, held_ms: float) -> None:
    """No answer comes before the devices are done with its rounds, or with all passes of chains."""
    asked = parsed([*HELD, "-k", k, "--max-tokens", "11"])
    (timed,) = send(stack, PROMPT, asked)
    assert counts([timed], asked) == [4 if k == "3" else 10]
    assert timed.total_s * 1e3 >= counts([timed], asked)[0] * held_ms


def test_passes_of_plain_decoding_are_measured(stack: Stack) -> None:
    """Their time comes with the processor time of all three processes."""
    asked = parsed([*HELD, "-k", "0", "--max-tokens", "3", "--repeats", "2"])
    host, *processors = measure(stack, PROMPT, asked)
    assert host.name == "host time of a pass"
    assert len(host.values) == 2
    assert [each.name for each in processors] == NAMES


def test_all_four_numbers_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a number, each with command and versions; loops may poll."""
    flags = ["--tokenizer", str(folder), "--repeats", "2", "--streams", "2", "-k", "2"]
    flags += ["--max-tokens", "8", "--busy-poll-ms", "1"]
    assert main(flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == ["host time of a round", *NAMES]
    assert [line["n"] for line in lines] == [4, 1, 1, 1]
    for line in lines:
        assert line["unit"] == "ms"
        assert line["command"].endswith("--max-tokens 8 --busy-poll-ms 1")
        assert line["versions"]["grpcio"]
