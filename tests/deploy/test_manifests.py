"""Every overlay, alone and with every further component, renders to what a cluster would take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from tests.deploy import pods, schemas, wiring
from tests.deploy.manifests import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    Object,
    of_kind,
    overlay,
    own_components,
    render,
)

Rule = Callable[[Sequence[Object]], list[str]]
RULES: tuple[Rule, ...] = (
    pods.security_findings,
    pods.probe_findings,
    pods.grace_findings,
    wiring.settings_findings,
    wiring.replica_findings,
    wiring.selector_findings,
    wiring.reference_findings,
    wiring.budget_findings,
    wiring.policy_findings,
    wiring.tls_findings,
    wiring.collector_findings,
)


def further(name: str) -> list[str]:
    """The components that an overlay may still be given."""
    return [each for each in COMPONENTS if each not in own_components(name)]


FULL = [(name, added) for name in OVERLAYS for added in dict.fromkeys(((), tuple(further(name))))]
PARTIAL = [
    (name, added)
    for name in OVERLAYS
    for size in range(1, len(further(name)))
    for added in itertools.combinations(further(name), size)
]


@pytest.mark.parametrize(("name", "added"), FULL)
def test_an_overlay_keeps_every_rule(name: str, added: tuple[str, ...]) -> None:
    """Security, probes, grace, settings, replicas, selectors, references, budgets, policies, TLS:
    no finding, in the overlay alone and with all further components."""
    objects = overlay(name, added)
    assert [found for rule in RULES for found in rule(objects)] == []


@pytest.mark.parametrize(("name", "added"), PARTIAL)
def test_every_combination_of_components_renders(name: str, added: tuple[str, ...]) -> None:
    """Any subset of the further components fits: references, settings and policies hold."""
    objects = overlay(name, added)
    rules = (wiring.reference_findings, wiring.settings_findings, wiring.policy_findings)
    assert [found for rule in rules for found in rule(objects)] == []


@pytest.mark.parametrize(("name", "added"), FULL)
def test_built_in_kinds_fit_their_schemas(name: str, added: tuple[str, ...]) -> None:
    """Strictly, so that a misspelt field shows, for the newest and the oldest Kubernetes meant."""
    objects = overlay(name, added)
    assert len(objects) > 20
    versions = (
        (schemas.KUBERNETES, schemas.OLDEST_KUBERNETES) if not added else (schemas.KUBERNETES,)
    )
    assert [f for version in versions for f in schemas.built_in_findings(objects, version)] == []


@pytest.mark.parametrize(("name", "added"), FULL)
def test_custom_kinds_fit_their_definitions(name: str, added: tuple[str, ...]) -> None:
    """Strictly against the operators' CRDs, and the Serve config against Serve's own schema."""
    objects = overlay(name, added)
    assert schemas.serve_findings(objects) == []
    folder = schemas.crd_folder()
    if folder is None:
        pytest.skip("no CRDs: set SPECMESH_CRD_DIR, or put them in ../shared/crds")
    assert schemas.custom_findings(objects, folder) == []


def test_components_are_all_that_there_are() -> None:
    """No folder of k8s/ is left out of these tests, and the base alone renders."""
    for kind, names in (("components", COMPONENTS), ("overlays", OVERLAYS)):
        assert {each.name for each in (K8S / kind).iterdir()} == set(names)
    assert len(of_kind(render(K8S / "base"), "RayService")) == 1


def test_ray_knows_the_parameters_it_is_started_with() -> None:
    """rayStartParams are flags of the pinned `ray start`; a misspelt one would end the pod."""
    from ray.scripts.scripts import start

    known = {flag.removeprefix("--") for each in start.params for flag in each.opts}
    (service,) = of_kind(overlay("local-cpu"), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    for spec in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert set(spec["rayStartParams"]) <= known


def test_only_plain_needs_no_operator() -> None:
    """`plain` has no custom kind at all; the others have one RayService, prod certificates too."""
    kinds = {
        name: {each["kind"] for each in overlay(name) if each["apiVersion"] not in schemas.BUILT_IN}
        for name in OVERLAYS
    }
    assert kinds["plain"] == set()
    assert kinds["local-cpu"] == kinds["dev"] == {"RayService"}
    assert kinds["prod"] == {"RayService", "Certificate", "Issuer", "PodMonitor", "PrometheusRule"}


def test_a_changed_setting_rolls_the_pods_that_read_it() -> None:
    """Two overlays that differ in a setting name another ConfigMap in their pod templates."""
    names = {}
    for overlay_name in ("local-cpu", "prod"):
        for each in of_kind(overlay(overlay_name), "RayService"):
            cluster = each["spec"]["rayClusterConfig"]
            (group,) = cluster["workerGroupSpecs"]
            for where, spec in (("head", cluster["headGroupSpec"]), ("worker", group)):
                sources = spec["template"]["spec"]["containers"][0]["envFrom"]
                names[overlay_name, where] = tuple(s["configMapRef"]["name"] for s in sources)
    assert names["local-cpu", "head"] == names["local-cpu", "worker"]
    assert not set(names["local-cpu", "worker"]) & set(names["prod", "worker"])
