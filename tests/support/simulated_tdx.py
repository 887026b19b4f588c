"""TDX quotes with collateral under a throw-away authority, made of the public sample's parts."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from dilocox.tools.attestation.certificates import fingerprint, read_certificates
from tests.support.attestation_vectors import document, vector

HEADER, BODY = 48, 584
RTMRS = 328
"""Place of RTMR 0 in the body of a quote."""
_PCK = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
_DAY = datetime.timedelta(days=1)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _signed(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    halves = decode_dss_signature(key.sign(data, ec.ECDSA(hashes.SHA256())))
    return b"".join(each.to_bytes(32, "big") for each in halves)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass
class SimulatedTdx:
    """A pretended platform of Intel TDX whose collateral is valid around `now`."""

    now: datetime.datetime
    root_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    ca_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    tcb_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    pck_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    quote_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)

    def __post_init__(self) -> None:
        self.root = self._certificate("Intel SGX Root CA", self.root_key, True)
        self.ca = self._certificate("Intel SGX PCK Platform CA", self.ca_key, True)
        self.tcb = self._certificate("Intel SGX TCB Signing", self.tcb_key, False)
        self.sample = vector("dcap/tdx_quote")
        pems = self.sample[self.sample.index(b"-----BEGIN") :].split(b"\0")[0]
        own = read_certificates(pems, "sample")[0].extensions.get_extension_for_oid(_PCK)
        assert isinstance(own.value, x509.UnrecognizedExtension)
        self.pck = self._certificate(
            "Intel SGX PCK Certificate", self.pck_key, False, ("Intel SGX PCK Platform CA",
            self.ca_key), own.value,
        )  # fmt: skip

    @property
    def root_digest(self) -> str:
        """SHA-256 of the root, for a policy."""
        return fingerprint(self.root)

    def collateral(self) -> dict[str, str]:
        """What Intel would publish about the platform."""
        found: dict[str, Any] = document("dcap/tdx_quote_collateral.json")
        day = "%Y-%m-%dT%H:%M:%SZ"
        for name in ("tcb_info", "qe_identity"):
            said = json.loads(found[name])
            said["issueDate"] = (self.now - _DAY).strftime(day)
            said["nextUpdate"] = (self.now + 29 * _DAY).strftime(day)
            text = json.dumps(said, separators=(",", ":"))
            found[name] = text
            found[f"{name}_signature"] = _signed(self.tcb_key, text.encode()).hex()
            found[f"{name}_issuer_chain"] = self._pem(self.tcb, self.root)
        found["pck_crl_issuer_chain"] = self._pem(self.ca, self.root)
        found["pck_crl"] = self._revoked("Intel SGX PCK Platform CA", self.ca_key).hex()
        found["root_ca_crl"] = self._revoked("Intel SGX Root CA", self.root_key).hex()
        return found

    def quote(
        self, report_data: bytes, *, debug: bool = False, rtmrs: list[str] | None = None
    ) -> bytes:
        """A quote that carries `report_data`; registers are the sample's where none are given."""
        body = bytearray(self.sample[HEADER : HEADER + BODY])
        body[120] |= debug
        body[BODY - 64 :] = report_data
        for number, own in enumerate(rtmrs or []):
            body[RTMRS + 48 * number : RTMRS + 48 * (number + 1)] = bytes.fromhex(own)
        signed = self.sample[:HEADER] + bytes(body)
        public = self.quote_key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )[1:]
        start = HEADER + BODY + 4 + 128 + 6
        enclave, auth = bytearray(self.sample[start : start + 384]), bytes(range(32))
        enclave[320:] = hashlib.sha256(public + auth).digest() + bytes(32)
        chain = self._pem(self.pck, self.ca, self.root).encode()
        inner = b"".join(
            (bytes(enclave), _signed(self.pck_key, bytes(enclave)), len(auth).to_bytes(2, "little"),
             auth, (5).to_bytes(2, "little"), len(chain).to_bytes(4, "little"), chain)
        )  # fmt: skip
        data = b"".join(
            (_signed(self.quote_key, signed), public, (6).to_bytes(2, "little"),
             len(inner).to_bytes(4, "little"), inner)
        )  # fmt: skip
        return signed + len(data).to_bytes(4, "little") + data

    def _pem(self, *chain: x509.Certificate) -> str:
        encoding = serialization.Encoding.PEM
        return "".join(each.public_bytes(encoding).decode() for each in chain)

    def _certificate(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        authority: bool,
        issuer: tuple[str, ec.EllipticCurvePrivateKey] | None = None,
        own: x509.UnrecognizedExtension | None = None,
    ) -> x509.Certificate:
        issuer_name, issuer_key = issuer or ("Intel SGX Root CA", self.root_key)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(issuer_name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - 30 * _DAY)
            .not_valid_after(self.now + 3650 * _DAY)
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
        )
        if own is not None:
            builder = builder.add_extension(own, critical=False)
        return builder.sign(issuer_key, hashes.SHA256())

    def _revoked(self, issuer: str, key: ec.EllipticCurvePrivateKey) -> bytes:
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        found = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(_name(issuer))
            .last_update(self.now - _DAY)
            .next_update(self.now + 29 * _DAY)
            .add_extension(x509.CRLNumber(1), critical=False)
            .add_extension(authority, critical=False)
            .sign(key, hashes.SHA256())
        )
        return found.public_bytes(serialization.Encoding.DER)
