"""The Dockerfile and the manifests speak of the same images, and no weights get in."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tomllib

from specmesh.config import PORTS
from tests.deploy.manifests import K8S, OVERLAYS, ROOT, overlay, template, templates
from tests.deploy.pods import all_containers
from tests.lock import makefile_variable

LINES = re.sub(r"\\\n", " ", (K8S / "Dockerfile").read_text()).splitlines()
STAGES = {
    match[2]: match[1]
    for line in LINES
    if (match := re.fullmatch(r"FROM (\S+) AS (\S+)", line)) is not None
}
SERVICES = ("draft", "target", "coordinator")


def stage(name: str) -> list[str]:
    """The instructions of one stage."""
    begin = next(i for i, line in enumerate(LINES) if line.endswith(f" AS {name}"))
    rest = LINES[begin + 1 :]
    end = next((i for i, line in enumerate(rest) if line.startswith("FROM ")), len(rest))
    return [line for line in rest[:end] if line and not line.startswith("#")]


def ancestry(name: str) -> list[str]:
    """The stages whose file systems an image has, outermost last."""
    return [name, *ancestry(STAGES[name])] if name in STAGES else []


def test_three_targets_build_on_one_another() -> None:
    """Multi-stage: builder and runtime, and one target per service that never holds the builder."""
    assert set(SERVICES) <= set(STAGES)
    for name in SERVICES:
        assert "runtime" in ancestry(name)
        assert "builder" not in ancestry(name)
    assert all(source in STAGES or source == "${PYTHON}" for source in STAGES.values())


def test_images_run_as_the_manifests_user() -> None:
    """The last USER of every target is the manifests' non-root user; commands are in exec form."""
    pod = template(overlay("plain"), "target").pod
    user = f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    for name in SERVICES:
        lines = [line for each in reversed(ancestry(name)) for line in stage(each)]
        assert [line for line in lines if line.startswith("USER ")][-1] == user
        assert [line for line in lines if line.startswith("CMD ")][-1].startswith('CMD ["python"')


def test_exposed_ports_are_the_code_s() -> None:
    """EXPOSE names the service's ports of specmesh.config.PORTS."""
    for name in SERVICES:
        (exposed,) = (line for line in stage(name) if line.startswith("EXPOSE"))
        table = {PORTS[name], PORTS[f"{name}_health"], PORTS[f"{name}_metrics"]}
        assert {int(port) for port in exposed.split()[1:]} == table


def test_manifests_use_these_images_at_this_version() -> None:
    """Every own image is a target of the Dockerfile, tagged with the project's version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in OVERLAYS:
        images = {c["image"] for each in templates(overlay(name)) for c in all_containers(each)}
        own = {image for image in images if image.startswith("specmesh-")}
        assert own == {f"specmesh-{each}:{version}" for each in SERVICES}


def test_what_is_installed_is_what_is_tested() -> None:
    """The image's torch and Triton are the Makefile's, the base image has a full version."""
    text, makefile = "\n".join(LINES), (ROOT / "Makefile").read_text()
    for name in ("torch", "triton"):
        assert set(re.findall(rf"\b{name}==\S+?(?=[\s)])", text)) == set(
            re.findall(rf"\b{name}==\S+", makefile)
        )
    assert re.search(r"^ARG PYTHON=python:\d+\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    assert ":latest" not in text


def test_images_are_installed_from_the_lock_by_hash() -> None:
    """Every pip install is of torch, of Triton, from lock files by hash, or of this package alone;
    the lock files hold no weights."""
    installs = re.findall(r"pip install ([^&]*?) *(?=&&|\)|$)", "\n".join(LINES), re.MULTILINE)
    (from_lock,) = (each for each in installs if " -r " in each)
    assert from_lock.startswith("--no-deps --require-hashes -r requirements.lock -r ")
    others = {each for each in installs if each != from_lock}
    assert "--no-deps --no-build-isolation ." in others
    assert all(
        each.endswith(" .") or re.search(r"\b(torch|triton)==\S+$", each) for each in others
    ), others
    copied = [
        source for line in stage("builder") if line.startswith("COPY ") for source in line.split()
    ]
    model = makefile_variable("MODEL_PACKAGE")
    for name in re.findall(r"-r (\S+)", from_lock):
        assert name in copied
        assert model not in (ROOT / name).read_text()


def test_sources_exist_and_weights_stay_out() -> None:
    """Everything copied exists and is let in by the ignore file; no tracked weights are."""
    rules = [
        line
        for line in (K8S / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    kept_out = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    copied = {
        source
        for line in stage("builder")
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    }
    assert rules[0] == "*"
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)
    tracked = subprocess.run(
        ("git", "ls-files", *sorted(copied)), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    inside = [
        name
        for name in tracked
        if not any(fnmatch.fnmatch(name.rsplit("/", 1)[-1], rule) for rule in kept_out)
    ]
    assert "specmesh/data/smollm2-draft/config.json" in inside
    assert max((ROOT / name).stat().st_size for name in inside) < 1 << 20
