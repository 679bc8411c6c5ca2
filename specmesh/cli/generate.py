"""`specmesh generate` and `specmesh chat`: send a request, print the answer as it arrives.

The answer goes to standard output and nothing else does; statistics go to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.cli.flags import Connection, with_connection, with_options
from specmesh.cli.output import stderr, write_json, write_text
from specmesh.errors import InvalidRequest
from specmesh.request import MAX_UINT32, ChatTurn, GenerateOptions, Prompt

if TYPE_CHECKING:
    from specmesh.client import Event

STDIN = "-"


@dataclass(slots=True)
class Answer:
    """What has arrived of one request, with the times at which ids arrived (monotonic seconds)."""

    began_s: float
    started: pb.Started | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finished: dict[int, pb.Finished] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    # Tokens of the first message: they have no interval of their own.
    num_first_tokens: int = 0

    def add(self, event: Event, now_s: float) -> None:
        """Take one event of the stream in."""
        if isinstance(event, pb.Started):
            self.started = event
        elif isinstance(event, pb.Finished):
            self.finished[event.index] = event
        else:
            self.texts.setdefault(event.index, []).append(event.text)
            self.token_ids.setdefault(event.index, []).extend(event.token_ids)
            self.logprobs.setdefault(event.index, []).extend(event.logprobs)
            if event.token_ids:
                if self.first_token_s is None:
                    self.first_token_s = now_s - self.began_s
                    self.num_first_tokens = len(event.token_ids)
                self.last_token_s = now_s - self.began_s

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(ids) for ids in self.token_ids.values())

    @property
    def tokens_per_s(self) -> float | None:
        """Later tokens over their time: the first message is prefill, measured apart."""
        later = self.num_tokens - self.num_first_tokens
        if self.first_token_s is None or later == 0:
            return None
        return later / max(self.last_token_s - self.first_token_s, 1e-9)

    def text(self, index: int = 0) -> str:
        """Text of one sample."""
        return "".join(self.texts.get(index, ()))


def collect(events: Iterable[Event], *, show: bool) -> Answer:
    """Read a stream to its end; with `show` write the text of sample 0 as it arrives."""
    answer = Answer(began_s=time.monotonic())
    for event in events:
        answer.add(event, time.monotonic())
        if show and isinstance(event, pb.Chunk):
            write_text(event.text)
    return answer


@with_connection
@with_options
def generate(
    options: GenerateOptions,
    connection: Connection,
    prompt: str | None = typer.Argument(None, help="The prompt; `-` reads standard input."),
    file: Path | None = typer.Option(None, "--file", help="Read the prompt from a file."),
    token_ids: str | None = typer.Option(
        None, "--token-ids", help="Comma-separated prompt ids in place of a text."
    ),
    raw: bool = typer.Option(
        False, "--raw", help="Continue the text as it is, without the chat template."
    ),
    system: str | None = typer.Option(None, "--system", help="System message before the prompt."),
    resume_token_ids: str | None = typer.Option(
        None, "--resume-token-ids", help="Output already held (whole rounds); needs --seed."
    ),
    resume_round: int = typer.Option(
        0, "--resume-round", min=0, max=MAX_UINT32, help="Rounds already held."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of text."),
    stats: bool = typer.Option(True, "--stats/--no-stats", help="Statistics on standard error."),
) -> None:
    """Generate text and stream it to standard output."""
    request = options.request(_prompt(prompt, file, token_ids, raw=raw, system=system))
    if resume_round and resume_token_ids is None:
        raise InvalidRequest("needs --resume-token-ids", field="resume_round")
    if resume_token_ids is not None:
        request.resume_token_ids.extend(_ids(resume_token_ids, "resume_token_ids"))
        request.resume_round = resume_round
    show = not as_json and (options.n or 1) == 1
    with connection.open() as client:
        answer = collect(client.stream_request(request, timeout_s=connection.timeout), show=show)
    if as_json:
        write_json(as_document(answer))
        return
    if show:
        write_text("\n")
    else:
        for index in sorted(answer.finished):
            write_text(f"[{index}]\n{answer.text(index)}\n")
    if stats:
        _print_logprobs(answer)
        stderr().print(describe(answer), style="dim", markup=False)


def _prompt(
    text: str | None, file: Path | None, token_ids: str | None, *, raw: bool, system: str | None
) -> Prompt:
    given = [value for value in (text, file, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequest("give one of PROMPT, --file and --token-ids", field="prompt")
    if token_ids is not None:
        if raw or system:
            raise InvalidRequest("token ids take no --raw and no --system", field="prompt")
        ids = _ids(token_ids, "prompt")
        if not ids:
            raise InvalidRequest("is empty", field="prompt")
        return ids
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read {file}: {error}", field="prompt") from error
    elif text == STDIN:
        text = sys.stdin.read()
    assert text is not None, "one of the three is given"
    if raw:
        if system:
            raise InvalidRequest("a raw text has no system message", field="prompt")
        if not text:  # white space can be continued
            raise InvalidRequest("is empty", field="prompt")
        return text
    turns = [ChatTurn("system", system)] if system else []
    return [*turns, user_turn(text)]


def user_turn(text: str) -> ChatTurn:
    """What a user says. Raises InvalidRequest for nothing: a model answers that with anything."""
    if not text.strip():
        raise InvalidRequest("is empty", field="prompt")
    return ChatTurn("user", text)


def _ids(text: str, field_name: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is no list of token ids", field=field_name) from error
    for token_id in ids:
        if not 0 <= token_id <= MAX_UINT32:
            raise InvalidRequest(f"{token_id} is not in 0 to {MAX_UINT32}", field=field_name)
    return ids


@with_connection
@with_options
def chat(
    options: GenerateOptions,
    connection: Connection,
    system: str | None = typer.Option(None, "--system", help="System message."),
    stats: bool = typer.Option(False, "--stats/--no-stats", help="Statistics after each answer."),
) -> None:
    """Talk with the model. /reset forgets the talk, /exit or Ctrl-D ends it, Ctrl-C an answer."""
    if (options.n or 1) != 1:
        raise InvalidRequest("a chat draws one sample", field="n")
    first = [ChatTurn("system", system)] if system else []
    turns = list(first)
    with connection.open() as client:
        while (line := _read_line()) is not None:
            if line in ("/exit", "/quit"):
                break
            if line == "/reset":
                turns = list(first)
                continue
            if not line.strip():
                continue
            turns.append(ChatTurn("user", line))
            request = options.request(turns)
            answer = Answer(began_s=time.monotonic())
            try:
                for event in client.stream_request(request, timeout_s=connection.timeout):
                    answer.add(event, time.monotonic())
                    if isinstance(event, pb.Chunk):
                        write_text(event.text)
            except KeyboardInterrupt:
                write_text(" [interrupted]")
            write_text("\n")
            turns.append(ChatTurn("assistant", answer.text()))
            if stats and answer.finished:
                stderr().print(describe(answer), style="dim", markup=False)


def _read_line() -> str | None:
    """One line of the user's, None at the end of input. The prompt appears on a terminal only."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            write_text("\n")
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def describe(answer: Answer) -> str:
    """One line: tokens, times, rounds, acceptance, seed and trace."""
    parts = [f"{answer.num_tokens} tokens"]
    if answer.first_token_s is not None:
        parts.append(f"first after {answer.first_token_s * 1000:.0f} ms")
    if answer.tokens_per_s is not None:
        parts.append(f"then {answer.tokens_per_s:.1f} tokens/s")
    stats = [finished.speculation for finished in answer.finished.values()]
    drafted = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.num_accepted for s in stats)
    parts.append(f"{sum(s.num_rounds for s in stats)} rounds")
    if drafted:
        parts.append(f"accepted {accepted}/{drafted} ({100 * accepted / drafted:.0f} %)")
    reasons: dict[str, int] = {}
    for s in stats:
        for reason, count in s.fallback_rounds.items():
            reasons[reason] = reasons.get(reason, 0) + count
    parts += [f"{count} without draft ({reason})" for reason, count in sorted(reasons.items())]
    if answer.started is not None:
        parts.append(f"seed {answer.started.seed}")
        if answer.started.trace_id:
            parts.append(f"trace {answer.started.trace_id}")
    return " · ".join(parts)


def _print_logprobs(answer: Answer) -> None:
    for index, rows in sorted(answer.logprobs.items()):
        for token_id, row in zip(answer.token_ids[index], rows, strict=False):
            top = "  ".join(f"{entry.token_id}: {entry.logprob:.3f}" for entry in row.top)
            stderr().print(f"[{index}] {token_id}: {row.logprob:.3f}   {top}", markup=False)


def as_document(answer: Answer) -> dict[str, Any]:
    """The whole answer as one JSON document."""
    from google.protobuf.json_format import MessageToDict

    def plain(message: Any) -> Any:
        return MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    assert answer.started is not None, "a stream that ends without error has started"
    started = plain(answer.started)
    started["seed"] = answer.started.seed  # JSON of protobuf writes 64-bit integers as strings
    samples = []
    for index, finished in sorted(answer.finished.items()):
        sample = {"index": index, "text": answer.text(index)}
        sample["token_ids"] = answer.token_ids.get(index, [])
        if answer.logprobs.get(index):
            sample["logprobs"] = [plain(row) for row in answer.logprobs[index]]
        samples.append(sample | {k: v for k, v in plain(finished).items() if k != "index"})
    timing = {"first_token_s": answer.first_token_s, "last_token_s": answer.last_token_s}
    return {
        **started,
        "samples": samples,
        "timing": {**timing, "later_tokens_per_s": answer.tokens_per_s},
    }
