"""The rules of tests/deploy can fail: each planted fault is found, by the rule it is meant for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.deploy import pods, schemas, wiring
from tests.deploy.manifests import Object, one, overlay, template

Plant = Callable[[list[Object]], None]


def first(objects: list[Object], component: str) -> Object:
    return template(objects, component).containers[0]


def config(objects: list[Object], component: str) -> dict[str, str]:
    """The ConfigMap that a service reads first."""
    name = first(objects, component)["envFrom"][0]["configMapRef"]["name"]
    data: dict[str, str] = one(objects, "ConfigMap", name)["data"]
    return data


def spec(objects: list[Object], kind: str, name: str) -> Any:
    return one(objects, kind, name)["spec"]


def cluster(objects: list[Object]) -> Any:
    return spec(objects, "RayService", "coordinator")["rayClusterConfig"]


def crd_findings(objects: Sequence[Object]) -> list[str]:
    folder = schemas.crd_folder()
    if folder is None:
        pytest.skip("no CRDs: set SPECMESH_CRD_DIR, or put them in ../shared/crds")
    return schemas.custom_findings(objects, folder)


def misspell(objects: list[Object], component: str) -> None:
    container = first(objects, component)
    container["lifecyle"] = container.pop("lifecycle")


def serve_config(objects: list[Object], old: str, new: str) -> None:
    service = spec(objects, "RayService", "coordinator")
    assert old in service["serveConfigV2"]
    service["serveConfigV2"] = service["serveConfigV2"].replace(old, new)


def privileged(objects: list[Object], component: str) -> None:
    first(objects, component)["securityContext"]["privileged"] = True


def host_path(objects: list[Object]) -> None:
    template(objects, "target").pod["volumes"][0] = {"name": "models", "hostPath": {"path": "/"}}


def moved_policy_port(objects: list[Object]) -> None:
    spec(objects, "NetworkPolicy", "draft")["ingress"][0]["ports"][0]["port"] = 50071


def moved_target_port(objects: list[Object]) -> None:
    """Consistent in itself, but not the code's port: only the code's table can tell."""
    container = first(objects, "target")
    container["ports"][0]["containerPort"] = 50099
    spec(objects, "Service", "target")["ports"][0]["port"] = 50099
    config(objects, "target")["SPECMESH_TARGET_SERVER__PORT"] = "50099"


FAULTS: dict[str, tuple[Callable[[Sequence[Object]], list[str]], str, Plant]] = {
    "misspelt field": (schemas.built_in_findings, "lifecyle", lambda o: misspell(o, "target")),
    "misspelt field inside Ray": (crd_findings, "lifecyle", lambda o: misspell(o, "coordinator")),
    "misspelt field of Ray": (
        crd_findings,
        "rayVersoin",
        lambda o: cluster(o).update(rayVersoin="2.60.0"),
    ),
    "wrong type inside Ray": (
        crd_findings,
        "replicas",
        lambda o: cluster(o)["workerGroupSpecs"][0].update(replicas="3"),
    ),
    "unknown kind": (
        crd_findings,
        "no CRD",
        lambda o: o.append(
            {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}}
        ),
    ),
    "misspelt key of Serve": (
        schemas.serve_findings,
        "proxy_locaton",
        lambda o: serve_config(o, "proxy_location", "proxy_locaton"),
    ),
    "misspelt key of an application": (
        schemas.serve_findings,
        "route_prefx",
        lambda o: serve_config(o, "route_prefix", "route_prefx"),
    ),
    "Serve's proxy on": (
        schemas.serve_findings,
        "proxies",
        lambda o: serve_config(o, "Disabled", "HeadOnly"),
    ),
    "privileged container": (
        pods.security_findings,
        "privileged",
        lambda o: privileged(o, "draft"),
    ),
    "privileged inside Ray": (
        pods.security_findings,
        "privileged",
        lambda o: privileged(o, "coordinator"),
    ),
    "writable root": (
        pods.security_findings,
        "readOnlyRootFilesystem",
        lambda o: first(o, "coordinator-head")["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    "added capability": (
        pods.security_findings,
        "capabilities",
        lambda o: first(o, "target")["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
    ),
    "root user": (
        pods.security_findings,
        "runAsUser",
        lambda o: template(o, "draft").pod["securityContext"].update(runAsUser=0),
    ),
    "no seccomp": (
        pods.security_findings,
        "seccomp",
        lambda o: template(o, "draft").pod["securityContext"].pop("seccompProfile"),
    ),
    "token mounted": (
        pods.security_findings,
        "automount",
        lambda o: template(o, "coordinator").pod.pop("automountServiceAccountToken"),
    ),
    "service links": (
        pods.security_findings,
        "enableServiceLinks",
        lambda o: template(o, "target").pod.pop("enableServiceLinks"),
    ),
    "host path": (pods.security_findings, "hostPath", host_path),
    "writable weights": (
        pods.security_findings,
        "writable",
        lambda o: first(o, "target")["volumeMounts"][0].pop("readOnly"),
    ),
    "latest image": (
        pods.security_findings,
        "not pinned",
        lambda o: first(o, "jaeger").update(image="jaegertracing/jaeger:latest"),
    ),
    "image without tag in an init step": (
        pods.security_findings,
        "not pinned",
        lambda o: template(o, "target").pod["initContainers"][0].update(image="specmesh-target"),
    ),
    "no memory limit": (
        pods.security_findings,
        "memory limit",
        lambda o: first(o, "draft")["resources"].pop("limits"),
    ),
    "namespace not restricted": (
        pods.security_findings,
        "enforce",
        lambda o: one(o, "Namespace", "specmesh")["metadata"]["labels"].update(
            {"pod-security.kubernetes.io/enforce": "baseline"}
        ),
    ),
    "a role": (
        pods.security_findings,
        "Role",
        lambda o: o.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": {"name": "x"},
            }
        ),
    ),
    "missing probe": (
        pods.probe_findings,
        "no readinessProbe",
        lambda o: first(o, "target").pop("readinessProbe"),
    ),
    "missing probe inside Ray": (
        pods.probe_findings,
        "no startupProbe",
        lambda o: first(o, "coordinator").pop("startupProbe"),
    ),
    "probe on a wrong port": (
        pods.probe_findings,
        "none of the container",
        lambda o: first(o, "draft")["livenessProbe"]["grpc"].update(port=50099),
    ),
    "probe on the TLS port": (
        pods.probe_findings,
        "health is on",
        lambda o: first(o, "draft")["livenessProbe"]["grpc"].update(port=50061),
    ),
    "probe of an unknown service": (
        pods.probe_findings,
        "none that the code answers",
        lambda o: first(o, "draft")["readinessProbe"]["grpc"].update(service="ready"),
    ),
    "liveness by readiness": (
        pods.probe_findings,
        "not dead",
        lambda o: first(o, "target")["livenessProbe"]["grpc"].update(service="readiness"),
    ),
    "short grace": (
        pods.grace_findings,
        "grace below",
        lambda o: template(o, "coordinator").pod.update(terminationGracePeriodSeconds=30),
    ),
    "drain shorter than a generation": (
        pods.grace_findings,
        "generations take",
        lambda o: config(o, "target").update(SPECMESH_TARGET_ENGINE__MAX_CONTEXT_LEN="65536"),
    ),
    "upgrade that cuts streams": (
        pods.grace_findings,
        "upgrade",
        lambda o: spec(o, "RayService", "coordinator").update(rayClusterDeletionDelaySeconds=60),
    ),
    "misspelt setting": (
        wiring.settings_findings,
        "no setting",
        lambda o: config(o, "target").update(SPECMESH_TARGET_ENGINE__NUM_PAGE="1"),
    ),
    "value out of range": (
        wiring.settings_findings,
        "sampling_ratio",
        lambda o: config(o, "draft").update(SPECMESH_DRAFT_TELEMETRY__SAMPLING_RATIO="5"),
    ),
    "wrong port": (
        wiring.settings_findings,
        "container ports",
        lambda o: first(o, "draft")["ports"][0].update(containerPort=50062),
    ),
    "port that is not the code's": (
        wiring.settings_findings,
        "the code's table",
        moved_target_port,
    ),
    "spans to nowhere": (
        wiring.settings_findings,
        "nothing listens",
        lambda o: config(o, "coordinator").update(
            SPECMESH_COORDINATOR_TELEMETRY__OTLP_ENDPOINT="http://otel-collector:4318"
        ),
    ),
    "replica nobody lists": (
        wiring.replica_findings,
        "there are",
        lambda o: spec(o, "StatefulSet", "target").update(replicas=3),
    ),
    "GPU model without GPU": (
        wiring.replica_findings,
        "GPU",
        lambda o: first(o, "target")["resources"]["limits"].pop("nvidia.com/gpu"),
    ),
    "more replicas than slots": (
        wiring.replica_findings,
        "worker pods",
        lambda o: cluster(o)["workerGroupSpecs"][0].update(replicas=2),
    ),
    "other Ray": (
        wiring.replica_findings,
        "rayVersion",
        lambda o: cluster(o).update(rayVersion="2.59.0"),
    ),
    "service that selects nothing": (
        wiring.selector_findings,
        "selects no pod",
        lambda o: spec(o, "Service", "draft")["selector"].update(
            {"app.kubernetes.io/component": "drfat"}
        ),
    ),
    "service on a wrong port": (
        wiring.selector_findings,
        "Service/draft",
        lambda o: spec(o, "Service", "draft")["ports"][0].update(port=50071),
    ),
    "workload that does not own its pods": (
        wiring.selector_findings,
        "its own pods",
        lambda o: (
            template(o, "draft")
            .body["metadata"]["labels"]
            .update({"app.kubernetes.io/component": "target"})
        ),
    ),
    "missing ConfigMap": (
        wiring.reference_findings,
        "no ConfigMap",
        lambda o: template(o, "otel-collector").pod["volumes"][0]["configMap"].update(name="x"),
    ),
    "unknown Secret": (
        wiring.reference_findings,
        "nobody makes",
        lambda o: next(
            v["secret"] for v in template(o, "target").pod["volumes"] if "secret" in v
        ).update(secretName="x"),
    ),
    "model outside its volume": (
        wiring.reference_findings,
        "no volume",
        lambda o: config(o, "target").update(SPECMESH_TARGET_ENGINE__MODEL="/weights/target"),
    ),
    "budget that allows nothing": (
        wiring.budget_findings,
        "disruption budgets",
        lambda o: spec(o, "PodDisruptionBudget", "coordinator").update(minAvailable=3),
    ),
    "budget that cannot work with Ray": (
        wiring.budget_findings,
        "disruption budgets",
        lambda o: spec(o, "PodDisruptionBudget", "coordinator").update(
            minAvailable=None, maxUnavailable=1
        ),
    ),
    "policy on a wrong port": (
        wiring.policy_findings,
        "closed: ('coordinator', 'draft'",
        moved_policy_port,
    ),
    "policy open to all": (
        wiring.policy_findings,
        "open: ('clients', 'target'",
        lambda o: spec(o, "NetworkPolicy", "target")["ingress"].append({}),
    ),
    "open to neighbours": (
        wiring.policy_findings,
        "'neighbour'",
        lambda o: spec(o, "NetworkPolicy", "draft")["ingress"][0]["from"].append(
            {"podSelector": {}}
        ),
    ),
    "no default deny": (
        wiring.policy_findings,
        "denies by default",
        lambda o: o.remove(one(o, "NetworkPolicy", "default-deny")),
    ),
    "closed at one end": (
        wiring.policy_findings,
        "open at one end",
        lambda o: spec(o, "NetworkPolicy", "coordinator")["egress"].pop(0),
    ),
    "anybody may open links": (
        wiring.tls_findings,
        "lets in",
        lambda o: config(o, "target").pop("SPECMESH_TARGET_SERVER__TLS__ALLOWED_PEERS"),
    ),
    "certificate for another name": (
        wiring.tls_findings,
        "does not name",
        lambda o: spec(o, "Certificate", "draft").update(dnsNames=["draft.specmesh.svc"]),
    ),
    "shared identity": (
        wiring.tls_findings,
        "shared",
        lambda o: spec(o, "Certificate", "client").update(
            uris=spec(o, "Certificate", "coordinator")["uris"]
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """The rule is silent before the fault is planted in `prod` and names it after."""
    rule, expected, plant = FAULTS[fault]
    objects = overlay("prod")
    assert rule(objects) == []
    plant(objects)
    findings = rule(objects)
    assert any(expected in found for found in findings), findings


def test_a_hash_that_is_missing_is_found() -> None:
    """A ConfigMap under a fixed name would change without rolling anything."""
    objects = overlay("plain")
    objects.append({"kind": "ConfigMap", "metadata": {"name": "draft"}, "data": {}})
    assert [f for f in wiring.settings_findings(objects) if "no hash" in f] == [
        "ConfigMap/draft: its name carries no hash"
    ]
