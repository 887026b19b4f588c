"""Deterministic values for golden tests: no generator, the same bits on every machine.

Run as a script it prints the digest of every codec on them, for a fresh interpreter.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from dilocox.compression.registry import CODECS


def patterns(n: int) -> Tensor:
    """n finite fp32 values: blocks between 2^-37 and 2^30, values within a factor 16 of another."""
    number = torch.arange(n, dtype=torch.int64)
    mixed = (number * 2654435761 + (number >> 7) * 40503) & 0xFFFFFFFF
    exponent = 90 + (number >> 7) % 64 + (mixed >> 9) % 4
    bits = ((mixed & 1) << 31) | (exponent << 23) | ((mixed >> 7) & 0x7FFFFF)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def digests(n: int = 1 << 18) -> dict[str, str]:
    """Digest of payload and decoded values, by codec name."""
    values = patterns(n)
    found = {}
    for name, codec in CODECS.items():
        payload = codec.encode(values)
        decoded = codec.decode(payload, n)
        total = hashlib.sha256(payload.numpy().data)
        total.update(decoded.numpy().data)
        found[name] = total.hexdigest()
    return found


if __name__ == "__main__":
    for name, digest in digests().items():
        print(name, digest)
