"""Where a sample ends, and which text may be shown before that is known.

Owns the stop rules of DESIGN section 2: stop token ids, stop strings over text, max_tokens and the
context limit (both in `max_output`), min_tokens. The unit is the token: tokens are pushed in the
order they are confirmed, and what comes out (ids kept, text shown) depends on the sequence alone,
never on how rounds cut it. Pure: no tokenizer, no clock.

A stop string ends the sample at the token that completes it. The text is cut where the string
begins, so every suffix of the text that could be the beginning of a stop string is held back; the
ids, their logprobs and the usage keep the completing token. A stop token's own text is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.detokenizer import Detokenizer
from coordinator.messages import FinishReason


@dataclass(frozen=True, slots=True)
class StopRules:
    """The rules of one request. max_output: most output tokens, resumed ones included.

    Neither stop ids nor stop strings end a sample with its first `min_tokens` tokens (the services
    give stop ids probability zero there).
    """

    max_output: int
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and where a sample ended."""

    reason: FinishReason
    matched_stop: str = ""
    matched_stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """What one push made certain: how many of the pushed ids stay, and new text to show."""

    num_kept: int
    text: str
    ending: Ending | None


class Output:
    """Output of one sample so far. `push` mutates; after an ending nothing more may be pushed."""

    def __init__(self, rules: StopRules, detokenizer: Detokenizer) -> None:
        assert all(rules.stop_strings), "a stop string is empty"
        self._rules = rules
        self._detokenizer = detokenizer
        self._held = ""  # text not shown yet: a possible beginning of a stop string
        self.num_tokens = 0
        self.ending: Ending | None = None

    def push(self, tokens: Sequence[int]) -> Shown:
        """Add confirmed tokens in order, up to and including the one that ends the sample."""
        assert self.ending is None, "the sample has ended"
        shown: list[str] = []
        for num_kept, token in enumerate(tokens, start=1):
            self.num_tokens += 1
            shown.append(self._push_token(token))
            if self.ending is not None:
                return Shown(num_kept, "".join(shown), self.ending)
        return Shown(len(tokens), "".join(shown), None)

    def _push_token(self, token: int) -> str:
        rules = self._rules
        may_stop = self.num_tokens > rules.min_tokens
        if token in rules.stop_ids and may_stop:
            self.ending = Ending(FinishReason.STOP, "", token)
            return self._release_all()
        before = len(self._held)
        self._held += self._detokenizer.push(token)
        match = self._first_match(before) if may_stop else None
        if match is None and self.num_tokens >= rules.max_output:
            tail_from = len(self._held)
            self._held += self._detokenizer.flush()
            match = self._first_match(tail_from) if may_stop else None
            if match is None:
                self.ending = Ending(FinishReason.LENGTH)
                text, self._held = self._held, ""
                return text
        if match is not None:
            begin, stop = match
            self.ending = Ending(FinishReason.STOP, stop)
            text, self._held = self._held[:begin], ""
            return text
        return self._release_safe()

    def _first_match(self, fresh_from: int) -> tuple[int, str] | None:
        """The stop string completed first by characters of _held[fresh_from:], if any.

        As if the text were read character by character: the earliest end wins, then the earliest
        beginning.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._rules.stop_strings:
            begin = self._held.find(stop, max(0, fresh_from - len(stop) + 1))
            if begin < 0:
                continue
            found = (begin + len(stop), begin, stop)
            if best is None or found[:2] < best[:2]:
                best = found
        return None if best is None else (best[1], best[2])

    def _release_safe(self) -> str:
        """Show everything but the longest suffix that a stop string could begin with."""
        keep = 0
        for stop in self._rules.stop_strings:
            for size in range(min(len(stop) - 1, len(self._held)), keep, -1):
                if self._held.endswith(stop[:size]):
                    keep = size
                    break
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _release_all(self) -> str:
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text
