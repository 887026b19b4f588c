"""The form of `add-checkpoint` requests (c2sp.org/tlog-witness). Pure functions."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from dilocox.tools.witness.witness import MOST_PROOF, RefusedError

MOST_BYTES = 1 << 16
"""Limit in bytes of a request, and of an answer."""


def request_body(old: int, proof: Sequence[bytes], note: str) -> bytes:
    """Return the body that asks a witness for a cosignature.

    Args:
        old: Size of the witness's newest checkpoint of the log.
        proof: Consistency proof from that size to the note's.
        note: The log's signed checkpoint.
    """
    lines = [f"old {old}", *(base64.b64encode(each).decode() for each in proof)]
    return ("\n".join(lines) + "\n\n" + note).encode()


def parse_request(body: bytes) -> tuple[int, list[bytes], str]:
    """Return old size, proof and note of a request. Raises `RefusedError` (400) if malformed."""
    try:
        head, separator, note = body.decode().partition("\n\n")
    except UnicodeDecodeError:
        raise RefusedError(400, "the request is not text in UTF-8") from None
    first, *rest = head.split("\n")
    match = re.fullmatch(r"old (0|[1-9][0-9]{0,18})", first)
    if not separator or match is None:
        raise RefusedError(400, "a request is `old SIZE`, a proof, an empty line, a checkpoint")
    if len(rest) > MOST_PROOF:
        raise RefusedError(400, f"a proof has at most {MOST_PROOF} hashes")
    try:
        proof = [base64.b64decode(line, validate=True) for line in rest]
    except (binascii.Error, ValueError):
        proof = [b""]
    if any(len(each) != 32 for each in proof):
        raise RefusedError(400, "a line of the proof is not a hash in base64")
    return int(match[1]), proof, note
