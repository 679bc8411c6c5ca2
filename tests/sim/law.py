"""The exact law of the whole system under a fault, by enumerating every random choice.

Coins and races of the production code are answered from a tape instead of Philox; a run is repeated
for every tape, each with its probability as a Fraction. Weights are small integers, so that every
mass the production code computes in float64 is exact. A fault is placed at a time, which depends on
no value; if anything is drawn again because of what was drawn, the law of the output shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.streams import Purpose
from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from tests.sim.options import Setup
from tests.sim.world import Crash, World

Options = tuple[tuple[Any, Fraction], ...]
Law = dict[tuple[int, ...], Fraction]


class NoiseReused(AssertionError):
    """One stream was asked for two different laws."""


class Tape:
    """Answers of one run. script: index of the option taken at each new question."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self._known: dict[tuple[Any, ...], tuple[Options, Any]] = {}
        self._located: dict[tuple[Any, ...], Sequence[Fraction]] = {}
        self.taken: list[tuple[int, int]] = []  # (option, number of options) of each question
        self.probability = Fraction(1)

    def ask(self, key: tuple[Any, ...], options: Options) -> Any:
        """The answer to a question; the same noise gives the same answer again."""
        if key in self._known:
            known, answer = self._known[key]
            if known != options:
                raise NoiseReused(f"{key}: {known}, then {options}")
            return answer
        answer = self._choose(options)
        self._known[key] = (options, answer)
        return answer

    def locate(self, key: tuple[Any, ...], options: Options) -> Any:
        """The same where one stream may be asked for several laws, of which one will count: its
        uniform is located, further with every question, among the options laid side by side."""
        low, high = self._located.get(key, (Fraction(0), Fraction(1)))
        cells = []
        end = Fraction(0)
        for answer, probability in options:
            begin, end = end, end + probability
            width = min(high, end) - max(low, begin)
            if width > 0:
                cells.append(((answer, max(low, begin), min(high, end)), width / (high - low)))
        answer, *self._located[key] = cells[0][0] if len(cells) == 1 else self._choose(tuple(cells))
        return answer

    def _choose(self, options: Options) -> Any:
        index = self._script[len(self.taken)] if len(self.taken) < len(self._script) else 0
        self.taken.append((index, len(options)))
        answer, probability = options[index]
        self.probability *= probability
        return answer

    def following(self) -> list[int] | None:
        """The script of the next run, depth first; None after the last."""
        taken = list(self.taken)
        while taken:
            index, count = taken.pop()
            if index + 1 < count:
                return [*(each for each, _ in taken), index + 1]
        return None


class _Uniform:
    """A coin that was not thrown yet: u * draft_mass < target_mass decides."""

    def __init__(self, tape: Tape, key: tuple[Any, ...]) -> None:
        self._tape, self._key = tape, key

    def __mul__(self, draft_mass: Any) -> _Uniform:
        self._draft_mass = Fraction(float(draft_mass))
        return self

    def __lt__(self, target_mass: Any) -> bool:
        accepted = min(Fraction(1), Fraction(float(target_mass)) / self._draft_mass)
        options = tuple((a, p) for a, p in ((True, accepted), (False, 1 - accepted)) if p)
        return bool(self._tape.ask(self._key, options))


def weights_of(digest: int, salt: int, _own_weight: float, vocab_size: int) -> Tensor:
    """Small integers in place of logits, different for target and draft."""
    row = [float(1 + extend_digest(digest, (salt, token)) % 4) for token in range(vocab_size)]
    return torch.tensor([*row, 50.0])


@contextmanager
def _taped(tape: Tape, *, drafts_ahead: bool) -> Iterator[None]:
    def race(
        weights: Tensor, seed: int, position: int, base_len: int, purpose: int, ids: Any = None
    ) -> int:
        names = range(weights.numel()) if ids is None else ids.tolist()
        masses = [Fraction(float(weight)) for weight in weights]
        total = sum(masses)
        options = tuple((t, m / total) for t, m in zip(names, masses, strict=True) if m)
        is_of_many = drafts_ahead and purpose == Purpose.PROPOSE
        answer = tape.locate if is_of_many else tape.ask
        return int(answer((seed, position, base_len, int(purpose)), options))

    def races(
        rows: Sequence[tuple[Tensor, Tensor]],
        seed: int,
        positions: Sequence[int],
        base_len: int,
        purpose: int,
    ) -> list[int]:
        return [
            race(weights, seed, position, base_len, purpose, ids)
            for (weights, ids), position in zip(rows, positions, strict=True)
        ]

    def coin(seed: int, position: int, base_len: int) -> _Uniform:
        return _Uniform(tape, (seed, position, base_len, "coin"))

    def shape(logits: Tensor, _shaping: Any, vocab_size: int, _suppressed: Any = ()) -> Tensor:
        if bool(logits.isnan().any()):
            raise FloatingPointError("NaN")
        return logits[:vocab_size].clone()

    with ExitStack() as stack:
        for place, stand_in in (
            ("kernels.reference.race", race),
            ("kernels.reference.races", races),
            ("kernels.reference.coin", coin),
            ("kernels.reference.shape", shape),
            ("tests.sim.model.logits_of", weights_of),
        ):
            stack.enter_context(patch(place, stand_in))
        yield


def law_of_system(
    setup: Setup, request: pb.GenerateRequest, crashes: Sequence[Crash]
) -> tuple[Law, int]:
    """Law of the tokens that the caller ends up with, and how many runs it took.

    Raises AssertionError when a run fails.
    """
    law: Law = defaultdict(Fraction)
    script: list[int] | None = []
    num_runs = 0
    while script is not None:
        tape = Tape(script)
        with _taped(tape, drafts_ahead=setup.num_ahead > 0):
            world = World(setup, [request], crashes)
            report = world.run()
        assert not report.failures, (crashes, script, report.failures)
        law[tuple(world.callers[0].received.tokens)] += tape.probability
        num_runs += 1
        script = tape.following()
    return dict(law), num_runs


def law_of_target(
    setup: Setup, request: pb.GenerateRequest, ends: Callable[[Sequence[int]], bool]
) -> Law:
    """Plain decoding of the target, one token after the other."""
    law: Law = defaultdict(Fraction)
    prompt = list(request.tokens.token_ids)

    def extend(output: tuple[int, ...], probability: Fraction) -> None:
        if ends(output):
            law[output] += probability
            return
        digest = extend_digest(EMPTY_DIGEST, [*prompt, *output])
        row = weights_of(digest, 0, 0.0, setup.vocab_size)[: setup.vocab_size]
        masses = [Fraction(float(weight)) for weight in row]
        for token, mass in enumerate(masses):
            extend((*output, token), probability * mass / sum(masses))

    extend((), Fraction(1))
    return dict(law)
