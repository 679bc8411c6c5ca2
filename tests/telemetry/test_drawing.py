"""Traces in the terminal and as a page: what is shown, at any width, and never obeyed as markup."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from specmesh.errors import InvalidRequest
from specmesh.spans import ROUND, VERIFY
from specmesh.traces.page import export_trace, page_data, render_page
from specmesh.traces.reader import Skipped, read_trace
from specmesh.traces.terminal import list_traces, show_trace
from specmesh.traces.trace_file import SUFFIX
from tests.telemetry.sample import OUTCOMES, write_sample

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def drawn(width: int, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    """A console of this width and what it prints to."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width), file


def text_of(file: io.TextIOWrapper) -> str:
    """Everything printed so far."""
    file.flush()
    file.seek(0)
    return file.read()


def test_list_shows_totals_of_each_request(tmp_path: Path) -> None:
    """One line a trace: beginning of the id, duration, tokens, rounds, acceptance, finish."""
    sample = write_sample(tmp_path)
    console, file = drawn(80)
    list_traces([tmp_path], console)
    (row,) = (row for row in text_of(file).splitlines() if sample.trace_id[:12] in row)
    assert row.split()[-5:] == ["24", "8", "60", "%", "stop"]


def test_show_draws_every_round_with_k_accepted_and_boundaries(tmp_path: Path) -> None:
    """The tree has one line a span, in order, with outcome and boundaries beside its bar."""
    sample = write_sample(tmp_path)
    console, file = drawn(120)
    show_trace([tmp_path], sample.trace_id[:10], console)
    text = text_of(file)
    for index, (num_drafted, num_accepted) in enumerate(OUTCOMES, start=1):
        (row,) = (row for row in text.splitlines() if re.search(rf"─ round {index} ", row))
        assert f"k={num_drafted}" in row
        assert (f"accepted {num_accepted} " in row) is bool(num_drafted)
        assert "█" in row
    assert "(draft_deadline)" in text
    assert "13/12 -> 16/15" in text  # the target's confirmed/kv around round 1: 2 accepted + 1
    assert text.count("target.verify") == 9
    assert "25 draft.forward passes linked" in text
    assert "└─ round 8" in text


@pytest.mark.parametrize("width", [20, 80, 240])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    """Narrow terminals lose columns, not alignment."""
    sample = write_sample(tmp_path)
    console, file = drawn(width)
    show_trace([tmp_path], sample.trace_id, console)
    assert max(len(row) for row in text_of(file).splitlines()) <= width


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    """Tree, bars and table fall back to ASCII."""
    sample = write_sample(tmp_path)
    console, file = drawn(100, "ascii")
    show_trace([tmp_path], sample.trace_id, console)
    list_traces([tmp_path], console)
    assert text_of(file).isascii()
    assert "`- round 8" in text_of(file)


def test_text_of_a_trace_is_never_markup(tmp_path: Path) -> None:
    """Rich markup and terminal escapes in names and errors are printed as they are."""
    span = {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": "b7ad6b7169203331",
        "name": "[red]x[/red]\x1b[2J",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "status": {"code": 2},
        "attributes": [{"key": "error.type", "value": {"stringValue": "[link=http://x]y"}}],
    }
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    (tmp_path / f"x{SUFFIX}").write_text("junk\n" + line + "\n")
    console, file = drawn(120)
    show_trace([tmp_path], "0af", console)
    text = text_of(file)
    assert r"[red]x[/red]\x1b[2J !" in text
    assert "[link=http://x]y" in text
    assert "\x1b" not in text
    assert "skipped 1 unreadable lines" in text
    assert "still runs, or its file is missing" in text


def test_json_output_is_one_document(tmp_path: Path) -> None:
    """`--json` of list and show parses and agrees with the totals."""
    sample = write_sample(tmp_path)
    console, file = drawn(100)
    list_traces([tmp_path], console, as_json=True)
    (listed,) = json.loads(text_of(file))
    console, file = drawn(100)
    show_trace([tmp_path], sample.trace_id, console, as_json=True)
    shown = json.loads(text_of(file))
    assert listed["accepted_tokens"] == shown["accepted_tokens"] == sample.num_accepted
    assert sum(span["name"] == VERIFY for span in shown["spans"]) == 1 + sample.num_rounds


class Page(HTMLParser):
    """Elements of a page, references to other resources, and text of the data element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.data = ""
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_data = dict(attrs).get("type") == "application/json"
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    """One file: no reference to anything else, and a policy that forbids fetching any."""
    sample = write_sample(tmp_path)
    target = tmp_path / "trace.html"
    export_trace([tmp_path], sample.trace_id[:6], target)
    text = target.read_text(encoding="utf-8")
    page = Page(text)
    assert page.references == []
    assert "link" not in page.tags
    assert page.tags.count("script") == 2
    outside = r"url\((?!#)|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)"
    assert not re.search(outside, text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    for wanted in ("timeline", "tokens", "rounds", "details", "cards"):
        assert f'id="{wanted}"' in text


def test_the_page_holds_every_round_with_the_fate_of_each_token(tmp_path: Path) -> None:
    """Accepted, rejected, unjudged, then recovered or bonus; without ids unless recorded."""
    sample = write_sample(tmp_path)
    page = Page(render_page(read_trace([tmp_path], sample.trace_id)[0]))
    data = json.loads(page.data)
    for step, (num_drafted, num_accepted) in zip(data["rounds"][1:], OUTCOMES, strict=True):
        states = [token["state"] for token in step["tokens"]]
        assert states[:num_accepted] == ["accepted"] * num_accepted
        if num_accepted < num_drafted:
            unjudged = num_drafted - num_accepted - 1
            assert states[num_accepted:] == ["rejected", *["unjudged"] * unjudged, "recovered"]
        else:
            assert states[num_accepted:] == ["bonus" if num_drafted else "plain"]
        assert all(token.keys() == {"state"} for token in step["tokens"])
    first = data["rounds"][1]
    assert first["boundaries"]["target"] == [[13, 12, 64], [16, 15, 64]]
    assert [candidate["target_prob"] for candidate in first["candidates"]] == [
        0.61, 0.42, 0.07, None,
    ]  # fmt: skip
    assert [len(data["lanes"][lane]) for lane in ("coordinator", "draft", "target")] == [9, 33, 18]
    # Every command and pass leads to its round.
    assert {bar["round"] for bar in data["lanes"]["target"]} == set(range(9))


def test_recorded_content_is_shown_as_text_only(tmp_path: Path) -> None:
    """Ids and texts appear when they were recorded, and a text that is markup stays inert."""
    sample = write_sample(tmp_path, content=True)
    trace, _ = read_trace([tmp_path], sample.trace_id)
    text = render_page(trace)
    page = Page(text)
    tokens = [token for step in json.loads(page.data)["rounds"] for token in step["tokens"]]
    assert " </script><b>&" in {token["text"] for token in tokens}
    assert all(isinstance(token["id"], int) for token in tokens)
    assert "</script><b>" not in text
    assert page.tags.count("script") == 2
    assert "innerHTML" not in text


def test_a_page_of_a_poor_trace_can_be_made(tmp_path: Path) -> None:
    """Without a root or attributes there is still a page; numbers that are none are null."""
    fields = {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "startTimeUnixNano": "5",
        "endTimeUnixNano": "5",
    }
    nan = {"arrayValue": {"values": [{"doubleValue": "NaN"}, {"stringValue": "x"}]}}
    spans = [
        {**fields, "spanId": "b7ad6b7169203331", "name": "unheard.of"},
        {
            **fields, "spanId": "b7ad6b7169203332", "name": ROUND,
            "attributes": [
                {"key": "specmesh.target.probs", "value": nan},
                {"key": "specmesh.draft.tokens", "value": {"intValue": str(2**62)}},
                {"key": "specmesh.target.boundaries.before", "value": nan},
            ],
        },
    ]  # fmt: skip
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    (tmp_path / f"x{SUFFIX}").write_text(line + "\n")
    trace, _ = read_trace([tmp_path], "0af")
    (step,) = page_data(trace, Skipped())["rounds"]
    assert [row["target_prob"] for row in step["candidates"]] == [None, None]
    assert len(step["tokens"]) == 64
    assert json.loads(Page(render_page(trace)).data)["summary"]["finish"] == "running"


def test_a_page_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    """`export --html` into a folder that is not there."""
    sample = write_sample(tmp_path, OUTCOMES[:1])
    with pytest.raises(InvalidRequest, match="cannot write"):
        export_trace([tmp_path], sample.trace_id, tmp_path / "no" / "trace.html")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_draws_the_page_from_disk(tmp_path: Path) -> None:
    """A headless browser runs the page's script without error: rows, bars, tokens and details."""
    assert CHROMIUM is not None
    sample = write_sample(tmp_path, content=True)
    export_trace([tmp_path], sample.trace_id, tmp_path / "trace.html")
    profile = tmp_path / "profile"
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--dump-dom",
    )  # fmt: skip
    result = subprocess.run(
        [CHROMIUM, *flags, f"file://{tmp_path / 'trace.html'}#round=3&theme=dark"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    dom = result.stdout
    assert dom.count("<tr data-round=") == 1 + sample.num_rounds
    assert len(re.findall(r"<rect [^>]*data-round=", dom)) == 9 + 33 + 18
    assert 'data-theme="dark"' in dom
    assert '<div class="big">Round 3</div>' in dom  # the one that the link names, opened
    assert dom.count('class="group on"') == 1
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in dom
    assert re.search(r'class="tok rejected shown"[^>]*> ?<s>', dom)
    assert not re.search(r'class="tok (accepted|recovered|bonus) shown"[^>]*> ?<s>', dom)
