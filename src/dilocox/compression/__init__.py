"""Compression: one fp32 tensor to a payload of exactly known size, and back.

`codec` gives a codec by name; a frame wraps its payload for the wire. Nothing here knows sites,
rounds or networks. Decoding is a pure function of the payload: the same bytes on every machine.
"""

from dilocox.compression.base import BLOCK, Codec, first_non_finite, require_finite
from dilocox.compression.frame import (
    frame_bytes,
    frame_digest,
    pack_frame,
    payload_digest,
    unpack_frame,
)
from dilocox.compression.registry import CODECS, codec

__all__ = [
    "BLOCK",
    "CODECS",
    "Codec",
    "codec",
    "first_non_finite",
    "frame_bytes",
    "frame_digest",
    "pack_frame",
    "payload_digest",
    "require_finite",
    "unpack_frame",
]
