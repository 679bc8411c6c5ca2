"""What tracing and metrics cost a round, in microseconds: `python -m specmesh.bench.tracing`.

Runs exactly the calls that the three processes make in one round of one request, without the round,
and takes the processor time of the calling thread. What the exporter's thread spends on the spans
of a round is measured apart and added for the share of a round, as if nothing of it ran beside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specmesh.bench.measure import Ratio, Series, series, versions
from specmesh.config import TelemetrySettings
from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.ledger import Boundaries
from specmesh.round_record import AttributeValue, RoundRecord, SideRecord
from specmesh.spans import DRAFT_FORWARD, GENERATE, PROPOSE, ROUND, TARGET_FORWARD, VERIFY, Key
from specmesh.telemetry import Telemetry
from specmesh.traces.trace_file import encode_line

REPEATS, ROUNDS_PER_REPEAT = 20, 500
UNSAMPLED_BOUND_US = 5.0
SAMPLING_RATIO = 0.05
# The shortest round worth serving: the 8B-shaped step on an H200 (DESIGN section 7) and a draft.
ROUND_US = 5_000.0
OVERHEAD_BOUND = 0.01


class Processes:
    """The tracers of the three processes and one round's calls on each."""

    def __init__(self, make: Callable[[str], Telemetry]) -> None:
        self._tels = {name: make(name) for name in ("coordinator", "draft", "target")}
        self._attributes = _record().attributes()
        self._command: dict[str, AttributeValue] = {
            Key.SESSION_ID: "session", Key.EPOCH: 1, Key.ROUND: 7, Key.BASE_LEN: 100,
            Key.NUM_DRAFT_TOKENS: 4, Key.QUEUE_US: 10, Key.FORWARD_US: 4000, Key.BATCH_SIZE: 8,
            Key.NUM_STEPS: 4, Key.BEFORE: (100, 99, 128), Key.AFTER: (103, 102, 128),
        }  # fmt: skip

    def round(self, context: Context | None) -> None:
        """Every tracing call of one round of a request whose context this is (None: unsampled)."""
        coordinator = self._tels["coordinator"]
        span = coordinator.start(ROUND, context)
        for side, name, forward, num_steps in (
            ("draft", PROPOSE, DRAFT_FORWARD, 4),
            ("target", VERIFY, TARGET_FORWARD, 1),
        ):
            tel = self._tels[side]
            sent = coordinator.inject(span)
            command = tel.start(name, tel.extract(sent))
            for _ in range(num_steps):
                tel.record_batch(forward, (command,), 1, 2, {Key.BATCH_SIZE: 8, Key.BATCH_ROWS: 8})
            if command.is_recording():
                command.set_attributes(self._command)
            command.end()
        if span.is_recording():
            span.set_attributes(self._attributes)
        span.end()

    def sampled_context(self) -> Context | None:
        """The context of a request that is recorded."""
        tel = self._tels["coordinator"]
        return tel.context(tel.start(GENERATE, None))

    def flush(self) -> None:
        """Write out what is buffered, so that one measurement does not pay for another."""
        for tel in self._tels.values():
            tel.flush()

    def close(self) -> None:
        """Shut the tracers down."""
        for tel in self._tels.values():
            tel.shutdown()


def _record() -> RoundRecord:
    before, after = Boundaries(100, 99, 128), Boundaries(103, 102, 128)
    side = SideRecord("replica-0", 1, before, after, total_us=4200, service_us=4000)
    return RoundRecord(
        "session", 7, 100, num_draft_tokens=4, num_judged=3, num_accepted=2, num_emitted=3,
        num_committed=3, closing="recovered", encoding="sparse_f16", expected_tokens=1.9,
        duration_us=5000, target=side, draft=side, target_probs=(0.5,) * 3, draft_probs=(0.4,) * 3,
        overlaps=(0.7,) * 3, dropped_mass=(0.005,) * 4, emitted_argmax=(True, True, False),
        emitted_max_probs=(0.6,) * 3,
    )  # fmt: skip


def _spans_of_a_round() -> tuple[ReadableSpan, ...]:
    kept = InMemorySpanExporter()
    processor = SimpleSpanProcessor(kept)
    processes = Processes(lambda name: Telemetry(name, TelemetrySettings(), "bench", [processor]))
    processes.round(processes.sampled_context())
    return kept.get_finished_spans()


def _per_round_us(name: str, call: Callable[[], object], between: Callable[[], None]) -> Series:
    values = []
    for _ in range(REPEATS + 1):
        began = time.thread_time_ns()
        for _ in range(ROUNDS_PER_REPEAT):
            call()
        values.append((time.thread_time_ns() - began) / 1e3 / ROUNDS_PER_REPEAT)
        between()
    return series(name, "us", values[1:])  # the first repeat warms caches


def measure() -> tuple[list[Series], list[Ratio]]:
    """Costs of a round: unsampled, sampled, metrics; and the two bounds on tracing."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TelemetrySettings(trace_dir=Path(folder))
        processes = Processes(lambda name: Telemetry.create(name, settings, "bench"))
        metrics, record = CoordinatorMetrics(), _record()
        context = processes.sampled_context()
        unsampled = _per_round_us(
            "tracing an unsampled round", lambda: processes.round(None), processes.flush
        )
        sampled = _per_round_us(
            "tracing a sampled round", lambda: processes.round(context), processes.flush
        )
        counted = _per_round_us(
            "metrics of a round", lambda: metrics.observe_round(record), processes.flush
        )
        processes.close()
    spans = _spans_of_a_round()
    exported = _per_round_us("exporting a sampled round", lambda: encode_line(spans), lambda: None)
    share = [
        (SAMPLING_RATIO * (here + there) + (1 - SAMPLING_RATIO) * without) / ROUND_US
        for here, there, without in zip(
            sampled.values, exported.values, unsampled.values, strict=True
        )
    ]
    overhead = series("tracing at 5 % sampling, share of a 5 ms round", "1", share)
    ratios = [
        Ratio(unsampled.name, unsampled, None, "at most", UNSAMPLED_BOUND_US),
        Ratio(overhead.name, overhead, None, "at most", OVERHEAD_BOUND),
    ]
    return [unsampled, sampled, exported, counted, overhead], ratios


def main() -> int:
    """Print one JSON line per measurement and bound; 1 when a bound is missed."""
    measured, ratios = measure()
    common = {"command": "python -m specmesh.bench.tracing", "versions": versions()}
    for record in [*(one.record() for one in measured), *(ratio.record() for ratio in ratios)]:
        sys.stdout.write(json.dumps(record | common) + "\n")
    return 0 if all(ratio.met for ratio in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
