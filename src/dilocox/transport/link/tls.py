"""TLS between the ranks of two sites: both show the certificate that the run's authority gave."""

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
"""Seconds, seconds, probes: routers forget connections that are silent between outer steps."""

_NOTSENT_LOWAT = 25
"""Linux's `TCP_NOTSENT_LOWAT`: Python 3.11 has no name for it."""
NOT_SENT_BYTES = 1 << 19
"""Bytes that the kernel takes beyond those that are on the way."""


class UnauthenticatedPeerError(ExchangeError):
    """The other end is not who it has to be."""


def contexts(identity: Identity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS settings for the side that listens and for the side that connects."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(cadata=identity.authority)
    server.num_tickets = 0  # nothing is ever resumed
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Sites have certificates of clients, which `ssl` does not accept from a listener: `site_of`
    # checks them before a byte is sent.
    client.verify_mode = ssl.CERT_NONE
    # The ssl module reads certificates and keys from files only; mkstemp makes them mode 0600.
    descriptor, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(identity.key + identity.certificate)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # A link knows the lengths of its messages, so the end of a connection cuts nothing off.
            context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
            context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return server, client


def site_of(certificate: bytes | None, authority: str, now: datetime.datetime) -> str:
    """The site that a certificate (DER) names. Raises `UnauthenticatedPeerError` unless the run's
    authority (PEM) has issued it to a site and it is valid at `now` (with time zone)."""
    if certificate is None:
        raise UnauthenticatedPeerError("it showed no certificate")
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
    """Send at once, keep routers from forgetting the connection, and end the connection when the
    peer's machine acknowledges nothing for `silence` seconds."""
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
