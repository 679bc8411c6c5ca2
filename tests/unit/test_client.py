"""The client delivers every token exactly once, whatever happens to the coordinator."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import numpy
import pytest

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from specmesh.client import AsyncClient, Client, Event, GenerateOptions, RetryPolicy
from specmesh.errors import Cancelled, InvalidRequest, ModelMismatch, NotReady, TooBusy
from specmesh.randomness import sample_seed
from specmesh.request import ChatTurn
from specmesh.rpc import RpcLimits
from tests.unit.scripted_coordinator import DRAWN_SEED, ROUNDS, Script, serving

ALL_IDS = [token_id for ids in ROUNDS for token_id in ids]
ALL_TEXT = "".join(f"<{token_id}>" for token_id in ALL_IDS)
QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.001, max_backoff_s=0.002)


@pytest.mark.parametrize("sent", range(1, len(ROUNDS) + 2))
def test_a_loss_after_any_message_costs_and_repeats_nothing(sent: int) -> None:
    """Proves exactly-once ids and text when the stream breaks after message `sent`."""
    script = Script(losses={0: sent})
    with serving(script) as address, Client(address, retry=QUICK) as client:
        events = list(client.stream("hi", GenerateOptions(max_tokens=64)))
    chunks = [event for event in events if isinstance(event, pb.Chunk)]
    assert [i for chunk in chunks for i in chunk.token_ids] == ALL_IDS
    assert "".join(chunk.text for chunk in chunks) == ALL_TEXT
    assert sum(isinstance(event, pb.Started) for event in events) == 1
    assert sum(isinstance(event, pb.Finished) for event in events) == 1
    assert len(script.requests) == 2


def test_a_resumed_request_says_outright_what_the_first_attempt_resolved() -> None:
    """Proves that ids, round, seed, rule, placement and budget of a resume are the first's."""
    script = Script(losses={0: 3})
    with serving(script) as address, Client(address, retry=QUICK) as client:
        client.generate("hi", GenerateOptions(temperature=0.5))
    first, second = script.requests
    assert not first.HasField("seed")
    assert not first.resume_token_ids
    assert list(second.resume_token_ids) == [11, 12, 13]
    assert second.resume_round == 2
    assert second.seed == DRAWN_SEED
    # With a seed but no rule the coordinator would have switched to the coupled rule.
    assert second.rule == session_pb2.DECISION_RULE_RESIDUAL
    assert second.decide_at == session_pb2.DECIDE_AT_TARGET
    assert second.max_tokens == 64
    assert second.temperature == 0.5
    assert second.text == "hi"


def test_losses_in_a_row_are_bounded_and_progress_starts_the_count_again() -> None:
    """Proves that attempts without progress end in NotReady, with progress they go on."""
    losing = Script(losses=dict.fromkeys(range(9), 0))
    with (
        serving(losing) as address,
        Client(address, retry=QUICK) as client,
        pytest.raises(NotReady, match=address),
    ):
        client.generate("hi")
    assert len(losing.requests) == 3
    # Started and one round each time: five losses, never two in a row without progress.
    script = Script(losses=dict.fromkeys(range(5), 2))
    with serving(script) as address, Client(address, retry=QUICK) as client:
        assert client.generate("hi").token_ids == [ALL_IDS]
    assert len(script.requests) == 6


def test_errors_that_say_never_retry_are_not_retried() -> None:
    """Proves that InvalidRequest reaches the caller with its field after one attempt."""
    script = Script(refusals={0: InvalidRequest("must be in (0, 1]", field="top_p")})
    with (
        serving(script) as address,
        Client(address, retry=QUICK) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.generate("hi", GenerateOptions(top_p=2.0))
    assert caught.value.field == "top_p"
    assert len(script.requests) == 1


def test_a_busy_coordinator_is_asked_again_after_the_wait_it_names() -> None:
    """Proves that TooBusy is retried and that its retry delay is kept."""
    script = Script(refusals={0: TooBusy("full", retry_after_s=0.05)})
    with serving(script) as address, Client(address, retry=QUICK) as client:
        assert client.generate("hi").text == ALL_TEXT
    assert len(script.requests) == 2
    assert QUICK.wait_s(1, 0.05) == 0.05
    assert QUICK.wait_s(9, 0.0) <= QUICK.max_backoff_s


def test_a_loss_among_several_samples_resumes_each_with_its_own_seed() -> None:
    """Proves exactly-once delivery for n = 2: open samples are asked for one by one."""
    script = Script(losses={0: 4})  # started, two chunks of sample 0, one of sample 1
    with serving(script) as address, Client(address, retry=QUICK) as client:
        generation = client.generate("hi", GenerateOptions(n=2, seed=99))
    assert generation.token_ids == [ALL_IDS, ALL_IDS]
    assert generation.texts == [ALL_TEXT, ALL_TEXT]
    assert [finished.index for finished in generation.finished] == [0, 1]
    first, second, third = script.requests
    assert first.n == 2
    assert (second.n, second.seed, second.resume_round) == (1, 99, 2)
    assert (third.n, third.seed, third.resume_round) == (1, sample_seed(99, 1), 1)
    assert list(third.resume_token_ids) == [11]


@pytest.mark.parametrize("sent", range(4))
@pytest.mark.parametrize("status", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE])
def test_a_call_that_grpc_itself_ends_is_repeated(sent: int, status: grpc.StatusCode) -> None:
    """Proves that a server which stops under a call costs nothing: it may answer CANCELLED."""
    script = Script(losses={0: sent}, bare_status=status)
    with serving(script) as address, Client(address, retry=QUICK) as client:
        generation = client.generate("hi")
    assert generation.token_ids == [ALL_IDS]
    assert len(script.requests) == 2


async def test_closing_the_client_ends_its_streams_as_cancelled() -> None:
    """Proves that a reader learns it by Cancelled, its task unharmed, and nothing is reopened."""
    script = Script(hang=True)
    with serving(script) as address:
        client = AsyncClient(address, retry=QUICK)
        stream = client.stream("hi")
        await anext(stream)
        reading = asyncio.create_task(_rest(stream))
        await client.close()
        with pytest.raises(Cancelled, match="client is closed"):
            await reading
        with pytest.raises(Cancelled, match="client is closed"):
            await client.generate("hi")
    assert len(script.requests) == 1


async def _rest(stream: AsyncGenerator[Event, None]) -> None:
    async for _ in stream:
        pass


def test_a_closed_synchronous_client_says_so() -> None:
    """Proves the same without a loop, for a stream left open and for a new call."""
    script = Script(hang=True)
    with serving(script) as address:
        client = Client(address)
        events = client.stream("hi")
        next(events)
        client.close()
        with pytest.raises(Cancelled, match="client is closed"):
            next(events)
        with pytest.raises(Cancelled, match="client is closed"):
            client.generate("hi")
    assert len(script.requests) == 1


def test_another_replica_is_tried_and_must_serve_the_same_model() -> None:
    """Proves failover to the next address, and that another tokenization is refused there."""
    lost, good = Script(losses={0: 3}), Script()
    with (
        serving(lost) as first,
        serving(good) as second,
        Client([first, second], retry=QUICK) as client,
    ):
        assert client.generate("hi").text == ALL_TEXT
    assert (len(lost.requests), len(good.requests)) == (1, 1)
    changed = Script(losses={0: 3}, prompt_tokens=(5, 6))
    with (
        serving(changed) as address,
        Client(address, retry=QUICK) as client,
        pytest.raises(ModelMismatch),
    ):
        client.generate("hi")


def test_leaving_a_stream_early_cancels_the_request() -> None:
    """Proves that the coordinator learns when a synchronous caller stops reading."""
    script = Script(hang=True)
    with serving(script) as address, Client(address) as client:
        for event in client.stream("hi"):
            if isinstance(event, pb.Chunk) and event.round == 4:
                break
        assert script.cancelled.wait(10)


def test_an_interrupt_while_waiting_cancels_the_request() -> None:
    """Proves that Ctrl-C in the synchronous client ends the call and not only the wait for it."""
    script = Script(hang=True)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    interrupt = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
    with serving(script) as address, Client(address) as client:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes from within the loop
            for event in client.stream("hi"):
                if isinstance(event, pb.Chunk) and event.round == 4:
                    interrupt.start()
        assert script.cancelled.wait(10)


async def test_cancelling_a_task_cancels_the_request() -> None:
    """Proves that cancellation of an asynchronous caller reaches the coordinator."""
    script = Script(hang=True)
    with serving(script) as address:
        async with AsyncClient(address) as client:
            everything_came = asyncio.Event()

            async def read() -> None:
                async for event in client.stream("hi"):
                    if isinstance(event, pb.Chunk) and event.round == 4:
                        everything_came.set()

            task = asyncio.create_task(read())
            await asyncio.wait_for(everything_came.wait(), 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(script.cancelled.wait, 10)


async def test_the_synchronous_client_works_inside_a_running_loop() -> None:
    """Proves that Client has a loop of its own (notebooks run one already)."""
    script = Script()
    with serving(script) as address, Client(address) as client:
        assert client.generate("hi").text == ALL_TEXT
        assert client.info().version == "1.2.3"


def test_the_api_key_travels_as_bearer_token() -> None:
    """Proves that credentials are sent with every attempt."""
    script = Script(losses={0: 2})
    with serving(script) as address, Client(address, api_key="s3", retry=QUICK) as client:
        client.generate("hi")
    assert [metadata["authorization"] for metadata in script.metadata] == ["Bearer s3"] * 2


def test_an_api_key_is_what_a_header_can_hold() -> None:
    """Proves that a key file's newline is left off, and that a bad key is named, never shown."""
    script = Script()
    with serving(script) as address:
        with Client(address, api_key="s3\n") as client:
            client.generate("hi")
        for bad in ("s3cr\u00e9t", "s3\nx: y", "s3 s4", "s3\x00"):
            with pytest.raises(InvalidRequest) as caught:
                Client(address, api_key=bad)
            assert caught.value.field == "api_key"
            assert bad not in str(caught.value)
    assert [metadata["authorization"] for metadata in script.metadata] == ["Bearer s3"]
    names = [thread.name for thread in threading.enumerate()]
    assert "specmesh-client" not in names  # a client that was not made leaves no thread


def test_every_kind_of_prompt_and_every_option_reaches_the_message() -> None:
    """Proves that no option of GenerateOptions is dropped on the way into the request."""
    options = GenerateOptions(
        n=2,
        temperature=0.0,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={3: -2.0},
        seed=0,
        max_tokens=7,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        logprobs=0,
        rule="coupled",
        num_draft_tokens=0,
        row_policy="dense_f16",
        decide_at="coordinator",
    )
    request = options.request([1, 2])
    assert list(request.tokens.token_ids) == [1, 2]
    # Zero is a value and not "unset": each of these has presence.
    for name in ("temperature", "top_k", "seed", "logprobs", "num_draft_tokens"):
        assert request.HasField(name)
        assert getattr(request, name) == 0
    assert dict(request.logit_bias) == {3: -2.0}
    assert list(request.stop) == ["a", "b"]
    assert list(request.stop_token_ids) == [4]
    assert request.rule == session_pb2.DECISION_RULE_COUPLED
    assert request.row_policy == session_pb2.ROW_POLICY_DENSE_F16
    assert request.decide_at == session_pb2.DECIDE_AT_COORDINATOR
    set_fields = {descriptor.name for descriptor, _ in request.ListFields()}
    everything = {f.name for f in pb.GenerateRequest.DESCRIPTOR.fields}
    not_options = {"text", "chat", "resume_token_ids", "resume_round"}
    assert set_fields == everything - not_options
    chat = GenerateOptions().request([ChatTurn("system", "s"), ChatTurn("user", "u")]).chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerateOptions(seed=-1), "seed"),
        (GenerateOptions(seed=1 << 64), "seed"),
        (GenerateOptions(top_k=-1), "top_k"),
        (GenerateOptions(rule="greedy"), "rule"),
        (GenerateOptions(stop_token_ids=[-1]), "stop_token_ids"),
        (GenerateOptions(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_what_the_message_cannot_hold_names_its_field(options: GenerateOptions, field: str) -> None:
    """Proves that a value outside the wire type is InvalidRequest, not a protobuf error."""
    with pytest.raises(InvalidRequest) as caught:
        options.request("hi")
    assert caught.value.field == field


@pytest.mark.parametrize(
    "prompt",
    [
        "\ud800",
        [ChatTurn("user", "\udfff")],
        [ChatTurn("user", None)],  # type: ignore[arg-type]  # what the test is about
        [ChatTurn("user", "hi"), 3],
        b"abc",
        [True],
        [-1],
        [1 << 32],
        [1.5],
        None,
        7,
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    """Proves that no prompt is guessed at: bytes are no ids, half a surrogate pair is no text."""
    with pytest.raises(InvalidRequest) as caught:
        GenerateOptions().request(prompt)
    assert caught.value.field == "prompt"


def test_ids_may_come_as_an_array_and_one_stop_string_is_one() -> None:
    """Proves that numpy's integers are ids, and that a string is not taken for its characters."""
    request = GenerateOptions(stop="END").request(numpy.array([3, 0, 5]))
    assert list(request.tokens.token_ids) == [3, 0, 5]
    assert list(request.stop) == ["END"]


def test_a_huge_number_of_samples_is_for_the_coordinator_to_refuse() -> None:
    """Proves that the client makes nothing per sample asked for: 2**32 - 1 would not fit."""
    script = Script(refusals={0: InvalidRequest("must be in [1, 16]", field="n")})
    with (
        serving(script) as address,
        Client(address) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.generate("hi", GenerateOptions(n=(1 << 32) - 1))
    assert caught.value.field == "n"


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300])
def test_a_boundless_time_is_no_bound(timeout_s: float) -> None:
    """Proves that a time gRPC cannot hold is not taken for one that has passed."""
    script = Script()
    with serving(script) as address, Client(address) as client:
        assert client.generate("hi", timeout_s=timeout_s).text == ALL_TEXT


def test_a_time_that_is_no_number_is_refused() -> None:
    """Proves that NaN seconds are an error of the caller and reach no coordinator."""
    script = Script()
    with (
        serving(script) as address,
        Client(address) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.generate("hi", timeout_s=math.nan)
    assert caught.value.field == "timeout_s"
    assert script.requests == []


def test_a_request_over_the_size_limit_is_sent_once() -> None:
    """Proves that gRPC's RESOURCE_EXHAUSTED for a large message is not taken for a full queue."""
    script = Script()
    with (
        serving(script) as address,
        Client(address, limits=RpcLimits(max_message_bytes=4096), retry=QUICK) as client,
        pytest.raises(InvalidRequest, match="larger than max"),
    ):
        client.generate("x" * 5000)
    assert script.requests == []


async def test_requests_that_fail_together_turn_away_from_a_coordinator_once() -> None:
    """Proves that an even number of requests lost with one coordinator does not turn them back to
    it: each finds the other at its next attempt."""
    lost = Script(refusals={attempt: NotReady("scripted") for attempt in range(100)})
    with serving(lost) as first, serving(Script()) as second:
        async with AsyncClient([first, second], retry=QUICK) as client:
            generations = await asyncio.gather(*(client.generate("hi") for _ in range(4)))
    assert [generation.token_ids for generation in generations] == [[ALL_IDS]] * 4
    assert len(lost.requests) == 4
