"""A fixed number of inputs for every decoder of bytes from outside, and what fuzzing has found.

`make fuzz` runs far more; what it finds becomes a case of FOUND.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence

import pytest

from protos.specmesh.v1 import generation_pb2 as pb
from tests.fuzz.file_targets import Folders, gguf_targets, model_targets, settings_targets
from tests.fuzz.fuzzer import LONGEST_S, Refused, Target, fuzz
from tests.fuzz.message_targets import response_target
from tests.fuzz.mutations import mutated_bytes, mutated_json, mutated_message
from tests.fuzz.targets import all_targets

GGUF_ARRAY = 9  # a type of the format
NUM_INPUTS = 120
# These load a model each time.
NUM_FOLDER_INPUTS = 30
FOLDER_FILES = ("config.json", "generation_config.json", "tokenizer", "model.safetensors")
NAMES = (
    "target link",
    "draft link",
    "Distribution",
    "Verdict rows",
    "GenerateRequest",
    "GenerateResponse",
    "Status",
    "traceparent",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "checksums.json",
    "gguf",
    "trace file",
    "coordinator.toml",
    "target.toml",
    "draft.toml",
    "environment",
    "API keys",
)


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    """Every decoder."""
    with all_targets() as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_no_input_crashes_hangs_or_changes_anything(
    name: str, targets: dict[str, Target], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes in is taken or refused with an error that the decoder promises, in bounded
    time and memory; at links nothing of another's session moves and no page stays behind."""
    caplog.set_level("CRITICAL")
    num_inputs = NUM_FOLDER_INPUTS if name.startswith(FOLDER_FILES) else NUM_INPUTS
    result = fuzz(targets[name], num_inputs, seed=1)
    assert result.failures == []
    assert result.num_inputs == num_inputs
    assert result.num_refused < num_inputs, "not even the good inputs are taken"


def test_every_decoder_is_fuzzed(targets: dict[str, Target]) -> None:
    """The list above is complete."""
    assert set(targets) == set(NAMES)


def _tokenizer(**changes: object) -> bytes:
    with Folders() as folders:
        fields = json.loads((folders.model / "tokenizer.json").read_bytes())
    fields["model"]["vocab"].update(changes)
    return json.dumps(fields).encode()


def _template(template: object) -> bytes:
    return json.dumps({"eos_token": "<|im_end|>", "chat_template": template}).encode()


def _record(name: str) -> bytes:
    return json.dumps({"files": {name: {"bytes": 3, "sha256": "00"}}}).encode()


def _checksums(**entry: object) -> bytes:
    return json.dumps({"files": {"config.json": entry}}).encode()


# What was taken for granted, or ended in an exception that no caller expects.
FOUND = {
    "a token id that asks for 32 GiB": ("tokenizer.json", _tokenizer(zz=(1 << 32) - 1)),
    "half a character": ("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
    "templates that are none": ("tokenizer_config.json", _template([8])),
    "a template that divides by zero": ("tokenizer_config.json", _template("{{ 1 / 0 }}")),
    "loops nested deeper than Python's": (
        "tokenizer_config.json",
        _template("{% for a in [1] %}" * 30 + "{% endfor %}" * 30),
    ),
    "branches nested deeper than Python's": (
        "tokenizer_config.json",
        _template("{% if 1 %}" * 120 + "{% endif %}" * 120),
    ),
    "an argument twice": ("tokenizer_config.json", _template("{{ f(a=1, a=1) }}")),
    "a record of a name that no file has": ("checksums.json", _record("a" * 256)),
    "a shard of a name that no file has": (
        "model.safetensors.index.json",
        json.dumps({"weight_map": {"model.norm.weight": "\u00e9" * 128}}).encode(),
    ),
    "a record without a size": ("checksums.json", _checksums(sha256="00")),
    "a record without a digest": ("checksums.json", _checksums(bytes=3)),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_in_model_folders_is_refused(case: str) -> None:
    """Each was found by feeding what nobody expects, and is a ConfigError or InvalidRequest now."""
    name, content = FOUND[case]
    with Folders() as folders:
        target = next(each for each in model_targets(folders) if each.name == name)
        with pytest.raises(Refused):
            target.check(content)


@pytest.mark.parametrize("element", [0, 8, 9])
def test_an_array_that_says_it_never_ends_is_refused(element: int) -> None:
    """Found by fuzzing: the reader of GGUF files went on past their end, for ever."""
    field = struct.pack("<Q1sIIQ", 1, b"a", GGUF_ARRAY, element, 1 << 60)
    with Folders() as folders:
        (target,) = gguf_targets(folders)
        with pytest.raises(Refused) as refused:
            target.check(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    assert "the file ends within a field" in str(refused.value.__cause__)


@pytest.mark.parametrize("content", [b"TARGETS=\xff:1,b:", b"MODEL_NAME=\x80", b"\xac=1"])
def test_variables_that_are_no_text_are_refused(content: bytes) -> None:
    """Found by fuzzing: half characters were taken, and failed where settings are printed."""
    with Folders() as folders:
        target = next(each for each in settings_targets(folders) if each.name == "environment")
        with pytest.raises(Refused):
            target.check(content)


def test_a_round_that_cannot_be_resumed_is_refused() -> None:
    """Found by fuzzing: the last round a message can name left no number for the request after."""
    chunk = pb.GenerateResponse(chunk=pb.Chunk(index=0, round=(1 << 32) - 1))
    with pytest.raises(Refused):
        response_target().check(chunk.SerializeToString())


# ---------------------------------------------------------------- the fuzzer itself


class Planted:
    """A decoder with faults behind nested conditions, as coverage must find them."""

    name = "planted"

    def __init__(self, fault: BaseException | None = None) -> None:
        self._fault = fault

    def seeds(self) -> Sequence[bytes]:
        """One good input."""
        return [b"aaaa"]

    def check(self, content: bytes) -> None:
        """Three bytes in a row lead to the fault; any one of them to a new line."""
        from specmesh.wire import Row  # a product module, so that its lines count

        if content[:1] == b"\x00":
            _step(Row, 1)
            if content[1:2] == b"\xff":
                _step(Row, 2)
                if content[2:3] == b"\x7f" and self._fault is not None:
                    raise self._fault

    def mutated(self, rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        """A changed input."""
        return mutated_bytes(rng, content, others)


def _step(row: type, number: int) -> None:
    """A branch of product code that only this depth reaches."""
    import torch

    dense = row(number, torch.ones(number), None, 1)
    if number == 1:
        assert dense.weight(0) == 1.0
    else:
        assert dense.dense().numel() == number


def test_coverage_leads_to_a_fault_behind_three_bytes() -> None:
    """A fault that blind changes meet once in 16 million inputs is found within some thousands."""
    result = fuzz(Planted(ZeroDivisionError("planted")), 20_000, seed=3)
    assert result.failures
    assert "planted" in result.failures[0][1]
    assert len(result.corpus) >= 3


def test_mutations_are_made_by_seed_and_stay_bounded() -> None:
    """The same seed gives the same inputs; none grows without end."""
    message = pb.GenerateRequest(text="x", stop=["a"]).SerializeToString()
    makers = (
        lambda rng, content: mutated_bytes(rng, content, [b"other"]),
        lambda rng, content: mutated_json(rng, content, []),
        lambda rng, content: mutated_message(rng, pb.GenerateRequest, content, [message]),
    )
    for maker, start in zip(makers, (b"abc", b'{"a": [1, {"b": null}]}', message), strict=True):
        runs = []
        for _ in range(2):
            rng, content, made = random.Random(5), start, []
            for _ in range(200):
                content = maker(rng, content)
                made.append(content)
            runs.append(made)
        assert runs[0] == runs[1]
        assert len(set(runs[0])) > 50
        assert max(map(len, runs[0])) <= 1 << 19


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that takes too long is told, although the decoder would swallow any exception."""
    monkeypatch.setattr("tests.fuzz.fuzzer.LONGEST_S", 0.2)
    assert LONGEST_S > 1

    class Hanging(Planted):
        def check(self, content: bytes) -> None:
            if content == b"aaaa":
                return
            while True:
                try:
                    while True:
                        pass
                except Exception:  # noqa: BLE001 - as a careless decoder would
                    continue

    result = fuzz(Hanging(), 2, seed=1)
    assert "took longer" in result.failures[0][1]
