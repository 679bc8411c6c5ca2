"""Query-key norm, rotation and the write to the pools in one launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference_layers as reference
from kernels.reference_layers import Rope
from kernels.rope_kv import rope_kv
from tests.kernels.accuracy import assert_as_accurate

PAGE_SIZE = 4
POISON = 77.0


def tables(rope: Rope, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    frequencies = reference.inverse_frequencies(rope, dtype)
    positions = torch.arange(64)
    return reference.rope_table(positions, frequencies, reference.rope_amplitude(rope))


def merged(device: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A merged projection [5 tokens, (heads + 2 kv_heads) * dim]."""
    generator = torch.Generator().manual_seed(heads * dim)
    return torch.randn(5, (heads + 2 * kv_heads) * dim, generator=generator).to(device, dtype)


def sliced(qkv: Tensor, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = qkv.view(5, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    return parts[0], parts[1], parts[2]


def pools(device: str, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (6, kv_heads, PAGE_SIZE, dim)
    return tuple(torch.full(shape, POISON, device=device, dtype=dtype) for _ in range(2))  # type: ignore[return-value]  # two


ROPES = {
    "half": Rope(10_000.0, 64),
    "interleaved": Rope(10_000.0, 64, interleaved=True),
    "partial": Rope(500_000.0, 24),
    "partial-interleaved": Rope(500_000.0, 24, interleaved=True),
    "llama3": Rope(500_000.0, 64, kind="llama3", factor=8.0, original_context_len=32),
    "yarn": Rope(10_000.0, 64, kind="yarn", factor=4.0, original_context_len=16),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_accurate_as_plain_torch(
    device: str, name: str, normed: bool, dtype: torch.dtype
) -> None:
    """Queries, stored keys and stored values err at most twice as much as torch, slices of one
    merged projection as inputs; slot -1 and every place not named stay untouched."""
    rope, heads, kv_heads, dim = ROPES[name], 6, 3, 64
    qkv = merged(device, heads, kv_heads, dim, dtype)
    q, k, v = sliced(qkv, heads, kv_heads, dim)
    generator = torch.Generator().manual_seed(9)
    weights = [(torch.rand(dim, generator=generator) + 0.5).to(device, dtype) for _ in range(2)]
    norm = (weights[0], weights[1], 1e-6) if normed else None
    cos, sin = (t.to(device) for t in tables(rope))
    positions = torch.tensor([3, 4, 50, 0, 63], device=device)
    slots = torch.tensor([7, 8, -1, 23, 0], device=device)
    keys, values = pools(device, kv_heads, dim, dtype)
    out = rope_kv(
        q, k, v, (cos, sin), positions, slots, (keys, values), norm=norm,
        interleaved=rope.interleaved,
    )  # fmt: skip

    def expected(x: Tensor, weight: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        if normed:
            x = reference.rmsnorm(x, weight, 1e-6)
        place = positions.to(x.device)
        return reference.rope(
            x, table[0].to(x.device)[place], table[1].to(x.device)[place],
            interleaved=rope.interleaved,
        )  # fmt: skip

    exact_table = tuple(t.double() for t in tables(rope))
    exact = [t.cpu().double() for t in (q, k, *weights)]
    assert_as_accurate(
        out,
        expected(q, weights[0], (cos, sin)),
        expected(exact[0], exact[2], exact_table),  # type: ignore[arg-type]  # two tables
    )
    named = [t for t in range(5) if slots[t] >= 0]
    places = slots[named]
    stored = keys[places // PAGE_SIZE, :, places % PAGE_SIZE]
    assert_as_accurate(
        stored, expected(k, weights[1], (cos, sin))[named],
        expected(exact[1], exact[3], exact_table)[named],  # type: ignore[arg-type]  # two tables
    )  # fmt: skip
    assert torch.equal(values[places // PAGE_SIZE, :, places % PAGE_SIZE], v[named])
    for pool in (keys, values):
        pool[places // PAGE_SIZE, :, places % PAGE_SIZE] = POISON
        assert (pool == POISON).all()


def test_a_tokens_bits_ignore_the_others(device: str) -> None:
    """A token alone gives the bits it has in a batch; heads that do not fill a block included."""
    heads, kv_heads, dim = 5, 1, 96
    rope = Rope(10_000.0, 96)
    q, k, v = sliced(merged(device, heads, kv_heads, dim, torch.float16), heads, kv_heads, dim)
    cos, sin = (t.to(device) for t in tables(rope))
    positions, slots = torch.arange(5, device=device), torch.arange(5, device=device) + 2
    batch_pools = pools(device, kv_heads, dim, torch.float16)
    batch = rope_kv(q, k, v, (cos, sin), positions, slots, batch_pools)
    for token in range(5):
        own_pools = pools(device, kv_heads, dim, torch.float16)
        one = slice(token, token + 1)
        alone = rope_kv(q[one], k[one], v[one], (cos, sin), positions[one], slots[one], own_pools)
        assert torch.equal(alone[0], batch[token])
        page, offset = divmod(token + 2, PAGE_SIZE)
        for own, shared in zip(own_pools, batch_pools, strict=True):
            assert torch.equal(own[page, :, offset], shared[page, :, offset])


def test_wrong_shapes_are_refused(device: str) -> None:
    """Tables wider than a head and pools of other heads raise ValueError."""
    q, k, v = sliced(merged(device, 2, 1, 64, torch.float32), 2, 1, 64)
    cos, sin = (t.to(device) for t in tables(Rope(10_000.0, 64)))
    one = torch.zeros(5, dtype=torch.int64, device=device)
    good = pools(device, 1, 64, torch.float32)
    with pytest.raises(ValueError, match="tables"):
        rope_kv(q[..., :32], k[..., :32], v[..., :32], (cos, sin), one, one, good)
    with pytest.raises(ValueError, match="pools"):
        rope_kv(q, k, v, (cos, sin), one, one, pools(device, 2, 64, torch.float32))


def test_op_describes_itself_to_the_compiler(device: str) -> None:
    """Schema (both pools are written) and fake of specmesh::rope_kv agree with what it does."""
    q, k, v = sliced(merged(device, 2, 1, 64, torch.float32), 2, 1, 64)
    cos, sin = (t.to(device) for t in tables(Rope(10_000.0, 64)))
    places = torch.arange(5, device=device)
    keys, values = pools(device, 1, 64, torch.float32)
    arguments = (q, k, v, cos, sin, places, places, keys, values, None, None, 0.0, False)
    torch.library.opcheck(
        torch.ops.specmesh.rope_kv.default, arguments,
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
