"""The decoder's logits are transformers' logits, however a sequence is cut into steps."""

import math
from pathlib import Path

import pytest
import torch

from specmesh.config import EngineSettings
from specmesh.engine.decoder import Decoder, StepBatch, load_decoder
from specmesh.engine.loading import load_model
from specmesh.errors import ConfigError
from tests.unit.tiny_models import (
    PAGE,
    VOCAB,
    PackedRun,
    random_tokens,
    reference_logits,
    save,
    tiny_model,
)

TOLERANCE = 1e-4  # absolute, on logits of order 1; float32 rounding gives a few 1e-6

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied, biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama one head per group": ("llama", {"num_key_value_heads": 4}),
    "llama one group": ("llama", {"num_key_value_heads": 1, "head_dim": 12}),
    "llama3 rope": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "yarn rope, mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
    ),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral page window": ("mistral", {"sliding_window": 20}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 windowed upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied, windowed": (
        "qwen3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
}
LENGTHS = (70, 3, 37)
# Tokens fed to each sequence: one prefill; prefill and decode; chunks beside verify and decode.
SCHEDULES = {
    "prefill": [(70, 3, 37)],
    "decode": [(69, 2, 36), (1, 1, 1)],
    "mixed": [(40, 1, 17), (1, 1, 1), (25, 0, 1), (1, 1, 5), (3, 0, 13)],
    "token by token": [(1, 1, 1)] * 3 + [(1, 0, 1)] * 34 + [(33, 0, 0)],
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A decoder, and the logits that transformers gives for three sequences."""
    family, changes = VARIANTS[request.param]
    model = tiny_model(family, **changes)
    folder = save(model, tmp_path_factory.mktemp("model"))
    sequences = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    return load_decoder(folder), sequences, [reference_logits(model, s) for s in sequences]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_logits_match_transformers(variant, schedule) -> None:
    """Every position's logits agree within 1e-4, whatever the chunks and the company."""
    decoder, sequences, expected = variant
    run = PackedRun(decoder, sequences)
    for counts in schedule:
        starts = list(run.done)
        for i, logits in enumerate(run.step(counts)):
            wanted = expected[i][starts[i] : starts[i] + counts[i]]
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)
    assert run.done == list(LENGTHS)


def test_rejection_at_every_index_leaves_cold_logits(variant) -> None:
    """Rounds of four candidates, the first 0 to 4 of them right, over pages and past windows: rows
    up to the rejected one, and all that follows, are transformers' of the tokens that stayed."""
    decoder, (tokens, *others), (expected, *_) = variant
    run = PackedRun(decoder, [tokens, *others])
    run.step((6, 1, 17))
    num_rounds = 0
    while run.done[0] + 5 <= len(tokens):
        base, num_kept = run.done[0], num_rounds % 5
        wrong = [(token + 1) % VOCAB for token in tokens[base + num_kept + 1 : base + 5]]
        run.sequences = [[*tokens[: base + num_kept + 1], *wrong], *others]
        logits, *_ = run.step((5, 0, num_rounds % 2))  # alone, and beside another's decode
        judged = slice(base, base + num_kept + 1)
        torch.testing.assert_close(logits[: num_kept + 1], expected[judged], atol=TOLERANCE, rtol=0)
        run.done[0] = base + num_kept + 1
        num_rounds += 1
    assert num_rounds >= 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    """A plain model, for what does not depend on the family."""
    model = tiny_model("llama")
    return load_decoder(save(model, tmp_path_factory.mktemp("llama"))), model


def test_only_requested_rows_are_returned(llama) -> None:
    """Rows come in the order asked for, and none asked for gives none but still writes K/V."""
    decoder, model = llama
    tokens = random_tokens(21, 5)
    expected = reference_logits(model, tokens)
    cache = decoder.new_cache(3, PAGE)
    tables = [[0, 1]]
    rows = [19, 0, 7]
    batch = StepBatch.pack([tokens[:20]], [0], tables, rows, page_size=PAGE)
    torch.testing.assert_close(
        decoder.forward(batch, cache), expected[rows], atol=TOLERANCE, rtol=0
    )
    cache = decoder.new_cache(3, PAGE)
    silent = decoder.forward(StepBatch.pack([tokens[:20]], [0], tables, [], page_size=PAGE), cache)
    assert silent.shape == (0, VOCAB)
    batch = StepBatch.pack([tokens[20:]], [20], tables, [0], page_size=PAGE)
    torch.testing.assert_close(decoder.forward(batch, cache), expected[20:], atol=TOLERANCE, rtol=0)


def test_rejected_slots_are_written_over(llama) -> None:
    """Feeding other tokens at positions already written gives the logits of a cold run."""
    decoder, model = llama
    kept, rejected, fresh = random_tokens(30, 1), random_tokens(5, 2), random_tokens(5, 3)
    run = PackedRun(decoder, [kept + rejected])
    run.step([30])
    run.step([5])
    run.sequences, run.done = [kept + fresh], [30]
    (logits,) = run.step([5])
    expected = reference_logits(model, kept + fresh)[30:]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_an_earlier_owners_nan_is_not_read(llama) -> None:
    """Pages full of NaN, left by failed sessions, do not leak through masked or padded slots."""
    decoder, model = llama
    sequences = [random_tokens(n, n) for n in (19, 30, 3)]
    cache = decoder.new_cache(7, PAGE)
    for pool in cache.pools:
        pool.fill_(math.nan)
    run = PackedRun(decoder, sequences, cache)
    run.tables = [[1, 2], [3, 4], [5]]  # nobody owns page 0
    expected = [reference_logits(model, tokens) for tokens in sequences]
    for counts in ((18, 29, 2), (1, 1, 1)):
        starts = list(run.done)
        for i, logits in enumerate(run.step(counts)):
            wanted = expected[i][starts[i] : starts[i] + counts[i]]
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_shared_pages_serve_two_sequences(llama) -> None:
    """A second sequence continues from another's full page without feeding it again."""
    decoder, model = llama
    prefix, own = random_tokens(PAGE, 6), random_tokens(4, 7)
    cache = decoder.new_cache(3, PAGE)
    decoder.forward(StepBatch.pack([prefix], [0], [[2]], [], page_size=PAGE), cache)
    batch = StepBatch.pack([own], [PAGE], [[2, 0]], range(4), page_size=PAGE)
    expected = reference_logits(model, prefix + own)[PAGE:]
    torch.testing.assert_close(decoder.forward(batch, cache), expected, atol=TOLERANCE, rtol=0)


def test_copy_pages_and_clear_pages(llama) -> None:
    """A copied page reads as the original after the original is cleared."""
    decoder, model = llama
    tokens = random_tokens(12, 8)
    cache = decoder.new_cache(3, PAGE)
    decoder.forward(StepBatch.pack([tokens[:11]], [0], [[1]], [], page_size=PAGE), cache)
    cache.copy_pages([(1, 2)])
    cache.clear_pages([1])
    assert not any(pool[:, 1].any() for pool in cache.pools)
    batch = StepBatch.pack([tokens[11:]], [11], [[2]], [0], page_size=PAGE)
    expected = reference_logits(model, tokens)[11:]
    torch.testing.assert_close(decoder.forward(batch, cache), expected, atol=TOLERANCE, rtol=0)


def test_very_uneven_contexts_are_grouped_and_agree(llama) -> None:
    """One long and many short sequences decode together without changing each other."""
    decoder, model = llama
    sequences = [random_tokens(n, n) for n in (200, 5, 6, 7, 18, 2, 2, 90)]
    run = PackedRun(decoder, sequences)
    run.step([len(tokens) - 2 for tokens in sequences[:5]] + [0, 0, 88])
    expected = [reference_logits(model, tokens) for tokens in sequences]
    starts = list(run.done)
    counts = [2, 1, 2, 1, 2, 2, 1, 2]
    for i, logits in enumerate(run.step(counts)):
        wanted = expected[i][starts[i] : starts[i] + counts[i]]
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_two_decoders_can_share_an_embedding(llama, tmp_path: Path) -> None:
    """A draft composed in memory gives the logits of one loaded whole."""
    decoder, model = llama
    shared = load_decoder(save(model, tmp_path), embedding_from=decoder)
    tokens = random_tokens(9, 9)
    assert isinstance(shared, Decoder)
    (logits,) = PackedRun(shared, [tokens]).step([9])
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_bfloat16_follows_float32_loosely(tmp_path: Path) -> None:
    """The narrow type computes the same function: its best token agrees almost always."""
    model = tiny_model("llama", seed=3)
    narrow = load_decoder(save(model, tmp_path), dtype=torch.bfloat16)
    tokens = random_tokens(40, 10)
    (logits,) = PackedRun(narrow, [tokens]).step([40])
    expected = reference_logits(model, tokens)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "CPU"])
def test_a_setting_that_names_no_device(name: str, tmp_path: Path) -> None:
    """A device's name that is none is refused by its setting, before anything is loaded."""
    with pytest.raises(ConfigError) as refused:
        load_model(EngineSettings(model=tmp_path, device=name))
    expected = f"engine.device: unsupported device {name}: it must be cpu, cuda or cuda:N"
    assert str(refused.value) == expected


def test_a_setting_that_names_an_absent_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that the machine lacks is blamed on the service's setting."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^engine\.device: cuda was asked for"):
        load_model(EngineSettings(model=tmp_path, device="cuda", kernels="reference"))
