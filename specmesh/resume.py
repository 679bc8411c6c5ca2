"""What a client holds of one request, and the request that asks for the rest.

Sans-IO: `specmesh/client.py` makes the calls and sleeps, this file decides what is sent and what is
passed on. The contract (DESIGN section 6): a broken stream is repeated with the ids already held,
the same seed and the rule resolved by the first attempt, so nothing delivered is lost, repeated or
drawn again. One stream message carries the ids of whole rounds, so what is held always ends at a
round boundary. Knows no transport, no clock, no retry policy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.errors import InternalError, ModelMismatch
from specmesh.randomness import sample_seed

MAX_ROUND = (1 << 32) - 1  # the next one must fit into the request that resumes


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    next_round: int = 0
    finished: bool = False


class Resumption:
    """One request across attempts. Not thread-safe; one attempt at a time."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request` is copied. Ids it already resumes from count as held."""
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._num_samples = max(1, request.n) if request.HasField("n") else 1
        # Made when something of them arrives: how many there may be is for the coordinator to say.
        self._samples: dict[int, _Sample] = defaultdict(_Sample)
        if request.resume_token_ids:
            self._samples[0].token_ids.extend(request.resume_token_ids)
            self._samples[0].next_round = request.resume_round
        self._started: pb.Started | None = None
        # The caller's index of the one sample this attempt asks for; None: it asks for all.
        self._only: int | None = None

    @property
    def done(self) -> bool:
        """Whether every sample has finished."""
        return sum(sample.finished for sample in self._samples.values()) == self._num_samples

    @property
    def num_held(self) -> int:
        """Tokens and endings held over all samples: grows exactly when there is progress."""
        return sum(len(s.token_ids) + s.finished for s in self._samples.values())

    def next_request(self) -> pb.GenerateRequest:
        """The request of the next attempt.

        Until anything of a sample has arrived it is the caller's own. Afterwards every sample that
        is still open is asked for by itself (resuming needs n = 1), with its own seed; so after a
        loss in the middle of n > 1 samples, several calls in a row bring the rest.
        """
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        self._only = None
        if self._started is None:
            return request
        index = next(i for i in range(self._num_samples) if not self._samples[i].finished)
        sample = self._samples[index]
        # What the first attempt resolved is now said outright: a replica's own defaults, or the
        # mere presence of the seed, must not change the law in the middle of a text.
        request.seed = sample_seed(self._started.seed, index)
        request.rule = self._started.rule
        request.decide_at = self._started.decide_at
        request.max_tokens = self._started.max_tokens
        request.n = 1
        request.ClearField("resume_token_ids")
        request.resume_token_ids.extend(sample.token_ids)
        request.resume_round = sample.next_round
        self._only = index
        return request

    def accept(self, response: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Take one message of the running attempt in; return what the caller sees, or None.

        `started` is passed on once. Raises ModelMismatch when a later attempt was answered by a
        replica with another model or tokenizer, InternalError on a message that fits no sample.
        """
        event = response.WhichOneof("event")
        if event == "started":
            return self._accept_started(response)
        if event not in ("chunk", "finished"):
            raise InternalError("the coordinator sent a message without an event")
        if self._started is None:
            raise InternalError(f"the coordinator sent {event} before started")
        passed_on = pb.GenerateResponse()
        passed_on.CopyFrom(response)
        body: pb.Chunk | pb.Finished = getattr(passed_on, event)
        if self._only is not None:
            body.index = self._only
        if body.index >= self._num_samples or self._samples[body.index].finished:
            raise InternalError(f"the coordinator sent {event} for sample {body.index}")
        sample = self._samples[body.index]
        if isinstance(body, pb.Chunk):
            if body.round >= MAX_ROUND:
                raise InternalError(f"the coordinator sent round {body.round}")
            sample.token_ids.extend(body.token_ids)
            sample.next_round = body.round + 1
        else:
            sample.finished = True
        return passed_on

    def _accept_started(self, response: pb.GenerateResponse) -> pb.GenerateResponse | None:
        first, now = self._started, response.started
        if first is None:
            self._started = pb.Started()
            self._started.CopyFrom(now)
            return response
        if (first.model, first.prompt_tokens) != (now.model, now.prompt_tokens):
            raise ModelMismatch(
                f"resumed on {now.model} with {now.prompt_tokens} prompt tokens, but the stream "
                f"began on {first.model} with {first.prompt_tokens}"
            )
        return None
