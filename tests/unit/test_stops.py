"""Stop rules: text, ids and endings agree, wherever tokens and chunks fall."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.detokenizer import Detokenizer
from coordinator.messages import FinishReason
from coordinator.stops import Ending, Output, StopRules


def output(
    texts: list[bytes],
    *,
    stops: tuple[str, ...] = (),
    stop_ids: frozenset[int] = frozenset(),
    max_output: int = 10_000,
    min_tokens: int = 0,
) -> Output:
    """Token i prints texts[i]."""
    rules = StopRules(max_output, stop_ids, stops, min_tokens)
    return Output(rules, Detokenizer(lambda token: texts[token]))


def plain_rule(
    texts: list[str], stops: tuple[str, ...], min_tokens: int
) -> tuple[str, int, Ending | None]:
    """The rule said plainly: read character by character, tokens in order."""
    text = ""
    for ordinal, piece in enumerate(texts, start=1):
        for character in piece:
            text += character
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and ordinal > min_tokens:
                stop = max(ended, key=len)
                return text[: -len(stop)], ordinal, Ending(FinishReason.STOP, stop)
    return text, len(texts), None


pieces = st.lists(st.text("ab", max_size=3), min_size=1, max_size=12)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3, unique=True).map(tuple)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(pieces, stop_sets, st.integers(0, 4), st.lists(st.integers(1, 4), max_size=6))
def test_agrees_with_the_plain_rule_however_chunks_fall(
    texts: list[str], stops: tuple[str, ...], min_tokens: int, cuts: list[int]
) -> None:
    """Shown text, kept ids and the ending are those of reading characters one by one."""
    wanted_text, wanted_len, wanted_ending = plain_rule(texts, stops, min_tokens)
    sample = output(
        [text.encode() for text in texts], stops=stops, max_output=len(texts), min_tokens=min_tokens
    )
    shown, kept, start = "", 0, 0
    sizes = [*cuts, len(texts)]
    while sample.ending is None and start < len(texts):
        chunk = range(start, min(start + sizes.pop(0), len(texts)))
        result = sample.push(chunk)
        shown += result.text
        kept += result.num_kept
        start = chunk.stop
        assert wanted_text.startswith(shown), "text was shown that the stop string takes back"
    assert shown == wanted_text
    assert kept == wanted_len
    assert sample.ending == (wanted_ending or Ending(FinishReason.LENGTH))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(pieces, stop_sets)
def test_holds_back_no_more_than_needed(texts: list[str], stops: tuple[str, ...]) -> None:
    """What is held back is a proper beginning of some stop string, and the longest such suffix."""
    sample = output([text.encode() for text in texts], stops=stops)
    shown = ""
    for token, _ in enumerate(texts):
        shown += sample.push([token]).text
        if sample.ending is not None:
            return
        so_far = "".join(texts[: token + 1])
        starts = [stop[:size] for stop in stops for size in range(len(stop))]
        longest = max((len(start) for start in starts if so_far.endswith(start)), default=0)
        assert shown == so_far[: len(so_far) - longest]


def test_stop_token_shows_no_text_and_flushes_the_rest() -> None:
    """A stop token's id is kept, its text is not shown, and held-back text is released."""
    sample = output([b"x", b"a", b"</s>"], stops=("ab",), stop_ids=frozenset({2}))
    assert sample.push([0, 1]).text == "x"
    result = sample.push([2, 0])
    assert (result.num_kept, result.text) == (1, "a")
    assert result.ending == Ending(FinishReason.STOP, "", 2)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_min_tokens_shields_ids_and_strings(min_tokens: int) -> None:
    """With min_tokens m neither a stop id nor a stop string ends the sample within m tokens."""
    sample = output([b"s"] * 5, stops=("s",), min_tokens=min_tokens)
    assert sample.push(range(5)).num_kept == min_tokens + 1
    ids = output([b"s"] * 5, stop_ids=frozenset(range(5)), min_tokens=min_tokens)
    assert ids.push(range(5)).num_kept == min_tokens + 1


def test_stop_string_begun_in_the_shielded_part_still_counts_from_its_end() -> None:
    """What matters is the token that completes the string."""
    sample = output([b"a", b"b", b"c"], stops=("ab", "bc"), min_tokens=2)
    result = sample.push(range(3))
    assert result.ending == Ending(FinishReason.STOP, "bc")
    assert result.text == "a"


def test_budget_and_stop_in_one_token() -> None:
    """Where the last allowed token completes a stop string, the reason is STOP."""
    result = output([b"x", b"END"], stops=("END",), max_output=2).push([0, 1])
    assert result.ending == Ending(FinishReason.STOP, "END")
    assert result.text == "x"
    cut = output([b"x", b"EN", b"D"], stops=("END",), max_output=2).push([0, 1, 2])
    assert cut.ending == Ending(FinishReason.LENGTH)
    assert (cut.num_kept, cut.text) == (2, "xEN")


def test_earliest_end_wins_over_earliest_beginning() -> None:
    """Two stop strings in one token: the one completed first, then the longer."""
    assert output([b"abcd"], stops=("abcd", "bc")).push([0]).text == "a"
    assert output([b"abc"], stops=("c", "abc")).push([0]).text == ""


SNOWMAN = "☃".encode()


def test_split_characters_are_held_until_complete() -> None:
    """Bytes of one character over three tokens appear when the last one does."""
    sample = output([SNOWMAN[:1], SNOWMAN[1:2], SNOWMAN[2:], b"!"])
    assert [sample.push([token]).text for token in range(4)] == ["", "", "☃", "!"]


def test_incomplete_character_at_the_end_is_replaced() -> None:
    """The budget may cut a character: U+FFFD, never an exception or a lost byte."""
    sample = output([b"a", SNOWMAN[:2]], max_output=2)
    assert sample.push([0, 1]).text == "a\ufffd"


def test_stop_string_over_split_characters() -> None:
    """A stop string of many-byte characters matches across tokens that split them."""
    text = "x☃☃y".encode()
    sample = output([text[i : i + 1] for i in range(len(text))], stops=("☃☃",))
    result = sample.push(range(len(text)))
    assert (result.text, result.num_kept) == ("x", 7)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=24), st.lists(st.integers(1, 4), max_size=8))
def test_detokenizer_equals_decoding_at_once(data: bytes, cuts: list[int]) -> None:
    """Any bytes in any pieces decode to what decoding them at once gives."""
    pieces_of, start = [], 0
    for size in [*cuts, len(data)]:
        pieces_of.append(data[start : start + size])
        start += size
    detokenizer = Detokenizer(lambda token: pieces_of[token])
    text = "".join(detokenizer.push(token) for token in range(len(pieces_of)))
    assert text + detokenizer.flush() == data.decode(errors="replace")
