"""A payload on the wire: a header of 64 bytes, then the payload.

Fields of the header, little-endian:

- magic (4 bytes), format version (u16), codec identifier (u16),
- number of values (u64), payload length in bytes (u64),
- SHA-256 of the payload (32 bytes),
- two parameters of the codec (u32 each, see `Codec.numbers`).

The receiver trusts no field. It knows the header that it expects, and refuses a frame that differs
in any field.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

import torch
from torch import Tensor

from dilocox.config.codec_spec import FRAME_HEADER_BYTES
from dilocox.errors import ExchangeError

FORMAT_VERSION = 2

_MAGIC = b"DLCX"
_HEADER = struct.Struct("<4sHHQQ32sII")


class FramePart(Protocol):
    """Properties of a payload that sender and receiver know before it is sent."""

    @property
    def identifier(self) -> int:
        """Number of the codec. A codec with several messages has a number for each message."""
        ...

    @property
    def numbers(self) -> tuple[int, int]:
        """Parameters of the codec; see `Codec.numbers`."""
        ...

    @property
    def name(self) -> str:
        """Name of the codec, for messages."""
        ...

    @property
    def values(self) -> int:
        """Number of values that the payload encodes."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Exact size of the payload."""
        ...


def frame_bytes(part: FramePart) -> int:
    """Return the exact size, in bytes, of the frame of a payload of `part`."""
    return FRAME_HEADER_BYTES + part.payload_bytes


def payload_digest(payload: Tensor) -> bytes:
    """Return the SHA-256, 32 bytes, of a uint8 tensor in host memory."""
    return hashlib.sha256(payload.contiguous().numpy().data).digest()


def pack_frame(part: FramePart, payload: Tensor, into: Tensor | None = None) -> Tensor:
    """Frame a payload, uint8 [payload_bytes] on any device: uint8 [frame_bytes(part)] on the host.

    The frame is written into `into` if given. Raises `ExchangeError` if the payload does not have
    the size of `part`.
    """
    size = part.payload_bytes
    if payload.dtype != torch.uint8 or payload.shape != (size,):
        raise ExchangeError(
            f"{part.name} payload of {part.values} values must be uint8 [{size}], got "
            f"{payload.dtype} {list(payload.shape)}"
        )
    frame = torch.empty(FRAME_HEADER_BYTES + size, dtype=torch.uint8) if into is None else into
    frame[FRAME_HEADER_BYTES:].copy_(payload)
    digest = payload_digest(frame[FRAME_HEADER_BYTES:])
    header = _HEADER.pack(
        _MAGIC, FORMAT_VERSION, part.identifier, part.values, size, digest, *part.numbers
    )
    frame[:FRAME_HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return frame


def frame_payload(frame: Tensor) -> Tensor:
    """Return the payload, uint8 [payload_bytes], of a frame from `pack_frame`; not a copy."""
    return frame[FRAME_HEADER_BYTES:]


def frame_digest(frame: Tensor) -> bytes:
    """Return the payload's SHA-256, 32 bytes, from the header of a complete uint8 frame."""
    header = frame[:FRAME_HEADER_BYTES].numpy().tobytes()
    digest: bytes = _HEADER.unpack(header)[5]
    return digest


def unpack_frame(frame: bytes | bytearray | memoryview | Tensor, part: FramePart) -> Tensor:
    """Check a received frame against `part` and return its payload, uint8 [payload_bytes].

    The result is in host memory. If `frame` is a tensor, the result shares its memory; otherwise
    the result is a copy. Raises `ExchangeError`, with the reason, if the frame has another length,
    format, codec or number of values than expected, or if the payload's digest is wrong.
    """
    if not isinstance(frame, Tensor):
        if len(frame) < FRAME_HEADER_BYTES:
            raise _short(len(frame))
        frame = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    if frame.dtype != torch.uint8 or frame.dim() != 1 or frame.device.type != "cpu":
        raise ExchangeError("frame refused: not a flat uint8 tensor in host memory")
    if frame.numel() < FRAME_HEADER_BYTES:
        raise _short(frame.numel())
    header = frame[:FRAME_HEADER_BYTES].contiguous().numpy().tobytes()
    magic, version, identifier, count, length, digest, *numbers = _HEADER.unpack(header)
    size = part.payload_bytes
    payload = frame[FRAME_HEADER_BYTES:]
    if magic != _MAGIC:
        raise ExchangeError("frame refused: it does not start as a dilocox payload does")
    if version != FORMAT_VERSION:
        raise ExchangeError(
            f"frame refused: format version {version}, this dilocox speaks {FORMAT_VERSION}; run "
            "the same version at every site"
        )
    if identifier != part.identifier:
        raise ExchangeError(
            f"frame refused: codec number {identifier}, expected {part.identifier} "
            f"({part.name}); run the same run file at every site"
        )
    if tuple(numbers) != part.numbers:
        raise ExchangeError(
            f"frame refused: codec number {identifier} with {numbers[0]} and {numbers[1]}, "
            f"expected {part.numbers[0]} and {part.numbers[1]} ({part.name}); the sites differ in "
            "their plans"
        )
    if count != part.values:
        raise ExchangeError(
            f"frame refused: {count} values, expected {part.values}; the sites differ in their "
            "fragments"
        )
    if length != size or payload.numel() != size:
        raise ExchangeError(
            f"frame refused: payload of {payload.numel()} bytes (header says {length}), expected "
            f"{size}; it was cut or padded on its way"
        )
    if payload_digest(payload) != digest:
        raise ExchangeError(
            "frame refused: its payload does not have the digest that its header names; it was "
            "damaged on its way and must be sent again"
        )
    return payload


def _short(length: int) -> ExchangeError:
    return ExchangeError(
        f"frame refused: {length} bytes are less than its header of {FRAME_HEADER_BYTES}"
    )
