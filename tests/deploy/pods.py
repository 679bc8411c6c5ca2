"""Rules for pod templates: the restricted security profile and more, probes, images, grace.

Each rule returns findings, one line each. There are no exceptions to grant: what cannot follow a
rule does not belong in k8s/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from specmesh.rpc import LIVENESS, READINESS
from tests.deploy.manifests import Object, Template, environment, of_kind, one, templates

# Volumes of the restricted profile, without projected (service-account tokens) and the like.
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC", "hostUsers", "shareProcessNamespace")
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?")
SECRET_NAME = re.compile(r"PASSWORD|TOKEN$|SECRET|API_KEY$|PRIVATE_KEY_DATA")
STREAMS_S = 15  # after the drain, for streams and exporters to close


def all_containers(each: Template) -> list[Object]:
    return [*each.pod.get("initContainers", ()), *each.containers]


def security_findings(objects: Sequence[Object]) -> list[str]:
    """Pod security `restricted`, plus: read-only root, own user, no token, bounded resources."""
    findings = []
    for each in templates(objects):
        findings += [f"{each.owner}: {found}" for found in _pod_security(each, objects)]
        for container in all_containers(each):
            where = f"{each.owner}: {container['name']}"
            findings += [f"{where}: {found}" for found in _container_security(container)]
            findings += [f"{where}: {found}" for found in _mounts(each, container)]
            findings += [f"{where}: {found}" for found in _environment(container)]
    for namespace in of_kind(objects, "Namespace"):
        labels = namespace["metadata"]["labels"]
        for mode in ("enforce", "audit", "warn"):
            if labels.get(f"pod-security.kubernetes.io/{mode}") != "restricted":
                findings.append(f"namespace: {mode} is not restricted")
            if not labels.get(f"pod-security.kubernetes.io/{mode}-version", "").startswith("v1."):
                findings.append(f"namespace: {mode}-version is not pinned")
    for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret"):
        findings += [f"{kind}: nothing here needs one" for _ in of_kind(objects, kind)]
    return findings


def _pod_security(each: Template, objects: Sequence[Object]) -> Iterator[str]:
    pod = each.pod
    context = pod.get("securityContext", {})
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not set"
    if min(context.get("runAsUser", 0), context.get("runAsGroup", 0)) < 10000:
        yield "runAsUser and runAsGroup must be set, at least 10000"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "seccompProfile is not RuntimeDefault"
    if context.get("sysctls") or context.get("supplementalGroups"):
        yield "sysctls and supplemental groups are not for us"
    for field in HOST_FIELDS:
        if pod.get(field):
            yield f"{field} is set"
    if pod.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken is not false"
    account = pod.get("serviceAccountName", "default")
    known = {found["metadata"]["name"]: found for found in of_kind(objects, "ServiceAccount")}
    if account not in known or known[account].get("automountServiceAccountToken") is not False:
        yield f"service account {account} is not one of ours without a token"
    if pod.get("enableServiceLinks") is not False:
        yield "enableServiceLinks is not false: its variables would be taken for settings"
    for volume in pod.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']} is of kind {kinds}"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} has no sizeLimit"
        if "secret" in volume and volume["secret"].get("defaultMode") != 0o440:
            yield f"volume {volume['name']} is not of mode 0440"


def _container_security(container: Object) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem is not true"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "capabilities are not exactly: drop ALL"
    for field in ("runAsUser", "runAsNonRoot", "seccompProfile", "procMount", "seLinuxOptions"):
        if field in context:
            yield f"{field} is the pod's to say"
    for port in container.get("ports", ()):
        if "hostPort" in port or "hostIP" in port:
            yield f"port {port['name']} is bound on the host"
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= set(resources.get("requests", {})):
        yield "requests no cpu and memory"
    if "memory" not in resources.get("limits", {}):
        yield "has no memory limit"
    if not PINNED.fullmatch(container["image"]):
        yield f"image {container['image']} is not pinned to a version"


def _mounts(each: Template, container: Object) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in each.pod.get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        volume = volumes.get(mount["name"])
        if volume is None:
            yield f"mounts {mount['name']}, which is no volume"
        elif not (
            "emptyDir" in volume
            or mount.get("readOnly") is True
            or each.component == "model-loader"  # the one that fills the volume
        ):
            yield f"mounts {mount['name']} writable"


def _environment(container: Object) -> Iterator[str]:
    for entry in container.get("env", ()):
        if "secretKeyRef" in entry.get("valueFrom", {}) or SECRET_NAME.search(entry["name"]):
            yield f"{entry['name']}: secrets are files, not variables"
    for source in container.get("envFrom", ()):
        if "secretRef" in source:
            yield "secrets are files, not variables"


# ---------------------------------------------------------------- probes


def probe_findings(objects: Sequence[Object]) -> list[str]:
    """All three probes everywhere, on ports the container has; gRPC ones ask for our names."""
    findings = []
    for each in templates(objects):
        for container in each.containers:
            where = f"{each.owner}: {container['name']}"
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                if name not in container:
                    findings.append(f"{where}: no {name}")
                    continue
                findings += [
                    f"{where}: {name}: {found}" for found in _probe(container, container[name])
                ]
            findings += [f"{where}: {found}" for found in _grpc_names(container)]
    return findings


def _probe(container: Object, probe: Object) -> Iterator[str]:
    numbers = {port["containerPort"] for port in container.get("ports", ())}
    names = {port["name"] for port in container.get("ports", ())}
    kinds = {"grpc", "httpGet", "exec", "tcpSocket"} & set(probe)
    if kinds == {"grpc"}:
        if probe["grpc"]["port"] not in numbers:
            yield f"port {probe['grpc']['port']} is none of the container's"
        if probe["grpc"].get("service") not in (READINESS, LIVENESS):
            yield f"service {probe['grpc'].get('service')} is none that the code answers"
    elif kinds == {"httpGet"}:
        if probe["httpGet"]["port"] not in names:
            yield f"port {probe['httpGet']['port']} is none of the container's"
    elif kinds != {"exec"}:
        yield f"of kind {kinds}"


def _grpc_names(container: Object) -> Iterator[str]:
    def asked(name: str) -> str | None:
        found: str | None = container.get(name, {}).get("grpc", {}).get("service")
        return found

    if "grpc" not in container.get("readinessProbe", {}):
        if container["name"] in ("target", "draft", "coordinator"):
            yield "our own services are probed by gRPC"
        return
    if asked("readinessProbe") != READINESS:
        yield f"readiness must ask for {READINESS}"
    if asked("livenessProbe") != LIVENESS:
        yield f"liveness must ask for {LIVENESS}: a draining or loading pod is not dead"
    ports = {
        container[name]["grpc"]["port"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
        if "grpc" in container.get(name, {})
    }
    (health,) = (p["containerPort"] for p in container["ports"] if p["name"] == "health")
    if ports != {health}:
        yield f"probes ask ports {ports}, health is on {health}"


def startup_s(container: Object) -> int:
    """How long a container may take to start."""
    probe = container["startupProbe"]
    return int(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


# ---------------------------------------------------------------- the end of a pod


def notice_s(container: Object) -> int:
    """What a preStop hook waits before the drain."""
    hook = container["lifecycle"]["preStop"]
    if "sleep" in hook:
        return int(hook["sleep"]["seconds"])
    command = hook["exec"]["command"]
    return int(command[command.index("--notice-s") + 1])


def grace_findings(objects: Sequence[Object]) -> list[str]:
    """Pods outlive their drain, the drain outlives the longest generation."""
    findings = []
    found = {each.component: each for each in templates(objects)}
    target = found["target"]
    speed = float(target.body["metadata"]["annotations"]["specmesh.dev/slowest-tokens-per-second"])
    context_len = _number(objects, target, "SPECMESH_TARGET_ENGINE__MAX_CONTEXT_LEN")
    longest_s = math.ceil(context_len / speed)
    for name in ("target", "draft", "coordinator"):
        each = found[name]
        drain_s = _number(objects, each, f"SPECMESH_{name.upper()}_SERVER__DRAIN_GRACE_S")
        if drain_s < longest_s:
            findings.append(f"{each.owner}: drains for {drain_s:g} s, generations take {longest_s}")
        needed_s = notice_s(each.containers[0]) + drain_s + STREAMS_S
        if each.pod["terminationGracePeriodSeconds"] < needed_s:
            findings.append(f"{each.owner}: grace below {needed_s:g} s")
    coordinator_s = found["coordinator"].pod["terminationGracePeriodSeconds"]
    if "coordinator-head" in found:
        head = found["coordinator-head"]
        if notice_s(head.containers[0]) < coordinator_s:
            findings.append(f"{head.owner}: ends before the coordinators, which need it")
        if head.pod["terminationGracePeriodSeconds"] <= notice_s(head.containers[0]):
            findings.append(f"{head.owner}: its grace is used up by its preStop")
        service = one(objects, "RayService", "coordinator")["spec"]
        if service["rayClusterDeletionDelaySeconds"] <= coordinator_s:
            findings.append("RayService/coordinator: an upgrade cuts what still streams")
    return findings


def _number(objects: Sequence[Object], each: Template, name: str) -> float:
    return float(environment(objects, each.containers[0], "pod")[name])
