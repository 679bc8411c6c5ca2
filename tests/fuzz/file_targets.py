"""Decoders of files: model folders, GGUF, traces, settings, API keys. Refusal is a ConfigError.

A model folder is a good one with one file of it replaced; what is still accepted must be usable.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from rich.console import Console
from safetensors.torch import save_file

from coordinator.tenants import Tenants
from specmesh.config import CoordinatorSettings, DraftSettings, TargetSettings, load_settings
from specmesh.engine.decoder import load_decoder
from specmesh.engine.families import read_spec
from specmesh.engine.gguf import GgufModel
from specmesh.engine.weight_check import check as check_folder
from specmesh.engine.weight_check import seal
from specmesh.engine.weights import is_complete
from specmesh.errors import ConfigError, InvalidRequest, Unauthenticated
from specmesh.spans import Key
from specmesh.tokenizer import load_tokenizer
from specmesh.traces.page import render_page
from specmesh.traces.reader import list_summaries, read_trace
from specmesh.traces.terminal import print_trace
from tests.e2e.tiny_pair import write_pair
from tests.fuzz.fuzzer import Refused
from tests.fuzz.mutations import mutated_bytes, mutated_json

Mutate = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


@dataclass
class FileTarget:
    """One decoder. use: reads the input at a path; allowed: its refusals."""

    name: str
    good: Sequence[bytes]
    use: Callable[[bytes], None]
    allowed: tuple[type[Exception], ...]
    mutate: Mutate = mutated_bytes

    def seeds(self) -> Sequence[bytes]:
        """Good inputs."""
        return self.good

    def check(self, content: bytes) -> None:
        """Feed one input."""
        try:
            self.use(content)
        except self.allowed as refusal:
            raise Refused from refusal

    def mutated(self, rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        """A changed input."""
        return self.mutate(rng, content, others)


class Folders:
    """Scratch folders, with one good model. A context manager: afterwards they are gone."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="fuzz-")
        self.path = Path(self._temporary.name)
        self.model, _ = write_pair(self.path / "good")
        (self.model / "generation_config.json").write_text('{"eos_token_id": [257, 256]}')
        shards = {"weight_map": {"model.norm.weight": "model.safetensors"}}
        self.index = json.dumps(shards).encode()
        self._changed = self.path / "changed"

    def __enter__(self) -> Self:
        """Return the folders."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything."""
        self._temporary.cleanup()

    def with_file(self, name: str, content: bytes) -> Path:
        """The good folder but for one file."""
        shutil.rmtree(self._changed, ignore_errors=True)
        self._changed.mkdir()
        for file in self.model.iterdir():
            if file.name != name:
                os.link(file, self._changed / file.name)
        (self._changed / name).write_bytes(content)
        return self._changed

    def file(self, name: str, content: bytes) -> Path:
        """One file."""
        path = self.path / name
        path.write_bytes(content)
        return path


def model_targets(folders: Folders) -> list[FileTarget]:
    """Every file of a model folder."""

    def load(name: str) -> Callable[[bytes], None]:
        def use(content: bytes) -> None:
            folder = folders.with_file(name, content)
            tokenizer = load_tokenizer(folder)
            assert tokenizer.decode(tokenizer.encode("a b")) is not None
            tokenizer.chat([{"role": "user", "content": "x"}])
            spec = read_spec(folder, tokenizer.vocab_size)
            assert spec.vocab_size == tokenizer.vocab_size
            load_decoder(folder, dtype=torch.float32, device="cpu")

        return use

    def checksums(content: bytes) -> None:
        folder = folders.with_file("checksums.json", content)
        is_complete(folder)
        check_folder(folder)

    seal(folders.model)
    recorded = (folders.model / "checksums.json").read_bytes()
    (folders.model / "checksums.json").unlink()
    allowed = (ConfigError, InvalidRequest)
    found = [
        FileTarget(name, [(folders.model / name).read_bytes()], load(name), allowed, mutated_json)
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ]
    weights = (folders.model / "model.safetensors").read_bytes()
    found.append(
        FileTarget(
            "model.safetensors",
            [weights, _other_type(folders)],
            load("model.safetensors"),
            allowed,
            mutated_safetensors,
        )
    )
    index = "model.safetensors.index.json"
    found.append(FileTarget(index, [folders.index], load(index), allowed, mutated_json))
    found.append(FileTarget("checksums.json", [recorded], checksums, allowed, mutated_json))
    return found


def _other_type(folders: Folders) -> bytes:
    """Weights as integers: the right names and shapes, but no weights."""
    from safetensors.torch import load_file

    tensors = load_file(folders.model / "model.safetensors")
    path = folders.path / "integers.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, path)
    return path.read_bytes()


def mutated_safetensors(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """The header's JSON changed, or bytes anywhere: lengths, offsets, types, data."""
    if rng.random() < 0.3 or len(content) < 8:
        return mutated_bytes(rng, content, others)
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + length], content[8 + length :]
    changed = mutated_json(rng, header, [])
    told = len(changed) if rng.random() < 0.9 else rng.choice((0, 1, 1 << 40, (1 << 64) - 1))
    return struct.pack("<Q", told) + changed + rest


# ---------------------------------------------------------------- GGUF


def gguf_targets(folders: Folders) -> list[FileTarget]:
    """A GGUF file, read whole."""

    def use(content: bytes) -> None:
        model = GgufModel(folders.file("model.gguf", content))
        model.config()
        model.tokenizer()
        for name, tensor in model.tensors():
            assert name
            assert tensor.dtype == torch.float32

    return [FileTarget("gguf", [_small_gguf(folders)], use, (ConfigError,))]


def _small_gguf(folders: Folders) -> bytes:
    import numpy as np
    from gguf import GGUFWriter

    path = folders.path / "seed.gguf"
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 8),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    tokens = ["a", "b", "ab", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    shapes = {
        "token_embd.weight": (4, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (8, 8),
        "blk.0.ffn_up.weight": (8, 8),
        "blk.0.ffn_down.weight": (8, 8),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


# ---------------------------------------------------------------- traces, settings, keys


def trace_targets(folders: Folders) -> list[FileTarget]:
    """Trace files: bad lines are skipped, what is left is listed, drawn and exported."""

    def use(content: bytes) -> None:
        path = folders.file("a.otlp.jsonl", content)
        summaries, _ = list_summaries([path])
        for summary in summaries[:3]:
            trace, skipped = read_trace([path], summary.trace_id)
            print_trace(trace, Console(file=io.StringIO(), width=80))
            page = render_page(trace, skipped)
            assert page.count("</script>") == render_page_scripts()

    return [FileTarget("trace file", [_trace_lines()], use, (InvalidRequest,), _mutated_lines)]


def render_page_scripts() -> int:
    """How many scripts the page has: no trace may add one."""
    from importlib.resources import files

    text = (files("specmesh") / "data" / "trace_page.html").read_text(encoding="utf-8")
    return text.count("</script>")


def _mutated_lines(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    lines = content.splitlines() or [b""]
    at = rng.randrange(len(lines))
    lines[at] = mutated_json(rng, lines[at], others)
    return b"\n".join(lines) + b"\n"


def _trace_lines() -> bytes:
    def attribute(key: str, value: Any) -> dict[str, Any]:
        return {"key": key, "value": value}

    def span(number: int, name: str, parent: str, *attributes: Any) -> dict[str, Any]:
        return {
            "traceId": "ab" * 16,
            "spanId": f"{number:016x}",
            "parentSpanId": parent,
            "name": name,
            "startTimeUnixNano": str(10**18 + number),
            "endTimeUnixNano": str(10**18 + number + 10**6),
            "attributes": list(attributes),
            "links": [],
        }

    root = f"{1:016x}"
    spans = [
        span(
            1,
            "specmesh.generate",
            "",
            attribute(Key.RESPONSE_ID, {"stringValue": "abc"}),
            attribute(Key.OUTPUT_TOKENS, {"intValue": "3"}),
        ),
        span(2, "specmesh.prefill", root),
        span(
            3,
            "specmesh.round",
            root,
            attribute(Key.ROUND, {"intValue": "1"}),
            attribute(Key.NUM_DRAFT_TOKENS, {"intValue": "2"}),
            attribute(Key.NUM_EMITTED, {"intValue": "3"}),
            attribute(Key.TARGET_PROBS, {"arrayValue": {"values": [{"doubleValue": 0.5}]}}),
            attribute(Key.TARGET_BEFORE, {"arrayValue": {"values": [{"intValue": "1"}] * 3}}),
            attribute(Key.EMITTED_TEXTS, {"arrayValue": {"values": [{"stringValue": "x"}]}}),
            attribute(Key.CLOSING, {"stringValue": "bonus"}),
        ),
    ]
    resource = {"attributes": [attribute("service.name", {"stringValue": "specmesh-target"})]}
    line = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]}
    return json.dumps(line).encode() + b"\n"


def settings_targets(folders: Folders) -> list[FileTarget]:
    """TOML files, environment variables and key files."""

    def toml(cls: Any) -> Callable[[bytes], None]:
        def use(content: bytes) -> None:
            path = folders.file("settings.toml", content)
            settings = load_settings(cls, ["--config", str(path)])
            assert settings.model_dump_json()

        return use

    def environment(content: bytes) -> None:
        name, _, value = content.partition(b"=")
        if not name or b"\0" in content:
            return  # no variable of any process
        variables = {os.fsdecode(b"SPECMESH_COORDINATOR_" + name): os.fsdecode(value)}
        with patch.dict(os.environ, variables):
            settings = load_settings(CoordinatorSettings, ["--tokenizer", "x"])
        assert settings.model_dump_json()

    def keys(content: bytes) -> None:
        tenants = Tenants.load(folders.file("keys", content))
        tenants.limits_of("acme")
        for given in (b"", b"Bearer x", content[:200]):
            for value in (given, given.decode("latin-1")):
                metadata: list[tuple[str, str | bytes]] = [("authorization", value)]
                try:
                    tenants.authenticate(metadata)
                except Unauthenticated:
                    continue

    service = b'[engine]\nmodel = "m"\nnum_pages = 8\n[server]\nport = 1\ndrain_grace_s = 1.5\n'
    coordinator = (
        b'tokenizer = "t"\ntargets = ["a:1", "b:2"]\ndrafts = "c:3"\n[links]\nload_cap = 2.0\n'
        b"[speculation]\nnum_draft_tokens = 3\n[server.tls]\nallowed_peers = []\n"
    )
    variables = [
        b"TARGETS=a:1,b:2",
        b"SERVER__PORT=7",
        b"LINKS__LOAD_CAP=2",
        b"ADMISSION__MAX_RUNNING=3",
        b"SPECULATION__NUM_DRAFT_TOKENS=none",
        b"RAY={}",
        b'SERVER={"port": 1}',
    ]
    key_file = (
        b"# keys\nacme:0123456789abcdef max_running=2 max_waiting=0\nother:fedcba9876543210\n"
    )
    return [
        FileTarget("coordinator.toml", [coordinator], toml(CoordinatorSettings), (ConfigError,)),
        FileTarget("target.toml", [service], toml(TargetSettings), (ConfigError,)),
        FileTarget("draft.toml", [service], toml(DraftSettings), (ConfigError,)),
        FileTarget("environment", variables, environment, (ConfigError,)),
        FileTarget("API keys", [key_file], keys, (ConfigError,)),
    ]
