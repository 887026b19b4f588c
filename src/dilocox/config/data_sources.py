"""Tables `[[data.sources]]` of the run file: several sources with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from dilocox.config.base import Positive, Section
from dilocox.config.data_filter import Filter

SHARE_TOLERANCE = Fraction(1, 1000)
"""Largest difference from 1 of the sum of shares, so that three times 0.333 is accepted."""

TEXT_FORMATS = ("text", "code")
"""Formats of files that are text as a whole, without records and fields."""

CONVERSATIONS = ("chat", "instruction", "preference")
"""Formats of `[data]` whose records hold conversations."""

OWN_KEYS = ("name", "source", "weight", "epochs")
"""Keys of a source that have no counterpart in `[data]`, or another meaning there."""


class SourceSection(Section):
    """`[[data.sources]]`: one of several sources; keys that are not set are those of `[data]`.

    Numbered sequences are dealt to the sources by their weights, and no sequence holds text of two
    sources. The names, weights and epochs are part of the token files' digest. See
    [several sources](your-model.md#several-sources).
    """

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,30}$",
            description="up to 31 letters, digits, dots, hyphens and underscores, with a letter or "
            "digit first",
        ),
    ]
    """Name of the source, as `dilocox data show` and the manifest have it."""
    source: str | list[str]
    """Text, written like `data.source`."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Weight of the source among all sequences. Numbers of 1 or more are ratios: 3 and 1 are three
    quarters and one quarter. Numbers that are all below 1 are shares and must sum to 1. If no
    source has a weight, each source has the share of its size."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Most passes over the source, such as 2 or 0.5. A source that has reached them drops out, and
    the other sources share its weight. At least one source must be without."""
    format: Literal["auto", "text", "jsonl", "csv", "parquet", "code", "hub"] | None = None
    """Like `data.format`, for this source."""
    text_field: str | None = None
    """Like `data.text_field`, for this source."""
    subset: str | None = None
    """Like `data.subset`, for this source."""
    split: str | None = None
    """Hub datasets: the split."""
    revision: str | None = None
    """Like `data.revision`, for this source."""
    licence: str | None = None
    """Like `data.licence`, for this source."""
    filter: Filter | None = None
    """Like `data.filter`, for this source; `{}`: all records are taken."""
    max_documents: Positive | None = None
    """Like `data.max_documents`, for this source."""
    validation_fraction: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
    """Fraction of the source's documents that are held out. 0: none, so no held-out
    sequence is of this source."""
    validation_source: str | list[str] | None = None
    """Separate held-out text of the source, instead of a fraction."""
    validation_split: str | None = None
    """Like `data.validation_split`, for this source."""
    validation_filter: Filter | None = None
    """Like `data.validation_filter`, for this source."""

    @field_validator("format", mode="before")
    @classmethod
    def _of_text(cls, value: object) -> object:
        if value in CONVERSATIONS:
            raise ValueError(
                f'"{value}" is a format of all sources or of none: set data.format = "{value}", '
                "and leave it out here"
            )
        return value

    def overrides(self) -> dict[str, Any]:
        """Returns the keys of `[data]` that this source sets, by name."""
        given = self.model_dump(exclude_none=True)
        return {key: value for key, value in given.items() if key not in OWN_KEYS}


def sources_problem(
    sources: Sequence[SourceSection], usual_format: str, held_out_apart: bool
) -> str | None:
    """Returns what is wrong with the tables `[[data.sources]]`, or None.

    Args:
        sources: the tables.
        usual_format: `data.format`.
        held_out_apart: whether `data.validation_source` is set.
    """
    if not sources:
        return "sources is empty: add a table [[data.sources]], or leave the key out"
    name, number = Counter(each.name for each in sources).most_common(1)[0]
    if number > 1:
        return f'sources has {number} tables named "{name}": give each a name of its own'
    for each in sources:
        conversations = usual_format in CONVERSATIONS
        if conversations and each.format is not None:
            return (
                f'sources "{each.name}" sets format "{each.format}" beside data.format '
                f'"{usual_format}": text and conversations cannot be mixed; leave it out'
            )
        # Whether a source of conversations is on the hub is decided by its name.
        hub = conversations or (each.format or usual_format) == "hub"
        for key in ("split", "subset", "validation_split"):
            if getattr(each, key) is not None and not hub:
                return (
                    f'sources "{each.name}" sets {key}, which hub datasets alone have: '
                    'leave it out, or set format = "hub"'
                )
        if each.filter and (each.format or usual_format) in TEXT_FORMATS:
            return (
                f'sources "{each.name}" sets filter, which needs records with fields, and format '
                f'"{each.format or usual_format}" has none: leave it out'
            )
        if each.validation_filter is not None and each.validation_source is None:
            return (
                f'sources "{each.name}" sets validation_filter without validation_source: set it, '
                "or leave validation_filter out"
            )
        if each.validation_source is not None and each.validation_fraction is not None:
            return (
                f'sources "{each.name}" sets validation_source and validation_fraction: '
                "leave one out"
            )
        if held_out_apart and (each.validation_source or each.validation_fraction):
            own = "validation_source" if each.validation_source else "validation_fraction"
            return (
                f'sources "{each.name}" sets {own}, and data.validation_source is set for all: '
                "leave one out"
            )
    if not held_out_apart and all(
        each.validation_fraction == 0 and not each.validation_source for each in sources
    ):
        return "sources all have validation_fraction 0, so no text is held out: raise it at one"
    if all(each.epochs is not None for each in sources):
        return (
            "sources all have epochs, so the text would end before the run: leave epochs out at "
            "one source"
        )
    return _weights_problem(sources)


def _weights_problem(sources: Sequence[SourceSection]) -> str | None:
    given = [each.weight for each in sources if each.weight is not None]
    if not given:
        return None
    if len(given) < len(sources):
        name = next(each.name for each in sources if each.weight is None)
        return (
            f'sources "{name}" has no weight, others have one: give every source a weight, or none'
        )
    total = sum((Fraction(repr(weight)) for weight in given), Fraction())
    if max(given) < 1 and abs(total - 1) > SHARE_TOLERANCE:
        listed = " + ".join(f"{weight:g}" for weight in given)
        return (
            f"sources have the weights {listed}, which sum to {float(total):g}: shares below 1 "
            "must sum to 1; to give ratios, write numbers of 1 or more"
        )
    return None
