"""Text and ids agree with the reference library, and every id's bytes add up to the text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specmesh.errors import ConfigError, InvalidRequest
from specmesh.tokenizer import load_tokenizer

TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    "{% for m in messages %}<|s|>{{ m.role }}:{{ m.content | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant:{% endif %}"
)
TEXTS = (
    "plain words",
    "  spaced\n\n\tout ",
    "naïve 日本語 🎉👩‍👩‍👧",
    "<|s|>inside<|e|>",
    "1234 don't",
    "",
)
Write = Callable[..., Path]


def byte_level(folder: Path, **changes: object) -> Path:
    """A byte-level BPE with two merges, two control tokens and one ordinary added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "wo", "Ġwo"]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("w", "o"), ("Ġ", "wo")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|s|>"), AddedToken("<|e|>")])
    backend.add_tokens([AddedToken("inside")])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|s|>", "eos_token": {"content": "<|e|>"}, "chat_template": TEMPLATE}
    config.update(changes)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentence_piece(folder: Path) -> Path:
    """A Llama-2-like tokenizer: visible spaces, byte fallback, a leading space to strip."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)]]
    tokens += ["▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t) for t in tokens[:3]])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("write", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_match_the_reference(tmp_path: Path, write: Write, text: str) -> None:
    """Ids are the library's, and joining token bytes gives the library's text."""
    folder = write(tmp_path)
    tokenizer = load_tokenizer(folder)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (False, True):
        expected = reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(ids, skip_special=skip) == expected
    assert tokenizer.decode(ids, skip_special=False) == text


def test_token_bytes_split_characters(tmp_path: Path) -> None:
    """A character of four bytes is four ids whose bytes join to it; part of it is no text."""
    tokenizer = load_tokenizer(byte_level(tmp_path))
    ids = tokenizer.encode("🎉")
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "🎉".encode()
    assert len(ids) == 4
    assert tokenizer.decode(ids[:2]) == "�"


def test_control_tokens_have_bytes_only_when_wanted(tmp_path: Path) -> None:
    """Control tokens vanish from text by default; ordinary added tokens do not."""
    tokenizer = load_tokenizer(byte_level(tmp_path))
    start, inside = tokenizer.encode("<|s|>inside")
    assert tokenizer.special_ids == {start, start + 1}
    assert tokenizer.token_bytes(start) == b""
    assert tokenizer.token_bytes(start, skip_special=False) == b"<|s|>"
    assert tokenizer.token_bytes(inside) == b"inside"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (start, (start + 1,))
    assert tokenizer.vocab_size == start + 3


@pytest.mark.parametrize("token_id", [-1, 261])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, token_id: int) -> None:
    """Neither a negative id nor one past the end has bytes."""
    tokenizer = load_tokenizer(byte_level(tmp_path))
    assert tokenizer.vocab_size == 261
    with pytest.raises(InvalidRequest, match=r"is not in \[0, 261\)"):
        tokenizer.token_bytes(token_id)


def test_chat_renders_like_the_reference(tmp_path: Path) -> None:
    """The template sees what transformers would show it, and no HTML escapes."""
    folder = byte_level(tmp_path)
    tokenizer = load_tokenizer(folder)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE
    )
    messages = [
        {"role": "system", "content": "be <b>"},
        {"role": "user", "content": "wo & 'wo' é"},
    ]
    for add_reply in (True, False):
        expected = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_reply
        )
        assert tokenizer.render(messages, add_reply=add_reply) == expected
        assert tokenizer.chat(messages, add_reply=add_reply) == tokenizer.encode(
            expected, add_special_tokens=False
        )


def test_chat_errors_are_the_callers(tmp_path: Path) -> None:
    """A refusing template, empty or incomplete messages, and no template at all name the cause."""
    tokenizer = load_tokenizer(byte_level(tmp_path / "a"))
    with pytest.raises(InvalidRequest, match="system first"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(InvalidRequest, match="at least one message"):
        tokenizer.chat([])
    with pytest.raises(InvalidRequest, match="role and content"):
        tokenizer.chat([{"role": "", "content": "hi"}])
    bare = load_tokenizer(byte_level(tmp_path / "b", chat_template=None))
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.chat([{"role": "user", "content": "hi"}])


def test_template_files_win_and_cannot_reach_python(tmp_path: Path) -> None:
    """chat_template.jinja replaces the configured one; attribute tricks are stopped."""
    folder = byte_level(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        load_tokenizer(folder).render([{"role": "user", "content": "hi"}])


def test_vocab_hash_follows_every_id(tmp_path: Path) -> None:
    """Equal vocabularies hash equal; one swapped pair of ids changes the hash."""
    tokenizer = load_tokenizer(byte_level(tmp_path / "a"))
    again = load_tokenizer(byte_level(tmp_path / "b"))
    assert tokenizer.vocab_hash == again.vocab_hash < 1 << 64
    content = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["x"], vocab["y"] = vocab["y"], vocab["x"]
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "b").vocab_hash != tokenizer.vocab_hash


@pytest.mark.parametrize("value", ["x", -1, [1, None], [[1]], {}, True, 1.5])
def test_end_ids_that_are_no_ids_are_refused(value: Any, tmp_path: Path) -> None:
    """A generation_config.json that says nonsense is a ConfigError naming it."""
    folder = byte_level(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"eos_token_id of generation_config\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "nul"])
def test_a_broken_tokenizer_config_is_refused(content: str, tmp_path: Path) -> None:
    """Nesting bombs and other values than an object are a ConfigError naming the file."""
    folder = byte_level(tmp_path)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_end_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    """generation_config.json replaces config.json's ids; the tokenizer's own is always one."""
    folder = byte_level(tmp_path)
    own = load_tokenizer(folder).eos_ids
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert load_tokenizer(folder).eos_ids == (3, *own)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert load_tokenizer(folder).eos_ids == (4, 5, *own)


def test_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    """A missing file, other bytes, an unknown decoder and a broken template are named."""
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    folder = byte_level(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="template does not compile"):
        load_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"unsupported decoder .'WordPiece'."):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_tokenizer(folder)
