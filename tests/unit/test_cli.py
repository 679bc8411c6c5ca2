"""The command: every option reaches the request, every error is one line with its exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh import errors
from specmesh.cli import main, up
from specmesh.cli.flags import OPTION_FLAGS
from specmesh.cli.outcome import MEANINGS, ExitCode, exit_code, help_text
from specmesh.client import GenerateOptions
from tests.unit.scripted_coordinator import ROUNDS, Script, serving

README = Path(__file__).resolve().parents[2] / "README.md"
ALL_TEXT = "".join(f"<{token_id}>" for ids in ROUNDS for token_id in ids)

EVERY_FLAG = {
    "n": (["-n", "2"], 2),
    "temperature": (["-t", "0"], 0.0),
    "top_k": (["--top-k", "5"], 5),
    "top_p": (["--top-p", "0.5"], 0.5),
    "min_p": (["--min-p", "0.25"], 0.25),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "presence_penalty": (["--presence-penalty", "0.5"], 0.5),
    "frequency_penalty": (["--frequency-penalty", "-0.5"], -0.5),
    "logit_bias": (["--logit-bias", "3=-2", "--logit-bias", "4=1.5"], {3: -2.0, 4: 1.5}),
    "seed": (["--seed", "18446744073709551615"], 2**64 - 1),
    "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2),
    "stop": (["--stop", "a", "--stop", "b c"], ["a", "b c"]),
    "stop_token_ids": (["--stop-token-id", "7", "--stop-token-id", "8"], [7, 8]),
    "ignore_eos": (["--ignore-eos"], True),
    "logprobs": (["--logprobs", "0"], 0),
    "rule": (["--rule", "residual"], 1),
    "num_draft_tokens": (["-k", "0"], 0),
    "row_policy": (["--row-policy", "dense_f32"], 2),
    "decide_at": (["--decide-at", "coordinator"], 2),
}


def test_every_field_of_the_public_request_is_an_option_and_a_flag() -> None:
    """Proves that the message, GenerateOptions and the flags name the same fields."""
    on_the_wire = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    # Arguments of `generate` itself, not sampling options.
    own = {"text", "tokens", "chat", "resume_token_ids", "resume_round"}
    assert {field.name for field in fields(GenerateOptions)} == on_the_wire - own
    assert list(OPTION_FLAGS) == [field.name for field in fields(GenerateOptions)]
    assert list(EVERY_FLAG) == list(OPTION_FLAGS)


@pytest.mark.parametrize("name", EVERY_FLAG)
def test_each_flag_reaches_the_request(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that the flag of `name` sets exactly that field of the message that is sent."""
    flags, expected = EVERY_FLAG[name]
    script = Script()
    with serving(script) as address:
        assert main(["generate", "hi", "--address", address, *flags]) == ExitCode.OK
    capsys.readouterr()
    (request,) = script.requests
    set_fields = {descriptor.name for descriptor, _ in request.ListFields()}
    assert set_fields - {name} == {"chat"}
    value = getattr(request, name)
    if isinstance(expected, dict):
        assert dict(value) == expected
    elif isinstance(expected, list):
        assert list(value) == expected
    else:
        assert value == expected
    descriptor = pb.GenerateRequest.DESCRIPTOR.fields_by_name[name]
    assert not descriptor.has_presence or request.HasField(name)


def test_the_answer_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that a pipe gets the text and nothing else; statistics are on standard error."""
    with serving(Script()) as address:
        assert main(["generate", "hi", "--address", address]) == ExitCode.OK
    captured = capsys.readouterr()
    assert captured.out == ALL_TEXT + "\n"
    assert "9 tokens" in captured.err
    assert "accepted 4/8 (50 %)" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_json_is_one_document_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that --json carries text, ids, reason, usage and the seed as an exact integer."""
    with serving(Script()) as address:
        flags = ["--address", address, "--json", "-n", "2", "--seed", str(2**64 - 1)]
        assert main(["generate", "hi", *flags]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["seed"] == 2**64 - 1
    assert [sample["text"] for sample in document["samples"]] == [ALL_TEXT] * 2
    assert document["samples"][1]["token_ids"] == [i for ids in ROUNDS for i in ids]
    assert document["samples"][0]["reason"] == "FINISH_REASON_STOP"
    assert document["samples"][0]["usage"]["completion_tokens"] == 9
    assert document["timing"]["first_token_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "kind", "expected"),
    [
        (["hi"], "", "chat", [("user", "hi")]),
        (["hi", "--system", "s"], "", "chat", [("system", "s"), ("user", "hi")]),
        (["hi", "--raw"], "", "text", "hi"),
        (["-", "--raw"], "from a pipe", "text", "from a pipe"),
        (["--token-ids", "1,2, 3"], "", "tokens", [1, 2, 3]),
    ],
)
def test_prompts(
    arguments: list[str],
    stdin: str,
    kind: str,
    expected: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Proves that each way to give a prompt becomes its kind in the message."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    script = Script()
    with serving(script) as address:
        assert main(["generate", *arguments, "--address", address]) == ExitCode.OK
    capsys.readouterr()
    request = script.requests[0]
    assert request.WhichOneof("prompt") == kind
    found: dict[str, object] = {
        "text": request.text,
        "tokens": list(request.tokens.token_ids),
        "chat": [(m.role, m.content) for m in request.chat.messages],
    }
    assert found[kind] == expected


def test_resume_flags_reach_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that ids and round held by the caller are sent."""
    script = Script()
    with serving(script) as address:
        flags = ["--resume-token-ids", "11,12,13", "--resume-round", "2", "--seed", "1"]
        assert main(["generate", "hi", "--address", address, *flags]) == ExitCode.OK
    assert capsys.readouterr().out == "<14><15><16><17><18><19>\n"
    assert list(script.requests[0].resume_token_ids) == [11, 12, 13]


def test_chat_sends_the_whole_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that turns accumulate, that /reset forgets them and /exit ends before later lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/reset\nthree\n/exit\nnever\n"))
    script = Script()
    with serving(script) as address:
        assert main(["chat", "--system", "s", "--address", address]) == ExitCode.OK
    assert capsys.readouterr().out == (ALL_TEXT + "\n") * 3
    talks = [[m.content for m in request.chat.messages] for request in script.requests]
    assert talks == [["s", "one"], ["s", "one", ALL_TEXT, "two"], ["s", "three"]]


def test_health_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that health reports the models, and fails with 3 when a service is not ready."""
    with serving(Script()) as address:
        flags = ["health", "--address", address]
        assert main([*flags, "--service", address]) == ExitCode.OK
        assert "scripted" in capsys.readouterr().out
        assert main([*flags, "--json"]) == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["coordinator"]["version"] == "1.2.3"
        assert main([*flags, "--service", "127.0.0.1:1"]) == ExitCode.UNAVAILABLE
    assert one_line(capsys) == "error: not ready: 127.0.0.1:1"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on standard error."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_errors_are_one_line_with_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves message and code for a refused request, a missing server, bad flags, a bad bias."""
    refusal = errors.InvalidRequest("must be in (0, 1], got 7", field="top_p")
    with serving(Script(refusals={0: refusal})) as address:
        code = main(["generate", "hi", "--top-p", "7", "--address", address])
    assert code == ExitCode.USAGE
    assert one_line(capsys) == "error: top_p: must be in (0, 1], got 7"
    assert main(["health", "--address", "127.0.0.1:1"]) == ExitCode.UNAVAILABLE
    assert "127.0.0.1:1" in one_line(capsys)
    assert main(["generate", "hi", "--no-such-flag"]) == ExitCode.USAGE
    assert "--no-such-flag" in one_line(capsys)
    assert main(["generate", "hi", "--logit-bias", "x"]) == ExitCode.USAGE
    assert one_line(capsys) == "error: logit_bias: 'x' is not ID=VALUE"
    assert main(["generate"]) == ExitCode.USAGE
    assert "PROMPT" in one_line(capsys)
    assert main(["up", "--set", "engine.num_pages=3"]) == ExitCode.USAGE
    assert "SERVICE.section.key=value" in one_line(capsys)
    assert main(["up", "--target", "/nowhere"]) == ExitCode.SETUP
    assert "go together" in one_line(capsys)


def test_a_reader_that_goes_away_is_no_error() -> None:
    """Proves that a closed pipe ends a command quietly with 0."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from specmesh.cli import main; sys.exit(main())"
    arguments = ["plan", "--rates", ".5", "--decode", "1", "--draft", "1", "--verify", "1"]
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (found.returncode, found.stderr) == (0, "")


def test_every_error_class_has_a_documented_exit_code() -> None:
    """Proves that no error of the table ends as an undocumented code, and README says them all."""
    for cls in errors.BY_REASON.values():
        assert exit_code(cls("x")) in MEANINGS
    assert exit_code(errors.NumericFault("x")) == ExitCode.FAILED
    assert exit_code(errors.ModelMismatch("x")) == ExitCode.SETUP
    assert set(MEANINGS) == set(ExitCode)
    documented = " ".join(README.read_text().split())
    for code, meaning in MEANINGS.items():
        assert f"{code.value} {meaning.partition(' (')[0].partition(';')[0]}" in documented
        assert f"{code.value} {meaning}" in help_text()


def test_plan_finds_the_best_number_of_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves the worked example k = 3, rate .8, times 10, 1, 12, 1: speed-up 29.52 / 16."""
    times = ["--decode", "10", "--draft", "1", "--verify", "12", "--overhead", "1"]
    assert main(["plan", "--rates", ".8", *times, "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    row = document["rows"][3]
    assert row["tokens_per_round"] == pytest.approx(2.952)
    assert row["speedup"] == pytest.approx(29.52 / 16)
    assert document["rows"][0] == {"k": 0, "tokens_per_round": 1, "speedup": 1.0}
    assert document["best_k"] == max(range(9), key=lambda k: document["rows"][k]["speedup"])
    assert main(["plan", "--rates", ".9,.7,.5", *times]) == ExitCode.OK
    assert "2.845" in capsys.readouterr().out
    assert main(["plan", "--rates", "1.5", *times]) == ExitCode.USAGE


def test_config_show_prints_what_a_service_would_start_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Proves that file and flags are resolved as the service does, and unknown keys refused."""
    file = tmp_path / "target.toml"
    file.write_text('[engine]\nmodel = "/models/a"\nnum_pages = 7\n')
    flags = ["--config", str(file), "--engine.num-pages", "9"]
    assert main(["config", "show", "target", *flags]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert (document["engine"]["model"], document["engine"]["num_pages"]) == ("/models/a", 9)
    assert main(["config", "show", "target", "--no-such-key", "1"]) == ExitCode.USAGE


def test_the_cache_folder_is_the_local_one_where_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves the order ./.specmesh, then XDG_CACHE_HOME."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert up.default_cache_dir() == tmp_path / "xdg" / "specmesh"
    (tmp_path / ".specmesh").mkdir()
    assert up.default_cache_dir() == Path(".specmesh")


def test_without_any_home_the_cache_folder_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that a container's unknown user without HOME is told which flag to give."""

    def homeless(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert main(["up"]) == ExitCode.SETUP
    assert "--cache-dir" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1", "a:1,b", "x:0", "http://a:1"])
def test_an_address_without_a_port_is_a_wrong_flag(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that what is not host:port is named in one line, and not dialled at port 443."""
    wrong = repr(address.rpartition(",")[2])
    told = f"{wrong} is not host:port with a port from 1 to 65535"
    for command in (["generate", "hi"], ["chat"], ["health"]):
        assert main([*command, "--address", address]) == ExitCode.USAGE
        assert one_line(capsys) == f"error: address: {told}"
    monkeypatch.setenv("SPECMESH_ADDRESS", address)
    assert main(["health"]) == ExitCode.USAGE
    assert one_line(capsys) == f"error: address: {told}"
    assert main(["health", "--address", "a:1", "--service", wrong[1:-1]]) == ExitCode.USAGE
    assert one_line(capsys) == f"error: service: {told}"


@pytest.mark.parametrize("flag", ["--port", "--draft-port", "--target-port"])
@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_cannot_be_is_a_wrong_flag(flag: str, port: str) -> None:
    """Proves that a number that is no port ends with the code of wrong flags."""
    assert main(["up", flag, port]) == ExitCode.USAGE


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that what the system refuses is one line with the path, and not called a bug."""
    file = tmp_path / "file"
    file.write_text("")
    target = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(up, "resolve_models", lambda *_, **__: (target, target))
        ports = ["--port", "0", "--draft-port", "0", "--target-port", "0"]
        assert main(["up", *ports, "--cache-dir", str(file)]) == ExitCode.SETUP
    error = capsys.readouterr().err
    assert f"{file}/logs: Not a directory" in error


PLAN = ["plan", "--rates", ".8", "--decode", "10", "--draft", "1", "--verify", "12"]


def test_a_full_disk_under_standard_output_is_no_bug() -> None:
    """Proves that output which cannot be written ends with the code of what the system lacks."""
    code = f"import sys; from specmesh.cli import main; sys.exit(main({[*PLAN, '--json']}))"
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert found.returncode == ExitCode.SETUP, found.stderr
    assert "No space left on device" in found.stderr


def test_closed_streams_and_other_encodings_lose_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Proves that a command runs with its output closed, and that no character stops it."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(PLAN) == ExitCode.OK
    for stream in (sys.stdout, sys.stderr):
        stream.close()
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    script = Script(rounds=[(11,)], text="\u00e9\U0001f600!")
    with serving(script) as address:
        assert main(["generate", "hi", "--address", address]) == ExitCode.OK
    assert content.getvalue() == b"??!\n"


def test_rounds_to_resume_need_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """Proves that --resume-round alone is refused and not left out of the request."""
    assert main(["generate", "hi", "--resume-round", "2", "--seed", "1"]) == ExitCode.USAGE
    assert "--resume-token-ids" in capsys.readouterr().err


def test_settings_of_a_service_become_its_flags() -> None:
    """Proves that --set target.engine.num_pages=9 is the target's --engine.num-pages 9."""
    flags = up.settings_flags(["target.engine.num_pages=9", "coordinator.model_name=a=b"])
    assert flags == {
        "target": ["--engine.num-pages", "9"],
        "coordinator": ["--model-name", "a=b"],
    }


def test_help_needs_neither_torch_nor_grpc() -> None:
    """Proves that importing the command loads nothing slow."""
    code = "import sys, specmesh.cli; print({'torch', 'grpc', 'ray'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
