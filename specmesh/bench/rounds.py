"""What traces know about rounds: forward passes, time outside the models and the services.

Reads the files that the services of the same run wrote. Times are in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specmesh.errors import InvalidRequest, NotReady
from specmesh.spans import PREFILL, PROPOSE, VERIFY, Key
from specmesh.traces.reader import StoredSpan, Trace, read_trace

FLUSH_TIMEOUT_S = 10.0  # services write their spans every half second
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One round or prefill, in milliseconds.

    total: the coordinator's span; draft, target: the services' own spans inside it; draft_forward,
    target_forward: model passes inside those; target_queue: waiting for the target's device.
    """

    is_prefill: bool
    has_draft: bool
    total: float
    draft: float
    target: float
    draft_forward: float
    target_forward: float
    target_queue: float

    @property
    def outside_models(self) -> float:
        """Everything but forward passes: wire, coordinator, sampling, decision, waiting."""
        return self.total - self.draft_forward - self.target_forward

    @property
    def outside_services(self) -> float:
        """Wire and coordinator: what remains when both services' time is taken off."""
        return self.total - self.draft - self.target


def complete_trace(trace_dir: Path, trace_id: str) -> Trace:
    """The trace, once every process has written its part.

    Complete means: the root is there, every round and prefill has its `target.verify`, and every
    round with candidates its `draft.propose`. After a wait, one whose service died before it wrote
    is returned as it is. Raises NotReady when not even the root is there.
    """
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while True:
        trace = _read(trace_dir, trace_id)
        if trace is not None and _is_complete(trace):
            return trace
        if time.monotonic() > deadline:
            if trace is None or trace.root is None:
                raise NotReady(f"trace {trace_id} has not been written to {trace_dir}")
            return trace
        time.sleep(POLL_S)


def _read(trace_dir: Path, trace_id: str) -> Trace | None:
    try:
        return read_trace([trace_dir], trace_id)[0]
    except InvalidRequest:  # not written yet
        return None


def _is_complete(trace: Trace) -> bool:
    if trace.root is None:
        return False
    children = {(span.parent_id, span.name) for span in trace.spans}
    return all(
        # A later part of an answer has no command of its own.
        ((step.span_id, VERIFY) in children or step.count(Key.OFFSET) > 0)
        and ((step.span_id, PROPOSE) in children or not step.count(Key.NUM_DRAFT_TOKENS))
        for step in trace.steps()
    )


def round_times(traces: Sequence[Trace]) -> list[RoundTimes]:
    """Every round and prefill of the traces, in order."""
    return [_times(step, trace) for trace in traces for step in trace.steps()]


def _times(step: StoredSpan, trace: Trace) -> RoundTimes:
    children = [span for span in trace.spans if span.parent_id == step.span_id]
    draft = [span for span in children if span.name == PROPOSE]
    target = [span for span in children if span.name == VERIFY]
    return RoundTimes(
        is_prefill=step.name == PREFILL,
        has_draft=bool(draft) and step.count(Key.NUM_DRAFT_TOKENS) > 0,
        total=step.duration_ms,
        draft=sum(span.duration_ms for span in draft),
        target=sum(span.duration_ms for span in target),
        draft_forward=_sum_ms(draft, Key.FORWARD_US),
        target_forward=_sum_ms(target, Key.FORWARD_US),
        target_queue=_sum_ms(target, Key.QUEUE_US),
    )


def _sum_ms(spans: Sequence[StoredSpan], key: str) -> float:
    return sum(span.count(key) for span in spans) / 1000
