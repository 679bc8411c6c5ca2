"""Rounds of the residual rule between real services, with what their draft could know of each.

A coordinator for measurements: several answers side by side go through their rounds together, so
that a run repeats. The draft is asked for one candidate more than the target judges; its row is the
row behind all candidates, as a draft sees it that drafts ahead. Nothing is measured here
(draft_service/bench_outcomes.py).
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draft_service.outcomes import Noise
from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from specmesh.wire_errors import error_from_message

MAX_TOKENS = 192  # of an answer, before its last round


@dataclass(frozen=True, slots=True)
class Ended:
    """A round that another follows. behind: the draft's row behind all candidates."""

    proposal: draft_pb2.Proposal
    behind: session_pb2.Distribution
    noise: Noise
    verdict: target_pb2.Verdict


@dataclass(slots=True, eq=False)
class Answer:
    """A session: what is confirmed, what the draft knows of it, and how its last proposal ended."""

    seed: int
    tokens: list[int]
    prompt_len: int
    draft_len: int = 0
    num_accepted: int = 0
    num_commands: int = 0

    def prefix(self, known_len: int, num_accepted: int = 0) -> session_pb2.PrefixUpdate:
        """All that is confirmed, for a side that has known_len tokens of it."""
        return session_pb2.PrefixUpdate(
            base_len=len(self.tokens),
            append_from=known_len,
            append=self.tokens[known_len:],
            num_accepted=num_accepted,
            prefix_digest=extend_digest(EMPTY_DIGEST, self.tokens),
        )


class Link:
    """The stream to one service. stub, request_type, command_type: of its generated code."""

    def __init__(self, stub: Any, request_type: type[Any], command_type: type[Any]) -> None:
        self._call = stub.Link()
        self._request_type, self._command_type = request_type, command_type

    async def ask(self, kind: str, bodies: Mapping[Answer, Any]) -> list[Any]:
        """Send a command of one kind to each session; returns the results in the same order.

        Raises the error that one was answered with.
        """
        if not bodies:
            return []
        commands = []
        for answer, body in bodies.items():
            answer.num_commands += 1  # rounds of a side may leave numbers out
            key = {"session_id": str(answer.seed), "epoch": 1, "round": answer.num_commands}
            commands.append(self._command_type(**key, **{kind: body}))
        await self._call.write(self._request_type(commands=commands))
        found: dict[str, Any] = {}
        while len(found) < len(commands):
            for result in (await self._call.read()).results:
                if result.WhichOneof("result") == "error":
                    raise error_from_message(result.error)
                if result.WhichOneof("result") != "deferred":
                    found[result.session_id] = result
        return [found[command.session_id] for command in commands]


class Rounds:
    """Takes answers through their rounds, several side by side."""

    def __init__(
        self, draft: Link, target: Link, opening: session_pb2.OpenSession, num_draft_tokens: int
    ) -> None:
        """opening: of every session, but for seed and lengths. num_draft_tokens: those judged."""
        self._draft, self._target = draft, target
        self._opening, self._num_draft_tokens = opening, num_draft_tokens

    async def run(
        self, prompts: Iterable[Sequence[int]], num_sessions: int
    ) -> AsyncIterator[Ended]:
        """Rounds, as long as there are prompts; answers are numbered, and that is their seed."""
        answers = (Answer(n, list(each), len(each)) for n, each in enumerate(prompts))
        live: list[Answer] = []
        while True:
            live = await self._going_on(live)
            fresh = list(itertools.islice(answers, num_sessions - len(live)))
            live += await self._going_on(await self._begun(fresh))
            if not live and not fresh:
                return
            for each in await self._round(live):
                yield each

    async def _begun(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Open sessions on both sides, and let the target draw each first token."""
        openings = {each: self._opened(each) for each in answers}
        for link in (self._draft, self._target):
            await link.ask("open", openings)
        first = {each: _verify(each.prefix(0), draft_pb2.Proposal()) for each in answers}
        for each, result in zip(answers, await self._target.ask("verify", first), strict=True):
            each.tokens += result.verdict.tokens
        return answers

    def _opened(self, answer: Answer) -> session_pb2.OpenSession:
        opening = session_pb2.OpenSession(prompt_len=answer.prompt_len)
        opening.max_len = answer.prompt_len + MAX_TOKENS + self._num_draft_tokens + 1
        opening.MergeFrom(self._opening)
        opening.sampling.seed = answer.seed
        return opening

    async def _going_on(self, answers: Sequence[Answer]) -> list[Answer]:
        """Close the sessions of answers that have ended; returns the others."""
        ended = [
            each
            for each in answers
            if self._is_stopped(each) or len(each.tokens) >= each.prompt_len + MAX_TOKENS
        ]
        for link in (self._draft, self._target):
            await link.ask("close", dict.fromkeys(ended, session_pb2.CloseSession()))
        return [each for each in answers if each not in ended]

    def _is_stopped(self, answer: Answer) -> bool:
        return answer.tokens[-1] in self._opening.sampling.stop_token_ids

    async def _round(self, answers: Sequence[Answer]) -> list[Ended]:
        """One round of each; those that another follows."""
        wanted = self._num_draft_tokens + 1
        propose = {
            each: draft_pb2.Propose(
                prefix=each.prefix(each.draft_len, each.num_accepted), num_draft_tokens=wanted
            )
            for each in answers
        }
        drawn = [each.proposal for each in await self._draft.ask("propose", propose)]
        judged = [
            draft_pb2.Proposal(tokens=each.tokens[:-1], distributions=each.distributions[:-1])
            for each in drawn
        ]
        verify = {
            each: _verify(each.prefix(len(each.tokens)), proposal)
            for each, proposal in zip(answers, judged, strict=True)
        }
        verdicts = [each.verdict for each in await self._target.ask("verify", verify)]
        found = []
        for each, own, proposal, verdict in zip(answers, drawn, judged, verdicts, strict=True):
            noise = Noise(each.seed, len(each.tokens))
            each.draft_len, each.num_accepted = len(each.tokens), verdict.num_accepted
            each.tokens += verdict.tokens
            if not self._is_stopped(each):
                found.append(Ended(proposal, own.distributions[-1], noise, verdict))
        return found


def opening_of(info: session_pb2.ModelInfo, temperature: float) -> session_pb2.OpenSession:
    """What sessions with this target open with: the residual rule and sparse rows."""
    return session_pb2.OpenSession(
        sampling=session_pb2.SamplingParams(
            temperature=temperature,
            top_p=1.0,
            repetition_penalty=1.0,
            stop_token_ids=info.eos_token_ids,
        ),
        rule=session_pb2.DECISION_RULE_RESIDUAL,
        row_policy=session_pb2.ROW_POLICY_AUTO,
        vocab_hash=info.vocab_hash,
    )


def _verify(prefix: session_pb2.PrefixUpdate, proposal: draft_pb2.Proposal) -> target_pb2.Verify:
    return target_pb2.Verify(
        prefix=prefix,
        candidates=proposal.tokens,
        distributions=proposal.distributions,
        decide_at=session_pb2.DECIDE_AT_TARGET,
        num_steps=1,
    )
