"""A payload on the wire: 64 bytes that say what it is, then the payload.

Header, little-endian: magic (4 bytes), format version (u16), codec identifier (u16), number of
values (u64), payload length in bytes (u64), SHA-256 of the payload (32 bytes), 8 zero bytes. A
frame is refused for any difference from what the receiver expects; nothing in it is trusted.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from dilocox.compression.base import Codec
from dilocox.errors import ExchangeError

FORMAT_VERSION = 1
HEADER_BYTES = 64

_MAGIC = b"DLCX"
_HEADER = struct.Struct("<4sHHQQ32s8s")
_RESERVED = bytes(8)


def frame_bytes(codec: Codec, n: int) -> int:
    """Exact size in bytes of the frame of n values."""
    return HEADER_BYTES + codec.payload_bytes(n)


def payload_digest(payload: Tensor) -> bytes:
    """SHA-256 of a uint8 tensor in host memory, 32 bytes."""
    return hashlib.sha256(payload.contiguous().numpy().data).digest()


def pack_frame(codec: Codec, n: int, payload: Tensor) -> Tensor:
    """uint8 [payload_bytes(n)] on any device to uint8 [frame_bytes(codec, n)] in host memory.

    Raises `ExchangeError` if the payload does not have the size of n values.
    """
    size = codec.payload_bytes(n)
    if payload.dtype != torch.uint8 or payload.shape != (size,):
        raise ExchangeError(
            f"{codec.name} payload of {n} values must be uint8 [{size}], got {payload.dtype} "
            f"{list(payload.shape)}"
        )
    frame = torch.empty(HEADER_BYTES + size, dtype=torch.uint8)
    frame[HEADER_BYTES:].copy_(payload)
    digest = payload_digest(frame[HEADER_BYTES:])
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, codec.identifier, n, size, digest, _RESERVED)
    frame[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return frame


def frame_digest(frame: Tensor) -> bytes:
    """The payload's SHA-256, 32 bytes, as the header of a whole uint8 frame says it."""
    header = frame[:HEADER_BYTES].numpy().tobytes()
    digest: bytes = _HEADER.unpack(header)[5]
    return digest


def unpack_frame(frame: bytes | bytearray | memoryview | Tensor, codec: Codec, n: int) -> Tensor:
    """The payload, uint8 [payload_bytes(n)] in host memory, of a frame that holds n values.

    The result shares memory with a tensor `frame` and is a copy of any other. Raises
    `ExchangeError` with the reason if the frame is cut short, too long, of another format,
    codec or number of values, or if its payload is not the one that was sent.
    """
    if not isinstance(frame, Tensor):
        if len(frame) < HEADER_BYTES:
            raise _short(len(frame))
        frame = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    if frame.dtype != torch.uint8 or frame.dim() != 1 or frame.device.type != "cpu":
        raise ExchangeError("frame refused: not a flat uint8 tensor in host memory")
    if frame.numel() < HEADER_BYTES:
        raise _short(frame.numel())
    header = frame[:HEADER_BYTES].contiguous().numpy().tobytes()
    magic, version, identifier, count, length, digest, reserved = _HEADER.unpack(header)
    size = codec.payload_bytes(n)
    payload = frame[HEADER_BYTES:]
    if magic != _MAGIC:
        raise ExchangeError("frame refused: it does not start as a dilocox payload does")
    if version != FORMAT_VERSION:
        raise ExchangeError(
            f"frame refused: format version {version}, this dilocox speaks {FORMAT_VERSION}; run "
            "the same version at every site"
        )
    if identifier != codec.identifier:
        raise ExchangeError(
            f"frame refused: codec number {identifier}, expected {codec.identifier} "
            f"({codec.name}); run the same run file at every site"
        )
    if count != n:
        raise ExchangeError(
            f"frame refused: {count} values, expected {n}; the sites differ in their fragments"
        )
    if length != size or payload.numel() != size:
        raise ExchangeError(
            f"frame refused: payload of {payload.numel()} bytes (header says {length}), expected "
            f"{size}; it was cut or padded on its way"
        )
    if reserved != _RESERVED:
        raise ExchangeError("frame refused: the reserved bytes of its header are not zero")
    if payload_digest(payload) != digest:
        raise ExchangeError(
            "frame refused: its payload does not have the digest that its header names; it was "
            "damaged on its way and must be sent again"
        )
    return payload


def _short(length: int) -> ExchangeError:
    return ExchangeError(
        f"frame refused: {length} bytes are less than its header of {HEADER_BYTES}"
    )
