"""Reads numbers from a service's Prometheus endpoint on loopback."""

from __future__ import annotations

import urllib.error
import urllib.request

from specmesh.errors import NotReady

WARM_UP = "specmesh_warm_up_seconds"
TIMEOUT_S = 5.0


def warm_up_seconds(port: int) -> float:
    """Seconds a service spent on its first passes, compilation included. Raises NotReady."""
    return metric(read_metrics(port), WARM_UP)


def read_metrics(port: int) -> str:
    """Everything a service exports, as Prometheus text. Raises NotReady."""
    url = f"http://127.0.0.1:{port}/metrics"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_S) as response:
            text: str = response.read().decode()
            return text
    except (OSError, urllib.error.URLError) as error:
        raise NotReady(f"no metrics at {url}: {error}") from error


def metric(text: str, name: str) -> float:
    """The value of the first series called `name`. Raises NotReady where there is none."""
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            return float(line.rpartition(" ")[2])
    raise NotReady(f"the service exports no {name}")
