"""Digests of tensors and of the stages of a model.

A tensor's leaf is the canonical JSON of its name, dtype, shape and the SHA-256 of its little-endian
bytes. The root of a stage is the root of the RFC 6962 Merkle tree over its leaves, sorted by name.
Digests do not depend on a file format, because the same weights can be stored in many different
safetensors files.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rfc8785

from dilocox.errors import RecordError
from dilocox.record.log.merkle import leaf_hash, root_of

if TYPE_CHECKING:
    from torch import Tensor


_DIGEST = re.compile("[0-9a-f]{64}")
COMMITMENT = b"dilocox/commitment/v1\0"


def sha256(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of `data`, in hex."""
    return hashlib.sha256(data).hexdigest()


def sealed(digest: str, run: str, key: str, site: str, shard: int) -> str:
    """Return the sealed form of `digest` for a commitment to exchange `key`, SHA-256 in hex.

    The sealed form depends on the run, the exchange, the site and the shard. So a site that has not
    seen the committed data cannot copy the commitment of another site.
    """
    return sha256(COMMITMENT + rfc8785.dumps([run, key, site, shard, digest]))


def digest_text(text: Any) -> str:
    """Return `text` if it is 64 lower-case hex digits. Raises `ValueError` otherwise."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ValueError(f"not a digest: {str(text)[:80]!r}")
    return text


@dataclass(frozen=True)
class TensorDigest:
    """Name, dtype, shape and digest of one tensor of a state."""

    name: str
    dtype: str
    """PyTorch's name of the dtype, for example `float32`."""
    shape: tuple[int, ...]
    sha256: str
    """SHA-256, hex, of the elements' little-endian bytes in row-major order; also the tensor's
    address in the store."""

    @property
    def size(self) -> int:
        """Bytes of the tensor's elements."""
        bits = re.search(r"[0-9]+", self.dtype)
        return math.prod(self.shape) * (max(1, int(bits[0]) // 8) if bits else 1)

    @property
    def leaf(self) -> bytes:
        """Hash of the tensor's Merkle leaf, 32 bytes."""
        return leaf_hash(rfc8785.dumps([self.name, self.dtype, list(self.shape), self.sha256]))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that statements and lists of tensors contain."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TensorDigest:
        """Parse `to_json`. Raises `RecordError` for any other form."""
        try:
            shape = tuple(int(size) for size in found["shape"])
            result = cls(
                str(found["name"]), str(found["dtype"]), shape, digest_text(found["sha256"])
            )
        except (KeyError, TypeError, ValueError):
            raise RecordError("a statement names a tensor without dtype, shape or digest") from None
        if min(shape, default=0) < 0 or result.to_json() != dict(found):
            raise RecordError(f"a statement names tensor {result.name!r} in an unknown form")
        return result


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes in row-major order, little-endian as all hosts are."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(name: str, tensor: Tensor) -> TensorDigest:
    """Compute the digest of a tensor on any device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorDigest(name, dtype, tuple(tensor.shape), sha256(tensor_bytes(tensor)))


def stage_root(tensors: Iterable[TensorDigest]) -> bytes:
    """Return the Merkle root of one stage's tensors, given in any order, 32 bytes.

    Raises `RecordError` if two tensors have the same name.
    """
    found = sorted(tensors, key=lambda each: each.name)
    names = [each.name for each in found]
    if len(set(names)) != len(names):
        raise RecordError("a state names a tensor twice")
    return root_of([each.leaf for each in found])
