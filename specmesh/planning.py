"""When speculation, a faster operator or one more compiled shape pays: closed forms, no clock.

Owns the arithmetic behind `specmesh plan` and the coordinator's policy. Every function is pure,
takes times in one unit of the caller's choice unless its name says otherwise, and is exact for
exact number types. Knows no models, devices or measurements: the caller brings the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# ---------------------------------------------------------------- cost of a piece of work


def roofline_time_s(
    flops: float, num_bytes: float, flops_per_s: float, bytes_per_s: float
) -> float:
    """Lower bound max(F/R, Q/b) in seconds: launch, scheduling and synchronisation come on top."""
    _require(flops_per_s > 0 and bytes_per_s > 0, "rates must be positive")
    return max(flops / flops_per_s, num_bytes / bytes_per_s)


def amdahl(fraction: float, speedup: float) -> float:
    """Overall speed-up 1 / ((1 - f) + f/s) when a fraction f of the time runs s times faster.

    speedup may be infinite: the limit 1 / (1 - f).
    """
    _require(0 <= fraction <= 1 and speedup > 0, "need 0 <= fraction <= 1 and speedup > 0")
    remaining = (1 - fraction) + (0 if speedup == math.inf else fraction / speedup)
    return math.inf if remaining == 0 else 1 / remaining


def long_run_cost(times: Iterable[float], tokens: Iterable[int]) -> float:
    """Time per token over many rounds: summed time over summed tokens, never a mean of ratios."""
    num_tokens = sum(tokens)
    _require(num_tokens > 0, "no tokens, no cost per token")
    return sum(times) / num_tokens


# ---------------------------------------------------------------- speculation


def expected_tokens(rates: Sequence[float], max_tokens: int | None = None) -> float:
    """E[N] of a round: 1 + a_1 + a_1 a_2 + ..., a_i the acceptance rate of candidate i given that
    all before it were accepted (Leviathan et al. 2211.17192, section 3.1, with rates per position).

    rates: one per candidate, each in [0, 1]. max_tokens: a budget that truncates the sum: E[min(N,
    max_tokens)]. A pooled mean raised to powers is another number.
    """
    _require(all(0 <= rate <= 1 for rate in rates), "rates must be in [0, 1]")
    _require(max_tokens is None or max_tokens >= 1, "max_tokens must be at least 1")
    survival: float = 1
    tokens: float = 1
    for rate in rates[: len(rates) if max_tokens is None else max_tokens - 1]:
        survival *= rate
        tokens += survival
    return tokens


def expected_tokens_at(rate: float, num_draft_tokens: int) -> float:
    """E[N] with one conditional rate for every candidate: (1 - a^(k+1)) / (1 - a), k+1 at a = 1."""
    _require(0 <= rate <= 1 and num_draft_tokens >= 0, "need a rate in [0, 1] and k >= 0")
    if rate == 1:
        return num_draft_tokens + 1
    return (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Measured times of a round, one unit for all.

    decode: one plain step of the target. draft: one step of the draft. verify: the target's pass
    over k+1 tokens. overhead: everything else (network, decision, management).
    """

    decode: float
    draft: float
    verify: float
    overhead: float = 0


def speculative_speedup(tokens: float, num_draft_tokens: int, times: RoundTimes) -> float:
    """Speed-up over plain decoding, c_t E[N] / (k c_d + c_v + c_m). Below 1 speculation loses."""
    _require(0 < times.decode < math.inf, "a plain step takes time")
    round_time = num_draft_tokens * times.draft + times.verify + times.overhead
    _require(0 < round_time < math.inf, "a round takes time")
    return times.decode * tokens / round_time


# ---------------------------------------------------------------- shape specialisation


def break_even_calls(compile_cost: float, time_before: float, time_after: float) -> float:
    """Calls n at which a compilation has paid for itself: it pays iff there are more of them.

    Infinite when the compiled program is not faster.
    """
    saving = time_before - time_after
    return compile_cost / saving if saving > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Bucket:
    """One compiled shape: cost to make it, calls it will serve, time each call saves."""

    compile_cost: float
    num_calls: int
    saving: float

    @property
    def net(self) -> float:
        """What the bucket earns: saved time less compilation. Below 0 it is left out."""
        return self.num_calls * self.saving - self.compile_cost


def worthwhile(buckets: Sequence[Bucket]) -> list[int]:
    """Indices of the buckets that earn more than they cost. Ask again when call counts change."""
    return [index for index, bucket in enumerate(buckets) if bucket.net > 0]


@dataclass(frozen=True, slots=True)
class PaddingWaste:
    """Expected waste a call from padding a length T up to its bucket b(T).

    positions: E[b(T) - T]. pairs: E[b(T)^2 - T^2], what dense attention computes in vain.
    """

    positions: float
    pairs: float


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`. Raises ValueError when none does."""
    fitting = [bucket for bucket in buckets if bucket >= length]
    _require(bool(fitting), f"no bucket of {list(buckets)} holds {length}")
    return min(fitting)


def padding_waste(calls: Mapping[int, int], buckets: Sequence[int]) -> PaddingWaste:
    """Mean waste over a histogram of lengths {length: number of calls}.

    Raises ValueError when there are no calls, or a length that no bucket holds.
    """
    num_calls = sum(calls.values())
    _require(num_calls > 0, "no calls, no waste")
    positions = pairs = 0
    for length, count in calls.items():
        bucket = bucket_of(length, buckets)
        positions += count * (bucket - length)
        pairs += count * (bucket**2 - length**2)
    return PaddingWaste(positions / num_calls, pairs / num_calls)


def plan_buckets(
    calls: Mapping[int, int],
    compile_cost: float,
    position_cost: float,
    max_buckets: int,
    pair_cost: float = 0,
) -> tuple[int, ...]:
    """The bucket sizes that minimise compilation plus padding over a histogram of lengths.

    Cost = compile_cost per bucket, position_cost per wasted position and pair_cost per wasted pair
    of positions, over all calls. At most max_buckets (each holds memory), ascending, the last one
    the longest length. Only lengths that occur can be optimal. Dynamic programming over sorted
    lengths, O(max_buckets * lengths^2).
    """
    _require(max_buckets >= 1 and bool(calls), "need calls and room for one bucket")
    lengths = sorted(calls)

    def waste(first: int, last: int) -> float:
        """Cost of padding lengths[first..last] to lengths[last]."""
        top = lengths[last]
        return sum(
            calls[low] * (position_cost * (top - low) + pair_cost * (top**2 - low**2))
            for low in lengths[first : last + 1]
        )

    # best[n]: cheapest (cost, sizes) that covers the first n lengths with the buckets spent so far.
    best: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(math.inf, ())] * len(lengths)
    plans = []
    for _ in range(min(max_buckets, len(lengths))):
        extended: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for last, length in enumerate(lengths):
            cost, first = min(
                (best[first][0] + compile_cost + waste(first, last), first)
                for first in range(last + 1)
            )
            extended.append((cost, (*best[first][1], length)))
        best = extended
        plans.append(best[-1])
    return min(plans)[1]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
