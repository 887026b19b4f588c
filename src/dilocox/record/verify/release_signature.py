"""Check of the signature over a released folder, with the package of OpenSSF Model Signing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)

from dilocox.errors import RecordError
from dilocox.record.verify.claims import NotRunError

SIGNATURE = "model.sig"
"""Name of the signature file in the signed folder; it covers all other files."""


def is_released(folder: Path) -> bool:
    """Return True if the folder has a signature."""
    return (folder / SIGNATURE).is_file()


def key_beside(folder: Path) -> Path:
    """Return the public key's file: beside the folder, so that both can be published separately."""
    return folder.resolve().with_name(f"{folder.resolve().name}.pub")


def check_release(folder: Path, told: Path | None) -> str:
    """Check the signature over `folder`; return a line on what was checked.

    `told`: PEM file of the public key that the reader got from its owner; None: the key beside the
    folder. Raises `RecordError` if the signature is wrong, and `NotRunError` if it cannot be
    checked.
    """
    path = told or key_beside(folder)
    if not is_released(folder):
        raise NotRunError(f"{folder / SIGNATURE}: not there, the folder is not signed")
    if not path.is_file():
        raise NotRunError(f"{path}: not there; give the signer's public key with --release-key")
    try:
        from model_signing import hashing, verifying
    except ImportError:
        raise NotRunError(
            "needs the package model-signing; run: pip install model-signing pyopenssl"
        ) from None
    key = _fingerprint(path)
    # The library compares ignored paths with absolute paths: a relative path would match nothing.
    whole = folder.resolve()
    covered = hashing.Config().set_ignored_paths(paths=[whole / SIGNATURE], ignore_git_paths=True)
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=path)
        config.set_hashing_config(covered).verify(whole, whole / SIGNATURE)
    except Exception as error:  # the library may raise anything for a malicious file
        reason = str(error) or type(error).__name__
        raise RecordError(f"{folder}: not what key {key[:12]}… has signed ({reason})") from None
    known = "" if told else "; the key lay beside the folder: compare it with its owner's"
    return f"all files of {folder}, by key {key}{known}"


def _fingerprint(path: Path) -> str:
    """Return the SHA-256, hex, of a public key in DER. Raises `NotRunError` if it is unusable."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NotRunError(f"{path}: no public key ({error}); name another file") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise NotRunError(f"{path}: not an elliptic-curve key; name another file")
    data = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(data).hexdigest()
