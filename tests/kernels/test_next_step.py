"""The next decode step on the device is the reference's, and padding stays padding."""

import pytest
import torch

from kernels.next_step import next_step
from kernels.reference_steps import next_step as reference

PAGE = 16


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 64])
def test_steps_equal_the_reference(num_seqs: int, device: str) -> None:
    """Chained over three steps, padding and ended sessions among them."""
    generator = torch.Generator().manual_seed(num_seqs)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).int()

    lengths = integers(0, 4 * PAGE - 4, num_seqs)
    lengths[0] = PAGE  # the new token opens a page
    left = integers(0, 4, num_seqs)
    left[0] = 3
    tables = torch.stack([torch.randperm(99, generator=generator)[:4] for _ in range(num_seqs)])
    tables = tables.int().to(device)
    state = left.to(device), lengths.to(device)
    step = tuple(torch.full((num_seqs,), 77, dtype=torch.int32, device=device) for _ in range(3))
    for _ in range(3):
        tokens = integers(-1, 50, num_seqs, 2).to(device)[:, 1]  # strided, some not drawn
        tokens[0] = 9
        expected = reference(tokens, *state, tables, PAGE)
        next_step(tokens, *state, tables, step, PAGE)
        for got, wanted in zip((*state, *step), expected, strict=True):
            assert torch.equal(got, wanted)
    assert state[1][0] == PAGE + 2  # three steps in all, two of them fed after the first


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Each argument is one entry a session."""
    one, two = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="one entry a session"):
        next_step(one, two, one, one[:, None], (one, one, one), PAGE)
    with pytest.raises(ValueError, match="block tables"):
        next_step(one, one, one, two[:, None], (one, one, one), PAGE)
