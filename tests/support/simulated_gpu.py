"""GPU reports and a reference manifest under a throw-away authority, in NVIDIA's form."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from dilocox.tools.attestation.certificates import fingerprint
from dilocox.tools.attestation.evidence import GpuEvidence

DRIVER, VBIOS = "545.00", "96.00.5E.00.01"
MEASUREMENTS = [hashlib.sha384(bytes((number,))).hexdigest() for number in range(4)]


def manifest(version: str, places: range) -> str:
    """A reference manifest of a version of driver or VBIOS, with some of `MEASUREMENTS`."""
    space = "http://www.w3.org/2001/04/xmlenc#sha384"
    rows = "".join(
        f'<Resource active="True" index="{number}" h:Hash0="{MEASUREMENTS[number]}"/>'
        for number in places
    )
    meta = f'<Meta colloquialVersion="{version}"/>'
    return f'<SoftwareIdentity xmlns="urn:x" xmlns:h="{space}">{meta}{rows}</SoftwareIdentity>'


@dataclass
class SimulatedGpus:
    """Pretended GPUs of one authority."""

    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP384R1())
    )

    def __post_init__(self) -> None:
        self.root = self._certificate("root", self.key, True)

    @property
    def root_digest(self) -> str:
        """SHA-256 of the root, for a policy."""
        return fingerprint(self.root)

    def evidence(
        self,
        nonce: bytes,
        *,
        driver: str = DRIVER,
        measurements: list[str] = MEASUREMENTS,
        firmware: bytes = b"",
    ) -> GpuEvidence:
        """A report of a new GPU. `firmware`: the digest of its firmware, which newer ones name."""
        key = ec.generate_private_key(ec.SECP384R1())
        chain = (self._certificate("gpu", key, False), self.root)
        record = b"".join(
            bytes((number + 1, 1, 51, 0, 1, 48, 0)) + bytes.fromhex(value)
            for number, value in enumerate(measurements)
        )
        fields = [(3, driver.encode() + b"\0"), (6, bytes.fromhex("005e009601000000"))]
        fields += [(20, firmware)] if firmware else []
        opaque = b"".join(
            kind.to_bytes(2, "little") + len(own).to_bytes(2, "little") + own
            for kind, own in fields
        )
        signed = b"".join(
            (bytes.fromhex("11e001ff"), nonce, b"\0", bytes.fromhex("11600000"),
             bytes((len(measurements),)), len(record).to_bytes(3, "little"), record, bytes(32),
             len(opaque).to_bytes(2, "little"), opaque)
        )  # fmt: skip
        halves = decode_dss_signature(key.sign(signed, ec.ECDSA(hashes.SHA384())))
        signature = b"".join(each.to_bytes(48, "big") for each in halves)
        encoding = serialization.Encoding.PEM
        pem = "".join(each.public_bytes(encoding).decode() for each in chain)
        return GpuEvidence(signed + signature, pem)

    def _certificate(
        self, name: str, key: ec.EllipticCurvePrivateKey, authority: bool
    ) -> x509.Certificate:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        own, issuer = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, "root")
        )
        return (
            x509.CertificateBuilder()
            .subject_name(own)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + 3650 * day)
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .sign(self.key, hashes.SHA384())
        )
