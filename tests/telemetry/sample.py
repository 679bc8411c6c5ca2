"""A request's spans as three processes would write them, with times and outcomes given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.trace import Span

from specmesh.config import TelemetrySettings
from specmesh.ledger import Boundaries
from specmesh.round_record import RoundRecord, SideRecord
from specmesh.spans import (
    DRAFT_FORWARD,
    GENERATE,
    PREFILL,
    PROPOSE,
    ROUND,
    TARGET_FORWARD,
    VERIFY,
    Key,
)
from specmesh.telemetry import Telemetry

START_NS = 1_790_000_000_000_000_000
MS = 1_000_000
PROMPT_LEN = 12
# (k, accepted) of each round; (0, 0) with a reason is a fallback round.
OUTCOMES = ((4, 2), (4, 4), (4, 0), (3, 3), (4, 1), (0, 0), (2, 2), (4, 3))


@dataclass
class Sample:
    """What was written: the trace id and the totals that a reader must find."""

    trace_id: str
    num_output_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted: int


def write_sample(
    folder: Path,
    outcomes: Sequence[tuple[int, int]] = OUTCOMES,
    *,
    content: bool = False,
    request_id: str = "req-1",
) -> Sample:
    """Write one file per process into `folder` and return what is in them."""
    settings = TelemetrySettings(trace_dir=folder, record_content=content)
    tels = {
        name: Telemetry.create(name, settings, f"{name}-0")
        for name in ("coordinator", "draft", "target")
    }
    sample = _Writer(tels, content).write(outcomes, request_id)
    for tel in tels.values():
        tel.shutdown()
    return sample


class _Writer:
    def __init__(self, tels: dict[str, Telemetry], content: bool) -> None:
        self._tels = tels
        self._content = content
        self._now_ns = START_NS

    def write(self, outcomes: Sequence[tuple[int, int]], request_id: str) -> Sample:
        tel = self._tels["coordinator"]
        root = tel.start(GENERATE, Context(), _request(request_id), START_NS)
        context = tel.context(root)
        confirmed = PROMPT_LEN
        records = []
        for index, (num_drafted, num_accepted) in enumerate(((0, 0), *outcomes)):
            name = PREFILL if index == 0 else ROUND
            span = tel.start(name, context, None, self._now_ns)
            record = self._round(span, index, confirmed, num_drafted, num_accepted)
            span.set_attributes(record.attributes())
            if self._content:
                span.set_attributes(_content(record))
            self._now_ns += MS
            span.end(self._now_ns)
            records.append(record)
            confirmed += record.num_emitted
        sample = Sample(
            trace_id=tel.trace_id(root),
            num_output_tokens=confirmed - PROMPT_LEN,
            num_rounds=len(outcomes),
            num_draft_tokens=sum(record.num_draft_tokens for record in records),
            num_accepted=sum(record.num_accepted for record in records),
        )
        root.set_attributes(
            {
                Key.FINISH_REASONS: ("stop",),
                Key.OUTPUT_TOKENS: sample.num_output_tokens,
                Key.NUM_ROUNDS: sample.num_rounds,
                Key.NUM_DRAFT_TOKENS: sample.num_draft_tokens,
                Key.NUM_ACCEPTED: sample.num_accepted,
            }
        )
        root.end(self._now_ns)
        return sample

    def _round(
        self, span: Span, index: int, confirmed: int, num_drafted: int, num_accepted: int
    ) -> RoundRecord:
        prefill = index == 0
        kv_len = 0 if prefill else confirmed - 1
        after_len = confirmed + num_accepted + 1
        closing = "plain" if not num_drafted else "bonus"
        if num_accepted < num_drafted:
            closing = "recovered"
        draft = None
        if num_drafted or prefill:
            draft = SideRecord(
                "draft-0", 1, Boundaries(confirmed - (0 if prefill else 1), kv_len, 64),
                Boundaries(confirmed, confirmed, 64),
                total_us=400 + 900 * num_drafted, service_us=100 + 900 * num_drafted,
                queue_us=80, forward_us=850 * num_drafted, sent_bytes=90, received_bytes=2100,
            )  # fmt: skip
            self._command(PROPOSE, DRAFT_FORWARD, span, index, draft, num_drafted, num_drafted)
        target = SideRecord(
            "target-0", 1, Boundaries(confirmed, kv_len, 64),
            Boundaries(after_len, after_len - 1, 64), total_us=9000 + 2500 * prefill,
            service_us=8600 + 2400 * prefill, queue_us=200, forward_us=8100 + 2400 * prefill,
            sent_bytes=2200, received_bytes=150,
        )  # fmt: skip
        self._command(VERIFY, TARGET_FORWARD, span, index, target, num_drafted, 1)
        num_judged = min(num_drafted, num_accepted + 1)
        return RoundRecord(
            "session-1", index, confirmed, is_prefill=prefill,
            num_draft_tokens=num_drafted, num_judged=num_judged, num_accepted=num_accepted,
            num_emitted=num_accepted + 1,
            num_committed=num_accepted + 1, closing=closing,
            fallback="draft_deadline" if not (num_drafted or prefill) else "",
            encoding="sparse_f32" if num_drafted else "",
            expected_tokens=1.9 if num_drafted else None,
            manage_us=350, target=target, draft=draft,
            target_probs=[0.61, 0.42, 0.07, 0.33][:num_judged],
            draft_probs=[0.55, 0.5, 0.36, 0.2][:num_judged],
            overlaps=[0.83, 0.71, 0.64, 0.58][:num_judged],
            dropped_mass=[0.004, 0.008, 0.002, 0.006][:num_drafted],
            emitted_argmax=[True] * (num_accepted + 1),
            emitted_max_probs=[0.6] * (num_accepted + 1),
        )  # fmt: skip

    def _command(
        self, name: str, forward: str, parent: Span, index: int, side: SideRecord,
        num_drafted: int, num_steps: int,
    ) -> None:  # fmt: skip
        tel = self._tels["draft" if name == PROPOSE else "target"]
        wire_ns = side.wire_us * 1000 // 2
        start_ns = self._now_ns + wire_ns
        command = tel.start(name, tel.extract(tel.inject(parent)), None, start_ns)
        step_ns = side.forward_us * 1000 // max(1, num_steps)
        for step in range(num_steps):
            begin = start_ns + side.queue_us * 1000 + step * step_ns
            tel.record_batch(
                forward, [command], begin, begin + step_ns, {Key.BATCH_SIZE: 3, Key.BATCH_ROWS: 7}
            )
        assert side.before is not None
        assert side.after is not None
        command.set_attributes(
            {
                Key.SESSION_ID: "session-1", Key.EPOCH: side.epoch, Key.ROUND: index,
                Key.BASE_LEN: side.before.confirmed_len, Key.NUM_DRAFT_TOKENS: num_drafted,
                Key.QUEUE_US: side.queue_us, Key.FORWARD_US: side.forward_us, Key.BATCH_SIZE: 3,
                Key.NUM_STEPS: num_steps,
                Key.BEFORE: (side.before.confirmed_len, side.before.kv_len, 64),
                Key.AFTER: (side.after.confirmed_len, side.after.kv_len, 64),
            }
        )  # fmt: skip
        command.end(start_ns + side.service_us * 1000)
        self._now_ns += side.total_us * 1000


def _request(request_id: str) -> dict[str, str | int | float | bool]:
    return {
        Key.OPERATION: "text_completion", Key.PROVIDER: "specmesh",
        Key.REQUEST_MODEL: "SmolLM2-135M-Instruct", Key.REQUEST_MAX_TOKENS: 64,
        Key.REQUEST_TEMPERATURE: 1.0, Key.REQUEST_SEED: 7, Key.REQUEST_STREAM: True,
        Key.RESPONSE_ID: request_id, Key.RESPONSE_MODEL: "SmolLM2-135M-Instruct",
        Key.INPUT_TOKENS: PROMPT_LEN, Key.RULE: "residual", Key.DECIDE_AT: "target",
    }  # fmt: skip


_WORDS = (" the", " cat", " sat", " on", " a", " mat", ",", " </script><b>&", "\n", " Grüße", " 猫")


def _content(record: RoundRecord) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
    first = record.base_len
    candidates = tuple(range(first, first + record.num_draft_tokens))
    emitted = (*candidates[: record.num_accepted], 1000 + first)
    return {
        Key.CANDIDATE_IDS: candidates,
        Key.EMITTED_IDS: emitted,
        Key.CANDIDATE_TEXTS: tuple(_WORDS[token % len(_WORDS)] for token in candidates),
        Key.EMITTED_TEXTS: tuple(_WORDS[token % len(_WORDS)] for token in emitted),
    }
