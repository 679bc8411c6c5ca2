"""What a window of steady load says: milliseconds per token, latencies, acceptance.

Pure arithmetic over what clients observed. Long-run cost is summed time over summed tokens, never a
mean of ratios (THEORY.md section 7). First token and later tokens are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specmesh.bench.measure import Series
from specmesh.bench.steady_load import Observed, messages_in
from specmesh.planning import expected_tokens

NUM_SLICES = 10  # of a window: what p20 and p80 of a rate are taken over


@dataclass(frozen=True, slots=True)
class Measured:
    """One number with what it varied by: quantiles over slices, requests or rounds."""

    value: float
    unit: str
    p20: float
    p80: float

    def over(self, other: Measured) -> Measured:
        """self.value / other.value with the quantiles of self alone; unit 1."""
        scale = 1 / other.value
        return Measured(self.value * scale, "1", self.p20 * scale, self.p80 * scale)

    def under(self, other: Measured) -> Measured:
        """other.value / self.value: the speed-up where both are times; unit 1."""
        return Measured(
            other.value / self.value, "1", other.value / self.p80, other.value / self.p20
        )


def of_values(values: Sequence[float], unit: str, share: float = 0.5) -> Measured | None:
    """The quantile `share` of values, beside their p20 and p80; None without values."""
    if not values:
        return None
    found = Series("", unit, tuple(values))
    return Measured(found.quantile(share), unit, found.quantile(0.2), found.quantile(0.8))


def ms_per_token(observed: Observed) -> Measured | None:
    """Summed time between messages over summed tokens of a stream; first messages apart."""
    waits, tokens = [0.0] * NUM_SLICES, [0] * NUM_SLICES
    for _, before_s, now_s, count in messages_in(observed):
        index = _slice(observed, now_s)
        waits[index] += now_s - before_s
        tokens[index] += count
    if not sum(tokens):
        return None
    per_slice = [1000 * w / t for w, t in zip(waits, tokens, strict=True) if t]
    spread = Series("", "ms", tuple(per_slice))
    value = 1000 * sum(waits) / sum(tokens)
    return Measured(value, "ms", spread.quantile(0.2), spread.quantile(0.8))


def tokens_per_s(observed: Observed) -> Measured:
    """All tokens that arrived in the window, first ones too, over its length."""
    counts = [0] * NUM_SLICES
    for stream in observed.streams:
        for now_s, tokens in stream.messages:
            if observed.begins_s <= now_s < observed.ends_s:
                counts[_slice(observed, now_s)] += tokens
    length_s = observed.ends_s - observed.begins_s
    spread = Series("", "", tuple(count * NUM_SLICES / length_s for count in counts))
    value = sum(counts) / length_s
    return Measured(value, "{token}/s", spread.quantile(0.2), spread.quantile(0.8))


def _slice(observed: Observed, now_s: float) -> int:
    share = (now_s - observed.begins_s) / (observed.ends_s - observed.begins_s)
    return min(NUM_SLICES - 1, int(share * NUM_SLICES))


def first_token_ms(observed: Observed) -> list[float]:
    """Sending to first token, of requests sent in the window."""
    return [
        1000 * (stream.messages[0][0] - stream.sent_s)
        for stream in observed.streams
        if stream.messages and stream.sent_s >= observed.begins_s
    ]


def message_gaps_ms(observed: Observed) -> list[float]:
    """Time between two messages of a stream: what a reader waits for the next piece."""
    return [1000 * (now_s - before_s) for _, before_s, now_s, _ in messages_in(observed)]


def token_gaps_ms(observed: Observed) -> list[float]:
    """Time per token, once a token: the wait for its message over the tokens that came with it."""
    gaps: list[float] = []
    for _, before_s, now_s, tokens in messages_in(observed):
        gaps += [1000 * (now_s - before_s) / tokens] * tokens
    return gaps


@dataclass(frozen=True, slots=True)
class Speculation:
    """Candidates of the requests that finished in the window.

    judged, accepted: per position in the block. fallbacks: rounds without candidates, by reason.
    """

    num_rounds: int
    num_draft_tokens: int
    num_accepted: int
    judged: tuple[int, ...]
    accepted: tuple[int, ...]
    fallbacks: dict[str, int]

    @property
    def rates(self) -> list[float]:
        """Acceptance of each candidate given that all before it were accepted."""
        return [a / j if j else 0.0 for j, a in zip(self.judged, self.accepted, strict=True)]

    @property
    def predicted_tokens(self) -> float:
        """E[N] of a round with candidates, from the rates."""
        return expected_tokens(self.rates)

    @property
    def tokens_per_drafted_round(self) -> float:
        """Accepted candidates and one more, per round with candidates; 0 where there was none."""
        drafted = self.judged[0] if self.judged else 0
        return 1 + self.num_accepted / drafted if drafted else 0.0


def speculation(observed: Observed) -> Speculation:
    """Sum the coordinator's counts of the requests that finished in the window."""
    rounds = drafted = kept = 0
    judged: list[int] = []
    accepted: list[int] = []
    fallbacks: dict[str, int] = {}
    for stream in observed.streams:
        stats = stream.speculation()
        if stats is None or stream.finished_s is None or stream.finished_s < observed.begins_s:
            continue
        rounds += stats.num_rounds
        drafted += stats.num_draft_tokens
        kept += stats.num_accepted
        _add(judged, stats.judged_per_position)
        _add(accepted, stats.accepted_per_position)
        for reason, count in stats.fallback_rounds.items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
    accepted += [0] * (len(judged) - len(accepted))
    return Speculation(rounds, drafted, kept, tuple(judged), tuple(accepted), fallbacks)


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for index, count in enumerate(counts):
        totals[index] += count
