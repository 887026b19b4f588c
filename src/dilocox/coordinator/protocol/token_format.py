"""The form of a join token, which the operator hands to a site."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dilocox.errors import JoinError


@dataclass(frozen=True)
class JoinToken:
    """Join token `dilocox1-FINGERPRINT-SECRET` in hex, which the operator hands to a site.

    `fingerprint` is the SHA-256 of the coordinator's certificate.
    """

    fingerprint: str
    secret: str

    def __str__(self) -> str:
        return f"dilocox1-{self.fingerprint}-{self.secret}"

    def __repr__(self) -> str:
        return f"JoinToken({self.fingerprint[:8]}...)"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Return the token that `text` holds. Raises `JoinError` if `text` is not a token."""
        match = re.fullmatch(r"dilocox1-([0-9a-f]{64})-([0-9a-f]{32})", text.strip())
        if match is None:
            raise JoinError(
                "token: not a join token; copy coordinator/tokens/SITE of the coordinator's run "
                "folder"
            )
        return cls(match[1], match[2])
