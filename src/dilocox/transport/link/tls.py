"""TLS between ranks of two sites. Both ends show a certificate that the run's authority issued."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import sys
import tempfile

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dilocox.coordinator.identity import Identity
from dilocox.errors import ExchangeError

KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""TCP keep-alive: idle seconds, seconds between probes, probes. Without it, routers forget
connections that are silent between outer steps."""

_NOTSENT_LOWAT = 25
"""Number of Linux's `TCP_NOTSENT_LOWAT`; Python 3.11 has no name for it."""
NOT_SENT_BYTES = 1 << 19
"""Limit of unsent bytes in the kernel's buffer; bytes already on the way do not count."""


class UnauthenticatedPeerError(ExchangeError):
    """The other end of a connection does not prove to be the expected site of this run."""


def contexts(identity: Identity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS settings of the listening end and of the connecting end, in this order."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(cadata=identity.authority)
    server.num_tickets = 0  # TLS sessions are never resumed
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Sites have client certificates, which `ssl` does not accept from a listener. Instead `site_of`
    # checks the certificate before this end sends its first byte.
    client.verify_mode = ssl.CERT_NONE
    # The ssl module reads certificates and keys from files only; mkstemp makes them mode 0600.
    descriptor, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(identity.key + identity.certificate)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # A link knows the lengths of its messages, so it notices a truncated connection itself.
            context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
            context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return server, client


def site_of(certificate: bytes | None, authority: str, now: datetime.datetime) -> str:
    """Return the site that a peer's `certificate` (DER) names.

    Raises `UnauthenticatedPeerError` if the certificate is None, was not issued to a site by the
    run's `authority` (PEM), or is not valid at `now` (with time zone).
    """
    if certificate is None:
        raise UnauthenticatedPeerError("the peer showed no certificate")
    try:
        shown = x509.load_der_x509_certificate(certificate)
        shown.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.encode()))
        usage = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise UnauthenticatedPeerError("its certificate is not of this run") from None
    if ExtendedKeyUsageOID.CLIENT_AUTH not in usage or len(names) != 1:
        raise UnauthenticatedPeerError("its certificate is not a site's")
    if not shown.not_valid_before_utc <= now <= shown.not_valid_after_utc:
        raise UnauthenticatedPeerError("its certificate has expired, or the clocks differ")
    return str(names[0].value)


def tune(connection: socket.socket, silence: float) -> None:
    """Set the TCP options of a connection between sites.

    Small packets are sent at once, and keep-alive probes keep routers from forgetting the
    connection. The connection ends when the peer's machine acknowledges nothing for `silence`
    seconds.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        limit = max(1, int(1000 * silence))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    if sys.platform == "linux":
        # Requests of this rank must not queue behind megabytes that its kernel holds.
        connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, NOT_SENT_BYTES)
