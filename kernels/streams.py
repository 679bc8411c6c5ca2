"""Random streams: the purposes, the counter layout and a scalar Philox 4x32-10.

Pure Python integers, so that code without torch can name a stream. The vectorised twin lives in
`kernels/reference.py`, the Triton twin in `kernels/philox.py`; tests hold all three to the same
known-answer vectors. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.

Counter layout of one call (four 32-bit words), key = the request's 64-bit seed:

    word 0   token id >> 2 (one call serves four ids), or 0 for coins
    word 1   absolute position: the index in the sequence of the token being decided
    word 2   the round's base_len; 0 under the coupled rule
    word 3   purpose
"""

from __future__ import annotations

from enum import IntEnum

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10
WORD_MASK = 0xFFFFFFFF

# u = min(float32(r) * UNIFORM_SCALE + UNIFORM_SHIFT, UNIFORM_MAX), all in float32.
UNIFORM_SCALE = 2.0**-32
UNIFORM_SHIFT = 2.0**-33
UNIFORM_MAX = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """What a stream is for. No stream serves two purposes."""

    PROPOSE = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    COUPLED = 5
    SAMPLE_SEED = 6


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of Philox 4x32-10 for a 64-bit key and a 128-bit counter.

    Raises ValueError when the seed or a counter word is out of range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed {seed} is not an unsigned 64-bit integer")
    if any(not 0 <= word <= WORD_MASK for word in counter):
        raise ValueError(f"counter {counter} has a word outside 32 bits")
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD_MASK, seed >> 32
    for _ in range(NUM_ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & WORD_MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & WORD_MASK,
        )
        k0, k1 = (k0 + WEYL_0) & WORD_MASK, (k1 + WEYL_1) & WORD_MASK
    return c0, c1, c2, c3
