"""Metrics: what a record adds to which series, names by convention, and the HTTP endpoint."""

from __future__ import annotations

import asyncio
import http.client
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specmesh.config import TelemetrySettings
from specmesh.coordinator_metrics import CoordinatorMetrics, RequestRecord
from specmesh.errors import ConfigError
from specmesh.metrics_server import MetricsServer, watch_event_loop
from specmesh.round_record import RoundRecord, SideRecord
from specmesh.service_metrics import ServiceMetrics

ROUND = RoundRecord(
    "session-1", 3, 40, num_draft_tokens=4, num_judged=3, num_accepted=2, num_emitted=3,
    num_committed=2, closing="recovered", encoding="sparse_f32", expected_tokens=2.5,
    duration_us=14_000, manage_us=500,
    target=SideRecord(total_us=9000, service_us=8600, queue_us=600, sent_bytes=2200,
                      received_bytes=150),
    draft=SideRecord(total_us=4000, service_us=3700, queue_us=100, sent_bytes=90,
                     received_bytes=2100),
    overlaps=(0.9, 0.8, 0.5), emitted_argmax=(True, True, False), emitted_max_probs=(0.6, 0.5, 0.4),
    dropped_mass=(0.004, 0.002, 0.001, 0.001), num_retries=1,
)  # fmt: skip


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Every exported sample as `name{label=value,...}`, read back from the exposition text."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_a_round_adds_what_its_record_says() -> None:
    """Counters per position, tokens, closing, times by part, bytes by side and direction."""
    metrics = CoordinatorMetrics()
    for _ in range(2):
        assert metrics.observe_round(ROUND) == ()
    found = values(metrics.registry)
    assert found["specmesh_rounds_total{closing=recovered}"] == 2
    assert found["specmesh_output_tokens_total"] == 4
    assert found["specmesh_draft_tokens_total"] == 8
    assert found["specmesh_accepted_tokens_total"] == 4
    judged = [found[f"specmesh_judged_position_tokens_total{{position={i}}}"] for i in range(5)]
    accepted = [found[f"specmesh_accepted_position_tokens_total{{position={i}}}"] for i in range(5)]
    assert judged == [2, 2, 2, 0, 0]
    assert accepted == [2, 2, 0, 0, 0]
    assert found["specmesh_round_expected_tokens_total"] == 5.0
    assert found["specmesh_round_measured_tokens_total"] == 6
    parts = {
        part: found[f"specmesh_round_seconds_total{{part={part}}}"]
        for part in ("target", "draft", "queue", "wire", "manage")
    }
    assert parts == pytest.approx(
        {"target": 0.016, "draft": 0.0072, "queue": 0.0014, "wire": 0.0014, "manage": 0.001}
    )
    assert found["specmesh_wire_bytes_total{direction=received,side=draft}"] == 4200
    assert found["specmesh_wire_bytes_total{direction=sent,side=target}"] == 4400
    assert found["specmesh_round_duration_seconds_sum"] == pytest.approx(0.028)
    assert found["specmesh_round_retries_total"] == 2
    assert found["specmesh_ahead_rounds_total"] == 0
    before = found["specmesh_wire_bytes_total{direction=received,side=draft}"]
    metrics.observe_round(replace(ROUND, was_ahead=True, draft=None))
    metrics.count_ahead(1000)
    after = values(metrics.registry)["specmesh_wire_bytes_total{direction=received,side=draft}"]
    assert after - before == 1000
    assert values(metrics.registry)["specmesh_ahead_rounds_total"] == 1
    assert found["specmesh_dropped_mass_total"] == pytest.approx(0.016)


def test_a_prefill_is_no_round() -> None:
    """First-token work is measured apart: it moves no series of rounds."""
    metrics = CoordinatorMetrics()
    metrics.observe_round(
        RoundRecord("s", 0, 9, is_prefill=True, num_emitted=1, num_committed=1, duration_us=30_000)
    )
    found = values(metrics.registry)
    assert found["specmesh_prefill_duration_seconds_count"] == 1
    assert found["specmesh_output_tokens_total"] == 1
    assert found["specmesh_round_duration_seconds_count"] == 0
    assert sum(value for key, value in found.items() if key.startswith("specmesh_rounds_t")) == 0


def test_a_round_without_candidates_counts_its_reason() -> None:
    """Fallback reasons are a label; nothing is judged; E[N] was not predicted."""
    metrics = CoordinatorMetrics()
    metrics.observe_round(RoundRecord("s", 1, 9, fallback="draft_deadline", num_emitted=1))
    found = values(metrics.registry)
    assert found["specmesh_fallback_rounds_total{reason=draft_deadline}"] == 1
    assert found["specmesh_rounds_total{closing=plain}"] == 1
    assert found["specmesh_draft_tokens_total"] == 0
    assert found["specmesh_round_expected_tokens_total"] == 0


@pytest.mark.parametrize(
    ("is_near_tie", "margin"), [(True, 2.0**-19), (False, 2.0**-17), (False, None)]
)
def test_near_ties_are_counted_apart_from_alarms(is_near_tie: bool, margin: float | None) -> None:
    """What the audit calls a near-tie is no mismatch in the counters; margins are kept of both."""
    metrics = CoordinatorMetrics()
    metrics.observe_round(
        RoundRecord(
            "s", 1, 9, audited=True, audit_mismatch=True,
            audit_margin=margin, audit_near_tie=is_near_tie,
        )
    )  # fmt: skip
    found = values(metrics.registry)
    kind, other = ("near_tie", "mismatch") if is_near_tie else ("mismatch", "near_tie")
    assert found["specmesh_audited_rounds_total"] == 1
    assert found[f"specmesh_audit_mismatches_total{{kind={kind}}}"] == 1
    assert found[f"specmesh_audit_mismatches_total{{kind={other}}}"] == 0
    assert found["specmesh_audit_mismatch_margin_count"] == (margin is not None)


def test_the_law_scores_are_exported_and_alarm() -> None:
    """Both z-scores are gauges; an alarm is counted and returned once."""
    metrics = CoordinatorMetrics()
    wrong = RoundRecord(
        "s", 1, 9, num_draft_tokens=1, num_judged=1, num_accepted=0, num_emitted=1,
        closing="recovered", overlaps=(0.5,), emitted_argmax=(True,), emitted_max_probs=(0.5,),
    )  # fmt: skip
    alarms = [alarm for _ in range(500) for alarm in metrics.observe_round(wrong)]
    found = values(metrics.registry)
    assert sorted(alarms) == ["acceptance", "argmax"]
    assert found["specmesh_law_zscore{detector=acceptance}"] < -5
    assert found["specmesh_law_zscore{detector=argmax}"] > 5
    assert found["specmesh_law_alarms_total{detector=argmax}"] == 1


@pytest.mark.parametrize("rule", ["coupled", "greedy"])
def test_only_the_residual_rule_feeds_the_acceptance_score(rule: str) -> None:
    """Under shared noise candidates are kept with another probability than sum(min(p, q))."""
    metrics = CoordinatorMetrics()
    for _ in range(500):
        metrics.observe_round(RoundRecord("s", 1, 9, rule=rule, overlaps=(0.5,), num_accepted=1))
    assert metrics.law.acceptance.num_observed == 0


def test_a_seed_of_the_callers_feeds_no_score() -> None:
    """Noise that is repeated or chosen says nothing about the law: the same round 500 times over,
    of which each differs from its expectation alike, would pass any bound."""
    metrics = CoordinatorMetrics()
    repeated = RoundRecord(
        "s", 1, 9, has_own_seed=False, num_draft_tokens=1, num_judged=1, num_accepted=0,
        num_emitted=1, closing="recovered", overlaps=(0.5,), emitted_argmax=(True,),
        emitted_max_probs=(0.5,),
    )  # fmt: skip
    assert [alarm for _ in range(500) for alarm in metrics.observe_round(repeated)] == []
    assert metrics.law.acceptance.num_observed == metrics.law.argmax.num_observed == 0
    assert values(metrics.registry)["specmesh_rounds_total{closing=recovered}"] == 500


def test_a_request_fills_the_genai_histograms() -> None:
    """Duration, time to first token, and (duration - first) / (tokens - 1); seconds."""
    metrics = CoordinatorMetrics()
    metrics.observe_request(
        RequestRecord("chat", "m", "stop", 12, 5, 8, duration_s=1.5, queue_s=0.1, first_token_s=0.5)
    )
    metrics.observe_request(
        RequestRecord("chat", "m", "error", 3, 0, 0, 0.2, 0.0, None, error="NOT_READY")
    )
    found = values(metrics.registry)
    labels = "gen_ai_operation_name=chat,gen_ai_request_model=m"
    assert found[f"gen_ai_server_request_duration_seconds_sum{{error_type=,{labels}}}"] == 1.5
    failed = f"gen_ai_server_request_duration_seconds_count{{error_type=NOT_READY,{labels}}}"
    assert found[failed] == 1
    assert found[f"gen_ai_server_time_to_first_token_seconds_sum{{{labels}}}"] == 0.5
    assert found[f"gen_ai_server_time_per_output_token_seconds_sum{{{labels}}}"] == 0.25
    assert found["specmesh_requests_total{finish_reason=stop}"] == 1
    assert found["specmesh_goodput_tokens_total"] == 5
    assert found["specmesh_prompt_tokens_total"] == 15
    assert found["specmesh_cached_tokens_total"] == 8


def test_service_gauges_are_read_at_the_scrape() -> None:
    """Pages, sessions and queue depth are what they are when asked, not when set."""
    metrics, free = ServiceMetrics("target"), [60]
    metrics.watch(
        free_pages=lambda: free[0], total_pages=lambda: 64, num_sessions=lambda: 2,
        num_waiting=lambda: 5,
    )  # fmt: skip
    free[0] = 50
    metrics.observe_command("verify", "ok", 700)
    metrics.observe_forward(8000, 3, 15)
    found = values(metrics.registry)
    assert found["specmesh_kv_pages{side=target,state=used}"] == 14
    assert found["specmesh_kv_pages{side=target,state=free}"] == 50
    assert found["specmesh_queue_depth{side=target}"] == 5
    assert found["specmesh_commands_total{command=verify,outcome=ok,side=target}"] == 1
    assert found["specmesh_forward_rows_total{side=target}"] == 15
    assert found["specmesh_command_queue_seconds_sum{side=target}"] == pytest.approx(0.0007)


def test_registries_are_separate() -> None:
    """Two process objects in one process count apart, and nothing is in the global registry."""
    first, second = CoordinatorMetrics(), CoordinatorMetrics()
    first.observe_round(ROUND)
    assert values(second.registry)["specmesh_output_tokens_total"] == 0


def test_the_endpoint_serves_the_text_format_on_its_own_port() -> None:
    """GET /metrics on the bound port; a taken port is named; off by default."""
    metrics = CoordinatorMetrics()
    metrics.observe_round(ROUND)
    server = MetricsServer.start(TelemetrySettings(metrics_port=0), metrics.registry)
    assert server is not None
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        assert response.status == 200
        assert "specmesh_output_tokens_total 2.0" in body
        taken = TelemetrySettings(metrics_port=server.port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            MetricsServer.start(taken, metrics.registry)
    finally:
        server.close()
    assert MetricsServer.start(TelemetrySettings(), metrics.registry) is None


async def test_the_event_loop_watch_sees_a_blocked_loop() -> None:
    """A loop held for 30 ms shows as a lag of that size, and cancelling ends the watch."""
    metrics = ServiceMetrics("draft")
    task = asyncio.create_task(watch_event_loop(metrics.event_loop_lag, period_s=0.001))
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)  # the watch now waits for its timer
    until = loop.time() + 0.03
    while loop.time() < until:
        pass
    while values(metrics.registry)["specmesh_event_loop_lag_seconds_count"] < 1:
        await asyncio.sleep(0)
    assert values(metrics.registry)["specmesh_event_loop_lag_seconds_sum"] >= 0.028
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
