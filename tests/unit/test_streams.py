"""Streams: known answers for words, uniforms and races; every implementation has the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import reference, reference_races
from kernels.streams import UNIFORM_MAX, WORD_MASK, Purpose, philox

# Random123's kat_vectors for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0), 0,
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (WORD_MASK,) * 4, (1 << 64) - 1,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "seed", "words"), KNOWN_ANSWERS)
def test_scalar_philox_known_answers(
    counter: tuple[int, int, int, int], seed: int, words: tuple[int, ...]
) -> None:
    """The scalar generator gives Random123's published vectors."""
    assert philox(seed, counter) == words


@pytest.mark.parametrize("num_calls", [1, 8, 9, 1000])
@pytest.mark.parametrize(("counter", "seed", "words"), KNOWN_ANSWERS)
def test_vectorised_philox_known_answers(
    counter: tuple[int, int, int, int], seed: int, words: tuple[int, ...], num_calls: int
) -> None:
    """The vectorised generator gives the published vectors, alone and among other calls."""
    word0 = torch.full((num_calls,), counter[0], dtype=torch.int64)
    found = reference.philox_words(seed, word0, *counter[1:])
    assert found.dtype == torch.int64
    assert found.shape == (num_calls, 4)
    assert {tuple(row) for row in found.tolist()} == {words}


def test_vectorised_philox_is_the_scalar_one_word_for_word() -> None:
    """1000 counters, large words included: row i of the batch is the scalar call of counter i."""
    word0 = torch.arange(1000) * 4_294_967  # up to nearly 2**32
    found = reference.philox_words(0xDEADBEEF_12345678, word0, 4_000_000_000, 77, 3)
    for word, row in zip(word0.tolist(), found.tolist(), strict=True):
        assert philox(0xDEADBEEF_12345678, (word, 4_000_000_000, 77, 3)) == tuple(row)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seeds_outside_64_bits_are_refused(seed: int) -> None:
    """A seed is an unsigned 64-bit integer."""
    with pytest.raises(ValueError, match="seed"):
        philox(seed, (0, 0, 0, 0))


@pytest.mark.parametrize("counter", [(-1, 0, 0, 0), (0, 1 << 32, 0, 0)])
def test_counter_words_outside_32_bits_are_refused(counter: tuple[int, int, int, int]) -> None:
    """A counter word never wraps in silence."""
    with pytest.raises(ValueError, match="counter"):
        philox(1, counter)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, 2.0**-33),
        (1, 2.0**-32 + 2.0**-33),
        (1 << 31, 0.5),
        (0xFFFFFF00, 1 - 2.0**-24),
        (0xFFFFFFFF, 1 - 2.0**-24),
    ],
)
def test_uniform_known_answers(word: int, expected: float) -> None:
    """Both ends and the middle: never 0, never 1, fine near 0, float32."""
    u = reference.uniform(torch.tensor([word]))
    assert u.dtype == torch.float32
    assert float(u) == expected
    assert 0.0 < float(u) <= UNIFORM_MAX < 1.0


def test_coin_is_the_uniform_of_the_accept_stream() -> None:
    """The coin's word is word 0 of (0, position, base_len, ACCEPT)."""
    words = torch.tensor(philox(99, (0, 12, 7, Purpose.ACCEPT)))
    assert reference.coin(99, 12, 7) == float(reference.uniform(words[:1]))


def test_race_noise_of_a_token_is_keyed_by_its_id() -> None:
    """Id x uses word x & 3 of counter x >> 2, whichever other ids run."""
    ids = torch.tensor([0, 1, 2, 3, 4, 7, 40_001, 49_151])
    uniforms = reference.race_uniforms(5, ids, 31, 30, Purpose.RESIDUAL)
    for token_id, u in zip(ids.tolist(), uniforms, strict=True):
        word = philox(5, (token_id >> 2, 31, 30, Purpose.RESIDUAL))[token_id & 3]
        assert float(u) == float(reference.uniform(torch.tensor([word])))
    dense = reference.race_uniforms(5, torch.arange(49_152), 31, 30, Purpose.RESIDUAL)
    assert torch.equal(dense[ids], uniforms)


def test_race_times_are_exponential() -> None:
    """E = -log1p(-u) in float64 of the float32 uniform."""
    ids = torch.arange(64)
    times = reference.exponentials(5, ids, 3, 2, Purpose.BONUS)
    uniforms = reference.race_uniforms(5, ids, 3, 2, Purpose.BONUS)
    assert times.dtype == torch.float64
    for time, u in zip(times.tolist(), uniforms.tolist(), strict=True):
        assert time == pytest.approx(-math.log1p(-u), rel=1e-15)


def test_race_known_answers() -> None:
    """Draws that every implementation must repeat; worked out from the words by hand below."""
    weights = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.5, 3.0])
    for position in range(1, 50):
        words = [philox(42, (x >> 2, position, 9, Purpose.PROPOSE))[x & 3] for x in range(6)]
        times = {
            x: -math.log1p(-min(float(torch.tensor(w).float()) * 2.0**-32 + 2.0**-33, UNIFORM_MAX))
            / float(weights[x])
            for x, w in enumerate(words)
            if float(weights[x])
        }
        expected = min(times, key=lambda x: (times[x], x))
        assert reference.race(weights, 42, position, 9, Purpose.PROPOSE) == expected
    draws = [reference.race(weights, 42, p, 9, Purpose.PROPOSE) for p in range(1, 17)]
    assert draws == [5, 0, 3, 1, 5, 3, 1, 4, 3, 5, 1, 3, 5, 3, 3, 3]


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal finishing times: the lowest id wins, whatever order the ids are visited in."""
    monkeypatch.setattr(
        reference_races,
        "_philox_calls",
        lambda seed, word0, *key: np.full((2, word0.size), 0x40000000_40000000, np.uint64),
    )
    weights = torch.tensor([0.0, 1.0, 2.0, 2.0, 2.0])
    assert reference.race(weights, 1, 1, 1, Purpose.BONUS) == 2
    ids = torch.tensor([3, 7, 8, 11, 20])
    assert reference.race(weights, 1, 1, 1, Purpose.BONUS, ids) == 8
    assert reference.races([(weights, ids)], 1, [1], 1, Purpose.BONUS) == [8]


def test_ties_of_light_ids_go_to_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heavy id is slow and light ones finish together, found in whatever order."""

    def calls(seed: int, word0: np.ndarray, *key: object) -> np.ndarray:
        made = np.zeros((2, word0.size), np.uint64)
        made[0, 0] = 0xF0000000 << 32  # word 0 of call 0: id 0
        return made

    monkeypatch.setattr(reference_races, "_philox_calls", calls)
    for first in range(1, 9):
        weights = torch.full((101,), 2.0**-12)
        weights[0], weights[1:first] = 1.0, 2.0**-13
        assert reference.race(weights, 1, 1, 1, Purpose.BONUS) == first


def test_purposes_are_distinct_streams() -> None:
    """No two purposes share a word 3, and their uniforms are uncorrelated."""
    assert len({int(purpose) for purpose in Purpose}) == len(Purpose)
    ids = torch.arange(20_000)
    streams = torch.stack(
        [reference.race_uniforms(7, ids, 5, 4, int(purpose)).double() for purpose in Purpose]
    )
    correlation = torch.corrcoef(streams) - torch.eye(len(Purpose), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(20_000)  # five standard errors


@pytest.mark.parametrize(
    "other", [(8, 5, 4), (7, 6, 4), (7, 5, 3)], ids=["seed", "position", "base"]
)
def test_every_part_of_the_key_changes_the_noise(other: tuple[int, int, int]) -> None:
    """Seed, position and base_len each give other words."""
    ids = torch.arange(64)
    found = reference.race_uniforms(*(other[0], ids, other[1], other[2]), Purpose.PROPOSE)
    assert not bool((found == reference.race_uniforms(7, ids, 5, 4, Purpose.PROPOSE)).any())


def test_the_coupled_stream_ignores_the_round() -> None:
    """Coupled draws are keyed by position only: any round that decides it draws the same token."""
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))
    request = [reference.Draw(index, Purpose.COUPLED, weights) for index in range(4)]
    draws = {reference.philox_answer(3, 20 - index)(request[index]) for index in range(4)}
    assert len(draws) == 1
    bonus = [reference.Draw(index, Purpose.BONUS, weights) for index in range(4)]
    assert len({reference.philox_answer(3, 20 - i)(bonus[i]) for i in range(4)}) > 1


def test_coins_and_draws_are_keyed_by_position_round_and_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The production answer uses base_len + index and base_len; the coupled rule no round key."""
    keys: list[tuple[object, ...]] = []

    def record(*key: object) -> float:
        keys.append(key)
        return 0.5

    weights = torch.ones(3)
    monkeypatch.setattr(reference, "coin", record)
    monkeypatch.setattr(reference, "race", lambda weights, *key: record(*key))
    answer = reference.philox_answer(seed=9, base_len=20)
    answer(reference.Coin(2, 1.0, 1.0))
    for purpose in (Purpose.RESIDUAL, Purpose.BONUS, Purpose.COUPLED):
        answer(reference.Draw(3, purpose, weights))
    assert keys == [
        (9, 22, 20),
        (9, 23, 20, Purpose.RESIDUAL),
        (9, 23, 20, Purpose.BONUS),
        (9, 23, 0, Purpose.COUPLED),
    ]
