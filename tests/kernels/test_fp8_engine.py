"""The engine over fp8 weights on the kernel path: the reference path's model, a byte a weight.

The end-to-end test drives engines as `test_device_engine` does: greedy rounds over an fp8 target
give the text of greedy decoding, whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from kernels import linear
from kernels.configs.layers import LinearTiles, linear_tiles
from kernels.fp8_weight import FP8, Fp8Weight
from specmesh.bench.device_checks import PAGE, Fed, paged_logits
from specmesh.config import EngineSettings
from specmesh.engine import decoder as decoder_module
from specmesh.engine import loading
from specmesh.engine.compile_ahead import compile_shapes
from specmesh.engine.decoder import Decoder, load_decoder
from specmesh.engine.loading import load_model
from specmesh.engine.step_programs import StepShape
from specmesh.engine.weights import weight_bytes
from specmesh.errors import ConfigError
from tests.e2e.tiny_pair import write_pair
from tests.kernels import test_device_engine as harness
from tests.kernels.test_compile_ahead import job
from tests.kernels.test_device_engine import AnswerQueue, Caller, make_engine, params
from tests.unit.tiny_models import VOCAB, PackedRun, random_tokens, save, tiny_model

# Rows of padding hold anything, infinities too; numpy, which interprets, warns of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
RESIDUAL = 1
ROUNDS = (3, 0, 1, 2)  # candidates that are right, of three
NUM_NEW = 1 + sum(right + 1 for right in ROUNDS)


def matrices(decoder: Decoder) -> list[Any]:
    """The weights of every layer's four products, as they are kept."""
    return [
        each.weight  # type: ignore[attr-defined]  # the fused table made it
        for layer in decoder._layers
        for each in (layer.qkv, layer.out, layer.gated, layer.down)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_kernels_and_reference_compute_one_model(device: str, family: str, tmp_path: Path) -> None:
    """Logits over fp8 weights agree within float32's rounding, prompts and single tokens; rounding
    the weights changed them a hundred times as much."""
    folder = save(tiny_model(family), tmp_path)
    tokens = random_tokens(19, seed=2)
    fused = load_decoder(folder, device=device, weight_dtype="fp8", fused=True)
    cache, table = fused.new_cache(1, PAGE), [0]
    prompt = paged_logits(fused, cache, [Fed(tokens[:-1], 0, table)])
    kernels = torch.cat([*prompt, *paged_logits(fused, cache, [Fed(tokens, 18, table)])]).cpu()
    found = []
    for decoder in (load_decoder(folder, weight_dtype="fp8"), load_decoder(folder)):
        run = PackedRun(decoder, [tokens])
        found.append(torch.cat([*run.step([len(tokens) - 1]), *run.step([1])]))
    reference, own = found
    torch.testing.assert_close(kernels, reference, rtol=0, atol=2e-5)
    assert float((reference - own).abs().max()) > 2e-3


def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted products are numpy's, whose bits depend on the number of rows on some processors,
    as those of a matrix instruction do not: one product a row then."""
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        def row(handle: Any, index: int) -> Any:
            return interpreter.TensorHandle(handle.data[..., index : index + 1, :], handle.dtype)

        rows = [dot(self, row(a, i), b, row(d, i), *rest) for i in range(a.data.shape[-2])]
        joined = np.concatenate([each.data for each in rows], axis=-2)
        return interpreter.TensorHandle(joined, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def test_bits_ignore_how_a_context_was_fed(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded one by one, verified four at once, beside another sequence, or computed whole: equal
    bits of every logit, where single rows split their chunks of K among programs and others not."""
    shape = {"num_hidden_layers": 1, "hidden_size": 160, "head_dim": 8, "intermediate_size": 136}
    folder = save(tiny_model("llama", **shape), tmp_path)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    decoder = load_decoder(folder, dtype, device, weight_dtype="fp8", fused=True)
    split_rows = []

    def tiles_of(x: Tensor, *others: Any) -> LinearTiles:
        split_rows.append(len(x))
        return replace(linear_tiles(x, *others), ordered=device == "cpu", split=len(x) == 1)

    monkeypatch.setattr(linear, "linear_tiles", tiles_of)
    if device == "cpu":
        products_row_by_row(monkeypatch)
    assert all(linear.chunk_depth(each.values, dtype) < 136 for each in matrices(decoder))
    tokens, other = random_tokens(9, seed=4), random_tokens(6, seed=5)

    def last_four(cuts: list[int], beside: bool) -> Tensor:
        cache, rows, start = decoder.new_cache(2, PAGE), [], 0
        for cut in cuts:
            fed = [Fed(tokens[:cut], start, [0])]
            fed += [Fed(other[:cut], start, [1])] * (beside and cut <= len(other))
            rows.append(paged_logits(decoder, cache, fed)[0])
            start = cut
        return torch.cat(rows)[-4:]

    expected = last_four([5, 6, 7, 8, 9], beside=False)
    assert set(split_rows) == {1, 5}
    for cuts, beside in (([5, 9], False), ([5, 6, 7, 8, 9], True), ([9], False), ([2, 4, 9], True)):
        assert torch.equal(last_four(cuts, beside), expected), (cuts, beside)


def test_matrices_take_a_byte_a_weight(device: str, tmp_path: Path) -> None:
    """What the plan counts is what the decoder holds: e4m3 values and scales in every layer, the
    embedding, the head and the norms in the type of activations."""
    folder = save(tiny_model("llama"), tmp_path)
    decoder = load_decoder(folder, device=device, weight_dtype="fp8", fused=True)
    kept = matrices(decoder)
    assert len(kept) == 4 * 3
    assert all(isinstance(each, Fp8Weight) and each.values.dtype is FP8 for each in kept)
    spec = decoder.spec
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    outside = 2 * spec.num_embeddings * spec.hidden_size + norms
    held = sum(each.values.nbytes + each.scale.nbytes for each in kept) + 4 * outside
    assert held == weight_bytes(spec, torch.float32, "fp8") < weight_bytes(spec, torch.float32)
    head: Any = decoder._head
    assert head.weight.dtype is decoder._embedding.dtype is torch.float32


def test_every_type_of_activations_has_the_same_weights(tmp_path: Path) -> None:
    """Weights are rounded from what the file holds, never by way of a narrower type: a GPU in
    bfloat16 and a CPU in float32 run one model."""
    folder = save(tiny_model("llama"), tmp_path)
    wide, narrow = (
        matrices(load_decoder(folder, dtype, weight_dtype="fp8", fused=True))
        for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(wide, narrow, strict=True):
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)


def test_memory_is_planned_by_what_is_kept(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for the fp8 form alone a service of it starts; the folder's own form, and fp8 on
    the reference layers, which hold floats, are refused with the numbers."""
    folder, _ = write_pair(tmp_path)
    spec = load_decoder(folder).spec
    fp8, whole = (weight_bytes(spec, torch.float32, kind) for kind in ("fp8", "model"))
    monkeypatch.setattr(loading, "_available_bytes", lambda _device: (fp8 + whole) // 2)
    small = EngineSettings(
        model=folder, device=device, dtype="float32", kernels="triton", weight_dtype="fp8",
        num_pages=1, page_size=16,
    )  # fmt: skip
    info = load_model(small).info
    assert (info.dtype, info.numeric_contract) == ("float32, fp8 weights", "invariant")
    for changes in ({"weight_dtype": "model"}, {"kernels": "reference"}):
        with pytest.raises(ConfigError, match="the weights take"):
            load_model(small.model_copy(update=changes))
    with pytest.raises(ConfigError, match=r"engine.invariant must be true"):
        load_model(small.model_copy(update={"invariant": False}))


def test_a_gpu_that_cannot_convert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ada and Hopper there is no e4m3."""
    monkeypatch.setattr(decoder_module, "_capability", lambda _device: (8, 0))
    check = partial(decoder_module.check_fp8, torch.device("cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"capability 8\.9"):
        check(fused=True, invariant=True)
    monkeypatch.setattr(decoder_module, "_capability", lambda _device: (9, 0))
    check(fused=True, invariant=True)


def test_kernels_are_compiled_ahead_for_it(device: str, tmp_path: Path) -> None:
    """A job of fp8 weights runs its steps over fp8 weights."""
    seen = []
    shapes = [StepShape(1, 2, 0, 1, 1, 64)]
    plain = job(device, shapes)
    original = decoder_module.quantise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            decoder_module, "quantise", lambda weight: seen.append(weight) or original(weight)
        )
        assert compile_shapes(plain, tmp_path) == 1
        assert not seen
        assert compile_shapes(replace(plain, weight_dtype="fp8"), tmp_path) == 1
    assert len(seen) == 7


# ---------------------------------------------------------------- end to end


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[dict[bool, Any]]:
    """Targets over fp8 weights by whether they are device engines, on one folder."""
    folder = save(tiny_model("llama", seed=1), tmp_path_factory.mktemp("target"))
    decoders = []

    def load(folder: Path, **options: Any) -> Decoder:
        decoders.append(load_decoder(folder, weight_dtype="fp8", **options))
        return decoders[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "load_decoder", load)
        made = {
            on_device: make_engine("target", folder, device, on_device=on_device, pages=24)
            for on_device in (False, True)
        }
    assert [(each.weight_dtype, each.is_fused) for each in decoders] == [
        ("fp8", False),
        ("fp8", True),
    ]
    for engine in made.values():
        engine.start()
    yield made
    for engine in made.values():
        engine.stop()


def open_session(engine: Any, session_id: int, prompt: list[int]) -> Caller:
    caller = Caller("target", engine, AnswerQueue(), session_id, list(prompt))
    caller.open(params(temperature=0.0), RESIDUAL)
    return caller


def confirm(caller: Caller, result: Any) -> int:
    """Append what a verdict emitted; returns how many candidates it accepted."""
    assert result.WhichOneof("result") == "verdict", result
    caller.tokens.extend(result.verdict.tokens)
    caller.known = len(caller.tokens)
    return int(result.verdict.num_accepted)


def test_greedy_rounds_give_the_text_of_greedy_decoding(engines: dict[bool, Any]) -> None:
    """Candidates all right, wrong at each place, and all wrong: plain decoding's tokens, on the
    device engine and the reference engine alike."""
    prompt = random_tokens(18, seed=7)
    texts = []
    for number, engine in enumerate(engines.values()):
        plain = open_session(engine, 10 * number, prompt)
        confirm(plain, plain.work(num_steps=NUM_NEW, decide_at=1))
        texts.append(plain.tokens)
        spoken = open_session(engine, 10 * number + 1, prompt)
        confirm(spoken, spoken.work(num_steps=1, decide_at=1))
        accepted = []
        for num_right in ROUNDS:
            place = len(spoken.tokens)
            candidates = [
                token if i < num_right else (token + 1) % VOCAB
                for i, token in enumerate(plain.tokens[place : place + 3])
            ]
            result = spoken.work(candidates=candidates, decide_at=1)
            accepted.append(confirm(spoken, result))
        assert accepted == list(ROUNDS)
        texts.append(spoken.tokens)
    assert len(texts[0]) == len(prompt) + NUM_NEW
    assert all(text == texts[0] for text in texts)
