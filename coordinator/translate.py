"""Between the protocol's messages and the wire's: commands out, results in.

Owns the mapping to `protos/specmesh/v1/{session,draft,target}.proto`, field by field. Distribution
frames pass through untouched. Knows no links, no states.
"""

from __future__ import annotations

from typing import Any

from coordinator.commands import (
    Ahead,
    Close,
    Closing,
    Command,
    Continuation,
    Deferred,
    Failed,
    Open,
    Opened,
    Outcome,
    Prefix,
    Proposal,
    Propose,
    Verdict,
    Verify,
)
from coordinator.messages import DraftReply, Side, TargetReply
from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh.ledger import Boundaries

_CLOSINGS = {
    target_pb2.CLOSING_RECOVERED: Closing.RECOVERED,
    target_pb2.CLOSING_BONUS: Closing.BONUS,
    target_pb2.CLOSING_STOPPED: Closing.STOPPED,
}


def opening_message(template: session_pb2.OpenSession, command: Open) -> session_pb2.OpenSession:
    """The session's opening with this side's own limit."""
    opening = session_pb2.OpenSession()
    opening.CopyFrom(template)
    opening.max_len = command.max_len
    return opening


def to_wire(
    side: Side,
    session_id: str,
    command: Command,
    opening: session_pb2.OpenSession,
    decide_at: session_pb2.DecideAt,
    trace: session_pb2.TraceContext | None = None,
) -> Any:
    """A DraftCommand or TargetCommand. opening, decide_at: the request's."""
    kind = target_pb2.TargetCommand if side is Side.TARGET else draft_pb2.DraftCommand
    message: Any = kind(
        session_id=session_id, epoch=command.epoch, round=command.round, trace=trace
    )
    if isinstance(command, Open):
        message.open.CopyFrom(opening_message(opening, command))
    elif isinstance(command, Close):
        message.close.SetInParent()
    elif isinstance(command, Propose):
        message.propose.prefix.CopyFrom(_prefix(command.prefix))
        message.propose.num_draft_tokens = command.num_draft_tokens
        message.propose.num_ahead = command.num_ahead
    else:
        _set_verify(message.verify, command, decide_at)
    return message


def _set_verify(
    message: target_pb2.Verify, command: Verify, decide_at: session_pb2.DecideAt
) -> None:
    message.prefix.CopyFrom(_prefix(command.prefix))
    message.candidates.extend(command.candidates)
    message.distributions.extend(command.rows)
    message.decide_at = decide_at
    message.num_steps = 0 if command.candidates else command.num_steps
    message.audit = command.audit


def _prefix(prefix: Prefix) -> session_pb2.PrefixUpdate:
    return session_pb2.PrefixUpdate(
        base_len=prefix.base_len,
        append_from=prefix.append_from,
        append=prefix.append,
        num_accepted=prefix.num_accepted,
        prefix_digest=prefix.digest,
        resync=prefix.resync,
    )


def target_reply(result: target_pb2.TargetResult, report: object) -> TargetReply | None:
    """The event a result is; None for an answer to Close, which nobody waits for."""
    kind = result.WhichOneof("result")
    body: Any
    if kind == "verdict":
        body = _verdict(result.verdict)
    elif kind == "closed":
        return None
    else:
        body = _common_body(kind, result)
    cached = result.timing.cached_tokens
    return TargetReply(result.epoch, result.round, body, cached, report)


def draft_reply(result: draft_pb2.DraftResult, report: object) -> DraftReply | None:
    """The event a result is; None for an answer to Close."""
    kind = result.WhichOneof("result")
    body: Any
    if kind == "proposal":
        body = _proposal(result.proposal)
    elif kind == "ahead":
        body = Ahead(
            tuple(
                Continuation(each.num_accepted, each.closing_token, _proposal(each.proposal))
                for each in result.ahead.continuations
            )
        )
    elif kind == "closed":
        return None
    else:
        body = _common_body(kind, result)
    return DraftReply(result.epoch, result.round, body, report)


def _proposal(message: draft_pb2.Proposal) -> Proposal:
    return Proposal(
        tuple(message.tokens),
        tuple(message.distributions),
        tuple(message.dropped_mass),
        message.is_cut,
    )


def _common_body(kind: str | None, result: Any) -> Opened | Deferred | Failed:
    if kind == "opened":
        return Opened()
    if kind == "deferred":
        return Deferred()
    if kind == "error":
        return failed_of(result.error)
    return Failed("INTERNAL", "a result without content")


def failed_of(error: session_pb2.CommandError) -> Failed:
    """A command's error."""
    return Failed(
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_s=error.retry_after_us / 1e6,
        confirmed_len=error.confirmed_len,
        page_digests=tuple((page.prefix_len, page.digest) for page in error.page_digests),
    )


def _verdict(verdict: target_pb2.Verdict) -> Verdict:
    refuted = verdict.redraw_mismatch if verdict.HasField("redraw_mismatch") else None
    rows = tuple(verdict.distributions)
    if not verdict.tokens:
        logprob_rows = tuple(entry.row for entry in verdict.logprobs)
        return Verdict(None, rows, logprob_rows, refuted, verdict.more, verdict.offset)
    outcome = Outcome(
        num_accepted=verdict.num_accepted,
        tokens=tuple(verdict.tokens),
        closing=_CLOSINGS.get(verdict.closing, Closing.BONUS),
        logprobs=tuple(verdict.logprobs),
        judged=tuple((j.target_prob, j.draft_prob, j.overlap) for j in verdict.judged),
        emitted=tuple((e.is_argmax, e.max_prob) for e in verdict.emitted),
        redraw_mismatch=refuted,
    )
    return Verdict(outcome, rows, more=verdict.more, offset=verdict.offset)


def boundaries_of(message: session_pb2.Boundaries) -> Boundaries:
    """A side's lengths."""
    return Boundaries(message.confirmed_len, message.kv_len, message.allocated_len)
