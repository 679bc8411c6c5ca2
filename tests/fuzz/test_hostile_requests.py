"""Requests that are wrong, huge or odd, through a whole stack: refused by name, or served whole."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.requests import ModelLimits, Resolver
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import generation_pb2_grpc
from specmesh.client import AsyncClient, GenerateOptions, RetryPolicy
from specmesh.config import AdmissionSettings, ServerSettings, SpeculationSettings
from specmesh.errors import ContextTooLong, InvalidRequest, Unauthenticated
from specmesh.logs import JsonFormatter
from specmesh.wire_errors import error_from_rpc
from tests.e2e.stack import END_ID, VOCAB_SIZE, LetterTokenizer, running_stack

PROMPT = [1, 2, 3]
ONE_MEGABYTE = 1 << 20
EVIL = 'x\n{"level":"error"}\r\x1b[2J\x7f\u202e\u2028\x00é'


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the services write."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("test", "test"))
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)


async def test_prompts_of_a_megabyte_disturb_nobody() -> None:
    """One byte more than the limit names the field; the limit itself is too long for the context;
    a stream beside them gives what it gives alone, and nothing is held afterwards."""
    options = GenerateOptions(seed=3, max_tokens=24, ignore_eos=True)
    async with running_stack() as stack:
        wanted = (await stack.client.generate(PROMPT, options)).token_ids
        found: list[list[int]] = []
        for size, error in ((ONE_MEGABYTE + 1, InvalidRequest), (ONE_MEGABYTE, ContextTooLong)):
            with pytest.raises(error) as refused:
                await stack.client.generate("a" * size, options)
            assert refused.value.field in ("text", "prompt")
            found = (await stack.client.generate(PROMPT, options)).token_ids
        with pytest.raises(ContextTooLong):
            await stack.client.generate([1] * ONE_MEGABYTE, options)
        assert found == wanted
        await stack.all_pages_free()


async def test_a_decompression_bomb_is_refused_by_its_real_size() -> None:
    """gRPC takes compressed messages from anybody: 300 kB that would be 64 MiB are refused at the
    limit of a message, and the next request is served."""
    server = ServerSettings(drain_grace_s=5.0, max_message_bytes=1 << 20)
    async with running_stack(server=server) as stack:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(
            stack.address, options=options, compression=grpc.Compression.Gzip
        ) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(pb.GenerateRequest(text="a" * (64 << 20))).read()
            assert isinstance(error_from_rpc(refused.value), InvalidRequest)
            small = pb.GenerateRequest(text="abc", max_tokens=3)
            assert await stub.Generate(small).read() is not grpc.aio.EOF  # type: ignore[attr-defined]
        await stack.all_pages_free()


async def test_odd_characters_reach_no_log_and_no_other_line(log: io.StringIO) -> None:
    """Control characters, line breaks and marks that turn text round, in every text of a request:
    refused or served, and each line written is one line of printable ASCII."""
    requests = [
        pb.GenerateRequest(text=EVIL, seed=1, max_tokens=3),
        pb.GenerateRequest(text="a", stop=[EVIL], seed=1, max_tokens=3),
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=EVIL, content="a")])),
        pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=EVIL)])
        ),
        pb.GenerateRequest(text="a", stop=[EVIL * 200]),
    ]
    refusals: list[InvalidRequest] = []
    async with running_stack() as stack:
        for request in requests:
            try:
                async for _ in stack.client.stream_request(request):
                    pass
            except InvalidRequest as refused:
                refusals.append(refused)
        await stack.all_pages_free()
    assert len(refusals) == 2
    assert all(refused.field and refused.message.isprintable() for refused in refusals)
    text = log.getvalue()
    assert text.isascii()
    assert all(line.startswith("{") and line.isprintable() for line in text.splitlines())
    assert "2J" not in text


async def test_keys_that_are_wrong_missing_or_withdrawn_get_nothing() -> None:
    """No key, another, a longer one, another scheme, and one that was known until now: refused
    before anything is resolved, placed or counted; the known one works."""
    key = "a-key-of-some-length"
    no_retry = RetryPolicy(max_attempts=1)
    async with running_stack() as stack:
        stack.replica.tenants.replace([("team", key)])
        for wrong in (None, "another-key-of-length", key + "x", key[:-1], key.upper()):
            async with AsyncClient(stack.address, api_key=wrong, retry=no_retry) as client:
                with pytest.raises(Unauthenticated) as refused:
                    await client.generate(PROMPT, GenerateOptions(max_tokens=2))
                assert key not in refused.value.message
                with pytest.raises(Unauthenticated):
                    await client.info()
        assert not stack.targets[0].engine.load().num_sessions
        async with AsyncClient(stack.address, api_key=f"{key}\n", retry=no_retry) as client:
            await client.generate(PROMPT, GenerateOptions(max_tokens=2))
            stack.replica.tenants.replace([("team", "its-successor-of-length")])
            with pytest.raises(Unauthenticated):
                await client.generate(PROMPT, GenerateOptions(max_tokens=2))


# ---------------------------------------------------------------- any request at all

LIMITS = ModelLimits(VOCAB_SIZE, (END_ID,), 256, 8)
RESOLVER = Resolver(
    LetterTokenizer(), LIMITS, AdmissionSettings(), SpeculationSettings(), draw_seed=lambda: 1
)
texts = st.text(max_size=20)
small = st.integers(0, 40)
words = st.integers(0, (1 << 32) - 1)
ids = st.lists(st.one_of(small, words), max_size=6)
floats = st.floats(width=32)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """Any message, in its ranges more often than a random one would be."""
    request = pb.GenerateRequest()
    kind = draw(st.sampled_from(["text", "tokens", "chat", "none"]))
    if kind == "text":
        request.text = draw(texts)
    elif kind == "tokens":
        request.tokens.token_ids.extend(draw(ids))
    elif kind == "chat":
        for role, content in draw(
            st.lists(st.tuples(st.sampled_from(["user", "system", "x"]), texts), max_size=3)
        ):
            request.chat.messages.add(role=role, content=content)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        if draw(st.booleans()):
            setattr(request, name, draw(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), floats)))
    for name in ("n", "top_k", "max_tokens", "logprobs", "num_draft_tokens"):
        if draw(st.booleans()):
            setattr(request, name, draw(st.one_of(small, words)))
    if draw(st.booleans()):
        request.seed = draw(st.integers(0, (1 << 64) - 1))
    request.min_tokens = draw(st.one_of(st.just(0), small, words))
    request.resume_token_ids.extend(draw(ids))
    request.resume_round = draw(st.one_of(st.just(0), small, words))
    request.stop.extend(draw(st.lists(texts, max_size=3)))
    request.stop_token_ids.extend(draw(ids))
    request.logit_bias.update(draw(st.dictionaries(st.one_of(small, words), floats, max_size=3)))
    for name in ("rule", "row_policy", "decide_at"):
        setattr(request, name, draw(st.sampled_from([0, 0, 1, 2, 3, 9])))
    return request


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_any_request_is_resolved_in_range_or_refused_by_field(request: pb.GenerateRequest) -> None:
    """What is accepted keeps every bound and changes nothing of the message; what is not names a
    field of it."""
    before = request.SerializeToString(deterministic=True)
    resolved, refused = None, None
    try:
        resolved = RESOLVER.resolve(request)
    except (InvalidRequest, ContextTooLong) as error:
        refused = error
    assert request.SerializeToString(deterministic=True) == before
    if resolved is None:
        assert refused is not None
        name = refused.field.split(".")[0].split("[")[0]
        assert name in {*pb.GenerateRequest.DESCRIPTOR.fields_by_name, "prompt"}, refused
        return
    assert 1 <= resolved.num_samples <= AdmissionSettings().max_samples
    assert len(resolved.prompt) + resolved.max_tokens == resolved.max_len <= LIMITS.max_context_len
    assert len(resolved.resume) <= resolved.max_tokens
    sampling = resolved.sample_sampling(resolved.num_samples - 1)
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert all(token < VOCAB_SIZE for token in (*resolved.prompt, *resolved.resume))
