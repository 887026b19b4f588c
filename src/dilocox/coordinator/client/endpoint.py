"""Address of a run's coordinator, from the ready file that the coordinator writes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """Address of a coordinator, and the secrets with which to join or operate its run."""

    url: str
    """`https://HOST:PORT`, with the address that other machines use."""
    tokens: dict[str, str]
    """Join tokens by site: those of all sites at the coordinator, only its own at a site."""
    operator: str
    """Path of the file with the `Identity` of the coordinator's own tools (status, stop)."""
    key_file: Path | None = None
    """Path of the site's key file. None: in the site's run folder."""

    @classmethod
    def at(cls, address: str, site: str, token: str, key_file: Path | None = None) -> Endpoint:
        """Return the endpoint of a site that joins the coordinator at `address`, HOST:PORT."""
        return cls(f"https://{address.removeprefix('https://')}", {site: token}, "", key_file)

    def of(self, site: str) -> Endpoint:
        """Return the endpoint with the token of one site only."""
        return replace(self, tokens={site: self.tokens[site]})

    def to_json(self) -> dict[str, Any]:
        """Return the fields that `load` reads, as JSON values."""
        return {"url": self.url, "tokens": self.tokens, "operator": self.operator}

    @classmethod
    def load(cls, path: str | Path) -> Endpoint:
        """Read a ready file that `serve` wrote.

        If the operator's identity lies beside the file, this copy is used, so that a moved or
        mounted folder works.
        """
        said = json.loads(Path(path).read_text(encoding="utf-8"))
        beside = Path(path).with_name(Path(said["operator"]).name)
        operator = beside if beside.exists() else said["operator"]
        # The file of an earlier dilocox has one token for all sites, which is no longer valid.
        return cls(said["url"], dict(said.get("tokens", {})), str(operator))
