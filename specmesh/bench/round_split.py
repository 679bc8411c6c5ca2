"""Where the time of a round goes: draft, wire, queue, verify, manage, from the traces of a run.

Reads the trace files as they grow, each line once. Times are in milliseconds. The parts of a round
add up to its duration: what neither service reports is the wire's or the coordinator's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specmesh.bench.steady_load import Observed
from specmesh.spans import ROUND, VERIFY, Key
from specmesh.traces.reader import Skipped, StoredSpan, line_spans
from specmesh.traces.trace_file import SUFFIX

PARTS = ("draft", "wire", "queue", "verify", "manage")
FLUSH_TIMEOUT_S = 3.0  # services write their spans every half second
POLL_S = 0.1
_UNIX_OFFSET_S = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class SplitRound:
    """One round, in milliseconds. draft and verify are the services' time without their queues.

    wire: between the coordinator's write and its read of the answer, less what the service reports:
    gRPC both ways. manage: what is left of the round, the coordinator's own work.
    """

    num_draft_tokens: int
    total: float
    draft: float
    wire: float
    queue: float
    verify: float
    manage: float

    @property
    def overhead(self) -> float:
        """Coordinator and gRPC: what a round costs beyond the two services."""
        return self.wire + self.manage


class TraceFolder:
    """Spans of a folder of trace files, read as they are written. Keeps what rounds need only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._spans: dict[str, list[StoredSpan]] = {}

    def read(self) -> None:
        """Take in whole lines that were written since the last call."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    for span in line_spans(line, Skipped()):
                        if span.name in (ROUND, VERIFY):
                            self._spans.setdefault(span.trace_id, []).append(span)

    def spans(self, trace_ids: Iterable[str]) -> list[StoredSpan]:
        """Rounds and verifications of these traces, as far as they are written."""
        return [span for trace_id in trace_ids for span in self._spans.get(trace_id, ())]

    def rounds(self, observed: Observed) -> list[SplitRound]:
        """Rounds of the traced requests that lie in the window.

        Waits, bounded, until the services have written their part; a round whose service has not is
        left out.
        """
        wanted = [stream.trace_id for stream in observed.streams if stream.trace_id is not None]
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while True:
            self.read()
            spans = [span for span in self.spans(wanted) if _within(span, observed)]
            rounds = [span for span in spans if span.name == ROUND]
            verified = {span.parent_id: span for span in spans if span.name == VERIFY}
            whole = [
                span
                for span in rounds
                if span.span_id in verified or not span.count(Key.NUM_DRAFT_TOKENS)
            ]
            if (rounds and len(whole) == len(rounds)) or time.monotonic() > deadline:
                return [split(span, verified.get(span.span_id)) for span in whole]
            time.sleep(POLL_S)


def _within(span: StoredSpan, observed: Observed) -> bool:
    begins, ends = (1e9 * (at + _UNIX_OFFSET_S) for at in (observed.begins_s, observed.ends_s))
    return begins <= span.start_ns and span.end_ns < ends


def split(round_span: StoredSpan, verify_span: StoredSpan | None) -> SplitRound:
    """Parts of one round from the coordinator's span and, where candidates were judged, the
    target's. The span of plain decoding is that of a command, which several rounds may share."""

    def ms(span: StoredSpan, key: str) -> float:
        return (span.number(key) or 0.0) / 1000

    queue = target_queue = ms(round_span, Key.QUEUE_US)
    if verify_span is not None and round_span.count(Key.NUM_DRAFT_TOKENS):
        target_queue = ms(verify_span, Key.QUEUE_US)
        queue = max(target_queue, queue)
    return SplitRound(
        num_draft_tokens=round_span.count(Key.NUM_DRAFT_TOKENS),
        total=round_span.duration_ms,
        draft=max(0.0, ms(round_span, Key.DRAFT_US) - (queue - target_queue)),
        wire=ms(round_span, Key.WIRE_US),
        queue=queue,
        verify=max(0.0, ms(round_span, Key.VERIFY_US) - target_queue),
        manage=ms(round_span, Key.MANAGE_US),
    )


def values(rounds: Sequence[SplitRound], part: str) -> list[float]:
    """One part of every round: a name of `PARTS`, "total" or "overhead"."""
    return [getattr(each, part) for each in rounds]
