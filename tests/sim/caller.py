"""Callers: the production client, crashing and resuming, giving up, running out of time.

Owns what one request received and the checks that need nothing but that: rounds in a row, nothing
after the end, counts that agree.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from protos.specmesh.v1 import generation_pb2 as pb
from protos.specmesh.v1 import session_pb2
from specmesh.client import AsyncClient
from specmesh.errors import Cancelled, DeadlineExceeded, NotReady, TooBusy
from tests.sim.options import Setup
from tests.sim.transport import Network, Node

RULES = {
    "residual": session_pb2.DECISION_RULE_RESIDUAL,
    "coupled": session_pb2.DECISION_RULE_COUPLED,
}
PLACEMENTS = {
    "target": session_pb2.DECIDE_AT_TARGET,
    "coordinator": session_pb2.DECIDE_AT_COORDINATOR,
}
SHARED_PROMPT = (0, 1, 2, 0, 1, 2, 0, 0, 1)


def drawn_request(setup: Setup, rng: random.Random) -> pb.GenerateRequest:
    """A request of a run. Prompts begin alike, so that prefixes are shared."""
    rule = rng.choice(setup.rules)
    request = pb.GenerateRequest(max_tokens=setup.max_tokens)
    prompt_len = rng.randint(1, setup.max_prompt)
    prompt = list(SHARED_PROMPT[:prompt_len])
    if rng.random() < 0.4:
        prompt[-1] = rng.randrange(setup.vocab_size)
    request.tokens.token_ids.extend(prompt)
    request.temperature = 0.0 if rule == "greedy" else rng.choice((1.0, 0.7, 1.5))
    if rule != "greedy":
        request.seed = rng.getrandbits(64)
        request.rule = RULES[rule]
    request.decide_at = PLACEMENTS[rng.choice(setup.placements)]
    request.ignore_eos = rng.random() < 0.6
    if rng.random() < 0.2:
        request.stop.append(rng.choice(("ab", "ba", "bb", "é", "aa")))
    if rng.random() < 0.2:
        request.min_tokens = rng.randint(1, 2)
    if rng.random() < 0.2:
        request.repetition_penalty = rng.choice((0.5, 1.5))
    if rng.random() < 0.3:
        request.frequency_penalty = rng.choice((-1.0, 1.0))
    if rng.random() < 0.2:
        request.top_k = 2
    if rng.random() < 0.2:
        request.logprobs = 1
    return request


@dataclass
class Received:
    """What a caller holds."""

    started: pb.Started | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    next_round: int | None = None
    finished: pb.Finished | None = None
    gave_up: str = ""  # why the caller did not wait for the end
    num_attempts: int = 0

    def add(self, event: pb.Started | pb.Chunk | pb.Finished) -> None:
        """Take an event in. Raises AssertionError when it cannot follow what came before."""
        assert self.finished is None, "an event follows the end"
        if isinstance(event, pb.Started):
            self.started = event
        elif isinstance(event, pb.Chunk):
            if self.next_round is not None:
                assert event.round == self.next_round, f"round {event.round}, not {self.next_round}"
            self.next_round = event.round + 1
            assert event.token_ids, "a chunk without tokens"
            self.tokens += event.token_ids
            self.text += event.text
            self.logprobs += [each.logprob for each in event.logprobs]
        else:
            self.finished = event
            assert event.usage.completion_tokens == len(self.tokens), "usage is not what came"


class Caller:
    """One request of one caller process."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        setup: Setup,
        network: Network,
        rng: random.Random,
        name: str,
    ) -> None:
        self.request, self.received = request, Received()
        self._setup, self._network, self._rng, self._name = setup, network, rng, name
        self._addresses = [f"coordinator{i}" for i in range(setup.num_coordinators)]
        self.node = Node(name)
        self._attempting: asyncio.Future[None] | None = None

    def interrupt(self) -> None:
        """The caller's process dies now; the next one goes on with what was held."""
        if self._attempting is not None:
            self._attempting.cancel()

    async def run(self) -> None:
        """Until the whole output is there, or the caller's own fault says that it left."""
        received = self.received
        while received.finished is None and not received.gave_up:
            received.num_attempts += 1
            assert received.num_attempts < 200, "a request never ends"
            self._attempting = asyncio.ensure_future(self._attempt())
            try:
                await asyncio.wait((self._attempting,))
                if not self._attempting.cancelled():
                    self._attempting.result()
            except DeadlineExceeded:
                received.gave_up = "deadline"
            except (NotReady, TooBusy, Cancelled) as error:
                # What the documentation tells callers to do when the client gives up: once more,
                # with what they hold.
                await asyncio.sleep(max(0.2, error.retry_after_s))

    async def _attempt(self) -> None:
        network, rng = self._network, self._rng
        timeout_s = 600.0
        if network.happens("deadline"):
            timeout_s = rng.random() * self._setup.faults.window_s
        leaves = network.happens("cancel")
        crashes = not leaves and network.happens("client_crash")
        num_events = rng.randint(0, 6) if leaves or crashes else -1
        client = AsyncClient(self._addresses if rng.random() < 0.5 else self._addresses[::-1])
        events = client.stream_request(self._next_request(), timeout_s=timeout_s)
        try:
            if num_events == 0:
                reading = asyncio.ensure_future(anext(events))
                await asyncio.sleep(rng.random() * self._setup.faults.window_s)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            else:
                async for event in events:
                    if self._is_new(event):
                        self.received.add(event)
                    num_events -= 1
                    if num_events == 0:
                        break
        finally:
            await events.aclose()
            await client.close()
        if leaves and self.received.finished is None:
            self.received.gave_up = "cancel"
        if crashes:
            await asyncio.sleep(rng.random() * 0.2)

    def _is_new(self, event: object) -> bool:
        return not (isinstance(event, pb.Started) and self.received.started is not None)

    def _next_request(self) -> pb.GenerateRequest:
        """The rule for clients in any language: the same request with what is held."""
        request, received = pb.GenerateRequest(), self.received
        request.CopyFrom(self.request)
        if received.started is not None:
            request.seed = received.started.seed
            request.rule = received.started.rule
            request.decide_at = received.started.decide_at
            request.max_tokens = received.started.max_tokens
        if received.tokens:
            request.resume_token_ids.extend(received.tokens)
            request.resume_round = received.next_round or 0
        return request
