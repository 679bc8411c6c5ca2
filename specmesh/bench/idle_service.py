"""A draft or target whose device computes nothing; `host_time.py` measures with two of them.

Everything that the host of a GPU does is the product's own: frames, sessions, scheduling, packing,
reading outputs, answers. What the device drew is made up: a draft's candidates are always the
same, and of a session's rounds with k candidates the target keeps 0, 1, .., k, 0, .. in turn; it
closes a given share of them with the token that its draft foresees. Launches take their time one
after another: a target's --step-ms for every pass, so n times that for a chain of n passes of plain
decoding; a draft's --step-ms whatever the launch is, a chunk of a prompt or the chain that draws
all candidates of a proposal. Must not know the services: each hands in its `side_of`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kernels import reference
from kernels.streams import Purpose
from protos.specmesh.v1 import session_pb2
from specmesh.config import DraftSettings, EngineSettings, TargetSettings, load_settings
from specmesh.engine import serving
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.device_executor import ProgramExecutor
from specmesh.engine.executor import Device
from specmesh.engine.loading import LoadedModel
from specmesh.engine.program_set import ProgramSet
from specmesh.engine.sessions import Limits
from specmesh.engine.step_programs import Running, StepProgram, StepShape
from specmesh.tokenizer import load_tokenizer

NUM_PAGES, MAX_CONTEXT_LEN = 4096, 2048
NUM_IDS = 200  # of every row
MAX_STRIDE = 10  # between them; less where the vocabulary is small
PROBABILITY, DROPPED_MASS = 0.5, 0.01  # reported of everything drawn


@dataclass(frozen=True, slots=True)
class IdleSpec:
    """The part of a model's specification that a host reads."""

    vocab_size: int
    num_embeddings: int
    max_context_len: int = MAX_CONTEXT_LEN
    num_kv_heads: int = 1


class IdleDecoder:
    """Stands for a decoder that no program asks anything of."""

    device, dtype, is_fused = torch.device("cpu"), torch.bfloat16, True

    def __init__(self, vocab_size: int) -> None:
        self.spec = IdleSpec(vocab_size, vocab_size)


class IdleCache:
    """Stands for K/V that nobody wrote."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing is there to be copied."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Nothing is there to be cleared."""


@dataclass(frozen=True, slots=True)
class Elapsed:
    """An event of a device that is done at an instant of `time.perf_counter`."""

    instant: float

    def query(self) -> bool:
        """Whether it has come."""
        return time.perf_counter() >= self.instant

    def synchronize(self) -> None:
        """Sleep until it has."""
        time.sleep(max(0.0, self.instant - time.perf_counter()))


class Stream:
    """When launches are over: each takes its time, after the one before."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._end = now()

    def launch(self, seconds: float) -> Elapsed:
        """The event behind work that takes so long."""
        self._end = max(self._end, self._now()) + seconds
        return Elapsed(self._end)


class MadeUp(Protocol):
    """What a role's launches take and give."""

    def duration_s(self, num_passes: int) -> float:
        """Seconds of a launch."""

    def fill(self, outputs: Mapping[str, Tensor]) -> None:
        """Write the outputs that are the same in every launch of a program."""

    def decide(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Write the others, of one launch."""


class Drawn:
    """A draft's: the same token and row everywhere."""

    def __init__(self, vocab_size: int, step_s: float) -> None:
        self._ids, self._step_s = row_ids(vocab_size), step_s

    def duration_s(self, num_passes: int) -> float:
        """The same for every launch: a proposal is one, however many passes it takes."""
        del num_passes
        return self._step_s

    def fill(self, outputs: Mapping[str, Tensor]) -> None:
        """All of it."""
        num_ids = len(self._ids)
        outputs["tokens"].fill_(drawn_token(self._ids))
        outputs["reports"].copy_(torch.tensor([num_ids, 1, 0]))  # truncated, and sound
        outputs["dropped_mass"].fill_(DROPPED_MASS)
        outputs["ids"][..., :num_ids] = self._ids
        outputs["weights"][..., :num_ids] = 1.0

    def decide(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Nothing is left."""


class Judged:
    """A target's: round n of a session keeps n mod (k+1) candidates; else a token a pass.

    Tokens are those that an idle draft draws, so that what is kept is what was proposed. foreseen:
    share of rounds that close with the id that wins the race under the draft's rows, the rejected
    candidate aside; an id of no row closes the rest.
    """

    def __init__(self, vocab_size: int, step_s: float, foreseen: float = 0.0) -> None:
        self._ids = row_ids(vocab_size).to(torch.int64)
        self._token, self._step_s, self._foreseen = drawn_token(self._ids), step_s, foreseen
        self._others = self._ids[self._ids != self._token]
        self._unforeseen = vocab_size - 1
        self._num_rounds: Counter[int] = Counter()  # of each session, by its seed

    def duration_s(self, num_passes: int) -> float:
        """Every pass reads all weights."""
        return num_passes * self._step_s

    def fill(self, outputs: Mapping[str, Tensor]) -> None:
        """All but how many candidates are kept."""
        outputs["tokens"].fill_(self._token)
        outputs["mismatch"].fill_(-1)
        outputs["counts"][..., 1] = 1  # emitted
        outputs["max_probs"].fill_(PROBABILITY)
        outputs["judged"].fill_(PROBABILITY)

    def decide(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Judge the candidates, all of which the first pass was fed."""
        tokens, counts = outputs["tokens"][0], outputs["counts"][0]
        tokens.fill_(self._token)
        counts[:, 0], counts[:, 1] = 0, 1
        names = ("seeds", "base_lens", "num_candidates")
        rounds = zip(*(inputs[name].tolist() for name in names), strict=True)
        for slot, (seed, base_len, count) in enumerate(rounds):
            if count > 0:  # else plain decoding, or nobody's
                num_rounds = self._num_rounds[seed]
                self._num_rounds[seed] += 1
                kept = num_rounds % (count + 1)
                tokens[slot, kept] = self._unforeseen
                if int((num_rounds + 1) * self._foreseen) > int(num_rounds * self._foreseen):
                    tokens[slot, kept] = self._winner(seed, base_len, kept, count)
                counts[slot, 0], counts[slot, 1] = kept, kept + 1

    def _winner(self, seed: int, base_len: int, kept: int, count: int) -> int:
        ids, purpose = self._others, Purpose.RESIDUAL
        if kept == count:
            ids, purpose = self._ids, Purpose.BONUS
        weights = torch.ones(len(ids))
        return reference.race(weights, seed % (1 << 64), base_len + kept, base_len, purpose, ids)


def row_ids(vocab_size: int) -> Tensor:
    """Ids of every draft row."""
    num_ids = min(NUM_IDS, vocab_size)
    return torch.arange(num_ids, dtype=torch.int32) * min(MAX_STRIDE, vocab_size // num_ids)


def drawn_token(ids: Tensor) -> int:
    """The token that is drawn from a row of these ids."""
    return int(ids[len(ids) // 2])


class IdleProgram(StepProgram):
    """A program that is over when its stream says so, and has drawn what was made up."""

    made_up: MadeUp
    stream: Stream
    _is_filled = False

    def _compute(self) -> None:
        outputs = self.buffers.outputs.device
        if not self._is_filled:  # not at once: most programs of a start are never launched
            self.made_up.fill(outputs)
            self._is_filled = True
        self.made_up.decide(self.buffers.inputs.device, outputs)

    def _compute_again(self) -> None:
        """Plain decoding, which leaves nothing to decide."""

    def _fetch(self, *, is_behind: bool) -> Running:
        outputs = self.buffers.outputs.download()
        done = self.stream.launch(self.made_up.duration_s(self.shape.num_passes))
        return Running(outputs, done, is_behind)


class IdlePrograms(ProgramSet):
    """Idle programs of every shape that comes."""

    def __init__(self, like: ProgramSet, made_up: MadeUp, stream: Stream) -> None:
        """like: programs of the device whose place these take."""
        super().__init__(like._decoder, like._cache, like._sampler, len(like._logits))
        self._made_up, self._stream = made_up, stream

    def _add(self, shape: StepShape) -> StepProgram:
        if shape not in self.programs:
            program = IdleProgram(shape, self._decoder, self._cache, self._sampler, self._logits)
            program.made_up, program.stream = self._made_up, self._stream
            self.programs[shape] = program
        return self.programs[shape]


def idle_model(settings: EngineSettings) -> LoadedModel:
    """A model without weights, with the tokenizer of the folder that the settings name."""
    tokenizer = load_tokenizer(settings.model)
    limits = Limits(
        vocab_size=tokenizer.vocab_size,
        vocab_hash=tokenizer.vocab_hash,
        max_context_len=MAX_CONTEXT_LEN,
        max_sessions=settings.max_sessions,
        total_pages=NUM_PAGES,
        page_size=settings.page_size,
    )
    info = session_pb2.ModelInfo(
        model="idle",
        fingerprint="idle",
        vocab_size=limits.vocab_size,
        vocab_hash=limits.vocab_hash,
        max_context_len=MAX_CONTEXT_LEN,
        max_sessions=limits.max_sessions,
        page_size=limits.page_size,
        total_pages=NUM_PAGES,
        max_num_draft_tokens=settings.max_num_draft_tokens,
    )
    decoder, cache = cast(Any, IdleDecoder(limits.vocab_size)), cast(Any, IdleCache)
    pool = BlockPool(NUM_PAGES, limits.page_size)
    return LoadedModel(Device(decoder, cache(limits.page_size), pool), limits, info)


def idle_side(side: serving.Side, step_s: float, foreseen: float = 0.0) -> serving.Side:
    """The same service on a device that computes nothing. foreseen: see `Judged`."""

    def make_executor(device_side: Any, max_context_len: int, settings: EngineSettings) -> Any:
        make = serving.program_executor(device_side, max_context_len, settings)

        def make_idle(device: Device, clock_ns: Callable[[], int]) -> ProgramExecutor:
            executor = cast(ProgramExecutor, make(device, clock_ns))
            size = device.decoder.spec.vocab_size
            is_draft = side.name == "draft"
            made_up = Drawn(size, step_s) if is_draft else Judged(size, step_s, foreseen)
            executor.programs = IdlePrograms(executor.programs, made_up, Stream())
            return executor

        return make_idle

    return replace(side, load_model=idle_model, make_executor=make_executor)


def main(name: str, side_of: Callable[[Any], serving.Side], argv: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit status of the service.

    name: draft or target. side_of: that service's own.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--step-ms", type=float, required=True, help="a target's pass, or a draft's launch"
    )
    parser.add_argument("--foreseen", type=float, default=0.0, help="share of a target's rounds")
    asked, flags = parser.parse_known_args(argv)
    settings: DraftSettings | TargetSettings
    if name == "draft":
        settings = load_settings(DraftSettings, flags)
    else:
        settings = load_settings(TargetSettings, flags)
    return serving.main(
        settings, idle_side(side_of(settings), asked.step_ms * 1e-3, asked.foreseen)
    )
