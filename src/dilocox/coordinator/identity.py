"""Keys and certificates that identify sites and the coordinator on the control plane.

The run has its own certificate authority. A site's certificate names the site (CN) and its
incarnation (serialNumber); the coordinator's own tools have incarnation 0. Join tokens
(`tokens.py`) carry the SHA-256 of the server's certificate, so that a joining site recognises the
server before it sends its token.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dilocox.config.network import NetworkSection
from dilocox.errors import JoinError
from dilocox.utils.storage import replace_file

OPERATOR = "operator"
"""CN of the coordinator's own tools. With incarnation 0 it is not a site."""
_VALID = datetime.timedelta(days=730)
_SKEW = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    """Key and certificates by which a rank proves to the coordinator that it belongs to a site.

    `key`, `certificate` and `authority` are PEM texts.
    """

    site: str
    incarnation: int
    key: str
    certificate: str
    authority: str
    fingerprint: str
    """SHA-256 of the coordinator's certificate (DER), hex."""
    record_key: str = ""
    """Private Ed25519 key that signs the site's statements in the run's record, hex."""
    record_run: str = ""
    """Id of the run in its record; empty if the run is not recorded."""

    def to_text(self) -> str:
        """Return the identity as JSON, for another process of the same site."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Identity:
        """Inverse of `to_text`. Raises `ValueError` or `TypeError` if `text` is no identity."""
        return cls(**json.loads(text))

    def save(self, path: str | Path) -> None:
        """Write the identity to `path` as JSON, readable by the owner only."""
        write_private(Path(path), self.to_text().encode())

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read an identity that `save` wrote. Raises `JoinError` if the file cannot be used."""
        try:
            return cls.from_text(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise JoinError(
                f"identity {path}: cannot be used ({error}); join the run again"
            ) from None


def server_names(network: NetworkSection) -> list[str]:
    """Return the host names and addresses for which the coordinator's certificate is valid."""
    names = [network.host, network.advertise, "localhost", "127.0.0.1"]
    return list(dict.fromkeys(name for name in names if name))


def write_private(path: Path, content: bytes) -> None:
    """Write `content` to `path` with mode 0600, replacing an existing file atomically.

    Raises `OSError` if the file cannot be written; then no partial file is left.
    """
    replace_file(path, content, 0o600)


def new_request(site: str) -> tuple[str, str]:
    """Make an EC P-256 key and a signing request for it. Returns (key PEM, CSR PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, site)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(serialization.Encoding.PEM).decode()


class Authority:
    """The run's certificate authority and the server's certificate, stored in a folder."""

    def __init__(self, folder: Path, hosts: list[str]) -> None:
        """Load the authority from `folder`, or create it there if the folder is not complete.

        A new server certificate is valid for the names and addresses in `hosts`.
        """
        self.certificate_path = folder / "server.pem"
        self._authority_path = folder / "authority.pem"
        self._operator_path = folder / "operator.json"
        # The operator's identity is written last, so a folder without it is incomplete.
        if not self._operator_path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._create(hosts)
        bundle = self._authority_path.read_bytes()
        key = serialization.load_pem_private_key(bundle, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(bundle)
        server = x509.load_pem_x509_certificate(self.certificate_path.read_bytes())
        self.fingerprint = server.fingerprint(hashes.SHA256()).hex()

    @property
    def pem(self) -> str:
        """Certificate of the authority, PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def operator_path(self) -> Path:
        """Path of the file with the identity of the coordinator's own tools."""
        return self._operator_path

    def sign(self, csr: str, site: str, incarnation: int) -> str:
        """Return a client certificate (PEM) for `site`.

        Raises `JoinError` if the signing request `csr` (PEM) is not valid, or its key is not EC.
        """
        try:
            request = x509.load_pem_x509_csr(csr.encode())
            key = request.public_key()
            valid = request.is_signature_valid
        except (ValueError, UnsupportedAlgorithm, InvalidSignature, TypeError):
            valid, key = False, None
        if not valid or not isinstance(key, ec.EllipticCurvePublicKey):
            raise JoinError(
                f"site {site}: the signing request is not a valid EC one; update dilocox there"
            )
        return self._issue(_name(site, incarnation), key, client=True)

    def _create(self, hosts: list[str]) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dilocox run authority")])
        now = datetime.datetime.now(datetime.UTC)
        self._key = key
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        write_private(self._authority_path, (_key_pem(key) + self.pem).encode())
        server_key = ec.generate_private_key(ec.SECP256R1())
        server = self._issue(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dilocox coordinator")]),
            server_key.public_key(),
            client=False,
            hosts=hosts,
        )
        write_private(self.certificate_path, (_key_pem(server_key) + server).encode())
        fingerprint = hashlib.sha256(
            x509.load_pem_x509_certificate(server.encode()).public_bytes(serialization.Encoding.DER)
        ).hexdigest()
        operator_key, csr = new_request(OPERATOR)
        certificate = self.sign(csr, OPERATOR, 0)
        Identity(OPERATOR, 0, operator_key, certificate, self.pem, fingerprint).save(
            self._operator_path
        )

    def _issue(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        client: bool,
        hosts: list[str] | None = None,
    ) -> str:
        now = datetime.datetime.now(datetime.UTC)
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _name(site: str, incarnation: int) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, site),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, str(incarnation)),
        ]
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
