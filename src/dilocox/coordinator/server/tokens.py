"""Join tokens: one per site, derived from a secret that never leaves the coordinator's folder.

A token admits its own site's name alone: token = HMAC-SHA-256(secret, label, site, issue), cut to
128 bits (RFC 2104). A new issue of a site's token ends the one before.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

from dilocox.coordinator.identity import write_private
from dilocox.coordinator.protocol.token_format import JoinToken

FOLDER = "tokens"
"""In the coordinator's folder: a file for every site, readable by its owner, to be handed out."""
SECRET = "token-secret"  # noqa: S105  (a file's name)
"""Beside it, readable by its owner: what tokens are derived from, hex. It is nobody's token."""
SHARED_SECRET, SHARED_TOKEN = "secret", "token"
"""Of a folder from a dilocox with one token for all sites: its secret, and that token."""
_LABEL = b"dilocox join token 1"


class SiteTokens:
    """The join tokens of one run."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Go on with the secret in `folder`, or make one. `fingerprint`: of the server's
        certificate, SHA-256, hex.

        A shared token of an earlier dilocox is known to all of its sites. So nothing is derived
        from it, and it admits nobody.
        """
        path, shared = folder / SECRET, folder / SHARED_SECRET
        if not path.exists():
            write_private(path, secrets.token_hex(32).encode())
        self._folder, self.fingerprint = folder, fingerprint
        self._secret = bytes.fromhex(path.read_text().strip())
        self._shared = (
            str(JoinToken(fingerprint, shared.read_text().strip())) if shared.exists() else None
        )

    def of(self, site: str, issue: int = 0) -> JoinToken:
        """The token of `site`. `issue`: how many were made void before."""
        said = b"\0".join((_LABEL, site.encode(), str(issue).encode()))
        mac = hmac.new(self._secret, said, hashlib.sha256)
        return JoinToken(self.fingerprint, mac.hexdigest()[:32])

    def holder(self, token: str, issues: Mapping[str, int]) -> str | None:
        """The site that `token` admits; None for no token of this run that is in force.

        `issues`: by name, of all sites.
        """
        found = [name for name, issue in issues.items() if _same(token, str(self.of(name, issue)))]
        return found[0] if found else None

    def unknown(self, token: str, site: str) -> str:
        """Why a token without a holder does not admit `site`, in one line.

        To a caller without any token the line tells nothing about the run.
        """
        why = "not this run's, or not in force any more"
        if self._shared is not None and _same(token, self._shared):
            why = "the one for all sites of an earlier dilocox; every site has its own now"
        return f"token: {why}; {mend(site)}"

    def write(self, issues: Mapping[str, int]) -> None:
        """Write the files that are handed out: for these sites, and for no others."""
        place = self._folder / FOLDER
        place.mkdir(mode=0o700, exist_ok=True)
        for name, issue in issues.items():
            write_private(place / name, f"{self.of(name, issue)}\n".encode())
        for path in place.iterdir():
            if path.name not in issues:
                path.unlink()
        (self._folder / SHARED_TOKEN).unlink(missing_ok=True)


def mend(site: str) -> str:
    """Where the token of `site` is taken from."""
    return f"copy the file coordinator/tokens/{site} of its run folder"


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
