"""Starting a kernel while the one before it still runs (programmatic dependent launch, sm_90).

A kernel launched with `launch_pdl` may start as soon as every program of the one before has let it,
or has ended. Until `begin` returns it may read only what no kernel of the step writes: weights; or
what an ordinary launch, which starts when all before it has ended, separates from its writer:
lengths and tables of sequences, behind which the embedding is looked up. `begin` waits until the
kernel before is complete with all its writes; since that one waited in the same way before it
ended, so is everything earlier. Must not know what the kernels do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFETCH_BYTES = 16  # bulk prefetches come in multiples of it


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel start, then wait for the one before. Every program calls it."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(at, num_bytes):
    """Ask for num_bytes (a multiple of 16, or none at all) from each address, into the L2 cache."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [at, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
