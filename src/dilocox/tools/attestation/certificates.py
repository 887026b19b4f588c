"""Certificate chains of evidence, up to root certificates that are known by their SHA-256."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Collection, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.utils import CryptographyDeprecationWarning

from dilocox.errors import AttestationError

INTEL = "44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"
"""SHA-256 of the certificate "Intel SGX Root CA", DER."""
AMD = {
    "Milan": "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd",
    "Turin": "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a",
}
"""SHA-256 of the certificates "ARK-Milan" and "ARK-Turin", DER, by family of processors."""
NVIDIA = "102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48"
"""SHA-256 of the certificate "NVIDIA Device Identity CA", DER."""
MOST_CERTIFICATES = 8
"""Largest number of certificates of a chain."""


def read_certificates(data: bytes, what: str) -> list[x509.Certificate]:
    """Parse a chain in PEM, or one certificate in DER. `what` names the chain in errors.

    Raises `AttestationError` if `data` is neither, or holds more than `MOST_CERTIFICATES`.
    """
    with warnings.catch_warnings():
        # AMD's certificates have a serial number of zero.
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        try:
            if data.lstrip().startswith(b"-----"):
                found = x509.load_pem_x509_certificates(data)
            else:
                found = [x509.load_der_x509_certificate(data)]
        except (ValueError, x509.InvalidVersion):
            raise AttestationError(f"{what}: not certificates in PEM or DER") from None
    if len(found) > MOST_CERTIFICATES:
        raise AttestationError(f"{what}: more than {MOST_CERTIFICATES} certificates")
    return found


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate in DER, hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def check_chain(
    chain: Sequence[x509.Certificate],
    roots: Collection[str],
    when: datetime.datetime,
    what: str,
) -> str:
    """Check a chain, leaf first and root last. Returns the root's SHA-256, hex.

    Every certificate must be signed by the next, be valid at `when`, and, but for the leaf, belong
    to an authority. Revocation is not checked.

    Args:
        chain: The certificates.
        roots: SHA-256, hex, of root certificates that are accepted.
        when: Moment at which the certificates must be valid, with a time zone.
        what: Name of the chain, for errors.

    Raises:
        AttestationError: A check fails.
    """
    if len(chain) < 2:
        raise AttestationError(f"{what}: the chain has no root")
    names = [_name(each, what) for each in chain]
    for number, each in enumerate(chain):
        name, above = names[number], min(number + 1, len(chain) - 1)
        if not each.not_valid_before_utc <= when <= each.not_valid_after_utc:
            raise AttestationError(f"{what}: certificate {name} is not valid at {when:%Y-%m-%d}")
        try:
            each.verify_directly_issued_by(chain[above])
        except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
            raise AttestationError(
                f"{what}: certificate {name} is not signed by {names[above]}"
            ) from None
        if each is not chain[0] and not _is_authority(each):
            raise AttestationError(f"{what}: certificate {name} is not one of an authority")
    root = fingerprint(chain[-1])
    if root not in roots:
        raise AttestationError(f"{what}: its root {names[-1]} ({root[:12]}…) is not accepted")
    return root


def _name(certificate: x509.Certificate, what: str) -> str:
    try:
        return certificate.subject.rfc4514_string()
    except ValueError:  # names are parsed only when they are asked for
        raise AttestationError(f"{what}: a certificate has a malformed name") from None


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False
    return found.value.ca


def extension(certificate: x509.Certificate, oid: str) -> bytes | None:
    """Return the bytes (DER) of an extension that cryptography does not parse; None if missing."""
    try:
        found = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return None
    return found.value if isinstance(found, x509.UnrecognizedExtension) else None
