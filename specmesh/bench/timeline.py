"""Where the time of a round goes: `python -m specmesh.bench.timeline [--repeats N] [-k N]`.

Starts the stack, sends requests one at a time and cuts every round into consecutive phases at the
instants that its spans record: commands sent and received, forward passes begun and ended. All
three processes read one host's clock, so instants of different processes are comparable. Beside the
phases: processor time and voluntary context switches (wake-ups) a round, by process, from /proc.
Recording spans costs time itself: with --unsampled nothing is traced, and what is left is the mean
time outside the two models of each request's rounds, from the metrics of the three processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from specmesh.bench.load import Timed, one_after_another
from specmesh.bench.measure import Series, series, versions
from specmesh.bench.rounds import complete_trace
from specmesh.bench.scrape import metric, read_metrics
from specmesh.bench.suite import QUESTIONS
from specmesh.cli.up import default_cache_dir, resolve_models, running_stack
from specmesh.client import GenerateOptions
from specmesh.launcher import Ports, free_port
from specmesh.spans import DRAFT_FORWARD, PROPOSE, ROUND, TARGET_FORWARD, VERIFY, Key
from specmesh.tokenizer import load_tokenizer
from specmesh.traces.reader import StoredSpan, Trace

PHASES = (
    "round begins - proposal wanted at the draft",
    "proposal wanted - first pass begins",
    "draft passes",
    "between draft passes",
    "last draft pass ends - proposal answered",
    "proposal answered - verification wanted at the target",
    "verification wanted - pass begins",
    "target pass",
    "target pass ends - verdict answered",
    "verdict answered - round ends",
)
START_TIMEOUT_S = 300.0  # a first start on a GPU compiles kernels
OUTSIDE = tuple(phase for phase in PHASES if phase not in ("draft passes", "target pass"))
_CLOCK_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def phases(step: StoredSpan, trace: Trace) -> dict[str, float] | None:
    """The phases of one round in milliseconds, in order; None for one without candidates, or one
    whose spans are not all there."""
    children = [span for span in trace.spans if span.parent_id == step.span_id]
    propose = next((span for span in children if span.name == PROPOSE), None)
    verify = next((span for span in children if span.name == VERIFY), None)
    if propose is None or verify is None or not step.count(Key.NUM_DRAFT_TOKENS):
        return None
    drafts = _passes(trace, DRAFT_FORWARD, propose)
    targets = _passes(trace, TARGET_FORWARD, verify)
    # On a GPU all candidates come from one captured chain, which is one pass here.
    if len(drafts) not in (1, step.count(Key.NUM_DRAFT_TOKENS)) or len(targets) != 1:
        return None
    drafting = sum(each.end_ns - each.start_ns for each in drafts)
    target = targets[0]
    lengths = (
        propose.start_ns - step.start_ns,
        drafts[0].start_ns - propose.start_ns,
        drafting,
        drafts[-1].end_ns - drafts[0].start_ns - drafting,
        propose.end_ns - drafts[-1].end_ns,
        verify.start_ns - propose.end_ns,
        target.start_ns - verify.start_ns,
        target.end_ns - target.start_ns,
        verify.end_ns - target.end_ns,
        step.end_ns - verify.end_ns,
    )
    return {name: length / 1e6 for name, length in zip(PHASES, lengths, strict=True)}


def _passes(trace: Trace, name: str, command: StoredSpan) -> list[StoredSpan]:
    linked = (trace.trace_id, command.span_id)
    found = (span for span in trace.batches if span.name == name and linked in span.links)
    return sorted(found, key=lambda span: span.start_ns)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process has used so far: processor milliseconds and voluntary context switches."""

    cpu_ms: float
    num_wake_ups: int

    @classmethod
    def read(cls, pid: int) -> Usage:
        """Of a living process, over all its threads; a child's is not counted."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        num_wake_ups = 0
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            lines = status.read_text().splitlines()
            counts = [line for line in lines if line.startswith("voluntary_ctxt_switches:")]
            num_wake_ups += int(counts[0].split()[1])
        return cls((int(fields[11]) + int(fields[12])) * _CLOCK_TICK_MS, num_wake_ups)


def _processes() -> dict[str, int]:
    """Process ids of the services among this process's descendants, the coordinator's actor too."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = stat.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        for name, mark in (
            ("draft", "-m draft_service"),
            ("target", "-m target_service"),
            ("coordinator", "ray::ServeReplica"),
        ):
            if mark in command:
                found[name] = int(stat.parent.name)
    return found


class Timeline:
    """One stack under measurement."""

    def __init__(
        self,
        address: str,
        trace_dir: Path | None,
        metrics: Mapping[str, int],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """address: the coordinator's. trace_dir: None where nothing is traced. metrics: port of
        each service. prompts: token ids, used in turn."""
        self._address = address
        self._trace_dir = trace_dir
        self._metrics = metrics
        self._prompts = prompts

    def run(self, repeats: int, num_draft_tokens: int, num_tokens: int) -> list[Series]:
        """Send `repeats` requests after one to warm up; phases and usage of their rounds."""
        self._request(0, num_draft_tokens, num_tokens)
        before = {name: Usage.read(pid) for name, pid in _processes().items()}
        outside, timed = [], []
        for index in range(repeats):
            counted = self._counted()
            timed.append(self._request(index, num_draft_tokens, num_tokens))
            spent = [now - then for now, then in zip(self._counted(), counted, strict=True)]
            outside.append((spent[1] - spent[2] - spent[3]) * 1000 / spent[0])
        after = {name: Usage.read(pid) for name, pid in _processes().items()}
        made = [] if self._trace_dir is None else self._phases(timed, self._trace_dir)
        made.append(series("outside the two models, mean of a request's rounds", "ms", outside))
        num_rounds = sum(each.finished.speculation.num_rounds for each in timed)
        for name, used in after.items():
            cpu_ms = used.cpu_ms - before[name].cpu_ms
            num_wake_ups = used.num_wake_ups - before[name].num_wake_ups
            made.append(series(f"processor time, {name}", "ms", [cpu_ms / num_rounds]))
            made.append(series(f"wake-ups, {name}", "1", [num_wake_ups / num_rounds]))
        return made

    def _counted(self) -> tuple[float, float, float, float]:
        """Rounds so far; seconds of rounds and prefills, of draft passes, of target passes."""
        own = read_metrics(self._metrics["coordinator"])
        names = ("specmesh_round_duration_seconds", "specmesh_prefill_duration_seconds")
        draft_s, target_s = (
            metric(read_metrics(self._metrics[side]), "specmesh_forward_seconds_sum")
            for side in ("draft", "target")
        )
        seconds = sum(metric(own, f"{name}_sum") for name in names)
        return metric(own, f"{names[0]}_count"), seconds, draft_s, target_s

    def _phases(self, timed: Sequence[Timed], trace_dir: Path) -> list[Series]:
        traces = [complete_trace(trace_dir, each.trace_id) for each in timed]
        steps = [(step, trace) for trace in traces for step in trace.steps() if step.name == ROUND]
        cut = [found for step, trace in steps if (found := phases(step, trace)) is not None]
        made = [series(phase, "ms", [each[phase] for each in cut]) for phase in PHASES]
        outside = [sum(each[phase] for phase in OUTSIDE) for each in cut]
        return [*made, series("outside the two models", "ms", outside)]

    def _request(self, index: int, num_draft_tokens: int, num_tokens: int) -> Timed:
        options = GenerateOptions(
            max_tokens=num_tokens,
            ignore_eos=True,
            num_draft_tokens=num_draft_tokens,
            temperature=1.0,
            seed=index,
            rule="residual",
        )
        prompt = self._prompts[index % len(self._prompts)]
        return one_after_another(self._address, [prompt], options)[0]


def main(argv: Sequence[str]) -> int:
    """Measure and print; JSON lines with --json. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specmesh.bench.timeline")
    parser.add_argument("--repeats", type=int, default=6, help="requests")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4, help="candidates a round")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--unsampled", action="store_true", help="trace nothing")
    parser.add_argument("--json", action="store_true", help="JSON lines")
    asked = parser.parse_args(argv)
    cache_dir = default_cache_dir()
    models = resolve_models(None, None, cache_dir)
    tokenizer = load_tokenizer(models[0])
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    metrics = {service: free_port(0, service) for service in ("coordinator", "draft", "target")}
    ratio = "0" if asked.unsampled else "1"
    flags = ["--telemetry.sampling-ratio", ratio, "--telemetry.metrics-port"]
    with (
        TemporaryDirectory(prefix="specmesh-timeline-") as folder,
        running_stack(
            models,
            cache_dir=cache_dir,
            ports=Ports(coordinator=0, draft=0, target=0),
            trace_dir=Path(folder),
            extra={service: [*flags, str(port)] for service, port in metrics.items()},
            start_timeout_s=START_TIMEOUT_S,
        ) as (stack, _),
    ):
        trace_dir = None if asked.unsampled else Path(folder)
        timeline = Timeline(stack.address("coordinator"), trace_dir, metrics, prompts)
        measured = timeline.run(asked.repeats, asked.num_draft_tokens, asked.max_tokens)
    if asked.json:
        for each in measured:
            sys.stdout.write(json.dumps({**each.record(), **versions()}) + "\n")
        return 0
    sys.stdout.write(f"{'':58} median     p20     p80     n\n")
    for each in measured:
        numbers = f"{each.median:7.3f} {each.quantile(0.2):7.3f} {each.quantile(0.8):7.3f}"
        sys.stdout.write(f"{each.name:55} {each.unit:2} {numbers} {len(each.values):5}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
