"""Mutual TLS between processes: files read, checked and, at a server, read again when renewed.

Owns what `TlsSettings` names: certificate, private key and the authorities to trust. gRPC itself
takes any bytes and then fails every handshake as if nothing answered, so that files are judged
here. Knows no server, channel or service.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from specmesh.config import TlsSettings
from specmesh.errors import ConfigError

logger = logging.getLogger(__name__)


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials | None:
    """Mutual TLS of a server; None when it is off. Raises ConfigError for unreadable files.

    Files that change are read at the next handshake, so that certificates can be renewed in place.
    """
    if tls.certificate is None:
        return None
    current = _read_tls(tls)

    def configuration() -> Any:
        private_key, certificate, authority = current
        return grpc.ssl_server_certificate_configuration(
            [(private_key, certificate)], root_certificates=authority
        )

    def renewed() -> Any:
        nonlocal current
        try:
            found = _read_tls(tls)
        except ConfigError as error:
            logger.error("certificates stay as they were", extra={"reason": str(error)})
            return None
        if found == current:
            return None
        current = found
        logger.info("certificates read again")
        return configuration()

    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        configuration(), renewed, require_client_authentication=True
    )
    return credentials


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials | None:
    """Mutual TLS of a channel; None when it is off. Raises ConfigError for unreadable files."""
    if tls.certificate is None:
        return None
    private_key, certificate, authority = _read_tls(tls)
    return grpc.ssl_channel_credentials(authority, private_key, certificate)


def _read_tls(tls: TlsSettings) -> tuple[bytes, bytes, bytes]:
    assert tls.private_key is not None
    assert tls.certificate is not None
    assert tls.authority is not None
    authority = read_authority(tls.authority)
    return *read_identity(tls.certificate, tls.private_key), authority


def read_authority(path: Path) -> bytes:
    """Certificates to trust. Raises ConfigError, which names the file, for what gRPC cannot use.

    gRPC itself takes any bytes, and then fails every handshake as if nothing answered.
    """
    content = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as error:  # the base of SSLError
        raise ConfigError(f"{path} holds no certificate in PEM", field="tls") from error
    return content


def read_identity(certificate: Path, private_key: Path) -> tuple[bytes, bytes]:
    """(private key, certificate). Raises ConfigError, which names the file, as above."""
    content = read_authority(certificate)
    key = _read(private_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # what is strong enough, gRPC judges
    try:
        # With a password OpenSSL asks nobody for one.
        context.load_cert_chain(certificate, private_key, password="")
    except OSError as error:
        raise ConfigError(
            f"{private_key} holds no private key in PEM that fits {certificate}", field="tls"
        ) from error
    return key, content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="tls") from error
