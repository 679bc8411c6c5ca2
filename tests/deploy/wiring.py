"""Rules for what holds the objects together: settings, ports, selectors, references, policies.

The code's own tables are the measure: specmesh.config for settings and PORTS, coordinator.app for
Ray. Each rule returns findings, one line each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import yaml

from coordinator.app import RAY_ENVIRONMENT, SLOT
from specmesh.config import (
    PORTS,
    CoordinatorSettings,
    DraftSettings,
    TargetSettings,
    setting_names,
    settings_from_environment,
)
from specmesh.errors import ConfigError
from tests.deploy.manifests import (
    NAMESPACE,
    PART_OF,
    ROOT,
    Object,
    Template,
    environment,
    of_kind,
    one,
    selects,
    template,
    templates,
)

SETTINGS: Mapping[str, type[Any]] = {
    "draft": DraftSettings,
    "target": TargetSettings,
    "coordinator": CoordinatorSettings,
}
OTLP, DASHBOARD, GCS = 4317, 8265, 6379
# Secrets that their owner makes; certificates bring the others.
GIVEN_SECRETS = {"api-keys"}
HASHED = re.compile(r".+-[a-z0-9]{10}")


def settings_of(objects: Sequence[Object], component: str) -> Any:
    """A service's settings as its container would read them. Raises ConfigError."""
    container = template(objects, component).containers[0]
    with mock.patch.dict(os.environ, environment(objects, container, "pod-0"), clear=True):
        return settings_from_environment(SETTINGS[component], {})


def settings_findings(objects: Sequence[Object]) -> list[str]:
    """Every key is a setting of the one service that reads it, and the values are accepted."""
    findings = []
    known = {
        f"SPECMESH_{component.upper()}_{'__'.join(path).upper()}"
        for component, settings in SETTINGS.items()
        for path in setting_names(settings)
    }
    for each in of_kind(objects, "ConfigMap"):
        name = each["metadata"]["name"]
        findings += [
            f"ConfigMap/{name}: {key} is no setting"
            for key in each["data"]
            if key.startswith("SPECMESH_") and key not in known
        ]
        if not HASHED.fullmatch(name):
            findings.append(f"ConfigMap/{name}: its name carries no hash")
    for component in SETTINGS:
        try:
            settings = settings_of(objects, component)
        except ConfigError as error:
            findings.append(f"{component}: {error}")
            continue
        findings += [f"{component}: {found}" for found in _addresses(objects, component, settings)]
    return findings


def _addresses(objects: Sequence[Object], component: str, settings: Any) -> Iterator[str]:
    telemetry, server = settings.telemetry, settings.server
    ports = {port["name"]: port["containerPort"] for port in _ports(template(objects, component))}
    said = {"grpc": server.port, "health": server.health_port, "metrics": telemetry.metrics_port}
    if ports != said:
        yield f"container ports {ports}, settings {said}"
    table = {
        "grpc": PORTS[component],
        "health": PORTS[f"{component}_health"],
        "metrics": PORTS[f"{component}_metrics"],
    }
    if said != table:
        yield f"settings {said}, the code's table {table}"
    if {server.host, telemetry.metrics_host} != {"0.0.0.0"}:
        yield "listens on loopback only"
    endpoint = urlsplit(telemetry.otlp_endpoint or "")
    services = {each["metadata"]["name"]: each for each in of_kind(objects, "Service")}
    open_ports = [port["port"] for port in services[endpoint.hostname or ""]["spec"]["ports"]]
    if endpoint.port not in open_ports:
        yield f"spans go to {telemetry.otlp_endpoint}, where nothing listens"
    if telemetry.trace_dir is not None or telemetry.record_content:
        yield "prompts and trace files have no place on a cluster"


def _ports(each: Template) -> list[Object]:
    return [port for container in each.containers for port in container.get("ports", ())]


# ---------------------------------------------------------------- replicas and Ray


def replica_findings(objects: Sequence[Object]) -> list[str]:
    """The coordinator's list of replicas is what the StatefulSets make; Ray fits the code."""
    findings = []
    settings = settings_of(objects, "coordinator")
    for component, listed in (("target", settings.targets), ("draft", settings.drafts)):
        made = one(objects, "StatefulSet", component)["spec"]
        service = made["serviceName"]
        expected = tuple(
            f"{component}-{index}.{service}.{NAMESPACE}.svc:{PORTS[component]}"
            for index in range(made["replicas"])
        )
        if listed != expected:
            findings.append(f"coordinator: {component}s {listed}, there are {expected}")
        if one(objects, "Service", service)["spec"].get("clusterIP") != "None":
            findings.append(f"Service/{service}: not headless, so its pods have no names")
    gpu = [
        component
        for component in ("draft", "target")
        if settings_of(objects, component).engine.device.startswith("cuda")
    ]
    for component in ("draft", "target"):
        resources = template(objects, component).containers[0]["resources"]
        counts = {resources[part].get("nvidia.com/gpu", 0) for part in ("requests", "limits")}
        if counts != {1 if component in gpu else 0}:
            findings.append(f"{component}: device and GPU resources disagree")
    for each in of_kind(objects, "RayService"):
        findings += _ray(objects, each["spec"]["rayClusterConfig"], settings)
    return findings


def _ray(objects: Sequence[Object], cluster: Object, settings: Any) -> Iterator[str]:
    (group,) = cluster["workerGroupSpecs"]
    counts = {group["replicas"], group["minReplicas"], group["maxReplicas"]}
    if counts != {settings.ray.num_replicas}:
        yield f"RayService: {counts} worker pods for {settings.ray.num_replicas} replicas"
    if group["rayStartParams"]["resources"] != json.dumps(json.dumps({SLOT: 1})):
        yield "RayService: a worker pod does not offer one slot"
    if cluster["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield "RayService: replicas may land on the head"
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    if pinned is None or pinned[1] != cluster["rayVersion"]:
        yield f"RayService: rayVersion {cluster['rayVersion']}, constraints.txt has another"
    if settings.ray.drain_file is None or settings.ray.drain_file.parent != Path("/tmp"):
        yield "RayService: no drain file where the container may write"
    if settings.instance_id is not None:
        yield "RayService: all replicas would have one instance id"
    (ray_map,) = (
        each["data"]
        for each in of_kind(objects, "ConfigMap")
        if each["metadata"]["name"].startswith("coordinator-ray-")
    )
    ray = {key: value for key, value in ray_map.items() if key.startswith(("RAY_", "GRPC_"))}
    if ray != {**RAY_ENVIRONMENT, "RAY_LOG_TO_STDERR": "1"}:
        yield "RayService: Ray's environment is not that of coordinator.app"
    for spec in (cluster["headGroupSpec"], group):
        sources = [s["configMapRef"]["name"] for s in _first(spec)["envFrom"]]
        if len(sources) != 2 or not all(HASHED.fullmatch(name) for name in sources):
            yield "RayService: a container lacks one of its two ConfigMaps"


def _first(spec: Object) -> Object:
    found: Object = spec["template"]["spec"]["containers"][0]
    return found


# ---------------------------------------------------------------- selectors and references


def selector_findings(objects: Sequence[Object]) -> list[str]:
    """Whatever selects pods selects some, and a workload's selector its own."""
    findings = []
    found = templates(objects)
    for each in found:
        if each.selector is not None and not each.selector.items() <= each.labels.items():
            findings.append(f"{each.owner}: does not select its own pods")
        if not PART_OF.items() <= each.labels.items():
            findings.append(f"{each.owner}: lacks the label that policies go by")
        terms = [c["labelSelector"] for c in each.pod.get("topologySpreadConstraints", ())]
        affinity = each.pod.get("affinity", {}).get("podAffinity", {})
        near = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        terms += [term["podAffinityTerm"]["labelSelector"] for term in near]
        findings += [
            f"{each.owner}: places itself by pods that do not exist"
            for term in terms
            if not any(selects(term, other.labels) for other in found)
        ]
    for each in of_kind(objects, "PodDisruptionBudget", "PodMonitor", "NetworkPolicy"):
        spec = each["spec"]
        selector = spec.get("selector", spec.get("podSelector"))
        if not any(selects(selector, other.labels) for other in found):
            findings.append(f"{each['kind']}/{each['metadata']['name']}: selects no pod")
    for each in of_kind(objects, "PodMonitor"):
        for endpoint in each["spec"]["podMetricsEndpoints"]:
            for other in found:
                if selects(each["spec"]["selector"], other.labels):
                    names = [port["name"] for port in _ports(other)]
                    if endpoint["port"] not in names:
                        findings.append(f"PodMonitor/{each['metadata']['name']}: no such port")
    for each in of_kind(objects, "Service"):
        findings += _service(each, found)
    return findings


def _service(service: Object, found: Sequence[Template]) -> Iterator[str]:
    where = f"Service/{service['metadata']['name']}"
    selected = [e for e in found if service["spec"]["selector"].items() <= e.labels.items()]
    if not selected:
        yield f"{where}: selects no pod"
    for each in selected:
        ports = {port["name"]: port["containerPort"] for port in _ports(each)}
        for port in service["spec"]["ports"]:
            if ports.get(port["targetPort"]) != port["port"]:
                yield f"{where}: port {port['port']} is not {each.owner}'s {port['targetPort']}"


def reference_findings(objects: Sequence[Object]) -> list[str]:
    """What pods name exists; everything is in our namespace, once."""
    findings = []
    names: dict[str, set[str]] = {}
    for each in objects:
        kind, name = each["kind"], each["metadata"]["name"]
        if name in names.setdefault(kind, set()):
            findings.append(f"{kind}/{name}: twice")
        names[kind].add(name)
        if kind != "Namespace" and each["metadata"].get("namespace") != NAMESPACE:
            findings.append(f"{kind}/{name}: in another namespace")
    secrets = GIVEN_SECRETS | {
        each["spec"]["secretName"] for each in of_kind(objects, "Certificate")
    }
    for each in templates(objects):
        for volume in each.pod.get("volumes", ()):
            wanted = {
                "ConfigMap": volume.get("configMap", {}).get("name"),
                "PersistentVolumeClaim": volume.get("persistentVolumeClaim", {}).get("claimName"),
            }
            for kind, name in wanted.items():
                if name is not None and name not in names.get(kind, ()):
                    findings.append(f"{each.owner}: there is no {kind} {name}")
            secret = volume.get("secret", {}).get("secretName")
            if secret is not None and secret not in secrets:
                findings.append(f"{each.owner}: nobody makes the Secret {secret}")
        findings += _files(objects, each)
    return findings


def _files(objects: Sequence[Object], each: Template) -> Iterator[str]:
    """Paths in settings lie on volumes, and not on scratch ones."""
    pod_volumes = {volume["name"]: volume for volume in each.pod.get("volumes", ())}
    for container in each.containers:
        if each.component == "coordinator-head":  # builds the application, opens no file
            continue
        mounts = {
            mount["mountPath"]: pod_volumes[mount["name"]]
            for mount in container.get("volumeMounts", ())
            if mount["name"] in pod_volumes
        }
        for name, value in environment(objects, container, "pod").items():
            if not name.startswith("SPECMESH_") or not value.startswith("/"):
                continue
            holders = [m for path, m in mounts.items() if Path(path) in Path(value).parents]
            is_scratch = name.endswith("DRAIN_FILE")
            if len(holders) != 1 or ("emptyDir" in holders[0]) is not is_scratch:
                yield f"{each.owner}: {name}={value} lies on no volume for it"


def budget_findings(objects: Sequence[Object]) -> list[str]:
    """Every replicated service has one budget that lets exactly one pod go."""
    findings = []
    budgets = of_kind(objects, "PodDisruptionBudget")
    for component in ("draft", "target", "coordinator"):
        each = template(objects, component)
        matching = [b["spec"] for b in budgets if selects(b["spec"]["selector"], each.labels)]
        # Without a scale subresource the disruption controller takes only a number of pods that
        # must stay (https://kubernetes.io/docs/tasks/run-application/configure-pdb).
        by_ray = each.owner.startswith("RayService")
        rule = {"minAvailable": each.replicas - 1} if by_ray else {"maxUnavailable": 1}
        said = [{k: v for k, v in spec.items() if k != "selector"} for spec in matching]
        if said != [rule]:
            findings.append(f"{component}: disruption budgets {said}, expected {rule}")
    if len(budgets) != 3:
        findings.append(f"{len(budgets)} disruption budgets")
    return findings


# ---------------------------------------------------------------- network policies

Edge = tuple[str, str, str]


@dataclass(frozen=True)
class Peer:
    """One side of an edge: a pod template of ours, or pods elsewhere by their labels."""

    name: str
    labels: Mapping[str, str]
    namespace: Mapping[str, str]


def _outside(objects: Sequence[Object]) -> Iterator[Peer]:
    """Pods elsewhere that policies speak of."""
    yield Peer("clients", {}, {"specmesh.dev/client": "allowed"})
    yield Peer("dns", {"k8s-app": "kube-dns"}, _named("kube-system"))
    yield Peer("operator", {"app.kubernetes.io/name": "kuberay-operator"}, _named("kuberay-system"))
    yield Peer("prometheus", {"app.kubernetes.io/name": "prometheus"}, _named("monitoring"))
    yield Peer("stranger", {}, _named("elsewhere"))
    yield Peer("neighbour", {}, _named(NAMESPACE))


def _named(name: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": name}


def allowed_edges(objects: Sequence[Object]) -> tuple[set[Edge], list[str]]:
    """(source, destination, port) of what policies let through, and edges open at one end only."""
    inside = [Peer(each.component, each.labels, _named(NAMESPACE)) for each in templates(objects)]
    outside = list(_outside(objects))
    policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
    edges: set[Edge] = set()
    halves = []
    for source in (*inside, *outside):
        for destination in (*inside, *outside):
            if source in outside and destination in outside:
                continue
            out = _ports_through(policies, source, destination, "egress", source in inside)
            into = _ports_through(policies, destination, source, "ingress", destination in inside)
            if out is None and into is None:
                continue
            both = out if into is None else into if out is None else out & into
            edges |= {(source.name, destination.name, port) for port in both}
            if source in inside and destination in inside and out != into:
                halves.append(f"{source.name} -> {destination.name}: sent {out}, taken {into}")
    return edges, halves


def _ports_through(
    policies: Sequence[Object], pod: Peer, other: Peer, direction: str, is_ours: bool
) -> set[str] | None:
    """Ports that the policies of `pod` open towards `other`; None where none rules over it."""
    if not is_ours:
        return None
    ruling = [
        policy
        for policy in policies
        if selects(policy["podSelector"], pod.labels)
        and direction.capitalize() in policy["policyTypes"]
    ]
    if not ruling:
        return {"any"}
    key = "to" if direction == "egress" else "from"
    found: set[str] = set()
    for rule in (rule for policy in ruling for rule in policy.get(direction, ())):
        if key not in rule or any(_is_peer(peer, other) for peer in rule[key]):
            found |= {_port(port) for port in rule.get("ports", ({"port": "any"},))}
    return found


def _is_peer(peer: Object, other: Peer) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector"}, peer
    in_namespace = (
        selects(peer["namespaceSelector"], other.namespace)
        if "namespaceSelector" in peer
        else other.namespace == _named(NAMESPACE)
    )
    return in_namespace and selects(peer.get("podSelector", {}), other.labels)


def _port(port: Object) -> str:
    last = f"-{port['endPort']}" if "endPort" in port else ""
    return f"{port.get('protocol', '')}/{port['port']}{last}"


def expected_edges(objects: Sequence[Object]) -> set[Edge]:
    """The edges that the code uses, by its own table of ports."""
    components = {each.component for each in templates(objects)}

    def tcp(port: object) -> str:
        return f"TCP/{port}"

    edges = {("clients", "coordinator", tcp(PORTS["coordinator"]))}
    for service in ("draft", "target"):
        edges.add(("coordinator", service, tcp(PORTS[service])))
    for service in ("draft", "target", "coordinator"):
        edges.add((service, "otel-collector", tcp(OTLP)))
        if of_kind(objects, "PodMonitor"):
            edges.add(("prometheus", service, tcp(PORTS[f"{service}_metrics"])))
    if "jaeger" in components:
        edges.add(("otel-collector", "jaeger", tcp(OTLP)))
    for component in components:
        edges |= {(component, "dns", "UDP/53"), (component, "dns", "TCP/53")}
    if "coordinator-head" in components:
        edges.add(("operator", "coordinator-head", tcp(DASHBOARD)))
        both = ("coordinator", "coordinator-head")
        edges |= {(a, b, port) for a in both for b in both for port in _ray_ports(objects)}
    return edges


def _ray_ports(objects: Sequence[Object]) -> set[str]:
    """What the pods of a Ray cluster use among themselves, as rayStartParams pin it."""
    cluster = one(objects, "RayService", "coordinator")["spec"]["rayClusterConfig"]
    found = set()
    for spec in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        params = spec["rayStartParams"]
        pinned = {
            params[name]
            for name in (
                "node-manager-port",
                "object-manager-port",
                "runtime-env-agent-port",
                "dashboard-agent-grpc-port",
                "dashboard-agent-listen-port",
            )
        }
        workers = f"{params['min-worker-port']}-{params['max-worker-port']}"
        found.add(frozenset({*pinned, str(GCS), workers}))
    (ports,) = found  # equal on head and workers, as the policies are
    return {f"TCP/{port}" for port in ports}


def policy_findings(objects: Sequence[Object]) -> list[str]:
    """Everything is denied but the edges that the code uses, and those are open at both ends."""
    edges, halves = allowed_edges(objects)
    expected = expected_edges(objects)
    denies = [
        each
        for each in of_kind(objects, "NetworkPolicy")
        if each["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ]
    return [
        *(f"open: {edge}" for edge in sorted(edges - expected)),
        *(f"closed: {edge}" for edge in sorted(expected - edges)),
        *(f"open at one end: {half}" for half in halves),
        *(["no policy denies by default"] if len(denies) != 1 else []),
    ]


# ---------------------------------------------------------------- TLS


def tls_findings(objects: Sequence[Object]) -> list[str]:
    """With certificates: links are mutual TLS and only the coordinator may open them."""
    certificates = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Certificate")
    }
    if not certificates:
        return []
    findings = []
    coordinator = settings_of(objects, "coordinator")
    (identity,) = certificates["coordinator"]["uris"]
    if not coordinator.link_tls.enabled:
        findings.append("coordinator: calls without a certificate")
    for component in SETTINGS:
        server = settings_of(objects, component).server
        certificate = certificates[component]
        allowed = ("client" if component == "coordinator" else "coordinator",)
        expected = tuple(certificates[name]["uris"][0] for name in allowed)
        if not server.tls.enabled or server.tls.allowed_peers != expected:
            findings.append(f"{component}: lets in {server.tls.allowed_peers}, not {expected}")
        if server.health_port in (None, server.port):
            findings.append(f"{component}: probes would need certificates")
        if "server auth" not in certificate["usages"]:
            findings.append(f"{component}: its certificate does not serve")
    for component, addresses in (("target", coordinator.targets), ("draft", coordinator.drafts)):
        for address in addresses:
            host = address.rsplit(":", 1)[0]
            wildcard = "*." + host.split(".", 1)[1]
            if not {host, wildcard} & set(certificates[component]["dnsNames"]):
                findings.append(f"{component}: its certificate does not name {host}")
    uris = [uri for each in certificates.values() for uri in each.get("uris", ())]
    if len(set(uris)) != len(uris) or not identity.startswith("spiffe://"):
        findings.append("identities are shared or are no SPIFFE ids")
    return findings


def collector_findings(objects: Sequence[Object]) -> list[str]:
    """The collector's pipeline uses what is defined, memory limit first, and sends on."""
    (data,) = (
        each["data"]
        for each in of_kind(objects, "ConfigMap")
        if each["metadata"]["name"].startswith("otel-collector-")
    )
    config = yaml.safe_load(data["config.yaml"])
    findings = []
    for name, pipeline in config["service"]["pipelines"].items():
        for part in ("receivers", "processors", "exporters"):
            missing = set(pipeline[part]) - set(config[part])
            findings += [f"collector: {name} uses {each}, which is not defined" for each in missing]
        if pipeline["processors"][0] != "memory_limiter":
            findings.append(f"collector: {name} limits memory too late")
    services = {each["metadata"]["name"]: each for each in of_kind(objects, "Service")}
    for exporter in config["exporters"].values():
        if "endpoint" in exporter:
            host, port = exporter["endpoint"].split(":")
            ports = [each["port"] for each in services[host]["spec"]["ports"]]
            if int(port) not in ports:
                findings.append(f"collector: nothing listens at {exporter['endpoint']}")
    return findings
