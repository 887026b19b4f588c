"""Compression: one fp32 tensor to a payload of exactly known size, and back.

`compressor` makes what a codec spec (see `dilocox.config.codec_spec`) names for a buffer of
tensors; its parts encode and decode. `codec` gives a flat codec by name; a frame wraps a payload
for the wire. Nothing here knows sites, rounds or networks. Decoding is a pure function of the
payload: the same bytes on every machine.
"""

from dilocox.compression.base import (
    BLOCK,
    Codec,
    all_zero,
    first_non_finite,
    first_unusable,
    refuse_unusable,
    require_finite,
)
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.compressor import Compressor, Part
from dilocox.compression.frame import (
    FramePart,
    frame_bytes,
    frame_digest,
    frame_payload,
    pack_frame,
    payload_digest,
    unpack_frame,
)
from dilocox.compression.lowrank.codec import LowRank
from dilocox.compression.registry import CODECS, codec, compressor

__all__ = [
    "BLOCK",
    "CODECS",
    "Codec",
    "Compressor",
    "FramePart",
    "Geometry",
    "LowRank",
    "Part",
    "all_zero",
    "codec",
    "compressor",
    "first_non_finite",
    "first_unusable",
    "frame_bytes",
    "frame_digest",
    "frame_payload",
    "pack_frame",
    "payload_digest",
    "refuse_unusable",
    "require_finite",
    "unpack_frame",
]
