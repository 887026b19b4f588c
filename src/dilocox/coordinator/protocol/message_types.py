"""Parts of several messages: ids, digests, and the reply without data.

`messages` describes the protocol and re-exports these classes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.exchange_key import KEY_PATTERN
from dilocox.coordinator.protocol.round_plan import Message

Small = Annotated[int, Field(ge=0, le=65535)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Sites = Annotated[list[SiteName], Field(max_length=4096)]
KeyText = Annotated[str, Field(pattern=KEY_PATTERN)]
SignedText = Annotated[str, Field(max_length=8192)]


class RankId(Message):
    """One process of one site."""

    site: SiteName
    stage: Small
    shard: Small

    def __str__(self) -> str:
        return f"{self.site} stage {self.stage} shard {self.shard}"


class Done(Message):
    """Confirms that the request is recorded; carries no data."""


class ReportReply(Message):
    """Reply to a report of a site."""

    kept: bool = True
    """Whether the report is in the run's metrics. A site signs no other report."""

    @model_serializer(mode="wrap")
    def _short(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the field out if the report is kept: an older site does not know the field."""
        return {} if self.kept else usual(self)
