"""The record of one round: enough to audit it afterwards, whether or not the round is traced.

The coordinator fills one per round and hands the same object to the tracer (span attributes) and
to the metrics (counters), so that their sums agree by construction. Knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specmesh.ledger import Boundaries
from specmesh.spans import Key

AttributeValue = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(slots=True)
class SideRecord:
    """What one side (draft or target) did in a round. Times in microseconds.

    total_us: from the coordinator's write to its read of the answer. service_us: the part that the
    service itself reports, queue_us and forward_us inside it. total_us - service_us is the wire's.
    """

    replica: str = ""
    epoch: int = 0
    before: Boundaries | None = None
    after: Boundaries | None = None
    total_us: int = 0
    service_us: int = 0
    queue_us: int = 0
    forward_us: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    cached_tokens: int = 0

    @property
    def wire_us(self) -> int:
        """Time spent outside the service, in microseconds. Never negative."""
        return max(0, self.total_us - self.service_us)


@dataclass(slots=True)
class RoundRecord:
    """One round of one session, or (is_prefill) the prompt's, which counts as no round.

    num_emitted: tokens decided, before stop rules cut any; num_committed: tokens that reached the
    caller. num_judged: candidates judged (the accepted ones and the first rejected). closing:
    "recovered", "bonus", "stopped" (an accepted stop token), or "plain" for every round with k = 0.
    rule: "residual", "coupled" or "greedy". target_probs, draft_probs, overlaps: per judged
    candidate p(x), q(x) and sum(min(p, q)). emitted_argmax, emitted_max_probs: per emitted token.
    draft is None when no draft took part; `fallback` then says why, unless k = 0 was chosen.
    offset: tokens of its command to the target that rounds before this one brought. audit_near_tie:
    a mismatch that rounding explains, as whoever audited says; any other is an alarm. has_own_seed:
    the noise was drawn for this call; without it the round says nothing about the output law.
    was_ahead: the candidates were drafted ahead; what the draft side says is then of nothing.
    """

    session_id: str
    round_index: int
    base_len: int
    sample_index: int = 0
    has_own_seed: bool = True
    is_prefill: bool = False
    rule: str = "residual"
    num_draft_tokens: int = 0
    num_judged: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_committed: int = 0
    closing: str = "plain"
    fallback: str = ""
    encoding: str = ""
    expected_tokens: float | None = None
    duration_us: int = 0
    manage_us: int = 0
    target: SideRecord = field(default_factory=SideRecord)
    draft: SideRecord | None = None
    target_probs: Sequence[float] = ()
    draft_probs: Sequence[float] = ()
    overlaps: Sequence[float] = ()
    dropped_mass: Sequence[float] = ()
    emitted_argmax: Sequence[bool] = ()
    emitted_max_probs: Sequence[float] = ()
    redraw_mismatch: int | None = None
    audited: bool = False
    audit_mismatch: bool = False
    audit_margin: float | None = None
    audit_near_tie: bool = False
    num_retries: int = 0
    offset: int = 0
    was_ahead: bool = False

    def attributes(self) -> dict[str, AttributeValue]:
        """Attributes of `specmesh.round` and `specmesh.prefill`. Call for sampled rounds only."""
        target, draft = self.target, self.draft
        found: dict[str, AttributeValue] = {
            Key.SESSION_ID: self.session_id,
            Key.SAMPLE_INDEX: self.sample_index,
            Key.EPOCH: target.epoch,
            Key.ROUND: self.round_index,
            Key.BASE_LEN: self.base_len,
            Key.NUM_DRAFT_TOKENS: self.num_draft_tokens,
            Key.NUM_ACCEPTED: self.num_accepted,
            Key.NUM_EMITTED: self.num_emitted,
            Key.CLOSING: self.closing,
            Key.DRAFT_US: draft.service_us if draft else 0,
            Key.VERIFY_US: target.service_us,
            Key.WIRE_US: target.wire_us + (draft.wire_us if draft else 0),
            Key.QUEUE_US: target.queue_us + (draft.queue_us if draft else 0),
            Key.MANAGE_US: self.manage_us,
            Key.TARGET_SENT_BYTES: target.sent_bytes,
            Key.TARGET_RECEIVED_BYTES: target.received_bytes,
            Key.TARGET_BEFORE: _lengths(target.before),
            Key.TARGET_AFTER: _lengths(target.after),
            Key.TARGET_REPLICA: target.replica,
        }
        if draft is not None:
            found[Key.DRAFT_REPLICA] = draft.replica
            found[Key.DRAFT_EPOCH] = draft.epoch
        if draft is not None and not self.was_ahead:  # else nothing was waited for
            found[Key.DRAFT_SENT_BYTES] = draft.sent_bytes
            found[Key.DRAFT_RECEIVED_BYTES] = draft.received_bytes
            found[Key.DRAFT_BEFORE] = _lengths(draft.before)
            found[Key.DRAFT_AFTER] = _lengths(draft.after)
        found.update(self._present())
        return found

    def _present(self) -> Mapping[str, AttributeValue]:
        """Optional attributes that have a value."""
        optional: tuple[tuple[str, AttributeValue | None], ...] = (
            (Key.TARGET_PROBS, self.target_probs or None),
            (Key.DRAFT_PROBS, self.draft_probs or None),
            (Key.OVERLAPS, self.overlaps or None),
            (Key.DROPPED_MASS, self.dropped_mass or None),
            (Key.ENCODING, self.encoding or None),
            (Key.FALLBACK, self.fallback or None),
            (Key.EXPECTED_TOKENS, self.expected_tokens),
            (Key.REDRAW_MISMATCH, self.redraw_mismatch),
            (Key.AUDITED, self.audited or None),
            (Key.AUDIT_MISMATCH, self.audit_mismatch if self.audited else None),
            (Key.AUDIT_MARGIN, self.audit_margin),
            (Key.RETRIES, self.num_retries or None),
            (Key.OFFSET, self.offset or None),
            (Key.AHEAD, self.was_ahead or None),
            (Key.CACHED_TOKENS, self.target.cached_tokens or None),
        )
        return {key: value for key, value in optional if value is not None}


def content_attributes(
    candidates: Sequence[int], tokens: Sequence[int], text_of: Callable[[int], str]
) -> dict[str, AttributeValue]:
    """Ids and texts of candidates and emitted tokens, for spans that may hold content."""
    return {
        Key.CANDIDATE_IDS: tuple(candidates),
        Key.EMITTED_IDS: tuple(tokens),
        Key.CANDIDATE_TEXTS: tuple(text_of(token) for token in candidates),
        Key.EMITTED_TEXTS: tuple(text_of(token) for token in tokens),
    }


def _lengths(boundaries: Boundaries | None) -> tuple[int, ...]:
    if boundaries is None:
        return ()
    return boundaries.confirmed_len, boundaries.kv_len, boundaries.allocated_len
