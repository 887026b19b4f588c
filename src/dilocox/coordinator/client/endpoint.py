"""Where a run's coordinator listens, as the file says that the coordinator writes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """Where a coordinator listens and how to get in."""

    url: str
    """`https://HOST:PORT` under the address that other machines use."""
    tokens: dict[str, str]
    """Join tokens by site: all of them at the coordinator, its own at a site."""
    operator: str
    """File with the `Identity` of the coordinator's own tools (status, stop)."""
    key_file: Path | None = None
    """Of a site: where it keeps its key; None for its run folder."""

    def of(self, site: str) -> Endpoint:
        """What one site has to know."""
        return replace(self, tokens={site: self.tokens[site]})

    def to_json(self) -> dict[str, Any]:
        """What of it is read by `load`."""
        return {"url": self.url, "tokens": self.tokens, "operator": self.operator}

    @classmethod
    def load(cls, path: str | Path) -> Endpoint:
        """Read a ready file that `serve` wrote. The operator's identity may lie beside the file,
        wherever the folder was moved to or is looked at from."""
        said = json.loads(Path(path).read_text(encoding="utf-8"))
        beside = Path(path).with_name(Path(said["operator"]).name)
        operator = beside if beside.exists() else said["operator"]
        # One of an earlier dilocox has the token of all sites, which admits nobody any more.
        return cls(said["url"], dict(said.get("tokens", {})), str(operator))
