"""The target's check of received rows: draw every candidate again from the row it came with.

A draft that samples from something other than what it sends is found here (DESIGN section 5).
`specmesh::redraw`, one launch: a program a candidate races its sparse row with PROPOSE noise at
position base_len + i, as `draft_rows` does; the program that ends a session last reduces. The
specification is `reference_rows.is_redrawn`. Must not know the target's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.accept import RESIDUAL
from kernels.configs.sampling import draft_launch
from kernels.draw import PROPOSE_STREAM
from kernels.philox import exponential, uniform_at
from kernels.reference_rows import NEAR_TIE

TIE = tl.constexpr(NEAR_TIE)


@triton.jit
def _redraw_kernel(
    ids, weights, candidates, num_candidates, seeds, base_lens, rules, agreements, arrivals,
    mismatches, judged, stride_ib, stride_ik, stride_ii, stride_wb, stride_wk, stride_wi,
    num_sparse, vocab_size,
    BUCKET: tl.constexpr, BUCKET_PAD: tl.constexpr, SPARSE_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (sessions x candidates), one program a session where the bucket is empty."""
    session = tl.program_id(0) // max(BUCKET, 1)
    index = tl.program_id(0) % max(BUCKET, 1)
    num = tl.load(num_candidates + session)
    checked = tl.load(rules + session) == RESIDUAL
    if (num <= 0) | ~checked:
        if index == 0:
            tl.store(mismatches + session, -1)
            tl.store(judged + session, num)
        return
    agrees = tl.full([], 1, tl.int32)
    if index < num:
        places = tl.arange(0, SPARSE_PAD)
        inside = places < num_sparse
        row_ids = ids + session.to(tl.int64) * stride_ib + index.to(tl.int64) * stride_ik
        row = weights + session.to(tl.int64) * stride_wb + index.to(tl.int64) * stride_wk
        token = tl.load(row_ids + places * stride_ii, inside, other=-1).to(tl.int32)
        weight = tl.load(row + places * stride_wi, inside, other=0.0).to(tl.float32)
        known = inside & (token >= 0)
        candidate = tl.load(candidates + session * BUCKET + index).to(tl.int32)
        weight = tl.where(known, weight, 0.0)
        sound = (weight >= 0.0) & (weight < float("inf")) & (token < vocab_size)
        position, base_len = tl.load(base_lens + session) + index, tl.load(base_lens + session)
        u = uniform_at(tl.load(seeds + session), token, position, base_len, PROPOSE_STREAM)
        runs = known & (weight > 0.0)
        rates = tl.where(runs, tl.div_rn(weight, exponential(u)), 0.0)
        best = tl.max(rates, 0).to(tl.float64)
        own = tl.max(tl.where(runs & (token == candidate), rates, 0.0), 0).to(tl.float64)
        # Times are 1 / rate: slowest - fastest < TIE * slowest. The winner itself always is.
        agrees = ((own > 0) & (best - own < TIE * best)).to(tl.int32)
        agrees = agrees & tl.min(sound.to(tl.int32), 0)
    tl.store(agreements + session * BUCKET + index, agrees)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + session, 1, sem="acq_rel") != BUCKET - 1:
        return
    tl.store(arrivals + session, 0)
    rows = tl.arange(0, BUCKET_PAD)
    agreed = tl.load(
        agreements + session * BUCKET + rows, rows < BUCKET, other=1, cache_modifier=".cg"
    )
    first = tl.min(tl.where((agreed == 0) & (rows < num), rows, BUCKET_PAD), 0)
    tl.store(mismatches + session, tl.where(first < BUCKET_PAD, first, -1))
    tl.store(judged + session, tl.where(first < BUCKET_PAD, 0, num))


def _launch_redraw(
    ids: Tensor, weights: Tensor, candidates: Tensor, num_candidates: Tensor, seeds: Tensor,
    base_lens: Tensor, rules: Tensor, vocab_size: int, scratch: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, bucket = candidates.shape
    outputs = _outputs(num_candidates)
    num_sparse = ids.shape[-1]
    _redraw_kernel[(batch * max(bucket, 1),)](
        ids, weights, candidates, num_candidates, seeds, base_lens, rules,
        torch.empty(batch, bucket, dtype=torch.int32, device=ids.device), scratch, *outputs,
        *ids.stride(), *weights.stride(), num_sparse, vocab_size,
        BUCKET=bucket, BUCKET_PAD=max(2, triton.next_power_of_2(bucket)),
        SPARSE_PAD=max(32, triton.next_power_of_2(num_sparse)),
        num_warps=draft_launch(ids.device).num_warps,
    )  # fmt: skip
    return outputs


def _outputs(num_candidates: Tensor) -> tuple[Tensor, Tensor]:
    return num_candidates.new_empty(num_candidates.shape), torch.empty_like(num_candidates)


_redraw = torch.library.custom_op("specmesh::redraw", _launch_redraw, mutates_args=("scratch",))


@_redraw.register_fake
def _redraw_fake(
    _ids, _weights, _candidates, num_candidates, *_others
) -> tuple[Tensor, Tensor]:  # mirrors _launch_redraw
    return _outputs(num_candidates)


def redraw(
    ids: Tensor,
    weights: Tensor,
    candidates: Tensor,
    num_candidates: Tensor,
    seeds: Tensor,
    base_lens: Tensor,
    rules: Tensor,
    vocab_size: int,
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """Check that received sparse rows and PROPOSE noise give their candidates, in one launch.

    ids int32 and weights float [batch, bucket, n], any strides: ascending, padding -1 last.
    candidates int [batch, bucket]; num_candidates, base_lens, rules int32 [batch] (-1 marks an
    unused slot); seeds int64 [batch]. scratch: from `sampling.workspace`.

    Returns (mismatches, num_judged), int32 [batch]. mismatches: the first candidate that is neither
    what its row gives nor within a near-tie of it (`reference_rows.NEAR_TIE`), or that has no
    weight there, or whose row holds an id >= vocab_size or a weight that is negative, infinite or
    NaN; -1 if all agree. num_judged: num_candidates, or 0 where there is a mismatch: such a round
    is decided as if nothing had been proposed. Only residual sessions are checked. Raises
    ValueError on shapes that do not fit.
    """
    if ids.shape != weights.shape or ids.shape[:2] != candidates.shape:
        raise ValueError(
            f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} do not fit candidates "
            f"{tuple(candidates.shape)}"
        )
    if scratch.shape[0] < candidates.shape[0]:
        raise ValueError(
            f"scratch holds {scratch.shape[0]} sessions, the round has {candidates.shape[0]}"
        )
    mismatches, num_judged = torch.ops.specmesh.redraw(
        ids, weights, candidates, num_candidates, seeds, base_lens, rules, vocab_size, scratch
    )
    return mismatches, num_judged
