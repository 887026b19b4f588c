"""The error of a group that could not be formed."""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.errors import ExchangeError


class UnreachedError(ExchangeError):
    """A group could not be formed. `sites`: to whom this rank has no link."""

    def __init__(self, text: str, sites: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.sites = list(sites)
