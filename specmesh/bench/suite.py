"""What `specmesh bench` compares, and in which order.

Every comparison is made within one run: the baseline and the stack take turns on the same machine,
so that drift hits both. First requests (warm-up), first tokens, later tokens and queueing are
measurements of their own. Owns prompts, options and bounds; knows no flags and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmesh.bench.load import Timed, all_at_once, one_after_another
from specmesh.bench.measure import Ratio, Series, series
from specmesh.bench.reference_model import ReferenceModel
from specmesh.bench.rounds import RoundTimes, complete_trace, round_times
from specmesh.client import GenerateOptions
from specmesh.planning import expected_tokens
from specmesh.randomness import philox

# Ordinary questions; answers are as long as asked for, since the end of sequence is ignored.
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What should I consider before adopting a dog?",
    "How does a bicycle stay upright?",
    "Give me a plan for learning to cook in a month.",
    "Describe how bread is made.",
    "What were the causes of the fall of Rome?",
    "Write an email asking a colleague for help with a report.",
)
FIRST_TOKEN_PROMPT_LEN = 100
CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    repeats: int = 5
    num_tokens: int = 96
    num_draft_tokens: int = 4
    concurrency: int = CONCURRENCY


@dataclass(frozen=True, slots=True)
class PositionRate:
    """Acceptance of candidate `position` (from 1), given that all before it were accepted."""

    position: int
    judged: int
    accepted: int

    @property
    def rate(self) -> float:
        """Accepted over judged; 0 where nothing was judged."""
        return self.accepted / self.judged if self.judged else 0.0


@dataclass(slots=True)
class Results:
    """Everything one run measured."""

    series: list[Series] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    positions: list[PositionRate] = field(default_factory=list)
    predicted_tokens: float = 0.0
    measured_tokens: float = 0.0
    dropped_rounds: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, unit: str, values: Sequence[float]) -> Series:
        """Keep a series and return it."""
        made = series(name, unit, values)
        self.series.append(made)
        return made


Report = Callable[[str], Any]


class Suite:
    """One run against a started stack."""

    def __init__(
        self, address: str, trace_dir: Path, reference: ReferenceModel, plan: Plan, report: Report
    ) -> None:
        """`report` is called with what is being measured, before it is."""
        self._address = address
        self._trace_dir = trace_dir
        self._reference = reference
        self._plan = plan
        self._report = report
        self._results = Results()
        self._prompts = [reference.prompt_ids(question) for question in QUESTIONS]
        self._next_fresh = 0

    def run(self, start_s: float, warm_up_s: Mapping[str, float]) -> Results:
        """Measure everything.

        `start_s`: seconds from starting the services to all being ready; `warm_up_s`: of that,
        first passes and compilation, by service.
        """
        started = self._results.add("start of the services, cached weights", "s", [start_s])
        for service, seconds in warm_up_s.items():
            self._results.add(f"warm-up of the {service}", "s", [seconds])
        self._results.ratios.append(Ratio("start-up time", started, None, "at most", 30.0))
        self._first_requests()
        self._plain_decoding()
        self._speculative_decoding()
        self._first_token()
        self._concurrency()
        return self._results

    def _options(self, k: int | None, num_tokens: int | None = None, **more: Any) -> Any:
        return GenerateOptions(
            max_tokens=num_tokens or self._plan.num_tokens,
            ignore_eos=True,
            num_draft_tokens=k,
            **{"temperature": 0.0, **more},
        )

    def _fresh_prompt(self, length: int) -> list[int]:
        """Ids that no request of this run has sent: nothing of it is in any prefix cache."""
        ids: list[int] = []
        counter = 0
        while len(ids) < length:
            words = philox(20260101, (self._next_fresh, counter, 0, 0))
            ids += [word % self._reference.vocab_size for word in words]
            counter += 1
        self._next_fresh += 1
        return ids[:length]

    def _one(self, prompt: Sequence[int], options: GenerateOptions) -> Timed:
        return one_after_another(self._address, [prompt], options)[0]

    def _first_requests(self) -> None:
        self._report("first requests after the start")
        prompt = self._fresh_prompt(FIRST_TOKEN_PROMPT_LEN)
        first = self._one(prompt, self._options(self._plan.num_draft_tokens, 8))
        self._results.add("first request ever: first token", "ms", [first.first_token_s * 1000])
        self._one(self._prompts[0], self._options(0, 8))
        self._reference.generate(self._prompts[0], 8)

    def _plain_decoding(self) -> None:
        num_tokens = self._plan.num_tokens
        stack: list[Timed] = []
        baseline: list[float] = []
        for repeat in range(self._plan.repeats):
            self._report(f"plain decoding and transformers, {repeat + 1}/{self._plan.repeats}")
            prompt = self._prompts[repeat % len(self._prompts)]
            seconds, _ = self._reference.generate(prompt, num_tokens)
            baseline.append(num_tokens / seconds)
            stack.append(self._one(prompt, self._options(0)))
        add = self._results.add
        whole = add("plain decoding", "{token}/s", [t.num_tokens / t.total_s for t in stack])
        theirs = add("transformers generate", "{token}/s", baseline)
        add("plain decoding, later tokens", "{token}/s", [t.later_tokens_per_s for t in stack])
        self._results.ratios.append(
            Ratio("plain decoding / transformers generate", whole, theirs, "at least", 1.0)
        )

    def _speculative_decoding(self) -> None:
        k = self._plan.num_draft_tokens
        greedy, sampled = [], []
        for repeat in range(self._plan.repeats):
            self._report(f"speculative decoding, k = {k}, {repeat + 1}/{self._plan.repeats}")
            prompt = self._prompts[repeat % len(self._prompts)]
            greedy.append(self._one(prompt, self._options(k)))
            options = self._options(k, temperature=1.0, seed=repeat, rule="residual")
            sampled.append(self._one(prompt, options))
        add = self._results.add
        for name, timed in (("greedy", greedy), ("temperature 1", sampled)):
            speeds = [t.num_tokens / t.total_s for t in timed]
            add(f"speculative k={k}, {name}", "{token}/s", speeds)
            later = [t.later_tokens_per_s for t in timed]
            add(f"speculative k={k}, {name}, later tokens", "{token}/s", later)
        self._acceptance(sampled)
        rounds = [r for r in self._traced(sampled) if r.has_draft and not r.is_prefill]
        self._round_series(rounds)

    def _acceptance(self, timed: Sequence[Timed]) -> None:
        """Per-position rates, and E[N] from them beside the tokens per full round that came."""
        stats = [t.finished.speculation for t in timed]
        depth = max((len(s.judged_per_position) for s in stats), default=0)

        def total(name: str, position: int) -> int:
            return sum(
                getattr(s, name)[position] for s in stats if position < len(getattr(s, name))
            )

        results = self._results
        results.positions = [
            PositionRate(i + 1, total("judged_per_position", i), total("accepted_per_position", i))
            for i in range(depth)
        ]
        results.predicted_tokens = expected_tokens([p.rate for p in results.positions])
        for s in stats:
            for reason, count in s.fallback_rounds.items():
                results.dropped_rounds[reason] = results.dropped_rounds.get(reason, 0) + count
        # A round gives its accepted candidates and one more token.
        with_candidates = total("judged_per_position", 0) if depth else 0
        accepted = sum(s.num_accepted for s in stats)
        results.measured_tokens = 1 + accepted / with_candidates if with_candidates else 0.0

    def _traced(self, timed: Sequence[Timed]) -> list[RoundTimes]:
        self._report("reading traces")
        return round_times([complete_trace(self._trace_dir, t.trace_id) for t in timed])

    def _round_series(self, rounds: Sequence[RoundTimes]) -> None:
        add = self._results.add
        add("round, whole", "ms", [r.total for r in rounds])
        add("round, draft forward passes", "ms", [r.draft_forward for r in rounds])
        add("round, target forward pass", "ms", [r.target_forward for r in rounds])
        add("round, wire and coordinator", "ms", [r.outside_services for r in rounds])
        outside = add("round, outside the two models", "ms", [r.outside_models for r in rounds])
        self._results.ratios.append(
            Ratio("time in a round outside the two models", outside, None, "at most", 3.0)
        )

    def _first_token(self) -> None:
        stack, baseline = [], []
        for repeat in range(max(5, 2 * self._plan.repeats)):
            self._report(f"first token of a {FIRST_TOKEN_PROMPT_LEN}-token prompt, {repeat + 1}")
            prompt = self._fresh_prompt(FIRST_TOKEN_PROMPT_LEN)
            baseline.append(self._reference.forward(prompt) * 1000)
            options = self._options(self._plan.num_draft_tokens, 2)
            stack.append(self._one(prompt, options).first_token_s * 1000)
        name = f"{FIRST_TOKEN_PROMPT_LEN}-token prompt"
        ours = self._results.add(f"first token, {name}", "ms", stack)
        theirs = self._results.add(f"one forward pass, {name}", "ms", baseline)
        self._results.ratios.append(
            Ratio("first token / one forward pass", ours, theirs, "at most", 1.3)
        )

    def _concurrency(self) -> None:
        count = self._plan.concurrency
        single, together, waits = [], [], []
        alone_last: list[Timed] = []
        timed: list[Timed] = []
        # No number of draft tokens is asked for: what the policy makes of it is the product.
        options = self._options(None)
        for repeat in range(max(2, self._plan.repeats // 2)):
            self._report(f"1 and {count} concurrent requests, {repeat + 1}")
            prompts = [self._prompts[i % len(self._prompts)] for i in range(count)]
            alone = self._one(prompts[repeat % count], options)
            alone_last = [alone]
            single.append(alone.num_tokens / alone.total_s)
            seconds, timed = all_at_once(self._address, prompts, options)
            together.append(sum(t.num_tokens for t in timed) / seconds)
            waits += [t.first_token_s * 1000 for t in timed]
        one = self._results.add("1 request at a time", "{token}/s", single)
        many = self._results.add(f"{count} requests at a time, together", "{token}/s", together)
        self._results.add(f"first token among {count}", "ms", waits)
        for name, requests in (("1 request", alone_last), (f"{count} requests", timed)):
            queues = [r.target_queue for r in self._traced(requests)]
            self._results.add(f"queueing at the target, {name} at a time", "ms", queues)
        self._results.ratios.append(
            Ratio(f"throughput, {count} requests / 1", many, one, "at least", 6.0)
        )
