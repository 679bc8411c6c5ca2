"""Requests as Python callers write them: a prompt and options, turned into the public message.

Owns the names of options and the kinds of prompt. Ranges and defaults are the coordinator's
(`coordinator/requests.py`): what can be put into the message is sent, and refused there by field.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from specmesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat prompt. role: "system", "user" or "assistant"."""

    role: str
    content: str


# Text as it is, token ids as they are, or chat messages (the coordinator applies the template).
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatTurn]

MAX_UINT32 = 2**32 - 1
_MOST = {FieldDescriptor.TYPE_UINT32: MAX_UINT32, FieldDescriptor.TYPE_UINT64: 2**64 - 1}

RULES = {
    "residual": session_pb2.DECISION_RULE_RESIDUAL,
    "coupled": session_pb2.DECISION_RULE_COUPLED,
}
ROW_POLICIES = {
    "auto": session_pb2.ROW_POLICY_AUTO,
    "dense_f32": session_pb2.ROW_POLICY_DENSE_F32,
    "dense_f16": session_pb2.ROW_POLICY_DENSE_F16,
}
PLACEMENTS = {
    "target": session_pb2.DECIDE_AT_TARGET,
    "coordinator": session_pb2.DECIDE_AT_COORDINATOR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Everything a request may set; None leaves the coordinator's default. Ranges: the coordinator.

    rule: "residual" or "coupled"; row_policy: "auto", "dense_f32", "dense_f16"; decide_at: "target"
    or "coordinator". logit_bias maps token ids to what is added to their logits.
    """

    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    rule: str | None = None
    num_draft_tokens: int | None = None
    row_policy: str | None = None
    decide_at: str | None = None

    def request(self, prompt: Prompt) -> pb.GenerateRequest:
        """The message for `prompt`. Raises InvalidRequest for what the message cannot even hold."""
        request = pb.GenerateRequest()
        _set_prompt(request, prompt)
        enums: dict[str, Mapping[str, Any]] = {
            "rule": RULES,
            "row_policy": ROW_POLICIES,
            "decide_at": PLACEMENTS,
        }
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None:
                continue
            try:
                if option.name in enums:
                    setattr(request, option.name, _enum(option.name, value, enums[option.name]))
                elif option.name == "logit_bias":
                    request.logit_bias.update(value)
                elif option.name == "stop" and isinstance(value, str):
                    request.stop.append(value)  # a string is a sequence too, of characters
                elif option.name in ("stop", "stop_token_ids"):
                    getattr(request, option.name).extend(value)
                else:
                    setattr(request, option.name, value)
            except (ValueError, TypeError) as error:
                why = _out_of_range(option.name, value) or str(error)
                raise InvalidRequest(why, field=option.name) from error
        return request


def _out_of_range(name: str, value: Any) -> str | None:
    """What to say of an integer that its field cannot hold; None where that is not the fault."""
    field = pb.GenerateRequest.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None:  # a map
        field = field.message_type.fields_by_name["key"]
    most = _MOST.get(field.type)
    if most is None:
        return None
    for each in value if isinstance(value, Iterable) else (value,):
        if isinstance(each, int) and not 0 <= each <= most:
            return f"{each} is not in 0 to {most}"
    return None


def _enum(name: str, value: str, names: Mapping[str, Any]) -> Any:
    if value not in names:
        raise InvalidRequest(f"{value!r} is none of {', '.join(names)}", field=name)
    return names[value]


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """Raises InvalidRequest for what is none of the three kinds, or cannot be written as UTF-8."""
    try:
        if isinstance(prompt, str):
            request.text = prompt
            return
        if isinstance(prompt, bytes | bytearray):  # a sequence of integers, but no token ids
            raise TypeError
        parts: list[Any] = list(prompt)
        if parts and all(isinstance(part, ChatTurn) for part in parts):
            for turn in parts:
                if not isinstance(turn.content, str):  # protobuf would take None for ""
                    raise TypeError
                request.chat.messages.add(role=turn.role, content=turn.content)
        elif any(isinstance(part, bool) for part in parts):
            raise TypeError
        else:
            ids = [operator.index(part) for part in parts]
            for token_id in ids:
                if not 0 <= token_id <= MAX_UINT32:
                    raise InvalidRequest(
                        f"token id {token_id} is not in 0 to {MAX_UINT32}", field="prompt"
                    )
            request.tokens.token_ids.extend(ids)
            request.tokens.SetInParent()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"is no text: {error.reason}", field="prompt") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            "text, token ids or chat turns are expected", field="prompt"
        ) from error
