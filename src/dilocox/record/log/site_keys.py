"""Signing keys of a run's sites, and the rules under which a site may get a new key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.errors import RecordError


@dataclass
class SiteKeys:
    """The keys of all sites, collected from the record's enrolments in order."""

    kept: bool = False
    """True if the coordinator required every site to keep its key. False in records of versions
    in which a site had a new key at every start."""
    known: dict[str, list[str]] = field(default_factory=dict)
    """Keys by site, hex, in order of enrolment."""
    _free: set[str] = field(default_factory=set)
    """Sites that may enrol with a new key, because the operator has allowed it."""

    def enrolled(self, site: str, key: str) -> None:
        """Process an enrolment. Raises `RecordError` for a new key without permission."""
        keys = self.known.setdefault(site, [])
        if key in keys[-1:]:
            return
        if self.kept and keys and site not in self._free:
            raise RecordError(
                f"site {site} enrols with the key {key[:12]}, and not with its own, {keys[-1][:12]}"
            )
        self._free.discard(site)
        keys.append(key)

    def standing(self, said: Mapping[str, Any]) -> None:
        """Process an operator's standing statement: `unban` and `forget-key` allow a new key."""
        if said["change"] in ("unban", "forget-key"):
            self._free.add(str(said["site"]))
