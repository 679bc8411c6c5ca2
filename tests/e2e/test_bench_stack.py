"""`specmesh bench-stack` end to end: a small pair, three processes, two drafts, real ports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmesh.cli import main
from tests.e2e.tiny_pair import write_pair

KEYS = {"name", "value", "unit", "p20", "p80", "baseline", "versions", "command"}


def test_stack_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain, policy and fixed candidates over two drafts give records whose parts fit together."""
    target, draft = write_pair(tmp_path)
    output = tmp_path / "results.jsonl"
    flags = ["bench-stack", "--target", str(target), "--draft", str(draft)]
    flags += ["--other-draft", f"b={draft}", "--concurrency", "2", "--max-tokens", "32"]
    flags += ["--cases", "chat-policy-c2,chat-k4-c2,chat-b-k4-c2,stack-plain-c2"]
    flags += ["--seconds", "1.5", "--warm-up", "3", "--long-prompt", "80"]
    flags += ["--set", "coordinator.ray.enabled=false", "--output", str(output)]
    flags += ["--set", "coordinator-b.speculation.num-ahead=2"]
    flags += ["--cache-dir", str(tmp_path / "cache")]
    assert main(flags) == 0, capsys.readouterr().err
    records = {each["name"]: each for each in map(json.loads, output.read_text().splitlines())}
    assert all(set(record) == KEYS for record in records.values())
    value = {name: record["value"] for name, record in records.items()}
    for case in ("stack-plain-c2", "chat-plain-c2", "chat-policy-c2", "chat-k4-c2"):
        assert value[case] > 0
        assert value[f"{case}-tokens-per-s"] > 0
        parts = ("draft", "wire", "queue", "verify", "manage")
        assert all(value[f"{case}-round-{part}"] >= 0 for part in parts)
    assert value["speedup-chat-k4-c2"] == pytest.approx(
        value["chat-plain-c2"] / value["chat-k4-c2"]
    )
    assert 0 < value["chat-k4-c2-acceptance-1"] <= 1
    assert value["chat-plain-c2-round-draft"] == 0
    # The largest part of a round is not larger than the round.
    assert value["chat-k4-c2-round-verify"] < value["round-k4-c2"]
    assert "round-b-k4-c2" in value
    assert "speedup-chat-b-k4-c2" in value
    assert "speedup-chat-c2" in capsys.readouterr().out
