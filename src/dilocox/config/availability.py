"""Section `[availability]` of the run file: pieces of payloads, one at each site."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from dilocox.config.base import Section

LEAST_SITES = 3
"""Fewest sites of a run whose payloads are cut. Of two sites each has all payloads anyway."""


class AvailabilitySection(Section):
    """`[availability]`: pieces of all payloads, one at each site ([availability](availability.md)).

    The stores of any `needed` sites give the payloads back. It needs the extra `[availability]` at
    every site. Training never waits for it.
    """

    needed: Annotated[int, Field(ge=2, le=255)] | None = None
    """Number of sites whose pieces give the payloads back; at most two thirds of the sites. If not
    set, it is half of the sites, rounded down, and at least 2."""
    keep_whole: bool = True
    """Keep whole payloads in this site's store, too. If false, the site removes a round's payloads
    once two thirds of the sites have signed that they hold their pieces. Its store then holds
    1/`needed` of the payloads' bytes. Sites need not agree on this key."""

    def agreed(self, sites: Collection[str]) -> dict[str, Any]:
        """Return the keys that all sites sign, each with its value."""
        return {"needed": self.code(sites).needed}

    def code(self, sites: Collection[str]) -> PieceCode:
        """Return the code over a run's `sites`."""
        needed = max(2, len(sites) // 2) if self.needed is None else self.needed
        return PieceCode(needed, tuple(sorted(sites)))


@dataclass(frozen=True)
class PieceCode:
    """Which site has which piece, and how many pieces suffice."""

    needed: int
    sites: tuple[str, ...]
    """Names of all sites, sorted. Site number i has piece i."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.sites)

    @property
    def quorum(self) -> int:
        """Number of sites that make a certificate: two thirds, rounded up."""
        return -(-2 * self.pieces // 3)

    @classmethod
    def of_run(cls, config: Mapping[str, Any]) -> PieceCode | None:
        """Return the code of a run file that all sites have signed; None if it has no section."""
        section = config.get("availability")
        if section is None:
            return None
        return cls(int(section["needed"]), tuple(sorted(map(str, config["sites"]))))


def availability_problem(
    availability: AvailabilitySection | None,
    sites: Collection[str],
    recorded: bool,
    exchange: str,
    keep: int | str,
) -> str | None:
    """Return why a run cannot cut its payloads as `[availability]` says, with the remedy, or None.

    Args:
        availability: The section; None if the run file has none.
        sites: Names of the run's sites.
        recorded: True if the run writes a record with payloads.
        exchange: `outer.exchange`.
        keep: `record.keep`.
    """
    if availability is None:
        return None
    code = availability.code(sites)
    if not recorded:
        return (
            "availability: cuts the payloads of the record: set record.enabled and an outer.method "
            "with outer steps, or leave [availability] out"
        )
    if exchange != "gather":
        return (
            f'availability: with outer.exchange "{exchange}" no site has all payloads of a round, '
            'and sites would have to send more: set it to "gather", or leave [availability] out'
        )
    if code.pieces < LEAST_SITES:
        return (
            f"availability: cuts payloads over at least {LEAST_SITES} sites, this run has "
            f"{code.pieces}, and each keeps all payloads: leave [availability] out"
        )
    if code.needed > code.quorum:
        return (
            f"availability.needed {code.needed}: is above two thirds of the {code.pieces} sites, "
            f"whose signatures make a certificate: give at most {code.quorum}"
        )
    if not availability.keep_whole and keep not in ("auto", "all"):
        return (
            f"availability.keep_whole = false removes payloads, and record.keep = {keep!r} does, "
            'too: set record.keep to "all", or leave keep_whole out'
        )
    return None
