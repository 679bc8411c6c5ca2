"""Strict schema checks: built-in kinds by Kubernetes' own schemas, custom kinds by their CRDs.

Each check returns findings, one line each; none means clean. Unknown fields are findings, although
an API server would drop them silently: that is how a misspelt field shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from pydantic import BaseModel

from tests.deploy.manifests import ROOT, Object, of_kind

KUBERNETES = "1.35.0"
OLDEST_KUBERNETES = "1.30.0"  # what k8s/README.md asks for
KEPT = {
    *("type", "enum", "required", "pattern", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
}
BUILT_IN = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1", "batch/v1")


def name_of(each: Object) -> str:
    return f"{each['kind']}/{each['metadata'].get('name')}"


def crd_folder() -> Path | None:
    """Where CRDs are; None without any."""
    named = os.environ.get("SPECMESH_CRD_DIR")
    folder = Path(named) if named else ROOT.parent / "shared" / "crds"
    return folder if list(folder.glob("*.yaml")) else None


def built_in_findings(objects: Sequence[Object], version: str = KUBERNETES) -> list[str]:
    findings = []
    for each in objects:
        if each["apiVersion"] not in BUILT_IN:
            continue
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            findings.append(f"{name_of(each)}: {path}: {error.message}")
    return findings


def custom_findings(objects: Sequence[Object], folder: Path) -> list[str]:
    """Every kind that is not built in, against its CRD; a kind without one is a finding."""
    schemas = _crd_schemas(folder)
    findings = []
    for each in objects:
        if each["apiVersion"] in BUILT_IN:
            continue
        schema = schemas.get((each["apiVersion"], each["kind"]))
        if schema is None:
            findings.append(f"{name_of(each)}: no CRD for {each['apiVersion']}")
            continue
        validator = jsonschema.Draft7Validator(schema)
        for error in validator.iter_errors(each):
            path = ".".join(str(part) for part in error.absolute_path)
            findings.append(f"{name_of(each)}: {path}: {error.message[:200]}")
    return findings


@cache
def _crd_schemas(folder: Path) -> dict[tuple[str, str], Any]:
    schemas = {}
    for file in sorted(folder.glob("*.yaml")):
        if not _is_used(file):
            continue
        crd = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # checked by rules of its own
            schemas[f"{group}/{version['name']}", kind] = schema
    return schemas


def _is_used(file: Path) -> bool:
    """Large CRDs of kinds that k8s/ has none of are not read."""
    kinds = ("rayservices", "certificates", "issuers", "podmonitors", "prometheusrules")
    return file.stem.split("_")[-1] in kinds or file.stat().st_size < 200_000


def _strict(schema: Any) -> Any:
    """JSON Schema of an openAPIV3Schema: closed objects, int-or-string, null, defaults."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            out[key] = {name: _strict(each) for name, each in value.items()}
        elif key in ("items", "additionalProperties", "allOf", "anyOf", "oneOf", "not"):
            out[key] = _strict(value)
        elif key in KEPT:
            out[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    elif schema.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    properties = out.get("properties")
    if isinstance(properties, dict):
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
        if "required" in out:
            defaults = {n for n, each in schema["properties"].items() if "default" in each}
            out["required"] = [n for n in out["required"] if n not in defaults]
    return out


# ---------------------------------------------------------------- Serve


def serve_findings(objects: Sequence[Object]) -> list[str]:
    """The Serve config that the API server takes as a mere string."""
    from ray.serve.schema import ServeDeploySchema

    findings = []
    for each in of_kind(objects, "RayService"):
        config = yaml.safe_load(each["spec"]["serveConfigV2"])
        try:
            parsed = ServeDeploySchema.model_validate(config)
        except ValueError as error:
            findings.append(f"{name_of(each)}: serveConfigV2: {error}")
            continue
        findings += [
            f"{name_of(each)}: serveConfigV2: unknown key {key}" for key in _unknown(config, parsed)
        ]
        if config.get("proxy_location") != "Disabled":
            findings.append(f"{name_of(each)}: serveConfigV2: Serve's proxies are on")
    return findings


def _unknown(data: Any, model: Any, path: str = "") -> Iterator[str]:
    """Keys of data that the model it was read into has no field for."""
    if isinstance(model, BaseModel) and isinstance(data, Mapping):
        for key, value in data.items():
            if key not in type(model).model_fields:
                yield f"{path}{key}"
            else:
                yield from _unknown(value, getattr(model, key), f"{path}{key}.")
    elif isinstance(model, list) and isinstance(data, list):
        for index, (value, each) in enumerate(zip(data, model, strict=True)):
            yield from _unknown(value, each, f"{path}{index}.")
