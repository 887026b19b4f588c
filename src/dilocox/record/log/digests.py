"""Digests of tensors and of whole model states.

A tensor's leaf is the canonical JSON of its name, dtype, shape and the SHA-256 of its little-endian
bytes; a stage is the RFC 6962 tree over its leaves sorted by name, and a model state the tree over
its stages. No file format is hashed: the same weights have many safetensors files.
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
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def sealed(digest: str, run: str, key: str, site: str, shard: int) -> str:
    """What a commitment to `key`'s exchange holds of a digest, hex.

    It is bound to who commits: nobody can take over a commitment of which it has not seen what is
    behind it.
    """
    return sha256(COMMITMENT + rfc8785.dumps([run, key, site, shard, digest]))


def digest_text(text: Any) -> str:
    """A SHA-256 as it is written, 64 hex digits. Raises `ValueError` for anything else."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ValueError(f"not a digest: {str(text)[:80]!r}")
    return text


@dataclass(frozen=True)
class TensorDigest:
    """What is said of one tensor of a state."""

    name: str
    dtype: str
    """As PyTorch names it, `float32` say."""
    shape: tuple[int, ...]
    sha256: str
    """Of its elements' little-endian bytes in row-major order; also its address in the store."""

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        bits = re.search(r"[0-9]+", self.dtype)
        return math.prod(self.shape) * (max(1, int(bits[0]) // 8) if bits else 1)

    @property
    def leaf(self) -> bytes:
        """Hash of its leaf, 32 bytes."""
        return leaf_hash(rfc8785.dumps([self.name, self.dtype, list(self.shape), self.sha256]))

    def to_json(self) -> dict[str, Any]:
        """As a statement says it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TensorDigest:
        """Inverse of `to_json`. Raises `RecordError`."""
        try:
            shape = tuple(int(size) for size in found["shape"])
            result = cls(
                str(found["name"]), str(found["dtype"]), shape, digest_text(found["sha256"])
            )
        except (KeyError, TypeError, ValueError):
            raise RecordError("a statement names a tensor without dtype, shape or digest") from None
        if min(shape, default=0) < 0 or result.to_json() != dict(found):
            raise RecordError(f"a statement names tensor {result.name!r} in no known form")
        return result


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements, little-endian (the hosts are) and in row-major order."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(name: str, tensor: Tensor) -> TensorDigest:
    """The digest of a tensor, on any device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorDigest(name, dtype, tuple(tensor.shape), sha256(tensor_bytes(tensor)))


def stage_root(tensors: Iterable[TensorDigest]) -> bytes:
    """Root of one stage's tensors, whatever their order. Raises `RecordError` for a name twice."""
    found = sorted(tensors, key=lambda each: each.name)
    names = [each.name for each in found]
    if len(set(names)) != len(names):
        raise RecordError("a state names a tensor twice")
    return root_of([each.leaf for each in found])
