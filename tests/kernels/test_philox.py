"""Random streams in Triton: the words, uniforms and race times of the reference."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.philox import exponential, token_streams, uniform
from kernels.streams import Purpose, philox


@triton.jit
def _map_kernel(words, uniforms, times, num, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    inside = places < num
    u = uniform(tl.load(words + places, inside, other=0).to(tl.uint32))
    tl.store(uniforms + places, u, inside)
    tl.store(times + places, exponential(u), inside)


def mapped(words: Tensor) -> tuple[Tensor, Tensor]:
    uniforms = torch.empty(words.numel(), device=words.device)
    times = torch.empty_like(uniforms)
    size = triton.next_power_of_2(words.numel())
    _map_kernel[(1,)](words, uniforms, times, words.numel(), SIZE=size)
    return uniforms, times


def test_known_answer_of_philox(device: str) -> None:
    """Triton's words for key 0 and counter 0 are those published with Philox 4x32-10."""
    words, _, _ = token_streams(0, 0, 4, (0, 0, 0), device)
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    ("seed", "first_id", "num_ids", "position", "round_key"),
    [
        (0, 0, 1023, 0, 0),
        (2**64 - 1, 4, 515, 2**32 - 1, 77),
        (0x0123456789ABCDEF, 128_000, 256, 8191, 8000),
        (1 << 63, 2**31 - 1024, 1020, 2**31, 2**31 - 1),
    ],
)
def test_streams_equal_the_reference_bit_for_bit(
    device: str, seed: int, first_id: int, num_ids: int, position: int, round_key: int
) -> None:
    """Reference, scalar and Triton consume the same words and make the same uniforms."""
    for purpose in Purpose:
        counter = (position, round_key, int(purpose))
        words, uniforms, times = token_streams(seed, first_id, num_ids, counter, device)
        ids = torch.arange(first_id, first_id + num_ids)
        expected = reference.philox_words(seed, ids >> 2, *counter)
        expected = expected.gather(1, (ids & 3)[:, None])[:, 0]
        assert torch.equal(words.cpu(), expected)
        assert torch.equal(uniforms.cpu(), reference.uniform(expected))
        assert words[-1] == philox(seed, (int(ids[-1]) >> 2, *counter))[int(ids[-1]) & 3]
        exact = reference.exponentials(seed, ids, *counter)
        torch.testing.assert_close(times.cpu().to(torch.float64), exact, rtol=4e-7, atol=0)


def test_uniforms_stay_inside_the_open_interval(device: str) -> None:
    """The smallest and largest words give u above 0 and below 1, and finite positive times."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1], device=device)
    uniforms, times = mapped(words)
    assert uniforms[0] == 2.0**-33
    assert uniforms[-1] == 1.0 - 2.0**-24
    assert bool(((uniforms > 0) & (uniforms < 1)).all())
    assert bool((times > 0).all())
    assert bool(times.isfinite().all())


def test_race_times_keep_their_digits_at_both_ends(device: str) -> None:
    """E = -log1p(-u) holds to 4e-7 relative where 1 - u rounds to 1 and where u nears 1."""
    small = torch.arange(0, 400) ** 3
    large = 2**32 - 1 - torch.arange(0, 400) ** 3
    middle = torch.arange(2**31 - 200 * 4096, 2**31 + 200 * 4096, 4096)
    words = torch.cat((small, middle, large)).to(device)
    uniforms, times = mapped(words)
    exact = -torch.log1p(-uniforms.cpu().to(torch.float64))
    torch.testing.assert_close(times.cpu().to(torch.float64), exact, rtol=4e-7, atol=0)
