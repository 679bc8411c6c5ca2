"""Requests: each field's range, each default, each refusal by name before any state is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.requests import MAX_STOP_BYTES, MAX_STOP_STRINGS, ModelLimits, Resolver
from coordinator.session_plan import Rule
from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from specmesh.config import AdmissionSettings, SpeculationSettings
from specmesh.errors import ContextTooLong, InvalidRequest
from specmesh.randomness import sample_seed
from specmesh.wire import MAX_SPARSE_IDS

LIMITS = ModelLimits(vocab_size=100, eos_ids=(0, 2), max_context_len=50, max_num_draft_tokens=6)


class WordTokenizer:
    """One id per character code modulo the vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 100 for character in text if character != "\x00"]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"<{each['role']}>{each['content']}" for each in messages))


def resolver(**speculation: Any) -> Resolver:
    return Resolver(
        WordTokenizer(),
        LIMITS,
        AdmissionSettings(max_prompt_bytes=64, default_max_tokens=20),
        SpeculationSettings(**speculation),
        draw_seed=lambda: 1234,
    )


def request(**fields: Any) -> pb.GenerateRequest:
    if not {"text", "tokens", "chat"} & set(fields):
        fields["tokens"] = pb.TokenPrompt(token_ids=[1, 2, 3])
    return pb.GenerateRequest(**fields)


def message(role: str, content: str) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content)])


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("text", {"text": ""}),
    ("text", {"text": "x" * 65}),
    ("text", {"text": "\x00"}),
    ("tokens.token_ids", {"tokens": pb.TokenPrompt()}),
    ("tokens.token_ids", {"tokens": pb.TokenPrompt(token_ids=[1, 100])}),
    ("chat.messages", {"chat": pb.ChatPrompt()}),
    ("chat.messages", {"chat": message("user", "x" * 65)}),
    ("chat.messages[0].role", {"chat": message("tool", "hi")}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": 1e9}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.5}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": math.inf}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
    ("min_tokens", {"min_tokens": 48}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["x" * (MAX_STOP_BYTES + 1)]}),
    ("stop", {"stop": [str(i) for i in range(MAX_STOP_STRINGS + 1)]}),
    ("stop_token_ids", {"stop_token_ids": [100]}),
    ("stop_token_ids", {"stop_token_ids": range(100), "min_tokens": 1}),
    ("logprobs", {"logprobs": 21}),
    ("rule", {"rule": 9}),
    ("row_policy", {"row_policy": 9}),
    ("decide_at", {"decide_at": 9}),
    ("num_draft_tokens", {"num_draft_tokens": 7}),
    ("seed", {"resume_token_ids": [1], "resume_round": 1}),
    ("n", {"resume_token_ids": [1], "resume_round": 1, "seed": 1, "n": 2}),
    ("resume_token_ids", {"resume_token_ids": [100], "resume_round": 1, "seed": 1}),
    ("resume_round", {"resume_token_ids": [1], "seed": 1}),
    ("resume_round", {"resume_token_ids": [1], "seed": 1, "resume_round": 2}),
    ("resume_round", {"resume_round": 1}),
    ("max_tokens", {"resume_token_ids": [1, 1], "resume_round": 1, "seed": 1, "max_tokens": 1}),
]


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_refusals_name_the_field(field: str, fields: dict[str, Any]) -> None:
    """Out of range or unknown: InvalidRequest, and `field` is the public field's name."""
    with pytest.raises(InvalidRequest) as refused:
        resolver().resolve(request(**fields))
    assert refused.value.field == field


def test_every_field_can_be_refused() -> None:
    """No field of the request lacks a refusal here, but those every value of which is legal."""
    free = {"prompt", "seed", "ignore_eos", "top_k", "tokens", "chat", "text"}
    covered = {field.split(".")[0].split("[")[0] for field, _ in REFUSED}
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} <= covered | free


def test_prompt_is_needed() -> None:
    """A request without any prompt is refused."""
    with pytest.raises(InvalidRequest, match="text, tokens, chat"):
        resolver().resolve(pb.GenerateRequest())


def test_prompt_that_fills_the_context() -> None:
    """A prompt without room for one token is too long; with room for one it runs."""
    long = pb.TokenPrompt(token_ids=[1] * 50)
    with pytest.raises(ContextTooLong):
        resolver().resolve(request(tokens=long))
    fitting = resolver().resolve(request(tokens=pb.TokenPrompt(token_ids=[1] * 49)))
    assert fitting.max_tokens == 1
    assert fitting.max_len == 50


def test_defaults() -> None:
    """Unset fields: temperature 1, no truncation, drawn seed, residual rule, end ids stop."""
    found = resolver(plain_steps=4).resolve(request())
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert sampling.repetition_penalty == 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
    assert not sampling.HasField("num_logprobs")
    assert list(sampling.stop_token_ids) == [0, 2]
    assert (found.seed, sampling.seed) == (1234, 1234)
    assert found.rule == session_pb2.DECISION_RULE_RESIDUAL
    assert found.row_policy == session_pb2.ROW_POLICY_AUTO
    assert found.decide_at == session_pb2.DECIDE_AT_TARGET
    assert found.num_samples == 1
    assert found.max_tokens == 20
    assert found.num_draft_tokens is None


def test_seed_makes_coupled_the_default() -> None:
    """A request with a seed, even 0, is coupled; the rule can be said outright."""
    assert resolver().resolve(request(seed=0)).rule == session_pb2.DECISION_RULE_COUPLED
    said = resolver().resolve(request(seed=0, rule=session_pb2.DECISION_RULE_RESIDUAL))
    assert said.rule == session_pb2.DECISION_RULE_RESIDUAL


def test_greedy_is_its_own_rule() -> None:
    """Temperature 0 is greedy whatever the rule says; the plan carries no rows then."""
    found = resolver().resolve(request(temperature=0.0))
    plan = found.plan(LIMITS, SpeculationSettings(), max_round_retries=1, max_failovers=2)
    assert plan.rule is Rule.GREEDY


def test_zero_is_not_unset() -> None:
    """temperature 0, k 0 and logprobs 0 are values."""
    found = resolver(num_draft_tokens=4).resolve(request(num_draft_tokens=0, logprobs=0))
    assert found.num_draft_tokens == 0
    assert found.sampling.HasField("num_logprobs")
    assert resolver(num_draft_tokens=4).resolve(request()).num_draft_tokens == 4


def test_everything_given_reaches_the_services() -> None:
    """Nothing is dropped on the way to SamplingParams."""
    found = resolver().resolve(
        request(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={5: 2.0, 4: -1.0},
            seed=9,
            max_tokens=11,
            min_tokens=3,
            stop=["a", "b", "a"],
            stop_token_ids=[8],
            ignore_eos=True,
            logprobs=5,
            num_draft_tokens=6,
            decide_at=session_pb2.DECIDE_AT_COORDINATOR,
            row_policy=session_pb2.ROW_POLICY_DENSE_F16,
        )
    )
    assert found.sampling == session_pb2.SamplingParams(
        seed=9,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=[
            session_pb2.LogitBias(token_id=4, bias=-1.0),
            session_pb2.LogitBias(token_id=5, bias=2.0),
        ],
        stop_token_ids=[8],
        min_tokens=3,
        num_logprobs=5,
    )
    assert found.stop_rules.stop_strings == ("a", "b")
    assert found.stop_rules.max_output == 11
    plan = found.plan(LIMITS, SpeculationSettings(), max_round_retries=1, max_failovers=2)
    assert plan.decide_here
    assert plan.num_draft_tokens == 6
    assert plan.max_len == 14


def test_where_the_policy_chooses_noise_is_drawn_anew_for_each_call() -> None:
    """The policy has seen what an earlier attempt accepted and nobody received: the same noise
    again, under another k that follows from it, would bend the law of what is drawn once more. With
    a fixed k, or coupled, the seed gives the noise, so that the same is drawn again."""
    drawn = iter(range(1000, 2000))
    fresh = replace(resolver(), draw_seed=lambda: next(drawn))
    again = {"seed": 7, "resume_token_ids": [1, 1], "resume_round": 1}
    residual, coupled = session_pb2.DECISION_RULE_RESIDUAL, session_pb2.DECISION_RULE_COUPLED
    calls = [fresh.resolve(request(rule=residual, **again)) for _ in range(2)]
    assert [call.seed for call in calls] == [7, 7]
    assert [call.sampling.seed for call in calls] == [1000, 1001]
    assert calls[0].sample_sampling(1).seed == sample_seed(1000, 1)
    repeated = fresh.resolve(request(seed=7, rule=residual))  # nothing of it was received
    assert repeated.sampling.seed == 1002
    fixed = replace(fresh, speculation=SpeculationSettings(num_draft_tokens=3))
    for kept in (
        fresh.resolve(request(rule=coupled, **again)),
        fresh.resolve(request(rule=residual, num_draft_tokens=2, **again)),
        fresh.resolve(request(rule=residual, num_draft_tokens=0, **again)),
        fixed.resolve(request(rule=residual, **again)),
    ):
        assert (kept.seed, kept.sampling.seed) == (7, 7)
        assert not kept.has_own_seed
    assert repeated.has_own_seed
    assert calls[1].has_own_seed
    assert fresh.resolve(request(rule=coupled, num_draft_tokens=2)).has_own_seed


def test_samples_have_seeds_of_their_own() -> None:
    """Sample 0 keeps the request's seed, sample i gets Philox(seed, i); nothing else differs."""
    found = resolver().resolve(request(seed=77, n=3))
    seeds = [found.sample_sampling(index).seed for index in range(3)]
    assert seeds == [77, sample_seed(77, 1), sample_seed(77, 2)]
    assert len(set(seeds)) == 3


def test_chat_uses_the_template() -> None:
    """Chat prompts go through the tokenizer's template and are their own operation."""
    found = resolver().resolve(request(chat=message("user", "hi")))
    assert found.prompt == tuple(WordTokenizer().encode("<user>hi"))
    assert found.operation == "chat"


def test_a_chat_without_any_token_is_refused() -> None:
    """A template may leave nothing of a message; a session needs a prompt."""

    class SilentTemplate(WordTokenizer):
        def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
            return []

    silent = replace(resolver(), tokenizer=SilentTemplate())
    with pytest.raises(InvalidRequest) as refused:
        silent.resolve(request(chat=message("user", "hi")))
    assert refused.value.field == "chat.messages"


def test_no_more_is_drafted_ahead_than_a_message_holds() -> None:
    """Every continuation may have a full row for each candidate, and all go in one message."""
    resolved = resolver().resolve(request())
    most = LIMITS.max_num_draft_tokens

    def num_ahead(message_bytes: int, asked: int = 64) -> int:
        limits = replace(LIMITS, max_message_bytes=message_bytes)
        settings = SpeculationSettings(num_ahead=asked)
        return resolved.plan(limits, settings, max_round_retries=1, max_failovers=2).num_ahead

    assert num_ahead(64 << 20) == 64
    assert num_ahead(64 << 20, asked=0) == 0
    found = num_ahead(1 << 20)
    assert 0 < found < 64
    assert found * most * MAX_SPARSE_IDS * 8 < 1 << 20
    assert num_ahead(1 << 16) == 0
