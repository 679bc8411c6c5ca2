"""Coverage-guided fuzzing: an input that takes a new branch joins the corpus and is changed on.

Bounded by a count of inputs and driven by a seed, so that a run can be repeated. An input fails its
target when it raises what the target does not allow, takes longer than LONGEST_S, or makes the
process grow by more than MAX_GROWTH_BYTES.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.fuzz.coverage import Edge, following

LONGEST_S = 20.0  # traced, on a busy machine; what hangs takes forever
MAX_GROWTH_BYTES = 256 << 20
MAX_FAILURES = 5


class Target(Protocol):
    """A decoder of bytes from outside.

    seeds: good inputs to begin with. check: feed one input; returns after any allowed refusal,
    raises where something is wrong. mutated: a changed input.
    """

    name: str

    def seeds(self) -> Sequence[bytes]:
        """Good inputs."""

    def check(self, content: bytes) -> None:
        """Feed one input."""

    def mutated(self, rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        """A changed input."""


class Hang(BaseException):
    """An input took too long. No Exception, so that no decoder takes it for a refusal."""


@dataclass
class Result:
    """What a run came to. failures: (input, what it did)."""

    name: str
    num_inputs: int = 0
    num_refused: int = 0
    num_edges: int = 0
    corpus: list[bytes] = field(default_factory=list)
    failures: list[tuple[bytes, str]] = field(default_factory=list)


class Refused(Exception):
    """The target's way to say that the input was turned down as it should be."""


def fuzz(
    target: Target,
    num_inputs: int,
    seed: int,
    corpus: Sequence[bytes] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run `num_inputs` inputs, the seeds and the given corpus first."""
    rng = random.Random(f"{seed} {target.name}")
    result, seen = Result(target.name), set[Edge]()
    waiting = [*target.seeds(), *corpus]
    for content in target.seeds():  # imports and caches are no growth
        _try(target, content, set(), Result(""))
    while result.num_inputs < num_inputs and len(result.failures) < MAX_FAILURES:
        if waiting:
            content = waiting.pop()
        else:
            # The newest inputs lead furthest; the older ones keep their share.
            pool = result.corpus[-16:] if rng.random() < 0.5 else result.corpus
            content = target.mutated(rng, rng.choice(pool), result.corpus)
        edges: set[Edge] = set()
        _try(target, content, edges, result)
        result.num_inputs += 1
        if not edges <= seen or not result.corpus:
            seen |= edges
            result.corpus.append(content)
            report(f"{target.name}: {result.num_inputs} inputs, {len(seen)} edges")
    result.num_edges = len(seen)
    return result


def _try(target: Target, content: bytes, edges: set[Edge], result: Result) -> None:
    before = _peak_bytes()
    try:
        with _bounded(LONGEST_S), following(edges):
            target.check(content)
    except Refused:
        result.num_refused += 1
    except Hang:
        result.failures.append((content, f"took longer than {LONGEST_S:g} s"))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        told = "".join(traceback.format_exception(error)[-4:])
        result.failures.append((content, told))
    grown = _peak_bytes() - before
    if grown > MAX_GROWTH_BYTES:
        result.failures.append((content, f"the process grew by {grown >> 20} MiB"))


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    def ring(_number: int, _frame: Any) -> None:
        raise Hang

    former = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
