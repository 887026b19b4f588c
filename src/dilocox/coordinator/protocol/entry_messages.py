"""What ranks say of the state that a site enters with. Part of the messages of `messages`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.messages import Digest, RankId
from dilocox.coordinator.protocol.round_plan import Count, Message

MOST = 1024
"""Pieces of one request, at most."""


class PieceDigest(Message):
    """SHA-256 of what all sites agree on of one piece (`FragmentState.digest`), in one version."""

    piece: Annotated[int, Field(ge=0, lt=65536)]
    landed: Annotated[int, Field(ge=-1, lt=1 << 31)]
    """Round of the exchange that landed on it last; -1: none since the run started."""
    codec: Annotated[str, Field(max_length=64)]
    """Low-rank codec that its warm start is of; empty if there is none."""
    sha256: Digest


Pieces = Annotated[list[PieceDigest], Field(max_length=MOST)]


class ShowPiecesRequest(Message):
    """`pieces/show`: what this rank of an active site holds, while another site enters."""

    rank: RankId
    pieces: Pieces


class CheckPiecesRequest(Message):
    """`pieces/check`: what `donor` has given to this rank of an entering site."""

    rank: RankId
    donor: SiteName
    pieces: Pieces
    renewals: Count = 0
    """How often the site was told to fetch again when `donor` began."""
    all_came: bool = False
    """Nothing is on its way any more."""


class CheckPiecesReply(Message):
    """Of the pieces asked for; who is in neither list has to wait for more sites' digests."""

    same: list[int]
    """Most active sites hold the same."""
    different: list[int]
    """Most active sites hold something else, or no majority of them holds the same."""
    donor: SiteName | None
    """From whom the site enters now; none: no donor is left."""
