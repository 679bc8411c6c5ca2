"""Seeds and streams of a request: pure integers, no torch, no global state.

The streams themselves are defined in `kernels/streams.py` (Philox 4x32-10, DESIGN section 3). This
module adds what the coordinator needs: the seed of sample i of n, and the mapping from a protocol
step to a purpose. The caller passes entropy in; nothing here reads a clock or a generator.
"""

from __future__ import annotations

from kernels.streams import Purpose, philox

__all__ = ["Purpose", "philox", "sample_seed"]


def sample_seed(seed: int, sample_index: int) -> int:
    """The 64-bit seed of sample `sample_index`: the request's own for 0, Philox(seed, i) otherwise.

    Raises ValueError when seed is not an unsigned 64-bit integer or the index is negative.
    """
    if sample_index == 0:
        philox(seed, (0, 0, 0, 0))  # range check
        return seed
    low, high, _, _ = philox(seed, (sample_index, 0, 0, Purpose.SAMPLE_SEED))
    return high << 32 | low
