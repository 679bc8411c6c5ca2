"""`python -m specmesh.bench.link_floor`: real servers and streams, and their messages."""

from __future__ import annotations

import json

import pytest

from protos.specmesh.v1 import draft_pb2, target_pb2
from specmesh.bench.link_floor import Bytes, Frames, main, rows
from specmesh.wire import decode


def test_the_messages_are_those_of_a_round() -> None:
    """Rows of the draft's answer reach the target unchanged, one a candidate, and are laws."""
    frames = Frames(num_ids=64, num_rows=3)
    proposal = frames.proposal(frames.propose())
    answered = draft_pb2.DraftServiceLinkResponse.FromString(proposal).results[0].proposal
    verify = frames.verify(proposal)
    asked = target_pb2.TargetServiceLinkRequest.FromString(verify).commands[0].verify
    assert list(asked.candidates) == list(answered.tokens) == [0, 1, 2]
    assert list(asked.distributions) == list(answered.distributions) == rows(64, 3)
    assert decode(asked.distributions[0], 49_152).ids.numel() == 64
    verdict = target_pb2.TargetServiceLinkResponse.FromString(frames.verdict(verify))
    assert verdict.results[0].verdict.num_accepted == 2
    plain = Bytes(frames)
    assert len(plain.verify(b"")) == len(verify)
    assert len(plain.proposal(b"")) == len(proposal)


def test_what_is_held_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A round costs more than nothing, and less than the servers hold: their wait is taken off."""
    held_ms = 500.0
    flags = ["--rounds", "3", "--ids", "16", "-k", "2", "--target-ms", str(held_ms)]
    assert main(flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == ["link-floor-bytes", "link-floor-frames"]
    for line in lines:
        assert 0.0 < line["p20"] <= line["median"] < held_ms
        assert line["n"] == 3
        assert line["command"].endswith("--target-ms 500.0")
