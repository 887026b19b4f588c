"""Who signs a rank's statements."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.coordinator.protocol.messages import RankId
from dilocox.record.log.statements import Signer


@dataclass(frozen=True)
class SigningIdentity:
    """The run, rank and key with which statements are signed."""

    run: str
    rank: RankId
    signer: Signer
