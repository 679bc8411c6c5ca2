"""What a request must give, worked out without any of the system: one token after the other.

Uses the model, the specification of shaping and draws (`kernels/reference.py`) and the rules of
DESIGN section 2 read plainly. Knows no rounds, drafts, sessions or services.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import generation_pb2 as pb
from tests.sim.model import TinyModel


@dataclass(frozen=True)
class End:
    """Where a sequence of output tokens ends. reason is "" where it does not end yet."""

    num_tokens: int
    text: str
    reason: str


class Oracle:
    """Answers for one target model. text_of: bytes of an id."""

    def __init__(self, model: TinyModel, token_bytes: Sequence[bytes]) -> None:
        self._model = model
        self._token_bytes = token_bytes
        self._eos = model.spec.vocab_size - 1

    def stop_ids(self, request: pb.GenerateRequest) -> set[int]:
        """Ids that end the request."""
        return {*request.stop_token_ids, *(() if request.ignore_eos else (self._eos,))}

    def row(self, request: pb.GenerateRequest, output: Sequence[int]) -> Tensor:
        """The processed distribution after prompt and output, unnormalised."""
        prompt = list(request.tokens.token_ids)
        vocab_size = self._model.spec.vocab_size
        logits = self._model.logits([*prompt, *output])[:vocab_size].clone()
        counts = Counter(output)

        def given(field: str, default: float) -> float:
            value = getattr(request, field) if request.HasField(field) else default
            return float(torch.tensor(value, dtype=torch.float32))

        shaping = reference.Shaping(
            temperature=given("temperature", 1.0),
            top_k=int(given("top_k", 0)),
            top_p=given("top_p", 1.0),
            repetition_penalty=given("repetition_penalty", 1.0),
            presence_penalty=given("presence_penalty", 0.0),
            frequency_penalty=given("frequency_penalty", 0.0),
        )
        logits = reference.penalize(
            logits,
            shaping,
            prompt_ids=torch.tensor(sorted(set(prompt))),
            output_ids=torch.tensor(list(counts), dtype=torch.int64),
            output_counts=torch.tensor(list(counts.values()), dtype=torch.int64),
        )
        early = len(output) < request.min_tokens
        suppressed = sorted(self.stop_ids(request)) if early else ()
        return reference.shape(logits, shaping, vocab_size, suppressed)

    def undisturbed(self, request: pb.GenerateRequest) -> list[int]:
        """Output tokens of a greedy or coupled request."""
        output: list[int] = []
        prompt_len = len(request.tokens.token_ids)
        is_greedy = request.HasField("temperature") and request.temperature == 0.0
        while not self.end(request, output).reason:
            row = self.row(request, output)
            if is_greedy:
                output.append(reference.lowest_argmax(row))
            else:
                position = prompt_len + len(output)
                output.append(reference.race(row, request.seed, position, 0, Purpose.COUPLED))
        return output

    def check_possible(self, request: pb.GenerateRequest, output: Sequence[int]) -> None:
        """Assert that a sampler of the target could have given these tokens, none after the end."""
        for index, token in enumerate(output):
            assert not self.end(request, output[:index]).reason, f"tokens follow the end: {output}"
            weight = float(self.row(request, output[:index])[token])
            assert weight > 0.0, f"token {index} of {output} has no mass"

    def logprob(self, request: pb.GenerateRequest, output: Sequence[int], index: int) -> float:
        """Raw log-probability of output token `index`."""
        prefix = [*request.tokens.token_ids, *output[:index]]
        logits = self._model.logits(prefix)[: self._model.spec.vocab_size]
        return float(torch.log_softmax(logits.double(), dim=-1)[output[index]])

    def end(self, request: pb.GenerateRequest, output: Sequence[int]) -> End:
        """Where, how and with which text these output tokens end, read token by token."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        stops, text = self.stop_ids(request), ""
        for count, token in enumerate(output, start=1):
            may_stop = count > request.min_tokens
            if may_stop and token in stops:
                return End(count, text + decoder.decode(b"", final=True), "stop")
            before = len(text)
            text += decoder.decode(self._token_bytes[token])
            cut = _first_stop(text, before, request.stop) if may_stop else None
            if cut is not None:
                return End(count, text[:cut], "stop")
            if count == request.max_tokens:
                before = len(text)
                text += decoder.decode(b"", final=True)
                cut = _first_stop(text, before, request.stop) if may_stop else None
                return End(count, text[:cut], "length" if cut is None else "stop")
        return End(len(output), text, "")


def _first_stop(text: str, before: int, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that the characters from `before` on complete first."""
    for end in range(before + 1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins)
    return None
