"""By which keys the sites of a run have signed, and what lets a name have another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.errors import RecordError


@dataclass
class SiteKeys:
    """Keys of the record, as its enrolments name them one after the other."""

    kept: bool = False
    """The coordinator has held every name to its key; else sites took a new one for every start."""
    known: dict[str, list[str]] = field(default_factory=dict)
    """By site: its keys, hex, in order."""
    _free: set[str] = field(default_factory=set)
    """Sites whose next key may be another one, by the operator's word."""

    def enrolled(self, site: str, key: str) -> None:
        """Take an enrolment. Raises `RecordError` for another key that nothing lets it have."""
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
        """Take what the operator says of a name."""
        if said["change"] in ("unban", "forget-key"):
            self._free.add(str(said["site"]))
