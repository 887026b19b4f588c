"""A payload on the wire: 64 bytes that say what it is, then the payload.

Header, little-endian: magic (4 bytes), format version (u16), codec identifier (u16), number of
values (u64), payload length in bytes (u64), SHA-256 of the payload (32 bytes), two numbers of the
codec's own (u32 each: top-k's values per chunk; top-1's values per block; low rank's rank and
bits; else zeros). A frame is refused for any difference from what the receiver expects; nothing in
it is trusted.
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
    """What sender and receiver know of a payload before it is sent."""

    @property
    def identifier(self) -> int:
        """Number of the codec, or of the message if a codec has several."""
        ...

    @property
    def numbers(self) -> tuple[int, int]:
        """The codec's own numbers, see `Codec.numbers`."""
        ...

    @property
    def name(self) -> str:
        """Name of the codec, for messages."""
        ...

    @property
    def values(self) -> int:
        """Number of values that the payload stands for."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Exact size of the payload."""
        ...


def frame_bytes(part: FramePart) -> int:
    """Exact size in bytes of the frame of a payload of `part`."""
    return FRAME_HEADER_BYTES + part.payload_bytes


def payload_digest(payload: Tensor) -> bytes:
    """SHA-256 of a uint8 tensor in host memory, 32 bytes."""
    return hashlib.sha256(payload.contiguous().numpy().data).digest()


def pack_frame(part: FramePart, payload: Tensor, into: Tensor | None = None) -> Tensor:
    """uint8 [payload_bytes] on any device to uint8 [frame_bytes(part)] in host memory.

    The frame is `into`, if that is given. Raises `ExchangeError` if the payload does not have the
    size of `part`.
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
    """The payload, uint8 [payload_bytes], of a frame that was packed here: not a copy."""
    return frame[FRAME_HEADER_BYTES:]


def frame_digest(frame: Tensor) -> bytes:
    """The payload's SHA-256, 32 bytes, as the header of a whole uint8 frame says it."""
    header = frame[:FRAME_HEADER_BYTES].numpy().tobytes()
    digest: bytes = _HEADER.unpack(header)[5]
    return digest


def unpack_frame(frame: bytes | bytearray | memoryview | Tensor, part: FramePart) -> Tensor:
    """The payload, uint8 [payload_bytes] in host memory, of a frame that holds `part`.

    The result shares memory with a tensor `frame` and is a copy of any other. Raises
    `ExchangeError` with the reason if the frame is cut short, too long, of another format,
    codec or number of values, or if its payload is not the one that was sent.
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
