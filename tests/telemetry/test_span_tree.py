"""A real run of three processes against the table: spans, links, sums, metrics, silence on content.

One stack (tiny pair, real gRPC, an OTLP receiver in the test) serves a set of requests that take
every path: both rules, greedy, plain decoding, several samples, both placements, a caller's trace.
"""

from __future__ import annotations

import http.client
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc
from specmesh.client import Client, GenerateOptions, Generation
from specmesh.launcher import Ports, Stack, StackOptions, free_port, plan
from specmesh.spans import (
    DRAFT_FORWARD,
    GENERATE,
    PREFILL,
    PROPOSE,
    ROUND,
    SPANS,
    TARGET_FORWARD,
    VERIFY,
    Key,
)
from specmesh.traces.reader import read_trace
from tests.e2e.tiny_pair import write_pair
from tests.telemetry.otlp_receiver import OtlpReceiver, Received

READY_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 20.0
PROMPT = "zyzzyva prompts stay private"
CALLER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
UNSAMPLED_TRACE = "0af7651916cd43dd8448eb211c80319c"
COMMANDS = {PROPOSE: DRAFT_FORWARD, VERIFY: TARGET_FORWARD}

REQUESTS = {
    "residual": GenerateOptions(
        temperature=1.0, rule="residual", num_draft_tokens=4, max_tokens=48, ignore_eos=True
    ),
    "seeded": GenerateOptions(seed=11, num_draft_tokens=3, max_tokens=32, ignore_eos=True),
    "greedy": GenerateOptions(temperature=0.0, num_draft_tokens=2, max_tokens=24, ignore_eos=True),
    "plain": GenerateOptions(num_draft_tokens=0, max_tokens=21, ignore_eos=True),
    "samples": GenerateOptions(n=3, num_draft_tokens=2, max_tokens=12, top_p=0.9, ignore_eos=True),
    "at_coordinator": GenerateOptions(
        temperature=0.9, rule="residual", num_draft_tokens=3, max_tokens=24,
        decide_at="coordinator", ignore_eos=True,
    ),
    "adaptive": GenerateOptions(temperature=0.8, max_tokens=24, ignore_eos=True),
}  # fmt: skip


@dataclass
class Run:
    """What a whole run left: answers, exported spans, metrics of each process, logs."""

    answers: dict[str, Generation] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    spans: list[Received] = field(default_factory=list)
    logs: str = ""

    def trace(self, name: str) -> list[Received]:
        """Spans of the trace of a request."""
        trace_id = self.answers[name].started.trace_id
        return [one for one in self.spans if one.span.trace_id.hex() == trace_id]

    def steps(self, name: str, kind: str = ROUND) -> list[Received]:
        """Rounds (or prefills) of a request."""
        return [one for one in self.trace(name) if one.span.name == kind]


def scrape(port: int) -> dict[str, float]:
    """All samples of a metrics endpoint as `name{label=value,...}`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    body = connection.getresponse().read().decode()
    connection.close()
    found = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def call_with(address: str, traceparent: str) -> str:
    """One request inside a caller's trace, to its end. Returns the trace id it reports."""
    request = REQUESTS["seeded"].request(PROMPT)
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        events = list(stub.Generate(request, metadata=[("traceparent", traceparent)], timeout=60))
    assert isinstance(events[-1], pb.GenerateResponse)
    assert events[-1].WhichOneof("event") == "finished"
    return str(events[0].started.trace_id)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Serve every request, scrape, stop the stack (which flushes), and keep what was seen."""
    folder = tmp_path_factory.mktemp("telemetry")
    target, draft = write_pair(folder / "pair")
    found = Run()
    with OtlpReceiver() as receiver:
        ports = {name: free_port(0, name) for name in ("coordinator", "draft", "target")}
        flags = {
            name: [
                *("--telemetry.otlp-endpoint", f"http://127.0.0.1:{receiver.port}"),
                *("--telemetry.metrics-port", str(port)),
            ]
            for name, port in ports.items()
        }
        flags["coordinator"] += ["--ray.enabled", "false", "--speculation.audit-ratio", "0.2"]
        for name in ("draft", "target"):
            flags[name] += ["--engine.num-threads", "1"]
        options = StackOptions(target, draft, folder / "logs", ports=Ports(0, 0, 0), extra=flags)
        with Stack(plan(options)) as stack:
            stack.wait_ready(READY_TIMEOUT_S)
            address = stack.address("coordinator")
            with Client(address) as client:
                for name, wanted in REQUESTS.items():
                    found.answers[name] = client.generate(PROMPT, wanted)
            sampled = call_with(address, f"00-{CALLER_TRACE}-00f067aa0ba902b7-01")
            unsampled = call_with(address, f"00-{UNSAMPLED_TRACE}-00f067aa0ba902b7-00")
            assert (sampled, unsampled) == (CALLER_TRACE, "")
            wait_until_counted(ports["coordinator"], found)
            found.metrics = {name: scrape(port) for name, port in ports.items()}
        found.spans = list(receiver.spans)
    found.logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    return found


def wait_until_counted(port: int, found: Run) -> None:
    """Requests count when their stream has ended and audited rounds when they are audited, which
    may be a moment after the client has its answer."""
    samples = [one for answer in found.answers.values() for one in answer.finished]
    samples += 2 * found.answers["seeded"].finished
    wanted = len(samples), sum(one.speculation.num_rounds for one in samples)
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        now = scrape(port)
        requests, rounds = (
            sum(value for key, value in now.items() if key.startswith(name))
            for name in ("specmesh_requests_total{", "specmesh_rounds_total{")
        )
        if (requests, rounds) == wanted or time.monotonic() > deadline:
            assert (requests, rounds) == wanted
            return


def test_every_span_is_one_of_the_table(run: Run) -> None:
    """Name, service, kind, parent and attributes of each exported span are those of its row."""
    by_id = {one.span.span_id: one for one in run.spans}
    seen = set()
    for one in run.spans:
        spec = SPANS[one.span.name]
        seen.add(one.span.name)
        assert one.service == f"specmesh-{spec.service}"
        assert one.span.kind == spec.kind.value + 1
        if spec.parents:
            assert by_id[one.span.parent_span_id].span.name in spec.parents
        elif one.span.trace_id.hex() != CALLER_TRACE:
            assert one.span.parent_span_id == b""
        keys = one.attributes.keys() - {Key.SERVICE}
        assert spec.required <= keys, (one.span.name, spec.required - keys)
        assert keys <= spec.required | spec.optional, (one.span.name, keys - spec.optional)
    assert seen == set(SPANS)


def test_each_request_is_one_trace_across_three_processes(run: Run) -> None:
    """One root; a prefill per sample; under each step the commands it sent; nothing else. A command
    that is answered in parts hangs under the round of the first."""
    for name, answer in run.answers.items():
        spans = run.trace(name)
        counts = Counter(one.span.name for one in spans)
        assert counts[GENERATE] == 1
        assert counts[PREFILL] == len(answer.finished)
        assert counts[ROUND] == sum(sample.speculation.num_rounds for sample in answer.finished)
        children: dict[bytes, Counter[str]] = defaultdict(Counter)
        for one in spans:
            children[one.span.parent_span_id][one.span.name] += 1
        for step in (*run.steps(name), *run.steps(name, PREFILL)):
            assert bool(children[step.span.span_id][VERIFY]) is (Key.OFFSET not in step.attributes)
            if step.attributes[Key.NUM_DRAFT_TOKENS]:
                assert children[step.span.span_id][PROPOSE] >= 1
        services = {one.service for one in spans}
        assert services >= {"specmesh-coordinator", "specmesh-target"}
        # The adaptive request may find that drafting does not pay; every other one drafts, or not.
        drafted = sum(sample.speculation.num_draft_tokens for sample in answer.finished)
        assert ("specmesh-draft" in services) is bool(drafted) or name == "adaptive"
        assert bool(drafted) is (name != "plain") or name == "adaptive"


def last_part_of(run: Run, command: Received) -> Received:
    """The round of the last part of a command's answer; the only one where it has one."""
    base_len, num_emitted = (
        int(str(command.attributes[key])) for key in (Key.BASE_LEN, Key.NUM_EMITTED)
    )
    rounds = [
        one
        for one in run.spans
        if one.span.name in (ROUND, PREFILL)
        and one.attributes[Key.SESSION_ID] == command.attributes[Key.SESSION_ID]
        and 0 <= int(str(one.attributes[Key.BASE_LEN])) - base_len < max(1, num_emitted)
    ]
    told = sum(int(str(one.attributes[Key.NUM_EMITTED])) for one in rounds)
    assert told == num_emitted or not num_emitted, "its rounds bring its tokens"
    return max(rounds, key=lambda one: int(str(one.attributes[Key.BASE_LEN])))


def test_children_lie_within_their_parents(run: Run) -> None:
    """Clocks of the processes agree to 5 ms: no span begins before or ends after its parent; one
    of a command that is answered in parts ends with the round of the last."""
    by_id = {one.span.span_id: one.span for one in run.spans}
    num_in_parts = 0
    slack_ns = 5_000_000
    for one in run.spans:
        parent = by_id.get(one.span.parent_span_id)
        if parent is None:
            continue
        assert one.span.start_time_unix_nano >= parent.start_time_unix_nano - slack_ns
        # A draft's first fill runs beside the rounds and may outlast the step that sent it.
        if one.span.name == VERIFY:
            last = last_part_of(run, one).span
            num_in_parts += last is not parent
            parent = last
        if one.span.name != PROPOSE or one.attributes.get(Key.NUM_DRAFT_TOKENS):
            assert one.span.end_time_unix_nano <= parent.end_time_unix_nano + slack_ns
    assert num_in_parts > 0


def test_batches_and_commands_link_each_other(run: Run) -> None:
    """Every forward pass names each command it served, and every command each of its passes."""
    commands = {one.span.span_id: one for one in run.spans if one.span.name in COMMANDS}
    passes: dict[bytes, set[bytes]] = defaultdict(set)
    for one in run.spans:
        if one.span.name in COMMANDS.values():
            assert one.span.links
            for link in one.span.links:
                assert COMMANDS[commands[link.span_id].span.name] == one.span.name
                passes[link.span_id].add(one.span.span_id)
    for span_id, command in commands.items():
        assert {link.span_id for link in command.span.links} == passes[span_id]
        assert len(passes[span_id]) == command.attributes[Key.NUM_STEPS]
    assert any(passes.values())


def test_sums_over_rounds_are_the_response_counters(run: Run) -> None:
    """Drafted, accepted, judged per position, fallbacks, emitted: spans and answer agree."""
    for name, answer in run.answers.items():
        for sample in answer.finished:
            own = [
                one.attributes
                for one in run.steps(name)
                if one.attributes[Key.SAMPLE_INDEX] == sample.index
            ]
            stats = sample.speculation
            drafted = [int(str(step[Key.NUM_DRAFT_TOKENS])) for step in own]
            accepted = [int(str(step[Key.NUM_ACCEPTED])) for step in own]
            assert sum(drafted) == stats.num_draft_tokens
            assert sum(accepted) == stats.num_accepted
            for position, count in enumerate(stats.accepted_per_position):
                assert sum(one > position for one in accepted) == count
            for position, count in enumerate(stats.judged_per_position):
                judged = zip(drafted, accepted, strict=True)
                assert sum(min(k, j + 1) > position for k, j in judged) == count
            reasons = Counter(
                str(step.get(Key.FALLBACK, ""))
                for step, k in zip(own, drafted, strict=True)
                if not k
            )
            assert reasons == dict(stats.fallback_rounds)
            emitted = sum(int(str(step[Key.NUM_EMITTED])) for step in own)
            # The prefill gives the first token; these requests end by max_tokens, uncut.
            assert 1 + emitted == sample.usage.completion_tokens == REQUESTS[name].max_tokens
            assert len(answer.token_ids[sample.index]) == sample.usage.completion_tokens
        root = next(one for one in run.trace(name) if one.span.name == GENERATE).attributes
        assert root[Key.OUTPUT_TOKENS] == sum(s.usage.completion_tokens for s in answer.finished)
        assert root[Key.NUM_ROUNDS] == sum(s.speculation.num_rounds for s in answer.finished)
        assert root[Key.NUM_DRAFT_TOKENS] == sum(
            s.speculation.num_draft_tokens for s in answer.finished
        )
        assert root[Key.NUM_ACCEPTED] == sum(s.speculation.num_accepted for s in answer.finished)
        assert root[Key.INPUT_TOKENS] == answer.started.prompt_tokens


def test_prometheus_counters_are_the_sums_over_all_rounds(run: Run) -> None:
    """Counters equal the answers' totals plus the two calls inside a caller's trace."""
    coordinator = run.metrics["coordinator"]
    seeded = run.answers["seeded"].finished[0]
    samples = [one for answer in run.answers.values() for one in answer.finished] + 2 * [seeded]
    stats = [one.speculation for one in samples]
    assert coordinator["specmesh_output_tokens_total"] == sum(
        one.usage.completion_tokens for one in samples
    )
    assert coordinator["specmesh_draft_tokens_total"] == sum(one.num_draft_tokens for one in stats)
    assert coordinator["specmesh_accepted_tokens_total"] == sum(one.num_accepted for one in stats)
    rounds = sum(
        value for key, value in coordinator.items() if key.startswith("specmesh_rounds_total{")
    )
    assert rounds == sum(one.num_rounds for one in stats)
    assert coordinator["specmesh_round_duration_seconds_count"] == rounds
    assert coordinator["specmesh_prefill_duration_seconds_count"] == len(samples)
    for position in range(4):
        judged = sum(
            one.judged_per_position[position]
            for one in stats
            if position < len(one.judged_per_position)
        )
        key = f"specmesh_judged_position_tokens_total{{position={position}}}"
        assert coordinator[key] == judged
    assert coordinator["specmesh_prompt_tokens_total"] == sum(
        one.usage.prompt_tokens for one in samples
    )
    assert coordinator["specmesh_redraw_mismatches_total"] == 0
    assert coordinator["specmesh_audited_rounds_total"] > 0
    assert coordinator["specmesh_audit_mismatches_total{kind=mismatch}"] == 0


def test_prometheus_counters_are_the_sums_over_the_spans(run: Run) -> None:
    """Added up from the exported rounds themselves; the unsampled call repeats the sampled one."""
    rounds = [one.attributes for one in run.spans if one.span.name == ROUND]
    rounds += [
        one.attributes
        for one in run.spans
        if one.span.name == ROUND and one.span.trace_id.hex() == CALLER_TRACE
    ]
    wanted: Counter[str] = Counter()
    for step in rounds:
        drafted, accepted = (
            int(str(step[key])) for key in (Key.NUM_DRAFT_TOKENS, Key.NUM_ACCEPTED)
        )
        wanted["specmesh_draft_tokens_total"] += drafted
        wanted["specmesh_accepted_tokens_total"] += accepted
        wanted["specmesh_audited_rounds_total"] += bool(step.get(Key.AUDITED))
        wanted[f"specmesh_rounds_total{{closing={step[Key.CLOSING]}}}"] += 1
        if not drafted and step.get(Key.FALLBACK):
            wanted[f"specmesh_fallback_rounds_total{{reason={step[Key.FALLBACK]}}}"] += 1
        for position in range(accepted):
            wanted[f"specmesh_accepted_position_tokens_total{{position={position}}}"] += 1
    found = {key: run.metrics["coordinator"][key] for key in wanted}
    assert found == wanted
    assert sum(found[key] for key in wanted if key.startswith("specmesh_rounds_total")) == len(
        rounds
    )
    dropped = sum(sum(step.get(Key.DROPPED_MASS, ())) for step in rounds)  # type: ignore[arg-type, misc]  # numbers
    assert run.metrics["coordinator"]["specmesh_dropped_mass_total"] == pytest.approx(dropped)


def test_services_export_their_own_metrics(run: Run) -> None:
    """Commands, forward passes, pages and loop lag of both services; pages are free at the end."""
    for name, command in (("draft", "propose"), ("target", "verify")):
        own = run.metrics[name]
        answered = f"specmesh_commands_total{{command={command},outcome=ok,side={name}}}"
        spans = [one for one in run.spans if one.span.name.startswith(f"{name}.{command}")]
        assert own[answered] >= len(spans) > 0
        assert own[f"specmesh_forward_seconds_count{{side={name}}}"] > 0
        assert own[f"specmesh_sessions{{side={name}}}"] == 0
        assert own[f"specmesh_kv_pages{{side={name},state=free}}"] > 0
        assert own["specmesh_event_loop_lag_seconds_count"] > 0


def test_a_caller_s_trace_is_joined_and_its_sampling_obeyed(run: Run) -> None:
    """A sampled traceparent becomes the parent of the root; an unsampled one exports nothing."""
    (root,) = (
        one
        for one in run.spans
        if one.span.trace_id.hex() == CALLER_TRACE and one.span.name == GENERATE
    )
    assert root.span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert UNSAMPLED_TRACE not in {one.span.trace_id.hex() for one in run.spans}


def test_a_round_is_enough_to_audit_it(run: Run) -> None:
    """Boundaries follow DESIGN section 4; every judged candidate has its p, q and overlap."""
    checked = 0
    for step in run.steps("residual"):
        found = step.attributes
        k, j, base = (
            int(str(found[key])) for key in (Key.NUM_DRAFT_TOKENS, Key.NUM_ACCEPTED, Key.BASE_LEN)
        )
        if not k or found[Key.CLOSING] == "stopped":
            continue
        checked += 1
        confirmed, kv_len = found[Key.TARGET_AFTER][:2]  # type: ignore[index]  # a tuple
        assert (confirmed, kv_len) == (base + j + 1, base + j)
        draft_confirmed, draft_kv_len = found[Key.DRAFT_AFTER][:2]  # type: ignore[index]  # a tuple
        assert draft_confirmed == base
        assert draft_kv_len <= base
        num_judged = min(k, j + 1)
        for key in (Key.TARGET_PROBS, Key.DRAFT_PROBS, Key.OVERLAPS):
            values = found[key]
            assert isinstance(values, tuple)
            assert len(values) == num_judged
            assert all(0 <= value <= 1.000001 for value in values)
        assert len(found[Key.DROPPED_MASS]) == k  # type: ignore[arg-type]  # a tuple
        assert found[Key.ENCODING]
        assert int(str(found[Key.TARGET_SENT_BYTES])) > 0
        assert int(str(found[Key.DRAFT_RECEIVED_BYTES])) > 0
        spent = sum(int(str(found[key])) for key in (Key.DRAFT_US, Key.VERIFY_US, Key.WIRE_US))
        whole_us = (step.span.end_time_unix_nano - step.span.start_time_unix_nano) / 1e3
        assert 0 < spent <= whole_us + 5_000
    assert checked > 5


def test_content_is_recorded_when_asked_for(tmp_path: Path) -> None:
    """With `record_content`, rounds carry ids and texts that join to the answer."""
    target, draft = write_pair(tmp_path / "pair")
    flags = ["--ray.enabled", "false", "--telemetry.record-content", "true"]
    options = StackOptions(
        target, draft, tmp_path / "logs", tmp_path / "traces", Ports(0, 0, 0),
        extra={"coordinator": flags},
    )  # fmt: skip
    with Stack(plan(options)) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        with Client(stack.address("coordinator")) as client:
            answer = client.generate(PROMPT, REQUESTS["seeded"])
    trace, _ = read_trace([tmp_path / "traces"], answer.started.trace_id)
    steps = trace.steps()
    assert [token for step in steps for token in step.items(Key.EMITTED_IDS)] == answer.token_ids[0]
    for step in steps:
        assert len(step.items(Key.CANDIDATE_IDS)) == step.count(Key.NUM_DRAFT_TOKENS)
        kept = step.items(Key.CANDIDATE_TEXTS)[: step.count(Key.NUM_ACCEPTED)]
        assert step.items(Key.EMITTED_TEXTS)[: len(kept)] == kept


def test_no_prompt_or_output_leaves_the_process(run: Run) -> None:
    """Without `record_content` neither spans nor logs hold text or ids of prompt and output."""
    exported = "\n".join(one.span.SerializeToString().decode("latin1") for one in run.spans)
    for text in (PROMPT, "zyzzyva"):
        assert text not in exported
        assert text not in run.logs
    content = {Key.CANDIDATE_IDS, Key.EMITTED_IDS, Key.CANDIDATE_TEXTS, Key.EMITTED_TEXTS}
    assert not any(content & one.attributes.keys() for one in run.spans)
