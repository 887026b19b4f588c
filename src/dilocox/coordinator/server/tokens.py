"""Join tokens: one per site, derived from a secret that never leaves the coordinator's folder.

A token admits only the name of its own site. Token = HMAC-SHA-256(secret, label, site, issue), cut
to 128 bits (RFC 2104). A new issue of a site's token makes the earlier one void.
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
"""Folder in the coordinator's folder with one token file per site, which the operator hands out.
Only the owner can read the files."""
SECRET = "token-secret"  # noqa: S105  (a file's name)
"""File in the coordinator's folder with the secret of all tokens, hex; only its owner can read it.
The secret itself is not a token."""
SHARED_SECRET, SHARED_TOKEN = "secret", "token"
"""Files of an earlier dilocox with one token for all sites: the secret and the token."""
_LABEL, _SEAL = b"dilocox join token 1", b"dilocox position 1"


class SiteTokens:
    """The join tokens of one run."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Read the secret in `folder`, or make one.

        `fingerprint` is the SHA-256 of the server's certificate, hex. A shared token of an earlier
        dilocox is known to all of its sites, so no token is derived from it and it admits no site.
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
        """Return the token of `site`. `issue` is the number of its tokens that are void."""
        said = b"\0".join((_LABEL, site.encode(), str(issue).encode()))
        mac = hmac.new(self._secret, said, hashlib.sha256)
        return JoinToken(self.fingerprint, mac.hexdigest()[:32])

    def seal(self, text: str) -> str:
        """Return a proof, hex, that a coordinator of this run has said `text`."""
        said = b"\0".join((_SEAL, text.encode()))
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()

    def is_sealed(self, text: str, seal: str) -> bool:
        """Return whether `seal` is that of `text`."""
        return _same(self.seal(text), seal)

    def holder(self, token: str, issues: Mapping[str, int]) -> str | None:
        """Return the site that `token` admits, or None if it is not a valid token of this run.

        `issues` holds the issue of the valid token by site.
        """
        found = [name for name, issue in issues.items() if _same(token, str(self.of(name, issue)))]
        return found[0] if found else None

    def unknown(self, token: str, site: str) -> str:
        """Return one line that says why an invalid token does not admit `site`.

        The line tells a caller without any token nothing about the run.
        """
        why = "not a token of this run, or no longer valid"
        if self._shared is not None and _same(token, self._shared):
            why = "a shared token of an earlier dilocox; every site has its own token now"
        return f"token: {why}; {mend(site)}"

    def write(self, issues: Mapping[str, int]) -> None:
        """Write the token files of the sites in `issues`, and delete those of all other sites."""
        place = self._folder / FOLDER
        place.mkdir(mode=0o700, exist_ok=True)
        for name, issue in issues.items():
            write_private(place / name, f"{self.of(name, issue)}\n".encode())
        for path in place.iterdir():
            if path.name not in issues:
                path.unlink()
        (self._folder / SHARED_TOKEN).unlink(missing_ok=True)


def mend(site: str) -> str:
    """Return the part of a message that says where to get the token of `site`."""
    return f"copy the file coordinator/tokens/{site} from the coordinator's run folder"


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
