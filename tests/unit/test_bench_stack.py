"""What `specmesh bench-stack` makes of what its clients saw, and which load it makes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.bench import steady_load, windows
from specmesh.bench.baselines import TransformersModels
from specmesh.bench.round_split import PARTS, TraceFolder, split, values
from specmesh.bench.stack import Deployment, Limits, Running, StackBench, commands
from specmesh.bench.stack_cases import (
    CHAT_PROMPTS,
    Case,
    chat_ids,
    long_ids,
    read_prompts,
    selected,
    standard_cases,
)
from specmesh.bench.steady_load import (
    Load,
    LoadProcesses,
    Observed,
    Share,
    Stream,
    StreamsNotLive,
    run_share,
    trace_parent,
)
from specmesh.bench.windows import Measured
from specmesh.cli import up
from specmesh.config import CoordinatorSettings, DraftSettings, load_settings
from specmesh.errors import ConfigError, NotReady
from specmesh.launcher import Stack
from specmesh.request import GenerateOptions
from specmesh.spans import ROUND, VERIFY, Key
from specmesh.tokenizer import load_tokenizer
from specmesh.traces.reader import StoredSpan
from tests.e2e.tiny_pair import write_pair
from tests.unit.scripted_coordinator import Script, serving


def stream(messages: list[tuple[float, int]], *, slot: int = 0, sent_s: float = 0.0) -> Stream:
    """A stream that is still going."""
    return Stream(slot, None, sent_s, messages)


def observed(*streams: Stream, begins_s: float = 10.0, ends_s: float = 20.0) -> Observed:
    """Streams seen by a window of ten seconds."""
    return Observed(len(streams), begins_s, ends_s, list(streams))


# ---------------------------------------------------------------- windows


def test_ms_per_token_is_summed_time_over_summed_tokens() -> None:
    """12 s for 3 tokens and 4 s for 1 give 4 s a token; a mean of ratios would give another."""
    seen = observed(
        stream([(10.0, 7), (16.0, 3), (18.0, 1)]), stream([(11.0, 9), (17.0, 1), (19.0, 1)])
    )
    measured = windows.ms_per_token(seen)
    assert measured is not None
    assert measured.value == pytest.approx(1000 * (6 + 2 + 6 + 2) / (3 + 1 + 1 + 1))
    assert measured.unit == "ms"


def test_only_what_lies_in_the_window_counts() -> None:
    """A wait that began before it, and a message after it, belong to no number."""
    seen = observed(stream([(9.0, 1), (10.5, 5), (11.0, 2), (19.5, 1), (20.5, 8)], sent_s=8.0))
    measured = windows.ms_per_token(seen)
    assert measured is not None
    assert measured.value == pytest.approx(1000 * (0.5 + 8.5) / 3)
    assert windows.tokens_per_s(seen).value == pytest.approx((5 + 2 + 1) / 10)
    assert windows.first_token_ms(seen) == []  # it was sent before


def test_first_tokens_are_apart() -> None:
    """The wait for the first message is the time to the first token and no gap."""
    seen = observed(stream([(12.0, 1), (12.5, 2)], sent_s=11.0))
    assert windows.first_token_ms(seen) == [1000.0]
    assert windows.message_gaps_ms(seen) == [500.0]
    assert windows.token_gaps_ms(seen) == [250.0, 250.0]


def test_quantiles_of_rates_are_over_slices() -> None:
    """Nine steady seconds and one without a token: p20 is the steady rate's, p80 too, not the
    mean's."""
    steady = [(10.05 + 0.1 * i, 1) for i in range(90)]
    rate = windows.tokens_per_s(observed(stream(steady)))
    assert (rate.value, rate.p20, rate.p80) == pytest.approx((9.0, 10.0, 10.0))


def test_nothing_seen_is_nothing() -> None:
    """No number is made up for a window without messages."""
    assert windows.ms_per_token(observed(stream([(11.0, 1)]))) is None
    assert windows.of_values([], "ms") is None


def test_acceptance_is_of_requests_that_finished_in_the_window() -> None:
    """Counts add up per position; E[N] is the product of conditional rates."""

    def finished(at: float, judged: list[int], accepted: list[int]) -> Stream:
        made = stream([])
        stats = pb.SpeculationStats(
            num_rounds=judged[0] + 1,
            num_draft_tokens=2 * judged[0],
            num_accepted=sum(accepted),
            judged_per_position=judged,
            accepted_per_position=accepted,
            fallback_rounds={"budget": 1},
        )
        made.finished_s, made.stats = at, stats.SerializeToString()
        return made

    counted = windows.speculation(
        observed(
            finished(9.0, [99], [99]), finished(11.0, [10, 6], [6, 3]), finished(12.0, [10], [4])
        )
    )
    assert (counted.judged, counted.accepted) == ((20, 6), (10, 3))
    assert counted.fallbacks == {"budget": 2}
    assert counted.predicted_tokens == pytest.approx(1 + 0.5 + 0.5 * 0.5)
    assert counted.tokens_per_drafted_round == pytest.approx(1 + 13 / 20)


def test_speed_up_is_the_other_time_over_this_one() -> None:
    """4 ms against 6 ms is 1.5 times as fast; the quantiles change places."""
    fast, slow = Measured(4.0, "ms", 3.0, 5.0), Measured(6.0, "ms", 6.0, 6.0)
    assert fast.under(slow) == Measured(1.5, "1", 6 / 5, 2.0)
    assert slow.over(fast) == Measured(1.5, "1", 1.5, 1.5)


# ---------------------------------------------------------------- rounds


def span(name: str, span_id: int, parent: int, ms: tuple[float, float], **us: int) -> StoredSpan:
    """A stored span; times in milliseconds, attributes in microseconds."""
    ids = "ab" * 16, f"{span_id:016x}", f"{parent:016x}"
    return StoredSpan(*ids, name, "x", int(ms[0] * 1e6), int(ms[1] * 1e6), False, dict(us), ())


def test_parts_of_a_round_add_up() -> None:
    """draft + wire + queue + verify + manage is the round; queues are in no service's part."""
    whole = span(
        ROUND,
        1,
        9,
        (0, 20),
        **{
            Key.NUM_DRAFT_TOKENS: 4_000,
            Key.DRAFT_US: 5_000,
            Key.VERIFY_US: 11_000,
            Key.WIRE_US: 1_500,
            Key.QUEUE_US: 3_000,
            Key.MANAGE_US: 2_500,
        },
    )
    found = split(whole, span(VERIFY, 2, 1, (7, 18), **{Key.QUEUE_US: 2_000}))
    assert [getattr(found, part) for part in PARTS] == [4.0, 1.5, 3.0, 9.0, 2.5]
    assert sum(getattr(found, part) for part in PARTS) == found.total == 20.0
    assert found.overhead == 4.0


def otlp(*spans: dict[str, Any]) -> str:
    """A line of a trace file."""
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}) + "\n"


def raw(name: str, trace_id: str, span_id: int, start_s: float, parent: int = 0) -> dict[str, Any]:
    """A span of one millisecond as it is written."""
    return {
        "traceId": trace_id,
        "spanId": f"{span_id:016x}",
        **({"parentSpanId": f"{parent:016x}"} if parent else {}),
        "name": name,
        "startTimeUnixNano": str(int(start_s * 1e9)),
        "endTimeUnixNano": str(int(start_s * 1e9) + 1_000_000),
    }


def test_rounds_of_traced_requests_in_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are read once and whole; other requests and rounds elsewhere in time are left out."""
    monkeypatch.setattr("specmesh.bench.round_split._UNIX_OFFSET_S", 0.0)
    ours, other = "ab" * 16, "cd" * 16
    file = tmp_path / "coordinator.otlp.jsonl"
    early = [raw(ROUND, ours, 1, 9.0), raw(VERIFY, ours, 2, 9.0, 1)]
    inside = [raw(ROUND, ours, 3, 11.0), raw(VERIFY, ours, 4, 11.0, 3)]
    foreign = [raw(ROUND, other, 5, 11.0), raw(VERIFY, other, 6, 11.0, 5)]
    half = otlp(raw(ROUND, ours, 7, 12.0), raw(VERIFY, ours, 8, 12.0, 7))
    file.write_text(otlp(*early, *inside, *foreign) + half[:40])
    seen = observed(Stream(0, ours, 9.0))
    folder = TraceFolder(tmp_path)
    assert values(folder.rounds(seen), "total") == [1.0]
    with file.open("a") as rest:
        rest.write(half[40:])
    assert values(folder.rounds(seen), "total") == [1.0, 1.0]


# ---------------------------------------------------------------- cases


def test_cases_are_called_as_results_are_kept() -> None:
    """The names of issue and results file."""
    found = standard_cases([1, 4, 16, 64], ["1b"])
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {"stack-plain-c1", "stack-plain-c64", "chat-1b-k4-c1", "chat-1b-k4-c64"} <= set(names)
    speedups = {case.speedup_name for case in found if case.num_draft_tokens != 0}
    wanted = {f"speedup-chat-c{c}" for c in (1, 4, 16, 64)}
    assert wanted | {"speedup-chat-k4-c1", "speedup-chat-greedy-c1"} <= speedups
    assert "speedup-chat-1b-c16" in speedups


def test_every_case_follows_the_plain_one_it_is_held_against() -> None:
    """A ratio's baseline is measured before it, in the same run."""
    found = standard_cases([1, 16], ["1b"])
    for index, case in enumerate(found):
        assert case.num_draft_tokens == 0 or case.plain in found[:index]


def test_selection_brings_the_plain_case() -> None:
    """A pattern picks cases, in order, with their baselines; a useless one is an error."""
    found = standard_cases([1, 4], [])
    names = [case.name for case in selected(found, ["*-policy-c4", "chat-k4-c1"])]
    assert names == ["chat-plain-c1", "chat-plain-c4", "chat-policy-c4", "chat-k4-c1"]
    assert selected(found, []) == found
    with pytest.raises(ConfigError, match="cases: 'nosuch' matches none of stack-plain-c1"):
        selected(found, ["nosuch"])


def test_prompts_are_read_or_refused(tmp_path: Path) -> None:
    """The shipped file has at least 60; a line without a prompt is named."""
    assert len(read_prompts(CHAT_PROMPTS)) >= 60
    file = tmp_path / "prompts.jsonl"
    for content, message in (
        ('{"prompt": "a"}\n{"text": "b"}\n', r"prompts: .*prompts.jsonl:2 has no prompt"),
        ('{"prompt": " "}\n', "1 has an empty prompt"),
        ("", "has no prompts"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_prompts(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "missing")


def test_long_prompts_are_long_and_differ_from_the_start(tmp_path: Path) -> None:
    """Each has the tokens asked for, and no two share the page that a cache would keep."""
    tokenizer = load_tokenizer(write_pair(tmp_path)[0])
    texts = ["What is a river?", "What is rain?"]
    short, long = chat_ids(tokenizer, texts), long_ids(tokenizer, texts, 300)
    assert all(len(ids) < 60 for ids in short)
    assert all(300 <= len(ids) < 340 for ids in long)
    assert len({tuple(ids[:64]) for ids in long}) == len(long) == 8


# ---------------------------------------------------------------- what is started


def test_one_target_serves_every_draft(tmp_path: Path) -> None:
    """A further draft has its own coordinator, which calls the first one's target."""
    deployment = Deployment(
        target_dir=tmp_path / "t",
        drafts=[("", tmp_path / "d"), ("1b", tmp_path / "e")],
        log_dir=tmp_path,
        target_device="cuda:0",
        draft_device="cuda:1",
        dtype="bfloat16",
        extra={"target": ["--engine.num-pages", "7"]},
    )
    planned, addresses = commands(deployment, tmp_path)
    by_name = {command.name: " ".join(command.argv) for command in planned}
    assert list(by_name) == ["target", "draft", "coordinator", "draft-1b", "coordinator-1b"]
    ports = {command.name: command.port for command in planned}
    assert f"--targets 127.0.0.1:{ports['target']}" in by_name["coordinator-1b"]
    assert f"--drafts 127.0.0.1:{ports['draft-1b']}" in by_name["coordinator-1b"]
    assert (
        "--engine.device cuda:0 --engine.dtype bfloat16 --engine.num-pages 7" in (by_name["target"])
    )
    assert "--engine.device cuda:1" in by_name["draft-1b"]
    assert f"--engine.model {tmp_path / 'e'}" in by_name["draft-1b"]
    assert "--telemetry.sampling-ratio 0" in by_name["coordinator"]
    assert addresses == {
        "": f"127.0.0.1:{ports['coordinator']}",
        "1b": f"127.0.0.1:{ports['coordinator-1b']}",
    }
    assert len({command.log_path for command in planned}) == 5


def test_flags_of_one_label_are_read_there_alone_and_after_those_of_all(tmp_path: Path) -> None:
    """The same draft with and without drafting ahead: each process reads what was meant for it."""
    extra = up.settings_flags(
        [
            "coordinator-ahead.speculation.num_ahead=16",
            "coordinator.speculation.num_ahead=4",
            "draft.engine.max_sessions=2",
            "draft-ahead.engine.max_sessions=3",
        ],
        ["coordinator", "draft", "coordinator-ahead", "draft-ahead"],
    )
    drafts = [("", tmp_path), ("ahead", tmp_path), ("b", tmp_path)]
    planned, _ = commands(Deployment(tmp_path, drafts, tmp_path, extra=extra), tmp_path)
    flags = {command.name: command.argv[3:] for command in planned}
    assert {
        name: load_settings(CoordinatorSettings, flags[name]).speculation.num_ahead
        for name in ("coordinator", "coordinator-ahead", "coordinator-b")
    } == {"coordinator": 4, "coordinator-ahead": 16, "coordinator-b": 4}
    assert {
        name: load_settings(DraftSettings, flags[name]).engine.max_sessions
        for name in ("draft", "draft-ahead", "draft-b")
    } == {"draft": 2, "draft-ahead": 3, "draft-b": 2}


# ---------------------------------------------------------------- load


def load(address: str, **changes: Any) -> Load:
    """Three streams for a moment."""
    fields: dict[str, Any] = {
        "address": address,
        "prompts": [[1], [2], [3], [4]],
        "options": GenerateOptions(max_tokens=30),
        "num_streams": 3,
        "warm_up_s": 0.0,
        "window_s": 1.0,
        "key": 5,
        **changes,
    }
    return Load(**fields)


def streams_of(script: Script, **changes: Any) -> list[Stream]:
    """What one process sees of a scripted coordinator."""
    with serving(script) as address:
        return run_share(Share(load(address, **changes), 0, 1, time.monotonic()))


def test_slots_open_the_next_stream_and_first_ones_are_cut_short() -> None:
    """Every slot goes on to its next prompt; the first lengths are spread over the slots."""
    script = Script()
    seen = streams_of(script)
    assert {each.slot for each in seen} == {0, 1, 2}
    first = {r.tokens.token_ids[0]: r.max_tokens for r in script.requests[:3]}
    assert first == {1: 10, 2: 20, 3: 30}
    assert {request.max_tokens for request in script.requests[3:]} == {30}
    assert 4 in {request.tokens.token_ids[0] for request in script.requests[3:]}
    script = Script()
    streams_of(script, holds=True)
    assert {request.max_tokens for request in script.requests} == {30}  # none is cut short
    script = Script()
    streams_of(script, first_prompt=2)
    assert {r.tokens.token_ids[0]: r.max_tokens for r in script.requests[:3]} == {
        3: 10,
        4: 20,
        1: 30,
    }
    assert sum(count for _, count in seen[0].messages) == 9
    assert seen[0].speculation() is not None


def test_the_load_decides_what_is_traced() -> None:
    """One request in `trace_every` carries a sampled context, under an id that the load knows."""
    script = Script(hang=True)
    seen = streams_of(script, trace_every=2)
    flags = {
        request.tokens.token_ids[0]: metadata["traceparent"]
        for request, metadata in zip(script.requests, script.metadata, strict=True)
    }
    assert {prompt: flag[-2:] for prompt, flag in flags.items()} == {1: "01", 2: "00", 3: "01"}
    traced = {each.slot: each.trace_id for each in seen}
    assert traced[1] is None
    assert traced[0] == flags[1].split("-")[1]
    assert trace_parent(5, 0, sampled=True)[0] != trace_parent(6, 0, sampled=True)[0]


def test_a_timer_that_rings_early_opens_no_further_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers of the loop may be a millisecond early: each slot has one stream all the same."""
    script = Script(hang=True)
    now, began = time.monotonic, time.monotonic()
    with serving(script) as address:
        share = Share(load(address), 0, 1, began)
        slow = lambda: began + 0.98 * (now() - began)  # noqa: E731 - so that timers are early
        monkeypatch.setattr(steady_load.time, "monotonic", slow)
        seen = run_share(share)
    assert sorted(each.slot for each in seen) == [0, 1, 2]
    assert len(script.requests) == 3


def test_streams_end_with_the_window() -> None:
    """A stream that would go on is cancelled at the coordinator, and its messages kept."""
    script = Script(hang=True)
    seen = streams_of(script)
    assert script.cancelled.wait(10)
    assert len(seen) == 3
    assert all(each.messages and each.finished_s is None for each in seen)


def test_processes_share_the_slots_and_the_clock() -> None:
    """Seventeen streams need two processes; together they are seventeen slots of one window."""
    with serving(Script(hang=True)) as address, LoadProcesses(17) as processes:
        seen = processes.run(load(address, num_streams=17, warm_up_s=3.0, window_s=0.1))
    assert sorted(each.slot for each in seen.streams) == list(range(17))
    assert seen.ends_s - seen.begins_s == pytest.approx(0.1)
    assert all(each.messages[0][0] < seen.begins_s for each in seen.streams)


def test_a_window_without_live_streams_is_no_measurement() -> None:
    """Where a stream has no token when the window begins, the case fails and says so."""
    with pytest.raises(NotReady, match="1 of 2 streams had no token after 1 s"):
        steady_load._check_live(
            load("x", num_streams=2, warm_up_s=1.0),
            10.0,
            [stream([(9.0, 1)], slot=0), stream([(10.5, 1)], slot=1)],
        )


def test_a_refused_request_ends_the_load() -> None:
    """An error of the coordinator reaches the caller as its own class."""
    with pytest.raises(NotReady, match="no target"):
        streams_of(Script(refusals={0: NotReady("no target")}))


# ---------------------------------------------------------------- records


def test_a_case_is_repeated_with_a_longer_warm_up_once() -> None:
    """Prompts that outlast the warm-up cost one repetition, not the case; a second time they do."""
    loads: list[Load] = []

    class Processes:
        def run(self, load: Load) -> Observed:
            loads.append(load)
            if len(loads) in (1, 3, 4):
                raise StreamsNotLive("1 of 1 streams had no token")
            return observed(stream([(11.0, 1), (13.0, 1)]))

    bench = _Scripted()
    bench._processes = Processes()  # type: ignore[assignment]  # scripted
    assert bench.measure(Case(1, 0))[0]["value"] == 2000.0
    assert [load.warm_up_s for load in loads] == [2.0, 8.0]
    with pytest.raises(StreamsNotLive):
        bench.measure(Case(1, 0))
    assert [load.first_prompt for load in loads] == [0, 0, 1, 1]


class _Scripted(StackBench):
    """A bench whose numbers are given."""

    def __init__(self) -> None:
        self._plain = {}
        self._common = {"versions": {"x": "1"}, "command": "specmesh bench-stack"}

        class NoTraces:
            def rounds(self, _observed: Observed) -> list[Any]:
                return []

        self._traces = NoTraces()  # type: ignore[assignment]  # no files here
        self._limits = Limits()
        self._prompts = {False: [[1], [2]], True: [[1]]}
        self._key = self._next_prompt = 0
        stack = Stack([])
        self._running = Running(stack, {"": "x"}, Path("x"), 0.0)


def test_records_hold_the_keys_and_the_ratio_to_plain() -> None:
    """One object a number, with exactly the agreed keys; speed-up against this run's plain case."""
    bench = _Scripted()
    plain = bench._records(Case(4, 0), observed(stream([(11.0, 1), (13.0, 1)])))
    policy = bench._records(Case(4, None), observed(stream([(11.0, 1), (13.0, 2)])))
    by_name = {record["name"]: record for record in plain + policy}
    keys = {"name", "value", "unit", "p20", "p80", "baseline", "versions", "command"}
    assert all(set(record) == keys for record in by_name.values())
    assert by_name["chat-plain-c4"]["baseline"] is None
    ratio = by_name["speedup-chat-c4"]
    assert (ratio["value"], ratio["unit"]) == (2.0, "1")
    assert ratio["baseline"] == {"name": "chat-plain-c4", "value": 2000.0}
    assert {"chat-policy-c4-ttft-p50", "chat-policy-c4-itl-p99"} & set(by_name) == {
        "chat-policy-c4-itl-p99"
    }
    assert "speedup-chat-plain-c4" not in by_name


def test_transformers_beside_it(tmp_path: Path) -> None:
    """Plain and assisted generation of the same folders are timed, per token."""
    target, draft = write_pair(tmp_path)
    models = TransformersModels(target, draft, device="cpu", dtype="float32")
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    for assisted in (False, True):
        measured = models.ms_per_token(
            prompts, max_tokens=8, temperature=1.0, seconds=0.0, assisted=assisted
        )
        assert 0 < measured.value < 10_000
        assert measured.unit == "ms"
