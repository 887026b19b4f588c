"""Compression: encodes an fp32 tensor to a payload of exactly known size, and decodes it.

`compressor` returns the compressor of a codec spec (see `dilocox.config.codec_spec`) for a buffer
of tensors; the parts of a compressor encode and decode. `codec` returns a flat codec by name. A
frame wraps a payload for the wire. This package knows nothing of sites, rounds or networks.
Decoding is a pure function of the payload, with the same bytes on every machine.
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
from dilocox.compression.fragment_codec import FragmentCodec
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
    "FragmentCodec",
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
