"""The HTTP endpoint that Prometheus scrapes, and the event loop's own lag.

Owns a port and a thread. Must not know which metrics there are: `specmesh/coordinator_metrics.py`
and `specmesh/service_metrics.py` name them.
"""

from __future__ import annotations

import asyncio
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, start_http_server

from specmesh.config import TelemetrySettings
from specmesh.errors import ConfigError

LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
LAG_PERIOD_S = 0.25


def loop_lag(registry: CollectorRegistry) -> Histogram:
    """The histogram that `watch_event_loop` fills."""
    return Histogram(
        "specmesh_event_loop_lag_seconds",
        "How late the event loop runs a timer",
        buckets=LAG_BUCKETS,
        registry=registry,
    )


async def watch_event_loop(lag: Histogram, period_s: float = LAG_PERIOD_S) -> None:
    """Observe how late a timer fires, until cancelled. One wake-up per period."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        lag.observe(max(0.0, loop.time() - due))


class MetricsServer:
    """The HTTP endpoint of one registry, on its own port and thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @classmethod
    def start(
        cls, settings: TelemetrySettings, registry: CollectorRegistry
    ) -> MetricsServer | None:
        """Listen on `metrics_host:metrics_port`; None when the port is not set (off).

        Raises ConfigError when the port is taken.
        """
        if settings.metrics_port is None:
            return None
        try:
            started = start_http_server(settings.metrics_port, settings.metrics_host, registry)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.metrics_host}:{settings.metrics_port}: "
                f"{error.strerror}",
                field="telemetry.metrics_port",
            ) from error
        return cls(*started)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return self._server.server_port

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
