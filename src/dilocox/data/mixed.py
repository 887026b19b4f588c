"""Numbered sequences of several sources: their numbers are dealt by the sources' weights."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dilocox.data.mixture import Mixture
from dilocox.data.rows import RowBatch, joined
from dilocox.errors import DataError

Numbers = npt.NDArray[np.int64]


class Space(Protocol):
    """The numbered sequences of one source."""

    sequences_per_epoch: int

    def positions(self, start: int, count: int) -> Numbers:
        """Returns the sequence of the source behind each number: int64 [count]."""

    def read(self, start: int, count: int) -> Numbers | RowBatch:
        """Returns the sequences of the numbers: int64 [count, sequence_length + 1], or rows."""


class MixedSpace:
    """The numbered sequences of all sources, whose order is that of the token files' parts.

    The k-th number that is dealt to a source is number k of the source's own space.
    """

    def __init__(self, terms: Sequence[dict[str, Any]], spaces: Sequence[Space]) -> None:
        """Prepare to deal.

        Args:
            terms: the manifest's entry of each source.
            spaces: numbered sequences of each source, in the same order.

        Raises:
            DataError: if the epochs of a source are less than one sequence.
        """
        self._spaces = spaces
        sizes = [space.sequences_per_epoch for space in spaces]
        self.sequences_per_epoch = sum(sizes)
        self._bases = np.cumsum([0, *sizes[:-1]])
        self.mixture = mixture_of(terms, sizes)

    def ranges(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns each source's own range (start, count) in [start, start + count)."""
        before, after = self.mixture.counts(start), self.mixture.counts(start + count)
        return [(a, b - a) for a, b in zip(before, after, strict=True)]

    def positions(self, start: int, count: int) -> Numbers:
        """Returns the sequence behind each number: int64 [count].

        The sequences of the first source come first, then those of the second, and so on.
        """
        parts = zip(self._bases, self._spaces, self.ranges(start, count), strict=True)
        found = [base + space.positions(*own) for base, space, own in parts]
        return np.concatenate(found)[self.order(start, count)]

    def read(self, start: int, count: int) -> Numbers | RowBatch:
        """Returns the sequences of the numbers: int64 [count, sequence_length + 1], or rows."""
        parts = zip(self._spaces, self.ranges(start, count), strict=True)
        found = joined([space.read(*own) for space, own in parts])
        order = self.order(start, count)
        return found.take(order) if isinstance(found, RowBatch) else found[order]

    def order(self, start: int, count: int) -> Numbers:
        """Returns, for each number, its place in the sources' own ranges one after another."""
        behind = np.argsort(self.mixture.sources(start, count), kind="stable")
        order = np.empty(count, dtype=np.int64)
        order[behind] = np.arange(count)
        return order


def mixture_of(terms: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Mixture:
    """Returns how numbers are dealt to sources with `sizes` sequences per epoch.

    Without weights, each source has the share of its size. Raises `DataError` if the epochs of a
    source are less than one sequence.
    """
    limits: list[int | None] = []
    for each, size in zip(terms, sizes, strict=True):
        if each["epochs"] is None:
            limits.append(None)
            continue
        limits.append(int(Fraction(repr(each["epochs"])) * size))
        if not limits[-1]:
            raise DataError(
                f'data.sources "{each["name"]}": {each["epochs"]} epochs of its {size:,} sequences '
                "are less than one sequence; raise epochs or lower data.sequence_length"
            )
    weights = [each["weight"] for each in terms]
    return Mixture(sizes if weights[0] is None else weights, limits)


def held_out_shares(
    content: dict[str, Any], names: Sequence[str], sizes: Sequence[int], limit: int
) -> list[int]:
    """Returns how many held-out sequences each source gives: one at least, and its share by weight.

    Args:
        content: the manifest's content.
        names: sources with held-out text.
        sizes: held-out sequences of each of them.
        limit: most sequences of all, if there are not more sources.
    """
    given = {each["name"]: each["weight"] for each in content["mixture"]}
    weights = [given[name] for name in names]
    if None in weights:
        weights = list(sizes)
    dealt = Mixture(weights, sizes)
    counts = dealt.counts(min(limit, sum(sizes)))
    return [max(1, count) for count in counts]


def trained_terms(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the manifest's entries of the sources that are trained on."""
    return [each for each in content["mixture"] if each["trained"]]


def mixture_lines(content: dict[str, Any]) -> list[str]:
    """Returns a line for each of several sources, for display."""
    lines = []
    for number, each in enumerate(content.get("mixture", ())):
        texts = [] if each["weight"] is None else [f"weight {each['weight']:g}"]
        if each["epochs"] is not None:
            texts.append(f"{each['epochs']:g} epochs at most")
        for split, part in content["splits"].items():
            own = [item["tokens"] for item in part["parts"] if item["name"] == each["name"]]
            texts += [f"{tokens:,} tokens in {split}" for tokens in own]
        lines.append(f"{'mixture' if not number else '':<11}  {each['name']}: {', '.join(texts)}")
    return lines
