"""Which cases the end-to-end benchmark has, and what their results are called.

Pure. Names are those under which results are kept: stack-plain-c16, speedup-chat-c16, overhead-c1,
round-1b-k4-c1 and so on.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specmesh.errors import ConfigError
from specmesh.tokenizer import Tokenizer

CHAT_PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "chat.jsonl"
FIXED_TOKENS = 4
LONG_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One load against the stack.

    num_draft_tokens: None leaves it to the policy, 0 is plain decoding. is_long: prompts of a given
    length in place of the chat prompts as they are, and streams that outlast the window: decoding
    alone. draft: label of the draft, "" for the first.
    """

    concurrency: int
    num_draft_tokens: int | None
    temperature: float = 1.0
    is_long: bool = False
    draft: str = ""

    @property
    def name(self) -> str:
        """For instance chat-policy-greedy-c4, chat-1b-k4-c1, stack-plain-c64."""
        mode = {None: "policy", 0: "plain"}.get(self.num_draft_tokens, f"k{self.num_draft_tokens}")
        parts = ["stack" if self.is_long else "chat", self.draft, mode]
        parts += ["greedy"] if self.temperature == 0 else []
        return "-".join([*filter(None, parts), f"c{self.concurrency}"])

    @property
    def speedup_name(self) -> str:
        """What the ratio to plain decoding is called: speedup-chat-c4 where the policy chose."""
        return f"speedup-{self.name.replace('policy-', '')}"

    @property
    def plain(self) -> Case:
        """The case it is held against: the same load without speculation, on the first draft."""
        return Case(self.concurrency, 0, self.temperature, self.is_long)


def standard_cases(concurrencies: Sequence[int], other_drafts: Sequence[str]) -> list[Case]:
    """Every case, each after the plain one that it is held against."""
    ends = sorted({min(concurrencies), max(concurrencies)})
    cases = [Case(c, 0, is_long=True) for c in concurrencies]
    for c in concurrencies:
        cases += [Case(c, 0), Case(c, None)]
    cases += [Case(c, FIXED_TOKENS) for c in ends]
    for c in ends:
        cases += [Case(c, 0, 0.0), Case(c, None, 0.0)]
    for draft in other_drafts:
        cases += [Case(c, FIXED_TOKENS, draft=draft) for c in ends]
        cases += [Case(c, None, draft=draft) for c in concurrencies]
    return cases


def selected(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Cases whose name matches one of the patterns (`*` and `?`), in their order; all for none.

    A speculative case brings the plain one it is held against. Raises ConfigError for a pattern
    that matches nothing.
    """
    if not patterns:
        return list(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ConfigError(f"{pattern!r} matches none of {names}", field="cases")
    wanted = {
        case for case in cases if any(fnmatch.fnmatchcase(case.name, each) for each in patterns)
    }
    wanted |= {case.plain for case in wanted}
    return [case for case in cases if case in wanted]


def read_prompts(path: Path) -> list[str]:
    """The `prompt` of every line of a JSONL file. Raises ConfigError naming the line."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="prompts") from error
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} has no prompt: {error}", field="prompts") from error
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{path}:{number} has an empty prompt", field="prompts")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} has no prompts", field="prompts")
    return prompts


def chat_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt as a user's message, through the chat template."""
    return [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]


def long_ids(tokenizer: Tokenizer, prompts: Sequence[str], num_tokens: int) -> list[list[int]]:
    """As `chat_ids`, LONG_ROUNDS for each, each of so many prompts that it has num_tokens ids.

    Each begins with its own number, and there are more of them than a cache of prefixes holds.
    """
    return [
        next(
            ids
            for ids in _growing(tokenizer, prompts, first)
            if len(ids) >= num_tokens or len(ids) > 1 << 16
        )
        for first in range(LONG_ROUNDS * len(prompts))
    ]


def _growing(tokenizer: Tokenizer, prompts: Sequence[str], first: int) -> Iterator[list[int]]:
    text = f"List {first}: answer each of these."
    count = 0
    while True:
        text += "\n" + prompts[(first + count) % len(prompts)]
        count += 1
        yield tokenizer.chat([{"role": "user", "content": text}])
