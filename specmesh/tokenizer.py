"""Text to token ids and back, and the chat template, from a Hugging Face folder.

Owns `tokenizer.json` and `tokenizer_config.json`. Imports neither torch nor transformers, so the
coordinator starts fast and stays small. Text is defined by bytes: every id stands for a byte
string, and decoding is their concatenation read as UTF-8, which is what lets a stream be
detokenised piece by piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from specmesh.errors import ConfigError, InvalidRequest
from specmesh.model_fields import read_object, token_ids

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_SPACE_MARK = "▁"  # SentencePiece's visible space
MAX_VOCAB_SIZE = 1 << 22  # the largest in use has 2**18 ids


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each id stands for. token_bytes[i] is empty for ids that no token has."""

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    strips_leading_space: bool


class Tokenizer:
    """One model's tokenizer. Immutable; safe to share between threads."""

    def __init__(
        self,
        backend: FastTokenizer,
        vocabulary: Vocabulary,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        template: str | None,
        special_texts: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._template = _compile(template) if template else None
        self._special_texts = dict(special_texts)
        self.bos_id = bos_id
        self.eos_ids = eos_ids

    @property
    def vocab_size(self) -> int:
        """Ids [0, vocab_size) exist; a model may have more embeddings."""
        return len(self._vocabulary.token_bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which have no place in text."""
        return self._vocabulary.special_ids

    @property
    def strips_leading_space(self) -> bool:
        """Whether text that starts a sequence loses one leading space (SentencePiece)."""
        return self._vocabulary.strips_leading_space

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return self._template is not None

    @property
    def vocab_hash(self) -> int:
        """64 bits of sha256 over every id's bytes and the control ids, in order of ids."""
        digest = hashlib.sha256()
        for token_id, content in enumerate(self._vocabulary.token_bytes):
            kind = b"!" if token_id in self._vocabulary.special_ids else b"."
            digest.update(kind + len(content).to_bytes(4, "little") + content)
        return int.from_bytes(digest.digest()[:8], "little")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text. add_special_tokens: with what the tokenizer puts around a prompt."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Bytes that an id adds to the text; none for control tokens unless they are wanted.

        Raises InvalidRequest for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(f"token id {token_id} is not in [0, {self.vocab_size})")
        if skip_special and token_id in self._vocabulary.special_ids:
            return b""
        return self._vocabulary.token_bytes[token_id]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD."""
        content = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        text = content.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._vocabulary.strips_leading_space else text

    def render(self, messages: Sequence[Mapping[str, str]], *, add_reply: bool = True) -> str:
        """Text of a conversation, opened for the assistant's reply. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send text or token ids")
        for message in messages:
            if not message.get("role") or "content" not in message:
                raise InvalidRequest("every message needs a role and content", field="messages")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_reply,
                **self._special_texts,
            )
        except jinja2.TemplateError as refused:
            raise InvalidRequest(f"chat template: {refused}", field="messages") from refused
        except Exception as failed:  # it is a program that came with the weights: anything
            raise InvalidRequest(
                f"the chat template fails on it: {type(failed).__name__}", field="messages"
            ) from failed

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_reply: bool = True) -> list[int]:
        """Token ids of a conversation, opened for the assistant's reply. Raises InvalidRequest."""
        if not messages:
            raise InvalidRequest("expected at least one message", field="messages")
        return self.encode(self.render(messages, add_reply=add_reply), add_special_tokens=False)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a folder's tokenizer. Raises ConfigError saying what is missing or unsupported."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: only fast tokenizers (tokenizer.json) are supported")
    try:
        text = path.read_text(encoding="utf-8")
        backend = FastTokenizer.from_str(text)
        fields = json.loads(text)
    except Exception as broken:  # the Rust library raises bare Exception
        raise ConfigError(f"{path} is not a tokenizer: {broken}") from broken
    backend.no_padding()
    backend.no_truncation()
    config = _read_optional(folder / CONFIG_FILE)
    vocabulary = _vocabulary(backend, fields, path)
    bos_id, special_texts = _special_texts(backend, config)
    return Tokenizer(
        backend,
        vocabulary,
        bos_id=bos_id,
        eos_ids=_eos_ids(folder, backend, config),
        template=_template(folder, config),
        special_texts=special_texts,
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


# ---------------------------------------------------------------- bytes of tokens


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable Latin-1 as itself, the other
    bytes as U+0100 onwards in order (Radford et al. 2019, the GPT-2 encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


def _decoder_kinds(decoder: Any) -> list[str]:
    """Types of the decoder's steps, nested sequences flattened."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for step in decoder.get("decoders", []) for kind in _decoder_kinds(step)]
    return [str(decoder.get("type"))]


def _vocabulary(backend: FastTokenizer, fields: Mapping[str, Any], path: Path) -> Vocabulary:
    kinds = _decoder_kinds(fields.get("decoder"))
    ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest >= MAX_VOCAB_SIZE:  # one entry with a huge id would ask for all the memory there is
        raise ConfigError(f"{path}: token id {largest}, expected less than {MAX_VOCAB_SIZE}")
    added = {int(token["id"]): token for token in fields.get("added_tokens") or []}
    content = [b""] * (largest + 1)
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def to_bytes(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()
    elif "ByteFallback" in kinds or _SPACE_MARK in json.dumps(
        fields.get("decoder"), ensure_ascii=False
    ):

        def to_bytes(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE_MARK, " ").encode()
    else:
        raise ConfigError(
            f"{path}: unsupported decoder {kinds or None}: byte-level BPE and SentencePiece with "
            "byte fallback are supported"
        )
    for token, token_id in ids.items():
        content[token_id] = token.encode() if token_id in added else to_bytes(token)
    special = frozenset(token_id for token_id, token in added.items() if token.get("special"))
    return Vocabulary(tuple(content), special, "Strip" in kinds)


# ---------------------------------------------------------------- special tokens and template


def _text_of(token: Any) -> str | None:
    """A special token of tokenizer_config.json: plain text, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_texts(
    backend: FastTokenizer, config: Mapping[str, Any]
) -> tuple[int | None, dict[str, str]]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    texts = {name: text for name in names if (text := _text_of(config.get(name))) is not None}
    bos = texts.get("bos_token")
    return (None if bos is None else backend.token_to_id(bos)), texts


def _eos_ids(folder: Path, backend: FastTokenizer, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a reply: generation_config.json, else config.json, and the tokenizer's own."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = _read_optional(folder / name).get("eos_token_id")
        if found is not None:
            ends.update(token_ids(found, f"eos_token_id of {name}"))
            break
    text = _text_of(config.get("eos_token"))
    if text is not None and (token_id := backend.token_to_id(text)) is not None:
        ends.add(token_id)
    return tuple(sorted(ends))


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as broken:
            raise ConfigError(f"cannot read {file}: {broken}") from broken
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        if not all(isinstance(entry, dict) for entry in template):
            raise ConfigError(f"{folder / CONFIG_FILE}: chat_template lists what are no templates")
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile(template: str) -> jinja2.Template:
    """Compile in a sandbox: a template is a program that came with the weights."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(template)
    # Nested without end, or what only the compiler of the Python made from it refuses.
    except (jinja2.TemplateError, ValueError, RecursionError, SyntaxError, MemoryError) as broken:
        raise ConfigError(f"the chat template does not compile: {broken}") from broken


def _to_json(value: Any, indent: int | None = None) -> str:
    """As templates expect it: no HTML escapes, unlike jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
