"""What a payload is encoded as, written as one short text: `int4`, `topk:64`, `lowrank:8`.

`int4+moments`: behind the values come row means of second moments
(`dilocox.compression.second_moments`). The text stands in run files, plans and metrics. This module
only reads it, and needs no torch: the coordinator checks run files without it.
`dilocox.compression` makes the codec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dilocox.errors import ConfigError

FLAT = ("none", "fp16", "bf16", "int8", "int4", "int2")
"""Codecs of single values or blocks: they need no number and do not look at tensors' shapes."""
PICKED = ("topk", "top1", "cocktail")
"""Kinds that send values which each site picks for itself."""
SPARSE = (*PICKED, "lowrank")
"""Kinds that send a small part of what there is; the rest waits in the residual for many rounds."""
COARSE = ("int2", *SPARSE)
"""Kinds below 4 bits per value: without error feedback they lose too much."""
WITH_MOMENTS = "+moments"
FRAME_HEADER_BYTES = 64
"""What a payload's frame begins with on the wire (`dilocox.compression.frame`)."""
DEFAULT_KEPT = 64
LARGEST_KEPT = 2048
DEFAULT_BLOCK = 64
LARGEST_BLOCK = 32768
DEFAULT_RANK = 8
LARGEST_RANK = 65535
_FORMS = ", ".join((*FLAT, "topk:K", "top1:B", "cocktail", "lowrank:R", "lowrank:R:int8"))


@dataclass(frozen=True)
class Spec:
    """A codec and its numbers; a number that its kind does not have is 0."""

    kind: str
    """One of `FLAT`, or `topk`, `top1`, `cocktail`, `lowrank`."""
    kept: int = 0
    """topk: how many of every 4,096 values are sent, 1 to 2048."""
    block: int = 0
    """top1: of how many values one is sent, 2 to 32768."""
    rank: int = 0
    """lowrank: columns of each factor, 1 to 65535."""
    bits: int = 0
    """lowrank: bits per value of a factor, 4 or 8."""
    moments: bool = False
    """Second moments travel along; not with lowrank."""

    @property
    def text(self) -> str:
        """The canonical text; `parse_spec` of it is this spec."""
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
        """topk and top1: how many of every 4,096 values are sent; 0 of other kinds."""
        return 4096 / self.block if self.block else float(self.kept)


def sent_with_moments(text: str, moments: bool) -> str:
    """The same codec with second moments behind its values, or without; low rank has never any.

    Raises `ConfigError` as `parse_spec`.
    """
    spec = parse_spec(text)
    return replace(spec, moments=moments and spec.kind != "lowrank").text


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> Spec:
    """The spec that `text` names. Raises `ConfigError` that says what may stand there.

    `topk` is `topk:64`, `top1` is `top1:64`, `lowrank` is `lowrank:8`, and `lowrank:R` is
    `lowrank:R:int4`.
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
    # Digits of other alphabets, signs and leading zeros would be second texts for one spec.
    plain = written.isascii() and written.isdecimal() and not written.startswith("0")
    if not plain or len(written) > 6 or not least <= int(written) <= largest:
        raise ConfigError(
            f"compression.codec: in {text!r}, {what} is a whole number from {least} to {largest}"
        )
    return int(written)


def names_payload(exchange: str, codec: str) -> bool:
    """True where a payload follows from the contribution alone, so that a commitment names it.

    In `reduce` chunks hang on who is there, and a low-rank payload on the basis.
    """
    return exchange == "gather" and parse_spec(codec).kind != "lowrank"
