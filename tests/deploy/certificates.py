"""What cert-manager would make of the Certificate objects, made with openssl instead."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.manifests import Object, of_kind, one

NEW = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(("openssl", *arguments), cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path) -> None:
    """`ca.crt` and `ca.key`."""
    files = ("-keyout", "ca.key", "-out", "ca.crt")
    _openssl(folder, *NEW, *files, "-subj", "/CN=authority", "-days", "2")


def issue(folder: Path, objects: Sequence[Object], name: str) -> Path:
    """The Secret of one Certificate as a folder: tls.crt, tls.key, ca.crt. Again: renewed.

    localhost is added to its names: that is how services reach each other here.
    """
    spec = one(objects, "Certificate", name)["spec"]
    names = [f"URI:{uri}" for uri in spec.get("uris", ())]
    names += [f"DNS:{each}" for each in {*spec.get("dnsNames", ()), "localhost"}]
    usages = [each.replace(" auth", "Auth") for each in spec["usages"] if each.endswith(" auth")]
    secret = folder / spec["secretName"]
    secret.mkdir(exist_ok=True)
    _openssl(
        folder,
        *NEW,
        *("-keyout", "new.key", "-out", "new.crt", "-subj", f"/CN={name}", "-days", "2"),
        *("-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-addext", f"subjectAltName={','.join(names)}"),
        *("-addext", f"extendedKeyUsage={','.join(usages)}"),
    )
    # Kept in step as kubelet's swap of a whole folder does it: key and certificate at once enough.
    (folder / "new.key").replace(secret / "tls.key")
    (folder / "new.crt").replace(secret / "tls.crt")
    (secret / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
    return secret


def issue_all(folder: Path, objects: Sequence[Object]) -> dict[str, Path]:
    """A folder per Certificate that is no authority."""
    return {
        each["metadata"]["name"]: issue(folder, objects, each["metadata"]["name"])
        for each in of_kind(objects, "Certificate")
        if not each["spec"].get("isCA")
    }
