"""What `specmesh bench` computes from measurements: quantiles, bounds, acceptance, round times."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import start_http_server

from protos.specmesh.v1 import generation_pb2 as pb
from specmesh.bench.load import Timed, all_at_once, one_after_another
from specmesh.bench.measure import Ratio, series
from specmesh.bench.report import json_lines
from specmesh.bench.rounds import round_times
from specmesh.bench.scrape import metric, warm_up_seconds
from specmesh.bench.suite import Results, Suite
from specmesh.bench.timeline import PHASES, phases
from specmesh.client import GenerateOptions
from specmesh.errors import NotReady
from specmesh.service_metrics import ServiceMetrics
from specmesh.spans import (
    DRAFT_FORWARD,
    GENERATE,
    PREFILL,
    PROPOSE,
    ROUND,
    TARGET_FORWARD,
    VERIFY,
    Key,
)
from specmesh.traces.reader import StoredSpan, Trace
from tests.unit.scripted_coordinator import Script, serving


def test_quantiles_interpolate_and_ratios_use_medians() -> None:
    """Proves median, p20 and p80 of a known series, and both directions of a bound."""
    measured = series("x", "ms", [5.0, 1.0, 2.0, 4.0, 3.0])
    assert measured.record() == {
        "case": "x",
        "unit": "ms",
        "median": 3.0,
        "p20": pytest.approx(1.8),
        "p80": pytest.approx(4.2),
        "n": 5,
    }
    half = series("y", "ms", [6.0])
    assert Ratio("r", half, measured, "at least", 2.0).met
    assert not Ratio("r", half, measured, "at least", 2.01).met
    assert Ratio("r", half, None, "at most", 6.0).met
    assert not Ratio("r", half, None, "at most", 5.9).met
    with pytest.raises(ValueError, match="nothing"):
        series("nothing", "ms", [])


def test_requests_are_timed_from_the_clients_side() -> None:
    """Proves counts of tokens and that the first message is kept apart from the later ones."""
    with serving(Script()) as address:
        (timed,) = one_after_another(address, [[1, 2]], GenerateOptions())
        seconds, many = all_at_once(address, [[1], [2], [3]], GenerateOptions())
    assert (timed.num_tokens, timed.num_first_tokens) == (9, 1)
    assert timed.trace_id == "ab" * 16
    assert 0 < timed.first_token_s <= timed.total_s
    assert timed.later_tokens_per_s * (timed.total_s - timed.first_token_s) == pytest.approx(8)
    assert len(many) == 3
    assert seconds > 0


def timed_with(judged: list[int], accepted: list[int]) -> Timed:
    """A finished request whose blocks went so."""
    stats = pb.SpeculationStats(
        num_rounds=judged[0] + 1,
        num_accepted=sum(accepted),
        judged_per_position=judged,
        accepted_per_position=accepted,
        fallback_rounds={"budget": 1},
    )
    return Timed("t", 0.1, 1.0, 10, 1, pb.Finished(speculation=stats))


def test_predicted_tokens_are_products_of_conditional_rates() -> None:
    """Proves E[N] = 1 + a1 + a1 a2 over all requests, beside accepted / rounds + 1."""
    suite = Suite.__new__(Suite)
    suite._results = Results()
    suite._acceptance([timed_with([10, 6], [6, 3]), timed_with([10], [6])])
    results = suite._results
    assert [(p.judged, p.accepted) for p in results.positions] == [(20, 12), (6, 3)]
    assert results.predicted_tokens == pytest.approx(1 + 0.6 + 0.6 * 0.5)
    assert results.measured_tokens == pytest.approx(1 + 15 / 20)
    assert results.dropped_rounds == {"budget": 2}


def span(name: str, span_id: int, parent: int, ms: tuple[float, float], **numbers: int) -> Any:
    """A stored span; times in milliseconds."""
    return StoredSpan(
        trace_id="ab" * 16,
        span_id=f"{span_id:016x}",
        parent_id=f"{parent:016x}" if parent else "",
        name=name,
        service="x",
        start_ns=int(ms[0] * 1e6),
        end_ns=int(ms[1] * 1e6),
        failed=False,
        attributes=dict(numbers),
        links=(),
    )


def test_time_outside_the_models_is_the_round_less_both_forward_passes() -> None:
    """Proves the arithmetic on a trace of one prefill and one round."""
    spans = [
        span(GENERATE, 1, 0, (0, 30)),
        span(PREFILL, 2, 1, (0, 10)),
        span(VERIFY, 3, 2, (0, 9), **{Key.FORWARD_US: 8000}),
        span(ROUND, 4, 1, (10, 30), **{Key.NUM_DRAFT_TOKENS: 4}),
        span(PROPOSE, 5, 4, (10, 16), **{Key.FORWARD_US: 5000}),
        span(VERIFY, 6, 4, (17, 29), **{Key.FORWARD_US: 11000}),
    ]
    prefill, round_ = round_times([Trace("ab" * 16, spans)])
    assert prefill.is_prefill
    assert not round_.is_prefill
    assert round_.has_draft
    assert (round_.total, round_.draft_forward, round_.target_forward) == (20.0, 5.0, 11.0)
    assert round_.outside_models == pytest.approx(4.0)
    assert round_.outside_services == pytest.approx(2.0)


def test_a_timeline_cuts_a_round_without_gaps() -> None:
    """Proves each phase of a known round, that they add up to it, and what cannot be cut."""

    def batch(name: str, span_id: int, ms: tuple[float, float], command: int) -> Any:
        return replace(span(name, span_id, 0, ms), links=(("ab" * 16, f"{command:016x}"),))

    round_ = span(ROUND, 4, 1, (10, 40), **{Key.NUM_DRAFT_TOKENS: 2})
    spans = [round_, span(PROPOSE, 5, 4, (11, 22)), span(VERIFY, 6, 4, (24, 38))]
    passes = [
        batch(DRAFT_FORWARD, 9, (18, 21), 5),  # in any order
        batch(DRAFT_FORWARD, 8, (13, 16), 5),
        batch(DRAFT_FORWARD, 7, (1, 2), 3),  # another round's
        batch(TARGET_FORWARD, 10, (27, 36), 6),
    ]
    found = phases(round_, Trace("ab" * 16, spans, passes))
    assert found is not None
    assert tuple(found) == PHASES
    assert list(found.values()) == pytest.approx([1, 2, 6, 2, 1, 2, 3, 9, 2, 2])
    assert sum(found.values()) == pytest.approx(round_.duration_ms)
    chain = phases(round_, Trace("ab" * 16, spans, passes[1:]))  # both candidates in one pass
    assert chain is not None
    assert list(chain.values()) == pytest.approx([1, 2, 3, 0, 6, 2, 3, 9, 2, 2])
    three = span(ROUND, 4, 1, (10, 40), **{Key.NUM_DRAFT_TOKENS: 3})
    assert phases(three, Trace("ab" * 16, [three, *spans[1:]], passes)) is None  # one is missing
    assert phases(round_, Trace("ab" * 16, spans[:2], passes)) is None
    plain = span(ROUND, 4, 1, (10, 40))
    assert phases(plain, Trace("ab" * 16, [plain, *spans[1:]], passes)) is None


def test_warm_up_is_read_past_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the gauge of a real endpoint is found, whatever http_proxy says."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    metrics = ServiceMetrics("target")
    metrics.warm_up.set(1.25)
    server, thread = start_http_server(0, "127.0.0.1", metrics.registry)
    try:
        assert warm_up_seconds(server.server_port) == 1.25
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with pytest.raises(NotReady):
        warm_up_seconds(1)
    with pytest.raises(NotReady, match="exports no x"):
        metric("xy 1\n", "x")


def test_json_lines_carry_command_and_versions() -> None:
    """Proves that every number comes with what is needed to repeat it."""
    results = Results()
    measured = results.add("x", "ms", [1.0, 2.0])
    results.ratios.append(Ratio("r", measured, None, "at most", 3.0))
    lines = [json.loads(line) for line in json_lines(results, "specmesh bench")]
    assert [line["case"] for line in lines] == ["x", "r", "tokens per round"]
    assert all(line["command"] == "specmesh bench" for line in lines)
    assert all(line["versions"]["torch"] for line in lines)
    assert lines[1]["met"] is True


def test_prompts_for_first_tokens_are_never_cached() -> None:
    """Proves that no two fresh prompts of a run share a first page, nor an id out of range."""
    suite = Suite.__new__(Suite)
    suite._next_fresh = 0
    suite._reference = SimpleNamespace(vocab_size=700)
    prompts = [suite._fresh_prompt(100) for _ in range(20)]
    assert all(len(prompt) == 100 for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert all(0 <= token_id < 700 for prompt in prompts for token_id in prompt)
