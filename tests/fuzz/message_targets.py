"""Decoders of messages: rows, requests, results and responses, as a peer may have written them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from coordinator.commands import Closing, Outcome
from coordinator.decide import DraftFault, Law, audit_round, decide_round
from coordinator.detokenizer import Detokenizer
from coordinator.messages import Audit, Decide
from coordinator.requests import ModelLimits, Resolver
from coordinator.stops import Output
from kernels.streams import Purpose
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2, target_pb2
from specmesh import wire
from specmesh.config import AdmissionSettings, SpeculationSettings
from specmesh.errors import (
    ContextTooLong,
    CorruptFrame,
    InvalidRequest,
    NumericFault,
    SpecmeshError,
    TooBusy,
)
from specmesh.resume import Resumption
from specmesh.telemetry import Telemetry
from specmesh.tokenizer import Tokenizer
from specmesh.wire_errors import error_from_rpc, status_of
from tests.fuzz.fuzzer import Refused
from tests.fuzz.mutations import mutated_bytes, mutated_message

VOCAB_SIZE = 16


@dataclass
class MessageTarget:
    """One kind of message. use: takes it parsed; what cannot be parsed is refused by protobuf."""

    name: str
    kind: type[Message]
    good: Sequence[bytes]
    use: Callable[[Any], None]
    allowed: tuple[type[Exception], ...]

    def seeds(self) -> Sequence[bytes]:
        """Good inputs."""
        return self.good

    def check(self, content: bytes) -> None:
        """Feed one input."""
        try:
            self.use(self.kind.FromString(content))
        except (DecodeError, *self.allowed) as refusal:
            raise Refused from refusal

    def mutated(self, rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        """A changed input."""
        return mutated_message(rng, self.kind, content, others)


def good_rows() -> list[session_pb2.Distribution]:
    """One row of each encoding."""
    values = np.linspace(1.0, 2.0, VOCAB_SIZE)
    ids = np.array([1, 3, 15], np.uint32)
    rows = []
    for encoding, kind in (
        (session_pb2.ENCODING_DENSE_F32, np.float32),
        (session_pb2.ENCODING_DENSE_F16, np.float16),
        (session_pb2.ENCODING_SPARSE_F32, np.float32),
        (session_pb2.ENCODING_SPARSE_F16, np.float16),
    ):
        is_sparse = encoding >= session_pb2.ENCODING_SPARSE_F32
        rows.append(
            session_pb2.Distribution(
                encoding=encoding,
                vocab_size=VOCAB_SIZE,
                ids=ids.tobytes() if is_sparse else b"",
                values=values[: 3 if is_sparse else VOCAB_SIZE].astype(kind).tobytes(),
            )
        )
    return rows


def row_target() -> MessageTarget:
    """A Distribution frame: what is accepted is a law that can be drawn from."""

    def use(message: session_pb2.Distribution) -> None:
        row = wire.decode(message, VOCAB_SIZE)
        dense = row.dense()
        assert dense.shape == (VOCAB_SIZE,)
        assert bool((dense >= 0).all())
        assert 0.0 < float(dense.double().sum()) < float("inf")
        token_id = row.draw(7, 3, 2, Purpose.PROPOSE)
        assert row.weight(token_id) > 0
        assert wire.decode(wire.encode(row), VOCAB_SIZE).dense().equal(dense)

    good = [row.SerializeToString() for row in good_rows()]
    return MessageTarget("Distribution", session_pb2.Distribution, good, use, (CorruptFrame,))


def decision_target() -> MessageTarget:
    """A verdict's rows and log-probabilities, decided and audited at the coordinator."""

    def use(verdict: target_pb2.Verdict) -> None:
        for is_coupled in (True, False):
            law = Law(5, VOCAB_SIZE, not is_coupled, is_coupled, frozenset({15}), num_logprobs=3)
            rows = tuple(verdict.distributions)
            logprob_rows = tuple(entry.row for entry in verdict.logprobs)
            candidates = (3, 1)[: max(0, len(rows) - 1)]
            if len(rows) != len(candidates) + 1:
                return  # a verdict of this kind is a violation: `coordinator/verdicts.py`
            request = Decide(0, 1, 4, candidates, rows[:-1], rows, logprob_rows)
            outcome = decide_round(law, request)
            assert all(0 <= token < VOCAB_SIZE for token in outcome.tokens)
            told = Outcome(outcome.num_accepted, outcome.tokens, Closing.BONUS)
            audited = audit_round(law, Audit(4, candidates, rows[:-1], rows, told))
            assert not audited.is_mismatch

    logprobs = np.full(VOCAB_SIZE, -np.log(VOCAB_SIZE), np.float32).tobytes()
    good = target_pb2.Verdict(
        distributions=good_rows()[:3],
        logprobs=[session_pb2.TokenLogprobs(row=logprobs)] * 3,
    )
    return MessageTarget(
        "Verdict rows",
        target_pb2.Verdict,
        [good.SerializeToString()],
        use,
        (NumericFault, DraftFault),
    )


def request_target(tokenizer: Tokenizer) -> MessageTarget:
    """A GenerateRequest: what is accepted is in every range, and can be run."""
    limits = ModelLimits(tokenizer.vocab_size, tokenizer.eos_ids, 512, 8)
    resolver = Resolver(
        tokenizer, limits, AdmissionSettings(), SpeculationSettings(), draw_seed=lambda: 1
    )

    def use(request: pb.GenerateRequest) -> None:
        resolved = resolver.resolve(request)
        assert 1 <= resolved.num_samples <= AdmissionSettings().max_samples
        assert resolved.max_tokens >= 1
        assert resolved.max_len <= limits.max_context_len
        assert all(0 <= token < limits.vocab_size for token in resolved.prompt)
        plan = resolved.plan(limits, SpeculationSettings(), max_round_retries=1, max_failovers=1)
        assert len(plan.resume) <= resolved.max_tokens
        for index in range(resolved.num_samples):
            resolved.sample_sampling(index)
        output = Output(resolved.stop_rules, Detokenizer(tokenizer.token_bytes))
        for tokens in (plan.resume, (1, 0xC3, 0xA9)):
            if output.ending is None:
                output.push(tokens)

    good = [
        pb.GenerateRequest(text="hello", max_tokens=5, temperature=0.5, seed=3, stop=["x", "é"]),
        pb.GenerateRequest(
            tokens=pb.TokenPrompt(token_ids=[1, 2, 3]),
            logit_bias={3: 1.0, 4: -2.0},
            logprobs=3,
            n=2,
            stop_token_ids=[9],
            min_tokens=2,
            top_k=4,
            top_p=0.9,
            min_p=0.1,
        ),
        pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]),
            seed=9,
            resume_token_ids=[5, 6, 7],
            resume_round=2,
            rule=session_pb2.DECISION_RULE_RESIDUAL,
            decide_at=session_pb2.DECIDE_AT_COORDINATOR,
            num_draft_tokens=2,
            row_policy=session_pb2.ROW_POLICY_DENSE_F16,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
        ),
    ]
    return MessageTarget(
        "GenerateRequest",
        pb.GenerateRequest,
        [each.SerializeToString() for each in good],
        use,
        (InvalidRequest, ContextTooLong, TooBusy),
    )


def response_target() -> MessageTarget:
    """What a coordinator sends, at the client: never more samples than asked for, no forged end."""

    def use(response: pb.GenerateResponse) -> None:
        state = Resumption(pb.GenerateRequest(text="x", n=2, max_tokens=9))
        started = pb.GenerateResponse(started=pb.Started(seed=3, model="m", max_tokens=9))
        for message in (started, response, response, started):
            passed_on = state.accept(message)
            assert passed_on is None or passed_on.WhichOneof("event")
        if not state.done:
            again = state.next_request()
            assert again.HasField("seed")
            assert again.n == 1

    good = [
        pb.GenerateResponse(chunk=pb.Chunk(index=1, token_ids=[1, 2], text="ab", round=1)),
        pb.GenerateResponse(finished=pb.Finished(index=0, reason=pb.FINISH_REASON_STOP)),
        pb.GenerateResponse(started=pb.Started(seed=3, model="m", max_tokens=9)),
    ]
    return MessageTarget(
        "GenerateResponse",
        pb.GenerateResponse,
        [each.SerializeToString() for each in good],
        use,
        (SpecmeshError,),
    )


def status_target() -> MessageTarget:
    """The details of a failed call: always one of our errors, whatever a peer put there."""

    def use(status: status_pb2.Status) -> None:
        metadata = Metadata(("grpc-status-details-bin", status.SerializeToString()))
        code = grpc.StatusCode.UNAVAILABLE
        error = error_from_rpc(AioRpcError(code, Metadata(), metadata, "details"))
        assert isinstance(error, SpecmeshError)
        status_of(error)

    busy = status_of(TooBusy("full", retry_after_s=1.5))
    bad = status_of(InvalidRequest("no", field="n"))
    assert busy.code == code_pb2.RESOURCE_EXHAUSTED
    good = [busy.SerializeToString(), bad.SerializeToString()]
    return MessageTarget("Status", status_pb2.Status, good, use, ())


class TraceContextTarget:
    """W3C trace context of a call's metadata: garbage is no context, and no error."""

    name = "traceparent"

    def seeds(self) -> Sequence[bytes]:
        """Good inputs."""
        return [b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01", b"vendor=value"]

    def check(self, content: bytes) -> None:
        """Feed one input."""
        text = content.decode("latin-1")
        Telemetry.extract_metadata((("traceparent", text), ("tracestate", text)))
        Telemetry.extract_metadata((("traceparent", content),))

    def mutated(self, rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        """A changed input."""
        return mutated_bytes(rng, content, others)
