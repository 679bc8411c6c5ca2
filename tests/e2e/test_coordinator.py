"""The coordinator against real services over real gRPC, on a model whose K/V is checked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.commands import Outcome
from coordinator.decide import AuditResult
from coordinator.protocol import Session
from coordinator.replica import CoordinatorReplica
from draft_service.proposer import Proposer
from kernels.reference_rows import NEAR_TIE
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc
from specmesh.client import AsyncClient, Chunk, Finished, GenerateOptions, RetryPolicy
from specmesh.config import AdmissionSettings, SpeculationSettings
from specmesh.engine.links import ServiceLink
from specmesh.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    ModelMismatch,
    NotReady,
    TooBusy,
    Unauthenticated,
)
from specmesh.rpc import READINESS, RpcLimits, create_channel
from tests.e2e.stack import (
    VOCAB_SIZE,
    LetterTokenizer,
    Stack,
    model_info,
    running_stack,
    settings_of,
)
from tests.rpc import peers
from tests.rpc.fake_model import PrefixDecoder

PROMPT = [1, 2, 3, 4, 5]


def options(**changes: Any) -> GenerateOptions:
    return GenerateOptions(**{"max_tokens": 24, "ignore_eos": True, **changes})


@asynccontextmanager
async def held(stack: Stack) -> AsyncIterator[threading.Event]:
    """The target computes nothing until the event is set."""
    release = threading.Event()
    stack.targets[0].decoder.before_pass = release.wait  # type: ignore[attr-defined]  # a fake
    try:
        yield release
    finally:
        release.set()


async def tokens_of(stack: Stack, **changes: Any) -> list[int]:
    generation = await stack.client.generate(PROMPT, options(**changes))
    return generation.token_ids[0]


async def test_coupled_output_is_the_same_everywhere() -> None:
    """A seeded request gives the same tokens for every k, placement and draft, or without one."""
    async with running_stack() as stack:
        wanted = await tokens_of(stack, seed=3, num_draft_tokens=0)
        assert len(wanted) == 24
        for decide_at in ("target", "coordinator"):
            for k in (0, 1, 3, 8, None):
                found = await tokens_of(stack, seed=3, num_draft_tokens=k, decide_at=decide_at)
                assert found == wanted, (decide_at, k)
        await stack.all_pages_free()
    async with running_stack(draft_seed=5) as stack:
        assert await tokens_of(stack, seed=3, num_draft_tokens=4) == wanted
    async with running_stack(num_drafts=0) as stack:
        assert await tokens_of(stack, seed=3, num_draft_tokens=4) == wanted


async def test_greedy_output_is_the_target_s_argmax_path() -> None:
    """At temperature 0 every k gives the argmax continuation of the target."""
    model = PrefixDecoder(VOCAB_SIZE, seed=0)
    prefix = list(PROMPT)
    for _ in range(24):
        prefix.append(int(model.logits(prefix)[:VOCAB_SIZE].argmax()))
    async with running_stack() as stack:
        for k in (0, 4):
            for decide_at in ("target", "coordinator"):
                found = await tokens_of(
                    stack, temperature=0.0, num_draft_tokens=k, decide_at=decide_at
                )
                assert found == prefix[len(PROMPT) :]


async def test_residual_sample_is_the_same_in_both_placements() -> None:
    """Same seed, same k, residual rule: equal tokens, whoever decides and beside whom."""
    async with running_stack() as stack:
        fields = {"seed": 9, "rule": "residual", "num_draft_tokens": 3, "top_p": 0.9}
        wanted = await tokens_of(stack, **fields)
        assert await tokens_of(stack, **fields, decide_at="coordinator") == wanted
        together = await asyncio.gather(*(tokens_of(stack, **fields) for _ in range(8)))
        assert together == [wanted] * 8


async def test_draft_that_is_the_target_loses_no_candidate() -> None:
    """Equal models on a dense float32 link: acceptance 100 % under both rules."""
    async with running_stack(draft_seed=0) as stack:
        for rule in ("residual", "coupled"):
            generation = await stack.client.generate(
                PROMPT, options(seed=1, rule=rule, num_draft_tokens=4, row_policy="dense_f32")
            )
            stats = generation.finished[0].speculation
            assert stats.num_draft_tokens == stats.num_accepted > 0


async def test_samples_interleave_and_differ() -> None:
    """n samples share a stream by index; sample 0 is what n = 1 gives."""
    async with running_stack() as stack:
        alone = await tokens_of(stack, seed=4)
        generation = await stack.client.generate(PROMPT, options(seed=4, n=3))
        assert generation.token_ids[0] == alone
        assert len({tuple(ids) for ids in generation.token_ids}) == 3
        await stack.all_pages_free()


@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_resume_at_every_round(decide_at: str) -> None:
    """A repeated request with the ids held goes on exactly where the first stream was."""
    async with running_stack() as stack:
        fields = {"seed": 11, "decide_at": decide_at, "num_draft_tokens": 3}
        request = options(**fields).request(PROMPT)
        chunks = [
            event
            async for event in stack.client.stream_request(request)
            if isinstance(event, Chunk)
        ]
        whole = [token for chunk in chunks for token in chunk.token_ids]
        held: list[int] = []
        for chunk in chunks[:-1]:
            held.extend(chunk.token_ids)
            request.ClearField("resume_token_ids")
            request.resume_token_ids.extend(held)
            request.resume_round = chunk.round + 1
            rest = [
                token
                async for event in stack.client.stream_request(request)
                if isinstance(event, Chunk)
                for token in event.token_ids
            ]
            assert held + rest == whole


async def test_logprobs_are_the_unshaped_target_s() -> None:
    """Per token its log-probability at temperature 1, and the largest ones, in both placements."""
    model = PrefixDecoder(VOCAB_SIZE, seed=0)
    async with running_stack() as stack:
        for decide_at in ("target", "coordinator"):
            generation = await stack.client.generate(
                PROMPT,
                options(
                    seed=2, temperature=0.5, logprobs=3, num_draft_tokens=3, decide_at=decide_at
                ),
            )
            ids, logprobs = generation.token_ids[0], generation.logprobs[0]
            assert len(ids) == len(logprobs) == 24
            for index, entry in enumerate(logprobs):
                row = model.logits([*PROMPT, *ids[:index]])[:VOCAB_SIZE].log_softmax(-1)
                assert entry.logprob == pytest.approx(float(row[ids[index]]), abs=1e-5)
                best = row.sort(descending=True, stable=True)
                assert [top.token_id for top in entry.top] == best.indices[:3].tolist()


async def test_stop_string_and_usage_agree() -> None:
    """Text is cut where the stop string begins; ids and usage include its last token."""
    async with running_stack() as stack:
        full = await stack.client.generate(PROMPT, options(seed=6))
        stop = full.text[7:9]
        first = full.text.index(stop)
        cut = await stack.client.generate(PROMPT, options(seed=6, stop=[stop], num_draft_tokens=4))
        assert cut.text == full.text[:first]
        assert cut.token_ids[0] == full.token_ids[0][: first + len(stop)]
        assert cut.finished[0].usage.completion_tokens == first + len(stop)
        assert cut.finished[0].matched_stop == stop
        await stack.all_pages_free()


async def test_refusals_reach_the_caller_by_field() -> None:
    """An invalid request ends with INVALID_ARGUMENT naming the field, and no session was made."""
    async with running_stack() as stack:
        with pytest.raises(InvalidRequest) as refused:
            await stack.client.generate(PROMPT, GenerateOptions(top_p=1.5))
        assert refused.value.field == "top_p"
        assert stack.targets[0].engine.load().num_sessions == 0


async def test_cancellation_frees_both_sides() -> None:
    """A caller that leaves after some chunks frees its sessions on target and draft."""
    async with running_stack() as stack:
        events = stack.client.stream(PROMPT, options(seed=1, max_tokens=200, num_draft_tokens=2))
        async for event in events:
            if isinstance(event, Chunk) and event.round >= 3:
                break
        await events.aclose()
        await stack.all_pages_free()


async def test_deadline_ends_a_request() -> None:
    """A request that outlives its deadline frees its sessions."""
    async with running_stack() as stack, held(stack) as release:
        channel = create_channel(stack.address, RpcLimits())
        stub: Any = channel.unary_stream(
            "/specmesh.v1.GenerationService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        request = options(max_tokens=200, num_draft_tokens=1).request(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in stub(request, timeout=0.15):
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await channel.close()
        release.set()
        await stack.all_pages_free()


async def test_draft_lost_midway_changes_nothing() -> None:
    """The draft's links are cut in the middle: the text is the same, drafting comes back."""
    async with running_stack() as stack:
        wanted = await tokens_of(stack, seed=8, max_tokens=100, num_draft_tokens=0)
        found: list[int] = []
        finished: Finished | None = None
        request = options(seed=8, max_tokens=100, num_draft_tokens=3).request(PROMPT)
        async for event in stack.client.stream_request(request):
            if isinstance(event, Chunk):
                found.extend(event.token_ids)
                if event.round == 5:
                    stack.drafts[0].links.end_all()
            elif isinstance(event, Finished):
                finished = event
        assert found == wanted
        assert finished is not None
        reasons = dict(finished.speculation.fallback_rounds)
        assert set(reasons) <= {"draft_lost", "draft_resync", "budget", "draft_session_lost"}
        # Lost while a proposal is awaited, or while the target verifies: then it is back in time to
        # be filled.
        assert reasons.keys() & {"draft_lost", "draft_resync"}
        await stack.all_pages_free()


@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_lying_draft_is_found_within_a_round(
    decide_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that sends another token than its row and noise give is off after its first block,
    for that request, in both placements; the request goes on without it."""
    draw = Proposer._draw

    def lying(proposer: Proposer, task: Any, drafting: Any, logits: Any) -> None:
        draw(proposer, task, drafting, logits)
        row = drafting.cuts[-1].row
        others = [t for t in range(VOCAB_SIZE) if t != drafting.tokens[-1] and row.weight(t) > 0]
        drafting.tokens[-1] = others[0]

    monkeypatch.setattr(Proposer, "_draw", lying)
    async with running_stack() as stack:
        fields = {"seed": 5, "rule": "residual", "num_draft_tokens": 3, "decide_at": decide_at}
        generation = await stack.client.generate(PROMPT, options(**fields))
        stats = generation.finished[0].speculation
        assert len(generation.token_ids[0]) == 24
        assert (stats.num_draft_tokens, stats.num_accepted) == (3, 0)
        assert set(stats.fallback_rounds) <= {"draft_redraw_mismatch", "budget"}
        await stack.all_pages_free()


async def test_draft_without_memory_is_paused_and_probed() -> None:
    """A draft whose pool can never hold the request: k = 0 with the reason, the same tokens; it is
    offered again after a pause and a probe, and left alone when that helps nothing."""
    setup = peers.Setup(num_pages=1)
    async with running_stack(draft_setup=setup) as stack:
        fields = {"seed": 8, "max_tokens": 200}
        wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
        generation = await stack.client.generate(PROMPT, options(**fields, num_draft_tokens=3))
        assert generation.token_ids[0] == wanted
        reasons = dict(generation.finished[0].speculation.fallback_rounds)
        assert "draft_out_of_memory" in reasons
        assert set(reasons) <= {"draft_out_of_memory", "draft_resync", "draft_unstable", "budget"}
        await stack.all_pages_free()


@pytest.mark.parametrize("num_targets", [1, 2])
@pytest.mark.parametrize("decide_at", ["target", "coordinator"])
async def test_target_lost_midway_changes_nothing(num_targets: int, decide_at: str) -> None:
    """The target's links are cut: the session is rebuilt somewhere, the text is the same."""
    async with running_stack(num_targets=num_targets) as stack:
        fields = {"seed": 8, "max_tokens": 60, "decide_at": decide_at}
        wanted = await tokens_of(stack, **fields, num_draft_tokens=0)
        found: list[int] = []
        request = options(**fields, num_draft_tokens=3).request(PROMPT)
        async for event in stack.client.stream_request(request):
            if isinstance(event, Chunk):
                found.extend(event.token_ids)
                if event.round in (3, 9):
                    for target in stack.targets:
                        target.links.end_all()
        assert found == wanted
        await stack.all_pages_free()


async def test_audit_of_every_round_agrees() -> None:
    """With audit ratio 1 each round is decided again from its rows, without a mismatch."""
    speculation = SpeculationSettings(audit_ratio=1.0, num_draft_tokens=3)
    async with running_stack(speculation=speculation) as stack:
        for rule in ("residual", "coupled"):
            await tokens_of(stack, seed=5, rule=rule)
        await tokens_of(stack, temperature=0.0)
        samples = {
            sample.name: sample.value
            for family in stack.replica.metrics.registry.collect()
            for sample in family.samples
            if sample.name.startswith("specmesh_audit")
        }
        assert samples["specmesh_audited_rounds_total"] > 20
        mismatches = [
            value for name, value in samples.items() if name == "specmesh_audit_mismatches_total"
        ]
        assert mismatches
        assert not any(mismatches)


async def test_an_audit_that_fails_does_not_fail_what_it_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug in the audit is an alarm, not the end of the request that happened to be audited."""

    def broken(*_args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("coordinator.driver.audit_round", broken)
    async with running_stack(speculation=SpeculationSettings(audit_ratio=1.0)) as stack:
        assert len(await tokens_of(stack, seed=3, num_draft_tokens=3)) == 24
        alarms = stack.replica.metrics.registry.get_sample_value(
            "specmesh_audit_mismatches_total", {"kind": "mismatch"}
        )
        assert alarms


async def test_near_ties_of_audits_are_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatch that rounding explains reaches the counters as a near-tie, and raises no alarm."""

    def tied(*_args: Any) -> AuditResult:
        return AuditResult(is_mismatch=True, margin=NEAR_TIE / 2)

    monkeypatch.setattr("coordinator.driver.audit_round", tied)
    async with running_stack(speculation=SpeculationSettings(audit_ratio=1.0)) as stack:
        await tokens_of(stack, seed=3, num_draft_tokens=3)
        found = {
            kind: stack.replica.metrics.registry.get_sample_value(
                "specmesh_audit_mismatches_total", {"kind": kind}
            )
            for kind in ("near_tie", "mismatch")
        }
        assert found["near_tie"]
        assert found["mismatch"] == 0


async def test_admission_is_bounded() -> None:
    """Two run, two wait, eight are refused with a retry delay; those let in finish."""
    admission = AdmissionSettings(max_running=2, max_waiting=2)
    async with running_stack(admission=admission) as stack, held(stack) as release:
        refused: list[float] = []

        async def one(client: AsyncClient) -> bool:
            try:
                await client.generate(PROMPT, options(num_draft_tokens=1))
            except TooBusy as error:
                refused.append(error.retry_after_s)
                if len(refused) == 8:
                    release.set()
                return False
            return True

        async with AsyncClient(stack.address, retry=RetryPolicy(max_attempts=1)) as client:
            served = await asyncio.gather(*(one(client) for _ in range(12)))
        assert served.count(True) == 4
        assert all(delay > 0 for delay in refused)
        await stack.all_pages_free()


@pytest.mark.parametrize("side", ["draft", "target"])
async def test_a_replica_that_answers_nonsense_keeps_no_pages(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of an epoch never opened: the session moves, and is closed where it was."""
    next_frame, may_lie, told = ServiceLink.next_frame, asyncio.Event(), []

    async def lying(link: ServiceLink) -> Any:
        frame = await next_frame(link)
        for result in frame.results if frame is not None else ():
            answers = result.WhichOneof("result") in ("proposal", "verdict")
            of_side = side in type(result).__name__.lower()
            if answers and of_side and may_lie.is_set() and not told:
                told.append(result.session_id)
                result.epoch += 3
        return frame

    monkeypatch.setattr(ServiceLink, "next_frame", lying)
    async with running_stack(num_drafts=2, num_targets=2) as stack:
        wanted = await tokens_of(stack, seed=3, num_draft_tokens=3)
        may_lie.set()
        assert await tokens_of(stack, seed=3, num_draft_tokens=3) == wanted
        assert told
        await stack.all_pages_free()


async def test_a_full_house_reads_no_large_prompt() -> None:
    """Beyond the bounds a prompt is refused unread: read, this one would be too long instead."""
    prompt = "a" * 20_000
    async with (
        running_stack(admission=AdmissionSettings(max_running=1, max_waiting=0)) as stack,
        AsyncClient(stack.address, retry=RetryPolicy(max_attempts=1)) as client,
    ):
        async with held(stack):
            running = asyncio.create_task(client.generate(PROMPT, options()))
            while not stack.targets[0].engine.load().num_sessions:
                await asyncio.sleep(0.001)
            with pytest.raises(TooBusy):
                await client.generate(prompt, options())
        await running
        with pytest.raises(ContextTooLong):
            await client.generate(prompt, options())


async def test_drain_lets_streams_finish_and_refuses_new_ones() -> None:
    """While draining a running stream goes to its end; a new request gets NotReady."""
    async with running_stack() as stack:
        chunks: list[int] = []
        draining: asyncio.Task[None] | None = None
        async for event in stack.client.stream(PROMPT, options(seed=2, num_draft_tokens=1)):
            if isinstance(event, Chunk):
                chunks.extend(event.token_ids)
                if draining is None:
                    draining = asyncio.create_task(stack.replica.drain())
                    await asyncio.sleep(0)
                    async with AsyncClient(
                        stack.address, retry=RetryPolicy(max_attempts=1)
                    ) as other:
                        with pytest.raises(NotReady):
                            await other.generate(PROMPT, options())
        assert len(chunks) == 24
        assert draining is not None
        await draining


async def test_api_keys() -> None:
    """With a key file a call without a known key is refused; with one it runs."""
    async with running_stack() as stack:
        stack.replica.tenants.replace([("team", "a-key-of-some-length")])
        with pytest.raises(Unauthenticated):
            await stack.client.generate(PROMPT, options())
        async with AsyncClient(stack.address, api_key="a-key-of-some-length") as client:
            await client.generate(PROMPT, options())


@pytest.mark.parametrize(
    "changes", [{"vocab_hash": 1}, {"vocab_size": 17}, {"eos_token_ids": [3]}, {"bos_token_id": 2}]
)
async def test_mismatched_draft_is_refused_at_start(changes: dict[str, Any]) -> None:
    """Another vocabulary, tokenizer or special id: the coordinator does not start, and says why."""
    async with (
        peers.running("target", PrefixDecoder(VOCAB_SIZE)) as target,
        peers.running("draft", PrefixDecoder(VOCAB_SIZE, seed=1)) as draft,
    ):
        target.state.set_ready(model_info(target, "a"), target.links)
        draft.state.set_ready(model_info(draft, "b", **changes), draft.links)
        replica = CoordinatorReplica(settings_of([target], [draft]), LetterTokenizer())  # type: ignore[arg-type]  # a fake
        with pytest.raises(ModelMismatch) as refused:
            await replica.start()
        # Whichever side shakes hands second is the one named; both may be.
        assert str(draft.address) in str(refused.value) or str(target.address) in str(refused.value)


async def test_bug_in_one_session_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception in a session ends that request with INTERNAL; the link and the other
    requests on it go on, and the failed one's pages are freed."""
    commit = Session._commit

    def broken(session: Session, outcome: Outcome, **options: Any) -> None:
        if session.plan.prompt == (9, 9) and session.round_index == 2:
            raise RuntimeError("planted")
        commit(session, outcome, **options)

    async with running_stack() as stack:
        wanted = await tokens_of(stack, seed=3)
        monkeypatch.setattr(Session, "_commit", broken)
        async with AsyncClient(stack.address, retry=RetryPolicy(max_attempts=1)) as client:
            failed, found = await asyncio.gather(
                client.generate([9, 9], options(num_draft_tokens=2)),
                tokens_of(stack, seed=3),
                return_exceptions=True,
            )
        assert isinstance(failed, InternalError)
        assert "planted" not in str(failed)
        assert found == wanted
        await stack.all_pages_free()


async def test_request_id_is_in_the_initial_metadata() -> None:
    """grpcurl and other clients see the id before the first message."""
    async with running_stack() as stack:
        channel = create_channel(stack.address, RpcLimits())
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(options().request(PROMPT), timeout=30)
        metadata = dict(await call.initial_metadata())
        started = (await call.read()).started
        assert metadata["request-id"] == started.request_id
        call.cancel()
        await channel.close()
        await stack.all_pages_free()


async def test_health_and_info() -> None:
    """Readiness is announced by grpc.health.v1; GetInfo names both models and the bounds."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with running_stack() as stack:
        channel = create_channel(stack.address, RpcLimits())
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=READINESS))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close()
        info = await stack.client.info()
        assert (info.target.model, info.draft.model) == ("target", "draft")
        assert info.max_running == 64
