"""The public API: `GenerationService` of protos/specmesh/v1/generation.proto.

Owns the life of a call: authenticate, validate, admit, run the samples, stream, trace, count. A
caller that goes away or runs out of time ends its samples at once, which frees their pages on both
services. Errors are raised as specmesh/errors.py; `specmesh/wire_errors.py` turns them into
statuses. How a sample runs is `coordinator/driver.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace import Span

from coordinator.admission import Admission
from coordinator.decide import Law
from coordinator.detokenizer import Detokenizer
from coordinator.driver import Driver, SessionWire
from coordinator.fleet import Fleet
from coordinator.policy import SessionPolicy, SharedPolicy
from coordinator.protocol import Session
from coordinator.records import RoundRecorder, SampleFacts
from coordinator.requests import ModelLimits, Resolved, Resolver
from coordinator.stops import Output
from coordinator.stream import Ended, OutputStream
from coordinator.tenants import Tenants
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc, session_pb2
from specmesh.config import CoordinatorSettings
from specmesh.coordinator_metrics import CoordinatorMetrics, RequestRecord
from specmesh.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    NotReady,
    SpecmeshError,
    TooBusy,
)
from specmesh.logs import SessionLogger
from specmesh.spans import GENERATE, Key
from specmesh.telemetry import Telemetry, installed_version
from specmesh.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
BIG_PROMPT_BYTES = 16 << 10  # tokenized on a thread, so that other streams go on meanwhile
_MAX_SIGNED = (1 << 63) - 1  # OpenTelemetry integers are signed

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every request uses. executor: where decisions are computed."""

    settings: CoordinatorSettings
    tokenizer: Tokenizer
    fleet: Fleet
    admission: Admission
    policy: SharedPolicy
    telemetry: Telemetry
    metrics: CoordinatorMetrics
    tenants: Tenants
    executor: Executor


@dataclass(slots=True)
class _Call:
    """One request while it runs."""

    request_id: str
    resolved: Resolved
    span: Span
    arrived_s: float
    admitted_s: float
    stream: OutputStream
    drivers: list[Driver]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves the public API from one coordinator replica."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._calls: dict[str, _Call] = {}

    async def GetInfo(
        self, request: pb.GenerationServiceGetInfoRequest, context: Context
    ) -> pb.GenerationServiceGetInfoResponse:
        """Models, version and load."""
        parts = self._parts
        parts.tenants.authenticate(_metadata(context))
        admission = parts.settings.admission
        return pb.GenerationServiceGetInfoResponse(
            target=parts.fleet.require_target(),
            draft=parts.fleet.draft_info,
            version=installed_version(),
            num_running=parts.admission.num_running,
            num_waiting=parts.admission.num_waiting,
            max_running=admission.max_running,
            max_waiting=admission.max_waiting,
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one request: Started, chunks, one Finished per sample."""
        parts = self._parts
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        metadata = _metadata(context)
        span = parts.telemetry.start(GENERATE, Telemetry.extract_metadata(metadata))
        call: _Call | None = None
        try:
            tenant = parts.tenants.authenticate(metadata)
            resolved = await self._resolve(request, tenant)
            async with parts.admission.admit(tenant, resolved.num_samples):
                call = self._open(resolved, span, arrived_s, loop.time())
                await context.send_initial_metadata(_initial_metadata(call, parts.telemetry))
                # Closed here and now, so that a caller who leaves ends its samples at once.
                async with contextlib.aclosing(self._run(call, context)) as messages:
                    async for message in messages:
                        yield message
        except SpecmeshError as error:
            self._refused(error, call)
            parts.telemetry.fail(span, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            parts.telemetry.fail(span, _why_gone(context))
            raise
        finally:
            if call is not None:
                self._close(call)
            span.end()

    def cancel_all(self, error: SpecmeshError) -> None:
        """End every running request with this error."""
        for call in list(self._calls.values()):
            for driver in call.drivers:
                driver.cancel(error)

    # ------------------------------------------------------------ a request's life

    async def _resolve(self, request: pb.GenerateRequest, tenant: str) -> Resolved:
        resolver = self._resolver()
        if request.ByteSize() > BIG_PROMPT_BYTES:
            with self._parts.admission.preparing(tenant):
                return await asyncio.to_thread(resolver.resolve, request)
        return resolver.resolve(request)

    def _resolver(self) -> Resolver:
        parts = self._parts
        return Resolver(
            parts.tokenizer,
            self._limits(),
            parts.settings.admission,
            parts.settings.speculation,
            draw_seed=lambda: secrets.randbits(64),
        )

    def _limits(self) -> ModelLimits:
        fleet = self._parts.fleet
        target, draft = fleet.require_target(), fleet.draft_info
        most = min(
            self._parts.settings.speculation.max_num_draft_tokens, target.max_num_draft_tokens
        )
        if draft is not None:
            most = min(most, draft.max_num_draft_tokens)
        return ModelLimits(
            vocab_size=target.vocab_size,
            eos_ids=tuple(target.eos_token_ids),
            max_context_len=fleet.max_context_len,
            max_num_draft_tokens=most,
            max_message_bytes=min(
                self._parts.settings.server.max_message_bytes, fleet.max_message_bytes
            ),
        )

    def _open(self, resolved: Resolved, span: Span, arrived_s: float, admitted_s: float) -> _Call:
        parts = self._parts
        admission = parts.settings.admission
        stream = OutputStream(
            resolved.num_samples,
            admission.max_unread_chunks,
            admission.slow_reader_s,
            self._text_of,
        )
        call = _Call(
            secrets.token_hex(8), resolved, span, arrived_s, admitted_s, stream, drivers=[]
        )
        call.drivers.extend(self._driver(call, index) for index in range(resolved.num_samples))
        self._calls[call.request_id] = call
        if span.is_recording():
            self._describe(call)
        return call

    def _text_of(self, token_id: int) -> str:
        content = self._parts.tokenizer.token_bytes(token_id, skip_special=False)
        return content.decode("utf-8", errors="replace")

    def _driver(self, call: _Call, index: int) -> Driver:
        parts, resolved = self._parts, call.resolved
        settings = parts.settings
        sampling = resolved.sample_sampling(index)
        plan = resolved.plan(
            self._limits(),
            settings.speculation,
            max_round_retries=settings.links.max_round_retries,
            max_failovers=settings.links.max_failovers,
        )
        policy = SessionPolicy(parts.policy)
        output = Output(resolved.stop_rules, Detokenizer(parts.tokenizer.token_bytes))
        session_id = f"{call.request_id}-{index}"
        is_coupled = resolved.rule == session_pb2.DECISION_RULE_COUPLED
        law = Law(
            seed=sampling.seed,
            vocab_size=plan.vocab_size,
            is_greedy=sampling.temperature == 0.0,
            is_coupled=is_coupled,
            stop_ids=plan.stop_ids,
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        )
        opening = session_pb2.OpenSession(
            sampling=sampling,
            rule=resolved.rule,
            prompt_len=len(resolved.prompt),
            row_policy=resolved.row_policy,
            vocab_hash=parts.fleet.require_target().vocab_hash,
        )
        recorder = RoundRecorder(
            parts.telemetry,
            parts.metrics,
            policy,
            SessionLogger(logger, session_id, call.span),
            Telemetry.context(call.span),
            SampleFacts(session_id, index, resolved.has_own_seed),
            self._text_of if parts.telemetry.record_content else None,
        )
        return Driver(
            session_id,
            Session(plan, output, policy.choose),
            SessionWire(opening, resolved.decide_at, law),
            parts.fleet,
            settings.links,
            recorder,
            call.stream.sink(index),
            parts.executor,
        )

    async def _run(
        self, call: _Call, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        stream, handler = call.stream, asyncio.current_task()

        def resume() -> None:
            for driver in call.drivers:
                driver.resume()

        def abandon(error: SpecmeshError) -> None:
            for driver in call.drivers:
                driver.cancel(error)
            if handler is not None:
                handler.cancel()  # it waits for a reader that does not read

        stream.connect(resume, abandon)
        try:
            for driver in call.drivers:
                driver.start()
            yield pb.GenerateResponse(started=self._started(call))
            while (message := await stream.next()) is not None:
                yield message
        finally:
            stream.close()
            gone = _why_gone(context)
            for driver in call.drivers:
                driver.cancel(gone)

    def _started(self, call: _Call) -> pb.Started:
        resolved = call.resolved
        return pb.Started(
            request_id=call.request_id,
            seed=resolved.seed,
            model=self._parts.settings.model_name,
            rule=resolved.rule,
            prompt_tokens=len(resolved.prompt),
            trace_id=self._parts.telemetry.trace_id(call.span) if call.span.is_recording() else "",
            decide_at=resolved.decide_at,
            max_tokens=resolved.max_tokens,
        )

    # ------------------------------------------------------------ what is told of it

    def _refused(self, error: SpecmeshError, call: _Call | None) -> None:
        if call is None and isinstance(error, TooBusy | NotReady):
            self._parts.metrics.refused.labels(error.reason).inc()
        if isinstance(error, InternalError):
            logger.error("request failed", extra={"reason": error.reason, "detail": error.message})

    def _describe(self, call: _Call) -> None:
        resolved, span = call.resolved, call.span
        sampling = resolved.sampling
        is_coupled = resolved.rule == session_pb2.DECISION_RULE_COUPLED
        at_target = resolved.decide_at == session_pb2.DECIDE_AT_TARGET
        model = self._parts.settings.model_name
        span.set_attributes(
            {
                Key.OPERATION: resolved.operation,
                Key.PROVIDER: "specmesh",
                Key.REQUEST_MODEL: model,
                Key.RESPONSE_MODEL: model,
                Key.RESPONSE_ID: call.request_id,
                Key.REQUEST_MAX_TOKENS: resolved.max_tokens,
                Key.REQUEST_TEMPERATURE: sampling.temperature,
                Key.REQUEST_TOP_P: sampling.top_p,
                Key.REQUEST_TOP_K: sampling.top_k,
                Key.REQUEST_SEED: (
                    resolved.seed if resolved.seed <= _MAX_SIGNED else str(resolved.seed)
                ),
                Key.REQUEST_STREAM: True,
                Key.REQUEST_CHOICES: resolved.num_samples,
                Key.RULE: "coupled" if is_coupled else "residual",
                Key.DECIDE_AT: "target" if at_target else "coordinator",
                Key.QUEUE_US: round((call.admitted_s - call.arrived_s) * 1e6),
            }
        )

    def _close(self, call: _Call) -> None:
        """Count and describe the end, however it came."""
        self._calls.pop(call.request_id, None)
        now = asyncio.get_running_loop().time()
        stream, resolved = call.stream, call.resolved
        first = stream.first_chunk_s
        first_token_s = None if first is None else first - call.arrived_s
        for ended in stream:
            self._parts.metrics.observe_request(
                RequestRecord(
                    operation=resolved.operation,
                    model=self._parts.settings.model_name,
                    finish=_finish_label(ended),
                    num_prompt_tokens=ended.stats.prompt_tokens,
                    num_output_tokens=ended.stats.completion_tokens,
                    num_cached_tokens=ended.stats.cached_tokens,
                    duration_s=now - call.arrived_s,
                    queue_s=call.admitted_s - call.arrived_s,
                    first_token_s=first_token_s,
                    error=ended.error.reason if ended.error is not None else "",
                )
            )
        if not call.span.is_recording():
            return
        all_stats = [ended.stats for ended in stream]
        call.span.set_attributes(
            {
                Key.FINISH_REASONS: [_finish_label(ended) for ended in stream],
                Key.INPUT_TOKENS: len(resolved.prompt),
                Key.OUTPUT_TOKENS: sum(stats.completion_tokens for stats in all_stats),
                Key.CACHE_READ_TOKENS: sum(stats.cached_tokens for stats in all_stats),
                Key.NUM_ROUNDS: sum(stats.num_rounds for stats in all_stats),
                Key.NUM_DRAFT_TOKENS: sum(stats.num_draft_tokens for stats in all_stats),
                Key.NUM_ACCEPTED: sum(stats.num_accepted for stats in all_stats),
            }
        )
        if first_token_s is not None:
            call.span.set_attribute(Key.FIRST_CHUNK_S, first_token_s)


def _finish_label(ended: Ended) -> str:
    if ended.finish is not None:
        return ended.finish.reason.value
    gone = isinstance(ended.error, Cancelled | DeadlineExceeded)
    return "cancelled" if gone else "error"


def _metadata(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    metadata: Any = context.invocation_metadata() or ()
    return tuple((key, value) for key, value in metadata)


def _initial_metadata(call: _Call, telemetry: Telemetry) -> tuple[tuple[str, str], ...]:
    pairs = [("request-id", call.request_id)]
    traceparent = telemetry.inject(call.span).traceparent
    if traceparent:
        pairs.append(("traceparent", traceparent))
    return tuple(pairs)


def _why_gone(context: Context) -> SpecmeshError:
    """Why a caller that is no longer there left."""
    left: Any = context
    remaining = left.time_remaining()
    if remaining is not None and remaining <= 0:
        return DeadlineExceeded("the caller's deadline passed")
    return Cancelled("the caller went away")
