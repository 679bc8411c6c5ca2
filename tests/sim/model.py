"""A tiny language model whose K/V cache can tell what every entry was computed from.

The "K/V" of a position is its token and the digest of all tokens up to it. A pass reads the entries
before its own through the block table, as attention does, and compares each with the tokens that
the session believes in: an entry that is missing, stale, of another prefix or of a page that was
rewritten fails the run at the pass that reads it. Logits are a pure function of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specmesh.engine.block_pool import BlockPool
from specmesh.engine.decoder import StepBatch
from specmesh.engine.executor import StepExecutor, StepOutcome
from specmesh.engine.role import Finished, Part, Role
from specmesh.engine.scheduler import Segment, Step, Task
from specmesh.errors import SpecmeshError
from specmesh.ledger import EMPTY_DIGEST, extend_digest
from target_service.verifier import joined

NAN_STREAM = 99  # no model's salt


class WrongRead(BaseException):
    """A pass read K/V that is not of its prefix. Not an Exception: engines survive those."""


class WrongWrite(BaseException):
    """A pass wrote into a page that others read."""


@dataclass(frozen=True)
class TinySpec:
    """The part of ModelSpec that services read."""

    vocab_size: int
    num_embeddings: int
    max_context_len: int = 4096


class TinyCache:
    """(token, digest) of each position, by page and offset; None where nothing was written."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        num_pages, page_size = pool.num_pages, pool.page_size
        self.page_size = page_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_pages * page_size)

    def write(self, slot: int, token: int, digest: int) -> None:
        """Write a position. Nobody else may be able to read its page."""
        if self._pool.is_shared(slot // self.page_size):
            raise WrongWrite(f"page {slot // self.page_size} is shared or published")
        self.slots[slot] = (token, digest)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.page_size
        for source, target in pairs:
            copied = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = copied

    def clear_pages(self, pages: Sequence[int]) -> None:
        for page in pages:
            start = page * self.page_size
            self.slots[start : start + self.page_size] = [None] * self.page_size

    def page(self, page: int) -> list[tuple[int, int] | None]:
        """What a page holds."""
        return self.slots[page * self.page_size : (page + 1) * self.page_size]


@lru_cache(maxsize=1 << 14)
def logits_of(digest: int, salt: int, own_weight: float, vocab_size: int) -> Tensor:
    """float32 [vocab_size + 1]: what all salts share and a salt's own; the padding id would win."""
    shared, own = _noise(digest, 0, vocab_size), _noise(digest, salt + 1, vocab_size)
    row = [4.0 * ((1 - own_weight) * a + own_weight * b) for a, b in zip(shared, own, strict=True)]
    return torch.tensor([*row, 50.0])


def _noise(digest: int, stream: int, count: int) -> list[float]:
    state, values = extend_digest(digest, (stream,)), []
    for index in range(count):
        state = extend_digest(state, (index,))
        values.append((state >> 11) / (1 << 53))
    return values


class TinyModel:
    """Implements Decoder's interface. own_weight 0: every salt gives the same logits.

    is_honest: what it fed is what it says it drew. A draft that lies about a candidate which is
    then kept has the K/V of another token: its own affair, and not checked. nan_after: prefixes
    after which the logits are NaN; nan_share: of all prefixes.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        salt: int = 0,
        own_weight: float = 0.3,
        is_honest: bool = True,
        nan_after: Sequence[Sequence[int]] = (),
        nan_share: float = 0.0,
    ) -> None:
        self.spec = TinySpec(vocab_size, vocab_size + 1)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.salt = salt
        self.is_honest = is_honest
        self._nan_digests = {extend_digest(EMPTY_DIGEST, prefix) for prefix in nan_after}
        self._nan_share = nan_share
        self.own_weight = own_weight
        self.fingerprint = f"tiny-{salt}"
        self.expected: list[list[int]] = []  # per sequence of the next pass: its tokens
        self.num_tokens_fed = 0

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """Logits after these tokens."""
        return self._logits(extend_digest(EMPTY_DIGEST, prefix))

    def _logits(self, digest: int) -> Tensor:
        is_nan = bool(self._nan_share) and _noise(digest, NAN_STREAM, 1)[0] < self._nan_share
        if is_nan or digest in self._nan_digests:
            return torch.full((self.spec.num_embeddings,), torch.nan)
        return logits_of(digest, self.salt, self.own_weight, self.spec.vocab_size)

    def forward(self, batch: StepBatch, cache: TinyCache) -> Tensor:
        """logits float32 [num_rows, vocab_size + 1]; writes K/V at slot_mapping."""
        tokens, slots = batch.token_ids.tolist(), batch.slot_mapping.tolist()
        wanted, rows = set(batch.logit_rows.tolist()), []
        self.num_tokens_fed += len(tokens)
        expected, self.expected = self.expected, []
        for index, context_len in enumerate(batch.context_lens):
            start, end = batch.cu_seqlens_q[index : index + 2]
            first = context_len - (end - start)
            known = expected[index]
            if tokens[start:end] != known[first:context_len]:
                raise WrongRead(f"fed {tokens[start:end]}, not {known[first:context_len]}")
            digest = self._read(cache, batch.block_tables[index], known[:first])
            for row in range(start, end):
                digest = extend_digest(digest, (tokens[row],))
                cache.write(slots[row], tokens[row], digest)
                if row in wanted:
                    rows.append(self._logits(digest))
        return torch.stack(rows) if rows else torch.empty(0, self.spec.num_embeddings)

    def _read(self, cache: TinyCache, block_table: Sequence[int], known: Sequence[int]) -> int:
        digest, size = EMPTY_DIGEST, cache.page_size
        for position, token in enumerate(known):
            digest = extend_digest(digest, (token,))
            entry = cache.slots[block_table[position // size] * size + position % size]
            if self.is_honest and entry != (token, digest):
                raise WrongRead(f"K/V of position {position} is {entry}, not of {known}")
        return digest


class DeviceFailure(RuntimeError):
    """A pass failed, as devices fail."""


def _failing(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fail(*arguments: Any) -> Tensor:
        forward(*arguments)
        raise DeviceFailure("the device failed after this pass")

    return fail


class CheckedExecutor(StepExecutor):
    """Tells the model which tokens each session of a pass believes in; fails when told to.

    failing: "" or when the next pass fails, "before" or "after" it wrote its K/V. role, next_chain:
    who decides, and how many passes of plain decoding are taken before anybody hears of them.
    """

    failing = ""
    role: Role
    next_chain: Callable[[], int] = staticmethod(lambda: 1)

    def run(self, step: Any, meanwhile: Any = None, may_run_ahead: Any = None) -> Any:
        meanwhile()  # the pass runs on this thread, in no time at all
        failing, self.failing = self.failing, ""
        if failing == "before":
            raise DeviceFailure("the device failed this pass")
        if failing == "after":
            decoder, forward = self._device.decoder, self._device.decoder.forward
            decoder.forward = _failing(forward)  # type: ignore[method-assign]
            try:
                return self._run(step)
            finally:
                decoder.forward = forward  # type: ignore[method-assign]
        return self._run(step)

    def _run(self, step: Step) -> StepOutcome:
        first = self._pass(step)
        tasks = [entry.task for entry in first.finished]
        if first.unfinished or not tasks or not all(map(_decodes_plainly, tasks)):
            return first
        length = self.next_chain()
        return self._chain(first, length) if length > 1 else first

    def _pass(self, step: Step) -> StepOutcome:
        self._device.decoder.expected = [  # type: ignore[attr-defined]  # the tiny model
            segment.task.tokens(0, segment.end) for segment in step.segments
        ]
        return super().run(step)

    def _chain(self, outcome: StepOutcome, length: int) -> StepOutcome:
        """Decide and pass on those that go on, `length` times; what came of each is one outcome."""
        told: dict[Task, list[Any]] = {entry.task: [] for entry in outcome.finished}
        last = outcome
        for index in range(length):
            decided = self.role.advance(last.finished, last.logits)
            for entry, each in zip(last.finished, decided, strict=True):
                told[entry.task].append(each)
            going = [task for task, each in told.items() if _goes_on(each, index)]
            if not going or index + 1 == length:
                break
            starts = [task.session.ledger.written_len for task in going]
            segments = [
                Segment(task, start, task.feed_end, task.num_rows)
                for task, start in zip(going, starts, strict=True)
            ]
            last = self._pass(Step(segments))
        finished = [Finished(task, 0, 0, (_chained(each),)) for task, each in told.items()]
        return replace(outcome, finished=finished, end_ns=last.end_ns)


def _decodes_plainly(task: Task) -> bool:
    state = task.role_state
    return getattr(state, "num_steps", 1) > 1 and not state.at_coordinator


def _goes_on(decided: Sequence[Any], index: int) -> bool:
    return len(decided) == index + 1 and isinstance(decided[-1], Part)


def _chained(decided: Sequence[Any]) -> Any:
    """The outcome of a chain: an error undoes all of it."""
    last = decided[-1]
    if isinstance(last, SpecmeshError):
        return last
    verdicts = [each.body if isinstance(each, Part) else each for each in decided]
    whole = joined(verdicts)
    whole.offset, whole.more = verdicts[0].offset, verdicts[-1].more
    return Part(whole) if whole.more else whole
