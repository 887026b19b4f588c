"""Codec specifications: short texts such as `int4`, `topk:64` or `lowrank:8`.

A specification names the codec of a payload in run files, plans and metrics. In `int4+moments`, row
means of second moments follow the encoded values (`dilocox.compression.second_moments`).

This module only parses specifications, by the records of `dilocox.config.codec_kinds`;
`dilocox.compression` builds codecs from them. It does not import torch, so that the coordinator can
check run files without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dilocox.config.codec_kinds import CodecKind, CodecNumber, find_kind, known_forms
from dilocox.errors import ConfigError

WITH_MOMENTS = "+moments"
FRAME_HEADER_BYTES = 64
"""Bytes of the header of a payload's frame on the wire (`dilocox.compression.frame`)."""


@dataclass(frozen=True)
class Spec:
    """A codec kind, with its number and its variant."""

    kind: str
    """Name of a `CodecKind`."""
    number: int = 0
    """K of topk, B of top1, rank of lowrank; 0 if the kind takes no number."""
    variant: str = ""
    """One of `CodecKind.variants` (lowrank: `int4`, `int8`); empty if the kind has none."""
    moments: bool = False
    """Whether row means of second moments follow the values. Always false for lowrank."""

    @property
    def text(self) -> str:
        """The canonical text of this spec; `parse_spec(spec.text) == spec`."""
        return self.record.text(self.number, self.variant) + WITH_MOMENTS * self.moments

    @property
    def density(self) -> float:
        """Number of values sent out of every 4,096; 0 if the kind's record has no density."""
        density = self.record.density
        return 0.0 if density is None else density(self.number)

    @property
    def record(self) -> CodecKind:
        """The record of the kind. Raises `ConfigError` if this process does not know the kind."""
        found = find_kind(self.kind)
        if found is None:
            raise _unknown(self.kind)
        return found


def sent_with_moments(text: str, moments: bool) -> str:
    """Returns the canonical text of codec `text`, with or without second moments.

    A lowrank codec never carries moments, so it stays without. Raises `ConfigError` if `text` is
    not a codec.
    """
    spec = parse_spec(text)
    return replace(spec, moments=moments and spec.record.carries_moments).text


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> Spec:
    """Parse a codec text.

    A missing number takes its default: `topk` means `topk:64`, `top1` means `top1:64`, `lowrank`
    means `lowrank:8`, and `lowrank:R` means `lowrank:R:int4`. Raises `ConfigError`, which lists the
    valid forms, if `text` is not a codec.
    """
    if text.endswith(WITH_MOMENTS):
        spec = parse_spec(text.removesuffix(WITH_MOMENTS))
        if spec.moments or not spec.record.carries_moments:
            raise _unknown(text)
        return replace(spec, moments=True)
    name, *behind = text.split(":")
    kind = find_kind(name)
    if kind is None or (behind and kind.number is None) or len(behind) > 2:
        raise _unknown(text)
    if behind[1:] and behind[1] not in kind.variants:
        raise _unknown(text)
    variant = "".join(behind[1:] or kind.variants[:1])
    number = 0 if kind.number is None else _number(text, behind, kind.number)
    return Spec(name, number, variant)


def _unknown(text: str) -> ConfigError:
    return ConfigError(f"compression.codec: no codec {text!r}; use one of: {known_forms()}")


def _number(text: str, behind: list[str], due: CodecNumber) -> int:
    if not behind:
        return due.default
    written = behind[0]
    # A spec must have only one text, so other scripts' digits, signs and leading zeros are refused.
    plain = written.isascii() and written.isdecimal() and not written.startswith("0")
    if not plain or len(written) > 6 or not due.least <= int(written) <= due.largest:
        raise ConfigError(
            f"compression.codec: in {text!r}, {due.letter} is a whole number from {due.least} to "
            f"{due.largest}"
        )
    return int(written)


def names_payload(exchange: str, codec: str) -> bool:
    """Whether a commitment to a contribution also fixes the digest of its payload.

    True if the payload is a function of the contribution alone. In exchange `reduce`, the chunks
    also depend on which sites take part; a lowrank payload also depends on the shared basis.
    """
    return exchange == "gather" and not parse_spec(codec).record.agrees_first
