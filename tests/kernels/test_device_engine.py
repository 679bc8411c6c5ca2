"""The engine that decides on the device answers what the reference engine answers.

Both engines get the same commands over the same tiny models: prompts, rounds, plain decoding, every
rule, filters, lying rows. Tokens, counts and boundaries are equal; probabilities within float32.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.device_proposer import DeviceProposer
from draft_service.proposer import Proposer
from protos.specmesh.v1 import draft_pb2, session_pb2, target_pb2
from specmesh.config import TelemetrySettings
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.buckets import Buckets
from specmesh.engine.commands import Observers
from specmesh.engine.decoder import load_decoder
from specmesh.engine.device_executor import ProgramExecutor
from specmesh.engine.executor import MAX_SLOTS, Device, StepExecutor
from specmesh.engine.runner import Engine, EngineOptions, system_clocks
from specmesh.engine.sessions import Limits
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from specmesh.service_metrics import ServiceMetrics
from specmesh.telemetry import Telemetry
from target_service.candidates import RedrawCheck
from target_service.device_verifier import DeviceVerifier
from target_service.verifier import Verifier, VerifierOptions
from tests.rpc.peers import whole
from tests.unit.tiny_models import PAGE, VOCAB, random_tokens, save, tiny_model

# Rows of padding hold anything, infinities too; numpy, which interprets, warns of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

NUM_PAGES = 24
MAX_DRAFT_TOKENS = 3
ANSWER_S = 120.0


class AnswerQueue:
    """The service end of a link: results, in order."""

    group = "test"

    def __init__(self) -> None:
        self.results: queue.Queue[Any] = queue.Queue()

    def post(self, results: list[Any]) -> None:
        for result in results:
            self.results.put(result)

    def post_end(self) -> None:
        pass


def make_engine(side: str, folder: Path, device: str, *, on_device: bool, pages: int) -> Engine:
    decoder = load_decoder(folder, device=device, fused=on_device)
    metrics = ServiceMetrics(side)
    clock_ns, offset_ns = system_clocks()
    device_side: Any = None
    if on_device:
        make = DeviceProposer if side == "draft" else DeviceVerifier
        device_side = make(VOCAB, MAX_SLOTS, MAX_DRAFT_TOKENS, decoder.device)
    if side == "draft":
        role: Any = Proposer(MAX_DRAFT_TOKENS, *([device_side.can_draw] if on_device else []))
    else:
        options = VerifierOptions(VOCAB, MAX_DRAFT_TOKENS)
        check = RedrawCheck(1.0)
        role = Verifier(options, check, *([device_side.can_decide] if on_device else []))
    limits = Limits(VOCAB, 1, 256, 32, pages, PAGE)

    def program_executor(device: Device, clock: Any) -> ProgramExecutor:
        buckets = Buckets.covering(
            max_seqs=4,
            max_query_len=device_side.max_query_len,
            max_long_rows=24,
            max_context_len=256,
        )
        return ProgramExecutor(device, device_side, buckets, clock)

    return Engine(
        Device(decoder, decoder.new_cache(pages, PAGE), BlockPool(pages, PAGE)),
        role,
        limits,
        # Interpreted kernels take minutes on a busy machine: no session is idle for that.
        EngineOptions(
            token_budget=32, prefill_chunk=16, warm_up_lens=(), session_idle_s=ANSWER_S * 10
        ),
        Observers(Telemetry(side, TelemetrySettings(), "test"), metrics, clock_ns, offset_ns),
        program_executor if on_device else StepExecutor,
    )


@dataclass
class Caller:
    """Commands of one session to one engine."""

    side: str
    engine: Engine
    link: AnswerQueue
    session_id: int
    tokens: list[int]
    known: int = 0
    accepted: int = 0
    round: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    part_sizes: list[int] = field(default_factory=list)

    def _command(self, **working: Any) -> Any:
        make = draft_pb2.DraftCommand if self.side == "draft" else target_pb2.TargetCommand
        return make(session_id=str(self.session_id), epoch=1, round=self.round, **working)

    def ask(self, command: Any) -> Any:
        assert self.engine.submit(self.link, [command])
        results = [self.link.results.get(timeout=ANSWER_S)]
        while self.side == "target" and results[-1].verdict.more:
            results.append(self.link.results.get(timeout=ANSWER_S))
        self.part_sizes = [len(each.verdict.tokens) for each in results if self.side == "target"]
        return whole(results[:-1], results[-1])

    def open(self, sampling: session_pb2.SamplingParams, rule: int, max_len: int = 128) -> None:
        opening = session_pb2.OpenSession(
            vocab_hash=1, prompt_len=len(self.tokens), max_len=max_len, rule=rule, sampling=sampling
        )
        result = self.ask(self._command(open=opening))
        assert result.WhichOneof("result") == "opened", result

    def work(self, **fields: Any) -> Any:
        """One Propose or Verify from the whole prefix; returns the answer."""
        return self.ask(self.command(**fields))

    def command(self, **fields: Any) -> Any:
        """One Propose or Verify from the whole prefix."""
        self.round += 1
        digest = extend_digest(EMPTY_DIGEST, self.tokens)
        prefix = session_pb2.PrefixUpdate(
            base_len=len(self.tokens),
            append_from=self.known,
            append=self.tokens[self.known :],
            num_accepted=self.accepted,
            prefix_digest=digest,
        )
        if self.side == "draft":
            return self._command(propose=draft_pb2.Propose(prefix=prefix, **fields))
        return self._command(verify=target_pb2.Verify(prefix=prefix, **fields))


def same_verdict(got: Any, wanted: Any) -> None:
    """Equal decisions and boundaries; probabilities within float32 of each other."""
    assert got.WhichOneof("result") == "verdict", got
    ours, theirs = got.verdict, wanted.verdict
    assert list(ours.tokens) == list(theirs.tokens)
    assert (ours.num_accepted, ours.closing) == (theirs.num_accepted, theirs.closing)
    assert ours.HasField("redraw_mismatch") == theirs.HasField("redraw_mismatch")
    assert (got.before, got.after) == (wanted.before, wanted.after)
    assert len(ours.judged) == len(theirs.judged)
    for mine, his in zip(ours.judged, theirs.judged, strict=True):
        for name in ("target_prob", "draft_prob", "overlap"):
            assert getattr(mine, name) == pytest.approx(getattr(his, name), rel=1e-4, abs=1e-6)
    for mine, his in zip(ours.emitted, theirs.emitted, strict=True):
        assert mine.is_argmax == his.is_argmax
        assert mine.max_prob == pytest.approx(his.max_prob, rel=1e-4)


def same_proposal(got: Any, wanted: Any) -> None:
    """Equal candidates and supports; weights within float32 of each other."""
    assert got.WhichOneof("result") == "proposal", got
    ours, theirs = got.proposal, wanted.proposal
    assert list(ours.tokens) == list(theirs.tokens)
    assert (got.before, got.after) == (wanted.before, wanted.after)
    assert len(ours.distributions) == len(theirs.distributions)
    for mine, his in zip(ours.distributions, theirs.distributions, strict=True):
        assert (mine.encoding, mine.ids) == (his.encoding, his.ids)
        rows = [
            torch.frombuffer(bytearray(each.values), dtype=torch.float32) for each in (mine, his)
        ]
        laws = [row / row.sum() for row in rows]
        torch.testing.assert_close(*laws, rtol=1e-4, atol=1e-6)


@dataclass
class Pairs:
    """A reference and a device engine of each side, over the same weights."""

    folders: dict[str, Path]
    engines: dict[tuple[str, bool], Engine]
    links: dict[tuple[str, bool], AnswerQueue] = field(default_factory=dict)
    num_sessions: int = 0

    def session(
        self, prompt: list[int], sampling: session_pb2.SamplingParams, rule: int
    ) -> dict[tuple[str, bool], Caller]:
        """Open one session everywhere."""
        self.num_sessions += 1
        callers = {}
        for key, engine in self.engines.items():
            link = self.links.setdefault(key, AnswerQueue())
            callers[key] = Caller(key[0], engine, link, self.num_sessions, list(prompt))
            callers[key].open(sampling, rule)
        return callers


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Pairs]:
    folders = {
        side: save(tiny_model("llama", seed=seed), tmp_path_factory.mktemp(side))
        for seed, side in enumerate(("draft", "target"))
    }
    made = Pairs(
        folders,
        {
            (side, on_device): make_engine(
                side, folder, device, on_device=on_device, pages=NUM_PAGES
            )
            for side, folder in folders.items()
            for on_device in (False, True)
        },
    )
    for engine in made.engines.values():
        engine.start()
    yield made
    for engine in made.engines.values():
        engine.stop()


def run_rounds(callers: dict[tuple[str, bool], Caller], counts: list[int]) -> list[int]:
    """Rounds of counts[i] candidates; both engines of a side get the same commands."""
    tokens = callers["target", False].tokens
    first = [caller.work(num_steps=1, decide_at=1) for caller in targets(callers)]
    same_verdict(first[1], first[0])
    follow(callers, first[0].verdict, "target")
    for count in counts:
        proposals = [
            callers["draft", on_device].work(num_draft_tokens=count) for on_device in (False, True)
        ]
        same_proposal(proposals[1], proposals[0])
        proposal = proposals[1].proposal
        verdicts = [
            caller.work(
                candidates=proposal.tokens, distributions=proposal.distributions, decide_at=1
            )
            for caller in targets(callers)
        ]
        same_verdict(verdicts[1], verdicts[0])
        follow(callers, verdicts[0].verdict, "both")
    return tokens


def targets(callers: dict[tuple[str, bool], Caller]) -> list[Caller]:
    return [callers["target", False], callers["target", True]]


def follow(callers: dict[tuple[str, bool], Caller], verdict: Any, sides: str) -> None:
    """Confirm what a verdict emitted, on every caller."""
    for (side, _), caller in callers.items():
        base_len = len(caller.tokens)
        caller.tokens.extend(verdict.tokens)
        if side == "target":
            caller.known = len(caller.tokens)
        elif sides == "both":
            caller.known, caller.accepted = base_len, verdict.num_accepted


RESIDUAL, COUPLED = 1, 2
# (sampling parameters, rule): the last two are left to the role, from the device's rows.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "residual": ({"temperature": 1.0}, RESIDUAL),
    "filtered": ({"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}, RESIDUAL),
    "top-k past every id": ({"temperature": 1.0, "top_k": 2**32 - 1}, RESIDUAL),
    "coupled": ({"temperature": 1.0}, COUPLED),
    "greedy": ({"temperature": 0.0}, RESIDUAL),
    "penalised": ({"temperature": 1.0, "repetition_penalty": 1.3}, RESIDUAL),
}


def params(**fields: Any) -> session_pb2.SamplingParams:
    """Sampling parameters; what is not given is off."""
    return session_pb2.SamplingParams(
        **{"seed": 2**63 + 5, "top_p": 1.0, "repetition_penalty": 1.0, **fields}
    )


@pytest.mark.parametrize("name", WAYS)
def test_rounds_are_those_of_the_reference_engine(pairs: Pairs, name: str) -> None:
    """Proposals and verdicts of two rounds are equal, whatever the sampling parameters."""
    fields, rule = WAYS[name]
    callers = pairs.session(random_tokens(21, seed=3), params(**fields), rule)
    run_rounds(callers, [2, 3])


def test_a_lying_row_is_found_and_decided_without_it(pairs: Pairs) -> None:
    """A candidate that its row and noise do not give: no candidate counts, on either engine."""
    callers = pairs.session(random_tokens(19, seed=4), params(temperature=1.0), RESIDUAL)
    first = [caller.work(num_steps=1, decide_at=1) for caller in targets(callers)]
    follow(callers, first[0].verdict, "target")
    proposal = callers["draft", True].work(num_draft_tokens=2).proposal
    lied = [proposal.tokens[0], (proposal.tokens[1] + 1) % VOCAB]
    verdicts = [
        caller.work(candidates=lied, distributions=proposal.distributions, decide_at=1)
        for caller in targets(callers)
    ]
    same_verdict(verdicts[1], verdicts[0])
    assert [each.verdict.redraw_mismatch for each in verdicts] == [1, 1]
    assert verdicts[1].verdict.num_accepted == 0


def test_plain_decoding_in_chains_is_step_by_step(pairs: Pairs) -> None:
    """Six tokens in one command, a part after every chain, and a stop id."""
    for key, link in pairs.links.items():
        pairs.engines[key].end_link(link)  # sessions between commands shorten chains
    pairs.links.clear()
    prompt = random_tokens(17, seed=5)
    callers = pairs.session(prompt, params(temperature=1.0), RESIDUAL)
    verdicts = [caller.work(num_steps=6, decide_at=1) for caller in targets(callers)]
    same_verdict(verdicts[1], verdicts[0])
    # The prompt's pass draws one; the other five want a chain of four and one more.
    assert [caller.part_sizes for caller in targets(callers)] == [[1] * 6, [1, 4, 1]]
    tokens = list(verdicts[0].verdict.tokens)
    stop = next(token for token in tokens[1:] if token != tokens[0])
    stopped = pairs.session(prompt, params(temperature=1.0, stop_token_ids=[stop]), RESIDUAL)
    verdicts = [caller.work(num_steps=6, decide_at=1) for caller in targets(stopped)]
    same_verdict(verdicts[1], verdicts[0])
    assert verdicts[1].verdict.tokens[-1] == stop
    assert verdicts[1].verdict.closing == verdicts[0].verdict.closing


def test_a_pool_too_small_for_all_preempts_and_loses_nothing(pairs: Pairs, device: str) -> None:
    """Three sessions at a time in pages for two: all answer what they answer with pages enough."""
    folder = pairs.folders["target"]
    tight = make_engine("target", folder, device, on_device=True, pages=5)
    tight.start()
    try:
        roomy = pairs.engines["target", False]
        prompts = [random_tokens(20 + i, seed=20 + i) for i in range(3)]
        answers = []
        for engine in (roomy, tight):
            link = AnswerQueue()
            callers = [Caller("target", engine, link, 900 + i, p) for i, p in enumerate(prompts)]
            for caller in callers:
                caller.open(params(temperature=1.0), RESIDUAL, max_len=48)
            commands = [caller.command(num_steps=16, decide_at=1) for caller in callers]
            assert engine.submit(link, commands)
            verdicts: dict[str, list[int]] = {}
            num_ended = 0
            while num_ended < len(callers):
                result = link.results.get(timeout=ANSWER_S)
                assert result.WhichOneof("result") in ("verdict", "deferred", "closed"), result
                if result.HasField("verdict"):
                    verdicts.setdefault(result.session_id, []).extend(result.verdict.tokens)
                    if not result.verdict.more:
                        num_ended += 1
                        closing = target_pb2.TargetCommand(
                            session_id=result.session_id, epoch=1, close=session_pb2.CloseSession()
                        )  # an idle session that is older keeps its pages
                        assert engine.submit(link, [closing])
            answers.append(verdicts)
            engine.end_link(link)
        assert answers[0] == answers[1]
    finally:
        tight.stop()
