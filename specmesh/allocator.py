"""Memory habits of a long-lived process: the C allocator and the garbage collector, set once.

By default glibc maps every block above 128 KiB afresh and gives it back when freed, so each row
over a vocabulary (200 kB and more) pays a page fault per 4 KiB. On a virtual machine that costs
more than the arithmetic: a race over 49,152 weights takes 0.6 ms instead of 1.7. Source:
mallopt(3).
"""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest value glibc takes (DEFAULT_MMAP_THRESHOLD_MAX on 64-bit).
MAX_KEPT_BLOCK_BYTES = 32 << 20
MAX_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Let freed blocks of up to 32 MiB be used again instead of going back to the kernel.

    Process-wide; call it before large arrays are made. At most MAX_KEPT_BYTES stay idle at the
    heap's top. Returns whether the allocator took it: other C libraries than glibc do not.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, MAX_KEPT_BLOCK_BYTES)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, MAX_KEPT_BYTES))


def keep_started_objects() -> None:
    """Take what a process has loaded by now out of every later garbage collection.

    Modules and models are hundreds of thousands of objects that live to the end; a full collection
    that walks them stops all threads for tens of milliseconds, in the middle of a round.
    """
    gc.collect()
    gc.freeze()
