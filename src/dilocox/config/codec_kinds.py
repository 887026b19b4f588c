"""Kinds of codecs: one record per kind, which every other module reads.

`BUILT_IN` has the records of the built-in kinds. Other packages add records with `register_codec`
or with an entry point of the group `dilocox.codecs` (docs/extending.md). This module does not
import torch: a record names the function that builds the codec, and `dilocox.compression.registry`
calls the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dilocox.config.extensions import Registry

GROUP = "dilocox.codecs"
LARGEST_KEPT = 2048
LARGEST_BLOCK = 32768
LARGEST_RANK = 65535
_KEPT = (328, 232, 164, 116, 82, 58, 41, 35, 29, 24, 20, 17, 15, 13, 12, 11, 10, 9, 8, 7, 6, 5)
_BLOCKS = (12, 18, 25, 35, 50, 70, 100, 118, 140, 170, 205, 240, 290, 340, 410, 490, 590, 700, 850,
           1000, 1200, 1500, 1800, 2200, 2600)  # fmt: skip
_MOST_DIGITS = 6

Build = Callable[[int, int, int], Any]
"""Builds a `dilocox.compression.Codec` from (number, seed, place).

`number` is the spec's number, or 0 if the kind takes none. `seed` is the same at all sites and new
in every exchange. `place` is the position of the first value in the fragment's buffer. Only the
built-in `lowrank` is built from (geometry, number, variant) instead, because it encodes whole
buffers.
"""


@dataclass(frozen=True)
class CodecNumber:
    """The whole number after a kind's name: the 64 of `topk:64`."""

    letter: str
    """Name of the number in messages: the K of `topk:K`."""
    default: int
    """The number of a text without a number."""
    least: int
    """Smallest number that a text may have; at least 1."""
    largest: int
    """Largest number that a text may have; at most 999,999."""


@dataclass(frozen=True)
class CodecKind:
    """Facts about one kind of codec that other modules need."""

    name: str
    """First word of the codec's text in run files, plans and metrics."""
    build: str | Build
    """A `Build`, or its place as `module:function`. With a place, the coordinator does not import
    torch. The `name` of the codec that is built must be its whole text (`topk:64`)."""
    bytes_per_value: float
    """Upper bound for payloads. The planner counts memory with it."""
    number: CodecNumber | None = None
    """The number in the kind's texts. None: the text is the name alone."""
    variants: tuple[str, ...] = ()
    """Words that may follow the number. The first is the default, and canonical texts omit it.
    Only the built-in `lowrank` has variants."""
    needs_feedback: bool = False
    """Whether the kind loses too much without error feedback."""
    sparse: bool = False
    """Whether a payload carries a small part of the contribution. The rest waits in the residual
    for many rounds."""
    picks: bool = False
    """Whether each site picks the values that it sends, so that sites send different values."""
    averages_in_parts: bool = True
    """Whether `outer.exchange = "reduce"` may cut the buffer into parts that are encoded apart."""
    carries_moments: bool = True
    """Whether second moments may follow the values of a payload."""
    agrees_first: bool = False
    """Whether sites agree on a basis before they encode. Only the built-in `lowrank` does."""
    density: Callable[[int], float] | None = None
    """Number of values sent out of every 4,096, from the spec's number. None: all values."""
    loses_like: str = ""
    """Kind whose measured loss the controller uses for this kind. Empty: the loss is unknown, and
    the controller never chooses the kind by itself."""
    offered: tuple[str, ...] = ()
    """Texts that the controller may choose, least lossy first. Texts of a kind that is not built in
    count only in runs whose run file has a codec of that kind: then every process knows the
    kind."""
    computes_like: str = "int4"
    """Built-in kind whose measured speed the planner uses if its table lacks this kind."""

    def text(self, number: int, variant: str) -> str:
        """Return the canonical text of a codec of this kind, without moments."""
        text = self.name if self.number is None else f"{self.name}:{number}"
        return text if variant in self.variants[:1] or not variant else f"{text}:{variant}"

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the kind's texts, for messages."""
        first = self.name if self.number is None else f"{self.name}:{self.number.letter}"
        return (first, *(f"{first}:{variant}" for variant in self.variants[1:]))


_AT = "dilocox.compression"
BUILT_IN = (
    CodecKind("none", f"{_AT}.dense:build_none", 4.0, loses_like="none", offered=("none",)),
    CodecKind("fp16", f"{_AT}.dense:build_fp16", 2.0, loses_like="none"),
    CodecKind("bf16", f"{_AT}.dense:build_bf16", 2.0, loses_like="none"),
    CodecKind("int8", f"{_AT}.blockwise_int:build_int8", 1.02, loses_like="int8",
              offered=("int8",)),
    CodecKind("int4", f"{_AT}.blockwise_int:build_int4", 0.52, loses_like="int4",
              offered=("int4",)),
    CodecKind("int2", f"{_AT}.int2:build_int2", 0.3, needs_feedback=True, loses_like="int2",
              offered=("int2",)),
    CodecKind(
        "topk", f"{_AT}.topk:build_topk", 0.3, CodecNumber("K", 64, 1, LARGEST_KEPT),
        needs_feedback=True, sparse=True, picks=True, averages_in_parts=False, density=float,
        loses_like="topk", offered=tuple(f"topk:{kept}" for kept in _KEPT),
    ),
    CodecKind(
        "top1", f"{_AT}.top1:build_top1", 0.3, CodecNumber("B", 64, 2, LARGEST_BLOCK),
        needs_feedback=True, sparse=True, picks=True, averages_in_parts=False,
        density=lambda block: 4096 / block, loses_like="top1",
        offered=tuple(f"top1:{block}" for block in _BLOCKS),
    ),
    CodecKind("cocktail", f"{_AT}.cocktail:build_cocktail", 0.3, needs_feedback=True, sparse=True,
              picks=True),
    CodecKind(
        "lowrank", f"{_AT}.lowrank.codec:build_lowrank", 0.3, CodecNumber("R", 8, 1, LARGEST_RANK),
        ("int4", "int8"), needs_feedback=True, sparse=True, averages_in_parts=False,
        carries_moments=False, agrees_first=True,
    ),
)  # fmt: skip
"""The kinds that come with dilocox."""


def register_codec(kind: CodecKind) -> None:
    """Register a kind of codec in this process and in the processes that it forks.

    Call the function before the run file is resolved. A fresh process needs an entry point of the
    group `dilocox.codecs` instead (docs/extending.md). Registering an equal record again changes
    nothing.

    Args:
        kind: The record of the codec's kind.

    Raises:
        ConfigError: The name is taken or malformed, or fields of the record contradict each other.
    """
    _KINDS.add(kind)


def find_kind(name: str) -> CodecKind | None:
    """Return the kind of that name, or None. Raises `ConfigError` for a broken entry point."""
    return _KINDS.find(name)


def known_forms() -> str:
    """Return the forms of all codecs for messages, and the names of entry points not yet loaded."""
    forms = [form for kind in _KINDS.records.values() for form in kind.forms]
    return ", ".join((*forms, *_KINDS.not_loaded()))


def _problem(kind: CodecKind) -> str | None:
    """Return the reason against the record of a kind that is not built in, or None."""
    if kind.agrees_first or kind.variants:
        return "only built-in kinds have agrees_first and variants; leave them out"
    number = kind.number
    if number and not 0 < number.least <= number.default <= number.largest < 10**_MOST_DIGITS:
        return "its number needs 0 < least <= default <= largest < 1,000,000"
    if kind.picks and not kind.sparse:
        return "a kind that picks values is sparse; set sparse = True"
    if kind.sparse and not kind.needs_feedback:
        return "a sparse kind needs error feedback; set needs_feedback = True"
    measured = {each.name: each for each in BUILT_IN if each.loses_like == each.name}
    like = measured.get(kind.loses_like)
    if kind.loses_like and like is None:
        return f"loses_like is no kind of the loss table; use one of: {', '.join(measured)}"
    if like is not None and like.density is not None and kind.density is None:
        return f"{like.name} loses by its density; give a density too"
    if kind.offered and not kind.loses_like:
        return "the controller chooses by the loss; set loses_like, or leave offered out"
    if any(text.partition(":")[0] != kind.name for text in kind.offered):
        return "offered has texts of another kind"
    built_in = [each.name for each in BUILT_IN]
    if kind.computes_like not in built_in:
        return f"computes_like is no built-in kind; use one of: {', '.join(built_in)}"
    return None


_KINDS = Registry(GROUP, CodecKind, BUILT_IN, _problem)
