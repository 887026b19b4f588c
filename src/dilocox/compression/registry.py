"""All codecs by name, and the compressor of a spec."""

from __future__ import annotations

from functools import lru_cache

import torch

from dilocox.compression.base import Codec
from dilocox.compression.blockwise_int import Quantised
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.cocktail import Cocktail
from dilocox.compression.compressor import Compressor
from dilocox.compression.dense import Dense
from dilocox.compression.int2 import Int2
from dilocox.compression.lowrank.codec import LowRank
from dilocox.compression.top1 import Top1
from dilocox.compression.topk import TopK
from dilocox.config.codec_spec import parse_spec
from dilocox.errors import ConfigError

_ALL: tuple[Codec, ...] = (
    Dense("none", 1, torch.float32),
    Dense("fp16", 2, torch.float16),
    Dense("bf16", 3, torch.bfloat16),
    Quantised("int8", 4, bits=8),
    Quantised("int4", 5, bits=4),
    Int2(),
)
CODECS: dict[str, Codec] = {each.name: each for each in _ALL}
"""The flat codecs."""


def codec(name: str) -> Codec:
    """The flat codec of that name. Raises `ConfigError` with the names that there are."""
    if name not in CODECS:
        raise ConfigError(f"compression.codec: no codec {name!r}; use one of: {', '.join(CODECS)}")
    return CODECS[name]


@lru_cache(maxsize=1024)
def compressor(spec: str, geometry: Geometry) -> Compressor | LowRank:
    """What encodes buffers of that geometry as `spec` says; `LowRank` needs two phases.

    Raises `ConfigError` for a text that is no spec.
    """
    parsed = parse_spec(spec)
    if parsed.kind == "lowrank":
        return LowRank(geometry, parsed.rank, parsed.bits)
    if parsed.kind in ("topk", "top1"):
        picking = TopK(parsed.kept) if parsed.kind == "topk" else Top1(parsed.block)
        found = Compressor(picking.name, picking.identifier, geometry, lambda *_: picking)
    elif parsed.kind == "cocktail":
        one = Cocktail(seed=0, place=0)
        found = Compressor(one.name, one.identifier, geometry, Cocktail)
    else:
        flat = codec(parsed.kind)
        found = Compressor(flat.name, flat.identifier, geometry, lambda _seed, _place: flat)
    return found.with_moments() if parsed.moments else found
