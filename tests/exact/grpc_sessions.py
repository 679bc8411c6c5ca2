"""Many sessions in step over one link to each service: the coordinator's part of DESIGN section 4.

Deliberately small and separate from `coordinator/`: what is under test here is the services, the
wire and the decision, on either side of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels import reference
from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh import wire
from specmesh.engine.decoder import Decoder
from specmesh.engine.runner import EngineOptions
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from tests.exact.tiny_llama import VOCAB_SIZE
from tests.rpc.peers import (
    AT_COORDINATOR,
    AUTO,
    COUPLED,
    VOCAB_HASH,
    Peer,
    Setup,
    linked,
    running,
    sampling,
)
from tests.telemetry.rounds import Round

PAGE_SIZE = 32  # one page a session
NextK = Callable[[int], int]  # round index -> candidates wanted


@dataclass
class Generation:
    """One request: what was asked, and where it stands.

    emitted_per_round: tokens of each round. num_judged and num_accepted: over all rounds. reports:
    what the target says of each round that it decided.
    """

    session_id: str
    prompt: list[int]
    max_tokens: int
    next_k: NextK
    seed: int
    params: dict[str, Any] = field(default_factory=dict)
    rule: int = session_pb2.DECISION_RULE_RESIDUAL
    decide_at: int = session_pb2.DECIDE_AT_TARGET
    row_policy: int = AUTO
    vocab_size: int = VOCAB_SIZE
    tokens: list[int] = field(default_factory=list)
    emitted_per_round: list[list[int]] = field(default_factory=list)
    num_judged: int = 0
    num_accepted: int = 0
    reports: list[Round] = field(default_factory=list)
    _digest: int = EMPTY_DIGEST
    _target_len: int = 0
    _target_accepted: int = 0
    _draft_len: int = 0
    _draft_accepted: int = 0
    _is_drafting: bool = False
    _candidates: tuple[int, ...] = ()
    _rows: tuple[session_pb2.Distribution, ...] = ()

    def __post_init__(self) -> None:
        self._append(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_finished(self) -> bool:
        """Budget spent, or a stop token emitted."""
        stopped = bool(self.output) and self.output[-1] in self.params.get("stop_token_ids", ())
        return stopped or len(self.output) >= self.max_tokens

    def _append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self._digest = extend_digest(self._digest, tokens)

    def _open(self) -> session_pb2.OpenSession:
        return session_pb2.OpenSession(
            sampling=sampling(seed=self.seed, **self.params),
            rule=self.rule,  # type: ignore[arg-type]  # enum values are ints
            prompt_len=len(self.prompt),
            max_len=len(self.prompt) + self.max_tokens + 1,
            row_policy=self.row_policy,  # type: ignore[arg-type]
            vocab_hash=VOCAB_HASH,
        )

    def _prefix(self, known_len: int, num_accepted: int) -> session_pb2.PrefixUpdate:
        return session_pb2.PrefixUpdate(
            base_len=len(self.tokens),
            append_from=known_len,
            append=self.tokens[known_len:],
            num_accepted=num_accepted,
            prefix_digest=self._digest,
        )

    def _key(self) -> dict[str, Any]:
        return {"session_id": self.session_id, "epoch": 1, "round": len(self.emitted_per_round) + 1}

    def draft_commands(self) -> list[draft_pb2.DraftCommand]:
        """Propose where the next round has candidates, with Open before the first."""
        round_index = len(self.emitted_per_round)
        self._candidates, self._rows = (), ()
        k = 0
        if round_index:  # the prompt's own round has no candidates
            k = min(self.next_k(round_index), self.max_tokens - len(self.output) - 1)
        if k <= 0:
            return []
        commands = []
        if not self._is_drafting:
            self._is_drafting = True
            commands.append(draft_pb2.DraftCommand(**self._key(), open=self._open()))
        prefix = self._prefix(self._draft_len, self._draft_accepted)
        propose = draft_pb2.Propose(prefix=prefix, num_draft_tokens=k)
        self._draft_len = len(self.tokens)
        return [*commands, draft_pb2.DraftCommand(**self._key(), propose=propose)]

    def take_proposal(self, proposal: draft_pb2.Proposal) -> None:
        """Remember the candidates and their rows; rows pass through unopened."""
        self._candidates = tuple(proposal.tokens)
        self._rows = tuple(proposal.distributions)

    def target_commands(self) -> list[target_pb2.TargetCommand]:
        """Verify, with Open before the first."""
        commands = []
        if not self.emitted_per_round:
            commands.append(target_pb2.TargetCommand(**self._key(), open=self._open()))
        verify = target_pb2.Verify(
            prefix=self._prefix(self._target_len, self._target_accepted),
            candidates=self._candidates,
            distributions=self._rows,
            decide_at=self.decide_at,  # type: ignore[arg-type]
            num_steps=0 if self._candidates else 1,
        )
        self._target_len = len(self.tokens)
        return [*commands, target_pb2.TargetCommand(**self._key(), verify=verify)]

    def take_verdict(self, verdict: target_pb2.Verdict) -> None:
        """Commit the round: the target's decision, or the one made here over its rows."""
        assert not verdict.HasField("redraw_mismatch"), "an honest draft was refuted"
        num_accepted, emitted = verdict.num_accepted, list(verdict.tokens)
        self._target_accepted = 0
        if self.decide_at == AT_COORDINATOR:
            decision = self._decide(verdict)
            num_accepted, emitted = decision.num_accepted, list(decision.tokens)
            self._target_accepted = num_accepted
        self._append(emitted)
        if self.decide_at != AT_COORDINATOR:
            self._target_len = len(self.tokens)
            self.reports.append(
                Round(
                    num_accepted,
                    [judged.overlap for judged in verdict.judged],
                    [token.is_argmax for token in verdict.emitted],
                    [token.max_prob for token in verdict.emitted],
                )
            )
        if self._candidates:
            self._draft_accepted = num_accepted
            self.num_judged += min(num_accepted + 1, len(self._candidates))
            self.num_accepted += num_accepted
        self.emitted_per_round.append(emitted)

    def _decide(self, verdict: target_pb2.Verdict) -> reference.Decision:
        target_rows = [wire.decode(row, self.vocab_size).dense() for row in verdict.distributions]
        stops = frozenset(self.params.get("stop_token_ids", ()))
        if self.rule == COUPLED:
            deciding = reference.decide_coupled(target_rows, self._candidates, stops)
        else:
            draft_rows = [wire.decode(row, self.vocab_size).dense() for row in self._rows]
            deciding = reference.decide(target_rows, draft_rows, self._candidates, stops)
        return reference.run(deciding, reference.philox_answer(self.seed, len(self.tokens)))


async def _exchange(peer: Peer, commands: list[Any], answer: str) -> dict[str, Any]:
    """Send one frame, wait for the answer of every command; answers of one kind by session."""
    if not commands:
        return {}
    await peer.send(*commands)
    found = {}
    for _ in commands:
        result = await peer.answer()
        kind = result.WhichOneof("result")
        assert kind in (answer, "opened", "closed"), result
        if kind == answer:
            found[result.session_id] = getattr(result, answer)
    return found


async def generate(draft: Peer, target: Peer, generations: Sequence[Generation]) -> None:
    """Run all generations to their end, every round of all of them in one frame a hop."""
    active = list(generations)
    while active:
        proposing = [command for each in active for command in each.draft_commands()]
        proposals = await _exchange(draft, proposing, "proposal")
        for each in active:
            if each.session_id in proposals:
                each.take_proposal(proposals[each.session_id])
        verifying = [command for each in active for command in each.target_commands()]
        verdicts = await _exchange(target, verifying, "verdict")
        closing_draft, closing_target = [], []
        for each in active:
            each.take_verdict(verdicts[each.session_id])
            if each.is_finished:
                key = {"session_id": each.session_id, "epoch": 1, "close": _CLOSE}
                closing_target.append(target_pb2.TargetCommand(**key, round=1 << 20))
                if each._is_drafting:
                    closing_draft.append(draft_pb2.DraftCommand(**key, round=1 << 20))
        await _exchange(draft, closing_draft, "closed")
        await _exchange(target, closing_target, "closed")
        active = [each for each in active if not each.is_finished]


async def serve(
    target: Decoder,
    draft: Decoder,
    waves: Sequence[Sequence[Generation]],
    page_size: int = PAGE_SIZE,
) -> None:
    """Serve both models in this process and run the waves through gRPC, one after the other.

    page_size: tokens; no session may need more than one page.
    """
    largest = max(map(len, waves))

    def setup(decoder: Decoder) -> Setup:
        return Setup(
            num_pages=largest + 8,
            page_size=page_size,
            max_sessions=largest,
            options=EngineOptions(token_budget=1 << 14, max_waiting_commands=4 * largest),
            cache=decoder.new_cache(largest + 8, page_size),
            max_message_bytes=64 << 20,
        )

    async with (
        running("draft", draft, setup(draft)) as draft_service,
        running("target", target, setup(target)) as target_service,
        linked(draft_service) as draft_peer,
        linked(target_service) as target_peer,
    ):
        for wave in waves:
            await generate(draft_peer, target_peer, wave)


_CLOSE = session_pb2.CloseSession()
