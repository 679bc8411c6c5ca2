"""Prometheus metrics of a draft or target service.

Owns names, labels and buckets. Must not know links or the engine: callers hand in numbers, and
functions that are read at every scrape. No ids of sessions are labels.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specmesh.metrics_server import loop_lag

TIME_BUCKETS = tuple(0.0005 * 2**power for power in range(15))  # to 8 s, as a round's
BATCH_BUCKETS = tuple(2**power for power in range(10))


class ServiceMetrics:
    """What a draft or target service counts. Thread-safe: the engine's worker calls it too."""

    def __init__(self, side: str) -> None:
        """side: "draft" or "target", a label on every series that both export."""
        registry = self.registry = CollectorRegistry()
        self._side = side
        self._answered: dict[tuple[str, str], Counter] = {}  # by command and outcome
        self.commands = Counter(
            "specmesh_commands",
            "Commands answered",
            ("side", "command", "outcome"),
            registry=registry,
        )
        self.queue_time = self._histogram("specmesh_command_queue_seconds", "Wait for the device")
        self.forward_time = self._histogram("specmesh_forward_seconds", "One forward pass")
        self.batch_size = Histogram(
            "specmesh_forward_batch_size",
            "Sequences in a forward pass",
            ("side",),
            buckets=BATCH_BUCKETS,
            registry=registry,
        ).labels(side)
        self.batch_rows = self._counter("specmesh_forward_rows", "Token rows computed")
        self.preemptions = self._counter("specmesh_preemptions", "Sessions preempted")
        self.cached_tokens = self._counter(
            "specmesh_prefix_cache_hit_tokens", "Tokens found in the prefix cache"
        )
        self.computed_tokens = self._counter(
            "specmesh_prefix_cache_miss_tokens", "Prompt tokens that were computed"
        )
        self.redraw_mismatches = self._counter(
            "specmesh_service_redraw_mismatches", "Candidates that the re-draw check refuted"
        )
        self.warm_up = self._gauge("specmesh_warm_up_seconds", "Load, compile and first pass")
        self._pages = Gauge("specmesh_kv_pages", "K/V pages", ("side", "state"), registry=registry)
        self._sessions = self._gauge("specmesh_sessions", "Open sessions")
        self._depth = self._gauge("specmesh_queue_depth", "Commands waiting for the device")
        self.event_loop_lag = loop_lag(registry)

    def _counter(self, name: str, brief: str) -> Counter:
        return Counter(name, brief, ("side",), registry=self.registry).labels(self._side)

    def _gauge(self, name: str, brief: str) -> Gauge:
        return Gauge(name, brief, ("side",), registry=self.registry).labels(self._side)

    def _histogram(self, name: str, brief: str) -> Histogram:
        metric = Histogram(name, brief, ("side",), buckets=TIME_BUCKETS, registry=self.registry)
        return metric.labels(self._side)

    def observe_command(self, command: str, outcome: str, queue_us: int) -> None:
        """Count one answer. outcome: "ok", "deferred" or the reason of the error."""
        answered = self._answered.get((command, outcome))
        if answered is None:  # looking a series up takes longer than counting
            answered = self.commands.labels(self._side, command, outcome)
            self._answered[command, outcome] = answered
        answered.inc()
        self.queue_time.observe(queue_us * 1e-6)

    def observe_forward(self, forward_us: int, batch_size: int, num_rows: int) -> None:
        """Count one forward pass."""
        self.forward_time.observe(forward_us * 1e-6)
        self.batch_size.observe(batch_size)
        self.batch_rows.inc(num_rows)

    def watch(
        self,
        *,
        free_pages: Callable[[], int],
        total_pages: Callable[[], int],
        num_sessions: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        """Read these at every scrape, from the scraping thread."""
        self._pages.labels(self._side, "free").set_function(free_pages)
        self._pages.labels(self._side, "used").set_function(lambda: total_pages() - free_pages())
        self._sessions.set_function(num_sessions)
        self._depth.set_function(num_waiting)
