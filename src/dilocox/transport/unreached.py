"""The error that is raised when a peer group cannot be formed."""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.errors import ExchangeError


class UnreachedError(ExchangeError):
    """A peer group could not be formed. `sites`: the sites to which this rank has no link."""

    def __init__(self, text: str, sites: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.sites = list(sites)
