"""The key with which a site signs its statements in the run's record.

A site makes the key when it first joins, keeps it, and joins with the same key after every crash.
The coordinator binds the site's name to the key. It refuses another key for the name, until the
operator makes the coordinator forget the first key.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dilocox.coordinator.identity import write_private
from dilocox.errors import JoinError

FOLDER = "private"
"""Folder in a site's run folder that holds the file `SITE.key`; only its owner can open it."""
_LABEL = b"dilocox enrolment 1"


@dataclass(frozen=True)
class RecordKey:
    """An Ed25519 key pair; both halves are raw bytes in hex."""

    private: str
    public: str

    @classmethod
    def new(cls) -> RecordKey:
        """Return a new random key pair."""
        return cls.of(Ed25519PrivateKey.generate().private_bytes_raw().hex())

    @classmethod
    def of(cls, private: str) -> RecordKey:
        """Return the key pair of a private half. Raises `ValueError` if it is not a key in hex."""
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        return cls(private, key.public_key().public_bytes_raw().hex())

    @classmethod
    def kept(cls, path: Path) -> RecordKey:
        """Return the key in the file `path`, and make the file if it does not exist.

        Raises `JoinError` if the file cannot be read or written, or holds no key.
        """
        try:
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_once(path, cls.new().private)
            return cls.of(path.read_text(encoding="ascii").strip())
        except OSError as error:
            reason = error.strerror or str(error)
            raise JoinError(
                f"key file {path}: cannot be used ({reason}); make its folder writable, or give "
                "another place by --key-file"
            ) from None
        except ValueError:
            raise JoinError(
                f"key file {path}: is not a key of a site; restore it, or remove it and have the "
                "operator forget the old key (dilocox leave RUN_FOLDER --site SITE --forget-key)"
            ) from None

    def prove(self, site: str, fingerprint: str, csr: str) -> str:
        """Return a signature (hex) that proves that the enrolling site holds the private half.

        `fingerprint` is that of the coordinator's certificate; `csr` is the signing request (PEM).
        """
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.private))
        return key.sign(_said(site, fingerprint, csr)).hex()


def key_file(folder: Path, site: str) -> Path:
    """Return the path of `site`'s key file in its run folder `folder`."""
    return folder / FOLDER / f"{site}.key"


def why_not(
    bound: str, key: str | None, proof: str | None, site: str, fingerprint: str, csr: str
) -> str | None:
    """Return why a request may not enrol `site`, in one line; None if it may.

    Args:
        bound: Public key to which the name is bound; empty if it is bound to none.
        key: Public key of the request; None: the request has no key.
        proof: Signature of the request, made by `RecordKey.prove`; None: it has none.
        site: Name of the site that enrols.
        fingerprint: SHA-256 of the coordinator's certificate, hex.
        csr: Certificate signing request of the request, PEM.
    """
    if proof is not None and not (key and _proves(key, proof, site, fingerprint, csr)):
        return f"site {site}: the proof that it holds its key is wrong; update dilocox there"
    if not bound:
        return None
    if key != bound:
        return (
            f"site {site}: its key is {'none' if key is None else key[:12]}, not {bound[:12]} with "
            f"which it joined before; join with that key (RUN_FOLDER/{FOLDER}/{site}.key, "
            "--key-file); if the key is lost, the operator runs: dilocox leave RUN_FOLDER --site "
            f"{site} --forget-key"
        )
    if proof is None:
        return f"site {site}: does not prove that it holds its key; update dilocox there"
    return None


def _proves(key: str, proof: str, site: str, fingerprint: str, csr: str) -> bool:
    if not re.fullmatch("[0-9a-f]{64}", key) or not re.fullmatch("[0-9a-f]{128}", proof):
        return False
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(proof), _said(site, fingerprint, csr))
    except (InvalidSignature, ValueError):
        return False
    return True


def _said(site: str, fingerprint: str, csr: str) -> bytes:
    """Return the bytes to sign, which name the coordinator, the site and the signing request."""
    asked = hashlib.sha256(csr.encode()).hexdigest()
    return b"\0".join((_LABEL, fingerprint.encode(), site.encode(), asked.encode()))


def _write_once(path: Path, content: str) -> None:
    """Write `path` unless another process has written it in the meantime."""
    ours = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_private(ours, f"{content}\n".encode())
    try:
        os.link(ours, path)
    except FileExistsError:
        pass  # Another start of the same site wrote the key: both starts use that key.
    except OSError:  # The file system has no hard links.
        ours.replace(path)
    ours.unlink(missing_ok=True)
