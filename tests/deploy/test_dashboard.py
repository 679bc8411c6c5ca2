"""Dashboard and alerts ask for metrics that the services export, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from specmesh.coordinator_metrics import CoordinatorMetrics
from specmesh.service_metrics import ServiceMetrics
from tests.deploy.manifests import K8S, ROOT, of_kind, overlay

DASHBOARD = json.loads((K8S / "components/prometheus/dashboard.json").read_text())
ALERTS = [
    rule
    for each in of_kind(overlay("prod"), "PrometheusRule")
    for group in each["spec"]["groups"]
    for rule in group["rules"]
]
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
# What Prometheus adds when it scrapes a pod, and what histograms have of their own.
SCRAPED = {"namespace", "pod", "le"}
FUNCTIONS = {"sum", "rate", "increase", "max", "min", "avg", "histogram_quantile", "label_values"}
WORDS = {"by", "and"}


def exported() -> dict[str, set[str]]:
    """Series name -> its labels, from the registries that the services serve."""
    found: dict[str, set[str]] = {}
    for registry in (
        CoordinatorMetrics().registry,
        ServiceMetrics("draft").registry,
        ServiceMetrics("target").registry,
    ):
        for metric in metrics_of(registry):
            for suffix in SUFFIXES[metric._type]:
                found[metric._name + suffix] = set(metric._labelnames) | SCRAPED
    return found


def metrics_of(registry: CollectorRegistry) -> list[MetricWrapperBase]:
    collectors = list(registry._collector_to_names)
    assert all(isinstance(each, MetricWrapperBase) for each in collectors)
    return collectors  # type: ignore[return-value]  # asserted above


EXPORTED = exported()


def dashboard_queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


QUERIES = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in ALERTS)]


def series(query: str) -> dict[str, set[str]]:
    """Series a query reads -> labels that it matches or groups by. Fails on what it cannot read."""
    grouped = {
        label.strip()
        for group in re.findall(r"\bby\s*\(([^)]*)\)", query)
        for label in group.split(",")
    }
    bare = re.sub(r"\bby\s*\([^)]*\)", " ", query)
    bare = re.sub(r"\[[^]]*\]", " ", bare)
    matched: dict[str, set[str]] = {}
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", bare):
        labels = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers))
        matched.setdefault(name, set()).update(labels)
    bare = re.sub(r"\{[^}]*\}", " ", bare)
    bare = re.sub(r"label_values\((\w+), (\w+)\)", r"\1", bare)
    for word in re.findall(r"[a-zA-Z_]\w*", bare):
        if word not in FUNCTIONS | WORDS:
            matched.setdefault(word, set())
    return {name: labels | grouped for name, labels in matched.items()}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_names_exported_metrics_and_their_labels(title: str, query: str) -> None:
    """Every series of every panel and alert is exported, with every label that is used."""
    read = series(query)
    assert read
    for name, labels in read.items():
        assert name in EXPORTED, title
        assert labels <= EXPORTED[name], title


def test_a_query_for_what_is_not_there_is_noticed() -> None:
    """The reading of queries sees a misspelt metric and a misspelt label."""
    read = series('sum by (sied) (rate(specmesh_roundz_total{part="x"}[5m])) / sum(up)')
    assert read == {"specmesh_roundz_total": {"sied", "part"}, "up": {"sied"}}
    assert not set(read) & set(EXPORTED)


def test_every_metric_is_shown() -> None:
    """No metric is exported that neither a panel nor an alert reads."""
    read = {name for _, query in QUERIES for name in series(query)}
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in read}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in EXPORTED} == families


def test_panels_are_described_and_do_not_overlap() -> None:
    """Unique ids, a description each, and no two panels on one place of the grid."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at: Any = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_the_dashboard_reaches_grafana() -> None:
    """The ConfigMap holds the file as it is, under the label that Grafana's sidecar looks for."""
    (found,) = (
        each
        for each in of_kind(overlay("prod"), "ConfigMap")
        if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    )
    assert json.loads(found["data"]["specmesh.json"]) == DASHBOARD


def test_alerts_say_what_to_do() -> None:
    """Each alert has a severity, a summary and an entry in k8s/README.md."""
    readme = (ROOT / "k8s" / "README.md").read_text()
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names) > 10
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in readme
