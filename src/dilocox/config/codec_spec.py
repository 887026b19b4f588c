"""Codec specifications: short texts such as `int4`, `topk:64` or `lowrank:8`.

A specification names the codec of a payload in run files, plans and metrics. In `int4+moments`, row
means of second moments follow the encoded values (`dilocox.compression.second_moments`).

This module only parses specifications; `dilocox.compression` builds codecs from them. It does not
import torch, so that the coordinator can check run files without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dilocox.errors import ConfigError

FLAT = ("none", "fp16", "bf16", "int8", "int4", "int2")
"""Kinds that encode single values or blocks. They take no number and ignore tensor shapes."""
PICKED = ("topk", "top1", "cocktail")
"""Kinds that send a subset of the values; each site chooses its own subset."""
SPARSE = (*PICKED, "lowrank")
"""Kinds that send a small part of a contribution. The rest waits in the residual for many
rounds."""
COARSE = ("int2", *SPARSE)
"""Kinds below 4 bits per value. Without error feedback they lose too much."""
WITH_MOMENTS = "+moments"
FRAME_HEADER_BYTES = 64
"""Bytes of the header of a payload's frame on the wire (`dilocox.compression.frame`)."""
DEFAULT_KEPT = 64
LARGEST_KEPT = 2048
DEFAULT_BLOCK = 64
LARGEST_BLOCK = 32768
DEFAULT_RANK = 8
LARGEST_RANK = 65535
_FORMS = ", ".join((*FLAT, "topk:K", "top1:B", "cocktail", "lowrank:R", "lowrank:R:int8"))


@dataclass(frozen=True)
class Spec:
    """A codec kind and its numbers. A number that the kind does not use is 0."""

    kind: str
    """One of `FLAT`, or `topk`, `top1`, `cocktail`, `lowrank`."""
    kept: int = 0
    """topk: number of values sent out of every 4,096, from 1 to 2048."""
    block: int = 0
    """top1: block size in values, from 2 to 32768; one value of each block is sent."""
    rank: int = 0
    """lowrank: columns of each factor, from 1 to 65535."""
    bits: int = 0
    """lowrank: bits per value of a factor, 4 or 8."""
    moments: bool = False
    """Whether row means of second moments follow the values. Always false for lowrank."""

    @property
    def text(self) -> str:
        """The canonical text of this spec; `parse_spec(spec.text) == spec`."""
        text = self.kind
        if self.kind == "topk":
            text = f"topk:{self.kept}"
        if self.kind == "top1":
            text = f"top1:{self.block}"
        if self.kind == "lowrank":
            text = f"lowrank:{self.rank}" + (":int8" if self.bits == 8 else "")
        return text + WITH_MOMENTS * self.moments

    @property
    def density(self) -> float:
        """topk and top1: number of values sent out of every 4,096. Other kinds: 0."""
        return 4096 / self.block if self.block else float(self.kept)


def sent_with_moments(text: str, moments: bool) -> str:
    """Returns the canonical text of codec `text`, with or without second moments.

    A lowrank codec never carries moments, so it stays without. Raises `ConfigError` if `text` is
    not a codec.
    """
    spec = parse_spec(text)
    return replace(spec, moments=moments and spec.kind != "lowrank").text


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> Spec:
    """Parse a codec text.

    A missing number takes its default: `topk` means `topk:64`, `top1` means `top1:64`, `lowrank`
    means `lowrank:8`, and `lowrank:R` means `lowrank:R:int4`. Raises `ConfigError`, which lists the
    valid forms, if `text` is not a codec.
    """
    if text.endswith(WITH_MOMENTS):
        spec = parse_spec(text.removesuffix(WITH_MOMENTS))
        if spec.moments or spec.kind == "lowrank":
            raise ConfigError(f"compression.codec: no codec {text!r}; use one of: {_FORMS}")
        return replace(spec, moments=True)
    kind, *numbers = text.split(":")
    if kind in (*FLAT, "cocktail") and not numbers:
        return Spec(kind)
    if kind == "topk" and len(numbers) <= 1:
        kept = _number(text, numbers, DEFAULT_KEPT, "K", LARGEST_KEPT)
        return Spec(kind, kept=kept)
    if kind == "top1" and len(numbers) <= 1:
        block = _number(text, numbers, DEFAULT_BLOCK, "B", LARGEST_BLOCK, least=2)
        return Spec(kind, block=block)
    if kind == "lowrank" and (len(numbers) <= 1 or numbers[1:] in (["int4"], ["int8"])):
        rank = _number(text, numbers, DEFAULT_RANK, "R", LARGEST_RANK)
        return Spec(kind, rank=rank, bits=8 if numbers[1:] == ["int8"] else 4)
    raise ConfigError(f"compression.codec: no codec {text!r}; use one of: {_FORMS}")


def _number(
    text: str, numbers: list[str], default: int, what: str, largest: int, least: int = 1
) -> int:
    if not numbers:
        return default
    written = numbers[0]
    # A spec must have only one text, so other scripts' digits, signs and leading zeros are refused.
    plain = written.isascii() and written.isdecimal() and not written.startswith("0")
    if not plain or len(written) > 6 or not least <= int(written) <= largest:
        raise ConfigError(
            f"compression.codec: in {text!r}, {what} is a whole number from {least} to {largest}"
        )
    return int(written)


def names_payload(exchange: str, codec: str) -> bool:
    """Whether a commitment to a contribution also fixes the digest of its payload.

    True if the payload is a function of the contribution alone. In exchange `reduce`, the chunks
    also depend on which sites take part; a lowrank payload also depends on the shared basis.
    """
    return exchange == "gather" and parse_spec(codec).kind != "lowrank"
