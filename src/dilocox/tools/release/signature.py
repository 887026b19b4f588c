"""Signs a model's folder with OpenSSF Model Signing, an EC key on curve P-256.

The signature covers every file of the folder but itself. Others check it with that project's own
tool: `model_signing verify key FOLDER --signature FOLDER/model.sig --public_key KEY.pub`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from dilocox.coordinator.identity import write_private
from dilocox.errors import ConfigError
from dilocox.record.verify.release_signature import SIGNATURE

MISSING = "signing needs the package model-signing; run: pip install model-signing pyopenssl"


def signing_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a PEM file; a file that is not there is made, for its owner only.

    Raises `ConfigError` for another kind of key, or a file that cannot be read or written.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            made = ec.generate_private_key(ec.SECP256R1())
            text = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            write_private(path, text)
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: no usable private key ({reason}); name another file") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{path}: not an elliptic-curve key; make one with: openssl ecparam -name prime256v1 "
            "-genkey -noout -out KEY.pem"
        )
    return key


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """What the tool wants of a key that others are told."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: ec.EllipticCurvePrivateKey) -> str:
    """SHA-256 over the public key (DER), hex."""
    data = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(data).hexdigest()


def check_installed() -> None:
    """Raise `ConfigError` if the signing package is not there."""
    try:
        import model_signing.signing  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None


def sign(folder: Path, private_key: Path) -> Path:
    """Sign all files of `folder`; the signature's file. Raises `ConfigError`."""
    check_installed()
    from model_signing import hashing, signing

    folder = folder.resolve()  # as `check_release` reads it
    target = folder / SIGNATURE
    covered = hashing.Config().set_ignored_paths(paths=[target], ignore_git_paths=True)
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
        config.set_hashing_config(covered).sign(folder, target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: cannot be signed ({error}); name another key") from None
    return target
