"""Searches texts for secrets, in the forms in which a program may write them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path


def private_part(text: str) -> str:
    """A line from the middle of a private key in PEM."""
    block = re.search(r"-----BEGIN [A-Z ]*PRIVATE KEY-----\n(.*?)-----END", text, re.DOTALL)
    assert block is not None
    return max(block[1].split(), key=len)


def forms(secret: str) -> set[bytes]:
    """A secret as it may be written: as text, and as the bytes and base64 behind its hex digits."""
    found = {secret.encode()}
    if re.fullmatch("[0-9a-f]{64}", secret):
        raw = bytes.fromhex(secret)
        found |= {raw, base64.b64encode(raw), secret.upper().encode()}
    return found


def leaks(secrets: Mapping[str, str], texts: Mapping[str, bytes]) -> set[tuple[str, str]]:
    """(name of a secret, name of a text that has it)."""
    return {
        (name, where)
        for name, secret in secrets.items()
        for where, text in texts.items()
        if any(form in text for form in forms(secret))
    }


def coordinator_secrets(run: Path) -> dict[Path, str]:
    """The secrets in the coordinator's folder of a run, by their own files."""
    place = run / "coordinator"
    names = ("token-secret", "record-key", *(f"tokens/{each.name}" for each in
             sorted((place / "tokens").iterdir())))  # fmt: skip
    found = {place / name: (place / name).read_text().strip() for name in names}
    for name in ("authority.pem", "server.pem"):
        found[place / name] = private_part((place / name).read_text())
    operator = json.loads((place / "operator.json").read_text())
    found[place / "operator.json"] = private_part(operator["key"])
    return found
