"""All codecs by name."""

from __future__ import annotations

import torch

from dilocox.compression.base import Codec
from dilocox.compression.dense import Dense
from dilocox.compression.quantised import Quantised
from dilocox.errors import ConfigError

_ALL: tuple[Codec, ...] = (
    Dense("none", 1, torch.float32),
    Dense("fp16", 2, torch.float16),
    Dense("bf16", 3, torch.bfloat16),
    Quantised("int8", 4, bits=8),
    Quantised("int4", 5, bits=4),
)
CODECS: dict[str, Codec] = {each.name: each for each in _ALL}


def codec(name: str) -> Codec:
    """The codec of that name. Raises `ConfigError` with the names that there are."""
    if name not in CODECS:
        raise ConfigError(f"compression.codec: no codec {name!r}; use one of: {', '.join(CODECS)}")
    return CODECS[name]
