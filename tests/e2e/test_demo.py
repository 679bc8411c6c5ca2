"""The command line end to end: three real processes, a small model, a local Ray, real ports."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specmesh.bench.rounds import complete_trace
from specmesh.cli import main
from specmesh.client import Client, GenerateOptions
from specmesh.errors import InvalidRequest
from specmesh.processes import process_table
from specmesh.spans import GENERATE, PROPOSE, ROUND, VERIFY
from tests.e2e.tiny_pair import write_pair

TIMEOUT_S = 180.0
COMMAND = (sys.executable, "-c", "import sys; from specmesh.cli import main; sys.exit(main())")


@dataclass(frozen=True)
class Up:
    """A running `specmesh up`."""

    process: subprocess.Popen[str]
    address: str
    folder: Path
    flags: tuple[str, ...]

    def run(self, *arguments: str, code: int = 0) -> str:
        """Standard output of one more command, which must end with `code`."""
        with redirect_stdout(io.StringIO()) as written:
            assert main(arguments) == code
        return written.getvalue()

    def generate(self, *arguments: str) -> dict[str, Any]:
        """The JSON document of `specmesh generate`."""
        flags = ("--address", self.address, "--json")
        document: dict[str, Any] = json.loads(self.run("generate", *arguments, *flags))
        return document


def specmesh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def left_behind(folder: Path) -> list[str]:
    """Command lines of living processes that name `folder`."""
    found = []
    for pid in process_table():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`specmesh up` on free ports with the tiny pair."""
    folder = tmp_path_factory.mktemp("up")
    target, draft = write_pair(folder / "pair")
    flags = ("--target", str(target), "--draft", str(draft), "--cache-dir", str(folder / "cache"))
    ports = ("--port", "0", "--draft-port", "0", "--target-port", "0", "--json")
    process = subprocess.Popen(
        [*COMMAND, "up", *flags, *ports], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            yield Up(process, ready["endpoints"]["coordinator"], folder, flags)
        finally:
            process.terminate()


def test_demo_shows_an_answer_its_acceptance_its_speed_and_its_trace(tmp_path: Path) -> None:
    """Proves that what `make demo` runs works from start to stop and leaves no process behind."""
    target, draft = write_pair(tmp_path / "pair")
    folders = ("--target", str(target), "--draft", str(draft))
    found = specmesh(
        *("demo", "hello", "--max-tokens", "24", "--seed", "5", "--cache-dir", "cache", *folders),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert "> hello" in found.stdout
    assert "draft tokens accepted" in found.stdout
    assert "plain decoding" in found.stdout
    for span in ("generate", "round 1", "draft.propose", "target.verify"):
        assert span in found.stdout
    assert "\x1b" not in found.stdout
    assert left_behind(tmp_path) == []


def test_a_seeded_answer_is_the_same_with_and_without_speculation(stack: Up) -> None:
    """Proves that text and ids do not depend on k or on where the decision is taken."""
    same = ("hello", "--seed", "7", "--max-tokens", "40", "--ignore-eos")
    plain = stack.generate(*same, "-k", "0")
    assert len(plain["samples"][0]["token_ids"]) == 40
    for more in (["-k", "4"], ["-k", "8"], [], ["-k", "3", "--decide-at", "coordinator"]):
        again = stack.generate(*same, *more)
        assert again["samples"][0]["token_ids"] == plain["samples"][0]["token_ids"]
        assert again["samples"][0]["text"] == plain["samples"][0]["text"]
    judged = stack.generate(*same, "-k", "4")["samples"][0]["speculation"]["judged_per_position"]
    assert judged[0] > 0


def test_a_request_resumes_at_every_round(stack: Up) -> None:
    """Proves that what a client holds, joined with what a resume brings, is the whole answer."""
    options = GenerateOptions(seed=3, max_tokens=24, num_draft_tokens=3, ignore_eos=True)
    with Client(stack.address) as client:
        whole = client.generate("abc", options)
        chunks = [e for e in client.stream("abc", options) if hasattr(e, "round")]
        held_ids: list[int] = []
        held_text = ""
        for chunk in chunks[:-1]:
            held_ids += chunk.token_ids
            held_text += chunk.text
            request = options.request("abc")
            request.resume_token_ids.extend(held_ids)
            request.resume_round = chunk.round + 1
            rest = [e for e in client.stream_request(request) if hasattr(e, "round")]
            assert held_ids + [i for e in rest for i in e.token_ids] == whole.token_ids[0]
            assert held_text + "".join(e.text for e in rest) == whole.text
    assert len(chunks) > 3


def test_the_trace_of_a_request_is_listed_shown_and_exported(stack: Up) -> None:
    """Proves that a request's id leads to its spans of all three processes."""
    document = stack.generate("hello", "--seed", "1", "--max-tokens", "12", "-k", "2")
    trace_id = document["trace_id"]
    folder = stack.folder / "cache" / "traces"
    trace = complete_trace(folder, trace_id)
    flags = ("--trace-dir", str(folder))
    listed = json.loads(stack.run("trace", "list", "--json", *flags))
    assert trace_id in {entry["trace_id"] for entry in listed}
    assert "target.verify" in stack.run("trace", "show", trace_id, *flags)
    page = stack.folder / "page.html"
    stack.run("trace", "export", trace_id, "--html", str(page), *flags)
    assert trace_id in page.read_text()
    assert {GENERATE, ROUND, PROPOSE, VERIFY} <= {span.name for span in trace.spans}


def test_every_sampling_option_is_served_or_refused_by_name(stack: Up) -> None:
    """Proves that options act end to end: stop strings, several samples, log-probabilities."""
    document = stack.generate("hello", "-n", "2", "--seed", "2", "--max-tokens", "8", "-t", "1.5")
    assert [sample["index"] for sample in document["samples"]] == [0, 1]
    assert document["samples"][0]["token_ids"] != document["samples"][1]["token_ids"]
    document = stack.generate("x", "--logprobs", "2", "--max-tokens", "4", "--ignore-eos")
    rows = document["samples"][0]["logprobs"]
    assert [len(row["top"]) for row in rows] == [2] * 4
    assert all(row["logprob"] <= 0 for row in rows)
    biased = ("--logit-bias", "65=100", "--ignore-eos", "-t", "0")
    ids = stack.generate("x", *biased, "--max-tokens", "5")["samples"][0]["token_ids"]
    assert ids == [65] * 5
    stopped = stack.generate("x", *biased, "--stop-token-id", "65", "--max-tokens", "5")
    assert stopped["samples"][0]["reason"] == "FINISH_REASON_STOP"
    assert stopped["samples"][0]["token_ids"] == [65]
    with Client(stack.address) as client, pytest.raises(InvalidRequest) as caught:
        client.generate("x", GenerateOptions(top_p=0.0))
    assert caught.value.field == "top_p"


def test_health_names_both_models(stack: Up) -> None:
    """Proves that `specmesh health` reaches the coordinator and shows target and draft."""
    document = json.loads(stack.run("health", "--address", stack.address, "--json"))
    assert document["coordinator"]["target"]["vocab_size"] == 258
    assert document["coordinator"]["draft"]["vocab_size"] == 258


def test_a_taken_port_is_refused_at_once(stack: Up) -> None:
    """Proves the exit code and the one line for a port in use, before any process starts."""
    port = stack.address.rpartition(":")[2]
    found = specmesh("up", *stack.flags, "--port", port, cwd=stack.folder)
    assert found.returncode == 5
    last = found.stderr.splitlines()[-1]
    assert last.startswith(f"error: port {port} of the coordinator is taken")


def test_sigterm_stops_everything_that_up_started(stack: Up) -> None:
    """Proves exit code 143 and that no process of the stack, Ray's included, is left. Runs last."""
    assert left_behind(stack.folder)
    descendants = _descendants(stack.process.pid)
    assert len(descendants) > 3
    os.kill(stack.process.pid, signal.SIGTERM)
    assert stack.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert left_behind(stack.folder) == []
    assert not descendants & set(process_table())


def _descendants(pid: int) -> set[int]:
    table = process_table()
    found: set[int] = {pid}
    while more := {p for p, entry in table.items() if entry.parent in found} - found:
        found |= more
    return found
