"""What a machine binds its evidence to: the run, the site, the machine, and a moment of the log."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from dilocox.errors import AttestationError
from dilocox.record.log.canonical import dumps

VERSION = 1
MOST_BYTES = 4096
_HEX = re.compile("[0-9a-f]{64}")
_ACCOUNT = re.compile("0x[0-9a-fA-F]{40}")


@dataclass(frozen=True)
class RuntimeData:
    """The facts that a quote vouches for, by the digest of their canonical JSON (RFC 8785)."""

    run: str
    """Id of the run in its record."""
    manifest: str
    """SHA-256 of the log's first entry, hex."""
    site: str
    incarnation: int
    """Number of the site's start, as in its enrolment."""
    node: int
    """Number of the machine among the machines of the site, from 0."""
    nodes: int
    """Number of machines of the site."""
    key: str
    """Public key with which the site signs its statements, 64 hex digits."""
    nonce: str
    """`nonce_of` the newest signed checkpoint of the log, hex."""
    evm: str | None = None
    """The site's account on a chain; None: the run is not settled."""

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, which has no `evm` if it is None."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return dumps({"v": VERSION, **said})

    @classmethod
    def from_bytes(cls, data: bytes) -> RuntimeData:
        """Inverse of `to_bytes`. Raises `AttestationError` for anything else."""
        try:
            said = json.loads(data)
            found = cls(**{name: value for name, value in said.items() if name != "v"})
            same = found._typed() and found.to_bytes() == data
        except (ValueError, TypeError, AttributeError, RecursionError):
            same = False
        if not same:
            raise AttestationError("runtime_data: not of this version, or not in canonical form")
        return found

    def _typed(self) -> bool:
        numbers: tuple[Any, ...] = (self.incarnation, self.node, self.nodes)
        digests = (self.run, self.manifest, self.key, self.nonce)
        return (
            all(type(each) is int for each in numbers)
            and 0 <= self.node < self.nodes
            and all(_HEX.fullmatch(each) for each in digests)
            and isinstance(self.site, str)
            and (self.evm is None or bool(_ACCOUNT.fullmatch(self.evm)))
        )


def report_data(runtime_data: bytes) -> bytes:
    """Return the 64 bytes that a quote carries for `runtime_data`: its SHA-512."""
    return hashlib.sha512(runtime_data).digest()


def gpu_nonce(runtime_data: bytes) -> bytes:
    """Return the 32 bytes that every GPU's report carries: the first half of `report_data`."""
    return report_data(runtime_data)[:32]


def nonce_of(size: int, root: bytes, randomness: bytes) -> str:
    """Return the nonce of a moment of the log, hex.

    Args:
        size: Number of statements of the log.
        root: Root of its Merkle tree, 32 bytes.
        randomness: Public randomness; empty if none is at hand.
    """
    return hashlib.sha256(size.to_bytes(8, "big") + root + randomness).hexdigest()
