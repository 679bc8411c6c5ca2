"""The spans that are recorded: names, attributes, and which hangs under which, in one table.

Owns what a trace looks like. Must not know how a span is made or exported (`specmesh/telemetry.py`)
or where traces are read (`specmesh/traces`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import SpanKind

GENERATE: Final = "specmesh.generate"
PREFILL: Final = "specmesh.prefill"
ROUND: Final = "specmesh.round"
PROPOSE: Final = "draft.propose"
VERIFY: Final = "target.verify"
DRAFT_FORWARD: Final = "draft.forward"
TARGET_FORWARD: Final = "target.forward"


class Key:
    """Attribute keys. Units are UCUM and last in the name where there is one."""

    SERVICE = "specmesh.service"  # repeated on spans: some viewers drop resource attributes
    SESSION_ID = "specmesh.session.id"
    SAMPLE_INDEX = "specmesh.sample.index"
    EPOCH = "specmesh.epoch"
    DRAFT_EPOCH = "specmesh.draft.epoch"
    ROUND = "specmesh.round.index"
    BASE_LEN = "specmesh.base_len"
    # Of a round that is a later part of an answer: tokens of the parts before it. The command has
    # one span, under the round of its first part; it ends with the last.
    OFFSET = "specmesh.part.offset"
    AHEAD = "specmesh.draft.ahead"  # the candidates were drafted before the round began
    NUM_DRAFT_TOKENS = "specmesh.draft.tokens"
    NUM_ACCEPTED = "specmesh.accepted.tokens"
    NUM_EMITTED = "specmesh.emitted.tokens"
    CLOSING = "specmesh.closing"
    RULE = "specmesh.rule"
    DECIDE_AT = "specmesh.decide_at"
    TARGET_PROBS = "specmesh.target.probs"
    DRAFT_PROBS = "specmesh.draft.probs"
    OVERLAPS = "specmesh.overlaps"
    DROPPED_MASS = "specmesh.dropped_mass"
    ENCODING = "specmesh.encoding"
    DRAFT_US = "specmesh.draft.us"
    VERIFY_US = "specmesh.verify.us"
    WIRE_US = "specmesh.wire.us"
    QUEUE_US = "specmesh.queue.us"
    FORWARD_US = "specmesh.forward.us"
    MANAGE_US = "specmesh.manage.us"
    DRAFT_SENT_BYTES = "specmesh.draft.sent.bytes"
    DRAFT_RECEIVED_BYTES = "specmesh.draft.received.bytes"
    TARGET_SENT_BYTES = "specmesh.target.sent.bytes"
    TARGET_RECEIVED_BYTES = "specmesh.target.received.bytes"
    # [confirmed_len, kv_len, allocated_len] of a side.
    DRAFT_BEFORE = "specmesh.draft.boundaries.before"
    DRAFT_AFTER = "specmesh.draft.boundaries.after"
    TARGET_BEFORE = "specmesh.target.boundaries.before"
    TARGET_AFTER = "specmesh.target.boundaries.after"
    BEFORE = "specmesh.boundaries.before"
    AFTER = "specmesh.boundaries.after"
    FALLBACK = "specmesh.fallback.reason"
    EXPECTED_TOKENS = "specmesh.expected.tokens"
    REDRAW_MISMATCH = "specmesh.redraw.mismatch"
    AUDITED = "specmesh.audited"
    AUDIT_MISMATCH = "specmesh.audit.mismatch"
    AUDIT_MARGIN = "specmesh.audit.margin"
    RETRIES = "specmesh.retries"
    DRAFT_REPLICA = "specmesh.replica.draft"
    TARGET_REPLICA = "specmesh.replica.target"
    BATCH_SIZE = "specmesh.batch.size"
    BATCH_ROWS = "specmesh.batch.rows"
    NUM_STEPS = "specmesh.steps"
    CACHED_TOKENS = "specmesh.cached.tokens"
    DEFERRED = "specmesh.deferred"
    DROPPED_LINKS = "specmesh.links.dropped"
    ERROR_TYPE = "error.type"
    NUM_ROUNDS = "specmesh.rounds"
    # Content: only with `record_content`.
    CANDIDATE_IDS = "specmesh.candidate.ids"
    EMITTED_IDS = "specmesh.emitted.ids"
    CANDIDATE_TEXTS = "specmesh.candidate.texts"
    EMITTED_TEXTS = "specmesh.emitted.texts"
    # OpenTelemetry GenAI conventions (open-telemetry/semantic-conventions-genai v0.1.0).
    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_SEED = "gen_ai.request.seed"
    REQUEST_STREAM = "gen_ai.request.stream"
    REQUEST_CHOICES = "gen_ai.request.choice.count"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One row of the table.

    parents: the spans it may hang under; empty: it may be the root of a trace. links: the spans a
    batch span points to. required: keys present on every ended span without an error; optional:
    keys that may be there. No other key may be.
    """

    service: str
    kind: SpanKind
    parents: tuple[str, ...]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    links: tuple[str, ...] = ()


_COMMAND = frozenset(
    {
        Key.SESSION_ID,
        Key.EPOCH,
        Key.ROUND,
        Key.BASE_LEN,
        Key.NUM_DRAFT_TOKENS,
        Key.QUEUE_US,
        Key.FORWARD_US,
        Key.BATCH_SIZE,
        Key.NUM_STEPS,
        Key.BEFORE,
        Key.AFTER,
    }
)
_STEP = frozenset({Key.BATCH_SIZE, Key.BATCH_ROWS})
_ROUND = frozenset(
    {
        Key.SESSION_ID,
        Key.SAMPLE_INDEX,
        Key.EPOCH,
        Key.ROUND,
        Key.BASE_LEN,
        Key.NUM_DRAFT_TOKENS,
        Key.NUM_ACCEPTED,
        Key.NUM_EMITTED,
        Key.CLOSING,
        Key.DRAFT_US,
        Key.VERIFY_US,
        Key.WIRE_US,
        Key.QUEUE_US,
        Key.MANAGE_US,
        Key.TARGET_SENT_BYTES,
        Key.TARGET_RECEIVED_BYTES,
        Key.TARGET_BEFORE,
        Key.TARGET_AFTER,
    }
)
_ROUND_OPTIONAL = frozenset(
    {
        Key.TARGET_PROBS,
        Key.DRAFT_PROBS,
        Key.OVERLAPS,
        Key.DROPPED_MASS,
        Key.ENCODING,
        Key.FALLBACK,
        Key.EXPECTED_TOKENS,
        Key.REDRAW_MISMATCH,
        Key.AUDITED,
        Key.AUDIT_MISMATCH,
        Key.AUDIT_MARGIN,
        Key.RETRIES,
        Key.OFFSET,
        Key.AHEAD,
        Key.DRAFT_REPLICA,
        Key.TARGET_REPLICA,
        Key.DRAFT_EPOCH,
        Key.DRAFT_SENT_BYTES,
        Key.DRAFT_RECEIVED_BYTES,
        Key.DRAFT_BEFORE,
        Key.DRAFT_AFTER,
        Key.CACHED_TOKENS,
        Key.CANDIDATE_IDS,
        Key.EMITTED_IDS,
        Key.CANDIDATE_TEXTS,
        Key.EMITTED_TEXTS,
        Key.ERROR_TYPE,
    }
)

SPANS: Final[Mapping[str, SpanSpec]] = {
    GENERATE: SpanSpec(
        "coordinator",
        SpanKind.SERVER,
        (),
        frozenset(
            {
                Key.OPERATION,
                Key.PROVIDER,
                Key.REQUEST_MODEL,
                Key.REQUEST_MAX_TOKENS,
                Key.REQUEST_TEMPERATURE,
                Key.REQUEST_SEED,
                Key.REQUEST_STREAM,
                Key.RESPONSE_ID,
                Key.RESPONSE_MODEL,
                Key.FINISH_REASONS,
                Key.INPUT_TOKENS,
                Key.OUTPUT_TOKENS,
                Key.RULE,
                Key.DECIDE_AT,
                Key.NUM_ROUNDS,
                Key.NUM_DRAFT_TOKENS,
                Key.NUM_ACCEPTED,
            }
        ),
        frozenset(
            {
                Key.REQUEST_TOP_P,
                Key.REQUEST_TOP_K,
                Key.REQUEST_CHOICES,
                Key.FIRST_CHUNK_S,
                Key.CACHE_READ_TOKENS,
                Key.QUEUE_US,
                Key.ERROR_TYPE,
            }
        ),
    ),
    PREFILL: SpanSpec("coordinator", SpanKind.INTERNAL, (GENERATE,), _ROUND, _ROUND_OPTIONAL),
    ROUND: SpanSpec("coordinator", SpanKind.INTERNAL, (GENERATE,), _ROUND, _ROUND_OPTIONAL),
    PROPOSE: SpanSpec(
        "draft",
        SpanKind.SERVER,
        (ROUND, PREFILL),
        _COMMAND,
        frozenset(
            {Key.CACHED_TOKENS, Key.DEFERRED, Key.DROPPED_MASS, Key.ENCODING, Key.ERROR_TYPE}
        ),
    ),
    VERIFY: SpanSpec(
        "target",
        SpanKind.SERVER,
        (ROUND, PREFILL),
        _COMMAND,
        frozenset(
            {
                Key.CACHED_TOKENS,
                Key.DEFERRED,
                Key.NUM_ACCEPTED,
                Key.NUM_EMITTED,
                Key.CLOSING,
                Key.DECIDE_AT,
                Key.REDRAW_MISMATCH,
                Key.AUDITED,
                Key.ERROR_TYPE,
            }
        ),
    ),
    DRAFT_FORWARD: SpanSpec(
        "draft", SpanKind.INTERNAL, (), _STEP, frozenset({Key.DROPPED_LINKS}), (PROPOSE,)
    ),
    TARGET_FORWARD: SpanSpec(
        "target", SpanKind.INTERNAL, (), _STEP, frozenset({Key.DROPPED_LINKS}), (VERIFY,)
    ),
}
