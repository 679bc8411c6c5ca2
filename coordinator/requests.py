"""From a `GenerateRequest` to what a session needs: every field checked, every default resolved.

Owns ranges and defaults of the public API (ranges of sampling parameters lie in
`specmesh/shaping.py`, one definition for all services). Whatever is out of range or unsupported
raises InvalidRequest naming the field before any state is made; nothing is ignored silently. Pure
but for the tokenizer: entropy for a seed comes in as a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.session_plan import Rule, SessionPlan
from coordinator.stops import StopRules
from protos.specmesh.v1 import generation_pb2, session_pb2
from specmesh.config import AdmissionSettings, SpeculationSettings
from specmesh.errors import ContextTooLong, InvalidRequest
from specmesh.randomness import sample_seed
from specmesh.shaping import validate
from specmesh.wire import max_dense_rows, max_sparse_rows

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024  # hold-back keeps at most this much text from the caller
MAX_STOP_IDS = 1024
ROLES = ("system", "user", "assistant")

ROW_POLICIES = {
    "auto": session_pb2.ROW_POLICY_AUTO,
    "dense_f32": session_pb2.ROW_POLICY_DENSE_F32,
    "dense_f16": session_pb2.ROW_POLICY_DENSE_F16,
}
PLACEMENTS = {
    "target": session_pb2.DECIDE_AT_TARGET,
    "coordinator": session_pb2.DECIDE_AT_COORDINATOR,
}


class Tokenizer(Protocol):
    """What the coordinator needs of specmesh/tokenizer.py."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages (role, content) under the model's template, ready for an answer.

        Raises InvalidRequest where the model has no template.
        """


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the connected models can do. max_message_bytes: of an answer."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context_len: int
    max_num_draft_tokens: int
    max_message_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request with nothing left open. seed: what is told to the caller. sampling.seed: what draws
    are keyed by, of sample 0 (`sample_sampling`); see `Resolver` for where the two differ.
    has_own_seed: draws are keyed by a seed that nobody knew before this call."""

    prompt: tuple[int, ...]
    operation: str
    num_samples: int
    seed: int
    sampling: session_pb2.SamplingParams
    has_own_seed: bool
    rule: session_pb2.DecisionRule
    decide_at: session_pb2.DecideAt
    row_policy: session_pb2.RowPolicy
    num_draft_tokens: int | None
    resume: tuple[int, ...]
    resume_round: int
    max_tokens: int
    stop_rules: StopRules

    @property
    def max_len(self) -> int:
        """Prompt plus output never exceed this."""
        return len(self.prompt) + self.max_tokens

    def sample_sampling(self, index: int) -> session_pb2.SamplingParams:
        """The sampling parameters of sample `index`: the same but for the seed."""
        sampling = session_pb2.SamplingParams()
        sampling.CopyFrom(self.sampling)
        sampling.seed = sample_seed(self.sampling.seed, index)
        return sampling

    def plan(
        self,
        limits: ModelLimits,
        speculation: SpeculationSettings,
        *,
        max_round_retries: int,
        max_failovers: int,
    ) -> SessionPlan:
        """The protocol's view; equal for all samples."""
        is_greedy = self.sampling.temperature == 0.0
        is_coupled = self.rule == session_pb2.DECISION_RULE_COUPLED
        sampled = Rule.COUPLED if is_coupled else Rule.RESIDUAL
        parallel = {"auto": None, "parallel": True, "after_first_token": False}
        with_logprobs = self.sampling.HasField("num_logprobs")
        num_rows = max_sparse_rows(limits.max_message_bytes)
        most_ahead = num_rows // max(1, limits.max_num_draft_tokens)  # in one message of the draft
        return SessionPlan(
            prompt=self.prompt,
            max_len=self.max_len,
            vocab_size=limits.vocab_size,
            rule=Rule.GREEDY if is_greedy else sampled,
            stop_ids=self.stop_rules.stop_ids,
            resume=self.resume,
            resume_round=self.resume_round,
            decide_here=self.decide_at == session_pb2.DECIDE_AT_COORDINATOR,
            with_logprobs=with_logprobs,
            num_draft_tokens=self.num_draft_tokens,
            max_num_draft_tokens=limits.max_num_draft_tokens,
            plain_steps=speculation.plain_steps,
            audit_ratio=speculation.audit_ratio,
            parallel_prefill=parallel[speculation.draft_prefill],
            max_round_retries=max_round_retries,
            max_failovers=max_failovers,
            num_ahead=min(speculation.num_ahead, most_ahead),
            max_rows=max_dense_rows(limits.max_message_bytes, limits.vocab_size, 1 + with_logprobs),
        )


@dataclass(frozen=True, slots=True)
class Resolver:
    """Checks and resolves requests for one pair of models.

    Where the policy chooses k under the residual rule, draws are keyed by a seed of the call's own.
    A call may repeat or resume an earlier one whose last rounds nobody received, and the policy
    has seen what was accepted in them: with the same noise again, and a k that follows from it, the
    law of a position drawn again would not be the target's (exactness rules 7 and 12). With a fixed
    k, and under the coupled rule, nothing that was seen has a say, and the seed gives the noise.
    """

    tokenizer: Tokenizer
    limits: ModelLimits
    admission: AdmissionSettings
    speculation: SpeculationSettings
    draw_seed: Callable[[], int]

    def resolve(self, request: generation_pb2.GenerateRequest) -> Resolved:
        """Raise InvalidRequest (with the field) or ContextTooLong, or return a complete request."""
        num_samples = request.n if request.HasField("n") else 1
        _in_range("n", num_samples, 1, self.admission.max_samples)
        has_seed = request.HasField("seed")
        seed = request.seed if has_seed else self.draw_seed()
        sampling = self._sampling(request)
        stop = self._stop_strings(request)
        num_draft_tokens = self._num_draft_tokens(request)
        rule = _known("rule", request.rule, session_pb2.DecisionRule)
        decide_at = _known("decide_at", request.decide_at, session_pb2.DecideAt)
        row_policy = _known("row_policy", request.row_policy, session_pb2.RowPolicy)
        by_seed = (
            session_pb2.DECISION_RULE_COUPLED if has_seed else session_pb2.DECISION_RULE_RESIDUAL
        )
        rule = rule or by_seed
        has_own = rule == session_pb2.DECISION_RULE_RESIDUAL and num_draft_tokens is None
        sampling.seed = self.draw_seed() if has_own else seed
        prompt, operation = self._prompt(request)
        max_tokens = self._max_tokens(request, len(prompt))
        self._check_resume(request, num_samples, max_tokens)
        return Resolved(
            prompt=tuple(prompt),
            operation=operation,
            num_samples=num_samples,
            seed=seed,
            sampling=sampling,
            has_own_seed=has_own or not has_seed,
            rule=rule,
            decide_at=decide_at or PLACEMENTS[self.speculation.decide_at],
            row_policy=row_policy or ROW_POLICIES[self.speculation.row_policy],
            num_draft_tokens=num_draft_tokens,
            resume=tuple(request.resume_token_ids),
            resume_round=request.resume_round,
            max_tokens=max_tokens,
            stop_rules=StopRules(
                max_output=max_tokens,
                stop_ids=frozenset(sampling.stop_token_ids),
                stop_strings=stop,
                min_tokens=request.min_tokens,
            ),
        )

    def _sampling(self, request: generation_pb2.GenerateRequest) -> session_pb2.SamplingParams:
        """All but the seed."""

        def given(field: str, default: float) -> float:
            return float(getattr(request, field)) if request.HasField(field) else default

        if len(request.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_IDS} ids", field="stop_token_ids")
        stop_ids = set(request.stop_token_ids)
        if not request.ignore_eos:
            stop_ids.update(self.limits.eos_ids)
        sampling = session_pb2.SamplingParams(
            temperature=given("temperature", 1.0),
            top_k=request.top_k if request.HasField("top_k") else 0,
            top_p=given("top_p", 1.0),
            min_p=given("min_p", 0.0),
            repetition_penalty=given("repetition_penalty", 1.0),
            presence_penalty=given("presence_penalty", 0.0),
            frequency_penalty=given("frequency_penalty", 0.0),
            logit_bias=[
                session_pb2.LogitBias(token_id=token_id, bias=bias)
                for token_id, bias in sorted(request.logit_bias.items())
            ],
            stop_token_ids=sorted(stop_ids),
            min_tokens=request.min_tokens,
        )
        if request.HasField("logprobs"):
            sampling.num_logprobs = request.logprobs
        validate(sampling, self.limits.vocab_size)
        return sampling

    def _stop_strings(self, request: generation_pb2.GenerateRequest) -> tuple[str, ...]:
        if len(request.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} strings", field="stop")
        for stop in request.stop:
            if not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
                raise InvalidRequest(f"each must have 1 to {MAX_STOP_BYTES} bytes", field="stop")
        return tuple(dict.fromkeys(request.stop))

    def _num_draft_tokens(self, request: generation_pb2.GenerateRequest) -> int | None:
        most = min(self.speculation.max_num_draft_tokens, self.limits.max_num_draft_tokens)
        if request.HasField("num_draft_tokens"):
            _in_range("num_draft_tokens", request.num_draft_tokens, 0, most)
            return request.num_draft_tokens
        fixed = self.speculation.num_draft_tokens
        return None if fixed is None else min(fixed, most)

    def _prompt(self, request: generation_pb2.GenerateRequest) -> tuple[Sequence[int], str]:
        kind = request.WhichOneof("prompt")
        most_bytes = self.admission.max_prompt_bytes
        if kind is None:
            raise InvalidRequest("one of text, tokens, chat is needed", field="prompt")
        if kind == "tokens":
            ids = request.tokens.token_ids
            _in_range("tokens.token_ids", len(ids), 1, most_bytes, what="number of ids")
            self._in_vocabulary("tokens.token_ids", ids)
            return ids, "text_completion"
        if kind == "text":
            _in_range("text", len(request.text.encode()), 1, most_bytes, what="number of bytes")
            ids_of_text = self.tokenizer.encode(request.text)
            if not ids_of_text:
                raise InvalidRequest("the text has no tokens", field="text")
            return ids_of_text, "text_completion"
        return self._chat_prompt(request.chat), "chat"

    def _chat_prompt(self, chat: generation_pb2.ChatPrompt) -> Sequence[int]:
        messages = [{"role": each.role, "content": each.content} for each in chat.messages]
        if not messages:
            raise InvalidRequest("at least one message is needed", field="chat.messages")
        size = sum(len(text.encode()) for message in messages for text in message.values())
        most_bytes = self.admission.max_prompt_bytes
        _in_range("chat.messages", size, 1, most_bytes, what="number of bytes")
        for index, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise InvalidRequest(
                    f"{message['role'][:32]!r} is none of {', '.join(ROLES)}",
                    field=f"chat.messages[{index}].role",
                )
        try:
            ids = self.tokenizer.chat(messages)
        except InvalidRequest as refused:
            raise InvalidRequest(refused.message, field="chat.messages") from refused
        if not ids:
            raise InvalidRequest("the template makes no tokens of it", field="chat.messages")
        return ids

    def _max_tokens(self, request: generation_pb2.GenerateRequest, prompt_len: int) -> int:
        room = self.limits.max_context_len - prompt_len
        if room < 1:
            raise ContextTooLong(
                f"a prompt of {prompt_len} tokens leaves no room in a context of "
                f"{self.limits.max_context_len}",
                field="prompt",
            )
        asked = (
            request.max_tokens
            if request.HasField("max_tokens")
            else self.admission.default_max_tokens
        )
        if asked < 1:
            raise InvalidRequest("must be at least 1", field="max_tokens")
        if request.HasField("max_tokens") and request.min_tokens > asked:
            raise InvalidRequest(f"exceeds max_tokens {asked}", field="min_tokens")
        max_tokens = min(asked, room)
        if request.min_tokens > max_tokens:
            raise InvalidRequest(f"exceeds the {max_tokens} tokens possible", field="min_tokens")
        return max_tokens

    def _check_resume(
        self, request: generation_pb2.GenerateRequest, num_samples: int, max_tokens: int
    ) -> None:
        ids = request.resume_token_ids
        if not ids:
            if request.resume_round:
                raise InvalidRequest("needs resume_token_ids", field="resume_round")
            return
        if not request.HasField("seed"):
            raise InvalidRequest("resuming needs the seed of the first attempt", field="seed")
        if num_samples != 1:
            raise InvalidRequest("resuming needs n = 1", field="n")
        if len(ids) > max_tokens:
            raise InvalidRequest(f"{len(ids)} ids exceed {max_tokens} tokens", field="max_tokens")
        self._in_vocabulary("resume_token_ids", ids)
        # Every delivered round brought at least one id.
        _in_range("resume_round", request.resume_round, 1, len(ids))

    def _in_vocabulary(self, field: str, ids: Sequence[int]) -> None:
        if max(ids) >= self.limits.vocab_size:
            raise InvalidRequest(
                f"token id {max(ids)} is outside a vocabulary of {self.limits.vocab_size}",
                field=field,
            )


def _in_range(field: str, value: int, low: int, high: int, what: str = "") -> None:
    if not low <= value <= high:
        subject = f"{what} " if what else ""
        raise InvalidRequest(f"{subject}must be in [{low}, {high}], got {value}", field=field)


def _known(field: str, value: Any, enum: Any) -> Any:
    """An enum value that this version knows; open enums let any number through."""
    if value not in enum.values():
        raise InvalidRequest(f"unknown value {value}", field=field)
    return value
