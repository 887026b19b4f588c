"""The kinds of codecs: one record for each says all that the product knows of the kind.

The records of the built-in kinds stand below; other packages add theirs with `register_codec` or
an entry point of the group `dilocox.codecs` (docs/extending.md). Nothing here needs torch: a
record names what makes the codec, `dilocox.compression.registry` calls it.
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
"""Makes a `dilocox.compression.Codec` of (number, seed, place): the spec's number, 0 of a kind
without; a seed that is the same at all sites and new for every exchange; and where in the
fragment's buffer the values begin."""


@dataclass(frozen=True)
class CodecNumber:
    """The whole number that stands behind a kind's name: the 64 of `topk:64`."""

    letter: str
    """What messages call the number: the K of `topk:K`."""
    default: int
    """The number where the text has none."""
    least: int
    largest: int
    """At most 999,999."""


@dataclass(frozen=True)
class CodecKind:
    """All that the product knows of one kind of codec."""

    name: str
    """What the codec's text begins with, in run files, plans and metrics."""
    build: str | Build
    """A `Build`, or `module:function` where one is found: so the coordinator need not import
    torch. The codec's `name` is its whole text (`topk:64`)."""
    bytes_per_value: float
    """Of payloads, at most. The planner counts memory by it."""
    number: CodecNumber | None = None
    variants: tuple[str, ...] = ()
    """Words that may stand behind the number, the default one first. It is not written."""
    needs_feedback: bool = False
    """Loses too much without error feedback."""
    sparse: bool = False
    """Sends a small part of all there is; the rest waits in the residual for many rounds."""
    picks: bool = False
    """Each site picks for itself which values it sends, so that sites send different ones."""
    averages_in_parts: bool = True
    """`outer.exchange = "reduce"` may cut the buffer into parts, each with a codec of its own."""
    carries_moments: bool = True
    """Second moments may travel behind its payloads."""
    agrees_first: bool = False
    """Sites agree on a basis before they encode: of the built-in `lowrank` alone."""
    density: Callable[[int], float] | None = None
    """Values sent of every 4,096, by the number; None of a kind that sends them all."""
    loses_like: str = ""
    """The kind whose measured loss the controller takes for this one's; "": nothing is known, and
    the controller never chooses the kind by itself."""
    offered: tuple[str, ...] = ()
    """Texts that the controller may choose, least lossy first. Those of a kind that is not built
    in only in runs whose own codec is of that kind, as then every process has it."""
    computes_like: str = "int4"
    """The kind whose measured speed the planner takes where its table has none of this one."""

    def text(self, number: int, variant: str) -> str:
        """The canonical text of a codec of this kind, without moments."""
        text = self.name if self.number is None else f"{self.name}:{number}"
        return text if variant in self.variants[:1] or not variant else f"{text}:{variant}"

    @property
    def forms(self) -> tuple[str, ...]:
        """How the kind may be written, for messages."""
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
        "lowrank", f"{_AT}.lowrank.codec:LowRank", 0.3, CodecNumber("R", 8, 1, LARGEST_RANK),
        ("int4", "int8"), needs_feedback=True, sparse=True, averages_in_parts=False,
        carries_moments=False, agrees_first=True,
    ),
)  # fmt: skip
"""The kinds that come with dilocox."""


def register_codec(kind: CodecKind) -> None:
    """Make a kind of codec known to this process, and to processes that it forks.

    Call it before the run file is resolved. A process that starts afresh needs an entry point of
    the group `dilocox.codecs` instead (docs/extending.md). The same record once more changes
    nothing.

    Args:
        kind: The record of the codec's kind.

    Raises:
        ConfigError: The name is taken or no name, or fields of the record contradict each other.
    """
    _KINDS.add(kind)


def find_kind(name: str) -> CodecKind | None:
    """The kind of that name, or None. Raises `ConfigError` for a broken entry point."""
    return _KINDS.find(name)


def known_forms() -> str:
    """How codecs may be written, for messages: of kinds that this process knows, and the names of
    entry points that nobody has asked for."""
    forms = [form for kind in _KINDS.records.values() for form in kind.forms]
    return ", ".join((*forms, *_KINDS.not_loaded()))


def _problem(kind: CodecKind) -> str | None:
    """Why the record of a kind that is not built in cannot be, or None."""
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
