"""Genuine public samples of evidence (tests/tools/attestation/vectors/README.md)."""

from __future__ import annotations

import datetime
import functools
import json
import tarfile
from pathlib import Path
from typing import Any

from cryptography import x509

from dilocox.tools.attestation.certificates import read_certificates

ARCHIVE = Path(__file__).parents[1] / "tools/attestation/vectors/vectors.tar.xz"
TDX_TIME = 1751624655
"""Moment (Unix time) at which the TDX quote is up to date."""


@functools.cache
def vector(name: str) -> bytes:
    """The bytes of a sample, such as `dcap/tdx_quote`."""
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def at(seconds: int) -> datetime.datetime:
    """A moment, from its Unix time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def document(name: str) -> Any:
    """A sample in JSON."""
    return json.loads(vector(name))


def hex_of(name: str) -> bytes:
    """A sample that is written in hex."""
    return bytes.fromhex(vector(name).decode().strip())


def snp_chain() -> list[x509.Certificate]:
    """VCEK, ASK and ARK of the SNP report."""
    own = read_certificates(vector("snp/vcek_milan.der"), "vcek")
    return [*own, *read_certificates(vector("snp/cert_chain_milan"), "chain")]


def gpu_chain(name: str) -> list[x509.Certificate]:
    """A chain of an H100."""
    return read_certificates(vector(f"nv/{name}"), name)
