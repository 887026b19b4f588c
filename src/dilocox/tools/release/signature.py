"""Signs a model's folder with OpenSSF Model Signing and an EC key on curve P-256.

The signature covers every file of the folder except itself. Anybody can check it with that
project's own tool:
`model_signing verify key FOLDER --signature FOLDER/model.sig --public_key KEY.pub`.
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
    """Return the private key of the PEM file `path`.

    If the file does not exist, a new key is written to it, readable by its owner only. Raises
    `ConfigError` if the key is of another kind, or the file cannot be read or written.
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
        raise ConfigError(f"{path}: no usable private key ({reason}); give another file") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{path}: not an elliptic-curve key; make one with: openssl ecparam -name prime256v1 "
            "-genkey -noout -out KEY.pem"
        )
    return key


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the public key as PEM, the form that the `model_signing` tool reads."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: ec.EllipticCurvePrivateKey) -> str:
    """Return the SHA-256 of the public key in DER form, as hex."""
    data = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(data).hexdigest()


def check_installed() -> None:
    """Raise `ConfigError` if the package model-signing is not installed."""
    try:
        import model_signing.signing  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None


def sign(folder: Path, private_key: Path) -> Path:
    """Sign all files of `folder`, and return the path of the signature.

    `private_key`: PEM file of the key. Raises `ConfigError` if the folder cannot be signed.
    """
    check_installed()
    from model_signing import hashing, signing

    folder = folder.resolve()  # as `check_release` reads it
    target = folder / SIGNATURE
    covered = hashing.Config().set_ignored_paths(paths=[target], ignore_git_paths=True)
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
        config.set_hashing_config(covered).sign(folder, target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: cannot be signed ({error}); give another key") from None
    return target
