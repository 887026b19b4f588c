"""A pretended AMD SEV-SNP machine under an authority of its own, for tests and rehearsals.

A policy must name the authority's root in `[simulation]`, and the verdict is then SIMULATED.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from dilocox.coordinator.identity import write_private
from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import fingerprint, read_certificates
from dilocox.tools.attestation.snp import REPORT_BYTES, SIGNED_BYTES

KEY_FILE, CHAIN_FILE = "simulated-machine.key", "simulated-machine.pem"
POLICY_FILE = "tee.toml"
"""A policy that accepts the machine beside it."""
_POLICY = """\
# For rehearsals: it accepts a pretended machine, and the verdict is never PASS.
environment = "simulation"
max_age_rounds = 20

[snp]
measurements = ["{measurement}"]

[simulation]
roots = ["{root}"]
"""
MEASUREMENT = bytes(range(48))
"""The launch measurement of every pretended guest."""
_TCB = {"3.1": 4, "3.2": 0, "3.3": 24, "3.8": 219}
_VERSION = bytes((4, 0, 0, 0, 0, 0, 24, 219))
"""The same security versions in the form of a report."""
_OID = "1.3.6.1.4.1.3704.1."
_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class SimulatedMachine:
    """A pretended processor, with the key that signs its reports."""

    key: ec.EllipticCurvePrivateKey
    chain: tuple[x509.Certificate, ...]
    """Certificates of the processor, of its family and of the root."""

    @classmethod
    def new(cls, chip: bytes) -> SimulatedMachine:
        """Make a processor of the id `chip` (64 bytes) under a new authority."""
        root_key, family_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
        root = _certificate("ARK-Simulated", root_key, "ARK-Simulated", root_key)
        family = _certificate("SEV-Simulated", family_key, "ARK-Simulated", root_key)
        own = {f"{_OID}{end}": _integer(value) for end, value in _TCB.items()}
        own |= {f"{_OID}2": b"\x16\x08Milan-B0", f"{_OID}4": chip}
        leaf = _certificate("SEV-VCEK", key, "SEV-Simulated", family_key, own)
        return cls(key, (leaf, family, root))

    @classmethod
    def kept(cls, folder: Path, chip: bytes) -> SimulatedMachine:
        """Return the machine in `folder`, and make it with a policy if the folder has none.

        Raises `AttestationError` if the folder cannot be used.
        """
        try:
            if not (folder / KEY_FILE).exists():
                folder.mkdir(parents=True, exist_ok=True)
                made = cls.new(chip)
                (folder / CHAIN_FILE).write_text(made.certificates, encoding="ascii")
                rules = _POLICY.format(measurement=MEASUREMENT.hex(), root=made.root)
                (folder / POLICY_FILE).write_text(rules, encoding="ascii")
                write_private(folder / KEY_FILE, _pem(made.key))
            key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
            chain = read_certificates((folder / CHAIN_FILE).read_bytes(), str(folder))
        except OSError as error:
            raise AttestationError(f"{folder}: cannot be used ({error.strerror})") from None
        except ValueError as error:
            raise AttestationError(f"{folder}: not a pretended machine ({error})") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, tuple(chain))

    @property
    def certificates(self) -> str:
        """The chain in PEM, leaf first."""
        encoding = serialization.Encoding.PEM
        return "".join(each.public_bytes(encoding).decode() for each in self.chain)

    @property
    def root(self) -> str:
        """SHA-256 of the root certificate, hex, for the policy."""
        return fingerprint(self.chain[-1])

    def report(self, report_data: bytes, *, debug: bool = False) -> bytes:
        """Return a signed report that carries `report_data`, 64 bytes."""
        report = bytearray(REPORT_BYTES)
        report[0] = 2
        # Policy: bit 17 is always set, bit 16 allows multithreading, bit 19 allows debugging.
        report[8:16] = (0x30000 | debug << 19).to_bytes(8, "little")
        report[0x34] = 1
        for place in (0x38, 0x180, 0x1E0, 0x1F0):
            report[place : place + 8] = _VERSION
        report[0x50:0x90] = report_data
        report[0x90:0xC0] = MEASUREMENT
        chip = self.chain[0].extensions.get_extension_for_oid(x509.ObjectIdentifier(f"{_OID}4"))
        assert isinstance(chip.value, x509.UnrecognizedExtension)
        report[0x1A0:0x1E0] = chip.value.value
        signature = self.key.sign(bytes(report[:SIGNED_BYTES]), ec.ECDSA(hashes.SHA384()))
        for number, half in enumerate(decode_dss_signature(signature)):
            place = SIGNED_BYTES + 72 * number
            report[place : place + 72] = half.to_bytes(72, "little")
        return bytes(report)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    extensions: dict[str, bytes] | None = None,
) -> x509.Certificate:
    """Make a certificate: of an authority, or with `extensions` (DER by OID) of a processor."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(extensions is None, None), critical=True)
    )
    for oid, value in (extensions or {}).items():
        unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)
        builder = builder.add_extension(unknown, critical=False)
    return builder.sign(issuer_key, hashes.SHA384())


def _name(text: str) -> x509.Name:
    organisation = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "A simulation of dilocox")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text), organisation])


def _integer(value: int) -> bytes:
    """Encode 0 to 255 as a DER integer."""
    digits = value.to_bytes(1 + (value > 127), "big")
    return bytes((2, len(digits))) + digits


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
