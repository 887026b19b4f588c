"""The codec of a fragment: a list of phases, of which the last one sends the payload."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.compressor import Part
from dilocox.compression.frame import FramePart
from dilocox.compression.lowrank.codec import LowRank


class FragmentCodec(Protocol):
    """Encodes buffers of one geometry.

    A `Compressor` has the payload as its only phase. `LowRank` has two phases before the payload,
    in which the sites agree on a basis.
    """

    @property
    def name(self) -> str:
        """Canonical spec."""
        ...

    @property
    def identifier(self) -> int:
        """Number of the payload in the frame header."""
        ...

    @property
    def geometry(self) -> Geometry:
        """Tensors of the buffers."""
        ...

    @property
    def moments(self) -> Tensor | None:
        """Row means of second moments that follow each payload, uint8. May be None."""
        ...

    @property
    def phases(self) -> tuple[FramePart, ...]:
        """Properties of the message of each phase, in order. The last message is the payload."""
        ...

    @property
    def agreement(self) -> LowRank | None:
        """Computes the phases in which sites agree on a basis. None: the payload needs no basis."""
        ...

    def part(self, start: int, end: int, seed: int = 0, basis: Tensor | None = None) -> Part:
        """Return the part with values [start, end) of the buffer; both are multiples of 128.

        Args:
            start: first value of the part.
            end: end of the part.
            seed: equal at all sites, different in each exchange.
            basis: the basis that the sites have agreed on. None for a codec without `agreement`.

        Raises:
            ExchangeError: this codec cannot encode that part of the buffer, or needs a basis.
        """
        ...

    def carrying(self, moments: Tensor) -> FragmentCodec:
        """Return a copy whose payloads carry `moments`, uint8.

        Raises `ExchangeError` if dtype or shape do not fit, or if this codec carries no moments.
        """
        ...
