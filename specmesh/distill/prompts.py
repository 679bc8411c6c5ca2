"""Openings of training conversations: requests made from word lists, begun ones, and none.

Three kinds. Made requests combine a pattern with subjects from `specmesh/data/prompts/
training.json`. Begun requests are a few words that the target goes on with before it answers them.
Free text opens the user's turn and is not looked at. Held-out prompts never appear. Must not know
how anything is sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specmesh.distill.sampling import Endings, Opening, Turn
from specmesh.errors import ConfigError, InvalidRequest
from specmesh.model_fields import read_object
from specmesh.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "prompts"
HELD_OUT_FILE = DATA / "chat.jsonl"
TRAINING_FILE = DATA / "training.json"
_MAX_ATTEMPTS = 100
_PLACE = re.compile(r"\{(\w+)\}")
_SENTINEL = "Xsentinelx"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the kinds of opening; what is left is free text. cool: the share of answers at a
    temperature between 0.6 and 1 in place of 1."""

    made: float = 0.40
    begun: float = 0.40
    cool: float = 0.15


_DEFAULT_MIXTURE = Mixture()


def read_prompts(path: Path) -> list[str]:
    """The `prompt` of each line of a JSONL file. Raises ConfigError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="prompts") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as broken:
            raise ConfigError(f"{path}:{number}: not JSON: {broken}", field="prompts") from broken
        prompt = fields.get("prompt") if isinstance(fields, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{path}:{number}: needs a text `prompt`", field="prompts")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt", field="prompts")
    return prompts


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """A tokenizer's chat template around one user turn, as text; `endings` as ids.

    Without a template both sides are empty and every text is free.
    """

    before: str
    after: str
    endings: Endings

    @property
    def is_chat(self) -> bool:
        """Whether there are turns at all."""
        return bool(self.after)


def chat_frame(tokenizer: Tokenizer) -> ChatFrame:
    """Find what the template puts before and after the user's text."""
    if not tokenizer.has_chat_template:
        return ChatFrame("", "", Endings(tokenizer.eos_ids, [0]))
    rendered = tokenizer.render([{"role": "user", "content": _SENTINEL}])
    before, _, after = rendered.partition(_SENTINEL)
    suffix = tokenizer.encode(after, add_special_tokens=False)
    return ChatFrame(before, after, Endings(tokenizer.eos_ids, suffix or [0]))


class PromptSource:
    """An endless, reproducible stream of openings. Draws advance `generator`, on the CPU."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generator: torch.Generator,
        *,
        given: Sequence[str] = (),
        held_out: Sequence[str] = (),
        max_opening_len: int = 256,
        mixture: Mixture = _DEFAULT_MIXTURE,
    ) -> None:
        """given: requests that stand in place of made and begun ones.

        Openings longer than max_opening_len tokens are left out. Raises ConfigError where no given
        request remains.
        """
        self._tokenizer, self._generator, self._mixture = tokenizer, generator, mixture
        self._max_opening_len = max_opening_len
        self.frame = chat_frame(tokenizer)
        self._held_out = {_normal(prompt) for prompt in held_out}
        self._given = [prompt for prompt in given if self._is_usable(prompt)]
        if given and not self._given:
            raise ConfigError(
                f"every prompt is held out or longer than {max_opening_len} tokens", field="prompts"
            )
        lists = read_object(TRAINING_FILE)
        self._patterns: list[str] = lists["patterns"]
        self._openers: list[str] = lists["openers"]
        self._words: dict[str, list[str]] = lists["words"]

    def take(self, count: int) -> list[Opening]:
        """The next openings."""
        return [self._opening() for _ in range(count)]

    def made(self) -> str:
        """One request from the lists (or the given ones), never a held-out one."""
        return self._request()[0]

    def _request(self) -> tuple[str, list[int]]:
        """One usable request, and the ids of the chat that asks it."""
        for text in self._attempts():
            ids = self._chat_ids(text)
            if _normal(text) not in self._held_out and len(ids) <= self._max_opening_len:
                return text, ids
        raise InvalidRequest(
            f"no request fits {self._max_opening_len} tokens beside the chat template",
            field="length",
        )

    def _is_usable(self, prompt: str) -> bool:
        """Not held out, and short enough."""
        is_short = len(self._chat_ids(prompt)) <= self._max_opening_len
        return is_short and _normal(prompt) not in self._held_out

    def _chat_ids(self, prompt: str) -> list[int]:
        return self._ids(self.frame.before + prompt + self.frame.after)

    def _attempts(self) -> Iterator[str]:
        for _ in range(_MAX_ATTEMPTS):
            if self._given:
                yield self._choice(self._given)
                continue
            pattern = self._choice(self._patterns)
            text = _PLACE.sub(lambda place: self._choice(self._words[place[1]]), pattern)
            yield text[0].upper() + text[1:]

    def _opening(self) -> Opening:
        if not self.frame.is_chat:
            return self._free()
        kind = self._uniform()
        temperature = 1.0
        if self._uniform() < self._mixture.cool:
            temperature = 0.6 + 0.4 * self._uniform()
        if kind < self._mixture.made or (self._given and kind < self._share_of_requests):
            return Opening(self._request()[1], Turn.ANSWER, 1.0, temperature)
        if kind < self._share_of_requests:
            opener = self._choice(self._openers) if self._uniform() < 0.75 else ""
            user_temperature = 0.7 + 0.3 * self._uniform()
            ids = self._ids(self.frame.before + opener)
            if len(ids) <= self._max_opening_len:
                return Opening(ids, Turn.USER, user_temperature, temperature)
        return self._free()

    @property
    def _share_of_requests(self) -> float:
        return self._mixture.made + self._mixture.begun

    def _free(self) -> Opening:
        return free_opening(self._tokenizer, self.frame)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator))

    def _choice(self, items: Sequence[str]) -> str:
        return items[int(torch.randint(len(items), (), generator=self._generator))]


def answer_openings(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[Opening]:
    """Chats opened for the assistant's reply at temperature 1, in order. Raises ConfigError."""
    if not tokenizer.has_chat_template:
        raise ConfigError("the target has no chat template: prompts have no answers")
    openings = []
    for prompt in prompts:
        ids = tokenizer.chat([{"role": "user", "content": prompt}])
        openings.append(Opening(ids, Turn.ANSWER))
    return openings


def free_opening(tokenizer: Tokenizer, frame: ChatFrame) -> Opening:
    """Text without a prompt: the user's turn is opened, bare; without a template the first id."""
    if not frame.is_chat:
        first = tokenizer.bos_id if tokenizer.bos_id is not None else 0
        return Opening([first], Turn.FREE)
    return Opening(tokenizer.encode(_last_turn(frame.before), add_special_tokens=False), Turn.FREE)


def _last_turn(before: str) -> str:
    """The opening of the user's turn without a system turn before it.

    The template's own text after the last end of a turn; all of it where there is but one turn.
    """
    lines = before.rstrip("\n").rsplit("\n", 1)
    return before[len(before) - len(lines[-1]) - 1 :] if len(lines) == 2 else before


def _normal(prompt: str) -> str:
    return " ".join(re.findall(r"\w+", prompt.lower()))
