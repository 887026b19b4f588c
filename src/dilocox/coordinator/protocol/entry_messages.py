"""Requests that compare the state fetched by an entering site with the state of active sites.

`messages` describes the protocol.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.message_types import Digest, Done, RankId
from dilocox.coordinator.protocol.round_plan import Count, Message

MOST = 1024
"""Largest number of pieces in one request."""


class PieceDigest(Message):
    """Digest of one version of a piece: SHA-256 of the state that must be equal at all sites
    (`FragmentState.digest`)."""

    piece: Annotated[int, Field(ge=0, lt=65536)]
    landed: Annotated[int, Field(ge=-1, lt=1 << 31)]
    """Version of the piece: round of the exchange that landed on it last. -1: no exchange has
    landed since the run started."""
    codec: Annotated[str, Field(max_length=64)]
    """Low-rank codec to which the piece's warm start belongs; empty if there is no warm start."""
    sha256: Digest


Pieces = Annotated[list[PieceDigest], Field(max_length=MOST)]


class ShowPiecesRequest(Message, Call[Done]):
    """`pieces/show`: reports the pieces that this rank of an active site holds while another site
    enters."""

    path: ClassVar[str] = "pieces/show"
    rank: RankId
    pieces: Pieces


class CheckPiecesReply(Message):
    """Answer for the pieces of a `CheckPiecesRequest`. A piece in neither list has to wait until
    more sites have reported digests."""

    same: list[int]
    """Pieces of which most active sites hold the same digest."""
    different: list[int]
    """Pieces of which most active sites hold another digest, or for which no digest has a
    majority."""
    donor: SiteName | None
    """The site from which the entering site fetches now. None: no donor is left."""


class CheckPiecesRequest(Message, Call[CheckPiecesReply]):
    """`pieces/check`: asks whether the pieces that this rank of an entering site fetched from
    `donor` equal those of most active sites."""

    path: ClassVar[str] = "pieces/check"
    rank: RankId
    donor: SiteName
    pieces: Pieces
    renewals: Count = 0
    """How often the site had been told to fetch again when the fetch from `donor` began."""
    all_came: bool = False
    """True if no piece is still being transferred."""
